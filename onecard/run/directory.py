"""The run directory: the one folder that holds all a run leaves behind.

out_dir/
  config.json      every knob, and which of them the user set
  plan.json        what was predicted when it was last started: memory, speed, time
  metrics.jsonl    one object per logged step or evaluation
  events.jsonl     started, resumed, evaluated, saved, stopped ...
  log.txt          nanoGPT's lines
  job.json         what the job that runs now says to whoever asks it to pause (pause.py)
  .lock            held by the job that runs now
  checkpoints/     step-00000500/ ...
  samples/         step-00000500.txt ...
"""

from __future__ import annotations

import contextlib
import difflib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from onecard.config.files import COMMAND_LINE, Assignment, Value
from onecard.config.knobs import from_values, load_config, sound
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.files import AlreadyLockedError, exclusive_lock, load_json, write_json
from onecard.language import N_, _
from onecard.run.foreign import is_run, refuse_foreign_folder
from onecard.run.stored import (
    CHECKPOINT_NAME,
    PASSING,
    SCHEMA,
    STATE_NAME,
    Checkpoint,
    list_checkpoints,
    remains,
    seal,
)

_LAST_SAVED = N_("its newest checkpoint")
_NAMED = 6  # runs in a message
_HOLDS = ("checkpoints", "ckpt.pt")  # in the folder of a run of onecard's, or of nanoGPT's
_TRIES, _TRY_EVERY = 5, 0.05  # for the folder's lock; seconds


class DamagedConfigError(UserError):
    """The values of a saved config are not such as a config has."""


