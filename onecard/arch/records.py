"""One record per architecture: what planning needs to know of its layers, counted or measured. No torch.

A new architecture brings a shape (shapes.py), its parameters (parameters.py), a model (model/) and a record.
Tables by recompute have one figure each for 'none', 'mlp' and 'block'.
"""

from __future__ import annotations

from dataclasses import dataclass

ByRecompute = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Record:
    """The constants of one architecture's layers. The docs say where each measured figure comes from."""

    arch: str
    family: str  # whose losses it is compared with (plan/scaling.py)

    # --- memory (plan/activations.py)
    # Buffers at the peak of a layer's backward pass, in values of width n_embd and the compute dtype. Saved
    # activations and the incoming gradient are not among them; recomputed activations are. Measured on an
    # H200, within 0.2; Inductor plans about as many on a CPU (tests). GPT-2 with block has 2 for the queries'
    # gradient in fp32, which attention's backward pass sums in memory of its own: elsewhere that is not the
    # worst moment. mlp is Inductor's plan: the loss was the worst moment of every run.
    compiled_temporaries: ByRecompute
    # The same while the compiler tunes its kernels, before the first step of a run whose kernels are not in
    # the cache: it copies what a kernel would overwrite (GPT-2: 0 to 4 values were seen).
    autotune_temporaries: ByRecompute
    # Bytes more in fp16, where the residual stream is fp32.
    wide_stream: float
    # Temporaries without the compiler, in bytes per token and n_embd, by compute dtype.
    eager_temporaries: dict[str, float]

    # --- time on the card (plan/speed.py)
    # Bytes that a layer's two passes move per token and channel in bf16, matmuls not counted.
    bytes_moved: float
    # The same without the compiler, every operation's inputs and outputs counted (tests/plan/test_host.py).
    eager_bytes_moved: ByRecompute
    # Kernels of a layer's two passes that are not matmuls (counted on an H200).
    small_kernels: ByRecompute

    # --- time on the CPU (plan/host.py)
    # Without the compiler: operations of a layer's two passes, and of all else in a micro-batch. With it:
    # kernel launches of a layer.
    operations: ByRecompute
    other_operations: int
    compiled_launches: ByRecompute


def _by_recompute(none: float, mlp: float, block: float) -> ByRecompute:
    return {"none": none, "mlp": mlp, "block": block}


GPT2 = Record(
    arch="gpt2",
    family="gpt2",
    compiled_temporaries=_by_recompute(8.0, 12.0, 19.0),
    autotune_temporaries=_by_recompute(10.0, 14.0, 17.0),
    wide_stream=2.0,
    eager_temporaries={"bfloat16": 44.1, "float16": 46.1, "float32": 72.1},
    bytes_moved=132.0,
    eager_bytes_moved=_by_recompute(240.0, 260.0, 286.0),
    small_kernels=_by_recompute(26, 28, 36),
    operations=_by_recompute(86, 93, 111),
    other_operations=69,
    compiled_launches=_by_recompute(177, 185, 206),
)
NANOCHAT_2025 = Record(
    arch="nanochat-2025",
    family="nanochat",
    compiled_temporaries=_by_recompute(13.0, 14.0, 23.0),
    autotune_temporaries=_by_recompute(12.0, 16.0, 23.0),
    wide_stream=2.0,
    eager_temporaries={"bfloat16": 38.0, "float16": 38.0, "float32": 64.0},
    bytes_moved=155.0,
    eager_bytes_moved=_by_recompute(684.0, 698.0, 801.0),
    small_kernels=_by_recompute(30, 33, 43),
    operations=_by_recompute(220, 231, 282),
    other_operations=100,
    compiled_launches=_by_recompute(200, 207, 258),
)
NANOCHAT_2026 = Record(
    arch="nanochat-2026",
    family="nanochat",
    compiled_temporaries=_by_recompute(17.0, 18.0, 25.0),
    autotune_temporaries=_by_recompute(16.0, 17.0, 26.0),
    wide_stream=4.0,
    eager_temporaries={"bfloat16": 44.1, "float16": 46.1, "float32": 68.0},
    bytes_moved=250.0,
    eager_bytes_moved=_by_recompute(978.0, 992.0, 1183.0),
    small_kernels=_by_recompute(32, 35, 50),
    operations=_by_recompute(290, 301, 370),
    other_operations=175,
    compiled_launches=_by_recompute(241, 256, 341),
)
RECORDS = {record.arch: record for record in (GPT2, NANOCHAT_2025, NANOCHAT_2026)}
