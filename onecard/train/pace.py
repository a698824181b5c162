"""How fast the run goes and when it will end: plan's prediction first, then more and more what is measured.

Steps that include compilation do not count.
"""

from __future__ import annotations

import statistics
from collections import deque

# The first steps of a process compile kernels, tune matmuls and fault memory in.
SETTLING_STEPS = 3
# Log lines the estimate looks back on.
RECENT = 9
# Two in a row that differ from those before by so much are another pace: a machine that has more to do now.
_ANOTHER_PACE = 1.5
# So many measured steps count as much as the prediction.
_PREDICTION_STEPS = 8


class Pace:
    """Recent step times, evaluation times, and the remaining time they imply."""

    def __init__(
        self,
        *,
        tokens_per_step: int,
        eval_interval: int,
        last_step: int,
        predicted_seconds: float | None = None,
    ) -> None:
        """`predicted_seconds`: of a step, as plan has it; None where nothing is predicted, as on a CPU."""
        self.tokens_per_step = tokens_per_step
        self.eval_interval = eval_interval
        self.last_step = last_step
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._settling: list[float] = []
        self._steps = 0
        self._evaluation_seconds: float | None = None
        self._predicted = predicted_seconds

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

    def changed(self, predicted_seconds: float | None = None) -> None:
        """Another setting from now on: what was measured before is not its speed."""
        self._predicted = predicted_seconds
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

    def _expected_seconds(self, unlogged: tuple[int, float]) -> float | None:
        """Of a step to come: the prediction and the measured steps, weighed by how many there are."""
        steps, seconds = unlogged
        settled = max(self._steps - SETTLING_STEPS, 0)
        times = list(self._recent)
        if steps and settled:
            times.append(seconds / steps)
            settled += steps
        if self._predicted is None:
            return statistics.median(times) if times else None
        if not times:
            return self._predicted
        measured = settled * statistics.median(times)
        return (_PREDICTION_STEPS * self._predicted + measured) / (_PREDICTION_STEPS + settled)

    def seconds_left(self, step: int, unlogged: tuple[int, float] = (0, 0.0)) -> float | None:
        """Remaining steps and the evaluations among them; None until it is more than a guess.

        `unlogged`: steps since the last log line, and their seconds.
        """
        each = self._expected_seconds(unlogged)
        if each is None and step + 1 >= self.last_step:
            each = self.step_seconds
        if each is None:
            return None
        evaluations = self.last_step // self.eval_interval - step // self.eval_interval
        evaluations += self.last_step % self.eval_interval != 0  # the closing one
        return (self.last_step - step) * each + evaluations * (self._evaluation_seconds or 0.0)


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
