"""Speeds and peaks of other people's trainers on this machine's GPU, at shapes that plan was not fitted to.

    python benchmarks/peers.py --nanogpt CLONE --nanochat CLONE --nanochat_2025 CLONE --out FILE.json
        --parts nanogpt onecard nanochat huggingface     (in this order; --resume keeps what FILE has)
        --lanes 10                                       (build and compile so many at a time)
    python benchmarks/peers.py --report FILE.json        (beside what plan says today)
    python benchmarks/peers.py --device cpu --tiny --out FILE.json    (does it run?)

`--nanochat` is a clone as of 2026, `--nanochat_2025` one as of October 2025: each has to hold the package
`nanochat` only. What has no clone and no package is left out. A process per measurement (a fork: peaks do
not mix). The processes of a wave build and compile side by side. Then each has card and host for itself
while its steps are timed. nanochat and Hugging Face are not timed: only peaks are taken. The file is
rewritten after every measurement.

Peaks are those of the process from its beginning to the moment named: `evaluation` (the first one, before
any training, where a job has it), `first` (step), `steady`; `micros` and `update` are allocated peaks of
either part of a later step. With a cap, the moment that ran out is in the row as `ran_out`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from accuracy_grid import Case  # noqa: E402
from command_line import command_line  # noqa: E402
from memory_speed import Row, write  # noqa: E402
from processes import in_own_process, side_by_side  # noqa: E402

GIB = 2**30
PARTS = ("nanogpt", "onecard", "nanochat", "huggingface")
_ROOM = 0.9  # of the card's memory for the processes of a wave


@dataclass(frozen=True)
class Job:
    """One thing to measure. The defaults are part of its name: do not change them, add others."""

    contender: str  # nanogpt, onecard, nanochat-2025, nanochat-2026, huggingface-gpt2, huggingface-llama
    n_layer: int
    n_embd: int
    batch: int
    block: int
    compile: bool = True
    dropout: float = 0.0
    vocab: int = 50304
    accumulation: int = 4
    head_dim: int = 64
    evaluates: bool = False
    checkpointing: bool = False
    cap_gib: float = 0.0

    @property
    def heads(self) -> int:
        return max(1, self.n_embd // self.head_dim)

    def to_json(self) -> Row:
        """What differs from the defaults."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}

    @property
    def name(self) -> str:
        rest = {
            k: v for k, v in self.to_json().items()
            if k not in ("contender", "n_layer", "n_embd", "batch", "block", "compile")
        }  # fmt: skip
        told = [self.contender, f"{self.n_layer}L{self.n_embd}", f"{self.batch}x{self.block}"]
        return " ".join(
            [*told, "compiled" if self.compile else "eager", *(f"{k}={v}" for k, v in rest.items())]
        )

    @property
    def part(self) -> str:
        return self.contender.partition("-")[0]

    @property
    def timed(self) -> bool:
        return self.contender in ("nanogpt", "onecard") and not self.cap_gib

    @property
    def case(self) -> Case:
        """The same for onecard's engine."""
        return Case(
            "gpt2", self.n_layer, self.n_embd, self.batch, self.block, compile=self.compile,
            vocab=self.vocab, accumulation=self.accumulation, dropout=self.dropout,
        )  # fmt: skip

    @property
    def about_bytes(self) -> float:
        """Roughly what it takes, so that a wave does not fill the card."""
        if self.cap_gib:
            return (self.cap_gib + 1) * GIB
        if self.contender == "onecard":
            return self.case.bill().process
        parameters = self.n_embd * (12 * self.n_layer * self.n_embd + 3 * self.vocab)
        tokens = self.batch * self.block
        kept = tokens * (self.n_layer * self.n_embd * 45 + self.vocab * 16)
        return 20 * parameters + kept * (0.6 if self.compile else 1.0) + GIB


Sizes = tuple[int, int, int, int]  # layers, width, sequences, their length


def _jobs(contender: str, sizes: Sequence[Sizes], **more: Any) -> list[Job]:
    return [Job(contender, *size, **more) for size in sizes]


_SMALL = [(6, 128, 64, 256), (6, 256, 32, 512), (6, 256, 8, 2048), (12, 384, 16, 512)]
_MIDDLE = [(12, 768, 8, 2048), (12, 768, 1, 1024), (24, 1024, 8, 1024), (24, 1024, 4, 2048)]
_DEEP = [(36, 1280, 4, 1024), (48, 1600, 2, 1024)]
_SHAKESPEARE = (6, 384, 64, 256)


