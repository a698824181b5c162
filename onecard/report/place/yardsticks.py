"""What a usual run of a size and length reaches on a text, from published runs: directly, or over bridges.

The law of plan/scaling.py carries a published loss to another size and length; how far published runs lie
above or below the law says how hard their text is. Where no published run has the same text and tokens near
the size, runs of another text do, and the gap between both texts is measured where both have a run: a
bridge. Each comes with an error of its own; the answer is their mean, weighted by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onecard.language import _, number
from onecard.plan.amounts import count
from onecard.plan.references import Reference, all_references
from onecard.plan.scaling import HALF_WIDTH, HIGHER, LAW, NEXT_SIZE, STILL_HIGH, half_width

# Errors in nats, of one estimate. The law's residuals are 0.035 (root mean square).
_OF_A_ROW = 0.04
_PER_DECADE_INSIDE, _PER_DECADE_OUTSIDE = 0.1, 0.35  # of size: between two models, and beyond all of them
_PER_DECADE_OF_TOKENS = 0.12
_OF_A_GAP = 0.05
_OTHER_TOKENS = (
    0.05  # where a bridge leads over another tokenizer: a gap then need not be the same at all sizes
)
_LEAST = 0.08  # of all together: two equal runs on two samples of a text differ by some of it
_NEAR = 1.3  # times a model's size: as good as the same
_FIRST_TOKENS = 1e9  # a run with its learning rate still high is not compared before
_LONGER = 1000  # times its length: nobody trains so small a model so long
_MOST = 0.3  # of a bridge: more says nothing
_MUCH = 0.08  # half of a range: a direct comparison that is no surer wants bridges too


# Texts whose runs the law's shape was fitted to. SlimPajama's fall less with the size than the law says.
_FOR_BRIDGES = (("C4", "gpt-neox"), ("FineWeb", "gpt2"), ("FineWeb-Edu", "gpt2"))


@dataclass(frozen=True)
class Estimate:
    """What a usual run ends at, by one way."""

    loss: float
    error: float
    rows: tuple[Reference, ...]
    bridge: str = ""  # the way in a sentence; "" is a direct comparison


@dataclass(frozen=True)
class Expected:
    """All ways together."""

    loss: float
    low: float
    high: float
    rows: tuple[Reference, ...]
    bridges: tuple[str, ...]

    def tokens_for(self, loss: float, parameters: int, tokens: float) -> float | None:
        """After how many a usual run of this size ends at this loss; None where no number is enough."""
        above_the_law = self.loss - LAW.loss(parameters, tokens)
        left = loss - above_the_law - LAW.floor - LAW.size / parameters**LAW.size_power
        if left <= 1e-6:
            return None
        found = math.exp((math.log(LAW.data) - math.log(left)) / LAW.data_power)
        return found if found <= _LONGER * tokens else None


def is_usual(row: Reference) -> bool:
    """Of a GPT that learned by AdamW at a usual rate, and of whose length the source speaks."""
    searched = row.model.startswith(("speedrun", "modded", "nanochat", "OpenAI"))
    early = (row.lr or 0.0) > 0.9 and (row.tokens or 0.0) < _FIRST_TOKENS
    return row.unit == "nats" and row.tokens is not None and not searched and not early


def expected_loss(data: str, tokenizer: str, parameters: int, tokens: float) -> Expected | None:
    """None where no published run has these tokens and this text."""
    direct = _direct(data, tokenizer, parameters, tokens)
    if direct is None:
        return None
    found = [direct]
    if direct.error > _MUCH:
        found += _bridges(data, tokenizer, parameters, tokens)
    weights = [estimate.error**-2 for estimate in found]
    loss = sum(w * e.loss for w, e in zip(weights, found, strict=True)) / sum(weights)
    spread = math.sqrt(
        sum(w * (e.loss - loss) ** 2 for w, e in zip(weights, found, strict=True)) / sum(weights)
    )
    # Ways that share a part share its error: together they are no surer than the best of them.
    error = max(_LEAST, spread, min(estimate.error for estimate in found))
    if len(found) > 1 or direct.error > _MUCH:
        error += half_width(parameters, tokens) - HALF_WIDTH  # outside its region the law carries less well
    higher = HIGHER * max(0.0, math.log10(NEXT_SIZE / parameters)) if len(found) > 1 else 0.0
    rows = tuple(dict.fromkeys(row for estimate in found for row in estimate.rows))
    bridges = tuple(estimate.bridge for estimate in found if estimate.bridge)
    return Expected(loss, loss - error, loss + error + higher, rows, bridges)


def ended_runs(data: str, tokenizer: str, unit: str = "nats") -> list[Reference]:
    """Of sources that do not say after how many tokens."""
    return [
        row
        for row in all_references()
        if (row.data, row.tokenizer, row.unit) == (data, tokenizer, unit)
        and row.tokens is None
        and not row.model.startswith("OpenAI")  # which learned from another text
    ]


# --- one text ------------------------------------------------------------------------------------------


def _models(data: str, tokenizer: str) -> list[list[Reference]]:
    """Rows by model, the smallest first."""
    groups: dict[tuple[str, str], list[Reference]] = {}
    for row in all_references():
        if (row.data, row.tokenizer) == (data, tokenizer) and is_usual(row):
            groups.setdefault((row.model, row.source), []).append(row)
    return sorted(groups.values(), key=lambda rows: rows[0].parameters)


def _above_the_law(rows: Sequence[Reference], tokens: float) -> tuple[float, float, list[Reference]]:
    """By how much one model's losses are above the law after so many tokens, the decades of tokens that the
    next row is away, and the rows this is read off."""
    points = [(math.log10(row.tokens or 1.0), _level(row), row) for row in rows]
    x = math.log10(tokens)
    after = next((i for i, point in enumerate(points) if point[0] >= x), len(points))
    if after in (0, len(points)):
        at, level, row = points[min(after, len(points) - 1)]
        return level, abs(x - at), [row]
    (x0, level0, row0), (x1, level1, row1) = points[after - 1], points[after]
    share = (x - x0) / (x1 - x0)
    nearer = row0 if share < 0.5 else row1
    return level0 + share * (level1 - level0), 0.0, [nearer]


def _level(row: Reference) -> float:
    """A loss over the law's, as though its learning rate had come down."""
    return row.loss - STILL_HIGH * (row.lr or 0.0) - LAW.loss(row.parameters, row.tokens or 1.0)


