"""Nothing that was learned is lost in silence: full disks, folders that are gone, losses that rise."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import TINY, config, events, weights

from onecard.cli import main
from onecard.errors import UserError
from onecard.run import checkpoint as checkpoint_module
from onecard.run.checkpoint import SaveError
from onecard.run.directory import RunDirectory
from onecard.run.metrics import read_metrics
from onecard.run.stored import list_checkpoints
from onecard.train import interrupt, saving
from onecard.train import loop as loop_module
from onecard.train.evaluate import Evaluation
from onecard.train.journal import Journal
from onecard.train.loop import train

CHECKPOINTS = Path("out/checkpoints")


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, what: Callable[[], Any]) -> None:
    """Just before the log line of this step is written."""
    plain = Journal.stepped

    def stepped(journal: Journal, at: int, *rest: Any) -> None:
        if at == step:
            what()
        plain(journal, at, *rest)

    monkeypatch.setattr(Journal, "stepped", stepped)


def undisturbed(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    with monkeypatch.context():
        train(config("--out_dir=undisturbed"))
    return weights("undisturbed")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- the folder is gone -------------------------------------------------------------------------


def test_a_renamed_folder_is_noticed_at_the_next_log_line_and_saved_in(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 12, lambda: Path("out").rename("elsewhere"))
    with pytest.raises(UserError, match="the run folder out is lost: it was removed or renamed") as ended:
        train(config())
    assert ended.value.exit_code == 1
    assert f"onecard train --out_dir={Path('elsewhere').resolve()}" in ended.value.hint
    assert not Path("out").exists()
    assert [c.step for c in list_checkpoints(Path("elsewhere/checkpoints"))] == [10, 13]
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    train(config("--out_dir=elsewhere"))
    train(config("--out_dir=whole"))
    assert same(weights("elsewhere"), weights("whole"))


def test_a_removed_folder_ends_a_run_rather_than_let_it_train_for_nothing(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_step(monkeypatch, 12, lambda: shutil.rmtree("out"))
    with pytest.raises(UserError, match="is lost") as ended:
        train(config())
    assert "--fallback_dir" in ended.value.hint
    assert "step 13 could not be saved" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("how", ["removed", "renamed", "read-only", "dies at a save"])
def test_a_run_goes_on_in_its_other_folder_with_the_same_bits(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = undisturbed(monkeypatch)
    if how == "removed":
        at_step(monkeypatch, 12, lambda: shutil.rmtree("out"))
    elif how == "renamed":
        at_step(monkeypatch, 12, lambda: Path("out").rename("elsewhere"))
    elif how == "read-only":
        fails_from(monkeypatch, 12, errno.EROFS)
    else:
        real = checkpoint_module.write_tensors

        def write(path: Path, tensors: Any) -> Any:
            if "out/" in str(path) and "00000010" in str(path):
                raise OSError(errno.EIO, "Input/output error")
            return real(path, tensors)

        monkeypatch.setattr(checkpoint_module, "write_tensors", write)
    summary = train(config("--fallback_dir=second"))
    said = capsys.readouterr().err
    assert "the run folder out is lost" in said and "the run goes on in second" in said
    assert summary.values["saved_step"] == 20 and not summary.interrupted
    assert "second/checkpoints/step-00000020" in summary.text()
    assert same(weights("second"), whole)
    steps = [line["step"] for line in read_metrics(Path("second/metrics.jsonl")) if "loss" in line]
    assert steps == list(range(20)), "the curve came along, whole"
    assert len(events("moved", "second")) == 1
    # It is a run like any other.
    assert main(["train", "--out_dir=second"]) == 0
    assert "finished already" in capsys.readouterr().out
    with pytest.raises(UserError, match="holds a run"):
        train(config("--fallback_dir=second", "--out_dir=third"))


def fails_from(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """The disk of out/ takes nothing any more."""

    class Dead:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, content: bytes) -> int:
            raise OSError(number, os.strerror(number))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    def die() -> None:
        for lines in current[0].recorder._files:
            lines.file = Dead(lines.file)  # type: ignore[assignment]

    current: list[Journal] = []
    plain = Journal.__enter__

    def enter(journal: Journal) -> Journal:
        current.append(journal)
        return plain(journal)

    monkeypatch.setattr(Journal, "__enter__", enter)
    at_step(monkeypatch, step, die)


def test_without_another_folder_a_dead_disk_ends_the_run(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_from(monkeypatch, 12, errno.EIO)
    with pytest.raises(UserError, match=r"is lost: .*Input/output error"):
        train(config())


def test_a_full_disk_for_lines_is_no_dead_one(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_from(monkeypatch, 12, errno.ENOSPC)
    assert train(config("--fallback_dir=second")).values["step"] == 20
    assert not Path("second").exists()


@pytest.mark.parametrize(
    ("fallback", "reported"),
    [
        ("out/second", "in the run's own"),
        ("out", "in the run's own"),
        ("/", "the root"),
        ("x", "not a run's"),
    ],
)
def test_a_fallback_that_would_not_help_is_refused_at_the_start(
    workplace: Path, fallback: str, reported: str
) -> None:
    Path("x").mkdir()
    Path("x/thesis.doc").touch()
    with pytest.raises(UserError) as refused:
        train(config(f"--fallback_dir={fallback}"))
    assert reported in str(refused.value)
    assert not Path("out").exists()


# --- the disk is full ---------------------------------------------------------------------------


def full_for(
    monkeypatch: pytest.MonkeyPatch, times: int, steps: tuple[int, ...], number: int = errno.ENOSPC
) -> list[int]:
    """Saves of these steps find a full disk, so many times."""
    tried: list[int] = []
    real = saving.save_checkpoint

    def save(folder: Path, step: int, *rest: Any) -> Path:
        if step in steps and "out/" in f"{folder}/":
            tried.append(step)
            if len(tried) <= times:
                raise SaveError("could not be written", f"{os.strerror(number)}; 1 GB", "", number)
        return real(folder, step, *rest)

    monkeypatch.setattr(saving, "save_checkpoint", save)
    monkeypatch.setattr(saving, "_TRY_EVERY", 0.01)
    return tried


def test_the_last_save_waits_for_room(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = undisturbed(monkeypatch)
    tried = full_for(monkeypatch, 5, (20,))
    assert train(config()).values["saved_step"] == 20
    assert tried == [20] * 6
    assert same(weights(), whole)
    said = capsys.readouterr().err
    assert said.count("waiting for room in out") == 1 and "Ctrl-C ends without saving" in said


def test_a_signal_ends_the_wait_for_room(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_for(monkeypatch, 10**9, (15, 20))
    real = interrupt.StopRequest.wait

    def wait(stop: Any, seconds: float, since: int | None = None) -> bool:
        signal.raise_signal(signal.SIGTERM)
        return real(stop, seconds, since)

    monkeypatch.setattr(interrupt.StopRequest, "wait", wait)
    with pytest.raises(UserError, match="could not be written") as ended:
        train(config())
    assert "the checkpoint of step 10 is kept; 10 steps after it are lost" in ended.value.why


@pytest.mark.parametrize("how", ["removed", "renamed", "dead"])
@pytest.mark.parametrize("more", [[], ["--log_interval=1000"]])
def test_a_folder_that_is_gone_at_the_last_save_is_not_waited_for(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, how: str, more: list[str]
) -> None:
    """The polite kill of a shut-down comes before a log line has noticed it."""
    plain = loop_module.Training._step

    def step(training: Any, batches: Any) -> bool:
        taken = plain(training, batches)
        if training.position.step == 12:
            if how == "dead":
                full_for(monkeypatch, 10**9, (12,), errno.EIO)
            elif how == "removed":
                shutil.rmtree("out")
            else:
                Path("out").rename("elsewhere")
            signal.raise_signal(signal.SIGTERM)
        return taken

    monkeypatch.setattr(loop_module.Training, "_step", step)
    monkeypatch.setattr(interrupt.StopRequest, "wait", lambda *_, **__: pytest.fail("it waits"))
    with pytest.raises(UserError, match="the run folder out is lost") as ended:
        train(config(*more))
    assert ended.value.exit_code == 1
    if how == "renamed":
        assert list_checkpoints(Path("elsewhere/checkpoints"))[-1].step == 12


@pytest.mark.parametrize("more", [[], ["--log_interval=1000"]])
def test_nothing_is_saved_in_the_run_that_has_taken_the_folders_place(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    train(config("--out_dir=other"))
    theirs = sorted(path.name for path in Path("other/checkpoints").iterdir())

    def replace() -> None:
        shutil.rmtree("out")
        Path("other").rename("out")

    at_step(monkeypatch, 0, replace)
    with pytest.raises(UserError, match="another folder has taken its place"):
        train(config("--max_iters=100", *more))
    assert sorted(path.name for path in CHECKPOINTS.iterdir()) == theirs


def test_a_folder_that_is_gone_is_noticed_at_a_checkpoint_too(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 0, lambda: shutil.rmtree("out"))
    with pytest.raises(UserError, match="is lost"):
        train(config("--log_interval=1000"))


def test_a_full_disk_at_the_end_is_a_case_for_the_other_folder(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_for(monkeypatch, 10**9, (20,))
    assert train(config("--fallback_dir=second")).values["saved_step"] == 20
    assert [c.step for c in list_checkpoints(Path("second/checkpoints"))] == [20]


def test_room_for_all_checkpoints_is_asked_for_before_the_first_step(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config("--out_dir=measured", "--max_iters=5"))
    each = sum(f.stat().st_size for f in Path("measured/checkpoints/step-00000005").glob("*.safetensors"))
    usage = namedtuple("usage", "total used free")

    def free(n_bytes: float) -> None:
        found = usage(10**12, 0, int(n_bytes) + checkpoint_module._DISK_MARGIN)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: found)

    free(3.7 * each)
    with pytest.raises(UserError, match="out/checkpoints has not enough room") as refused:
        train(config())
    assert refused.value.exit_code == 1 and "up to 4 checkpoints of 0.000 GB" in refused.value.why
    assert not Path("out/metrics.jsonl").exists(), "nothing was trained"
    train(config("--out_dir=short", "--max_iters=10"))  # two saves need two places
    free(4.2 * each)
    train(config())
    free(0.7 * each)  # three are there, and the fourth has no place
    with pytest.raises(UserError, match="not enough room"):
        train(config("--max_iters=30", "--init_from=resume", "--learning_rate=1e-3"))


# --- what begins at step 0 ----------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["no manifest", "removed", "quarantined", "moved away"])
@pytest.mark.parametrize("init_from", ["auto", "resume", "scratch"])
def test_beside_what_is_left_of_a_run_nothing_begins_by_itself(
    workplace: Path, harm: str, init_from: str
) -> None:
    train(config())
    for path in [c.path for c in list_checkpoints(CHECKPOINTS)]:
        if harm == "no manifest":
            (path / "manifest.json").unlink()
        elif harm == "quarantined":
            path.rename(path.with_name(f"damaged-{path.name}"))
        else:
            shutil.rmtree(path)
    if harm == "quarantined":
        Path("out/events.jsonl").unlink()
    if harm == "moved away":
        CHECKPOINTS.rmdir()
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    with pytest.raises(UserError):
        train(config(f"--init_from={init_from}"))
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before
    train(config("--fresh"))
    assert Path("out.before-1/config.json").exists()


def test_a_run_killed_before_its_first_checkpoint_begins_again(workplace: Path) -> None:
    train(config())
    shutil.rmtree(CHECKPOINTS)
    Path("out/events.jsonl").write_text('{"schema": 1}\n{"event": "started", "step": 0}\n')
    train(config())
    assert [c.step for c in list_checkpoints(CHECKPOINTS)] == [10, 15, 20] or len(
        list_checkpoints(CHECKPOINTS)
    )
    lines = Path("out/metrics.jsonl").read_text().splitlines()[1:]
    steps = [json.loads(line)["step"] for line in lines if '"loss"' in line]
    assert steps == list(range(20)), "its lines are not there twice"


def test_damage_is_reported_and_quarantined_and_the_run_ends_the_same(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = undisturbed(monkeypatch)
    train(config("--max_iters=15", "--lr_decay_iters=40"))
    (CHECKPOINTS / "step-00000015/manifest.json").unlink()
    train(config("--init_from=resume"))
    said = capsys.readouterr().err
    assert "step-00000015 is damaged (manifest.json is missing): step 10 is used" in said
    assert "is quarantined: out/checkpoints/damaged-step-00000015" in said
    assert same(weights(), whole)


# --- other people's files, and other data -------------------------------------------------------


def test_a_hugging_face_folder_is_not_trained_into(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "gpt2"}')
    Path("model/model.safetensors").write_bytes(b"x")
    for more in ([], ["--fresh"]):
        assert main(["train", *TINY, "--out_dir=model", *more]) == 2
        assert "holds files that are not a run's" in capsys.readouterr().err
    assert sorted(path.name for path in Path("model").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("out_dir", ["", "/"])
def test_no_name_and_the_root_are_refused(
    workplace: Path, out_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *TINY, f"--out_dir={out_dir}"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_dataset_is_below_the_data_folder_or_plainly_a_path(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("data/tiny", "elsewhere/tiny")
    for name in ("x/../../elsewhere/tiny", "..", ".", ""):
        assert main(["train", *TINY, f"--dataset={name}"]) == 2
        assert "below data/" in capsys.readouterr().err
    for path in ("./elsewhere/tiny", f"{workplace}/elsewhere/tiny"):
        out = path.replace("/", "-").strip("-.")
        assert main(["train", *TINY, f"--dataset={path}", f"--out_dir={out}", "--max_iters=1"]) == 0
        assert f"training tokens in {Path(path)};" in capsys.readouterr().err


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("at", [0, 700, -1])
def test_one_other_token_anywhere_in_the_data_is_noticed(workplace: Path, split: str, at: int) -> None:
    train(config("--max_iters=10", "--lr_decay_iters=40"))
    path = Path(f"data/tiny/{split}.bin")
    tokens = np.fromfile(path, np.uint16)
    tokens[at] ^= 1
    tokens.tofile(path)
    with pytest.raises(UserError, match="data/tiny is not the data this run began with"):
        train(config("--init_from=resume"))


def test_data_that_turns_out_to_be_another_while_training_stops_it_unsaved(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Much of it is compared while training goes on."""
    train(config("--max_iters=10", "--lr_decay_iters=40"))
    tokens = np.fromfile("data/tiny/train.bin", np.uint16)
    tokens[-1] ^= 1
    tokens.tofile("data/tiny/train.bin")
    monkeypatch.setattr("onecard.data.identity._AT_ONCE", 0)
    with pytest.raises(UserError, match="not the data this run began with"):
        train(config("--init_from=resume"))
    assert [c.step for c in list_checkpoints(CHECKPOINTS)] == [5, 10]


