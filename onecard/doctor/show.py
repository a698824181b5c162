"""A diagnosis for people: ten to fifteen lines, the worst first; or all of it."""

from __future__ import annotations

from onecard.doctor.cures import Cure
from onecard.doctor.diagnosis import OK, UNKNOWN, WRONG, Diagnosis, Judged
from onecard.language import _, ngettext, number
from onecard.plan.lines import GIB
from onecard.terminal import columns, hanging

WIDTH = 100
LINES = 15  # of the first screen
_LEAST_CLAIMS = 2


def lines_of(found: Diagnosis, *, full: bool = False) -> list[str]:
    """What happened, what shows it, what to do, what does not help."""
    head = hanging(found.what, _wide(), 0)
    if found.advised:
        head += hanging(found.advised, _wide(), 0)
    head += [line for e in found.evidence if e.text for line in hanging("  " + e.text, _wide(), 4)]
    quoted = next((e.of for e in found.evidence if e.of), "")
    if quoted and len(head) < 4:
        head += hanging("  > " + quoted, _wide(), 4)[:2]
    tail = [line for cure in found.cures for line in _cure(cure)]
    tail += [line for text in found.advice for line in hanging(f"{_word()}  {text}", _wide(), 6)]
    tail += [line for f in found.folklore for line in hanging(f"✗ {f.text}", _wide(), 4)]
    tail += [line for text in found.unknown for line in hanging("? " + text, _wide(), 4)]
    if found.next:
        tail += hanging(_("next: {command}").format(command=found.next), _wide(), 6)
    if found.next and found.paste and full:
        tail += hanging(_("then paste: {what}").format(what=found.paste), _wide(), 6)
    return [*head, *_claims(found, LINES - len(head) - len(tail), full), *tail]


def _word() -> str:
    return _("cure")


def _wide() -> int:
    return columns(of_a_pipe=WIDTH)


def _claims(found: Diagnosis, room: int, full: bool) -> list[str]:
    """As many as there is room for; the rest is counted."""
    every = [*found.stages, *found.claims]
    if not every:
        return []
    if full:
        return [line for claim in every for line in _claim(claim)]
    order = [claim for claim in every if claim.verdict == WRONG]
    # A stage that is sound is worth its line: it is what the answer asks for in the end.
    order += [stage for stage in found.stages if stage.verdict == OK]
    order.sort(key=lambda claim: -claim.weight)
    shown: list[str] = []
    told = 0
    for claim in order:
        lines = _claim(claim)
        if told >= _LEAST_CLAIMS and len(shown) + len(lines) >= room:
            break
        shown += lines
        told += 1
    rest = [claim for claim in every if claim not in order[:told]]
    if rest:
        shown.append(_rest(rest))
    return shown


def _rest(rest: list[Judged]) -> str:
    counts = {sign: sum(c.verdict == sign for c in rest) for sign in (WRONG, OK, UNKNOWN)}
    signs = {WRONG: "✗", OK: "✓", UNKNOWN: "?"}
    parts = " ".join(f"{signs[sign]}{n}" for sign, n in counts.items() if n)
    text = ngettext("and {n} more ({parts}): --full", "and {n} more ({parts}): --full", len(rest))
    return "  " + text.format(n=len(rest), parts=parts)


def _claim(claim: Judged) -> list[str]:
    return hanging(f"{claim.sign} {claim.words}: {claim.reason}", _wide(), 4)


def _cure(cure: Cure) -> list[str]:
    names = {"nanogpt": _("in nanoGPT"), "nanochat": _("in nanochat"), "huggingface": _("in their trainer")}
    where = names.get(cure.trainer) or _("here: {command}").format(command=cure.command)
    figures = [
        number(cure.bytes / GIB, ".2f") + " GiB",
        _("{n} to spare").format(n=number(cure.spare / GIB, ".2f")),
    ]
    if cure.tokens_per_s:
        figures.append(_("{n} tokens/s").format(n=number(cure.tokens_per_s, ",.0f")))
    qualities = {
        "same": _("the same numbers"),
        "exact": _("exact"),
        "low-bit": _("low-bit: another training"),
    }
    figures.append(qualities[cure.quality])
    lines = hanging(f"{_word()}  {where}: " + ", ".join(figures), _wide(), 6)
    return lines + [f"    {line}" for line in cure.lines]
