"""Which card is planned for, and how much of it the run may take."""

from __future__ import annotations

from dataclasses import dataclass

from onecard.config import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import Card, find_card
from onecard.hardware.cpu import available_memory
from onecard.hardware.machine import local_gpus
from onecard.hardware.measured import Measured, load_measured
from onecard.language import _
from onecard.plan.lines import GIB

# Of the memory on the box, what a driver reports as total: 98.5% (24 GB cards) to 99.9% (12 GB).
_REPORTED = 0.985


@dataclass(frozen=True)
class Target:
    """A card and what of it is ours."""

    card: Card
    capacity: int  # bytes it has
    allowed: int  # bytes the process may take
    taken: int  # by other programs, now
    host: int | None  # bytes of host memory there are; None: another machine
    measured: Measured | None
    here: bool  # in this machine


def find_target(config: RunConfig, gpu: str | None, host_ram: float | None = None) -> Target:
    """The card named, or this machine's."""
    local = next(iter(local_gpus()), None) if gpu is None else None
    if gpu is None and local is None:
        raise UserError(
            _("there is no card in this machine to plan for"), hint="onecard plan CONFIG --gpu 'RTX 4070'"
        )
    if local is not None:
        capacity = local.total_bytes or int((local.card.memory_gb if local.card else 0) * GIB)
        if not capacity:
            raise UserError(
                _("the driver does not tell how much memory {name} has").format(name=local.name),
                hint=_("--gpu NAME, or --vram_limit GIB"),
            )
        card = local.card or Card(local.name, capacity / GIB, compute_capability=local.compute_capability)
        taken = capacity - local.free_bytes if local.free_bytes is not None else 0
    else:
        assert gpu is not None
        card = find_card(gpu)
        capacity, taken = int(card.memory_gb * _REPORTED * GIB), 0
    allowed = capacity - taken
    if config.vram_limit is not None:
        # What is asked for may be another card's worth: --gpu with --vram_limit is a question, not a wish.
        limit = int(config.vram_limit * GIB)
        allowed = limit if local is None else min(limit, allowed)
    if config.vram_reserve is not None:
        allowed = max(0, allowed - int(config.vram_reserve * GIB))
    host = available_memory() if local is not None else None
    if host_ram is not None:
        host = int(host_ram * GIB)
    measured = load_measured(card.name, capacity / GIB)
    return Target(card, capacity, allowed, taken, host, measured, local is not None)
