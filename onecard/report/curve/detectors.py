"""Detectors that watch a run while it goes: diverging, stuck, memorising, not a number.

Each is given one thing after the other (a loss, or an evaluation) and answers with an Alarm or None, in next
to constant time. They look at medians of some twenty steps: single batches differ by tenths of a nat, a
batch of odd text by two nats, and neither means anything. The thresholds were set on public logs and are
held to their rates of false and missed alarms by benchmarks/alarms.py; what moves a healthy curve most is
the order of its data, up to 0.28 nats above the best level so far for thousands of steps.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

BLOCK = 20  # points whose median is one level, where every step is logged
FEWEST_POINTS = 3  # and where few are
MOST_LEVELS = 20_000  # of one log: those of a million steps would take as long as to read it
SIGMA_PER_MAD = 1.4826

# Diverging: so far above the best level, in nats, as a share of it, and in standard deviations of a level.
RISE, RISE_SHARE, RISE_SIGMAS = 0.3, 0.12, 8.0
CONFIRMED, PATIENT = 3, 15  # levels in a row; so many where the loss is on its way down again
RECOVERING = 0.7  # of the highest rise
CALM = 0.05  # nats above the best that are nothing

# Stuck: while the steps grew by this factor, the loss fell by less than a tenth of what it fell while they
# grew by it before (at least so many nats). Healthy logs fall by 0.17 of it at least (factor, least fall
# before).
GROWTHS = ((1.5, 0.15), (2.0, 0.2), (3.0, 0.25))
FLAT_SHARE, MISSED_SHARE, MISSED_SIGMAS = 0.1, 0.3, 6.0
FIRST_FLAT = 500  # steps; the first ones fall in steps of their own
# A model that knows how often each token occurs and nothing else pays 0.7 of ln(vocabulary) for GPT-2's
# tokens, 0.58 for bytes; pairs of tokens are learned within some hundred steps.
UNTAUGHT, UNTAUGHT_FALL, FIRST_UNTAUGHT = 0.56, 0.05, 600
# Still that high, a loss falls by more than this share of it while its steps grow fourfold. Further down,
# small models may have learned all they can.
STILL_HIGH, STILL, STILL_SHARE = 0.37, 4.0, 0.012
NOTHING, FIRST_NOTHING = 0.95, 400
LEAST_INITIAL = 5.0  # where the vocabulary is not known, a first loss below is of a model that has learned
# Vocabularies that an initial loss shows where nothing says it: bytes, 1,024, Llama's, GPT-2's, nanochat's.
COMMON_VOCABULARIES = (256, 1024, 4096, 8192, 32_000, 32_768, 50_257, 65_536, 128_256)

# Memorising: the validation loss above its best in so many evaluations in a row, by so many nats and so many
# times its noise, while the training loss falls.
TURNED, TURN, TURN_SIGMAS = 2, 0.03, 5.0
FEWEST_FOR_NOISE = 12

DIVERGING, STUCK, UNLEARNED, MEMORISING, NOT_A_NUMBER = (
    "diverging", "stuck", "not-learning", "memorising", "not-a-number",
)  # fmt: skip


@dataclass(frozen=True)
class Alarm:
    """What goes wrong, since which step, and at which step it was seen."""

    kind: str
    began: int
    seen: int
    before: float  # the loss that was reached, or (stuck) the fall that was to be expected
    now: float  # the loss when it was seen


class Levels:
    """Medians of neighbouring losses, with their noise and sums over any range of them."""

    def __init__(self, size: int = BLOCK) -> None:
        self.size = size
        self.first = (-1, math.nan)  # the first step and its loss: what a run begins with
        self.steps: list[int] = []
        self.values: list[float] = []
        self._sums = [0.0]
        self._waiting: list[float] = []
        self._bends: deque[float] = deque(maxlen=48)
        self._clean: deque[float] = deque(maxlen=8)

    def add(self, step: int, loss: float) -> bool:
        """Is there a new level?"""
        if self.first[0] < 0:
            self.first = (step, loss)
        self._waiting.append(loss)
        if len(self._waiting) < self.size:
            return False
        level = statistics.median(self._waiting)
        self._waiting.clear()
        self._append(step, level)
        return True

    def add_block(self, steps: Sequence[float], losses: Sequence[float]) -> bool:
        """The same of `size` finite losses at once, which is faster."""
        if self._waiting or len(losses) != self.size:
            return sum(self.add(int(step), loss) for step, loss in zip(steps, losses, strict=True)) > 0
        if self.first[0] < 0:
            self.first = (int(steps[0]), losses[0])
        self._append(int(steps[-1]), statistics.median(losses))
        return True

    def _append(self, step: int, level: float) -> None:
        if len(self.values) >= 2:
            # Second differences: a steep or rising curve is no noise.
            self._bends.append(abs(level - 2 * self.values[-1] + self.values[-2]))
        # Means over many levels are asked where a curve is: a spike is no part of it.
        clean = min(level, min(self._clean) + max(CALM, 3 * self.sigma)) if self._clean else level
        self._clean.append(clean)
        self.steps.append(step)
        self.values.append(level)
        self._sums.append(self._sums[-1] + clean)

    @property
    def sigma(self) -> float:
        """Standard deviation of one level."""
        if len(self._bends) < 4:
            return math.inf
        return SIGMA_PER_MAD * statistics.median(self._bends) / math.sqrt(6)

    def around(self, step: float) -> float | None:
        """The mean level of the last tenth before a step, or of three levels; None where these reach far
        back."""
        begin, end = self._window(step)
        if begin < 0 or self.steps[begin] < 0.6 * step:
            return None
        return (self._sums[end] - self._sums[begin]) / (end - begin)

    def error(self, step: float) -> float:
        """Standard error of a difference between that mean and one like it."""
        begin, end = self._window(step)
        return self.sigma * math.sqrt(2 / (end - begin))

    def _window(self, step: float) -> tuple[int, int]:
        end = bisect_right(self.steps, step)
        return min(bisect_right(self.steps, 0.9 * step), end - 3), end

    def since(self, level: float) -> int:
        """The step from which on the values were never far above a level again."""
        at = len(self.values) - 1
        while at > 0 and self.values[at - 1] <= level:
            at -= 1
        return self.steps[at]


class Diverging:
    """The loss rises far above the best there was, and stays: spikes come back down."""

    def __init__(self) -> None:
        self.best = math.inf
        self._calm_step = 0  # the last one that was near the best
        self._count = 0
        self._highest = 0.0

    def add(self, levels: Levels) -> Alarm | None:
        step, level, sigma = levels.steps[-1], levels.values[-1], levels.sigma
        rise = level - self.best
        if rise <= max(CALM, 3 * sigma) or not math.isfinite(sigma):
            self._calm_step = step
        if rise <= self.limit(sigma):
            self.best = min(self.best, level)
            self._count, self._highest = 0, 0.0
            return None
        self._count += 1
        self._highest = max(self._highest, rise)
        wanted = PATIENT if rise < RECOVERING * self._highest else CONFIRMED
        if self._count < wanted:
            return None
        return Alarm(DIVERGING, self._calm_step, step, self.best, level)

    @property
    def rising(self) -> bool:
        """Is the loss far above its best now?"""
        return self._count > 0

    def limit(self, sigma: float) -> float:
        best = self.best if math.isfinite(self.best) else 0.0
        return max(RISE, RISE_SHARE * best, RISE_SIGMAS * sigma)


class Stuck:
    """The loss no longer falls where it was falling fast, or never fell to what is learned first."""

    def __init__(self, vocabulary: int | None = None) -> None:
        self.nothing_learned = math.log(vocabulary) if vocabulary else None

    def add(self, levels: Levels) -> Alarm | None:
        if self.nothing_learned is None and levels.first[0] <= 1:
            self.nothing_learned = _initial(levels.first[1])
        return self._untaught(levels) or self._flat(levels)

    def _untaught(self, levels: Levels) -> Alarm | None:
        step, ceiling = levels.steps[-1], self.nothing_learned
        if ceiling is None or step < FIRST_NOTHING or levels.first[0] > 2 * BLOCK:
            return None
        now = levels.around(step)
        if now is None or self._learned_before(levels):
            return None
        if now > NOTHING * ceiling:
            return Alarm(UNLEARNED, 0, step, ceiling, now)
        low = now < UNTAUGHT * ceiling
        if now < STILL_HIGH * ceiling:
            return None
        earlier = step / (STILL if low else 2)
        before, least = levels.around(earlier), STILL_SHARE * now if low else UNTAUGHT_FALL
        if step < FIRST_UNTAUGHT or before is None or levels.error(earlier) > least or before - now > least:
            return None
        kind = STUCK if low else UNLEARNED
        return Alarm(kind, levels.since(before + least), step, ceiling - before if low else ceiling, now)

    def _learned_before(self, levels: Levels) -> bool:
        """Is another run's model trained further? Such a loss falls at first and is flat then, rightly."""
        step, loss = levels.first
        least = UNTAUGHT * self.nothing_learned if self.nothing_learned is not None else LEAST_INITIAL
        return step <= 2 * BLOCK and loss < least

    def _flat(self, levels: Levels) -> Alarm | None:
        step = levels.steps[-1]
        if step < FIRST_FLAT or self._learned_before(levels):
            return None
        for growth, least in GROWTHS:
            if step / growth**2 < levels.steps[0]:
                continue
            early, middle, now = (levels.around(step / growth**n) for n in (2, 1, 0))
            if early is None or middle is None or now is None or early - middle < least:
                continue
            # The last three levels are asked too: after a spike the mean still has it.
            last = statistics.fmean(levels.values[-3:])
            fell, fell_before = middle - min(now, last + levels.sigma), early - middle
            missed = MISSED_SHARE * fell_before - fell
            if fell <= FLAT_SHARE * fell_before and missed > MISSED_SIGMAS * levels.error(step / growth**2):
                began = levels.since(now + max(0.1 * fell_before, 2 * levels.sigma))
                return Alarm(STUCK, began, step, fell_before, now)
        return None


