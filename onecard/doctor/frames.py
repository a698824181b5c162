"""What a traceback shows besides its message: the frames, Inductor's buffers, and the moment of the error."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from onecard.doctor.tensor import (
    BACKWARD,
    COMPILING,
    EVALUATION,
    FORWARD,
    LOADING,
    LOSS,
    RESUMING,
    SAMPLING,
    UPDATE,
)

MOST = 2000  # frames and buffers: more repeat each other
_ITEMS = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_FRAME = re.compile(r'File "([^"\n]{1,400})", line (\d{1,7}), in ([^\s\n]{1,120})[ \t]*\n?([^\n]{0,300})')
# Of Inductor's own code, with or without strides and dtype; a paste may end amid it.
_BUFFER = re.compile(
    r"\b(buf\d{1,6}|[a-z]\w{0,40}) ?= ?(?:torch\.)?empty_strided(?:_cuda|_cpu)?\(\s{0,20}\(([\d,\s]{1,120})\)"
    r"(?:,\s{0,20}(?:\(([\d,\s]{1,160})\)|\.{3}))?(?:,\s{0,20}(?:dtype=)?(?:torch\.)?(\w{3,16}))?"
)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str
    code: str

    @property
    def name(self) -> str:
        return self.file.replace("\\", "/").rpartition("/")[2]


@dataclass(frozen=True)
class Buffer:
    """A tensor in Inductor's code. `item` is None where its dtype is not shown."""

    name: str
    shape: tuple[int, ...]
    item: int | None
    strides: tuple[int, ...] = ()

    def bytes(self, item: int | None = None) -> int | None:
        size = self.item or item
        if size is None:
            return None
        if len(self.strides) == len(self.shape):
            return (1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))) * size
        return math.prod(self.shape) * size


def frames_of(text: str) -> list[Frame]:
    """Outermost first, as Python prints them."""
    found = []
    for at in _places(text, 'File "'):
        if match := _FRAME.match(text, at):
            found.append(Frame(match[1], int(match[2]), match[3], match[4].strip()))
    return found


def buffers_of(text: str) -> list[Buffer]:
    found = []
    for at in _places(text, "empty_strided"):
        match = _BUFFER.search(text, max(0, at - 60), at + 600)
        shape = _numbers(match[2]) if match else ()
        if match and shape and 0 not in shape:
            found.append(Buffer(match[1], shape, _ITEMS.get(match[4] or ""), _numbers(match[3] or "")))
    return found


def _places(text: str, word: str) -> list[int]:
    places: list[int] = []
    at = text.find(word)
    while at >= 0 and len(places) < MOST:
        places.append(at)
        at = text.find(word, at + 1)
    return places


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d{1,12}", text))


# What a frame says of the moment: (moment, files, functions, words of its line). The first rule that fits any
# frame decides; so an evaluation's forward is an evaluation.
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (moment, re.compile(words, re.IGNORECASE))
    for moment, words in (
        (
            RESUMING,
            r"load_state_dict|load_checkpoint|torch\.load|\bin load\b|_resume|load_optimizer"
            r"|from_pretrained",
        ),
        (SAMPLING, r"\bgenerate\b|sample\.py|\bsample\(|engine\.generate|generate_batch"),
        (
            EVALUATION,
            r"estimate_loss|evaluate_bpb|\bevaluate\b|evaluation_loop|prediction_step"
            r"|compute_loss_eval|run_eval|validate",
        ),
        (
            UPDATE,
            r"optimizer\.step|\bopt\.step|adamw?\.py|_single_tensor_adam|_multi_tensor_adam"
            r"|_fused_adam|muon|"
            r"zeropower|polar_express|clip_grad_norm|scaler\.(?:step|unscale_)|optimizer_step",
        ),
        (
            BACKWARD,
            r"\.backward\(|_engine_run_backward|run_backward|in backward|compiled_backward"
            r"|_backward_impl|checkpoint_backward",
        ),
        (LOSS, r"cross_entropy|log_softmax|nll_loss|liger|lm_head|logits"),
        (
            COMPILING,
            r"autotune|benchmark_all_choices|do_bench|_inductor/(?:select_algorithm"
            r"|runtime/triton_heuristics)",
        ),
        (LOADING, r"\.to\(device|model\.to\(|\.cuda\(\)|in _apply|init_empty|\bto_empty|\.to\(['\"]cuda"),
        (FORWARD, r"in forward|model\(|_call_impl|forward\("),
    )
)
_PROSE = 200_000  # characters in which the writer's own words are looked for
# A forward pass whose code is Inductor's, and a step of an optimizer, are distinguished by these.
_PHRASES = (
    (
        BACKWARD,
        re.compile(
            r"first backward|backward pass|pase (?:hacia atrás|backward)|Rückwärts"
            r"|Backward[- ]Pass",
            re.IGNORECASE,
        ),
    ),
    (
        EVALUATION,
        re.compile(r"during eval|at eval|validation step|evaluación|Auswertung|Evaluierung", re.IGNORECASE),
    ),
    (RESUMING, re.compile(r"resum(?:e|ing)|al reanudar|beim Fortsetzen|init_from=.?resume", re.IGNORECASE)),
)


def moment_of(frames: list[Frame], text: str = "") -> str | None:
    """Where in training the error came: by the frames, else by what the writer says; None: not shown."""
    for moment, words in _RULES:
        for frame in frames:
            if words.search(f"{frame.name} in {frame.function} {frame.code}"):
                return moment
    return next((moment for moment, words in _PHRASES if words.search(text[:_PROSE])), None)
