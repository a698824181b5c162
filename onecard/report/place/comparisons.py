"""Comparisons that people bring with a log, corrected: what small models are said to end at, and what they
do.

`claims_in` looks for them in prose, line by line: a line is looked at only where it has one of a few words,
and no further than MOST characters. The words are found in English, Spanish and German, also where accents
were lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onecard.language import _, number
from onecard.plan.amounts import count
from onecard.plan.references import Reference, all_references
from onecard.report.findings import Finding
from onecard.report.place.yardsticks import expected_loss

SHAKESPEARE, OPENWEBTEXT, TYPICAL = "shakespeare", "gpt2-124m-openwebtext", "typical"
MOST = 600  # characters of a line
_MOST_CLAIMS = 20
_AS_GOOD_AS = 0.06  # nats: a claim so near is right

# What stands before a number may be a letter that was a dash: only ASCII's count.
_NUMBER = re.compile(r"(?<![0-9A-Za-z.,])\d[.,]\d{1,4}(?![.,]?\d)(?!\s?%)")
_SIZES = re.compile(r"(?<![0-9A-Za-z.,])(\d{1,3})(?:\D{1,6}(\d{1,3}))?\s?[Mm](?![a-zA-Z])")
_BILLIONS = re.compile(r"(?<![0-9A-Za-z.,])(\d{1,3})(?:\D{1,6}(\d{1,3}))?\s?B(?![a-zA-Z])")
# "típicos" comes as "t√≠picos" or "tÃ­picos" where its bytes were read as another encoding's.
_USUALLY = (
    "typical", "usually", "normally", "picos", "picas", "usualmente", "suelen", "normalmente", "typisch",
    "üblich", "blicherweise", "normalerweise", "meist",
)  # fmt: skip
_ENDS = ("end", "plateau", "settle", "reach", "estabiliz", "termina", "acaba", "llega", "landen", "erreich")


class Claim(NamedTuple):
    """What somebody says that others end at. `high`, sizes and tokens are of TYPICAL."""

    key: str
    value: float
    high: float | None = None
    sizes: tuple[float, float] | None = None  # parameters
    tokens: tuple[float, float] | None = None


def claims_in(text: str) -> list[Claim]:
    """All in a paste, each once."""
    found: dict[Claim, None] = {}
    for line in text.splitlines():
        if len(found) >= _MOST_CLAIMS:
            break
        low = line[:MOST].lower()
        if "shakespeare" in low:
            found |= dict.fromkeys(_of_shakespeare(low))
        if "openwebtext" in low or "webtext" in low:
            found |= dict.fromkeys(_of_openwebtext(low))
        if any(word in low for word in _USUALLY) and any(word in low for word in _ENDS):
            found |= dict.fromkeys(_of_usual_runs(line[:MOST]))
    return list(found)


def _numbers(text: str, least: float, most: float) -> list[float]:
    values = [float(word.replace(",", ".")) for word in _NUMBER.findall(text)]
    return [value for value in values if least <= value <= most]


def _of_shakespeare(line: str) -> list[Claim]:
    after = line[line.index("shakespeare") :]
    losses = _numbers(after, 0.5, 4.5)
    # "1.7 bits a character, so a loss of 2.1": the loss comes last.
    return [Claim(SHAKESPEARE, losses[-1])] if losses else []


def _of_openwebtext(line: str) -> list[Claim]:
    if "124" not in line and "gpt-2" not in line and "gpt2" not in line:
        return []
    losses = _numbers(line, 2.5, 4.5)
    return [Claim(OPENWEBTEXT, losses[0])] if losses else []


def _of_usual_runs(line: str) -> list[Claim]:
    losses, sizes = _numbers(line, 1.5, 9.9), _SIZES.search(line)
    if not losses or sizes is None:
        return []
    tokens = next((b for b in _BILLIONS.finditer(line) if b.start() > sizes.end()), None)
    high = losses[1] if len(losses) > 1 and losses[1] >= losses[0] else None
    return [Claim(TYPICAL, losses[0], high, _span(sizes, 1e6), _span(tokens, 1e9) if tokens else None)]


def _span(found: re.Match[str], unit: float) -> tuple[float, float]:
    low = float(found[1]) * unit
    return low, float(found[2]) * unit if found[2] else low


# --- what is so ----------------------------------------------------------------------------------------


def corrected(claims: Iterable[Claim | Sequence[object]]) -> list[Finding]:
    """A finding for each claim that something is published about; `good` where the claim is right."""
    found = []
    for claim in claims:
        claim = claim if isinstance(claim, Claim) else Claim(*claim)  # type: ignore[arg-type]
        correct = {SHAKESPEARE: _shakespeare, OPENWEBTEXT: _openwebtext, TYPICAL: _typical}.get(claim.key)
        finding = correct(claim) if correct is not None else None
        if finding is not None:
            found.append(finding)
    return found


def _row(model: str, data: str) -> Reference:
    return next(row for row in all_references() if row.model == model and row.data == data)


def _shakespeare(claim: Claim) -> Finding:
    row = _row("nanoGPT Shakespeare char", "tinyshakespeare")
    right = abs(claim.value - row.loss) < _AS_GOOD_AS
    text = _(
        "nanoGPT's Shakespeare ends at {loss:.2f} nats per character, not at {claimed:.2f}, and cannot be "
        "compared: a token has several characters"
    )
    if right:
        text = _(
            "nanoGPT's Shakespeare does end at {loss:.2f} nats, but per character: that cannot be compared "
            "with a "
            "loss per token, which has several characters"
        )
    return Finding(
        "claim-shakespeare", text.format(loss=row.loss, claimed=claim.value), good=None, weight=0.3
    )


def _openwebtext(claim: Claim) -> Finding:
    trained = _row("nanoGPT GPT-2 124M", "OpenWebText")
    zero_shot = _row("OpenAI GPT-2 124M zero-shot", "OpenWebText")
    values = {"loss": trained.loss, "tokens": count(trained.tokens or 0), "claimed": claim.value,
              "zero_shot": zero_shot.loss}  # fmt: skip
    if abs(claim.value - trained.loss) < _AS_GOOD_AS:
        text = _("GPT-2 124M does end at about {loss:.2f} on OpenWebText, after some {tokens} tokens")
        return Finding("claim-openwebtext", text.format(**values), good=True, weight=0.1)
    text = _(
        "GPT-2 124M trained on OpenWebText ends at about {loss:.2f} after some {tokens} tokens, not at "
        "{claimed:.2f}; {zero_shot:.2f} is OpenAI's checkpoint there, which learned from another text"
    )
    return Finding("claim-openwebtext", text.format(**values), good=None, weight=0.3)


def _typical(claim: Claim) -> Finding | None:
    """Against published runs of that size, on FineWeb with GPT-2's tokens."""
    if claim.sizes is None or not 5e6 <= claim.sizes[0] <= claim.sizes[1] <= 3e9:
        return None
    # Where nobody says after how many: 20 a parameter and four times that.
    middle = (claim.sizes[0] * claim.sizes[1]) ** 0.5
    short, long = claim.tokens or (20 * middle, 80 * middle)
    if not 1e8 <= short <= long:
        return None
    least, most = (expected_loss("FineWeb", "gpt2", round(middle), tokens) for tokens in (long, short))
    if least is None or most is None:
        return None
    high = claim.high or claim.value
    claimed = _between(number(claim.value, ".2f"), number(high, ".2f"))
    values = {
        "size": count(float(f"{middle:.2g}")), "claimed": claimed,
        "tokens": _between(count(short), count(long)),
        "losses": _between(number(most.loss, ".2f"), number(least.loss, ".2f")), "low": least.low,
        "high": most.high,
    }  # fmt: skip
    if claim.value <= most.high and high >= least.low:
        text = _(
            "{claimed} for usual models of about {size} agrees with published runs on FineWeb: {losses} "
            "after "
            "{tokens} tokens ({low:.2f} to {high:.2f})"
        )
        return Finding("claim-typical", text.format(**values), good=True, weight=0.1)
    text = _(
        "usual models of about {size} do not end at {claimed}: by published runs on FineWeb it is {losses} "
        "after "
        "{tokens} tokens ({low:.2f} to {high:.2f})"
    )
    return Finding("claim-typical", text.format(**values), good=None, weight=0.4)


def _between(one: str, other: str) -> str:
    return one if one == other else f"{one} – {other}"
