"""How fast the run goes and when it will end. Steps that include compilation do not count."""

from __future__ import annotations

import statistics
from collections import deque

# The first steps of a process compile kernels, tune matmuls and fault memory in.
SETTLING_STEPS = 3
# Log lines the estimate looks back on.
RECENT = 9
# Two in a row that differ from those before by so much are another pace: a machine that has more to do now.
_ANOTHER_PACE = 1.5


class Pace:
    """Recent step times, evaluation times, and the remaining time they imply."""

    def __init__(self, *, tokens_per_step: int, eval_interval: int, last_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.eval_interval = eval_interval
        self.last_step = last_step
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._settling: list[float] = []
        self._steps = 0
        self._evaluation_seconds: float | None = None

    def steps_took(self, seconds: float, steps: int = 1) -> None:
        """`steps` steps, evaluations and checkpoints not counted, took `seconds` together."""
        # Without the first steps in it, even a long stretch between two log lines is a measurement.
        settled = self._steps >= SETTLING_STEPS
        self._steps += steps
        if not settled:
            self._settling.append(seconds / steps)
        else:
            self._recent.append(seconds / steps)
            self._notice_another_pace()

    def _notice_another_pace(self) -> None:
        if len(self._recent) < 4:
            return
        *earlier, last, now = self._recent
        usual = statistics.median(earlier)
        if min(last, now) > _ANOTHER_PACE * usual or max(last, now) < usual / _ANOTHER_PACE:
            self._recent = deque((last, now), maxlen=RECENT)

    def changed(self) -> None:
        """Steps are carried out in another way from now on: what was measured before is not its speed."""
        self._recent.clear()
        self._settling.clear()
        self._steps = 0

    def evaluation_took(self, seconds: float) -> None:
        self._evaluation_seconds = seconds

    @property
    def step_seconds(self) -> float | None:
        """Median of recent steps; while still settling, the fastest so far is the best guess."""
        if self._recent:
            return statistics.median(self._recent)
        return min(self._settling) if self._settling else None

    @property
    def measured(self) -> float | None:
        """Tokens per second of steps that have settled; None until there are some."""
        return self.tokens_per_step / statistics.median(self._recent) if self._recent else None

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens_per_step / self.step_seconds if self.step_seconds else None

    def seconds_left(self, step: int) -> float | None:
        """Remaining steps and the evaluations among them; None until it is more than a guess."""
        if self.step_seconds is None or (not self._recent and step + 1 < self.last_step):
            return None
        evaluations = self.last_step // self.eval_interval - step // self.eval_interval
        evaluations += self.last_step % self.eval_interval != 0  # the closing one
        return (self.last_step - step) * self.step_seconds + evaluations * (self._evaluation_seconds or 0.0)


def duration(seconds: float) -> str:
    """'3d04h', '2h05m', '4m07s', '12s': two units, which is as exact as an estimate gets."""
    whole = max(0, round(seconds))
    if whole >= 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    if whole >= 60:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole}s"
