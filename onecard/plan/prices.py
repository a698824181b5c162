"""Prices of energy, and what a PC draws besides its card. Nothing else: every verb's options need them."""

from __future__ import annotations

from dataclasses import dataclass

from onecard.hardware.cards import Card, is_laptop

# The rest of the PC: processor waiting for the card, board, disks, losses of the supply.
IDLE_WATTS = 80.0
# Of a laptop: a frugal processor, one board, and a screen that is dimmed or off while nobody looks.
LAPTOP_IDLE_WATTS = 25.0
PRICE, CURRENCY = 0.30, "EUR"


@dataclass(frozen=True)
class Prices:
    """What a kWh costs, at least and at most, and what the PC draws besides the card."""

    low: float = PRICE
    high: float = PRICE
    currency: str = CURRENCY
    idle_watts: float = IDLE_WATTS


def usual_idle_watts(card: Card) -> float:
    """What the rest of the PC draws."""
    return LAPTOP_IDLE_WATTS if is_laptop(card) else IDLE_WATTS
