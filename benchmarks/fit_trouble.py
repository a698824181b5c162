"""What benchmarks/fit.py does to a run that is watched: errors raised inside, somebody else on its card."""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from fit_runs import GIB, Row, Watched, logged_steps

AFTER_LAYERS, BETWEEN_LAYERS = "backward, after the layers", "backward, between two layers"
PLACES = {"forward": 24, BETWEEN_LAYERS: 20, AFTER_LAYERS: 16, "entry of the update": 20, "evaluation": 12,
          "sampling": 4, "checkpoint": 4}  # fmt: skip
# Of these, so many come one after the other, once in a run: each time the trainer has to think of something
# else (an emptied card, smaller bites, no sample, another setting).
IN_A_ROW = {"evaluation": 3, "sampling": 2, "checkpoint": 2}
_ON_PURPOSE = "CUDA out of memory: raised on purpose in "


def places(options: argparse.Namespace) -> dict[str, int]:
    """How many errors where; in the tiny mode a third, which takes a third of the time."""
    return {place: -(-count // 3) if options.tiny else count for place, count in PLACES.items()}


class Injector:
    """Raises as a full card does: in every place as often as `counts` says, at steps drawn by `seed`."""

    def __init__(self, watched: Watched, steps: int, seed: int, counts: dict[str, int]) -> None:
        from onecard.model.decoder import Decoder, LayerRun
        from onecard.train import evaluate, journal
        from onecard.train.saving import Saver
        from onecard.train.step import Stepper

        self.watched, self.raised = watched, list[tuple[str, int]]()
        self.arrived = Counter[str]()  # by type, where the trainer deals with them
        numbers, last = random.Random(seed), int(0.9 * steps)
        every = watched.config.eval_interval
        self.due: dict[str, list[int]] = {}
        at_evaluations = list(range(every, last, every))
        numbers.shuffle(at_evaluations)
        for place, count in counts.items():
            together = IN_A_ROW.get(place, 1)
            # Samples and checkpoints are not done again for one another: each at an evaluation of its own.
            # All others where they come; an error that is due waits for its place.
            apart = place in ("sampling", "checkpoint")
            drawn = [
                at_evaluations.pop() if apart else numbers.randrange(1, last)
                for _ in range(count - together + 1)
            ]
            self.due[place] = sorted([drawn[0]] * (together - 1) + drawn)
        # A layer in the middle: by then some gradients have been added to their accumulators, others not.
        self._wrap(LayerRun, "backward", BETWEEN_LAYERS, lambda run, *_: run.number == _middle(watched))
        self._wrap(Decoder, "loss_sum", "forward", lambda *_, scale=None, **__: scale is not None)
        for owner in (Decoder, *_subclasses(Decoder)):
            if "_begin_backward" in vars(owner):
                self._wrap(owner, "_begin_backward", AFTER_LAYERS)
        self._wrap(Stepper, "update", "entry of the update")
        self._wrap(evaluate, "evaluate", "evaluation")
        self._wrap(journal, "sample_text", "sampling")
        self._wrap(Saver, "write", "checkpoint")
        self._watch_arrivals()

    def told(self) -> Row:
        """Errors by place, the most in a row at one step, and as what they arrived."""
        return {
            "raised": dict(Counter(place for place, _ in self.raised)), "arrived": dict(self.arrived),
            "in_a_row": {
                place: max((len(list(g)) for at, g in groupby(self.raised) if at[0] == place), default=0)
                for place in IN_A_ROW
            },
        }  # fmt: skip

    def _wrap(self, owner: Any, name: str, place: str, counts: Any = lambda *_, **__: True) -> None:
        import torch

        plain = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            due, step = self.due[place], self.watched.run.position.step
            if due and step >= due[0] and counts(*arguments, **named):
                due.pop(0)
                self.raised.append((place, step))
                raise torch.OutOfMemoryError(_ON_PURPOSE + place)
            return plain(*arguments, **named)

        setattr(owner, name, wrapped)

    def _watch_arrivals(self) -> None:
        """Autograd's engine stands between a layer and the loop: it must not make something else of them."""
        from onecard.train import memory, retries
        from onecard.train.refit import Refit

        plain, plain_forget = Refit.after, memory.forget

        def arrives(error: BaseException) -> None:
            if _ON_PURPOSE in str(error):
                self.arrived[type(error).__name__] += 1

        def after(refit: Any, error: BaseException, where: str) -> bool:
            arrives(error)
            return plain(refit, error, where)

        def forget(error: BaseException) -> None:  # those of checkpoints
            arrives(error)
            plain_forget(error)

        setattr(Refit, "after", after)  # noqa: B010
        setattr(retries, "forget", forget)  # noqa: B010


def _middle(watched: Watched) -> int:
    return int(watched.run.model.shape.n_layer) // 2


def _subclasses(owner: Any) -> Iterator[Any]:
    for cls in owner.__subclasses__():
        yield cls
        yield from _subclasses(cls)


def least_taken(cuda: bool, least_need: float, most_need: float) -> float:
    """GiB: less than that is no trouble, and not counted as taken."""
    return 0.5 if cuda else 0.2 * (most_need - least_need)


class Ballast:
    """Somebody else on the card: a process of its own that takes memory and gives it back."""

    def __init__(self, options: argparse.Namespace, folder: Path, phases: tuple[int, int]) -> None:
        self.options, self.folder, self.phases = options, folder, phases
        self.log, self.taken = options.work / "ballast.jsonl", options.work / "ballast.taken"

    def work(self, ready: Any, over: Any, least_need: float, most_need: float) -> None:
        """Fill the card; wait for `before` steps; take and return until `during` more are done; leave."""
        import torch

        options, numbers, parent = self.options, random.Random(self.options.seed), os.getppid()
        cuda = not options.tiny
        began, before, until = time.monotonic(), self.phases[0], sum(self.phases)

        def gone() -> bool:
            """Nobody to disturb any more; a process that outlives its parent would keep the card full."""
            return over.is_set() or os.getppid() != parent

        def free() -> float:
            return torch.cuda.mem_get_info()[0] / GIB if cuda else most_need - self.taken_gib()

        def note(did: str, **more: float) -> None:
            line = {"at": round(time.monotonic() - began, 1), "step": len(logged_steps(self.folder)),
                    "did": did, "free_gib": round(free(), 4), **more}  # fmt: skip
            with self.log.open("a") as sink:
                sink.write(json.dumps(line) + "\n")

        filler = None
        if cuda:
            size = torch.cuda.mem_get_info()[0] - int(options.free_gib * GIB)
            filler = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        note("filled the card")
        ready.set()
        while len(logged_steps(self.folder)) < before and not gone():
            time.sleep(0.05)
        held: list[Any] = []

        def take(goal: float, patience: float) -> float:
            """GiB taken: at once what is free, the rest as soon as it is."""
            have, until = 0.0, time.monotonic() + patience
            while have < goal and time.monotonic() < until and not gone():
                part = min(goal - have, free() - (options.leave_gib if cuda else 0.0))
                if not cuda:
                    self.taken.write_text(str(part))
                    return part
                try:
                    if part > min(0.1, goal - have - 1e-6):
                        held.append(torch.empty(int(part * GIB), dtype=torch.uint8, device="cuda"))
                        have += part
                        continue
                except torch.OutOfMemoryError:
                    pass  # the trainer was quicker
                time.sleep(0.005)
            return have

        least, most = least_taken(cuda, least_need, most_need), 6.0 if cuda else most_need - least_need
        while len(logged_steps(self.folder)) < until and not gone():
            goal, patience = numbers.uniform(least, most), numbers.uniform(*options.gap)
            since = time.monotonic()
            got = take(goal, patience)
            note(f"took {got:.3g} GiB of the {goal:.3g} it wanted", gib=got)
            over.wait(max(0.0, since + patience - time.monotonic()))
            held.clear()
            if cuda:
                torch.cuda.empty_cache()
            self.taken.unlink(missing_ok=True)
            note("gave it back")
            over.wait(numbers.uniform(*options.gap))
        note("left")
        while not gone():
            over.wait(0.5)
        held.clear()
        del filler

    def taken_gib(self) -> float:
        try:
            return float(self.taken.read_text() or 0)
        except (OSError, ValueError):
            return 0.0

    def events(self) -> list[Row]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]
