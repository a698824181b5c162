"""Ctrl-C saves, a second Ctrl-C quits."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

# Ctrl-C, a polite kill, and a terminal that is closed (Windows has no such signal).
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class StopRequest:
    """While active, the first of these signals asks the loop to stop; the second raises at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.requested

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup, or a job in the background: it was asked to go on
            try:
                self._before[number] = signal.signal(number, self._on_signal)
            except ValueError:
                # Signals belong to the main thread; elsewhere (a notebook, a test) there is none to catch.
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
