# A small GPT on this Python's own standard library, byte by byte. No download; minutes on two CPU cores.
#   onecard prepare stdlib
#   onecard train config/demo.py
#   onecard sample --out_dir=out-demo
out_dir = "out-demo"
dataset = "stdlib"

# Small and short: in a few minutes, many small steps teach more than a larger model (docs/logbook.md).
n_layer = 2
n_head = 4
n_embd = 128
block_size = 128

batch_size = 4
gradient_accumulation_steps = 1
max_iters = 8000
lr_decay_iters = max_iters
warmup_iters = 100
learning_rate = 4e-3
min_lr = 1e-4
beta2 = 0.99

eval_interval = 2000
eval_iters = 100
log_interval = 100
compile = False  # compiling would take longer than it saves here
