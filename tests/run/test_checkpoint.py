from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from onecard.errors import UserError
from onecard.run import checkpoint as module
from onecard.run import stored
from onecard.run.checkpoint import TrainingState, check_room, save_checkpoint
from onecard.run.stored import best_checkpoint, damage, list_checkpoints, newest_intact, quarantine


def save(folder: Path, step: int, val_loss: float | None = None) -> Path:
    model = {"w": torch.full((4, 3), float(step))}
    optimizer = {"exp_avg.w": torch.full((4, 3), step + 0.5), "step.w": torch.tensor(float(step))}
    return save_checkpoint(folder, step, TrainingState(model, optimizer, {}), {"val_loss": val_loss})


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    save(tmp_path, 7, val_loss=1.25)
    (found,) = list_checkpoints(tmp_path)
    assert found.step == 7
    assert found.val_loss == 1.25
    assert torch.equal(found.model_tensors()["w"], torch.full((4, 3), 7.0))
    assert found.optimizer_tensors()["step.w"].item() == 7.0
    assert damage(found) is None


def test_the_newest_two_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5), (5, None), (6, 2.6)):
        save(tmp_path, step, loss)
    assert [c.step for c in list_checkpoints(tmp_path)] == [2, 5, 6]
    best = best_checkpoint(list_checkpoints(tmp_path))
    assert best is not None
    assert best.step == 2


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3, 2.0)
    save(tmp_path, 3, 1.5)
    (found,) = list_checkpoints(tmp_path)
    assert found.val_loss == 1.5


@pytest.mark.parametrize("failing_call", range(1, 12))
def test_a_failure_at_any_write_leaves_the_earlier_checkpoints_and_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    """Every fsync, tensor file and rename on the way is made to fail once."""
    save(tmp_path, 1)
    calls = 0

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == failing_call:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(module, "write_tensors", counted(module.write_tensors))
    monkeypatch.setattr(Path, "rename", counted(Path.rename))
    with pytest.raises(UserError, match="step 2 could not be written") as failure:
        save(tmp_path, 2)
    assert "No space left" in failure.value.why
    monkeypatch.undo()
    kept = [c for c in list_checkpoints(tmp_path) if damage(c) is None]
    assert kept[0].step == 1
    # The very last fsync comes after the rename: then the new one is there as well, and whole.
    assert [c.step for c in kept[1:]] in ([], [2])
    assert not list(tmp_path.glob(".building*"))
    save(tmp_path, 2)
    assert [c.step for c in list_checkpoints(tmp_path)] == [1, 2]


def test_all_writes_are_covered_by_the_failure_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    real_fsync, real_save, real_rename = os.fsync, module.write_tensors, Path.rename

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", counted(real_fsync))
    monkeypatch.setattr(module, "write_tensors", counted(real_save))
    monkeypatch.setattr(Path, "rename", counted(real_rename))
    save(tmp_path, 1)
    assert calls == 11


def test_ctrl_c_while_writing_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 1000))
    with pytest.raises(UserError) as failure:
        save(tmp_path, 1)
    assert "are needed" in failure.value.why
    assert "earlier checkpoints are untouched" in failure.value.why


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("harm", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path, name: str, harm: str) -> None:
    save(tmp_path, 1)
    victim = save(tmp_path, 2) / name
    content = bytearray(victim.read_bytes())
    if harm == "truncate":
        victim.write_bytes(content[: len(content) // 2])
    elif harm == "flip":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    else:
        victim.unlink()
    chosen, _ = newest_intact(list_checkpoints(tmp_path))
    assert chosen.step == 1
    # To sample, the moments need not be whole.
    spared = name == "optimizer.safetensors"
    assert newest_intact(list_checkpoints(tmp_path), weights_only=True)[0].step == (2 if spared else 1)


def test_when_none_is_intact_the_reason_is_told(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="no checkpoint of this run is intact") as failure:
        newest_intact(list_checkpoints(tmp_path))
    assert "model.safetensors has 0 bytes" in failure.value.why


@pytest.mark.parametrize(
    "manifest", ['{"schema": 1}', '{"schema": 1, "files": []}', '{"schema": 1, "files": {}}', "[]"]
)
def test_a_manifest_that_says_nothing_verifies_nothing(tmp_path: Path, manifest: str) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").write_text(manifest)
    chosen, ((bad, why),) = newest_intact(list_checkpoints(tmp_path))
    assert (chosen.step, bad.step) == (1, 2)
    assert "manifest.json" in why


def test_what_was_just_saved_is_never_pruned(tmp_path: Path) -> None:
    """A run that had to go back behind damaged checkpoints saves a smaller step than theirs."""
    for step in (10, 30, 40):
        save(tmp_path, step)
    save(tmp_path, 13)
    assert 13 in [c.step for c in list_checkpoints(tmp_path)]


@pytest.mark.parametrize("passing", [True, False])
def test_what_cannot_be_read_just_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passing: bool
) -> None:
    """Too many open files say nothing about this one; a disk that fails does."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    plain = stored.file_sha256

    def read(path: Path) -> str:
        if "step-00000002" in str(path):
            raise OSError(errno.EMFILE if passing else errno.EIO, "no")
        return plain(path)

    monkeypatch.setattr(stored, "file_sha256", read)
    if passing:
        with pytest.raises(UserError, match="cannot be read now"):
            newest_intact(list_checkpoints(tmp_path))
    else:
        assert newest_intact(list_checkpoints(tmp_path))[0].step == 1


def test_a_state_that_cannot_be_read_just_now_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the best one, when old ones are dropped, nor the newest, when a run goes on."""
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.5], start=1):
        save(tmp_path, step, loss)
    plain, state = stored.read_bounded, tmp_path / "step-00000002" / "state.json"

    def read(path: Path, most: int) -> bytes:
        if path == state:
            raise OSError(errno.EMFILE, "Too many open files")
        return plain(path, most)

    monkeypatch.setattr(stored, "read_bounded", read)
    save(tmp_path, 5, 2.2)
    with pytest.raises(OSError, match="Too many"):
        list_checkpoints(tmp_path)
    monkeypatch.undo()
    assert 2 in [c.step for c in list_checkpoints(tmp_path)], "the best one is there"


