# A 41M GPT on FineWeb: 524,288 tokens a step, 3.1B tokens in all.
# Its data: onecard prepare fineweb --tokens 3.2B --dump CC-MAIN-2013-20
out_dir = "out-fineweb"
dataset = "fineweb"

batch_size = 16
gradient_accumulation_steps = 32
block_size = 1024

n_layer = 12
n_head = 12
n_embd = 384

learning_rate = 5e-4
min_lr = 5e-5
max_iters = 6000
lr_decay_iters = max_iters
warmup_iters = 300

eval_interval = 500
eval_iters = 50
log_interval = 10
