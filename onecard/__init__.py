"""onecard: pretrain language models on the one graphics card you own."""

__version__ = "0.1.0"
