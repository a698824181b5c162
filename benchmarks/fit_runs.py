"""Runs of the trainer that are watched, squeezed or disturbed: what benchmarks/fit.py's parts are made of."""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import hashlib
import json
import pickle
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
GIB = 2**30
# A device without a card has no memory to be short of: there the trainer is told figures instead.
TINY_VOCAB = 61
# A job in which nothing gets done for so long hangs. A first step with all its compiling takes half of it.
STALLED_SECONDS = 85.0


class Pulse:
    """Ends this process when no sign of life has come for a while, telling where it stood.

    By a timer that does not wait for Python: what hangs may well be inside the driver.
    """

    def __init__(self) -> None:
        self._beaten = 0.0

    def beat(self) -> None:
        now = time.monotonic()
        if now - self._beaten > 1:  # a timer is a thread, and steps of a toy take milliseconds
            self._beaten = now
            faulthandler.dump_traceback_later(STALLED_SECONDS, exit=True)


PULSE = Pulse()


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
    from onecard.config.knobs import load_config
    from onecard.config.run import RunConfig

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
    from onecard.config.resolve import resolve
    from onecard.hardware.machine import resolve_device
    from onecard.train import engine

    config = config_of(options, "question", 10)
    shape = resolve(config).shape
    dtype = "float32" if options.tiny else "bfloat16"
    return engine.make_room(shape, config, resolve_device(options.device), dtype, []).question


def caps_of(options: argparse.Namespace) -> dict[str, float]:
    """Names and GiB for tensors. Tiny: from what the config needs as it stands down to the least there is."""
    if not options.tiny:
        return {f"{cap:g} GiB": cap for cap in options.caps}
    from onecard.config.resolve import setting_of
    from onecard.plan.search import settings, smallest

    question = question_of(options)
    most = question.answer(setting_of(question.config, question.shape)).bill.need
    least = smallest(question.answer(s) for s in settings(question.config, question.shape)).bill.need
    return {f"tiny {part:g}": (least + part * (most - least)) / GIB for part in (1.0, 0.6, 0.3, 0.0)}


def pretend_memory(allocator: Callable[[], float]) -> None:
    """Without a card: the trainer decides as if it had one with so many bytes for tensors."""
    from onecard.train import engine, host_copy
    from onecard.train.first_setting import open_fit, process_bytes

    def told(question: Any, *, on_card: bool) -> Any:
        # By speeds as everywhere; what the host has is not asked: offloading there costs nothing more.
        asked = dataclasses.replace(question, allowed=process_bytes(allocator()), host_allowed=None)
        return open_fit(asked, on_card=True)

    setattr(engine, "open_fit", told)  # noqa: B010 - for mypy
    setattr(host_copy, "allocator_bytes", lambda *arguments: allocator())  # noqa: B010


