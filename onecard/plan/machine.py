"""Which card is planned for, and how much of it the run may take."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from onecard.config.files import shortened
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import Card, UnknownCardError, find_card, is_laptop, read_words
from onecard.hardware.cpu import available_memory
from onecard.hardware.machine import local_gpus
from onecard.hardware.measured import Measured, load_measured
from onecard.language import _
from onecard.plan.lines import GIB
from onecard.plan.rates import GIVEN

# What a system and its desktop hold of the PC's own memory. The trainer counts what is available where it
# runs, which leaves that out already; of --host-ram, which is what the PC has, it has to be taken off.
HOST_RESERVE = 2 * GIB
# GiB of RAM in the PC of a card that is not here, where nobody says more: without a limit, what only a server
# holds would fit.
USUAL_HOST_RAM = 32.0
# Of the memory on the box, what a driver reports as total: 98.5% (24 GB cards) to 99.9% (12 GB).
_REPORTED = 0.985
# GB; as much as --vram_limit may be. More is a slip, and beyond any number in the end.
_MOST_MEMORY = 10_000
_ROUNDING = 2**20  # bytes: a limit that is the card's own size, by way of floats


@dataclass(frozen=True)
class Target:
    """A card and what of it is ours."""

    card: Card
    capacity: int  # bytes it has
    allowed: int  # bytes the process may take
    taken: int  # by other programs, now
    host: int | None  # bytes of host memory a run may take; None: another machine, nobody has looked
    measured: Measured | None
    here: bool  # in this machine
    host_kept: int = 0  # bytes of host memory left to the system, besides
    host_assumed: bool = False  # nobody has said how much host memory there is
    limit: int | None = None  # bytes that --vram_limit allows, whatever the card has; None: it is not given
    rated_w: float | None = None  # what the table says, whatever --watts does

    @property
    def is_laptop(self) -> bool:
        return is_laptop(self.card)

    @property
    def limit_beyond_card(self) -> bool:
        """Is --vram_limit more than the card has? Then it limits nothing, which the user should hear. What is
        written on the box is no mistake, though the driver has a little less.
        """
        most = max(self.capacity, int(self.card.memory_gb * GIB))
        return self.limit is not None and self.limit > most + _ROUNDING


@dataclass(frozen=True)
class Figures:
    """What the user knows of a card; None: what gpus.toml says."""

    tflops: float | None = None  # bf16 with fp32 sums, dense
    bandwidth: float | None = None  # GB/s
    watts: float | None = None

    def of(self, card: Card) -> Card:
        """The card with these figures instead of the table's."""
        if self.tflops is not None:
            # A card without bf16 has no other rate to train at than that of fp16; the others go along.
            without = "fp16acc" if card.fp16 is None else "fp16"
            named = "bf16" if card.bf16 is not None or card.fp16acc is None else without
            factor = self.tflops / (getattr(card, named) or self.tflops)
            others = {name: rate * factor for name in ("bf16", "fp16", "fp16acc", "tf32", "fp32")
                      if (rate := getattr(card, name)) is not None}  # fmt: skip
            card = replace(card, **(others | {named: self.tflops}))
        if self.of_speed:
            card = replace(card, note=GIVEN)
        return replace(
            card, bandwidth_gbps=self.bandwidth or card.bandwidth_gbps, tdp_w=self.watts or card.tdp_w
        )

    @property
    def of_speed(self) -> bool:
        return self.tflops is not None or self.bandwidth is not None


def find_target(
    config: RunConfig, gpu: str | None, host_ram: float | None = None, figures: Figures | None = None
) -> Target:
    """The card named, or this machine's."""
    figures = figures or Figures()
    example = "onecard plan CONFIG --gpu 'RTX 4070'"
    if gpu is None and config.device.startswith("cpu"):
        # Also where there is a card: the run would not be on it.
        raise UserError(
            _("runs on a CPU cannot be planned"),
            _("plan knows the memory and the speed of cards"),
            _("--gpu NAME plans for a card: {example}").format(example=example),
        )
    local = next(iter(local_gpus()), None) if gpu is None else None
    if gpu is None and local is None:
        why = _("a run on the CPU needs no plan: onecard train CONFIG")
        raise UserError(_("there is no card in this machine to plan for"), why, example)
    if local is not None:
        capacity = local.total_bytes or int((local.card.memory_gb if local.card else 0) * GIB)
        if not capacity:
            raise UserError(
                _("the driver does not report how much memory {name} has").format(name=local.name),
                hint=_("--gpu NAME, or --vram_limit GIB"),
            )
        card = local.card or Card(local.name, capacity / GIB, compute_capability=local.compute_capability)
        taken = capacity - local.free_bytes if local.free_bytes is not None else 0
    else:
        assert gpu is not None
        try:
            card = find_card(gpu)
        except UnknownCardError as error:
            card = _card_by_figures(gpu, figures, config.vram_limit, error)
        capacity, taken = int(card.memory_gb * _REPORTED * GIB), 0
    rated, card = card.tdp_w, figures.of(card)
    allowed = capacity - taken
    limit = int(config.vram_limit * GIB) if config.vram_limit is not None else None
    if limit is not None:
        allowed = min(limit, allowed)
    if config.vram_reserve is not None:
        allowed = min(allowed, capacity - taken - int(config.vram_reserve * GIB))
    if allowed <= 0:
        raise UserError(
            _("nothing is left of the card to plan with"),
            _("{name} has {n:.2f} GiB").format(name=card.name, n=capacity / GIB),
            "--vram_limit, --vram_reserve",
        )
    host = available_memory() if local is not None else None
    kept, assumed = 0, gpu is not None and host_ram is None
    if assumed:
        host_ram = USUAL_HOST_RAM
    if host_ram is not None:
        kept = min(HOST_RESERVE, int(host_ram * GIB))
        host = int(host_ram * GIB) - kept
    measured = None if figures.of_speed else load_measured(card.name, capacity / GIB)
    return Target(
        card, capacity, allowed, taken, host, measured, local is not None, kept, assumed, limit, rated
    )


def _card_by_figures(
    name: str, figures: Figures, vram_limit: float | None, unknown: UnknownCardError
) -> Card:
    """A card nobody listed, where the user says enough of it to plan with."""
    sizes = read_words(name).memory_gb
    memory = max(sizes) if sizes else (vram_limit or 0.0) / _REPORTED
    if sizes and memory > _MOST_MEMORY:
        raise UserError(
            _("no card has as much memory as {name} says").format(name=shortened(name)),
            _("the most that can be planned for is {n:,} GB").format(n=_MOST_MEMORY),
            "--gpu 'NAME 12GB'",
        )
    words = {"--tflops": figures.tflops, "--bandwidth": figures.bandwidth, "--vram_limit": memory}
    missing = [word for word, value in words.items() if not value]
    example = f"--gpu {shlex.quote(name)} --tflops 30 --bandwidth 500 --vram_limit 12"
    if figures == Figures():
        raise UserError(
            unknown.what,
            unknown.why,
            unknown.hint + "\n" + _("or give its figures: {example}").format(example=example),
        )
    if missing:
        raise UserError(
            _("'{name}' is not in the table, and its figures are not all there").format(name=name),
            _("missing: {words}").format(words=", ".join(missing)),
            example,
        )
    return Card(name, memory)
