"""What benchmarks/plan_accuracy.py does in its forks: whole steps of a configuration, or the machine itself.

A configuration is built by the trainer's own functions and fed by its own reading thread. Its peaks are
those of the process up to the last timed step, the first (compiling) one and the choice of an attention
kernel among them: what a card must hold.

Then the cap. In the same process, because a fresh one takes ten times as long: caches are
emptied, a graph is dropped, the allocator is told to take no more than the bill's need, and whole steps
run again. What is left from before are the tensors that stand there all the time, put there before the
first step, as in a fresh process; all else goes back to the driver and is taken anew under the cap. What
this leaves out is building the model and compiling; --caps does the same in a fresh process, which compiles.

Several may get ready at the same time. From the timed steps on, a process has card and host for itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import re
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accuracy_errors import COLD
from accuracy_grid import AFTER_WAITING, UNDER_CAP, WARM_UP, Case, timed_steps
from memory_speed import Row
from numpy.typing import ArrayLike, NDArray
from plain_gpt2 import host_memory, matmul_tflops
from processes import Turns

import onecard.hardware.bench
from onecard.data.batches import Sequences
from onecard.data.prefetch import Prefetcher
from onecard.hardware.bench_sizes import CARD_SIZES, CPU_SIZES
from onecard.model.compiling import compile_problem
from onecard.model.decoder import Decoder
from onecard.model.registry import model_class
from onecard.optim.schedule import StepRates
from onecard.optim.schedule import rates as rates_at
from onecard.plan.search import Question
from onecard.train import engine
from onecard.train.fit import Fit
from onecard.train.step import Stepper

_TOKENS = 2**21
_HARDLY_MORE = 24 * 2**20  # than is allocated: the allocator's grain
_GROUPS = 5  # in which steps are timed: what happens in one does not count
_PATIENCE = 12  # steps in which fp16's loss scale is found


def import_compiler() -> None:
    """Before the forks, each of which would need a second for it. None of it touches the card."""
    with contextlib.suppress(ImportError):  # not on every machine
        import torch._dynamo  # noqa: F401
        import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401


@dataclass(frozen=True)
class RandomTokens:
    """As good as text: the arithmetic does not look at it."""

    tokens: NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.tokens)

    def gather(self, positions: ArrayLike, length: int) -> NDArray[np.int64]:
        first = np.asarray(positions, dtype=np.int64)[:, None]
        return self.tokens[first + np.arange(length)].astype(np.int64)

    def refresh(self) -> int:
        return len(self.tokens)


def filled_model(case: Case) -> Decoder:
    """Random matrices, quickly: initialising billions takes longer than measuring, and fresh models have
    matrices of zeros, with which a card computes faster than with any other."""
    shape = case.shape
    model = model_class(shape).uninitialised(shape)
    matrices = torch.bfloat16 if case.master_weights == "bf16" else torch.float32
    numbers = torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 0.02
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            model._initialise(name, parameter.data, 0)
            continue
        parameter.data = parameter.data.to(matrices)
        flat = parameter.data.view(-1)
        for first in range(0, flat.numel(), numbers.numel()):
            part = flat[first : first + numbers.numel()]
            part.copy_(numbers[: part.numel()])
    return model


class Steps:
    """A run without its loop: whole steps, one at a time.

    With a `kernel` for attention that is used, whatever is found to be the fastest beside other processes.
    """

    def __init__(self, case: Case, device: str, kernel: str | None = None) -> None:
        torch.set_float32_matmul_precision("high")
        self.config, shape = case.config, case.shape
        self.cuda = device.startswith("cuda")
        # Asked once for the whole machine, not in every process: it takes a second.
        setattr(engine, "compile_problem", lambda device: None)  # noqa: B010
        # Always, since what it allocates and loads belongs to the peaks.
        fastest = engine.choose_kernel(shape, self.config, device, case.dtype)
        kernel = kernel or fastest
        model = filled_model(case)
        model.attention_kernel = kernel
        notes: list[str] = []
        question = Question(self.config, shape, case.dtype, None, 2**62, None, None)
        fit = Fit(question, case.setting, enabled=False)  # as it is, or not at all
        stepper = engine.build_stepper(model, self.config, fit, device, case.dtype, notes)
        assert stepper is not None
        self.stepper: Stepper = stepper
        numbers = np.random.default_rng(0).integers(0, shape.vocab_size, _TOKENS, dtype=np.uint16)
        sequences = Sequences(RandomTokens(numbers), shape.block_size, 0)
        self.batches = Prefetcher(
            sequences, sequences.start(), step_sequences=self.config.sequences_per_step,
            micro_batch=self.config.batch_size, device=device,
        )  # fmt: skip
        self.done = 0
        self.facts: Row = {"attention": kernel, "notes": notes}

    def wait(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(self) -> tuple[float, float]:
        """Seconds until it was done, and until the host had handed it out."""
        began = self.wait()
        self.stepper.run(self.batches.next_step().micros, rates_at(self.done, self.config))
        handed = time.perf_counter() - began
        self.done += 1
        return self.wait() - began, handed

    def without_waiting(self, steps: int) -> float:
        """Seconds of each of so many, handed out one after the other, as the trainer does."""
        began = self.wait()
        for _ in range(steps):
            self.stepper.run(self.batches.next_step().micros, rates_at(self.done, self.config))
            self.done += 1
        return (self.wait() - began) / steps

    def warm_up(self, steps: int) -> list[float]:
        """More where fp16's loss scale is still too large: such a step leaves out its update."""
        taken = []
        for number in range(max(steps, _PATIENCE)):
            scale = self.stepper.loss_scale.value
            taken.append(self.step()[0])
            if number + 1 >= steps and self.stepper.loss_scale.value == scale:
                break
        return taken

    def update_alone(self) -> float:
        """Seconds of the update, in a step that waits before it."""
        plain, found = self.stepper.update, []

        def update(rates: StepRates) -> torch.Tensor:
            began = self.wait()
            norm = plain(rates)
            found.append(self.wait() - began)
            return norm

        self.stepper.update = update  # type: ignore[method-assign]
        self.step()
        self.stepper.update = plain  # type: ignore[method-assign]
        return found[0]

    def census(self) -> Row | None:
        """Kernels of a step's micro-batches and of its update: by kind, how many and their milliseconds."""
        if not self.cuda:
            return None
        found: Row = {}
        plain = self.stepper.update

        def update(rates: StepRates) -> torch.Tensor:
            self.wait()
            micros.stop()
            found["micro-batches"] = kernels_by_kind(micros)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as its:
                norm = plain(rates)
                self.wait()
            found["update"] = kernels_by_kind(its)
            return norm

        micros = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.stepper.update = update  # type: ignore[method-assign]
        try:
            micros.start()
            self.step()
        except RuntimeError as error:  # a profiler that does not work here loses no measurement
            return {"problem": str(error).splitlines()[0]}
        finally:
            self.stepper.update = plain  # type: ignore[method-assign]
        return found

    def peaks(self) -> dict[str, int | None]:
        """Bytes since the last reset. What a graph holds counts, though the allocator calls it free.

        A graph's matmul workspaces are in both figures, so their sum may be more than there is.
        """
        if not self.cuda:
            return {"allocated": None, "reserved": None}
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        if self.stepper.replay is not None:
            held = torch.cuda.memory_allocated() + self.stepper.replay.held_bytes
            allocated = max(allocated, min(held, reserved))
        return {"allocated": allocated, "reserved": reserved}

    def graph_problem(self) -> str | None:
        replay = self.stepper.replay
        if replay is None:
            return None
        return replay.problem or (None if replay.held_bytes else "nothing was recorded")


