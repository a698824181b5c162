"""Logs as people paste them: nanoGPT's, nanochat's, onecard's own and Hugging Face's, read into one shape.

A log may carry colours, timestamps, progress bars, tracebacks, cut and wrapped lines: what is not
understood is passed over. One file may hold several starts of a run; the last that trained counts, for
the steps after a new start belong to another process with a warm-up of its own.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from onecard.errors import UserError
from onecard.language import _

NANOGPT, NANOCHAT, NANOCHAT_2025 = "nanogpt", "nanochat", "nanochat-2025"
ONECARD, HUGGINGFACE = "onecard", "huggingface"

MAX_BYTES = 200_000_000  # months of lines; more is a data file given by mistake
_WRAPS = 3  # a line of nanochat's has 160 characters: two breaks in a narrow window, three in a tiny one


@dataclass(frozen=True)
class Step:
    """One line about a training step."""

    number: int
    ms: float
    loss: float | None = None
    mfu: float | None = None  # as the log says it, 1.0 for 100%
    tokens_per_s: float | None = None
    # nanoGPT's time of such a step includes the evaluation and the checkpoint.
    after_evaluation: bool = False


@dataclass(frozen=True)
class Log:
    """The last start that trained, and what its head told."""

    format: str
    steps: tuple[Step, ...]
    evaluations: tuple[int, ...]
    settings: Mapping[str, int | float | str]  # nanoGPT's and nanochat's knobs, as far as printed
    facts: Mapping[str, Any]  # see _FACTS
    starts: int = 1  # how often training began in this log

    @property
    def tokens_per_step(self) -> int | None:
        return self.facts.get("tokens_per_step")

    @property
    def cards(self) -> int:
        """Cards the run is on: nanochat says what each takes of a micro-batch and what all take together."""
        mine, all_of_them = self.facts.get("tokens_of_one_card"), self.facts.get("tokens_of_all_cards")
        return max(1, round(all_of_them / mine)) if mine and all_of_them else 1


# --- bytes and lines ----------------------------------------------------------------------------


def decode(content: bytes) -> str:
    """Text of a file whatever wrote it: PowerShell's `>` writes UTF-16, others anything."""
    if len(content) > MAX_BYTES:
        raise UserError(
            _("this is too large for a log"),
            _("it has more than {n:,} bytes").format(n=MAX_BYTES),
            "tail -n 2000 LOG | onecard eta -",
        )
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return content.decode("utf-16", errors="replace")
    start = content[:4000]
    # Without the mark in front: Latin text in UTF-16 has a zero in every other byte.
    for offset, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        if len(start) >= 8 and start[offset::2].count(0) > 0.4 * len(start):
            return content.decode(name, errors="replace")
    return content.decode("utf-8-sig", errors="replace")


# Colours and cursor movements, titles of windows, and characters a bar erased.
_TERMINAL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]|.?\x08|\x00"
)


def _lines(text: str) -> list[str]:
    # \r too: a progress bar's states are lines that overwrite each other.
    return re.split(r"\r\n|\n|\r", _TERMINAL.sub("", text))


# --- lines about steps --------------------------------------------------------------------------

_NUMBER = r"[-+]?(?:nan|inf|\d[\d,_]{0,30}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?)"
# \s* everywhere: a wrapped line is joined without knowing whether a space stood at the break.
_ITER_BEGINS = re.compile(r"\biter\s*\d{1,12}\s*:\s*loss", re.IGNORECASE)
_ITER = re.compile(
    rf"\biter\s*(?P<step>\d{{1,12}})\s*:\s*loss\s*(?P<loss>{_NUMBER})\s*,\s*time\s*(?P<ms>{_NUMBER})\s*ms"
    rf"(?:\s*,\s*mfu\s*(?P<mfu>{_NUMBER})\s*%)?(?:\s*,\s*(?P<speed>{_NUMBER})\s*tok/s)?",
    re.IGNORECASE,
)
_STEP_BEGINS = re.compile(r"\bstep\s*\d{1,12}(?:/\d{1,12})?\s*\([\d.]{1,12}%\)\s*\|")
_STEP = re.compile(
    rf"\bstep\s*(?P<step>\d{{1,12}})(?:/(?P<last>\d{{1,12}}))?\s*\([\d.]{{1,12}}%\)\s*\|"
    rf"\s*loss:\s*(?P<loss>{_NUMBER})\s*\|.{{0,40}}?\bdt:\s*(?P<ms>{_NUMBER})\s*ms"
    rf"(?:\s*\|\s*tok/sec:\s*(?P<speed>\d[\d,]{{0,20}})\s*\|"
    rf"(?:\s*(?P<field>bf16_mfu|mfu):\s*(?P<mfu>-?\d{{1,9}}\.\d\d)(?P<rest>.{{0,120}}))?)?",
    re.IGNORECASE,
)
_EVALUATED = re.compile(
    r"\bstep\s+(\d{1,12}):\s*train loss|\bStep\s+(\d{1,12})\s*\|\s*Validation bpb", re.IGNORECASE
)
_BITS_PER_BYTE = re.compile(r"\bStep\s+\d{1,12}\s*\|\s*Validation bpb")
# A bar of tqdm's: `10%|█ | 500/5000 [12:34<1:53:06,  1.51s/it]`.
_BAR = re.compile(
    r"\|\s*(\d{1,12})/(\d{1,12})\s*\[[^\]<]{1,20}<[^\],]{1,20},\s*(\d{1,9}\.\d{1,4})\s*(s/it|it/s)"
)
_TRAINER = re.compile(rf"\{{['\"]loss['\"]:\s*['\"]?({_NUMBER})", re.IGNORECASE)


