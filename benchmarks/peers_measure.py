"""What benchmarks/peers.py does in its forks: the steps of one trainer, its peaks and its seconds."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accuracy_measure import Steps, cap, import_compiler, launch_us
from peers_trainers import Trainer, run_huggingface, trainer_of
from plain_gpt2 import matmul_tflops
from processes import Turns

if TYPE_CHECKING:
    from memory_speed import Row
    from peers import Job

_WARM_UP = 2  # steps after the first
_AFTER_WAITING = 2  # steps before those that are timed: card and host have been idle
_TIMED_S = 0.7
_LEAST, _MOST = 5, 60  # timed steps
_UNTIMED = 4  # steps where only peaks are taken


def prepare(tiny: bool) -> None:
    """Before the forks, each of which would need seconds for it. None of it touches the card."""
    # Whoever asks whether there is a card must not begin to use it: its forks could not.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Each process has helpers of its own to compile with, and there are many processes.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    if tiny:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    else:
        import_compiler()
    if find_spec("transformers"):
        with contextlib.suppress(ImportError):
            import transformers.models.gpt2.modeling_gpt2
            import transformers.models.llama.modeling_llama  # noqa: F401


def machine(device: str) -> Row:
    """The machine as this call finds it."""
    cuda = device != "cpu"
    row: Row = {"torch": torch.__version__, "python": platform.python_version()}
    row["transformers"] = next((d.version for d in metadata.distributions(name="transformers")), None)
    row["accelerate"] = find_spec("accelerate") is not None
    properties = torch.cuda.get_device_properties(0) if cuda else None
    row["card"] = properties.name if properties else f"{platform.machine()} CPU"
    row["memory_bytes"] = properties.total_memory if properties else None
    row["memory_gib"] = round(properties.total_memory / 2**30, 2) if properties else None
    row["compute_capability"] = list(torch.cuda.get_device_capability()) if cuda else None
    return row | {"launch_us": round(launch_us(device), 3), "matmul_tflops": matmul_tflops(device)}


class Peaks:
    """Bytes so far at each moment; and of a later step, each part's own."""

    def __init__(self, device: str) -> None:
        self._cuda, self._highest = device != "cpu", 0
        self.found: dict[str, dict[str, int | None]] = {}

    def note(self, moment: str) -> int | None:
        """All since the process began. Bytes allocated at most since the note before."""
        if not self._cuda:
            self.found[moment] = {"allocated": None, "reserved": None}
            return None
        torch.cuda.synchronize()
        since = torch.cuda.max_memory_allocated()
        self._highest = max(self._highest, since)
        reserved = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
        before = max((found["reserved"] or 0 for found in self.found.values()), default=0)
        self.found[moment] = {"allocated": self._highest, "reserved": max(before, reserved)}
        torch.cuda.reset_peak_memory_stats()
        return since


def measure(job: Job, device: str, folders: dict[str, str], turns_at: str) -> Row:
    """One job; what goes wrong is in the row as `error`, or as `ran_out` where it was to be expected."""
    peaks, began = Peaks(device), time.perf_counter()
    row: Row = {"peaks": peaks.found}
    moment = ["building"]
    try:
        turns = Turns(Path(turns_at))
        turns.together()
        if device != "cpu" and job.cap_gib:
            cap(int(job.cap_gib * 2**30))
        torch.manual_seed(0)
        work = _onecard if job.contender == "onecard" else _peer
        row |= work(job, device, folders, peaks, turns, moment)
    except Exception as error:
        short = (str(error).splitlines() or [""])[0][:240]
        if job.cap_gib and isinstance(error, torch.OutOfMemoryError):
            peaks.note("until then")
            row["ran_out"] = f"{moment[0]}: {str(error)[:400]}"
        else:
            row["error"] = f"{type(error).__name__} at {moment[0]}: {short}"
            row["trace"] = traceback.format_exc()[-2000:]
    return row | {"took": round(time.perf_counter() - began, 2)}


def _peer(
    job: Job, device: str, folders: dict[str, str], peaks: Peaks, turns: Turns, moment: list[str]
) -> Row:
    if job.part == "huggingface" and find_spec("accelerate"):
        moment[0] = "training"
        with tempfile.TemporaryDirectory() as folder:
            run_huggingface(job, device, _UNTIMED, folder, peaks.note)
        return {"loop": "transformers.Trainer"}
    trainer = trainer_of(job, device, folders)
    if job.evaluates:
        moment[0] = "evaluation"
        trainer.evaluate()
        peaks.note("evaluation")
    moment[0] = "training"
    began = time.perf_counter()
    _step(trainer)
    peaks.note("first")
    row: Row = {"first_step_s": round(time.perf_counter() - began, 2)}
    for _ in range(_WARM_UP if job.timed else _UNTIMED - 1):
        _step(trainer)
    peaks.note("steady")
    trainer.micros()
    row["micros"] = peaks.note("steady")
    trainer.update()
    row["update"] = peaks.note("steady")
    if job.timed:
        turns.alone()

        def seconds() -> float:
            """Of one step by itself: nanoGPT's loop waits for each, to print its loss."""
            began = time.perf_counter()
            _step(trainer)
            return time.perf_counter() - began

        row |= _timed(seconds, job, device)
    return row


def _step(trainer: Trainer) -> None:
    trainer.micros()
    trainer.update()


def _onecard(
    job: Job, device: str, _folders: dict[str, str], peaks: Peaks, turns: Turns, moment: list[str]
) -> Row:
    from onecard.train.memory import use_expandable_segments

    use_expandable_segments()  # as the trainer does, before the card is touched
    steps = Steps(job.case, device)
    moment[0] = "training"
    first = steps.step()[0]
    steps.warm_up(_WARM_UP)
    turns.alone()
    found = _timed(lambda: steps.without_waiting(3), job, device)
    peaks.found["steady"] = steps.peaks()
    return {"first_step_s": round(first, 2), **steps.facts} | found


def _timed(seconds: Callable[[], float], job: Job, device: str) -> Row:
    """Seconds of a step, each measured by the trainer's own way of waiting."""
    waited = [seconds() for _ in range(_AFTER_WAITING)]
    count = max(_LEAST, min(_MOST, round(_TIMED_S / waited[-1])))
    launches = launch_us(device)
    each = [seconds() for _ in range(count)]
    median = statistics.median(each)
    tokens = job.batch * job.block * job.accumulation
    return {
        "seconds": round(median, 6), "fastest": round(min(each), 6), "steps": count,
        "launch_us": round(launches, 3), "tokens_per_s": round(tokens / median),
    }  # fmt: skip
