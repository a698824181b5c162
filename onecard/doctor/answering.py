"""A paste in, a diagnosis out: what broke comes first, then how the run goes, then what somebody advised."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onecard.config.run import RunConfig
from onecard.doctor import crashes
from onecard.doctor.advice import judged_advice
from onecard.doctor.asked import Asked
from onecard.doctor.diagnosis import Diagnosis
from onecard.doctor.frames import moment_of
from onecard.doctor.memory import Case
from onecard.doctor.memory import diagnose as of_memory
from onecard.doctor.of_log import alarm_of, judged_log
from onecard.doctor.out_of_memory import OutOfMemory
from onecard.errors import UserError
from onecard.language import _
from onecard.plan.machine import Figures, Target, find_target


@dataclass(frozen=True)
class Limits:
    """Of the card's memory, in GiB."""

    vram_limit: float | None = None
    vram_reserve: float | None = None


def diagnose(found: Asked, limits: Limits) -> Diagnosis:
    """Out of memory, then crashes, then a log that goes wrong, then advice."""
    target = target_of(found, limits)
    advice = judged_advice(found, target)
    error = _out_of_memory(found, target) or crashes.find(found.text) or alarm_of(found)
    if error is None and (advice is None or not _is_advice(advice)):
        error = judged_log(found, target)
    if error is not None:
        return _both(error, advice) if advice is not None and _is_advice(advice) else error
    if advice is not None:
        return advice
    return Diagnosis(
        "unknown", _("No error that is known here was found in the paste."),
        unknown=(_("paste the whole traceback, from its first line to its last"),),
    )  # fmt: skip


def _is_advice(advice: Diagnosis) -> bool:
    """A log and a traceback have figures too: an answer changes a config, or claims several things."""
    return bool(advice.stages) or sum(claim.weight >= 0.5 for claim in advice.claims) >= 2


def _out_of_memory(found: Asked, target: Target | None) -> Diagnosis | None:
    message = found.message
    if message is None and found.buffers and _of_a_loss(found):
        # Of an answer or a traceback often nothing else is quoted: the line of the compiler's code it
        # stopped at.
        message = OutOfMemory("torch", 0, "")
    if message is None:
        return None
    moment = moment_of(list(found.frames), found.text)
    return of_memory(Case(message, moment, found.buffers, found.pasted, found.config, target))


def _of_a_loss(found: Asked) -> bool:
    """A large buffer: an Inductor line is quoted for its size."""
    return any((buffer.bytes(2) or 0) >= 2**24 for buffer in found.buffers)


def _both(error: Diagnosis, advice: Diagnosis) -> Diagnosis:
    """The error first, and the advice judged below it; of cures those of the error."""
    # The advice's own line on the config as it was says more than the error's.
    own = tuple(e for e in error.evidence if e.key != "bill" or not advice.stages)
    return replace(
        error, evidence=(*own, *advice.evidence), cures=error.cures or advice.cures,
        unknown=(*error.unknown, *advice.unknown), claims=advice.claims, stages=advice.stages,
        folklore=() if advice.stages else error.folklore, advised=advice.what,
    )  # fmt: skip


def target_of(found: Asked, limits: Limits) -> Target | None:
    if found.card is None:
        return None
    config = found.config or RunConfig()
    if limits.vram_limit is not None or limits.vram_reserve is not None:
        config = replace(
            config, vram_limit=limits.vram_limit or config.vram_limit,
            vram_reserve=limits.vram_reserve if limits.vram_reserve is not None else config.vram_reserve,
        )  # fmt: skip
    try:
        return find_target(config, found.card.name, None, Figures())
    except UserError:
        return None