# Groups are of three digits, and none of these programs prints three decimals.
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,(?:\d{1,2}|\d{4,})")


def _number(text: str | None) -> float | None:
    """None where there is none, or none that means anything."""
    if text is None:
        return None
    if _DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    try:
        return float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None


def _whole(text: str) -> int | None:
    number = _number(text)
    return round(number) if number is not None and math.isfinite(number) else None


# --- what the head of a log tells ---------------------------------------------------------------

# nanoGPT's count of parameters leaves position embeddings out.
_FACTS: tuple[tuple[str, re.Pattern[str], Callable[[str], Any]], ...] = tuple(
    (name, re.compile(pattern), reader)
    for name, pattern, reader in (
        ("tokens_per_step", r"tokens per iteration will be: (\d[\d,]{0,20})", _whole),
        ("tokens_per_step", r"Total batch size (\d[\d,]{0,20}) =>", _whole),
        ("parameters", r"number of parameters: (\d[\d.]{0,12})M", lambda t: _whole(t + "e6")),
        ("parameters_in_all", r"Number of parameters: (\d[\d,]{0,20})", _whole),
        ("flops_per_token", r"Estimated FLOPs per token: (\d(?:\.\d{1,12})?e\+?\d{1,2})\b", float),
        ("last_step", r"number of iterations[\w :]{0,40}: (\d[\d,]{0,20})", _whole),
        ("tokens_of_one_card", r"Tokens / micro-batch / rank: \d+ x \d+ = (\d[\d,]{0,20})", _whole),
        ("tokens_of_all_cards", r"Tokens / micro-batch: (\d[\d,]{0,20})", _whole),
        ("gpu", r"\bGPU: (.{2,80}?) \| Peak FLOPS", str.strip),
        ("peak_flops", r"Peak FLOPS \(BF16\): (\d\.\d{1,12}e\+\d{1,2}|inf)\b", float),
        ("dtype", r"COMPUTE_DTYPE: (?:torch\.)?(bfloat16|float16|float32)", str),
        ("dtype", r"training tokens in .{1,200}; \w+(?::\d+)?, (bfloat16|float16|float32)", str),
        ("vocab_size", r"found vocab_size = (\d{1,9})", int),
        ("vocab_size", r"Vocab size: (\d[\d,]{0,12})", _whole),
    )
)
# A process that starts says one of these.
_BEGINS = re.compile(
    r"Overriding config with |^\s*Overriding: \w+ = |tokens per iteration will be: |Vocab size: \d"
    r"|Initializing a new model from scratch|Resuming training from |Autodetected device type"
)
_SETTING = re.compile(r"^\s*(?:Overriding:\s*)?([a-z_]{3,40})\s*=\s*([^#=\n]{1,200}?)\s*(?:#.*)?$")
_WANTED = frozenset(
    ("batch_size", "block_size", "gradient_accumulation_steps", "max_iters", "n_layer", "n_head", "n_embd",
     "vocab_size", "bias", "dtype", "eval_interval", "eval_iters", "log_interval")
)  # fmt: skip


def _setting(text: str, known: Mapping[str, int | float | str]) -> int | float | str | None:
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
                return known.get(name, name if name in ("bfloat16", "float16", "float32") else None)
            case ast.BinOp(left=left, op=ast.Mult(), right=right) if depth < 8:
                a, b = value(left, depth + 1), value(right, depth + 1)
                return a * b if isinstance(a, int | float) and isinstance(b, int | float) else None
        return None

    return value(node)


# --- the reader ---------------------------------------------------------------------------------


