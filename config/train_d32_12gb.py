# nanochat d32 (October 2025: 1,879,048,192 parameters, vocabulary 65536) inside 12 GB, all of it trained.
# Its data: onecard prepare fineweb --name fineweb-65k --tokens 38B --train-tokenizer 65536
# The tight recipe: bf16 masters with stochastic rounding, int8 momentum, one value a token and layer kept,
# gradients summed in fp32 in host memory (12 GiB of it pinned, 18 in all). Low-bit: not the same numbers as
# exact training; benchmarks/ compares the two.
out_dir = "out-d32"
dataset = "fineweb-65k"
arch = "nanochat"
generation = 2025
depth = 32
vocab_size = 65536

batch_size = 4

recompute = "block"
master_weights = "bf16"
optim_states = "int8"
offload = "gradients"
vram_limit = 11.7

eval_interval = 250
eval_iters = 20
log_interval = 1