def _direct(data: str, tokenizer: str, parameters: int, tokens: float) -> Estimate | None:
    """By runs of the same text and tokens alone: between two sizes, or carried on from the nearest."""
    models = _models(data, tokenizer)
    if not models:
        return None
    x = math.log10(parameters)
    near = [rows for rows in models if abs(math.log10(rows[0].parameters) - x) < math.log10(_NEAR)]
    if near:
        chosen = [min(near, key=lambda rows: _above_the_law(rows, tokens)[1])]
    else:
        smaller = [rows for rows in models if rows[0].parameters < parameters]
        larger = [rows for rows in models if rows[0].parameters > parameters]
        chosen = [*smaller[-1:], *larger[:1]]
    sizes = [math.log10(rows[0].parameters) for rows in chosen]
    found = [_above_the_law(rows, tokens) for rows in chosen]
    level, inside = found[0][0], len(chosen) == 2
    if inside:
        share = (x - sizes[0]) / (sizes[1] - sizes[0])
        level += share * (found[1][0] - found[0][0])
        # Between sizes far apart the law sags below the straight line; how much is not known: halfway.
        ends = [LAW.loss(10**size, tokens) for size in sizes]
        level += (ends[0] + share * (ends[1] - ends[0]) - LAW.loss(parameters, tokens)) / 2
    away = min(abs(x - size) for size in sizes)
    error = _OF_A_ROW + away * (_PER_DECADE_INSIDE if inside or near else _PER_DECADE_OUTSIDE)
    error += _PER_DECADE_OF_TOKENS * max(decades for _level_, decades, _rows in found)
    rows = tuple(row for _level_, _decades, used in found for row in used)
    return Estimate(LAW.loss(parameters, tokens) + level, error, rows)


# --- over another text ---------------------------------------------------------------------------------


def _bridges(data: str, tokenizer: str, parameters: int, tokens: float) -> list[Estimate]:
    """Over every text that has runs on both sides of the size, and one where this text has one as well."""
    found = []
    for other in _FOR_BRIDGES:
        if other == (data, tokenizer):
            continue
        there = _direct(*other, parameters, tokens)
        if there is None or not _brackets(other, parameters) or there.error > 2 * _MUCH:
            continue
        gap = _gap((data, tokenizer), other, parameters, tokens)
        if gap is None:
            continue
        gap_loss, gap_error, anchor = gap
        other_tokens = _OTHER_TOKENS if other[1] != tokenizer else 0.0
        error = math.hypot(there.error, gap_error + other_tokens)
        if error > _MOST:
            continue
        text = _(
            "bridge over {other}: by {models} a {size} ends at {there:.2f} there after {tokens} tokens; "
            "{data} is "
            "{gap:+.2f} from it at {anchor}, so {loss:.2f} ± {error:.2f}"
        )
        text = text.format(
            other=_named(other, tokenizer), models=_sizes(there.rows), there=there.loss,
            size=count(parameters),
            tokens=count(tokens), data=data, gap=gap_loss, anchor=count(anchor), loss=there.loss + gap_loss,
            error=error,
        )  # fmt: skip
        found.append(Estimate(there.loss + gap_loss, error, there.rows, text))
    return found


def _brackets(text: tuple[str, str], parameters: float) -> bool:
    sizes = [rows[0].parameters for rows in _models(*text)]
    return min(sizes) / _NEAR <= parameters <= max(sizes) * _NEAR


def _gap(
    ours: tuple[str, str], other: tuple[str, str], parameters: int, tokens: float
) -> tuple[float, float, int] | None:
    """How much higher losses of one text are than of the other, its error, and the size it is measured at."""
    models = [rows for rows in _models(*ours) if _brackets(other, rows[0].parameters)]
    if not models:
        return None
    anchor = min(models, key=lambda rows: abs(math.log(rows[0].parameters / parameters)))
    size, gaps, away = anchor[0].parameters, [], []
    for row in anchor:
        there = _direct(*other, size, row.tokens or 1.0)
        assert there is not None
        gaps.append(_level(row) + LAW.loss(size, row.tokens or 1.0) - there.loss)
        away.append(there.error - _OF_A_ROW)
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    decades = min(abs(math.log10((row.tokens or 1.0) / tokens)) for row in anchor)
    error = _OF_A_GAP + spread + min(away) + _PER_DECADE_OF_TOKENS * max(0.0, decades - 0.3)
    return mean, error, size


def _named(text: tuple[str, str], tokenizer: str) -> str:
    if text[1] == tokenizer:
        return text[0]
    return _("{data} (tokens of {tokenizer})").format(data=text[0], tokenizer=text[1])


def _sizes(rows: Sequence[Reference]) -> str:
    """The models, each with its loss as it was read."""
    parts = [f"{row.model} ({number(row.loss, '.2f')}, {count(row.tokens or 0.0)})" for row in rows]
    return ", ".join(parts)