def _gpt2(contender: str) -> list[Job]:
    """Both trainers at the same shapes: away from those that were fitted to, with dropout and without."""
    eager: dict[str, Any] = {"compile": False}
    plain = _jobs(contender, [*_SMALL, *_MIDDLE, *_DEEP[:1]])  # more layers take minutes to compile whole
    slow = _jobs(contender, [*_SMALL, *_MIDDLE, *_DEEP], **eager)
    twelve = Job(contender, 12, 768, 12, 1024)
    letters = Job(contender, *_SHAKESPEARE, vocab=65, accumulation=1)
    dropping = [
        replace(twelve, dropout=0.1), replace(twelve, dropout=0.1, **eager), replace(twelve, dropout=0.2),
        twelve, replace(twelve, **eager), letters, replace(letters, dropout=0.2),
        replace(letters, dropout=0.2, **eager), replace(letters, **eager),
        Job(contender, 6, 256, 32, 512, dropout=0.1), Job(contender, 24, 1024, 8, 1024, dropout=0.1),
        Job(contender, 12, 576, 16, 1024, dropout=0.1, **eager), Job(contender, 12, 576, 16, 1024, **eager),
        Job(contender, 12, 768, 8, 2048, dropout=0.1),
    ]  # fmt: skip
    return [*dropping, *plain, *slow]


def _first_evaluations() -> list[Job]:
    """nanoGPT as train.py begins: with an evaluation, and where that does not fit either."""
    at: dict[str, Any] = {"evaluates": True}
    shapes = [(12, 576, 16, 1024), (6, 256, 32, 512), (24, 1024, 4, 1024)]
    whole = [*_jobs("nanogpt", shapes, **at), *_jobs("nanogpt", shapes, compile=False, **at)]
    capped = [
        Job("nanogpt", 12, 768, 16, 1024, compile=False, cap_gib=gib, **at) for gib in (3, 5, 6.5, 8, 9.5, 11)
    ]
    capped += [Job("nanogpt", 12, 384, 32, 1024, cap_gib=gib, **at) for gib in (4, 7, 10)]
    return [*whole, *capped]


def _nanochat(generation: int) -> list[Job]:
    more: dict[str, Any] = {
        "head_dim": 128, "accumulation": 2, "vocab": 65536 if generation == 2025 else 32768,
    }  # fmt: skip
    contender = f"nanochat-{generation}"
    sizes = [(d, 64 * d, b, 2048) for d, b in ((4, 16), (8, 8), (12, 8), (12, 4), (20, 4))]
    slow = [(d, 64 * d, b, 2048) for d, b in ((4, 16), (8, 8), (12, 4), (20, 2))]
    first = Job(contender, 8, 512, 16, 2048, evaluates=True, **more)
    return [*_jobs(contender, sizes, **more), first, *_jobs(contender, slow, compile=False, **more)]


def _huggingface() -> list[Job]:
    more: dict[str, Any] = {"compile": False, "accumulation": 2}

    def gpt2(*sizes: int, checkpointing: bool = False) -> Job:
        layers, width, batch, block = sizes
        job = Job("huggingface-gpt2", layers, width, batch, block, vocab=50257, **more)
        return replace(job, checkpointing=checkpointing)

    def llama(*sizes: int, checkpointing: bool = False) -> Job:
        return replace(gpt2(*sizes, checkpointing=checkpointing), contender="huggingface-llama", vocab=32000)

    return [
        gpt2(12, 768, 8, 1024), gpt2(12, 768, 16, 1024), gpt2(12, 768, 16, 1024, checkpointing=True),
        gpt2(24, 1024, 4, 1024), llama(12, 768, 8, 1024), llama(12, 768, 8, 1024, checkpointing=True),
        llama(22, 2048, 2, 2048, checkpointing=True),
    ]  # fmt: skip


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """What can be measured here, in the order asked for."""
    has = {
        "nanogpt": options.nanogpt, "nanochat-2026": options.nanochat, "nanochat-2025": options.nanochat_2025,
        "onecard": True, "huggingface": find_spec("transformers"),
    }  # fmt: skip
    found: list[Job] = []
    for part in options.parts:
        those = {
            "nanogpt": lambda: [*_gpt2("nanogpt"), *_first_evaluations()],
            "onecard": lambda: _gpt2("onecard"),
            "nanochat": lambda: [*_nanochat(2026), *_nanochat(2025)],
            "huggingface": _huggingface,
        }[part]()
        # Compiled ones together, by depth: a wave takes as long as its slowest.
        found += sorted(those, key=lambda job: (not job.compile, job.n_layer))
    found = [job for job in found if has.get(job.contender) or has.get(job.part)]
    return [tiny(job) if options.tiny else job for job in found if re.search(options.only, job.name)]