class Memorising:
    """The validation loss rises while the training loss falls (or is not known)."""

    def __init__(self, error: float = 0.0) -> None:
        """`error` is the standard error of one evaluation, where its tokens say it."""
        self._error = error
        self._steps: list[int] = []
        self._vals: list[float] = []
        self._trains: list[float] = []
        self._best = 0
        self._count = 0

    def add(self, step: int, train: float, val: float) -> Alarm | None:
        self._steps.append(step)
        self._vals.append(val)
        self._trains.append(train)
        last = len(self._vals) - 1
        if val <= self._vals[self._best]:
            self._best, self._count = last, 0
            return None
        rise = val - self._vals[self._best]
        learned = self._trains[self._best] - train
        # Of few values the bend of the curve would be taken for noise.
        seen = noise_of(self._vals[-24:]) if len(self._vals) >= FEWEST_FOR_NOISE else 0.0
        noise = max(self._error, seen)
        # Where training does not fall either, it is another trouble, or harder text.
        if rise <= max(TURN, TURN_SIGMAS * noise) or learned <= 0:
            self._count = 0
            return None
        self._count += 1
        if self._count < TURNED:
            return None
        return Alarm(MEMORISING, self._steps[self._best], step, self._vals[self._best], val)


def noise_of(values: Sequence[float]) -> float:
    """Standard deviation of the values about a smooth curve, from their second differences; 0 of fewer than
    5."""
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    finite = [bend for bend in bends if math.isfinite(bend)]
    return SIGMA_PER_MAD * statistics.median(finite) / math.sqrt(6) if len(finite) >= 3 else 0.0