# --- a loss that rises --------------------------------------------------------------------------


def scripted(monkeypatch: pytest.MonkeyPatch, train_losses: list[float], val_losses: list[float]) -> None:
    found = iter(zip(train_losses, val_losses, strict=True))
    monkeypatch.setattr(loop_module, "evaluate_both", lambda *_: Evaluation(*next(found), 0.1, 0.1))


def test_a_loss_that_jumped_and_stayed_is_no_success(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, [4.1, 3.1, 52.7, 52.0, 51.9], [4.1, 3.2, 53.0, 52.0, 52.0])
    assert main(["train", *TINY]) == 1
    out, err = capsys.readouterr()
    reported = "the loss on training text has risen: 3.100 at step 5, "
    assert f"note: {reported}52.700 now" in err
    assert out.startswith("ended badly at step 20 of 20") and f"{reported}51.900 now" in out
    # Said again by whoever asks again.
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    assert main(["train", *TINY]) == 1


def test_memorising_is_reported_and_is_no_failure(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, [4.1, 3.1, 2.5, 2.0, 1.5], [4.1, 3.2, 3.3, 3.5, 3.9])
    assert main(["train", *TINY]) == 0
    out = capsys.readouterr().out
    assert out.startswith("done at step 20")
    assert "the validation loss was 3.2000 at its best and is 3.9000 now" in out


