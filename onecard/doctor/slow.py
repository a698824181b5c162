"""Runs that are slow: by how much, and what shows why."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from onecard.doctor.asked import Asked
from onecard.doctor.diagnosis import Diagnosis, Evidence
from onecard.doctor.of_config import run_of
from onecard.errors import UserError
from onecard.language import _, number
from onecard.plan.lines import GIB
from onecard.plan.machine import Target
from onecard.report.eta.estimate import Eta, estimate
from onecard.report.eta.predicted import Prediction, predicted
from onecard.report.gathering.gather import is_of_cpu
from onecard.report.log import Steps
from onecard.report.run_facts import RunFacts

_SLOW = re.compile(
    r"\b(?:too |very |so |extremely |much |painfully |incredibly |unusually )?slow(?:er|ly)?\b"
    r"|\btakes? (?:forever|ages|too long)|\blent[oa]s?\b|\blangsam\w*|\btarda (?:mucho|demasiado)"
    r"|low (?:GPU )?utili[sz]ation|low MFU|dauert (?:ewig|zu lange)",
    re.IGNORECASE,
)
_SLOWER = 1.6  # times plan's time of a step, beyond the range that plan itself allows
_EVALUATION_SHARE = 0.25
_CPU = re.compile(
    r"device\W{1,4}['\"]?cpu\b|--device[= ]cpu|\bon (?:the |my )?CPU\b|GPU (?:is |usage "
    r"|utili[sz]ation )?(?:at |of )?0 ?%|cuda\.is_available\(\)\W{1,6}False|torch[ =]+[\d.]+\+cpu"
    r"|en la CPU|auf der CPU",
    re.IGNORECASE,
)
_PAGED = re.compile(
    r"shared GPU memory|memoria de GPU compartida|[Gg]emeinsam\w+ GPU-Speicher|sysmem fallback"
    r"|system memory fallback|spill\w* (?:in)?to (?:RAM|system)|paging to (?:host|RAM)",
    re.IGNORECASE,
)
_WINDOWS = re.compile(r"\bWSL2?\b|microsoft-standard|\bWindows (?:10|11)\b|Task Manager|WDDM", re.IGNORECASE)
_HEAT = re.compile(
    r"throttl|HW Slowdown\W{1,6}Active|SW Power Cap\W{1,6}Active|SW Thermal Slowdown\W{1,6}Active"
    r"|\b(?:8[5-9]|9\d) ?\u00b0? ?C\b|on battery|en bater\S{1,2}a|im Akkubetrieb",
    re.IGNORECASE,
)
_SHARED = re.compile(
    r"another (?:process|job|training|user)|other (?:processes|jobs) on|two (?:runs|trainings|jobs)"
    r"|otro proceso|anderer Prozess|also running (?:on|a game)|while gaming",
    re.IGNORECASE,
)
_LOADER = re.compile(
    r"num_workers\W{1,4}0\b|dataloader.{0,60}(?:slow|bottleneck|%)|(?:bottleneck"
    r"|waiting).{0,40}(?:data ?loader|disk|data)|network drive|NFS\b|/mnt/[c-z]/|HDD\b",
    re.IGNORECASE,
)
_EAGER = re.compile(
    r"compile\W{1,4}False|--compile[= ]False|without (?:torch\.)?compile|--no-compile"
    r"|torch_compile\W{1,4}False",
    re.IGNORECASE,
)
_HOST = re.compile(
    r"\bgpu[- ]util\w*\D{1,12}([1-6]?\d) ?%|(?:CPU|host)[- ]bound|one core at 100|100% of one core",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Clue:
    cause: str
    text: str
    advice: str
    weight: float


def slow_of(found: Asked, facts: RunFacts | None, target: Target | None) -> Diagnosis | None:
    """None where neither a figure nor the writer says that it is slow."""
    text = found.prose
    eta, expected = _pace(facts)
    times = _times(eta, expected)
    said = _SLOW.search(text)
    of_cpu = facts is not None and is_of_cpu(facts.log)
    on_card = of_cpu and found.card is not None
    paged = _PAGED.search(text)
    share = _evaluations(facts, eta)
    if times is None and said is None and paged is None and not on_card and share is None:
        return None
    clues = sorted(_clues(found, facts, target, times, share), key=lambda clue: -clue.weight)
    if times is None and not clues and eta is not None:
        return None  # by the log it is as fast as it can be expected to be: that is eta's answer
    what = _("The run is slow.")
    if times is not None and eta is not None and expected is not None:
        text = _("A step takes {times} times as long as it should: {ms} s, expected are {low} to {high} s.")
        what = text.format(
            times=number(times, ".1f"), ms=number(eta.step_ms.mid / 1000, ".2f"),
            low=number(expected.step_ms.low / 1000, ".2f"), high=number(expected.step_ms.high / 1000, ".2f"),
        )  # fmt: skip
    unknown: tuple[str, ...] = ()
    if not clues:
        unknown = (_("nothing in the paste shows why: nvidia-smi while it runs, and the config, would"),)
    return Diagnosis(
        "slow", what, tuple(Evidence(clue.text) for clue in clues),
        advice=tuple(dict.fromkeys(clue.advice for clue in clues if clue.advice)), unknown=unknown,
        next="onecard doctor", paste=_("what nvidia-smi shows while it runs"),
        cause=clues[0].cause if clues else "",
    )  # fmt: skip


def _pace(facts: RunFacts | None) -> tuple[Eta | None, Prediction | None]:
    if facts is None:
        return None, None
    try:
        eta = estimate(facts)
        return eta, predicted(eta.facts, Steps()) if eta.prediction is None else None
    except (UserError, ValueError, ArithmeticError):
        return None, None


def _times(eta: Eta | None, expected: Prediction | None) -> float | None:
    """How many times longer a step takes than it should; None where that is within what is expected."""
    if eta is None or expected is None or expected.step_ms.mid <= 0:
        return None
    times = eta.step_ms.mid / expected.step_ms.mid
    return times if eta.step_ms.mid > _SLOWER * expected.step_ms.high / 1.25 and times > _SLOWER else None


def _evaluations(facts: RunFacts | None, eta: Eta | None) -> float | None:
    """The share of the time that evaluations take, where it is large: nanoGPT's line after one has it in its
    time."""
    if facts is None or eta is None or not facts.eval_every:
        return None
    steps = facts.log.steps
    step_s, every = eta.step_ms.mid / 1000, facts.eval_every
    taken = [
        ms / 1000 - step_s
        for step, ms in zip(steps.step[1:], steps.ms[1:], strict=True)
        if step % every == 0 and ms > 0
    ]
    seconds = statistics.median(taken) if taken else eta.evaluation_s.mid
    share = seconds / (seconds + every * step_s) if seconds > 0 and step_s > 0 else 0.0
    return share if share > _EVALUATION_SHARE else None


def _clues(
    found: Asked, facts: RunFacts | None, target: Target | None, times: float | None, share: float | None
) -> Iterator[Clue]:
    text = found.prose
    if _CPU.search(text) or (facts is not None and is_of_cpu(facts.log)):
        yield Clue(
            "cpu", _("it trains on the CPU, not on a card"),
            _("device = 'cuda'; `onecard doctor` alone says what torch sees of the card"), 9.0,
        )  # fmt: skip
    yield from _paging(found, text, target, times)
    if share is not None:
        yield Clue(
            "evaluation", _("evaluations take {share:.0f}% of the time").format(share=100 * share),
            _("a larger eval_interval, or a smaller eval_iters"), 6.0,
        )  # fmt: skip
    if _SHARED.search(text):
        yield Clue(
            "other-program", _("another program computes on the same card"), _("end it, or wait for it"), 5.0
        )
    if _HEAT.search(text):
        yield Clue(
            "heat", _("the card lowers its clock: heat, or its power limit"),
            _("air and fans; a laptop on its charger; onecard bench measures the card"), 5.5,
        )  # fmt: skip
    if _LOADER.search(text):
        yield Clue(
            "loader", _("the data comes too slowly: the card waits for it"),
            _("data on a local disk (in WSL not below /mnt/c), and more workers"), 4.0,
        )  # fmt: skip
    yield from _not_compiled(found, text, target)
    if (said := _HOST.search(text)) and times is None:
        part = _("the host does not launch kernels fast enough")
        if said[1]:
            text = _("the card is busy {n}% of the time: the host does not launch kernels fast enough")
            part = text.format(n=said[1])
        yield Clue(
            "host-bound", part, _("a larger batch_size with fewer micro-batches, or compile = True"), 2.0
        )


def _paging(found: Asked, text: str, target: Target | None, times: float | None) -> Iterator[Clue]:
    """No error is printed: Windows' driver moves what is too much to the host."""
    paged, windows = _PAGED.search(text), _WINDOWS.search(text)
    if found.config is None or target is None:
        run = None
    else:
        compiled = found.pasted.compiled
        run = run_of(found.config, target, {} if compiled is None else {"compile": compiled})
    over = run is not None and run.need > target.allowed if target is not None else False
    if not paged and not (windows and over):
        return
    words = _("memory beyond the card's is moved to host memory, without an error")
    if run is not None and over:
        words = _(
            "it needs {need} GiB and the card has {there}: the rest is in host memory, without an error"
        ).format(need=number(run.need / GIB, ".2f"), there=number(run.there / GIB, ".2f"))
    advice = _("a smaller batch_size with as many tokens a step")
    if run is not None:
        from onecard.doctor.cures import nanogpt_cures

        cures = nanogpt_cures(run.theirs, compiled=run.config.compile)
        advice = ", ".join(str(line).split("   #")[0] for line in cures[0].lines) if cures else advice
    yield Clue("paging", words, advice, 8.0)


def _not_compiled(found: Asked, text: str, target: Target | None) -> Iterator[Clue]:
    said = _EAGER.search(text) or found.pasted.values.get("compile") is False
    if not said:
        return
    words = _("the model is not compiled")
    if found.config is not None and target is not None:
        eager, fast = (run_of(found.config, target, {"compile": c}) for c in (False, True))
        if eager and fast and eager.tokens_per_s and fast.tokens_per_s:
            words += _(": {percent:+.0f}% speed by plan").format(
                percent=100 * (eager.tokens_per_s / fast.tokens_per_s - 1)
            )
    yield Clue("compile-off", words, "compile = True", 3.0)
