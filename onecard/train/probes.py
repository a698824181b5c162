"""Before the first step: what comes rarely and late is tried once now.

A sample or a checkpoint that does not fit would otherwise show at the first evaluation, hours later. Training
needs no probe of its own: step 0 is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import islice

from onecard.errors import UserError
from onecard.generate.decode import Sampling, generate
from onecard.train.evaluate import evaluate
from onecard.train.journal import Journal
from onecard.train.retries import patiently
from onecard.train.training_run import TrainingRun

Probe = tuple[str, Callable[[], None]]


def probes(run: TrainingRun, journal: Journal) -> list[Probe]:
    """Named as the loop names what it does. A run that begins evaluates before its first step anyway; one
    that goes on from a checkpoint mostly does not, even where its step has an evaluation: that was done."""
    found: list[Probe] = []
    position = run.position
    if position.step % run.config.eval_interval or position.evaluated_step == position.step:
        found.append(("evaluation", lambda: _evaluation(run)))
    if run.tokenizer is not None and run.config.sample_tokens:
        found.append(("sampling", lambda: _sampling(run)))
    return [*found, ("checkpoint", lambda: patiently(lambda: _checkpoint(run), run, journal))]


def _evaluation(run: TrainingRun) -> None:
    """One micro-batch of it."""
    evaluate(
        run.model, run.evaluation["val"].first(run.fit.evaluation_batch), text=run.text.get("val"),
        micro_batch=run.fit.evaluation_batch, device=run.device,
    )  # fmt: skip


def _sampling(run: TrainingRun) -> None:
    """Two tokens, with keys and values held for as many as a sample will have."""
    assert run.tokenizer is not None
    if not run.fit.may_sample():
        return
    text = generate(
        run.model, [0], samples=1, max_new_tokens=run.config.sample_tokens, n_vocab=run.tokenizer.n_vocab,
        sampling=Sampling(temperature=0.8, top_k=200, top_p=1.0, seed=run.config.seed),
    )  # fmt: skip
    with contextlib.suppress(UserError):  # what the model writes is not asked here
        list(islice(text, 2))


def _checkpoint(run: TrainingRun) -> None:
    """The copy that saving makes of each tensor in turn: here of the largest."""
    assert run.stepper is not None
    state = run.stepper.export()
    largest = max([*state.weights.values(), *state.optimizer.values()], key=lambda tensor: tensor.nbytes)
    largest.to("cpu", copy=True)
