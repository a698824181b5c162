"""Ctrl-C saves, a second Ctrl-C quits. A polite kill and a closed terminal save, however often they come."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

# Ctrl-C, a polite kill, and a terminal that is closed (Windows has no such signal).
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


# Two signals so close together are one wish: a key held down, a terminal and a shell that both pass it on.
_ONE_WISH_SECONDS = 1.0


class StopRequest:
    """While active, these signals ask the loop to stop; a second Ctrl-C raises at once.

    Only that one: whoever closes a terminal sends a hang-up twice (the shell, then the kernel), and a system
    that is shut down a polite kill and a hang-up. What they ask for is the same, and it is being done.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first_at = 0.0
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
        now = time.monotonic()
        if not self.requested:
            self.requested, self._first_at = True, now
        elif number == signal.SIGINT and now - self._first_at >= _ONE_WISH_SECONDS:
            raise KeyboardInterrupt
