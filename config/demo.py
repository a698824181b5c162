# A small GPT on this Python's own standard library, byte by byte. No download, a few minutes on a CPU.
# onecard prepare stdlib && onecard train config/demo.py && onecard sample --out_dir=out-demo
out_dir = 'out-demo'
dataset = 'stdlib'

n_layer = 4
n_head = 4
n_embd = 128
block_size = 256

batch_size = 8
gradient_accumulation_steps = 1
max_iters = 200
lr_decay_iters = max_iters
warmup_iters = 20
learning_rate = 2e-3
min_lr = 1e-4
beta2 = 0.99

eval_interval = 50
eval_iters = 8
log_interval = 10
compile = False