def test_no_memory_for_a_write_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*arguments: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(module, "write_tensors", write)
    with pytest.raises(MemoryError):
        save(tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_out_of_the_way_no_longer_counts(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    quarantine(list_checkpoints(tmp_path)[-1])
    assert [c.step for c in list_checkpoints(tmp_path)] == [1]
    assert (tmp_path / "damaged-step-00000002" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
@pytest.mark.parametrize("harm", ["missing", "folder", "link", "fifo"])
def test_whatever_takes_the_place_of_a_file_makes_a_checkpoint_damaged(
    tmp_path: Path, name: str, harm: str
) -> None:
    save(tmp_path, 1)
    victim = save(tmp_path, 2) / name
    victim.rename(tmp_path / "elsewhere")
    if harm == "folder":
        victim.mkdir()
    elif harm == "link":
        victim.symlink_to(tmp_path / "elsewhere")
    elif harm == "fifo":
        os.mkfifo(victim)
    assert [c.step for c in list_checkpoints(tmp_path)] == [1, 2]
    chosen, ((bad, why),) = newest_intact(list_checkpoints(tmp_path))
    assert (chosen.step, bad.step) == (1, 2)
    assert why == f"{name} is {'missing' if harm == 'missing' else 'not an ordinary file'}"


@pytest.mark.parametrize("kind", ["file", "fifo", "link"])
def test_what_is_no_folder_is_a_damaged_checkpoint(tmp_path: Path, kind: str) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-00000002"
    if kind == "file":
        path.write_text("x")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    chosen, ((bad, why),) = newest_intact(list_checkpoints(tmp_path))
    assert (chosen.step, bad.step, why) == (1, 2, "it is not a folder")
    assert quarantine(bad).name == "damaged-step-00000002"
    assert [c.step for c in list_checkpoints(tmp_path)] == [1]


def test_a_folder_of_another_name_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "step-notanumber").mkdir()
    (tmp_path / "step-12").mkdir()
    assert list_checkpoints(tmp_path) == []
    assert list_checkpoints(tmp_path / "missing") == []


def test_a_checkpoint_under_another_steps_name_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / "step-00000007")
    chosen, ((_, why),) = newest_intact(list_checkpoints(tmp_path))
    assert (chosen.step, why) == (1, "state.json is of step 2: the folder was renamed")


def test_of_damaged_checkpoints_only_the_last_one_is_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
        quarantine(list_checkpoints(tmp_path)[-1])
    assert [path.name for path in tmp_path.iterdir()] == ["damaged-step-00000003"]


@pytest.mark.parametrize(
    ("there", "saves", "at_once"), [(0, 1, 1), (0, 3, 3), (0, 9, 4), (2, 1, 3), (3, 9, 4), (3, 0, 0)]
)
def test_the_room_for_checkpoints_is_that_of_all_there_are_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int, saves: int, at_once: int
) -> None:
    for step in range(1, there + 1):
        save(tmp_path, step, val_loss=float(step))
    usage = namedtuple("usage", "total used free")
    needed = max(0, at_once - there) * 10**9 + module._DISK_MARGIN
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 0, needed))
    check_room(tmp_path, 10**9, saves)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 0, needed - 1))
    if not saves:
        check_room(tmp_path, 10**9, saves)
        return
    with pytest.raises(UserError, match="not enough room") as refused:
        check_room(tmp_path, 10**9, saves)
    assert f"{at_once} checkpoints of 1.000 GB" in refused.value.why


def test_what_a_kill_left_half_done_is_swept_away_by_the_next_save(tmp_path: Path) -> None:
    for name in (".building-step-00000009-123", ".removing-step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x")
    save(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_loss_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, float("nan")), (2, 3.0), (3, float("inf"))):
        save(tmp_path, step, loss)
    best = best_checkpoint(list_checkpoints(tmp_path))
    assert best is not None
    assert best.step == 2


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_kill_while_a_step_is_saved_again_leaves_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As `kill -9` does it: nothing is cleaned up."""
    save(tmp_path, 5, 3.0)

    class Killed(BaseException):
        pass

    plain_rename, plain_rmtree = Path.rename, shutil.rmtree
    dead = [False]

    def rename(path: Path, to: Path) -> Path:
        aside = to.name.startswith(".replaced")
        if moment == ("before" if aside else "between"):
            dead[0] = True
            raise Killed
        return plain_rename(path, to)

    def rmtree(path: Path, **named: Any) -> None:
        if dead[0]:
            return
        if moment == "after" and path.name.startswith(".replaced") and path.exists():
            dead[0] = True
            (path / "manifest.json").unlink(missing_ok=True)  # begun
            raise Killed
        plain_rmtree(path, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        patched.setattr(shutil, "rmtree", rmtree)
        with pytest.raises(Killed):
            save(tmp_path, 5, 2.0)
    (found,) = list_checkpoints(tmp_path)
    assert found.step == 5 and found.val_loss == (2.0 if moment == "after" else 3.0)
    assert damage(found) is None
    save(tmp_path, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000006"]
