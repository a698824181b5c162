"""What `onecard bench` found out about a card: the record, its file, and rates for shapes in between.

No torch here: plan asks this module how fast the user's own card is. Records lie in a folder of the user's,
one file for each card; of several that fit a card the newest counts. A file that cannot be read costs a note
and the measurement, never the command.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from onecard.files import load_json, write_json
from onecard.hardware.cards import match_card, read_words
from onecard.language import _, english_of
from onecard.terminal import say

SCHEMA = 1
DTYPES = ("bfloat16", "float16", "float32")  # that a card has a peak for, see Card.peak_tflops
# Far from anything that is measured; what is computed from numbers in between stays finite.
_LEAST, _MOST = 1e-9, 1e9

# Written into every record, so that its numbers can be read without this source.
UNITS = {
    "tflops": "1e12 floating-point operations a second",
    "matmul": "2 * tokens * n * k operations for each of forward, dx and dw",
    "attention": "4 * batch * heads * block^2 * head_dim operations forward, twice as many backward; "
    "not halved for the causal mask, as in 6N + 12LHQT",
    "gbps": "1e9 bytes a second; a copy inside the card counts its bytes read and written",
    "launch_us": "microseconds from one tiny kernel to the next",
    "load": "medians while the largest matmul was repeated: MHz, watts, degrees Celsius",
}

Pass = Literal["all", "forward", "dx", "dw"]


@dataclass(frozen=True)
class MatmulRate:
    """A layer of k inputs and n outputs over `tokens` rows: its product and the two of its backward pass."""

    tokens: int
    n: int
    k: int
    forward_tflops: float
    dx_tflops: float
    dw_tflops: float

    @property
    def flops(self) -> int:
        """FLOPs of one of the three products."""
        return 2 * self.tokens * self.n * self.k

    def tflops(self, which: Pass) -> float:
        if which == "all":
            return 3 / (1 / self.forward_tflops + 1 / self.dx_tflops + 1 / self.dw_tflops)
        return {"forward": self.forward_tflops, "dx": self.dx_tflops, "dw": self.dw_tflops}[which]


@dataclass(frozen=True)
class AttentionRate:
    """Causal attention by torch's own kernel, heads of head_dim over `block` tokens."""

    head_dim: int
    block: int
    forward_tflops: float
    backward_tflops: float

    @property
    def tflops(self) -> float:
        """Forward and backward together: the backward pass is two of three parts of the work."""
        return 3 / (1 / self.forward_tflops + 2 / self.backward_tflops)


@dataclass(frozen=True)
class Load:
    """The card at work. None: the driver does not report it."""

    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    power_limit_w: float | None = None


@dataclass(frozen=True)
class Measured:
    """One measurement of one card, in the units of UNITS."""

    card: str  # as the driver calls it
    date: str  # ISO 8601, UTC
    dtype: str
    ceiling_size: int  # the ceiling is a matmul of this size in all three dimensions
    ceiling_tflops: float
    copy_gbps: float
    reduce_gbps: float
    h2d_gbps: float
    d2h_gbps: float
    launch_us: float
    matmuls: tuple[MatmulRate, ...]
    attention: tuple[AttentionRate, ...]
    load: Load = Load()
    pinned: bool = True  # were the host's buffers page-locked, as offload's are?
    memory_gib: float | None = None
    driver: str | None = None
    torch: str = ""
    seconds: float = 0.0  # how long the measuring took
    skipped: tuple[str, ...] = ()  # what was left out for want of memory or time

    def matmul_tflops(self, tokens: int, n: int, k: int, which: Pass = "all") -> float:
        """The rate of a layer of k inputs and n outputs, by straight lines between the logarithms of sizes.

        Interpolated along n, then k, then tokens, and level beyond the measured range, so never above the
        fastest product measured. Shapes too small to fill the card take at least the time of a launch.
        """
        if n < k:
            # A layer back (4·width to width) is the layer there with forward and dx changing places.
            swapped: dict[Pass, Pass] = {"forward": "dx", "dx": "forward"}
            return self.matmul_tflops(tokens, k, n, swapped.get(which, which))
        points = [
            ((rate.tokens, rate.k, rate.n), rate.tflops(which)) for rate in map(_wide_side_out, self.matmuls)
        ]
        found = _interpolated(points, (tokens, k, n))
        flops = 2 * tokens * n * k
        if flops < min(rate.flops for rate in self.matmuls):
            found = min(found, flops / self.launch_us / 1e6)
        return found

    def attention_tflops(self, head_dim: int, block: int) -> float:
        """Forward and backward together, counted as in UNITS; interpolated like matmuls."""
        points = [((rate.head_dim, rate.block), rate.tflops) for rate in self.attention]
        return _interpolated(points, (head_dim, block))

    def to_json(self) -> dict[str, Any]:
        rows: dict[str, Any] = {
            name: [asdict(row) for row in getattr(self, name)] for name in ("matmuls", "attention")
        }
        rows["skipped"] = [english_of(text) for text in self.skipped]
        return {"schema": SCHEMA, **asdict(self), **rows, "units": UNITS}

    @classmethod
    def from_json(cls, content: Any) -> Measured:
        """ValueError, with the reason, for anything that is no whole record of this schema."""
        if not isinstance(content, dict):
            raise ValueError(_("not a record"))
        if content.get("schema") != SCHEMA:
            found = repr(content.get("schema"))
            raise ValueError(_("schema {found} instead of {known}").format(found=found, known=SCHEMA))
        try:
            values = {f.name: content[f.name] for f in fields(cls)}
            values["matmuls"] = tuple(MatmulRate(**row) for row in values["matmuls"])
            values["attention"] = tuple(AttentionRate(**row) for row in values["attention"])
            values["load"] = Load(**values["load"])
            values["skipped"] = tuple(values["skipped"])
        except (KeyError, TypeError) as error:
            wrong = _("a field is missing or of the wrong kind: {error}")
            raise ValueError(wrong.format(error=error)) from None
        measured = cls(**values)
        measured._check()
        return measured

    def _check(self) -> None:
        """ValueError unless every number that is divided by is one, and the card and the date are there."""
        if not all(isinstance(text, str) for text in (self.card, self.date, self.dtype)):
            raise ValueError(_("card, date or dtype is no text"))
        if self.dtype not in DTYPES:
            raise ValueError(
                _("dtype {name}, in which nothing is measured").format(name=repr(self.dtype[:20]))
            )
        if datetime.fromisoformat(self.date).tzinfo is None:
            raise ValueError(_("its date has no time zone"))
        if not self.matmuls or not self.attention:
            raise ValueError(_("no matmuls or no attention in it"))
        numbers: list[Any] = [self.ceiling_tflops, self.copy_gbps, self.reduce_gbps]
        numbers += [self.h2d_gbps, self.d2h_gbps, self.launch_us]
        for row in self.matmuls:
            numbers += asdict(row).values()
        for rate in self.attention:
            numbers += asdict(rate).values()
        numbers += [] if self.memory_gib is None else [self.memory_gib]
        for number in numbers:
            if not isinstance(number, int | float) or isinstance(number, bool) or not _LEAST < number < _MOST:
                wrong = _("{found} where a positive number of a usual size belongs")
                raise ValueError(wrong.format(found=str(number)[:20]))


