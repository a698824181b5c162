"""Runs of the trainer that are watched, squeezed or disturbed: what benchmarks/fit.py's parts are made of."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pickle
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
GIB = 2**30
# A device without a card has no memory to be short of: there the trainer is told figures instead.
TINY_VOCAB = 61


@dataclasses.dataclass(frozen=True)
class Size:
    """The model and its step."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block: int = 1024
    batch: int = 16
    accumulation: int = 4
    eval_iters: int = 24


TINY = Size(n_layer=3, n_head=2, n_embd=32, block=16, batch=4, accumulation=2, eval_iters=2)


def words_of(options: argparse.Namespace, name: str, steps: int, *more: str) -> list[str]:
    """The config as flags of `onecard train`; a later flag wins."""
    size = TINY if options.tiny else Size()
    return [
        f"--dataset={options.dataset}", f"--out_dir={options.work / name}", "--fresh",
        f"--seed={options.seed}",
        f"--batch_size={size.batch}", f"--gradient_accumulation_steps={size.accumulation}",
        f"--block_size={size.block}", f"--n_layer={size.n_layer}", f"--n_head={size.n_head}",
        f"--n_embd={size.n_embd}", "--bias=False", f"--max_iters={steps}",
        *(_schedule(steps) if options.tiny else ()),
        f"--eval_interval={max(1, steps // 2)}", f"--eval_iters={size.eval_iters}", "--log_interval=5",
        "--sample_tokens=0", "--always_save_checkpoint=False", f"--device={options.device}",
        f"--dtype={'float32' if options.tiny else 'bfloat16'}", f"--compile={not options.eager}", *more,
    ]  # fmt: skip


