"""Questions to the planner about cards that need not be in this machine."""

from __future__ import annotations

from datetime import datetime

from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.hardware.cards import find_card
from onecard.plan.answer import Answer, answer, question_of
from onecard.plan.lines import GIB
from onecard.plan.machine import Target
from onecard.plan.options import Options
from onecard.plan.search import Question

NOW = datetime(2026, 11, 16, 12, 0)  # a Monday
# A width often seen on a 12 GB card: 16 × 32 sequences of 1024 tokens.
NOTES = [
    "--n_layer=12", "--n_head=12", "--n_embd=576", "--vocab_size=50304", "--block_size=1024",
    "--batch_size=16", "--gradient_accumulation_steps=32", "--max_iters=6000",
]  # fmt: skip
D32 = [
    "--arch=nanochat", "--generation=2025", "--depth=32", "--vocab_size=65536", "--block_size=2048",
    "--total_batch_size=524288", "--batch_size=4",
]  # fmt: skip


def target(card: str = "RTX 4070", gib: float | None = None, host_gib: float | None = None) -> Target:
    found = find_card(card)
    capacity = int(found.memory_gb * GIB)
    allowed = capacity if gib is None else int(gib * GIB)
    host = None if host_gib is None else int(host_gib * GIB)
    return Target(found, capacity, allowed, 0, host, None, False)


def config(words: list[str], *more: str) -> RunConfig:
    return load_config(RunConfig, [*words, *more])


def question(words: list[str], *more: str, **where: float) -> Question:
    return question_of(config(words, *more), target(**where))  # type: ignore[arg-type]


def asked(words: list[str], *more: str, card: str = "RTX 4070", gib: float | None = None) -> Answer:
    return answer(config(words, *more), target(card, gib), Options(), NOW)