class Watched:
    """One run by `train`, and what it did."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.run: Any = None
        self.updates = self.recorded = 0
        self.settings: list[Any] = []
        self.update_costs: list[tuple[int, int, int]] = []
        self.watch_updates = False
        self._peaks = Peaks()

    def go(self) -> Row:
        import torch

        from onecard.optim.optimizer import Optimizer
        from onecard.train import evaluate, loop, refit, start

        plain_open, plain_update, plain_change = start.open_run, Optimizer.update, refit.change_setting
        plain_evaluate = evaluate.evaluate_both

        def opened(config: Any) -> Any:
            PULSE.beat()
            self.run = plain_open(config)
            self.settings.append(self.run.fit.setting)
            return self.run

        def updated(optimizer: Any, *arguments: Any) -> None:
            self.updates += 1
            replay = self.run.stepper.replay
            self.recorded += replay is not None and replay.held_bytes > 0
            PULSE.beat()
            if self.watch_updates:
                self._costs(lambda: plain_update(optimizer, *arguments))
            else:
                plain_update(optimizer, *arguments)

        def evaluated(*arguments: Any) -> Any:
            found = plain_evaluate(*arguments)
            PULSE.beat()  # it is compiled apart from the steps
            return found

        def changed(run: Any, step: int) -> None:
            plain_change(run, step)
            self.settings.append(run.fit.setting)

        setattr(loop, "open_run", opened)  # noqa: B010
        setattr(loop, "evaluate_both", evaluated)  # noqa: B010
        setattr(Optimizer, "update", updated)  # noqa: B010
        setattr(refit, "change_setting", changed)  # noqa: B010
        cuda = self.config.device.startswith("cuda")
        if cuda:
            self._peaks.watch()
        shutil.rmtree(self.config.out_dir, ignore_errors=True)  # of a job that was ended
        began = time.perf_counter()
        summary = loop.train(self.config)
        row = self._told(summary) | {"seconds": round(time.perf_counter() - began, 1)}
        if cuda:
            row |= self._peaks.told()
            # How often the allocator gave everything back and began anew: a cap may cost speed by that.
            row["allocator_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        return row

    def _told(self, summary: Any) -> Row:
        from onecard.run.metrics import read_metrics
        from onecard.run.stored import list_checkpoints

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
            "updates": self.updates, "recorded_steps": self.recorded, "logged": logged_steps(folder),
            "tokens_per_s": round(statistics.median(steady)) if steady else None,
            "val_loss": summary.values["val_loss"],
            "val": [(row["step"], round(row["val_loss"], 6)) for row in rows if "val_loss" in row],
            "train": [(row["step"], row["loss"]) for row in stepped],
            "step_seconds": [row["step_seconds"] for row in stepped],
            "rates": digest([(row["step"], row["lr"]) for row in stepped]),
            "position": digest(saved.state["position"]["data"]),
            "tokens": summary.values["tokens"],
            "must_be": self._must_be(),
            "weights": digest_of_weights(saved.model_tensors()),
        }  # fmt: skip
        shutil.rmtree(folder)  # checkpoints are large, and all that is asked of them has been read
        return told

    def _must_be(self) -> Row:
        """Rates, data position and tokens of a run that nothing has disturbed: known without running it."""
        from onecard.data.batches import Sequences
        from onecard.data.bins import open_split
        from onecard.optim.schedule import shown_rate

        config, shape = self.run.config, self.run.model.shape
        steps, every = config.max_iters, config.log_interval
        logged = [step for step in range(steps) if step % every == 0 or step + 1 == steps]
        data = open_split(Path("data") / config.dataset, "train", shape.block_size, shape.vocab_size)
        sequences = Sequences(data, config.block_size, config.seed)
        after = sequences.skip(sequences.start(), steps * config.sequences_per_step)
        return {
            "rates": digest([(step, shown_rate(step, config)) for step in logged]),
            "position": digest(after.to_json()), "tokens": steps * config.tokens_per_step,
        }  # fmt: skip

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


class Peaks:
    """The most memory there ever was: torch's own figures begin anew when the trainer changes its setting."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0

    def watch(self) -> None:
        """From here on; what was before (kernels tried out without a cap) is not the run's."""
        import torch

        plain = torch.cuda.reset_peak_memory_stats
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
            plain()

        def reset(*arguments: Any, **named: Any) -> None:
            self._look()
            plain(*arguments, **named)

        setattr(torch.cuda, "reset_peak_memory_stats", reset)  # noqa: B010

    def _look(self) -> None:
        import torch

        self.allocated = max(self.allocated, torch.cuda.max_memory_allocated())
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())

    def told(self) -> Row:
        self._look()
        return {
            "peak_allocated_gib": round(self.allocated / GIB, 3),
            "peak_reserved_gib": round(self.reserved / GIB, 3),
        }


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
    from onecard.arch.layout import Setting

    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()[1:]]
    return [
        {"step": e["step"], "where": e["where"], "to": Setting(**e["after"]).words()}
        for e in events if e["event"] == "refitted"
    ]  # fmt: skip
