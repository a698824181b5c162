"""The memory of a run, line by line: on the card at its worst moment, on the host, on the disk.

Peak memory of the card is what is resident (plan/resident.py) plus the worst of a few moments
(plan/activations.py) plus what the libraries take. The allocator reserves a little more than is allocated;
CUDA's context lies outside it. `need` is what the card must have free for the run not to run out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from onecard.arch.layout import Setting
from onecard.arch.shapes import Nanochat2026Shape, Shape
from onecard.config.run import RunConfig
from onecard.language import N_
from onecard.plan.activations import (
    TRYING_OUT,
    Moment,
    evaluation_moment,
    sampling_moment,
    stream_size,
    training_moments,
)
from onecard.plan.lines import GIB, Line, total
from onecard.plan.resident import Resident, resident
from onecard.plan.update import update_moments

MIB = 2**20
# cuBLAS takes a workspace in each of the two threads that multiply (torch's own choice of sizes).
_WORKSPACE = {9: 32 * MIB, 10: 32 * MIB}
_USUAL_WORKSPACE = 8_519_680
# By compute capability, of its largest card: what the compiler clears between two tries of a kernel. GeForce
# cards of one capability differ by 70 MiB; where the card itself is known, its own figure counts.
_L2 = {(7, 5): 6 * MIB, (8, 0): 40 * MIB, (8, 6): 6 * MIB, (9, 0): 60 * MIB, (10, 0): 128 * MIB}
_USUAL_L2 = 128 * MIB
# Measured with expandable segments (benchmarks/results): the allocator holds 7 to 173 MiB more than is in use
# where nothing hinders it, mostly 20 to 105. Under a cap it does with less: slack and margin together were
# enough for all of the grid that was tried without graphs, though eight take 9 to 77 MiB more when they may.
_SLACK = 52 * MIB
_MARGIN = 44 * MIB
# nanochat-2026 with block, compiled: many buffers of several sizes, between which more is lost: so many gaps
# of the residual stream's width. Without that four of five ran in a fresh process; 80 and 96 MiB found no
# place. In fp16 244 MiB were free in pieces, and 6.10 GiB enough where nothing hindered. Of a large gap whole
# pages (20 MiB) are given back; not while a graph is captured.
_GAPS, _LARGEST_GAP = 3, 48 * MIB
# While kernels are tried out: one buffer on top, again and again, and what is free lies in pieces too small
# for it. Of six that were given 84 MiB more than is in use five ran; the other one had 102 MiB free when it
# failed.
_TRIAL_MARGIN = 64 * MIB
# Driver, kernels, libraries: 0.67 to 0.75 GiB on an H200 with torch 2.11, with nanochat's d32 0.84. Smaller
# cards take less, not more.
CONTEXT = int(0.75 * GIB)
# A graph's memory is its own: what the micro-batch takes, matmul workspaces, and what does not pack without
# gaps. Measured: 70 to 121 MiB more than the micro-batch, uncompiled or with block 132 to 160. Under a cap a
# capture takes that in one piece (train/replay.py), and 70 to 94 MiB come on top of it: the margin.
_GRAPH, _LOOSE_GRAPH = 128 * MIB, 160 * MIB
_GRAPH_MARGIN = 96 * MIB
# On disk while one is written: the newest two, the best, and the new one.
CHECKPOINTS_AT_ONCE = 4
# torch, its libraries and the data on their way: resident on the host (0.7 to 1.1 GiB on an H200's machine).
_HOST_PROCESS = int(1.0 * GIB)


def graph_bytes(shape: Shape, setting: Setting, dtype: str, *, dropout: float = 0.0, last: int = 0) -> int:
    """Memory of CUDA graphs, besides what a micro-batch without one takes.

    `last` is how many sequences a smaller last micro-batch of a step has: it has a graph of its own.
    """
    if not setting.may_capture:
        return 0
    smaller = replace(setting, micro_batch=last)
    another = captured_bytes(shape, smaller, dtype, dropout) if last else 0
    return _around_micro_batch(shape, setting, dtype) + another


def micro_batch_bytes(shape: Shape, setting: Setting, dtype: str, dropout: float) -> int:
    """What a micro-batch of this size takes and gives back."""
    return _worst_of(shape, setting, dtype, dropout) + _SLACK


def captured_bytes(shape: Shape, setting: Setting, dtype: str, dropout: float) -> int:
    """What the CUDA graph of a micro-batch keeps for itself."""
    return _worst_of(shape, setting, dtype, dropout) + _around_micro_batch(shape, setting, dtype)


def _worst_of(shape: Shape, setting: Setting, dtype: str, dropout: float) -> int:
    moments = training_moments(shape, setting, dtype, dropout=dropout)
    return max(moment.bytes for moment in moments if moment.name != TRYING_OUT)


def _around_micro_batch(shape: Shape, setting: Setting, dtype: str) -> int:
    graph = _LOOSE_GRAPH if setting.recompute == "block" or not setting.compile else _GRAPH
    return graph + _GAPS * _gap(shape, setting, dtype)


def _gap(shape: Shape, setting: Setting, dtype: str) -> int:
    """The gap between buffers that do not pack, where there is one."""
    if not (isinstance(shape, Nanochat2026Shape) and setting.recompute == "block" and setting.compile):
        return 0
    return setting.micro_batch * shape.block_size * shape.n_embd * stream_size(dtype)


@dataclass(frozen=True)
class Bill:
    """Peak memory of one setting of a run."""

    setting: Setting
    resident: Resident
    moments: tuple[Moment, ...]  # all that were looked at
    workspace: Line
    building: Line  # host memory while the model is built
    resuming: Line  # and while a checkpoint is read
    graph_bytes: int = 0
    margin: int = _MARGIN

    @property
    def worst(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.bytes + self._graph_at(moment))

    def _graph_at(self, moment: Moment) -> int:
        """Memory of the graph: none before the kernels are there, which are captured after that."""
        return 0 if moment.name == TRYING_OUT else self.graph_bytes

    @property
    def lines(self) -> tuple[Line, ...]:
        """What is allocated on the card at the worst moment."""
        return (*self.resident.card, *self.worst.lines, self.workspace)

    @property
    def allocated(self) -> int:
        return total(self.lines) + self._graph_at(self.worst)

    @property
    def steady(self) -> int:
        """Allocated at the worst moment of every step: the first may have a worse one."""
        worst = max(moment.bytes for moment in self.moments if moment.name != TRYING_OUT)
        return total(self.resident.card) + worst + self.workspace.bytes + self.graph_bytes

    @property
    def reserved(self) -> int:
        return self.allocated + (0 if self._graph_at(self.worst) else _SLACK)

    @property
    def need(self) -> int:
        """What the allocator must be allowed to take."""
        tightest = self.tightest
        always = total(self.resident.card) + self.workspace.bytes
        return always + tightest.bytes + self._room_around(tightest)

    @property
    def tightest(self) -> Moment:
        """The moment at which most is needed, with what must be free on top of it."""
        return max(self.moments, key=lambda moment: moment.bytes + self._room_around(moment))

    def _room_around(self, moment: Moment) -> int:
        if moment.name == TRYING_OUT:
            return _SLACK + _TRIAL_MARGIN
        return self.graph_bytes + _GRAPH_MARGIN if self.graph_bytes else _SLACK + self.margin

    @property
    def process(self) -> int:
        """What the card must have free: the context lies outside the allocator."""
        return self.need + CONTEXT

    @property
    def host(self) -> int:
        return total(self.resident.host)

    def all_lines(self) -> tuple[Line, ...]:
        """Down to what the card must have free."""
        room = self.need - self.allocated
        slack = Line(N_("allocator's slack"), room, f"{room // MIB} MiB, measured: enough under a cap")
        context = Line(N_("CUDA itself"), CONTEXT, "0.75 GiB; an H200 took 0.67 to 0.84")
        graph = self._graph_at(self.worst)
        captured = [Line(N_("the CUDA graph"), graph, f"{graph // MIB} MiB, measured")] if graph else []
        return (*self.lines, *captured, slack, context)

    def to_json(self) -> dict[str, Any]:
        return {
            "total_gib": round(self.process / GIB, 4),
            "allocated_gib": round(self.allocated / GIB, 4),
            "reserved_gib": round(self.reserved / GIB, 4),
            "moment": self.worst.name,
            "lines": [line.to_json() for line in self.all_lines()],
            "host_gib": round(total(host_lines(self)) / GIB, 3),
            "host_lines": [line.to_json() for line in host_lines(self)],
        }


def host_lines(bill: Bill) -> tuple[Line, ...]:
    return (*bill.resident.host, bill.building, bill.resuming, host_process())


def host_process() -> Line:
    return Line(N_("torch and the data on their way"), _HOST_PROCESS, "1 GiB, measured")


@dataclass(frozen=True)
class Facts:
    """What a bill depends on besides the model, the setting and the dtype."""

    by_muon: bool = False
    refined: bool = False  # nanochat's Muon of 2026, which keeps a number per neuron
    dropout: float = 0.0
    compute_capability: tuple[int, int] | None = None
    l2_bytes: int | None = None  # of this very card, where it is known
    evaluation_sequences: int | None = None
    sample_tokens: int = 0
    last: int = 0  # sequences of a smaller last micro-batch


_NOTHING_SPECIAL = Facts()


def training_bill(
    shape: Shape, setting: Setting, dtype: str = "bfloat16", facts: Facts = _NOTHING_SPECIAL
) -> Bill:
    """Training with its evaluations, samples and checkpoints (which copy tensors one by one)."""
    by_muon, dropout = facts.by_muon, facts.dropout
    held = resident(shape, setting, dtype, by_muon=by_muon, refined=facts.refined)
    # An H200's driver says 60 MiB where its figures say 50.
    l2 = _L2.get(facts.compute_capability or (9, 0), facts.l2_bytes or _USUAL_L2)
    moments = [*training_moments(shape, setting, dtype, dropout=dropout, l2_bytes=l2)]
    moments += update_moments(shape, setting, dtype, by_muon=by_muon, l2_bytes=l2)
    evaluated = facts.evaluation_sequences or setting.micro_batch
    moments.append(evaluation_moment(shape, evaluated, setting.loss_chunk, dtype))
    if facts.sample_tokens:
        moments.append(sampling_moment(shape, 1, facts.sample_tokens, dtype))
    graph = graph_bytes(shape, setting, dtype, dropout=dropout, last=facts.last) if setting.cuda_graphs else 0
    size = 2 if setting.master_weights == "bf16" else 4
    count = f"{shape.parameters:,} parameters"
    building = Line(N_("the model while it is built"), size * shape.parameters, f"{size} bytes × {count}")
    states = checkpoint_bytes(shape, setting, by_muon) - building.bytes
    resuming = Line(N_("states while a checkpoint is read"), max(states, 0), "as they are stored")
    margin = _MARGIN + _GAPS * min(_gap(shape, setting, dtype), _LARGEST_GAP)
    space = workspace(facts.compute_capability)
    return Bill(setting, held, tuple(moments), space, building, resuming, graph, margin)


def workspace(compute_capability: tuple[int, int] | None) -> Line:
    each = _WORKSPACE.get(compute_capability[0] if compute_capability else 9, _USUAL_WORKSPACE)
    return Line(N_("matmul workspaces"), 2 * each, f"2 × {each / MIB:g} MiB")


def bill_of(
    config: RunConfig, shape: Shape, setting: Setting, dtype: str,
    compute_capability: tuple[int, int] | None = None, l2_bytes: int | None = None,
) -> Bill:  # fmt: skip
    facts = Facts(
        config.by_muon, config.arch == "nanochat" and config.generation == 2026, config.dropout,
        compute_capability, l2_bytes, sample_tokens=config.sample_tokens,
        last=config.sequences_per_step % setting.micro_batch,
    )  # fmt: skip
    return training_bill(shape, setting, dtype, facts)


def is_refined(config: RunConfig) -> bool:
    """nanochat's Muon of 2026 keeps a number per neuron."""
    return config.arch == "nanochat" and config.generation == 2026


def checkpoint_bytes(shape: Shape, setting: Setting, by_muon: bool) -> int:
    """One checkpoint on disk: masters and states as they are stored."""
    apart = Setting(1, 1, master_weights=setting.master_weights, optim_states=setting.optim_states)
    held = resident(shape, apart, "float32", by_muon=by_muon)
    names = ("weights (masters)", "optimizer states")
    return sum(line.bytes for line in held.card if line.name in names)
