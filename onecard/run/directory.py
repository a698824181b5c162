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

from onecard.config.files import CHECKPOINT, COMMAND_LINE, Assignment, Value
from onecard.config.knobs import from_values, knobs, load_config, sound
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.files import AlreadyLockedError, exclusive_lock, load_json, write_json
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

_DAMAGED = "the config is damaged"
_LAST_SAVED = "its newest checkpoint"
_NAMED = 6  # runs in a message
_TRIES, _TRY_EVERY = 5, 0.05  # for the folder's lock; seconds


class RunDirectory:
    def __init__(self, out_dir: str | Path) -> None:
        if not str(out_dir).strip() or "\0" in str(out_dir):
            raise UserError(
                f"{str(out_dir)!r} is no name of a folder", hint="name the run's folder: --out_dir=out"
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

    def runs_beside(self) -> str:
        """Other runs in the folder it is in, the nearest names first; empty where there is none."""
        runs = [str(path.parent) for path in self.path.parent.glob("*/checkpoints") if path.is_dir()]
        near = difflib.get_close_matches(str(self.path), runs, n=_NAMED, cutoff=0.0)
        more = f" and {len(runs) - len(near):,} more" if len(runs) > len(near) else ""
        return f"runs here: {', '.join(near)}{more}" if near else ""

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
            return "it was removed or renamed"
        except OSError as error:
            return str(error)
        same = os.path.samestat(there, os.fstat(self._claimed_by.fileno()))
        return "" if same else "another folder has taken its place"

    def renamed_to(self) -> RunDirectory | None:
        """Where the claimed folder is now, if the system tells (Linux does) and it was not removed."""
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
        if told := remains(self.checkpoints, self.events_path):
            raise UserError(
                f"{self.path} held a run, and none of its checkpoints is left",
                told,
                "bring the checkpoints back from a copy or a disk that is not mounted,\n"
                "or start over with --fresh (what is there is set aside)",
            )

    def _lock(self) -> BinaryIO:
        try:
            for _ in range(_TRIES - 1):  # whoever only asks whether somebody trains holds it for an instant
                with contextlib.suppress(AlreadyLockedError):
                    return exclusive_lock(self.lock_path)
                time.sleep(_TRY_EVERY)
            return exclusive_lock(self.lock_path)
        except AlreadyLockedError:
            hint = "wait for it, or choose another folder with --out_dir=FOLDER"
            if self.paused.exists():
                hint = f"it is paused, and goes on by: onecard train --out_dir={self.path} --resume-now"
            raise UserError(
                f"another process is training in {self.path}",
                "two runs in one folder would overwrite each other",
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
            f"the run folder {self.path} cannot be used", str(error), "choose another with --out_dir=FOLDER"
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
            if error.what == _DAMAGED:
                damage = UserError(f"{self.config_path} is damaged", error.why, "move it away to go on")
        else:
            damage = UserError(f"{self.config_path} is damaged", hint="move it away to go on")
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
            what = "is missing" if content is None else "is damaged or was changed"
            self.config_notes.append(
                f"{self.config_path} {what}: the values saved with step {step:,} are used"
            )
        return saved

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
                raise OSError("it is the folder this command runs in")
            path.rename(target)
            path.mkdir()  # a link to the folder must go on leading somewhere
        except OSError as error:
            raise UserError(
                f"the earlier run in {self.path} cannot be set aside",
                f"renaming it to {target.name} failed: {error}",
                "move it yourself, or choose another folder with --out_dir=FOLDER",
            ) from None
        return target if self.path.is_symlink() else self.path.with_name(target.name)


def load_run_config(arguments: Sequence[str], also_known: frozenset[str] = frozenset()) -> RunConfig:
    """A run's config from the command line; a run named by its folder alone brings its own values."""
    return load_config(RunConfig, arguments, also_known, earlier=_values_of_earlier_run)


def refuse_a_slip(config: RunConfig) -> None:
    """A folder and nothing else means the run in it. Where there is none, what would begin is nanoGPT's
    default model, which nobody asks for that way."""
    directory = RunDirectory(config.out_dir)
    if set(config.origins) != {"out_dir"} or directory.holds_run():
        return
    new = f"for a new one: onecard train CONFIG.py --out_dir={directory.path}"
    raise UserError(
        f"there is no run in {directory.path}",
        "a folder alone goes on with the run in it",
        "\n".join(filter(None, (directory.runs_beside(), new))),
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


def differences(before: RunConfig, now: RunConfig) -> list[tuple[str, Any, Any]]:
    """(knob, before, now) for every knob that makes `now` another experiment than `before`."""
    split = ("batch_size", "gradient_accumulation_steps")
    # To extend a run is to go on with it, further.
    extends = now.extend is not None and now.max_iters > before.max_iters
    longer = ("max_iters", "tokens", "lr_decay_iters", "extend", "extend_lr") if extends else ()
    found = [
        (f.name, getattr(before, f.name), getattr(now, f.name))
        for f in knobs(RunConfig)
        if f.metadata["changes_result"]
        and f.name not in (*split, *longer)
        and getattr(before, f.name) != getattr(now, f.name)
        # Set in neither, it followed from something else (tokens, a checkpoint's block size).
        and (_asked_for(before, f.name) or _asked_for(now, f.name))
    ]
    # 16 × 32 and 8 × 64 are the same step, split otherwise.
    if before.sequences_per_step != now.sequences_per_step:
        found += [(name, getattr(before, name), getattr(now, name)) for name in split]
    return found


def _asked_for(config: RunConfig, name: str) -> bool:
    """By a person; what a continued model brought along counts as set, but nobody asked for it."""
    return config.is_set(name) and config.origins[name] != CHECKPOINT


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
        raise UserError(_DAMAGED, str(error)[:200], "move it away to go on") from None


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
            f"{path} cannot be read", str(error), "the file is damaged; move it away to go on"
        ) from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = str(content.get("schema"))[:20] if isinstance(content, dict) else "missing"
        raise UserError(
            f"{path} was not written by this version of onecard",
            f"its schema is {found}, this version reads {SCHEMA}",
        )
    return content