def test_a_validation_loss_that_wavers_is_not_called_memorising(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, [4.1, 3.1, 3.2, 3.3, 3.25], [4.1, 3.2, 3.3, 3.2, 3.3])
    assert main(["train", *TINY]) == 0
    out = capsys.readouterr().out
    assert "the validation loss was 3.2000 at its best and is 3.3000 now\n" in out


@pytest.mark.parametrize("losses", [[4.1, 3.1, 3.4, 3.0, 3.05], [4.1, 0.05, 0.3, 0.2, 0.1]])
def test_noise_is_not_a_rise(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, losses, losses)
    assert main(["train", *TINY]) == 0
    assert "risen" not in "".join(capsys.readouterr())


# --- the curve ----------------------------------------------------------------------------------


def test_the_curve_is_on_the_disk_before_the_checkpoint_that_stands_for_it(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was flushed when a checkpoint appears holds every step before it."""
    on_disk: dict[str, bytes] = {}
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        with contextlib.suppress(OSError):
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if path.is_file():
                on_disk[path.name] = path.read_bytes()

    seen = []

    def rename(path: Path, target: Path) -> Path:
        if path.name.startswith(".building"):
            step = int(target.name.removeprefix("step-"))
            lines = [json.loads(line) for line in on_disk["metrics.jsonl"].decode().splitlines()[1:]]
            assert [line["step"] for line in lines if "loss" in line] == list(range(step))
            assert f"iter {step - 1}: " in on_disk["log.txt"].decode()
            seen.append(step)
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    train(config())
    assert seen == [5, 10, 15, 20]


def test_after_a_resume_each_step_stands_there_once(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    at_step(monkeypatch, 13, kill)
    with pytest.raises(Killed):
        train(config())
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    train(config())
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()[1:]]
    assert [line["step"] for line in lines if "loss" in line] == list(range(20))
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 5, 10, 15, 20]
    log = Path("out/log.txt").read_text().splitlines()
    assert [int(line.split()[1][:-1]) for line in log if line.startswith("iter")] == list(range(20))
    assert RunDirectory("out").newest_step() == 20
