"""What dropout costs a step of onecard's GPT-2, on the card and on the CPU.

No fused kernel takes masks that belong to a sequence, so attention is computed in the open
(model/attention.py): all T×T weights of every head, behind the diagonal too. Per token and layer, with H
heads and width D:

    products    4·D·T FLOPs forward, 10·D·T backward, where scores are computed again
    the rest    bytes for each of H·T weights over the bandwidth: softmax, masks (hashed), their gradients
    masks       of the two sums with the residual stream; compiled, they are part of kernels that run anyway

Without the compiler each operation of the hash reads and writes whole tensors: these bytes and operations
are counted in the model itself (tests/plan/test_host.py). The compiled figure is fitted to an H200's steps
(benchmarks/results/*peers*): per weight 8.2 ps up to a block of 1024, 11.9 at 2048. How much is dropped
changes nothing.
"""

from __future__ import annotations

from onecard.arch.layout import Setting
from onecard.arch.shapes import Shape

# Bytes moved for each of the T×T weights of a head, and for each value of width n_embd: of both passes, and
# of attention's forward again, with block. Longer rows than these the compiler reads several times.
_ONE_READ = 1024
_WEIGHT_BYTES = {True: (23.5, 8.0), False: (414.5, 172.7)}  # by compile
_LONGER = 1.7  # times as many, compiled
_VALUE_BYTES = {True: (0.0, 0.0), False: (556.0, 136.0)}
_PRODUCTS, _PRODUCTS_AGAIN = 14, 4  # FLOPs by width and block
# Operations of a layer's two passes, of its forward again, and of the embedding's masks.
_OPERATIONS, _OPERATIONS_AGAIN, _EMBEDDING_OPERATIONS = 290, 93, 91
_LAUNCHES, _LAUNCHES_AGAIN = 40, 15  # of a compiled layer, by the CPU
_KERNELS, _KERNELS_AGAIN = 12, 4  # of a compiled layer, small ones


def _again(setting: Setting) -> bool:
    return setting.recompute == "block"


def attention_flops(shape: Shape, setting: Setting, tokens: int) -> int:
    """Of all layers' attention in the open."""
    each = _PRODUCTS + (_PRODUCTS_AGAIN if _again(setting) else 0)
    return each * shape.n_layer * shape.n_embd * shape.block_size * tokens


def weight_bytes(shape: Shape, setting: Setting, tokens: int) -> float:
    """Bytes moved for the T×T weights of all layers."""
    both, again = _WEIGHT_BYTES[setting.compile]
    each = both + (again if _again(setting) else 0)
    if setting.compile and shape.block_size > _ONE_READ:
        each *= _LONGER
    return each * shape.n_layer * shape.n_head * shape.block_size * tokens


def value_bytes(setting: Setting) -> float:
    """Bytes moved besides, for each value of a layer's width."""
    both, again = _VALUE_BYTES[setting.compile]
    return both + (again if _again(setting) else 0)


def operations(shape: Shape, setting: Setting) -> int:
    """Of a micro-batch without the compiler, besides those that there are anyway."""
    each = _OPERATIONS + (_OPERATIONS_AGAIN if _again(setting) else 0)
    return each * shape.n_layer + _EMBEDDING_OPERATIONS


def launches(shape: Shape, setting: Setting) -> int:
    """Of a compiled micro-batch, by the CPU."""
    return shape.n_layer * (_LAUNCHES + (_LAUNCHES_AGAIN if _again(setting) else 0))


def small_kernels(shape: Shape, setting: Setting) -> int:
    return shape.n_layer * (_KERNELS + (_KERNELS_AGAIN if _again(setting) else 0))