_KINDS = {
    "copies": "memcpy|memset", "attention": "sdpa|fmha|flash|attention", "compiled": "^triton_",
    "matmuls": "gemm|nvjet|xmma|cutlass|splitk",
}  # fmt: skip


def kernels_by_kind(profile: torch.profiler.profile) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for event in profile.key_averages():
        if event.device_type.name != "CUDA":
            continue
        named = (kind for kind, words in _KINDS.items() if re.search(words, event.key, re.IGNORECASE))
        entry = found.setdefault(next(named, "others"), [0, 0.0])
        entry[0] += event.count
        entry[1] = round(entry[1] + event.self_device_time_total / 1e3, 3)
    return found


def launch_us(device: str) -> float:
    """What a small kernel costs the host now, as `onecard bench` measures it."""
    sizes = CARD_SIZES if device != "cpu" else CPU_SIZES
    return onecard.hardware.bench.Bench(device, sizes).launch(0.1)


def cap(need: int) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, need / total))


def measure(
    case: Case, device: str, need: int, expected: float | None, turns_at: Path, kernel: str | None = None
) -> Row:
    """One configuration; what goes wrong is in the row as `error`. `turns_at`: see Turns."""

    def work() -> Row:
        turns = Turns(turns_at)
        turns.together()
        steps = Steps(case, device, kernel)
        warm = steps.warm_up(WARM_UP)
        steps.wait()
        turns.alone()
        began = time.monotonic()
        warm += steps.warm_up(AFTER_WAITING)
        count = timed_steps(case, expected)
        together = max(1, count // _GROUPS)
        launches = [launch_us(device)]
        each = [steps.without_waiting(together) for _ in range(count // together)]
        launches.append(launch_us(device))
        handed = [steps.step()[1] for _ in range(3)]
        assert (problem := steps.graph_problem()) is None, problem
        row: Row = {
            "measured": {
                **steps.peaks(),
                "seconds": statistics.median(each),
                "launch_us": round(statistics.mean(launches), 3),
                "each": [round(seconds, 6) for seconds in each],
                "steps_of_each": together,
                "handed_out": round(statistics.median(handed), 6),
                "warm_up": [round(seconds, 4) for seconds in warm],
                "update": round(steps.update_alone(), 6),
                "kernels": steps.census(),
            },
            "pinned_bytes": steps.stepper.optimizer.host_bytes,
            **steps.facts, **host_memory(steps.stepper.optimizer.host_bytes),
        }  # fmt: skip
        row |= (
            _again_under_cap(steps, need, row["measured"]["allocated"])
            if steps.cuda
            else {"ran_under_cap": None}
        )
        # By a clock that all processes share.
        alone = [round(moment, 3) for moment in (began, time.monotonic())]
        return row | {"waited": round(turns.waited, 2), "alone": alone}

    return _told(work)


def kernels(cases: Sequence[Case], device: str) -> Row:
    """By name: for attention the fastest, as it is when nothing else runs."""

    def work() -> Row:
        found: Row = {}
        known: dict[object, str] = {}
        for case in cases:
            shape = case.shape
            sizes = (case.micro_batch, shape.n_head, shape.block_size, shape.head_dim, case.dtype)
            if sizes not in known:
                known[sizes] = engine.choose_kernel(shape, case.config, device, case.dtype)
            found[case.name] = known[sizes]
        return {"kernels": found}

    return _told(work)


def _again_under_cap(steps: Steps, need: int, allocated: int) -> Row:
    """What was predicted, and then less: formulas change, and what ran in less will run in their need too."""
    problem, retries = _steps_within(steps, need)
    row: Row = {
        "ran_under_cap": problem is None, "cap_bytes": need, "cap_in": "the same process",
        "cap_problem": problem, "cap_retries": retries, "under_cap": steps.peaks(),
    }  # fmt: skip
    less = allocated + _HARDLY_MORE
    if problem is None:
        tight = less < need and _steps_within(steps, less)[0] is None
        row["ran_in_bytes"] = less if tight else need
    return row


def _steps_within(steps: Steps, most: int) -> tuple[str | None, int]:
    """What went wrong in whole steps under this cap, and how often the allocator had to make room."""
    steps.wait()
    steps.stepper.release()
    if steps.stepper.replay is not None:
        steps.stepper.replay._passes.clear()  # so that it passes plainly first, as in the beginning
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    cap(most)
    try:
        for _ in range(UNDER_CAP):
            steps.step()
        problem = steps.graph_problem()
    except torch.OutOfMemoryError as error:
        problem = str(error).splitlines()[0]
    return problem, torch.cuda.memory_stats().get("num_alloc_retries", 0) - before


def free_pieces(segments: Sequence[Row], most: int = 12) -> list[float]:
    """The largest pieces that the allocator has and could not use, in MiB."""
    blocks = (block for segment in segments for block in segment["blocks"])
    free = sorted((block["size"] for block in blocks if block["state"] == "inactive"), reverse=True)
    return [round(size / 2**20, 1) for size in free[:most]]


def run_capped(case: Case, device: str, need: int) -> Row:
    """In this fresh process from its first allocation on, everything to be compiled, as on a new machine;
    what it finds takes the place of the earlier."""

    def work() -> Row:
        cap(need)
        row: Row = {"cap_bytes": need, "cap_in": COLD}
        steps: Steps | None = None
        try:
            steps = Steps(case, device)
            steps.warm_up(WARM_UP)
            problem = steps.graph_problem()
        except torch.OutOfMemoryError as error:
            problem = str(error).splitlines()[0]
            row["free_mib"] = free_pieces(torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        row |= {"ran_in_bytes": need if problem is None else None}
        return row | {"ran_under_cap": problem is None, "cap_problem": problem, "cap_retries": retries,
                      "under_cap": steps.peaks() if steps is not None else None}  # fmt: skip

    with tempfile.TemporaryDirectory() as empty:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
        return _told(work)


def machine(device: str, seconds: float) -> Row:
    """What predictions of time start from: `onecard bench` in short, and the speed of a plain matmul."""

    def work() -> Row:
        row: Row = {"torch": torch.__version__, "python": platform.python_version()}
        measured = onecard.hardware.bench.measure(device, seconds=seconds)
        row |= {"card": measured.card, "memory_gib": measured.memory_gib, "driver": measured.driver}
        row["compute_capability"] = list(torch.cuda.get_device_capability()) if device != "cpu" else None
        row["matmul_tflops"] = matmul_tflops(device)
        row["compile_problem"] = compile_problem(device) if device != "cpu" else None
        return row | {"bench": measured.to_json()}

    return _told(work)


def _told(work: Callable[[], Row]) -> Row:
    began = time.perf_counter()
    try:
        row = work()
    except Exception as error:
        what = "out of memory" if "out of memory" in str(error).lower() else type(error).__name__
        row = {"error": f"{what}: {(str(error).splitlines() or [''])[0][:160]}"}
        row["trace"] = traceback.format_exc()[-2000:]
    return row | {"took": round(time.perf_counter() - began, 2)}
