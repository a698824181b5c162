"""How far a long job is, on stderr: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from onecard.language import _
from onecard.terminal import console, say

_LINE_EVERY_S = 10.0
_BAR_EVERY_S = 0.1


class Progress:
    """Counts bytes read, tokens and documents; silent when not `shown`."""

    def __init__(
        self,
        title: str,
        total_bytes: int,
        shown: bool,
        total_tokens: int | None = None,
        began: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """`began`: bytes, tokens and documents that were there before; speeds do not count them."""
        self._title = title
        self._total = max(1, total_bytes)
        self._total_tokens = total_tokens
        self._before = began
        self._bar: Any = None
        self._task: Any = None
        self._shown = shown
        self._began = time.monotonic()
        # The first plain line comes only if the job turns out to be long.
        self._shown_at = self._began

    def __enter__(self) -> Progress:
        if self._shown and sys.stderr.isatty():
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress
            from rich.table import Column

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=12, table_column=Column(min_width=12)),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(compact=True, table_column=Column(min_width=5, no_wrap=True)),
                # Last and flexible: a narrow terminal cuts off its end, not the time that is left.
                TextColumn(
                    "{task.fields[counts]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
                ),
                expand=True,
                console=console(sys.stderr),
                transient=True,
            )
            self._task = self._bar.add_task(self._title, total=self._total, counts="")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, read: int, tokens: int, documents: int, status: str = "") -> None:
        now = time.monotonic()
        if not self._shown or now - self._shown_at < (_LINE_EVERY_S if self._bar is None else _BAR_EVERY_S):
            return
        self._shown_at = now
        seconds = max(1e-9, now - self._began)
        speed = (read - self._before[0]) / seconds
        counts = _("{n:.1f} MB/s").format(n=speed / 1e6)
        if tokens or documents:
            more = _("{rate} tok/s, {tokens} tokens, {documents:,} documents")
            rate = short((tokens - self._before[1]) / seconds)
            counts += ", " + more.format(rate=rate, tokens=short(tokens), documents=documents)
        counts = "; ".join(filter(None, [counts, status]))
        share, begun = self._share(read, tokens), self._share(*self._before[:2])
        if self._bar is not None:
            self._bar.update(self._task, completed=int(share * self._total), counts=counts)
            return
        left = (1 - share) * seconds / max(1e-9, share - begun)
        line = _("{title}: {read:,.0f} of {total:,.0f} MB ({share:.0%}), {counts}, {time} left")
        say(
            line.format(
                title=self._title, read=read / 1e6, total=self._total / 1e6, share=share, counts=counts,
                time=duration(left),
            )
        )  # fmt: skip

    def _share(self, read: int, tokens: int) -> float:
        """Whichever comes first ends the work: all bytes, or the tokens wanted."""
        of_tokens = tokens / self._total_tokens if self._total_tokens else 0.0
        return min(1.0, max(read / self._total, of_tokens))


def short(number: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