def _schedule(steps: int) -> tuple[str, ...]:
    """For a toy. The others have nanoGPT's own, 2,000 steps of warm-up to 6e-4: with 40 to 1e-3, runs of the
    very same setting were 0.03 apart after 200 steps (a card adds in another order every time).
    """
    warm_up = min(100, max(1, steps // 5))
    return f"--lr_decay_iters={steps}", f"--warmup_iters={warm_up}", "--learning_rate=1e-3", "--min_lr=1e-4"


def config_of(options: argparse.Namespace, name: str, steps: int, *more: str) -> Any:
    from onecard.config import RunConfig
    from onecard.knobs import load_config

    return load_config(RunConfig, words_of(options, name, steps, *more))


def tiny_data(name: str) -> None:
    """Letters that mostly follow from the one before: a few steps lower the loss, and they can be drawn."""
    import numpy as np

    folder = Path("data") / name
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(0)
    for split, count in (("train", 60_000), ("val", 4_000)):
        noise, surprise = numbers.integers(0, TINY_VOCAB, count), numbers.random(count) < 0.15
        tokens = np.ones(count, dtype=np.uint16)
        for i in range(1, count):
            tokens[i] = noise[i] if surprise[i] else (int(tokens[i - 1]) * 5 + 1) % TINY_VOCAB
        tokens.tofile(folder / f"{split}.bin")
    letters = ["\n", *(chr(ord("A") + i) for i in range(TINY_VOCAB - 1))]
    meta = {"vocab_size": TINY_VOCAB, "itos": dict(enumerate(letters))}
    meta["stoi"] = {letter: i for i, letter in enumerate(letters)}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def question_of(options: argparse.Namespace) -> Any:
    """What the planner is asked about this config on this machine."""
    from onecard.hardware.machine import resolve_device
    from onecard.train import engine, start

    config = config_of(options, "question", 10)
    shape = config.shape(start._vocabulary(Path("data") / config.dataset))
    dtype = "float32" if options.tiny else "bfloat16"
    return engine.make_room(shape, config, resolve_device(options.device), dtype, []).question


def caps_of(options: argparse.Namespace) -> dict[str, float]:
    """Names and GiB for tensors. Tiny: from what the config needs as it stands down to the least there is."""
    if not options.tiny:
        return {f"{cap:g} GiB": cap for cap in options.caps}
    from onecard.plan.search import settings, smallest
    from onecard.plan.settings import setting_of

    question = question_of(options)
    most = question.answer(setting_of(question.config, question.shape)).bill.need
    least = smallest(question.answer(s) for s in settings(question.config, question.shape)).bill.need
    return {f"tiny {part:g}": (least + part * (most - least)) / GIB for part in (1.0, 0.6, 0.3, 0.0)}


def pretend_memory(allocator: Callable[[], float]) -> None:
    """Without a card: the trainer decides as if it had one with so many bytes for tensors."""
    from onecard.train import engine, refit
    from onecard.train.fit import open_fit, process_bytes

    def told(question: Any, *, on_card: bool) -> Any:
        # By speeds as everywhere; what the host has is not asked: offloading there costs nothing more.
        asked = dataclasses.replace(question, allowed=process_bytes(allocator()), host_allowed=None)
        return open_fit(asked, on_card=True)

    setattr(engine, "open_fit", told)  # noqa: B010 - for mypy
    setattr(refit, "allocator_bytes", lambda *arguments: allocator())  # noqa: B010


class Watched:
    """One run by `train`, and what it did."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.run: Any = None
        self.updates = 0
        self.settings: list[Any] = []
        self.update_costs: list[tuple[int, int, int]] = []
        self.watch_updates = False

    def go(self) -> Row:
        import torch

        from onecard.optim.optimizer import Optimizer
        from onecard.train import loop, refit, start

        plain_open, plain_update, plain_change = start.open_run, Optimizer.update, refit.change_setting

        def opened(config: Any) -> Any:
            self.run = plain_open(config)
            self.settings.append(self.run.fit.setting)
            return self.run

        def updated(optimizer: Any, *arguments: Any) -> None:
            self.updates += 1
            if self.watch_updates:
                self._costs(lambda: plain_update(optimizer, *arguments))
            else:
                plain_update(optimizer, *arguments)

        def changed(run: Any, step: int) -> None:
            plain_change(run, step)
            self.settings.append(run.fit.setting)

        setattr(loop, "open_run", opened)  # noqa: B010
        setattr(Optimizer, "update", updated)  # noqa: B010
        setattr(refit, "change_setting", changed)  # noqa: B010
        cuda = self.config.device.startswith("cuda")
        began = time.perf_counter()
        summary = loop.train(self.config)
        row = self._told(summary) | {"seconds": round(time.perf_counter() - began, 1)}
        if cuda:
            row["peak_allocated_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
            row["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 3)
            # How often the allocator gave everything back and began anew: a cap may cost speed by that.
            row["allocator_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        return row

    def _told(self, summary: Any) -> Row:
        from onecard.run.checkpoint import list_checkpoints
        from onecard.run.metrics import read_metrics

        folder = Path(self.config.out_dir)
        rows = read_metrics(folder / "metrics.jsonl")
        stepped = [row for row in rows if "loss" in row]
        steady = [row["tokens_per_second"] for row in stepped if row["step"] >= self.config.max_iters // 4]
        fit = self.run.fit
        saved = list_checkpoints(folder / "checkpoints")[-1]
        told = {
            "setting": fit.setting.words(), "began_with": self.settings[0].words(),
            "chosen": fit.setting.to_json(), "exact": all(s.exact for s in self.settings),
            "predicted_need_gib": fit.choice.bill.need / GIB,
            "predicted_tokens_per_s": round(fit.choice.tokens_per_s),
            "predicted_at_first": round(fit.question.answer(self.settings[0]).tokens_per_s),
            "refits": summary.values["refits"], "refitted": refits_in(folder),
            "steps": summary.values["step"], "asked": self.config.max_iters,
            "updates": self.updates, "logged": logged_steps(folder),
            "tokens_per_s": round(statistics.median(steady)) if steady else None,
            "val_loss": summary.values["val_loss"],
            "val": [(row["step"], round(row["val_loss"], 6)) for row in rows if "val_loss" in row],
            "train": [(row["step"], row["loss"]) for row in stepped],
            "step_seconds": [row["step_seconds"] for row in stepped],
            "rates": digest([(row["step"], row["lr"]) for row in stepped]),
            "position": digest(saved.state["position"]["data"]),
            "tokens": summary.values["tokens"],
            "weights": digest_of_weights(saved.model_tensors()),
        }  # fmt: skip
        shutil.rmtree(folder)  # checkpoints are large, and all that is asked of them has been read
        return told

    def _costs(self, update: Callable[[], None]) -> None:
        """Allocations, bytes above what was there, and bytes asked of the driver."""
        import torch

        if not torch.cuda.is_available():
            update()
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        update()
        after = torch.cuda.memory_stats()
        count = after["allocation.all.allocated"] - before["allocation.all.allocated"]
        more = after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"]
        asked = after["reserved_bytes.all.peak"] - before["reserved_bytes.all.current"]
        self.update_costs.append((count, more, asked))


def digest(value: Any) -> str:
    """To tell whether two are the same, without keeping them."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def digest_of_weights(tensors: dict[str, Any]) -> str:
    import torch

    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def logged_steps(folder: Path) -> list[int]:
    """Every line there is: a step that was done twice shows."""
    path = folder / "metrics.jsonl"
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(text)
        except ValueError:
            continue  # being written
        if "loss" in row:
            found.append(row["step"])
    return found


def refits_in(folder: Path) -> list[Row]:
    from onecard.plan.settings import Setting

    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()[1:]]
    return [
        {"step": e["step"], "where": e["where"], "to": Setting(**e["after"]).words()}
        for e in events if e["event"] == "refitted"
    ]  # fmt: skip


PLACES = {"forward": 30, "backward": 30, "entry of the update": 21, "evaluation": 12, "sampling": 3,
          "checkpoint": 4}  # fmt: skip


def places(options: argparse.Namespace) -> dict[str, int]:
    """How many errors where; in the tiny mode a third, which takes a third of the time."""
    return {place: -(-count // 3) if options.tiny else count for place, count in PLACES.items()}


class Injector:
    """Raises as a full card does: in every place as often as `counts` says, at steps drawn by `seed`."""

    def __init__(self, watched: Watched, steps: int, seed: int, counts: dict[str, int]) -> None:
        from onecard.model.decoder import Decoder
        from onecard.train import evaluate, journal
        from onecard.train.loop import Training
        from onecard.train.step import Stepper

        self.watched, self.raised = watched, Counter[str]()
        numbers, last = random.Random(seed), int(0.9 * steps)
        every = watched.config.eval_interval
        self.due: dict[str, list[int]] = {}
        at_evaluations = list(range(every, last, every))
        numbers.shuffle(at_evaluations)
        for place, count in counts.items():
            if place in ("sampling", "checkpoint"):  # once at an evaluation, which is not done again for them
                self.due[place] = sorted(at_evaluations.pop() for _ in range(count))
            else:
                self.due[place] = sorted(numbers.randrange(1, last) for _ in range(count))
        self._wrap(Decoder, "loss_sum", "forward", only_training=True)
        for owner in (Decoder, *_subclasses(Decoder)):
            if "_begin_backward" in vars(owner):
                self._wrap(owner, "_begin_backward", "backward")
        self._wrap(Stepper, "update", "entry of the update")
        self._wrap(evaluate, "evaluate", "evaluation")
        self._wrap(journal, "sample_text", "sampling")
        self._wrap(Training, "_save", "checkpoint")

    def _wrap(self, owner: Any, name: str, place: str, *, only_training: bool = False) -> None:
        import torch

        plain = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            counts = not only_training or named.get("scale") is not None
            due = self.due[place]
            if counts and due and self.watched.run.position.step >= due[0]:
                due.pop(0)
                self.raised[place] += 1
                raise torch.OutOfMemoryError(f"CUDA out of memory in {place}")
            return plain(*arguments, **named)

        setattr(owner, name, wrapped)


def _subclasses(owner: Any) -> Iterator[Any]:
    for cls in owner.__subclasses__():
        yield cls
        yield from _subclasses(cls)


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

        def note(did: str) -> None:
            line = {"at": round(time.monotonic() - began, 1), "step": len(logged_steps(self.folder)),
                    "did": did, "free_gib": round(free(), 4)}  # fmt: skip
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

        least, most = (0.5, 6.0) if cuda else (0.2 * (most_need - least_need), most_need - least_need)
        while len(logged_steps(self.folder)) < until and not gone():
            goal, patience = numbers.uniform(least, most), numbers.uniform(*options.gap)
            since = time.monotonic()
            note(f"took {take(goal, patience):.3g} GiB of the {goal:.3g} it wanted")
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