class RunDirectory:
    """The paths in a run's folder, its config, and the lock by which one process owns it."""

    def __init__(self, out_dir: str | Path) -> None:
        if not str(out_dir).strip() or "\0" in str(out_dir):
            raise UserError(
                _("{name} is no name of a folder").format(name=repr(str(out_dir))),
                hint=_("name the run's folder: --out_dir=out"),
            )
        # bash leaves the ~ of --out_dir=~/run as it is; nobody wants a folder of that name.
        self.path = Path(os.path.expanduser(out_dir))  # noqa: PTH111 - a Path forgets the ./ of ./~
        self.config_path = self.path / "config.json"
        self.plan_path = self.path / "plan.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.events_path = self.path / "events.jsonl"
        self.log_path = self.path / "log.txt"
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.nanogpt_checkpoint = self.path / "ckpt.pt"
        self.paused = self.path / "paused"  # there while a job rests (pause.py)
        self.lock_path = self.path / ".lock"
        self.config_notes: list[str] = []  # what reading the config has found
        self._claimed_by: BinaryIO | None = None  # the lock, while it is held

    def other_runs(self) -> str:
        """Names the runs next to it and in the working folder: one with nearly its name, then the newest."""
        folders = {folder.resolve(): folder for folder in (Path(), self.path.parent)}.values()
        found = [path for folder in folders for name in _HOLDS for path in folder.glob(f"*/{name}")]
        newest = sorted(found, key=_last_written, reverse=True)
        runs = list(dict.fromkeys(str(path.parent) for path in newest if path.parent != self.path))
        near = difflib.get_close_matches(str(self.path), runs, n=1, cutoff=0.75)
        runs.sort(key=lambda run: run not in near)
        if not runs:
            return ""
        names, more = ", ".join(runs[:_NAMED]), len(runs) - _NAMED
        if more > 0:
            return _("runs: {names} and {more:,} more").format(names=names, more=more)
        return _("runs: {names}").format(names=names)

    def holds_run(self) -> bool:
        return is_run(self.path)

    def has_checkpoint(self) -> bool:
        return self.nanogpt_checkpoint.exists() or any(self.checkpoints.glob("step-*"))

    def checkpoint_states(self) -> list[Path]:
        """What checkpoints say in JSON, the newest first; for whoever asks without torch (checkpoint.py)."""
        every = self.checkpoints.glob(f"step-*/{STATE_NAME}")
        found = [path for path in every if CHECKPOINT_NAME.fullmatch(path.parent.name)]
        return sorted(found, key=lambda path: (len(path.parent.name), path.parent.name), reverse=True)

    def newest_step(self) -> int:
        """Of the checkpoints; 0 where there is none."""
        states = self.checkpoint_states()
        return int(states[0].parent.name.removeprefix("step-")) if states else 0

    @contextmanager
    def claimed(self, *, fresh: bool) -> Iterator[Path | None]:
        """The folder, made if need be and ours alone until the end. Two runs in one would ruin both.

        `fresh` first sets the run that is there aside; where it went is what this yields.
        """
        aside = None
        refuse_foreign_folder(self.path)
        if fresh and self.holds_run():
            with self._lock():
                aside = self._set_aside()
        self._create()
        with self._lock() as self._claimed_by:
            yield aside

    def why_lost(self) -> str:
        """Why the folder that was claimed is no longer the one under its name; empty where it is."""
        assert self._claimed_by is not None, "only of a claimed folder"
        try:
            there = self.lock_path.stat()
        except FileNotFoundError:
            return _("it was removed or renamed")
        except OSError as error:
            return str(error)
        same = os.path.samestat(there, os.fstat(self._claimed_by.fileno()))
        return "" if same else _("another folder has taken its place")

    def renamed_to(self) -> RunDirectory | None:
        """Where the claimed folder is now, if the system knows (Linux does) and it was not removed."""
        assert self._claimed_by is not None, "only of a claimed folder"
        with contextlib.suppress(OSError):
            lock = Path(f"/proc/self/fd/{self._claimed_by.fileno()}").readlink()
            if os.path.samestat(lock.stat(), os.fstat(self._claimed_by.fileno())):
                found = RunDirectory(lock.parent)
                found._claimed_by = self._claimed_by
                return found
        return None

    def refuse_lost_checkpoints(self) -> None:
        """Where a run once had checkpoints and none is left, nothing begins at step 0 by itself."""
        if lost := remains(self.checkpoints, self.events_path):
            raise UserError(
                _("{path} held a run, and none of its checkpoints is left").format(path=self.path),
                lost,
                _(
                    "bring the checkpoints back from a copy or a disk that is not mounted,\n"
                    "or start over with --fresh (what is there is set aside)"
                ),
            )

    def _lock(self) -> BinaryIO:
        try:
            for _attempt in range(
                _TRIES - 1
            ):  # whoever only asks whether somebody trains holds it for an instant
                with contextlib.suppress(AlreadyLockedError):
                    return exclusive_lock(self.lock_path)
                time.sleep(_TRY_EVERY)
            return exclusive_lock(self.lock_path)
        except AlreadyLockedError:
            hint = _("wait for it, or choose another folder with --out_dir=FOLDER")
            if self.paused.exists():
                command = f"onecard train --out_dir={self.path} --resume-now"
                hint = _("it is paused; to go on: {command}").format(command=command)
            raise UserError(
                _("another process is training in {path}").format(path=self.path),
                _("two runs in one folder would overwrite each other"),
                hint,
            ) from None
        except OSError as error:
            raise self._unusable(error) from None

    def _create(self) -> None:
        try:
            self.samples.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: OSError) -> UserError:
        return UserError(
            _("the run folder {path} cannot be used").format(path=self.path),
            str(error),
            _("choose another with --out_dir=FOLDER"),
        )

    def write_config(self, config: RunConfig) -> None:
        content = {"values": config.values(), "set_by_user": dict(config.origins)}
        self._write(self.config_path, {**content, "seal": seal(content)})

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        self._write(self.plan_path, plan)

    def _write(self, path: Path, content: Mapping[str, Any]) -> None:
        try:
            write_json(path, {"schema": SCHEMA, **content})
        except OSError as error:
            raise self._unusable(error) from None

    def read_config(self) -> RunConfig | None:
        """The config the run was last started with, or None if there is none.

        config.json says by its seal whether it is as it was written. One that is not, or has none (it is
        older), holds what it says only where a checkpoint says the same: else the checkpoint's is taken.
        """
        self.config_notes = []
        try:
            content = read_json(self.config_path)
            found = None if content is None else _config_in(content)
        except UserError as error:
            content, found, damage = {}, None, error
            if isinstance(error, DamagedConfigError):
                damage = self._damaged_config(error.why)
        else:
            damage = self._damaged_config()
        if found is not None and content.get("seal") == seal(_sealed(content)):
            return found
        without_seal = found is not None and "seal" not in content
        step, saved = self._config_of_checkpoint()
        if saved is None:
            if content is None or without_seal:
                return found
            raise damage
        same = found is not None and found.values() == saved.values()
        if without_seal and same:
            return found
        if not same:
            missing = _("{path} is missing: the values saved with step {step:,} are used").format(
                path=self.config_path, step=step
            )
            changed = _(
                "{path} is damaged or was changed: the values saved with step {step:,} are used"
            ).format(path=self.config_path, step=step)
            self.config_notes.append(missing if content is None else changed)
        return saved

    def _damaged_config(self, why: str = "") -> UserError:
        return UserError(
            _("{path} is damaged").format(path=self.config_path),
            why,
            _("move it away to go on"),
        )

    def _config_of_checkpoint(self) -> tuple[int, RunConfig | None]:
        """Of the newest checkpoint whose state is as it was written, and its step."""
        for checkpoint in reversed(list_checkpoints(self.checkpoints)):
            with contextlib.suppress(UserError, KeyError, TypeError, AttributeError, ValueError):
                return checkpoint.step, config_of(checkpoint)
        return 0, None

    def _set_aside(self) -> Path:
        """Rename the folder, so that a fresh run takes its place and nothing is lost."""
        path = self.path.resolve()
        number = 1
        while (target := path.with_name(f"{path.name}.before-{number}")).exists():
            number += 1
        try:
            if Path.cwd().is_relative_to(path):
                raise OSError(_("it is the folder this command runs in"))
            path.rename(target)
            path.mkdir()  # a link to the folder must go on leading somewhere
        except OSError as error:
            raise UserError(
                _("the earlier run in {path} cannot be set aside").format(path=self.path),
                _("renaming it to {name} failed: {error}").format(name=target.name, error=error),
                _("move it yourself, or choose another folder with --out_dir=FOLDER"),
            ) from None
        return target if self.path.is_symlink() else self.path.with_name(target.name)


