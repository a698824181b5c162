"""What a person sees while a run trains: a live block on a terminal, plain lines elsewhere. On stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol

from onecard import terminal
from onecard.language import _
from onecard.run.metrics import evaluation_line, iteration_line
from onecard.train.pace import duration


@dataclass
class Status:
    """The figures of the moment; the loop updates them, a display shows them."""

    step: int = 0
    last_step: int = 0
    loss: float | None = None
    val_loss: float | None = None
    val_bpb: float | None = None
    learning_rate: float = 0.0
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_gib: float | None = None
    predicted_gib: float | None = None  # of it
    free_gib: float | None = None
    seconds_left: float | None = None

    def figures(self) -> str:
        """Only what is known: a figure not measured yet is not shown as 0."""
        parts = [
            _("loss {n:.4f}").format(n=self.loss) if self.loss is not None else "",
            _("val {n:.4f}").format(n=self.val_loss) if self.val_loss is not None else "",
            _("lr {n:.2e}").format(n=self.learning_rate),
            _("{n:,.0f} tok/s").format(n=self.tokens_per_second) if self.tokens_per_second else "",
            _("mfu {n:.1%}").format(n=self.mfu) if self.mfu is not None else "",
            self.memory(),
        ]
        return "  ".join(p for p in parts if p)

    def memory(self) -> str:
        if self.memory_gib is None:
            return ""
        text = _("mem {n:.2f} GiB").format(n=self.memory_gib)
        if self.predicted_gib is not None:
            text += _(" ({n:.2f} predicted)").format(n=self.predicted_gib)
        if self.free_gib is not None:
            text += _(", {n:.2f} free").format(n=self.free_gib)
        return text

    def evaluation(self, train_loss: float) -> str:
        """nanoGPT's line, and bits per byte where they are known."""
        assert self.val_loss is not None
        line = evaluation_line(self.step, train_loss, self.val_loss)
        return line if self.val_bpb is None else f"{line}, val bpb {self.val_bpb:.4f}"

    def eta(self) -> str:
        return "eta " + duration(self.seconds_left) if self.seconds_left is not None else "eta ..."


class Display(Protocol):
    """How the loop speaks to the person. `inside` is progress within one long thing, `doing` one without."""

    watched: bool  # is there a person, to whom an old figure is a wrong one?

    def say(self, text: str, style: str = "") -> None: ...
    def logged(self, status: Status, step: int, seconds: float) -> None: ...
    def evaluated(self, status: Status, train_loss: float) -> None: ...
    def inside(self, what: str, done: int, total: int) -> None: ...
    def doing(self, what: str) -> None: ...
    def __enter__(self) -> Display: ...
    def __exit__(self, *error: object) -> None: ...


def open_display(status: Status) -> Display:
    if sys.stderr.isatty():
        return TerminalDisplay(status)
    return PlainDisplay()


class PlainDisplay:
    """One line per fact, nanoGPT's format first, for files and pipes."""

    watched = False
    # A step of a minute should not look dead in a log file; a line now and then shows life.
    INSIDE_SECONDS = 30.0

    def __init__(self) -> None:
        self._last_line = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        self._last_line = time.monotonic()
        # `train 2>&1 | head`: nobody reads any more, and the run goes on; log.txt has it all.
        with contextlib.suppress(OSError, ValueError):
            terminal.say(text)

    def logged(self, status: Status, step: int, seconds: float) -> None:
        assert status.loss is not None
        line = iteration_line(step, status.loss, seconds, status.mfu)
        speed = f", {status.tokens_per_second:,.0f} tok/s" if status.tokens_per_second else ""
        self.say(f"{line}{speed}, lr {status.learning_rate:.2e}, {status.eta()}")

    def evaluated(self, status: Status, train_loss: float) -> None:
        self.say(status.evaluation(train_loss))

    def inside(self, what: str, done: int, total: int) -> None:
        if time.monotonic() - self._last_line > self.INSIDE_SECONDS:
            self.say(f"  {what} {done}/{total}")

    def doing(self, what: str) -> None:
        pass  # it has been said

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class TerminalDisplay:
    """A bar with steps and ETA, under it the figures; messages scroll above."""

    watched = True
    # Redrawn at most this often: a small model makes hundreds of steps a second.
    REDRAW_SECONDS = 0.1

    def __init__(self, status: Status) -> None:
        from rich.live import Live

        self._status = status
        self._console = terminal.console(sys.stderr, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._inside = ""
        self._last_drawn = 0.0

    def say(self, text: str, style: str = "") -> None:
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone must not end the run
            self._console.print(text, style=style or None, markup=False)

    def logged(self, status: Status, step: int, seconds: float) -> None:
        self._inside = ""
        self._draw()

    def evaluated(self, status: Status, train_loss: float) -> None:
        self._inside = ""
        self.say(status.evaluation(train_loss), "bold")

    def inside(self, what: str, done: int, total: int) -> None:
        self._inside = "" if done >= total else f"{what} {done}/{total}"
        self._draw()

    def doing(self, what: str) -> None:
        """At once: it may stay for hours."""
        self._inside = what
        self._draw(at_once=True)

    def _draw(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if now - self._last_drawn < self.REDRAW_SECONDS and not at_once:
            return
        self._last_drawn = now
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        status = self._status
        top = Table.grid(expand=True, padding=(0, 1))
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(no_wrap=True, justify="right")
        steps = _("step {n:,}/{last:,}").format(n=status.step, last=status.last_step)
        bar = ProgressBar(total=max(status.last_step, 1), completed=status.step)
        top.add_row(Text(steps), bar, Text(status.eta()))
        # rich draws the bar in ASCII where the terminal's encoding has no more; its ellipsis it does not.
        overflow: Any = "ellipsis" if self._console.encoding.startswith("utf") else "crop"
        figures = Text(status.figures(), no_wrap=True, overflow=overflow)
        rows: list[Any] = [top, figures]
        if self._inside:
            rows.append(Text(self._inside, style="dim"))
        with contextlib.suppress(OSError, ValueError):
            self._live.update(Group(*rows), refresh=True)

    def __enter__(self) -> TerminalDisplay:
        with contextlib.suppress(OSError, ValueError):
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._live.stop()
