"""The log in Weights & Biases, when asked for and installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from onecard.config.run import RunConfig
from onecard.errors import install_command
from onecard.language import _


class Tracker(Protocol):
    def log(self, step: int, values: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class NoTracker:
    def log(self, step: int, values: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class WandbTracker:
    """What it raises is reported once: a full disk of its own, a server that is gone."""

    def __init__(self, wandb: Any, config: RunConfig, say: Callable[[str], None]) -> None:
        self._say, self._reported = say, False
        self._run = wandb.init(
            project=config.wandb_project, name=config.wandb_run_name, config=config.values()
        )

    def log(self, step: int, values: dict[str, Any]) -> None:
        self._safely(self._run.log, {"iter": step, **{k: v for k, v in values.items() if v is not None}})

    def close(self) -> None:
        self._safely(self._run.finish)

    def _safely(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            if not self._reported:
                note = _("wandb failed ({error}); training goes on").format(error=error)
                self._say(_("note: {text}").format(text=note))
            self._reported = True


def open_tracker(config: RunConfig, say: Callable[[str], None]) -> Tracker:
    """A run must not depend on a logging service: without the package there is one hint and no log."""
    if not config.wandb_log:
        return NoTracker()
    try:
        import wandb
    except ImportError:
        hint = _("hint: wandb_log=True needs wandb; training goes on without it: {command}")
        say(hint.format(command=install_command("wandb")))
        return NoTracker()
    try:
        return WandbTracker(wandb, config, say)
    except Exception as error:  # not logged in, offline, an old server: theirs to name, and no reason to stop
        note = _("wandb did not start ({error}); training goes on without it").format(error=error)
        say(_("note: {text}").format(text=note))
        return NoTracker()
