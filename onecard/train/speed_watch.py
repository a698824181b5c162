"""Whether steps have become much slower, and why: reported, and where the driver spills, acted upon.

A driver that moves memory of a full card to RAM says nothing: only the time of a step shows it. Another
trainer on the card, heat and power limits show in the same way; what the driver reports at that moment
separates them.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from onecard.language import _, joined
from onecard.train.other_processes import Look, gib, process_notes, who
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
# pass for usual before it is reported, and a speed that changes little by little must.
_LEARNED, _APART, _REMEMBERED = 12, 12, 64
# A process that comes and goes is reported so often in one setting, then no more; as many by name.
MOST_REPORTS = 8


@dataclass(frozen=True)
class Verdict:
    """The speed has changed. `spilling` is to be treated as out of memory; the others are only reported."""

    reason: str  # spilling, shared, slow; or back, when a change reported earlier is over
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
        self._before: list[float] = []  # the looks before a change that was reported and is not over
        self._steps, self._seconds, self._settled, self._reported = 0, 0.0, 0, 0

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
        notes = process_notes(Look(others=new)) if len(self._known) < MOST_REPORTS else []
        self._known.update(p.pid for p in new)
        return notes

    def verdict(self, look: Look) -> Verdict | None:
        """What has changed since the last verdict, and why."""
        if self._is_back():
            before, now = statistics.median(self._before), self._now()
            self._looks, self._before = deque(self._before, _REMEMBERED), []
            text = _("the speed is back: {time} per step").format(time=_time(now))
            return Verdict("back", text, before, now) if self._reported <= MOST_REPORTS else None
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
            self._reported += 1
            if self._reported > MOST_REPORTS:
                return None
        text = _("a step takes {now} instead of {before}: {why}").format(
            now=_time(now), before=_time(before), why=self._why(reason, look)
        )
        if self._reported == MOST_REPORTS and not full:
            text = joined([text, _("it comes and goes, and is not reported again")], "; ")
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
        there = ""
        if look.free_bytes is not None:
            there = _("{n} of the card are free").format(n=gib(look.free_bytes))
        if reason == "spilling":
            return _("{there}, and the driver seems to move what has no room to RAM").format(there=there)
        if reason == "shared":
            return _("{who} computes on the card too").format(who=joined(map(who, look.computing)))
        seen = [_("no other process is seen to compute on the card"), there, *look.unnamed()]
        now, well = look.load, self._well.load
        if now.clock_mhz is not None:
            text = _("its clock is {now:.0f} MHz")
            if well.clock_mhz is not None:
                text = _("its clock is {now:.0f} MHz, it was {before:.0f}")
            seen.append(text.format(now=now.clock_mhz, before=well.clock_mhz))
        if now.temperature_c is not None:
            seen.append(_("its temperature {n:.0f} °C").format(n=now.temperature_c))
        new = [cause for cause in look.held_back_by if cause not in self._well.held_back_by]
        if new:
            seen.append(_("it is held back by {causes}").format(causes=joined(map(_, new))))
        else:
            seen.append(_("heat, power or a busy processor?"))
        return joined(filter(None, seen), "; ")


def _time(seconds: float) -> str:
    if seconds >= 1:
        return _("{n:.2f} s").format(n=seconds)
    return _("{n:.3g} ms").format(n=1000 * seconds)