@dataclass
class _Start:
    """One process's part of the log."""

    steps: dict[str, list[Step]] = field(default_factory=dict)  # by kind of line
    evaluations: list[int] = field(default_factory=list)
    settings: dict[str, int | float | str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    of_onecard: bool = False


def read_log(text: str) -> Log | None:
    """What there is to know from these lines; None where no training line is among them."""
    starts = [_Start()]
    bars: dict[int, list[Step]] = {}
    trainer_loss: float | None = None
    for line in _joined(_lines(text)):
        here = starts[-1]
        if found := _ITER.search(line):
            starts = _add(starts, "iter", _step_of(found), found)
        elif found := _STEP.search(line):
            starts = _add(starts, "step", _step_of(found), found)
        elif found := _EVALUATED.search(line):
            here.evaluations.append(int(found[1] or found[2]))
            here.of_onecard |= bool(here.steps.get("iter")) and bool(_BITS_PER_BYTE.search(line))
        elif found := _TRAINER.search(line):
            trainer_loss = _number(found[1])
        elif found := _BAR.search(line):
            rate = float(found[3])
            if rate > 0:
                ms = 1000 * rate if found[4] == "s/it" else 1000 / rate
                bars.setdefault(int(found[2]), []).append(Step(int(found[1]), ms))
        else:
            if _BEGINS.search(line):
                if here.steps:
                    here = _Start()
                    starts.append(here)
                here.of_onecard |= "training tokens in " in line
            _read_head(line, here)
    trained = [start for start in starts if start.steps]
    if trained:
        return _log_of(trained[-1], len(trained))
    if trainer_loss is not None and bars:
        return _trainer_log(bars, trainer_loss)
    return None


def _joined(lines: list[str]) -> Iterator[str]:
    """The lines; one about a step that a narrow window wrapped or a copy cut is put together again."""
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        for begins, whole in ((_ITER_BEGINS, _ITER), (_STEP_BEGINS, _STEP)):
            if not begins.search(line):
                continue
            for more in range(_WRAPS + 1):
                piece = "".join(lines[index - 1 : index + more])
                if more and (_begins(lines, index + more - 1) or len(piece) > 1000):
                    break
                found = whole.search(piece)
                if found and found["mfu"] is not None:
                    line, index = piece, index + more
                    break
                if found and not whole.search(line):
                    line = piece  # what is there without its MFU is better than nothing
            break
        yield line


def _begins(lines: list[str], index: int) -> bool:
    """Is this no continuation, but a line of its own (or the end)?"""
    if index >= len(lines) or not lines[index].strip():
        return True
    return any(p.search(lines[index]) for p in (_ITER_BEGINS, _STEP_BEGINS, _EVALUATED, _BEGINS))


def _step_of(found: re.Match[str]) -> Step | None:
    ms, percent, loss = _number(found["ms"]), _number(found["mfu"]), _number(found["loss"])
    if ms is None or not 1e-3 <= ms < 1e12:
        return None
    mfu = percent / 100 if percent is not None and math.isfinite(percent) else None
    speed = _number(found["speed"])
    return Step(int(found["step"]), ms, loss, mfu, speed if speed and math.isfinite(speed) else None)


def _add(starts: list[_Start], kind: str, step: Step | None, found: re.Match[str]) -> list[_Start]:
    here = starts[-1]
    if step is None:
        return starts
    earlier = here.steps.get(kind)
    if earlier and step.number == earlier[-1].number:
        return starts  # the same line twice: two ranks, or a screen and a file in one
    if earlier and step.number < earlier[-1].number:
        # Continued from a checkpoint, or begun anew: the head may be missing, what it said still holds.
        evaluations = [n for n in here.evaluations[-1:] if n == step.number]
        here = _Start({}, evaluations, dict(here.settings), dict(here.facts), here.of_onecard)
        starts.append(here)
    if kind == "step":
        if found["last"]:
            here.facts["last_step"] = int(found["last"])
        if found["field"]:
            here.facts["mfu_field"] = found["field"].lower()
            here.facts["tells_epoch"] = "epoch:" in (found["rest"] or "")
    elif step.tokens_per_s is not None:
        here.of_onecard = True
    if here.evaluations and here.evaluations[-1] == step.number:
        step = Step(step.number, step.ms, step.loss, step.mfu, step.tokens_per_s, after_evaluation=True)
    here.steps.setdefault(kind, []).append(step)
    return starts


def _read_head(line: str, here: _Start) -> None:
    if found := _SETTING.match(line):
        if found[1] in _WANTED:
            value = _setting(found[2], here.settings)
            if value is not None:
                here.settings[found[1]] = value
        return
    for name, pattern, reader in _FACTS:
        if (match := pattern.search(line)) and (value := reader(match[1])) is not None:
            here.facts[name] = value


def _log_of(start: _Start, count: int) -> Log:
    kind = max(start.steps, key=lambda kind: len(start.steps[kind]))
    steps = start.steps[kind]
    if kind == "step":
        old = start.facts.get("mfu_field") == "mfu" and not start.facts.get("tells_epoch")
        name = NANOCHAT_2025 if old else NANOCHAT
    else:
        # nanoGPT shows -100% at first and an MFU always; onecard never the one and not always the other.
        waited = any(step.mfu is not None and step.mfu < 0 for step in steps)
        without = all(step.mfu is None for step in steps) or (
            steps[0].number == 0 and steps[0].mfu is not None
        )
        name = ONECARD if not waited and (start.of_onecard or without) else NANOGPT
    return Log(name, tuple(steps), tuple(start.evaluations), start.settings, start.facts, count)


def _trainer_log(bars: dict[int, list[Step]], loss: float) -> Log:
    """The bar with the most steps is the training's; others are evaluations and downloads."""
    total = max(bars)
    states = {step.number: step for step in bars[total]}
    steps = [states[number] for number in sorted(states)]
    steps[-1] = Step(steps[-1].number, steps[-1].ms, loss)
    return Log(HUGGINGFACE, tuple(steps), (), {}, {"last_step": total})
