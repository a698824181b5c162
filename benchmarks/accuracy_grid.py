"""Which configurations benchmarks/plan_accuracy.py measures, in which order, and what that takes. No torch.

Two families and both of nanochat's generations, 9M to 1.9B parameters; every setting of the engine alone
and in company. Compiling takes longer than measuring, so that most settings are tried on a few shapes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from onecard.arch.dial import GENERATIONS
from onecard.arch.layout import Setting
from onecard.arch.shapes import Shape, heads_for
from onecard.config.knobs import from_values
from onecard.config.resolve import setting_of
from onecard.config.run import RunConfig
from onecard.hardware.cards import find_card
from onecard.plan.bill import Bill, bill_of
from onecard.plan.rates import Rates, rates_of
from onecard.plan.speed import StepTime, step_time

FAMILIES = ("gpt2", "nanochat-2025", "nanochat-2026")
ACCUMULATION = 2  # the least that accumulates
HELD_OUT = 5  # one of so many is never fitted to
# Seconds of a measurement besides its steps, on a machine with an H200 and 16 cores.
_START, _PER_BILLION, _COMPILING = 3.5, 8.0, {"gpt2": 7.0, "nanochat-2025": 7.0, "nanochat-2026": 14.0}
_ROOM_FOR_CAPS = 2.5  # memory goes back to the driver and is taken anew
WARM_UP = 3  # the first compiles, the second may record a graph
AFTER_WAITING = 2  # before steps are timed: card and host have been idle
UNDER_CAP = 2  # and as many under a tighter one
APART = 1


@dataclass(frozen=True)
class Case:
    """One configuration. The defaults are part of its name in the hash: do not change them, add others."""

    family: str
    n_layer: int
    n_embd: int
    micro_batch: int
    block: int
    recompute: str = "none"
    offload: str = "none"
    master_weights: str = "fp32"
    optim_states: str = "fp32"
    compile: bool = True
    cuda_graphs: bool = False
    loss_chunk: int = 0  # 0: onecard's own choice
    optimizer: str = ""  # "": the family's own
    dtype: str = "bfloat16"
    vocab: int = 0  # 0: the family's own
    accumulation: int = ACCUMULATION
    dropout: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """What differs from the defaults: a field that is added later changes no configuration's hash."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}

    @property
    def hash(self) -> str:
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def held_out(self) -> bool:
        """Decided by the configuration alone, before anything was measured."""
        return int(self.hash[:2], 16) % HELD_OUT == 0

    @property
    def name(self) -> str:
        told = [
            self.family, f"{self.n_layer}L{self.n_embd}", f"{self.micro_batch}x{self.block}",
            f"{self.recompute}/{self.offload}", f"{self.master_weights}/{self.optim_states}",
            "compiled" if self.compile else "eager",
        ]  # fmt: skip
        told += ["graphs"] if self.cuda_graphs else []
        told += [f"chunk{self.loss_chunk}"] if self.loss_chunk else []
        told += [self.optimizer] if self.optimizer else []
        told += [self.dtype] if self.dtype != "bfloat16" else []
        told += [f"v{self.vocab}"] if self.vocab else []
        told += [f"acc{self.accumulation}"] if self.accumulation != ACCUMULATION else []
        told += [f"dropout{self.dropout:g}"] if self.dropout else []
        return " ".join(told)

    @property
    def config(self) -> RunConfig:
        """As `onecard train` would be told."""
        arch, _, generation = self.family.partition("-")
        own = GENERATIONS[int(generation)].vocab_size if generation else 50304
        values: dict[str, Any] = {
            "arch": arch, "n_layer": self.n_layer, "n_embd": self.n_embd, "block_size": self.block,
            "n_head": heads_for(self.n_embd) if generation else max(1, self.n_embd // 64),
            "vocab_size": self.vocab or own, "batch_size": self.micro_batch, "dtype": self.dtype,
            "gradient_accumulation_steps": self.accumulation, "max_iters": 1000, "sample_tokens": 0,
            "recompute": self.recompute, "offload": self.offload, "master_weights": self.master_weights,
            "optim_states": self.optim_states, "compile": self.compile, "cuda_graphs": self.cuda_graphs,
        }  # fmt: skip
        values |= {"generation": int(generation)} if generation else {}
        values |= {"loss_chunk": self.loss_chunk} if self.loss_chunk else {}
        values |= {"optimizer": self.optimizer} if self.optimizer else {}
        values |= {"dropout": self.dropout} if self.dropout else {}
        config = from_values(RunConfig, values, dict.fromkeys(values, "the grid")).resolved()
        config.check()
        return config

    @property
    def shape(self) -> Shape:
        config = self.config
        assert config.vocab_size
        return config.shape(config.vocab_size)

    @property
    def setting(self) -> Setting:
        return setting_of(self.config, self.shape)

    def bill(self, compute_capability: tuple[int, int] | None = None) -> Bill:
        return bill_of(self.config, self.shape, self.setting, self.dtype, compute_capability)

    def step_time(self, rates: Rates) -> StepTime:
        config = self.config
        return step_time(
            self.shape, self.setting, self.dtype, rates, config.sequences_per_step, by_muon=config.by_muon,
            dropout=self.dropout,
        )  # fmt: skip

    @property
    def code(self) -> tuple[Any, ...] | None:
        """What its layers are compiled for; the same whatever the depth. None: nothing is."""
        rounding = self.master_weights == "bf16" and self.offload != "gradients"
        sizes = (self.family, self.n_embd, self.micro_batch, self.block, self.vocab)
        return (*sizes, self.recompute, self.dtype, rounding) if self.compile else None


def case_of(values: dict[str, Any]) -> Case:
    return Case(**values)


LOW_BIT: dict[str, Any] = {"master_weights": "bf16", "optim_states": "int8"}
EAGER: dict[str, Any] = {"compile": False}


def _with(base: Case, changes: Iterable[dict[str, Any]]) -> Iterator[Case]:
    for change in changes:
        yield replace(base, **change)


def _gpt2() -> Iterator[Case]:
    base = Case("gpt2", 12, 768, 16, 1024)
    yield from _with(base, ({"recompute": r, "offload": o} for r in ("none", "mlp", "block")
                            for o in ("none", "optimizer", "gradients")))  # fmt: skip
    block = replace(base, recompute="block")
    yield from _with(base, [
        {"optim_states": "int8"}, {"master_weights": "bf16"}, LOW_BIT, {"cuda_graphs": True},
        {"cuda_graphs": True, "offload": "optimizer"}, {"loss_chunk": 512}, {"dtype": "float16"},
        {"optimizer": "muon"}, {"optimizer": "muon", "optim_states": "bf16"},
    ])  # fmt: skip
    yield from _with(block, [
        LOW_BIT, LOW_BIT | {"cuda_graphs": True}, LOW_BIT | {"offload": "optimizer"},
        LOW_BIT | {"offload": "gradients", "loss_chunk": 512}, {"cuda_graphs": True, "loss_chunk": 512},
        LOW_BIT | {"optimizer": "muon", "optim_states": "bf16"},
        LOW_BIT | {"optimizer": "muon", "offload": "gradients"},
    ])  # fmt: skip
    yield from _with(replace(base, compile=False), [
        {}, {"recompute": "mlp"}, {"recompute": "block"}, {"dtype": "float16"}, {"cuda_graphs": True},
        LOW_BIT | {"recompute": "block"}, {"recompute": "block", "offload": "gradients"},
    ])  # fmt: skip
    # The sizes of a step, one at a time.
    yield from _with(base, ({"micro_batch": n} for n in (1, 4, 32)))
    yield from _with(base, ({"block": 16384 // n, "micro_batch": n} for n in (32, 8, 4)))
    yield replace(block, block=256, micro_batch=32)
    yield replace(base, micro_batch=1, compile=False)
    yield from _with(replace(base, micro_batch=4), [{"dtype": "float32"}, EAGER | {"dtype": "float32"}])
    # Small models, in which the card waits for the host.
    small = Case("gpt2", 6, 320, 16, 256, vocab=4096)
    yield from _with(small, [{}, {"cuda_graphs": True}, EAGER, {"n_embd": 384, "vocab": 256, "block": 512}])
    yield from _with(base, [{"n_embd": 576}, {"n_embd": 384}, {"n_embd": 384, "cuda_graphs": True}])
    yield replace(block, n_embd=384, micro_batch=32, block=512)
    # 350M, 774M, 1.56B.
    medium, large, xl = ("gpt2", 24, 1024, 8, 1024), ("gpt2", 36, 1280, 4, 1024), ("gpt2", 48, 1600, 4, 1024)
    yield from _with(Case(*medium), [{}, {"recompute": "block"}, LOW_BIT | {"recompute": "mlp"}])
    yield from _with(Case(*large, recompute="block"), [{}, {"offload": "optimizer"}, LOW_BIT])
    yield Case(*large, optimizer="muon", optim_states="int8")
    yield from _with(Case(*xl, recompute="block"), [LOW_BIT, {"offload": "gradients"}])


def _nanochat(family: str) -> Iterator[Case]:
    of_2026 = family == "nanochat-2026"
    base = Case(family, 12, 768, 8, 2048)
    block = replace(base, recompute="block")
    yield from _with(base, [
        {}, {"optim_states": "bf16"}, {"offload": "optimizer"}, {"cuda_graphs": True}, {"loss_chunk": 512},
        {"recompute": "mlp"},
    ])  # fmt: skip
    yield from _with(block, [{}, {"offload": "gradients"}, LOW_BIT | {"optim_states": "bf16"}, LOW_BIT])
    yield from _with(base, [EAGER, EAGER | {"recompute": "block", "micro_batch": 4}])
    # Sizes: the two generations share the work.
    if of_2026:
        yield replace(base, micro_batch=1)
        yield from _with(block, [{"block": 1024, "micro_batch": 16}, {"dtype": "float16"}])
        yield replace(base, block=256, micro_batch=32)
        yield replace(base, micro_batch=1, compile=False)
    else:
        yield from _with(base, [{"block": 4096, "micro_batch": 4}, {"block": 512, "micro_batch": 32}])
        yield replace(base, micro_batch=2, dtype="float32", compile=False)
        yield Case(family, 8, 512, 4, 2048)
    # The dial: d4, d8, d20, and d32 of 2025.
    small = Case(family, 4, 256, 8, 512)
    yield from _with(small, [{}, {"cuda_graphs": True}])
    d20 = Case(family, 20, 1280, 4, 2048)
    yield from _with(d20, [{}, {"recompute": "block", "offload": "gradients"},
                           LOW_BIT | {"recompute": "block"}])  # fmt: skip
    if of_2026:
        yield replace(d20, recompute="block", offload="gradients", **LOW_BIT)
        return
    d32 = Case(family, 32, 2048, 4, 2048, "block")
    yield from _with(d32, [LOW_BIT | {"offload": "gradients"}, LOW_BIT, {"micro_batch": 2}])


def grid() -> list[Case]:
    """All of it, each once."""
    cases = [*_gpt2(), *_nanochat("nanochat-2025"), *_nanochat("nanochat-2026")]
    return list(dict.fromkeys(cases))


def in_order(cases: Iterable[Case]) -> list[Case]:
    """What shares compiled code one after the other; families in turn, so that a part covers them all."""
    groups: dict[str, dict[tuple[Any, ...], list[Case]]] = {}
    for case in cases:
        key = case.code or ("eager", case.name)
        groups.setdefault(case.family, {}).setdefault(key, []).append(case)
    waiting = {family: list(those.values()) for family, those in groups.items()}
    sizes = {family: sum(map(len, those)) for family, those in waiting.items()}
    done = dict.fromkeys(waiting, 0)
    found: list[Case] = []
    while any(waiting.values()):
        family = min((f for f in waiting if waiting[f]), key=lambda f: done[f] / sizes[f])
        # Small and large in turn too: from both ends of the list.
        group = waiting[family].pop(0 if len(waiting[family]) % 2 else -1)
        found += group
        done[family] += len(group)
    return found


def timed_steps(case: Case, expected: float | None) -> int:
    """Few, since clocks are steady; as many as fill a second and a half of short ones: a host that is shared
    is slow for tenths of a second at a time."""
    return 5 if expected is None else max(3, min(200, round(1.5 / expected)))


class Estimate(NamedTuple):
    """Seconds of a step, and of a measurement: until it is ready, and with the machine for itself."""

    case: Case
    step_s: float
    ready_s: float
    alone_s: float

    @property
    def seconds(self) -> float:
        return self.ready_s + self.alone_s


def estimates(cases: Iterable[Case], card: str = "H200 SXM") -> list[Estimate]:
    """In this order, in which the first of those with the same code compiles it."""
    seen: set[object] = set()
    found = []
    for case in cases:
        rates = rates_of(find_card(card), case.dtype)
        assert rates is not None
        step = case.step_time(rates).seconds
        ready = _START + _PER_BILLION * case.shape.parameters / 1e9 + WARM_UP * step
        if case.code is not None and case.code not in seen:
            seen.add(case.code)
            ready += _COMPILING[case.family]
        steps = AFTER_WAITING + timed_steps(case, step) + APART + 2 * UNDER_CAP
        found.append(Estimate(case, step, ready, _ROOM_FOR_CAPS + steps * step))
    return found


def tiny(case: Case) -> Case:
    """The same at a size that a CPU runs in a second: to try the script, not to measure."""
    return replace(
        case, n_layer=2, n_embd=64 if case.family == "gpt2" else 128, block=min(case.block, 2048) // 32,
        micro_batch=min(case.micro_batch, 2), vocab=256, loss_chunk=16 if case.loss_chunk else 0,
        compile=False, cuda_graphs=False, dtype="float32" if case.dtype == "float32" else "bfloat16",
    )  # fmt: skip


def as_row(case: Case) -> dict[str, Any]:
    """How a row of the results names it; `config` is what is read back."""
    return {"name": case.name, "held_out": case.held_out, "config": case.to_json()}
