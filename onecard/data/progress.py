"""How far a long job is, on stderr: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_LINE_EVERY_S = 10.0
_BAR_EVERY_S = 0.1


class Progress:
    """Counts bytes read, tokens and documents; silent when not `shown`."""

    def __init__(self, title: str, total_bytes: int, shown: bool) -> None:
        self._title = title
        self._total = max(1, total_bytes)
        self._bar: Any = None
        self._task: Any = None
        self._shown = shown
        self._began = time.monotonic()
        # The first plain line comes only if the job turns out to be long.
        self._told = self._began

    def __enter__(self) -> Progress:
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[counts]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(self._title, total=self._total, counts="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, read: int, tokens: int, documents: int) -> None:
        now = time.monotonic()
        if not self._shown or now - self._told < (_LINE_EVERY_S if self._bar is None else _BAR_EVERY_S):
            return
        self._told = now
        seconds = max(1e-9, now - self._began)
        rates = f"{read / seconds / 1e6:.1f} MB/s, {_short(tokens / seconds)} tokens/s"
        counts = f"{rates}, {documents:,} documents"
        if self._bar is not None:
            self._bar.update(self._task, completed=read, counts=counts)
            return
        left = (self._total - read) / max(1.0, read / seconds)
        print(
            f"{self._title}: {read / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, {counts}, "
            f"{_duration(left)} left",
            file=sys.stderr,
            flush=True,
        )


def _short(number: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
