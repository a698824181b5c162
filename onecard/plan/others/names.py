"""What tensors of trainers other than nanoGPT's are called in bills. Most names are nanogpt_step.py's."""

from onecard.language import N_

MASK = N_("attention's mask of the window")
EMBEDDED = N_("token embeddings")
VALUES = N_("value embeddings")
ROTATED = N_("rotated queries and keys")
NORMED_QK = N_("normed queries and keys")
RELU = N_("MLP after ReLU")
SQUARED = N_("MLP after squaring")
LOGITS_32 = N_("logits in float32")
CAPPED = N_("capped logits")
MOMENTUM = N_("Muon's momentum")
STACKS = N_("stacked gradients and weights of Muon")
MUON_PASSING = N_("Muon's matrices in passing")
INNER = N_("inside the MLP")
OTHERS = N_("rotary positions and other buffers")
