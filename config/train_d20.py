# nanochat d20 (2026 generation) for a 12 GB card: 897M parameters with its own tokenizer.
# Its data: onecard prepare fineweb --name fineweb-32k --tokens 5.3B --train-tokenizer 32768
# Exact: fp32 masters and momenta, in host memory (18 GiB with all else), visit the card once a step.
out_dir = "out-d20"
dataset = "fineweb-32k"
arch = "nanochat"
depth = 20

batch_size = 4
offload = "optimizer"

eval_interval = 250
eval_iters = 40
log_interval = 1