def tiny(job: Job) -> Job:
    """The same at a size that a CPU runs in a second: to try the script, not to measure."""
    width = 2 * job.head_dim
    return replace(
        job, n_layer=2, n_embd=width, batch=min(job.batch, 2), block=min(job.block // 32, 64),
        vocab=min(job.vocab, 256), compile=False, accumulation=min(job.accumulation, 2), cap_gib=0.0,
    )  # fmt: skip


# --- running


def waves(jobs: list[Job], lanes: int, memory: float | None) -> Iterator[list[Job]]:
    """So many at a time as the card holds."""
    wave: list[Job] = []
    for job in jobs:
        full = memory is not None and sum(j.about_bytes for j in [*wave, job]) > _ROOM * memory
        if wave and (full or len(wave) == lanes or wave[0].compile != job.compile):
            yield wave
            wave = []
        wave.append(job)
    if wave:
        yield wave


def run(options: argparse.Namespace) -> None:
    import peers_measure

    began = time.monotonic()
    folders = {
        name: str(path.resolve()) for name, path in (
            ("nanogpt", options.nanogpt), ("nanochat-2026", options.nanochat),
            ("nanochat-2025", options.nanochat_2025),
        ) if path
    }  # fmt: skip
    results: Row = {"what": "other trainers' and onecard's speeds and peaks, a process each", "rows": []}
    if options.out.exists():
        if not options.resume:
            raise SystemExit(f"error: {options.out} exists\nhint: --resume goes on from it")
        results = json.loads(options.out.read_text())
    peers_measure.prepare(options.tiny)
    call = in_own_process(partial(peers_measure.machine, options.device), 120.0)
    if "error" in call:
        raise SystemExit(f"error: the machine cannot be measured: {call['error']}\n{call.get('trace', '')}")
    call |= {"date": time.strftime("%Y-%m-%d %H:%M"), "command": command_line()}
    results["calls"] = [*results.get("calls", []), call]
    rows: list[Row] = [row for row in results["rows"] if "error" not in row]
    done = {row["name"] for row in rows}
    jobs = list(dict.fromkeys(job for job in jobs_of(options) if job.name not in done))
    left = [job.name for job in jobs]
    for wave in waves(jobs, options.lanes, call["memory_bytes"]):
        if time.monotonic() - began > options.budget_seconds - options.wave_seconds:
            break
        with tempfile.TemporaryDirectory() as folder:
            works = [
                partial(peers_measure.measure, job, options.device, folders, str(Path(folder) / "turns"))
                for job in wave
            ]
            for number, found in side_by_side(works, len(works), options.limit_seconds):
                job = wave[number]
                call_number = len(results["calls"]) - 1
                rows.append({"name": job.name, "job": job.to_json(), "call": call_number} | found)
                left.remove(job.name)
                results |= {"unfinished": left, "rows": rows}
                write(options.out, results)
                told = found.get("error") or found.get("ran_out") or _line(found)
                print(f"[{time.monotonic() - began:4.0f} s] {job.name} | {told}", flush=True)
    write(options.out, results | {"unfinished": left, "rows": rows})
    print(f"{len(left)} not started within the budget: {options.out.name}")


def _line(row: Row) -> str:
    speed = f"{row['tokens_per_s']:,} tokens/s, " if "tokens_per_s" in row else ""
    peaks = row["peaks"].get("steady") or {}
    told = (f"{name} {(peaks.get(name) or 0) / GIB:.3f} GiB" for name in ("allocated", "reserved"))
    return speed + ", ".join(told)


# --- comparing


def predicted(row: Row, call: Row) -> Row:
    """What plan says of this job today; an empty one where it says nothing."""
    from onecard.hardware.cards import match_card
    from onecard.plan.rates import rates_of

    job = Job(**row["job"])
    card = match_card(call["card"], call["memory_gib"])
    rates = rates_of(card, "bfloat16") if card else None
    if job.contender == "onecard":
        bill = job.case.bill(tuple(call["compute_capability"]) if call["compute_capability"] else None)
        seconds = job.case.step_time(rates).seconds if rates else None
        return {"allocated": bill.allocated, "reserved": bill.reserved, "seconds": seconds}
    if job.contender == "nanogpt":
        return _nanogpt(job, rates)
    return _memory(job)


def _memory(job: Job) -> Row:
    """Of nanochat and Hugging Face, the steps that were measured."""
    from onecard.arch.shapes import GPT2Shape, Nanochat2026Shape, NanochatShape
    from onecard.plan.others.huggingface_step import HuggingFaceGPT2, HuggingFaceLlama, LlamaShape
    from onecard.plan.others.nanochat_compiled import CompiledNanochat
    from onecard.plan.others.nanochat_eager import EagerNanochat

    sizes = (job.n_layer, job.heads, job.n_embd)
    step: Any
    if job.contender == "huggingface-gpt2":
        shape = GPT2Shape(*sizes, job.vocab, job.block, bias=True)
        step = HuggingFaceGPT2(shape, job.batch, checkpointing=job.checkpointing)
    elif job.contender == "huggingface-llama":
        inner = -(-8 * job.n_embd // 3 // 256) * 256
        llama = LlamaShape(*sizes, inner, job.vocab, job.block)
        step = HuggingFaceLlama(llama, job.batch, checkpointing=job.checkpointing)
    else:
        kind = NanochatShape if job.contender == "nanochat-2025" else Nanochat2026Shape
        nanochat = CompiledNanochat if job.compile else EagerNanochat
        step = nanochat(kind(*sizes, job.vocab, job.block), job.batch)
    heap = step.run(3, job.accumulation, evaluates=job.evaluates)
    return {"allocated": heap.peak_allocated, "reserved": heap.peak_reserved}


def _nanogpt(job: Job, rates: Any) -> Row:
    from onecard.arch.shapes import GPT2Shape
    from onecard.plan.others.nanogpt import nanogpt_bill
    from onecard.plan.others.nanogpt_speed import nanogpt_step_time

    shape = GPT2Shape(job.n_layer, job.heads, job.n_embd, job.vocab, job.block, False)
    bill = nanogpt_bill(
        shape, job.batch, compiled=job.compile, dropout=job.dropout,
        gradient_accumulation_steps=job.accumulation, evaluates=job.evaluates,
    )  # fmt: skip
    step = None
    if rates:
        sequences = job.batch * job.accumulation
        step = nanogpt_step_time(
            shape, job.batch, sequences, rates, compiled=job.compile, dropout=job.dropout
        )
    return {"allocated": bill.allocated, "reserved": bill.reserved, "seconds": step and step.seconds}


def report(results: Row) -> None:
    """Every row with how far today's prediction is off."""
    errors: dict[str, list[float]] = {}
    for row in results["rows"]:
        if "error" in row:
            print(f"{row['name']:66} {row['error']}")
            continue
        said = predicted(row, results["calls"][row["call"]])
        steady = row["peaks"].get("steady") or {}
        was = {**{k: steady.get(k) for k in ("allocated", "reserved")}, "seconds": row.get("seconds")}
        told = [f"{row['name']:66}"]
        for key, unit in (("allocated", GIB), ("reserved", GIB), ("seconds", 1e-3)):
            if not was[key]:
                continue
            told.append(f"{key} {was[key] / unit:8.3f}")
            if said.get(key):
                error = said[key] / was[key] - 1
                told.append(f"({error:+.1%})")
                errors.setdefault(f"{row['job']['contender']} {key}", []).append(abs(error))
        print(" ".join([*told, row.get("ran_out", "")]))
    for name, found in errors.items():
        middle, most = statistics.median(found), max(found)
        print(f"{name}: {len(found)} rows, off {middle:.1%} in the middle, {most:.1%} at most")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--nanogpt", type=Path, help="a clone of nanoGPT")
    add("--nanochat", type=Path, help="a clone of nanochat as of 2026")
    add("--nanochat_2025", type=Path, help="a clone of nanochat as of October 2025")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--only", default="", help="a regular expression on names")
    add("--lanes", type=int, default=10, help="processes that build and compile side by side")
    add("--budget_seconds", type=float, default=540.0, help="start nothing that would end after that")
    add("--wave_seconds", type=float, default=100.0, help="what a wave may take")
    add("--limit_seconds", type=float, default=150.0, help="stop a measurement after that")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--tiny", action="store_true", help="small and uncompiled: to try the script, not to measure")
    add("--resume", action="store_true", help="keep the good rows of --out")
    add("--out", type=Path)
    add("--report", type=Path, metavar="FILE.json", help="measure nothing, compare")
    options = parser.parse_args()
    if options.report:
        report(json.loads(options.report.read_text()))
        return
    if options.out is None:
        parser.error("--out: where the measurements go")
    if (options.device == "cpu") != options.tiny:
        parser.error("--device cpu and --tiny go together: they measure nothing")
    run(options)


if __name__ == "__main__":
    main()
