"""How far off a predicted speed may be, in words."""

from __future__ import annotations

import dataclasses

from onecard.language import _
from onecard.plan.machine import Target
from onecard.plan.ranges import Spread, is_launch_bound


def expected(spread: Spread, target: Target, *, calibrated: bool) -> str:
    """How far off a speed may be. A laptop's card is as slow as its power limit makes it, at worst."""
    whole = within_power(spread, target)
    values = {"low": whole.slower, "high": whole.faster}
    if whole != spread:
        text = _("expect -{low:.0%} to +{high:.0%}, held to {watts:.0f} of {rated:.0f} W")
        return text.format(**values, watts=target.card.tdp_w, rated=target.rated_w)
    text = _("expect ±{n:.0%}").format(n=spread.faster)
    if is_launch_bound(spread):
        text = _("expect -{low:.0%} to +{high:.0%}: the CPU's launches decide").format(**values)
    if target.is_laptop and target.measured is None:
        text += ", " + _("less at a lower power limit (--watts)")
    return text if calibrated else text + "; " + _("`onecard bench` measures your card")


def within_power(spread: Spread, target: Target) -> Spread:
    """With what a laptop's lower power limit may take besides."""
    watts, rated = target.card.tdp_w, target.rated_w
    if target.is_laptop and target.measured is None and watts and rated and watts < rated:
        return dataclasses.replace(spread, slower=1 - (1 - spread.slower) * watts / rated)
    return spread
