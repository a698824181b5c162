"""Runs that do not end with an error: a loss that is no number, one that rises, and steps that take too
long.

A cause is only named where something shows it: a setting, a line of the log, a figure of plan, the
writer's own words. Where nothing does, that is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from onecard.doctor.asked import Asked
from onecard.doctor.diagnosis import Diagnosis, Evidence
from onecard.doctor.slow import slow_of
from onecard.errors import UserError
from onecard.language import _, number
from onecard.plan.machine import Target
from onecard.report.curve.alarms import alarms_of
from onecard.report.curve.detectors import DIVERGING, NOT_A_NUMBER
from onecard.report.gathering.gather import facts_of
from onecard.report.gathering.known import Known
from onecard.report.mistakes.rate import warmup
from onecard.report.reading.assemble import log_of
from onecard.report.run_facts import RunFacts

NAN = "not-a-number"
_NAN = re.compile(
    r"loss\W{0,12}(?:\w{1,9} ){0,4}\W{0,3}nan\b|\bnan\W{0,3}(?:loss|verlust)|train_loss\W{1,4}nan"
    r"|(?:p\S{1,2}rdida|verlust)\W{0,6}(?:\w{1,9} ){0,4}\W{0,3}nan\b"
    r"|loss\W{0,12}(?:is |=|:)\W{0,3}inf\b|\bgoes? (?:to )?nan\b|becomes? nan\b|wird nan\b|se vuelve nan\b",
    re.IGNORECASE,
)
_RISES = re.compile(
    r"loss (?:suddenly )?(?:explod|diverg|spik|blow|jump|goes up|shoots)|\bdiverg(?:es|ed|ing|e|iert)\b"
    r"|(?:p\S{1,2}rdida) (?:diverge|explota|sube)|Verlust (?:explodiert|steigt)",
    re.IGNORECASE,
)
_HALF = re.compile(r"(?<!b)float16|\bfp16\b|\.half\(\)", re.IGNORECASE)
_SCALER = re.compile(r"GradScaler|\bscaler\b|loss[ _]scal", re.IGNORECASE)
_NO_SCALER = re.compile(
    r"(?:without|no|sin|ohne)\s(?:a |an |un |einen? )?(?:grad\w*[ _]?)?scal", re.IGNORECASE
)
_ALSO_FULL = re.compile(
    r"(?:also|same|too|even|tambi\S{1,2}n|auch|igual).{0,40}(?:float32|fp32|full precision)|(?:float32"
    r"|fp32|full precision).{0,40}(?:also|same|too|tambi\S{1,2}n|auch|igual)",
    re.IGNORECASE,
)
_SAME_PLACE = re.compile(
    r"(?:same|always|every (?:time|epoch)|siempre|immer).{0,50}(?:step|iter|batch|paso|schritt)",
    re.IGNORECASE,
)
_RATE = re.compile(r"(?:learning[_ ]rate|\blr)\W{1,4}(\d(?:\.\d{1,4})?e-\d{1,2}|0?\.\d{1,7})", re.IGNORECASE)
# AdamW's rates of GPT-2's sizes are 6e-4 (124M) and less; three times that is above what is stable there.
USUAL_RATE, HIGH_RATE = 6e-4, 2e-3


@dataclass(frozen=True)
class Clue:
    cause: str
    text: str
    advice: str
    weight: float


def alarm_of(found: Asked) -> Diagnosis | None:
    """What the log's own losses show."""
    facts = _facts(found)
    if facts is None:
        return None
    for alarm in alarms_of(facts):
        if alarm.key in (NOT_A_NUMBER, DIVERGING) and alarm.good is False:
            return _unstable(NAN if alarm.key == NOT_A_NUMBER else "diverging", alarm.text, found, facts)
    return None


def judged_log(found: Asked, target: Target | None) -> Diagnosis | None:
    """What the writer says of it, and how long its steps take."""
    facts = _facts(found)
    text = found.prose
    if said := _NAN.search(text):
        what = _("The loss is not a number: from there on nothing is learned.")
        return _unstable(NAN, what, found, facts, _line(text, said.start()))
    if (said := _RISES.search(text)) and facts is None:
        return _unstable("diverging", _("The loss rises and does not come back."), found, facts,
                         _line(text, said.start()))  # fmt: skip
    return slow_of(found, facts, target)


def _facts(found: Asked) -> RunFacts | None:
    log = log_of(found.reader)
    if log is None:
        return None
    try:
        return facts_of(log, Known(card=found.card), None)
    except (UserError, ValueError, ArithmeticError):
        return None