def _last_written(path: Path) -> float:
    """When a run's checkpoints last changed; 0 where that cannot be read."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def load_run_config(arguments: Sequence[str], also_known: frozenset[str] = frozenset()) -> RunConfig:
    """A run's config from the command line; a run named by its folder alone brings its own values."""
    return load_config(RunConfig, arguments, also_known, earlier=_values_of_earlier_run)


def refuse_a_slip(config: RunConfig) -> None:
    """A folder and nothing else means the run in it. Where there is none, what would begin is nanoGPT's
    default model, which nobody asks for that way."""
    directory = RunDirectory(config.out_dir)
    if set(config.origins) != {"out_dir"} or directory.holds_run():
        return
    command = f"onecard train CONFIG.py --out_dir={directory.path}"
    new = _("for a new one: {command}").format(command=command)
    raise UserError(
        _("there is no run in {path}").format(path=directory.path),
        _("a folder alone goes on with the run in it"),
        "\n".join(filter(None, (directory.other_runs(), new))),
    )


def _values_of_earlier_run(values: Mapping[str, Value], origins: Mapping[str, str]) -> list[Assignment]:
    """What the user had set for the run in out_dir and has not set now.

    With a config file the file decides, unset values included: a line removed from it is a change.
    """
    from_a_file = any(origin != COMMAND_LINE for origin in origins.values())
    if from_a_file or values.get("fresh") or values.get("init_from", "auto") not in ("auto", "resume"):
        return []
    directory = RunDirectory(str(values.get("out_dir", "out")))
    before = directory.read_config() if directory.holds_run() else None
    if before is None:
        return []
    replaced = set(values) | {"out_dir", "init_from", "fresh", "eval_only"}
    # How the rate goes on was said for one extension, and is asked anew for the next.
    if "extend" in values or _is_longer(values, before) or not directory.has_checkpoint():
        replaced |= {"extend", "extend_lr"}
    if not directory.has_checkpoint():
        # It was stopped before there was anything to continue: the same again, or something new, no mixture.
        if set(values) - {"out_dir"}:
            return []
        replaced -= {"init_from"}
    # Both say when the run ends; the one given now wins.
    replaced |= {"tokens"} if "max_iters" in values else {"max_iters"} if "tokens" in values else set()
    return [
        Assignment(name, getattr(before, name), origin)
        for name, origin in before.origins.items()
        if name not in replaced
    ]


def _is_longer(values: Mapping[str, Value], before: RunConfig) -> bool:
    """Do the values given now say a later end?"""
    tokens, steps = values.get("tokens"), values.get("max_iters")
    if isinstance(tokens, int):
        steps = -(-tokens // before.tokens_per_step)
    return isinstance(steps, int) and steps > before.max_iters


def config_of(checkpoint: Checkpoint) -> RunConfig:
    """The config that a checkpoint's state keeps; what the person had set is guessed for older ones."""
    values, usual = checkpoint.state["config"], RunConfig()
    changed = {name for name, value in values.items() if value != getattr(usual, name, value)}
    changed -= {"max_iters"} if values.get("tokens") else set()  # one follows from the other
    origins = checkpoint.state.get("set_by_user", dict.fromkeys(changed, _LAST_SAVED))
    return _config_in({"values": values, "set_by_user": origins})


def _config_in(content: dict[str, Any]) -> RunConfig:
    try:
        return sound(from_values(RunConfig, content["values"], content["set_by_user"]))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DamagedConfigError(
            _("the config is damaged"), str(error)[:200], _("move it away to go on")
        ) from None


def _sealed(content: dict[str, Any]) -> dict[str, Any]:
    return {name: content.get(name) for name in ("values", "set_by_user")}


def read_json(path: Path) -> Any:
    """The content, or None if there is no such file; UserError if it is damaged. What has nothing to do with
    the file stays an OSError."""
    try:
        content = load_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in PASSING:
            raise
        raise UserError(
            _("{path} cannot be read").format(path=path),
            str(error),
            _("the file is damaged; move it away to go on"),
        ) from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = str(content.get("schema"))[:20] if isinstance(content, dict) and "schema" in content else "-"
        raise UserError(
            _("{path} was not written by this version of onecard").format(path=path),
            _("its schema is {found}, this version reads {schema}").format(found=found, schema=SCHEMA),
        )
    return content
