"""Log formats as patterns: the lines of nanoGPT, nanochat, onecard and the Hugging Face Trainer.

A new format brings its patterns here, and its name and how its lines are read in logs.py.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

# --- lines about steps --------------------------------------------------------------------------

NUMBER = r"[-+]?(?:nan|inf|\d[\d,_]{0,30}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?)"
# \s* everywhere: a wrapped line is joined without knowing whether a space stood at the break.
ITER_BEGINS = re.compile(r"\biter\s*\d{1,12}\s*:\s*loss", re.IGNORECASE)
ITER = re.compile(
    rf"\biter\s*(?P<step>\d{{1,12}})\s*:\s*loss\s*(?P<loss>{NUMBER})\s*,\s*time\s*(?P<ms>{NUMBER})\s*ms"
    rf"(?:\s*,\s*mfu\s*(?P<mfu>{NUMBER})\s*%)?(?:\s*,\s*(?P<speed>{NUMBER})\s*tok/s)?",
    re.IGNORECASE,
)
STEP_BEGINS = re.compile(r"\bstep\s*\d{1,12}(?:/\d{1,12})?\s*\([\d.]{1,12}%\)\s*\|")
STEP = re.compile(
    rf"\bstep\s*(?P<step>\d{{1,12}})(?:/(?P<last>\d{{1,12}}))?\s*\([\d.]{{1,12}}%\)\s*\|"
    rf"\s*loss:\s*(?P<loss>{NUMBER})\s*\|.{{0,40}}?\bdt:\s*(?P<ms>{NUMBER})\s*ms"
    rf"(?:\s*\|\s*tok/sec:\s*(?P<speed>\d[\d,]{{0,20}})\s*\|"
    rf"(?:\s*(?P<field>bf16_mfu|mfu):\s*(?P<mfu>-?\d{{1,9}}\.\d\d)(?P<rest>.{{0,120}}))?)?",
    re.IGNORECASE,
)
EVALUATED = re.compile(
    r"\bstep\s+(\d{1,12}):\s*train loss|\bStep\s+(\d{1,12})\s*\|\s*Validation bpb", re.IGNORECASE
)
BITS_PER_BYTE = re.compile(r"\bStep\s+\d{1,12}\s*\|\s*Validation bpb")
# A bar of tqdm's: `10%|█ | 500/5000 [12:34<1:53:06,  1.51s/it]`.
BAR = re.compile(
    r"\|\s*(\d{1,12})/(\d{1,12})\s*\[[^\]<]{1,20}<[^\],]{1,20},\s*(\d{1,9}\.\d{1,4})\s*(s/it|it/s)"
)
TRAINER = re.compile(rf"\{{['\"]loss['\"]:\s*['\"]?({NUMBER})", re.IGNORECASE)

# Lines just as their program writes them, which nearly all are: of a piece of text they are read all at once.
# Each is a line as ITER and STEP understand it, with the same values; any other goes through those. In front
# may stand anything but a loss, and with it another line (a timestamp, a rank); behind nanochat's no s.
_DECIMAL = r"[0-9]{1,9}\.[0-9]{1,9}"
_THOUSANDS = r"[0-9]{1,3}(?:,[0-9]{3}){0,5}"
PLAIN_ITER = re.compile(
    rf"(iter (?<!\witer )([0-9]{{1,12}}): loss ({_DECIMAL}), time ({_DECIMAL})ms, mfu (-?{_DECIMAL})%"
    rf"(?:, ({_THOUSANDS}) tok/s[^\n]*)?)$",
    re.MULTILINE,
)
PLAIN_STEP = re.compile(
    rf"(step (?<!\wstep )([0-9]{{1,12}})/([0-9]{{1,12}}) \([0-9.]{{1,12}}%\) \| loss: ({_DECIMAL}) \| "
    rf"lrm: [0-9.]{{1,9}} \| dt: ({_DECIMAL})ms \| tok/sec: ({_THOUSANDS}) \| "
    r"(bf16_mfu|mfu): (-?[0-9]{1,9}\.[0-9][0-9])([^\nsS\u017f]{0,120}))$",
    re.MULTILINE,
)

# Groups are of three digits, and none of these programs prints three decimals.
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,(?:\d{1,2}|\d{4,})")


def number(text: str | None) -> float | None:
    """None where there is none, or none that means anything."""
    if text is None:
        return None
    if _DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    try:
        return float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None


def whole(text: str) -> int | None:
    found = number(text)
    return round(found) if found is not None and math.isfinite(found) else None


# --- what the head of a log says ----------------------------------------------------------------

# nanoGPT's count of parameters leaves position embeddings out.
FACTS: tuple[tuple[str, re.Pattern[str], Callable[[str], Any]], ...] = tuple(
    (name, re.compile(pattern), reader)
    for name, pattern, reader in (
        ("tokens_per_step", r"tokens per iteration will be: (\d[\d,]{0,20})", whole),
        ("tokens_per_step", r"Total batch size (\d[\d,]{0,20}) =>", whole),
        ("parameters", r"number of parameters: (\d[\d.]{0,12})M", lambda t: whole(t + "e6")),
        ("parameters_in_all", r"Number of parameters: (\d[\d,]{0,20})", whole),
        ("flops_per_token", r"Estimated FLOPs per token: (\d(?:\.\d{1,12})?e\+?\d{1,2})\b", float),
        ("last_step", r"number of iterations[\w :]{0,40}: (\d[\d,]{0,20})", whole),
        ("tokens_of_one_card", r"Tokens / micro-batch / rank: \d+ x \d+ = (\d[\d,]{0,20})", whole),
        ("tokens_of_all_cards", r"Tokens / micro-batch: (\d[\d,]{0,20})", whole),
        ("gpu", r"\bGPU: (.{2,80}?) \| Peak FLOPS", str.strip),
        ("peak_flops", r"Peak FLOPS \(BF16\): (\d\.\d{1,12}e\+\d{1,2}|inf)\b", float),
        ("dtype", r"COMPUTE_DTYPE: (?:torch\.)?(bfloat16|float16|float32)", str),
        ("dtype", r"training tokens in .{1,200}; \w+(?::\d+)?, (bfloat16|float16|float32)", str),
        ("device", r"training tokens in .{1,200}; (\w+)(?::\d+)?, (?:bfloat16|float16|float32)", str),
        ("device", r"Autodetected device type: (\w+)", str),
        ("vocab_size", r"found vocab_size = (\d{1,9})", int),
        ("vocab_size", r"Vocab size: (\d[\d,]{0,12})", whole),
    )
)
# A process that starts says one of these.
START = re.compile(
    r"Overriding config with |^\s*Overriding: \w+ = |tokens per iteration will be: |Vocab size: \d"
    r"|Initializing a new model from scratch|Resuming training from |Autodetected device type"
)
# One of these is in every line that START or one of FACTS finds.
HEAD_WORDS = (
    "tokens per iteration will be: ", "Total batch size ", "umber of parameters: ",
    "Estimated FLOPs per token: ", "number of iterations", "Tokens / micro-batch", "Peak FLOPS",
    "COMPUTE_DTYPE: ", "training tokens in ", "found vocab_size = ", "Vocab size: ", "Overriding",
    "Initializing a new model from scratch", "Resuming training from ", "Autodetected device type",
)  # fmt: skip
SETTING = re.compile(r"^\s*(?:Overriding:\s*)?([a-z_]{3,40})\s*=\s*([^#=\n]{1,200}?)\s*(?:#.*)?$")
WANTED = frozenset(
    ("batch_size", "block_size", "gradient_accumulation_steps", "max_iters", "n_layer", "n_head", "n_embd",
     "vocab_size", "bias", "dtype", "device", "eval_interval", "eval_iters", "log_interval")
)  # fmt: skip

_WORDS = ("bfloat16", "float16", "float32", "cpu", "cuda")  # values that are printed without quotes


def setting(text: str, known: Mapping[str, int | float | str]) -> int | float | str | None:
    """A literal, or a product such as `5 * 8` or `batch_size * 2`; None for anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text if re.fullmatch(r"[\w.]{1,40}", text) else None

    def value(node: ast.expr, depth: int = 0) -> int | float | str | None:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as literal):
                return literal
            case ast.Name(id=name):
                return known.get(name, name if name in _WORDS else None)
            case ast.BinOp(left=left, op=ast.Mult(), right=right) if depth < 8:
                a, b = value(left, depth + 1), value(right, depth + 1)
                return a * b if isinstance(a, int | float) and isinstance(b, int | float) else None
        return None

    return value(node)
