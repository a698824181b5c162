"""Whether steps have become much slower, and why: told, and where the driver spills, acted upon.

A driver that moves memory of a full card to the host says nothing: only the time of a step shows it. Another
trainer on the card, heat and power limits show in the same way, and are told apart by what the driver says at
that moment.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from onecard.train.neighbours import Look, gib, told_about, who
from onecard.train.pace import SETTLING_STEPS

# Shorter steps are taken together until they span this: what disturbs for a second is not worth a word.
LOOK_SECONDS = 3.0
# So many looks in a row have to be slow: an evaluation, a checkpoint or a page that loads disturb one or two.
IN_A_ROW = 5
# Two trainers on one card get about half each; a little below, so that noise does not hide them.
SLOWER = 1.8
# Where speed varies by itself, single looks come this near to the usual pace: not one of those in a row may.
# Less than this above the usual pace is also what counts as "back".
_NEAR = 1.4
# And each has to be clearly slower than nearly all that was seen before: where steps alternate between fast
# and slow by nature, the slow ones are no news. A tenth is left out, the disturbed looks.
_NEARLY_ALL, _CLEARLY = 0.9, 1.2
# The usual pace comes from so many looks at least, and from those of a while ago: a slow stretch must not
# pass for usual before it is told, and a speed that changes little by little must.
_LEARNED, _APART, _REMEMBERED = 12, 12, 64
# A neighbour that comes and goes is told so often in one setting, then no more; as many are told by name.
MOST_TOLD = 8


@dataclass(frozen=True)
class Verdict:
    """The speed has changed. `spilling` is to be treated as out of memory; the others are only told."""

    reason: str  # spilling, shared, slow; or back, when a change told earlier is over
    text: str
    before_seconds: float
    now_seconds: float
    free_bytes: int | None = None
    pids: tuple[int, ...] = ()


class SpeedWatch:
    """Knows the usual pace of a setting, and notices when it is lost and when it is back."""

    def __init__(self, spills: bool, first: Look | None = None) -> None:
        self.spills = spills
        self._known = {p.pid for p in first.computing} if first is not None else set()
        self._well = Look()  # the card at work and all well; at the start it had nothing to do
        self.reset()

    def reset(self, expected_seconds: float | None = None) -> None:
        """Another setting, another pace. `expected_seconds`: what a step should take at most in it, where
        that is known (a climb: what it took before); used only to notice that it spills from its start."""
        self._expected = expected_seconds
        self._looks: deque[float] = deque(maxlen=_REMEMBERED)
        self._before: list[float] = []  # the looks before a change that was told and is not over
        self._steps, self._seconds, self._settled, self._told = 0, 0.0, 0, 0

    def step_took(self, seconds: float, steps: int = 1) -> bool:
        """Finished steps, without evaluations and checkpoints. True: ask for the verdict."""
        settled = self._settled >= SETTLING_STEPS
        self._settled += steps
        if not settled:
            return False
        self._seconds, self._steps = self._seconds + seconds, self._steps + steps
        if self._seconds < LOOK_SECONDS:
            return False
        self._looks.append(self._seconds / self._steps)
        self._steps, self._seconds = 0, 0.0
        return self._is_back() or self._is_slow() or self._is_behind()

    @property
    def usual(self) -> float | None:
        """Seconds of a step while all is well."""
        looks = self._before or self._earlier() or self._looks
        return statistics.median(looks) if looks else None

    def notice(self, look: Look) -> list[str]:
        """Now and then, while all is well: who has come to compute on the card since the last time."""
        if not (self._before or self._is_slow()):
            self._well = look
        new = tuple(p for p in look.computing if p.pid not in self._known)
        told = told_about(Look(neighbours=new)) if len(self._known) < MOST_TOLD else []
        self._known.update(p.pid for p in new)
        return told

    def verdict(self, look: Look) -> Verdict | None:
        """What has changed since the last verdict, and why."""
        if self._is_back():
            before, now = statistics.median(self._before), self._now()
            self._looks, self._before = deque(self._before, _REMEMBERED), []
            text = f"the speed is back: {_time(now)} a step"
            return Verdict("back", text, before, now) if self._told <= MOST_TOLD else None
        full, earlier = self.spills and look.full, self._earlier()
        if not self._is_slow():
            # What was expected is asked about once: with memory to spare it was a wrong estimate.
            earlier = [self._expected] if self._expected is not None and self._is_behind() else []
            self._expected = None if earlier else self._expected
            if not (earlier and full):
                return None
        before, now = statistics.median(earlier), self._now()
        # What is slow now is the pace that a further change is measured by; "back" is back to the first one.
        self._before = self._before or earlier
        self._looks = deque([now] * _LEARNED, _REMEMBERED)
        self._known.update(p.pid for p in look.computing)
        reason = "spilling" if full else "shared" if look.computing else "slow"
        if not full:
            self._told += 1
            if self._told > MOST_TOLD:
                return None
        text = f"a step takes {_time(now)} instead of {_time(before)}: {self._why(reason, look)}"
        text += "; it comes and goes, and is not told again" if self._told == MOST_TOLD and not full else ""
        return Verdict(reason, text, before, now, look.free_bytes, tuple(p.pid for p in look.computing))

    def _earlier(self) -> list[float]:
        """The looks that the usual pace comes from; [] until it is known."""
        looks = list(self._looks)
        return looks[: max(_LEARNED, len(looks) - _APART)] if len(looks) >= _LEARNED + IN_A_ROW else []

    def _now(self) -> float:
        return statistics.median(list(self._looks)[-IN_A_ROW:])

    def _is_slow(self) -> bool:
        earlier = sorted(self._earlier())
        if not earlier:
            return False
        usual, slow_before = statistics.median(earlier), earlier[int(_NEARLY_ALL * len(earlier))]
        fastest = min(list(self._looks)[-IN_A_ROW:])
        return fastest > max(_NEAR * usual, _CLEARLY * slow_before) and self._now() >= SLOWER * usual

    def _is_behind(self) -> bool:
        """Slow from the start of the setting, measured by what was expected."""
        if not self.spills or self._expected is None or len(self._looks) < IN_A_ROW:
            return False
        return min(list(self._looks)[-IN_A_ROW:]) >= SLOWER * self._expected

    def _is_back(self) -> bool:
        return bool(self._before) and self._now() < _NEAR * statistics.median(self._before)

    def _why(self, reason: str, look: Look) -> str:
        there = f"{gib(look.free_bytes)} of the card are free" if look.free_bytes is not None else ""
        if reason == "spilling":
            return f"{there}, and the driver seems to move what has no room to the host"
        if reason == "shared":
            return f"{', '.join(who(p) for p in look.computing)} computes on the card too"
        seen = ["nobody else is seen to compute on the card", there, *look.unnamed()]
        now, well = look.load, self._well.load
        if now.clock_mhz is not None:
            was = f", it was {well.clock_mhz:.0f}" if well.clock_mhz is not None else ""
            seen.append(f"its clock is {now.clock_mhz:.0f} MHz{was}")
        if now.temperature_c is not None:
            seen.append(f"its temperature {now.temperature_c:.0f} °C")
        new = [cause for cause in look.held_back_by if cause not in self._well.held_back_by]
        seen.append(f"it is held back by {' and '.join(new)}" if new else "heat, power or a busy processor?")
        return "; ".join(part for part in seen if part)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