def _unstable(key: str, what: str, found: Asked, facts: RunFacts | None, line: str = "") -> Diagnosis:
    clues = sorted(_clues(key, found, facts), key=lambda clue: -clue.weight)
    evidence = [Evidence("", of=line)] if line else []
    evidence += [Evidence(clue.text) for clue in clues]
    advice = list(dict.fromkeys(clue.advice for clue in clues if clue.advice))
    unknown = []
    if not any(clue.cause not in ("nan-speed",) for clue in clues):
        unknown.append(
            _("nothing in the paste shows why: the lines before it, the dtype and the learning rate would")
        )
        advice.append(_("go back to the checkpoint before it, with half the learning rate"))
    elif key == NAN:
        unknown.append(_("which layer was first: onecard's runs record it, other logs do not"))
    return Diagnosis(
        key, what, tuple(evidence), advice=tuple(advice), unknown=tuple(unknown),
        next=_("onecard report LOG") if facts is not None else "", cause=clues[0].cause if clues else "",
        paste=_("the ten lines of the log before it"),
    )  # fmt: skip


def _clues(key: str, found: Asked, facts: RunFacts | None) -> Iterator[Clue]:
    text, values = found.prose, found.pasted.values
    dtype = values.get("dtype") or (facts.dtype if facts is not None else None)
    half = dtype == "float16" or (dtype is None and _HALF.search(text) is not None)
    full_too = _ALSO_FULL.search(text) is not None
    if full_too:
        yield Clue("not-fp16", _("float32 ends the same way: 16 bits are not to blame"), "", 2.0)
    elif key == NAN and half:
        scaled = _SCALER.search(text) is not None and _NO_SCALER.search(text) is None
        if found.pasted.trainer in ("nanogpt", "onecard") or scaled:
            yield Clue(
                "fp16",
                _("float16 overflows above 65,504, where bfloat16 does not; its gradient scaler skips "
                  "such steps"),
                "dtype = 'bfloat16'", 4.0,
            )  # fmt: skip
        else:
            yield Clue(
                "fp16-without-scaler", _("float16 without a gradient scaler: small gradients are 0, large "
                                         "ones inf"),
                _("bfloat16, or torch.amp.GradScaler around backward and step"), 6.0,
            )  # fmt: skip
    yield from _of_rate(text, values.get("learning_rate"), facts)
    clip = values.get("grad_clip")
    if clip in (0, 0.0) or re.search(r"(?:no|without|sin|ohne) (?:gradient )?clip", text, re.IGNORECASE):
        yield Clue(
            "clipping",
            _("gradients are not clipped: one bad batch moves every weight"),
            "grad_clip = 1.0",
            3.0,
        )
    if _SAME_PLACE.search(text):
        yield Clue(
            "data", _("it comes at the same place each time: a piece of the data is the likely cause"),
            _("another seed: if the place moves, it is the data; onecard prepare NAME --check"), 2.5,
        )  # fmt: skip
    if facts is not None and key == NAN and (faster := _faster(facts)):
        yield Clue("nan-speed", faster, "", 0.5)


def _of_rate(text: str, value: object, facts: RunFacts | None) -> Iterator[Clue]:
    said = _RATE.search(text)
    rate = value if isinstance(value, float) else float(said[1]) if said else None
    muon = "muon" in text.lower()
    if rate is not None and rate >= HIGH_RATE and not muon:
        words = _("a learning rate of {rate} is {times} times the usual {usual} of a GPT-2 124M").format(
            rate=number(rate, "g"), times=number(rate / USUAL_RATE, ".1f"), usual=f"{USUAL_RATE:g}"
        )
        yield Clue("rate", words, f"learning_rate = {USUAL_RATE:g}", 5.0)
    if re.search(
        r"warmup_iters\W{1,4}0\b|(?:no|without|sin|ohne) (?:warm-?up|calentamiento)", text, re.IGNORECASE
    ):
        yield Clue(
            "warm-up",
            _("there is no warm-up: AdamW's first steps are its largest"),
            "warmup_iters = 200",
            3.5,
        )
    elif facts is not None:
        for mistake in warmup(facts):
            yield Clue("warm-up", mistake.text, mistake.change, 1.5)


def _faster(facts: RunFacts) -> str:
    """Steps without numbers are faster, and that is no speed."""
    steps = facts.log.steps
    sound = [ms for loss, ms in zip(steps.loss, steps.ms, strict=True) if loss == loss and ms > 0]
    broken = [ms for loss, ms in zip(steps.loss, steps.ms, strict=True) if loss != loss and ms > 0]
    if len(sound) < 3 or len(broken) < 3:
        return ""
    before, after = sorted(sound)[len(sound) // 2], sorted(broken)[len(broken) // 2]
    if after > 0.97 * before:
        return ""
    text = _("steps without numbers take {percent:.0f}% less time: that is no speed")
    return text.format(percent=100 * (1 - after / before))


def _line(text: str, at: int) -> str:
    begin = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    return text[begin : end if end >= 0 else len(text)].strip()[:240]
