# A small nanochat on this Python's own standard library, byte by byte. No download; minutes on a CPU.
#   onecard prepare stdlib
#   onecard train config/demo.py
#   onecard sample --out_dir=out-demo
out_dir = "out-demo"
dataset = "stdlib"

# The architecture of October 2025 with Muon: half the steps that GPT-2 with AdamW takes (docs/lessons.md).
arch = "nanochat"
generation = 2025

# Small and short: in a few minutes, many small steps teach more than a larger model.
n_layer = 2
n_head = 2
n_embd = 128
block_size = 128

batch_size = 4
gradient_accumulation_steps = 1
max_iters = 3000
matrix_lr = 0.01  # nanochat's 0.02 is for batches a thousand times larger

eval_interval = 1000
eval_iters = 100
log_interval = 100
compile = False  # compiling would take longer than it saves here
