"""Reports made by hand: what the modules that find things would have found."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from onecard.hardware.cards import find_card
from onecard.report.answer import Report, Sample
from onecard.report.course import Amount, Course, Pace
from onecard.report.findings import Finding, Forecast, ForecastPoint, Mistake, NextStep, Place
from onecard.report.log import Evaluations, Log, Start, Steps
from onecard.report.run_facts import RunFacts, Schedule

BETTER = "dataset = 'fineweb-edu'"
FURTHER = "onecard train --init_from=nanogpt:out --max_iters=12000"
HOSTILE = "</style><script>alert(\"x\")</script><img src=x onerror='y'>&amp;\x1b[2J"


def falling(step: float) -> float:
    return 3.2 + 7.6 / (1 + step / 60) ** 0.75


def log_of(steps: int, last: int, *, noise: float = 0.03, every: int = 500, name: str = "nanogpt") -> Log:
    """`steps` lines until step `last`, an evaluation every so many."""
    draw = random.Random(steps)
    at = [round(n * last / (steps - 1)) for n in range(steps)]
    seen = Steps(
        step=at,
        loss=[falling(s) + draw.gauss(0, noise) for s in at],
        ms=[4360.0 + draw.gauss(0, 20) for _s in at],
        lr=[6e-4 * min(1.0, s / 700) for s in at],
    )
    evaluated = list(range(0, last + 1, every))
    evaluations = Evaluations(
        step=evaluated, val=[falling(s) + 0.02 for s in evaluated], train=list(map(falling, evaluated))
    )
    return Log(name, seen, evaluations, starts=(Start(seen, evaluations),))


def report(*, last: int = 6000, end: int = 10_000, lines: int = 601) -> Report:
    """A sound run on its way to step `end`."""
    facts = RunFacts(
        log_of(lines, last), parameters=54_000_000, tokens_per_step=262_144, last_step=end, data="FineWeb",
        tokenizer="gpt2", schedule=Schedule("cosine", 6e-4, 6e-5, 700, end), card=find_card("RTX 4070"),
        source="train.log", origin={"parameters": "log", "tokens_per_step": "config"},
        notes=("an evaluation line is cut",),
    )  # fmt: skip
    findings = (
        Finding("gap", "Training and validation are 0.02 apart.", True, None, 40.0),
        Finding(
            "falling", "The validation loss still falls, by 0.05 in the last 1,000 steps.", None, None, 0.3
        ),
        Finding("noise", "Single training losses waver by 0.03.", None, None, 20.0),
        Finding("begin", "The first loss is near that of guessing among 50,304 tokens.", True, 0, 10.0),
    )
    pace = Pace(4.36, 60_100.0, 0.41, 58.3e12, 0.0766, "nanoGPT divides by an A100's 312 TFLOPS", 20.0)
    return Report(
        facts, "train.log", findings,
        forecast=Forecast((ForecastPoint(end, end * 262_144, 3.28, 3.25, 3.31),)),
        place=Place(
            "A usual run of this size and length ends between 3.20 and 3.40.",
            (("a model of 79M", 79.0, 3.2, 3.643, "its paper"), ("another", 124.0, None, 3.5, "its log")),
            3.3, 3.2, 3.4, ("Bridged from other text.",), standing="on",
        ),
        next_steps=(
            NextStep("Read better text", BETTER, "theirs", (0.1, 0.2), 7.0, 2.0, 0.6, "published runs"),
            NextStep("Go on with it here", FURTHER, "onecard", (0.03, 0.06), 7.2, 2.1, 0.6, "the forecast"),
        ),
        course=Course(
            pace, Amount(26_160, 17_440), Amount(1.5, 1.0), Amount(2.1, 1.4), Amount(0.63, 0.42),
            Amount(0.63, 0.42), "EUR", 80.0,
        ),
        sample=Sample("Once there was a river that nobody had named, and so it had no end.", 6000),
    )  # fmt: skip


def finished() -> Report:
    made = report(last=6000, end=6000)
    points = (
        ForecastPoint(12_000, None, 3.26, 3.22, 3.30, "longer from the start"),
        ForecastPoint(12_000, None, 3.28, 3.24, 3.33, "decayed and restarted"),
    )
    course = replace(
        made.course, seconds=Amount(26_160, 0.0), pc_kwh=Amount(2.1, 0.0), cost=Amount(0.63, 0.0)
    )
    return replace(made, forecast=Forecast(points), course=replace(course, cost_high=Amount(0.63, 0.0)))


def wrong() -> Report:
    """A model of another size than was meant, above what is usual."""
    mistake = Mistake(
        "size", "A model of 117M was meant, one of 54M was built.", "n_embd = 512; the file is called 117m",
        "n_embd = 768   # was 512", "about 0.2 nats", 80.0,
    )  # fmt: skip
    usual = Place(
        "A usual run ends between 2.90 and 3.00.", (), 2.95, 2.9, 3.0, standing="behind", equals_tokens=4e8
    )
    return replace(finished(), mistakes=(mistake,), place=usual)


def diverging() -> Report:
    alarm = Finding("diverging", "The training loss has risen by 1.2.", False, 5200, 95.0)
    return replace(
        report(), alarms=(alarm,), forecast=Forecast(refused="A run that diverges has no end to forecast.")
    )


def hostile() -> Report:
    made = wrong()
    facts = replace(
        made.facts,
        notes=(HOSTILE,),
        data=HOSTILE,
        tokenizer=HOSTILE,
        source=HOSTILE,
        origin={"data": HOSTILE},
    )
    return replace(
        made, facts=facts, name=HOSTILE, findings=(Finding(HOSTILE, HOSTILE),), sample=Sample(HOSTILE),
        mistakes=(Mistake("x", HOSTILE, HOSTILE, HOSTILE, HOSTILE, 100.0),),
        place=Place(HOSTILE, ((HOSTILE, 1.0, 1.0, 1.0, HOSTILE),), bridges=(HOSTILE,)),
        next_steps=(NextStep(HOSTILE, HOSTILE, "theirs", source=HOSTILE),),
        forecast=Forecast((ForecastPoint(9000, 1, 3.0, 2.9, 3.1, HOSTILE),), notes=(HOSTILE,)),
    )  # fmt: skip


def without_numbers() -> Report:
    columns = Steps(step=range(40), loss=[math.inf] * 40)
    return Report(RunFacts(Log("nanogpt", columns, Evaluations())))


EVERY = {
    "under way": report,
    "finished": finished,
    "wrong": wrong,
    "diverging": diverging,
    "hostile": hostile,
}
