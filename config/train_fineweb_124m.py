# GPT-2 124M on FineWeb: the same step as train_fineweb.py, three times the model.
# Its data: onecard prepare fineweb --tokens 3.2B --dump CC-MAIN-2013-20
out_dir = "out-fineweb-124m"
dataset = "fineweb"

batch_size = 16
gradient_accumulation_steps = 32
block_size = 1024

n_layer = 12
n_head = 12
n_embd = 768

learning_rate = 6e-4
min_lr = 6e-5
max_iters = 6000
lr_decay_iters = max_iters
warmup_iters = 300

eval_interval = 500
eval_iters = 50
log_interval = 10
