# nanochat d12 (2026 generation) for a 12 GB card: 286M parameters with its own tokenizer, 1.3B tokens.
# Its data: onecard prepare fineweb --name fineweb-32k --tokens 1.4B --train-tokenizer 32768
# One dial sets the rest: width 768, 6 heads, 524,288 tokens a step, learning rates and schedule.
out_dir = "out-d12"
dataset = "fineweb-32k"
arch = "nanochat"
depth = 12

# 8 x 2048 tokens in a micro-batch; tokens a step stay as they are, whatever fits.
batch_size = 8

eval_interval = 250
eval_iters = 40
log_interval = 10