def block_size(steps: Sequence[float]) -> int:
    """How many logged points make a level: fewer where not every step is logged, more of a very long log."""
    if len(steps) < 3:
        return FEWEST_POINTS
    spacing = statistics.median(b - a for a, b in pairwise(steps[:400]))
    size = min(BLOCK, max(FEWEST_POINTS, round(BLOCK / spacing))) if spacing > 0 else BLOCK
    return size * -(-len(steps) // (size * MOST_LEVELS))


class Watch:
    """All detectors of a loss by step; `found` has the first alarm of each kind."""

    def __init__(self, vocabulary: int | None = None, size: int = BLOCK) -> None:
        self.levels = Levels(size)
        self.found: dict[str, Alarm] = {}
        self._diverging, self._stuck = Diverging(), Stuck(vocabulary)

    def add(self, step: int, loss: float) -> None:
        if math.isfinite(loss):
            if self.levels.add(step, loss):
                self._ask()
            return
        before = self.levels.values[-1] if self.levels.values else 0.0
        self.found.setdefault(NOT_A_NUMBER, Alarm(NOT_A_NUMBER, step, step, before, loss))

    def add_all(self, steps: Sequence[float], losses: Sequence[float]) -> None:
        """A whole log, a level at a time."""
        size = self.levels.size
        for at in range(0, len(losses), size):
            block_steps, block = steps[at : at + size], losses[at : at + size]
            if math.isfinite(sum(block)):
                if self.levels.add_block(block_steps, block):
                    self._ask()
                continue
            for step, loss in zip(block_steps, block, strict=True):
                self.add(int(step), loss)

    def _ask(self) -> None:
        alarm = self._diverging.add(self.levels)
        # A run that rises or has diverged does not fall either, which is no news.
        if alarm is None and not self._diverging.rising and DIVERGING not in self.found:
            alarm = self._stuck.add(self.levels)
        if alarm is not None:
            self.found.setdefault(alarm.kind, alarm)


def watch_losses(
    steps: Sequence[float], losses: Sequence[float], vocabulary: int | None = None, size: int = BLOCK
) -> tuple[list[Alarm], Levels]:
    """The first alarm of each kind that a whole log raises, and its levels."""
    watch = Watch(vocabulary, size)
    watch.add_all(steps, losses)
    return list(watch.found.values()), watch.levels


def _initial(loss: float) -> float | None:
    """ln(vocabulary) of a loss that a model starts with; None for a model that has learned already."""
    return next((ln for ln in map(math.log, COMMON_VOCABULARIES) if abs(loss - ln) < 0.05 * ln), None)
