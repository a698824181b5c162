"""Findings about a run: sentences that a person reads, each with the figures it rests on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something seen in the curve or the speed, good or bad."""

    key: str  # stable and English, such as "still-falling"
    text: str  # one sentence with its figures, in the reader's language
    good: bool | None = None  # None: neither
    step: int | None = None  # where it is, or where it began
    weight: float = 0.0  # how much it matters: the verdict and the first screen take the heaviest


@dataclass(frozen=True)
class Mistake:
    """Something that was set otherwise than was meant, or than does good."""

    key: str
    text: str  # what is wrong, in one sentence
    evidence: str  # which lines or settings show it, with figures
    change: str = ""  # the config line or flag to change, such as "n_embd = 768   # was 384"
    costs: str = ""  # what it costs, where that can be computed
    weight: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where a loss stands among published ones."""

    text: str
    rows: tuple[
        tuple[str, float, float | None, float, str], ...
    ] = ()  # model, millions, tokens (1e9), loss, source
    expected: float | None = None  # the loss of a usual run of this size and horizon
    low: float | None = None
    high: float | None = None
    bridges: tuple[str, ...] = ()  # the steps of a comparison that nothing published makes directly
    cannot: str = ""  # why no comparison is made
    standing: str = ""  # ahead, on (the trend) or behind
    equals_tokens: float | None = None  # after so many a usual run of this size ends at this loss
    unit: str = "nats"  # a token; or bpb, bits per byte of text


@dataclass(frozen=True)
class ForecastPoint:
    """A loss expected at a step, and the range that holds it four times in five."""

    step: int
    tokens: int | None
    loss: float
    low: float
    high: float
    case: str = ""  # "" is the end of this schedule; else such as "decayed and restarted"


@dataclass(frozen=True)
class Forecast:
    """The end of this schedule first, then other horizons."""

    points: tuple[ForecastPoint, ...] = ()
    refused: str = ""  # why there is none
    of: str = "val"  # the losses it is of: those of validation, or "train"
    notes: tuple[str, ...] = ()
    by_law: tuple[tuple[str, float], ...] = ()  # (law, loss at the first point): power law and last value too


@dataclass(frozen=True)
class NextStep:
    """One thing to do, and what it should bring."""

    text: str
    command: str  # a command or config lines that plan has checked; "" where there is none
    trainer: str  # "theirs" or "onecard"
    gain: tuple[float, float] | None = None  # nats, from and to
    hours: float | None = None
    kwh: float | None = None
    cost: float | None = None
    source: str = ""  # what the gain is from