def _wide_side_out(rate: MatmulRate) -> MatmulRate:
    """The same three products with n the larger side."""
    if rate.n >= rate.k:
        return rate
    return MatmulRate(rate.tokens, rate.k, rate.n, rate.dx_tflops, rate.forward_tflops, rate.dw_tflops)


def _interpolated(points: Sequence[tuple[tuple[int, ...], float]], at: tuple[int, ...]) -> float:
    """Along the last coordinate within each group of equal first ones, then along those before it."""
    if not at:
        # Two measurements of the same shape: neither is better.
        return sum(value for _, value in points) / len(points)
    first, rest = at[0], at[1:]
    levels = sorted({where[0] for where, _ in points})

    def on_level(level: int) -> float:
        return _interpolated([(where[1:], value) for where, value in points if where[0] == level], rest)

    below = max((level for level in levels if level <= first), default=levels[0])
    above = min((level for level in levels if level >= first), default=levels[-1])
    if below >= above:  # measured, or outside the measured range
        return on_level(below)
    low, high = on_level(below), on_level(above)
    share = math.log(first / below) / math.log(above / below)
    # Rounding must not carry the result past the rows on either side.
    return min(max(low + share * (high - low), min(low, high)), max(low, high))


# --- where records lie --------------------------------------------------------------------------


def records_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of XDG has relative paths ignored.
    base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "onecard" / "bench"


def card_slug(name: str, memory_gib: float | None = None) -> str:
    """A file name: two cards that share their name (8 and 16 GB) must not share a record."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"
    return words if memory_gib is None else f"{words}-{memory_gib:.0f}gib"


def save_measured(measured: Measured) -> Path:
    """Into the user's folder, in place of this card's record before; where it lies."""
    folder = records_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{card_slug(measured.card, measured.memory_gib)}.json"
    write_json(path, measured.to_json())
    return path


def _note_on_stderr(text: str) -> None:
    say(_("note: {text}").format(text=text))


def load_measured(
    card_name: str, memory_gib: float | None = None, *, note: Callable[[str], None] = _note_on_stderr
) -> Measured | None:
    """The newest record of this card, by the driver's name or ours; None where there is none to read."""
    found: list[Measured] = []
    trouble: list[str] = []
    try:
        paths = sorted(records_folder().glob("*.json"))
    except OSError:
        return None
    for path in paths:
        try:
            measured = Measured.from_json(load_json(path))
        except (OSError, ValueError) as error:  # JSON's and UTF-8's are ValueErrors
            passed = _("{path} is passed over ({error}); onecard bench   measures anew")
            trouble.append(passed.format(path=path, error=error))
            continue
        if _same_card(measured, card_name, memory_gib):
            found.append(measured)
    if not found:
        # A broken file may be the one that was wanted; with a good one at hand it is of no interest.
        for text in trouble:
            note(text)
    return max(found, key=lambda measured: _when(measured.date), default=None)


def _when(date: str) -> float:
    return datetime.fromisoformat(date).timestamp()


def _same_card(measured: Measured, name: str, memory_gib: float | None) -> bool:
    known = match_card(name, memory_gib)
    if known is not None:
        return match_card(measured.card, measured.memory_gib) == known
    # Reported sizes differ a little from driver to driver; the nearest namesakes are 17% apart.
    theirs = measured.memory_gib
    if memory_gib is not None and theirs is not None and not 0.92 < theirs / memory_gib < 1.08:
        return False
    return read_words(measured.card).identity == read_words(name).identity
