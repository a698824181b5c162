"""Findings, alarms and mistakes of odd runs: nothing breaks, and every text is a sentence."""

from __future__ import annotations

import math
import random
import re

import pytest

from onecard.report.curve.alarms import alarms_of
from onecard.report.curve.findings import findings_of
from onecard.report.log import Evaluations, Log, Start, Steps
from onecard.report.mistakes.all import mistakes_of
from onecard.report.run_facts import RunFacts, Schedule
from tests.report.made_runs import losses, small_gpt

ODD = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1e300, 3.3, 10.8)


def odd_run(dice: random.Random) -> RunFacts:
    def number(*usual: float) -> float:
        return dice.choice(ODD) if dice.random() < 0.2 else dice.choice(usual)

    def steps() -> list[float]:
        every = dice.choice((1, 10, 250))
        found = [float(every * i) for i in range(dice.choice((0, 1, 2, 3, 7, 70, 700)))]
        if dice.random() < 0.2:
            dice.shuffle(found)
        return found if dice.random() < 0.8 else [dice.choice((0.0, 5.0))] * len(found)

    def columns(kind: type[Steps] | type[Evaluations]) -> Steps | Evaluations:
        numbers = steps()
        healthy = losses(dice.randrange(9), len(numbers))
        named = {"step": numbers}
        for name in kind.NAMES[1:]:
            if dice.random() < 0.6:
                odd = dice.random() < 0.3 and name != "tokens"
                named[name] = [dice.choice(ODD) if odd and dice.random() < 0.2 else loss for loss in healthy]
        return kind(**named)

    steps_, evaluations = columns(Steps), columns(Evaluations)
    assert isinstance(steps_, Steps)
    assert isinstance(evaluations, Evaluations)
    parts = tuple(Start(steps_, evaluations) for _ in range(dice.randrange(3)))
    names = ("learning_rate", "min_lr", "warmup_iters", "lr_decay_iters", "n_embd", "out_dir", "vocab_size")
    odd_values = (0, 1, -5, 1e-4, 6000, "auto", "gpt-125m", math.inf)
    settings = {name: dice.choice(odd_values) for name in names}
    schedule = Schedule(
        kind=dice.choice(("cosine", "linear", "constant", "wsd", "table", "unknown")),
        peak=number(6e-4),
        final=number(0.0, 6e-5),
        warmup_steps=dice.choice((0, 100, 10**9)),
        horizon=dice.choice((None, 0, 1, 5000)),
        decay_start=dice.choice((None, 0, 4000)),
        decay_shape=dice.choice(("linear", "cosine", "sqrt", "exponential")),
        table=((0, 1e-4), (100, 0.0))[: dice.randrange(3)],
    )

    def maybe(*values: object) -> object:
        return dice.choice((None, *values))

    return RunFacts(
        log=Log(
            dice.choice(("nanogpt", "csv", "table")), steps_, evaluations, settings,
            {"mfu": maybe(0.1, (0.1, 0.2))}, parts,
        ),
        shape=maybe(small_gpt()), parameters=maybe(0, 1, 41_000_000), tokens_per_step=maybe(1, 524_288),
        block_size=maybe(1, 1024), batch_size=maybe(1, 16), gradient_accumulation_steps=maybe(1, 40),
        vocab_size=maybe(1, 2, 65, 50304), train_tokens=maybe(1, 10**9), eval_tokens=maybe(0, 1, 10**7),
        last_step=maybe(0, 1, 5000), schedule=maybe(schedule), dropout=maybe(0.0, 0.1, 5.0),
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize("seed", range(150))
def test_nothing_breaks(seed: int) -> None:
    facts = odd_run(random.Random(seed))
    for found in (*alarms_of(facts), *findings_of(facts), *mistakes_of(facts)):
        assert found.text[-1] in ".?:)", found.text
        assert "{" not in found.text
        assert not re.search(r"\bnan\b", found.text), found.text
        assert found.weight > 0
