from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.files import write_json
from onecard.run.changes import differences
from onecard.run.checkpoint import TrainingState, save_checkpoint
from onecard.run.directory import RunDirectory, read_json, refuse_a_slip


def config(*arguments: str) -> RunConfig:
    return load_config(RunConfig, arguments)


def test_a_config_comes_back_with_what_the_user_had_set(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    written = config("--n_layer=3", "--dtype=float32", "--tokens=1B")
    directory.write_config(written)
    read = directory.read_config()
    assert read == written
    assert read is not None
    assert read.is_set("n_layer")
    assert not read.is_set("n_head")


def test_a_damaged_or_foreign_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_json(path) is None
    for content in ("{", "[]", '{"schema": 99}', "null"):
        path.write_text(content)
        with pytest.raises(UserError, match=r"config\.json"):
            read_json(path)


def test_writing_replaces_whole_files_only(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"schema": 1, "a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"schema": 1, "a": object()})
    assert read_json(path) == {"schema": 1, "a": 1}


def test_a_fresh_start_sets_a_run_aside_and_never_overwrites(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with directory.claimed(fresh=True) as aside:
        assert aside is None
    for number in (1, 2, 3):
        directory.write_config(config())
        (directory.path / "mark").write_text(str(number))
        with directory.claimed(fresh=True) as aside:
            assert aside == tmp_path / f"run.before-{number}"
    assert (tmp_path / "run.before-2" / "mark").read_text() == "2"


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("photo", "x"),
        ("config.json", '{"model_type": "gpt2", "n_layer": 12}'),
        ("config.json", "{"),
        ("metrics.jsonl", '{"loss": 3}\n'),
        ("checkpoints/epoch-1.ckpt", "x"),
        ("model_000100.pt", "x"),
    ],
)
def test_a_folder_with_somebody_elses_files_is_left_as_it_is(
    tmp_path: Path, fresh: bool, name: str, content: str
) -> None:
    file = tmp_path / "precious" / name
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with (
        pytest.raises(UserError, match="holds files that are not a run's") as refused,
        RunDirectory(tmp_path / "precious").claimed(fresh=fresh),
    ):
        raise AssertionError("not reached")
    assert name.partition("/")[0] in refused.value.why
    assert [path for path in (tmp_path / "precious").rglob("*") if path.is_file()] == [file]
    assert file.read_text() == content


@pytest.mark.parametrize("names", [["ckpt.pt"], ["train.log", "train.py"], ["lost+found/"], [".git/"], []])
def test_a_folder_that_a_run_may_begin_in(tmp_path: Path, names: list[str]) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    for name in names:
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("")
    with RunDirectory(folder).claimed(fresh=False) as aside:
        assert aside is None


def test_the_root_of_the_file_system_and_no_name_are_no_folders_for_a_run(tmp_path: Path) -> None:
    for name in ("/", "//", "/tmp/.."):
        with pytest.raises(UserError, match="the root"), RunDirectory(name).claimed(fresh=True):
            raise AssertionError("not reached")
    for name in ("", " ", "a\0b"):
        with pytest.raises(UserError, match="no name of a folder"):
            RunDirectory(name)


def test_a_claimed_folder_notices_that_it_is_gone(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with directory.claimed(fresh=False):
        assert directory.why_lost() == ""
        directory.path.rename(tmp_path / "elsewhere")
        assert "renamed" in directory.why_lost()
        with RunDirectory(tmp_path / "run").claimed(fresh=False):
            assert "another folder" in directory.why_lost()


def test_a_fresh_start_behind_a_link_keeps_the_link_working(tmp_path: Path) -> None:
    (tmp_path / "big" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "big" / "real")
    directory = RunDirectory(tmp_path / "link")
    with directory.claimed(fresh=False):
        directory.write_config(config())
        (directory.path / "mark").write_text("1")
    with directory.claimed(fresh=True) as aside:
        assert aside == tmp_path / "big" / "real.before-1"
    assert (tmp_path / "big" / "real.before-1" / "mark").read_text() == "1"
    assert directory.checkpoints.is_dir()
    assert not (tmp_path / "link" / "mark").exists()


def test_the_folder_one_stands_in_is_not_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunDirectory(".").write_config(config())
    with pytest.raises(UserError, match="cannot be set aside"), RunDirectory(".").claimed(fresh=True):
        raise AssertionError("not reached")


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with directory.claimed(fresh=False):
        for fresh in (False, True):
            with (
                pytest.raises(UserError, match="another process is training"),
                directory.claimed(fresh=fresh),
            ):
                raise AssertionError("not reached")
    with directory.claimed(fresh=False):
        pass  # free again


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot be used"),
        RunDirectory(tmp_path / "file" / "run").claimed(fresh=False),
    ):
        raise AssertionError("not reached")


def test_only_what_changes_the_experiment_counts_as_a_difference() -> None:
    before = config("--batch_size=16", "--gradient_accumulation_steps=32")
    assert differences(before, config("--batch_size=8", "--gradient_accumulation_steps=64")) == []
    same = config(
        "--batch_size=16",
        "--gradient_accumulation_steps=32",
        "--device=cpu",
        "--log_interval=7",
        "--no-compile",
    )
    assert differences(before, same) == []
    other = config(
        "--batch_size=16", "--gradient_accumulation_steps=32", "--n_layer=3", "--learning_rate=1e-3"
    )
    assert differences(before, other) == [("n_layer", 12, 3), ("learning_rate", 6e-4, 1e-3)]
    smaller = config("--batch_size=8", "--gradient_accumulation_steps=32")
    assert [name for name, _, _ in differences(before, smaller)] == [
        "batch_size",
        "gradient_accumulation_steps",
    ]


def test_who_comes_to_a_paused_job_is_told_how_it_goes_on(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "out")
    with directory.claimed(fresh=False):
        directory.paused.touch()
        with pytest.raises(UserError) as refused, directory.claimed(fresh=False):
            pass
        assert "--resume-now" in refused.value.hint and str(directory.path) in refused.value.hint
        directory.paused.unlink()
        with pytest.raises(UserError) as refused, directory.claimed(fresh=False):
            pass
        assert "wait for it" in refused.value.hint


def test_a_mistyped_folder_begins_no_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("out-demo", "elsewhere", "newer")):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        RunDirectory(tmp_path / name).write_config(config())
        os.utime(tmp_path / name / "checkpoints", (age, age))
    refuse_a_slip(load_config(RunConfig, ["--out_dir=out-demo"]))
    refuse_a_slip(load_config(RunConfig, ["--out_dir=out-dmeo", "--dataset=tiny"]))
    refuse_a_slip(load_config(RunConfig, ["--out_dir=out-dmeo", "--init_from=scratch"]))
    with pytest.raises(UserError, match="there is no run in out-dmeo") as refused:
        refuse_a_slip(load_config(RunConfig, ["--out_dir=out-dmeo"]))
    assert refused.value.hint.startswith("runs: out-demo, newer, elsewhere\n"), "the one that was meant first"
    with pytest.raises(UserError) as refused:
        refuse_a_slip(load_config(RunConfig, ["--out_dir=deeper/runs-of-mine"]))
    assert refused.value.hint.startswith("runs: newer, elsewhere, out-demo\n"), (
        "of the working folder, the newest"
    )


def flipped(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_no_flipped_bit_of_a_config_makes_another_config(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    written = config("--n_layer=3", "--learning_rate=6e-4", "--tokens=1B", "--seed=7")
    directory.write_config(written)
    for bit in random.Random(0).sample(range(8 * directory.config_path.stat().st_size), 150):
        flipped(directory.config_path, bit)
        try:
            read = directory.read_config()
        except UserError as error:
            assert "config.json" in error.what
        else:
            assert read == written and read.origins == written.origins
        flipped(directory.config_path, bit)


def save(directory: RunDirectory, step: int, of: RunConfig) -> Path:
    state = {"config": of.values(), "set_by_user": dict(of.origins), "val_loss": None}
    training = TrainingState({"w": torch.zeros(2)}, {}, {})
    return save_checkpoint(directory.checkpoints, step, training, state)


@pytest.mark.parametrize("harm", ["flip", "remove", "folder", "other values without a seal"])
def test_a_damaged_config_gives_way_to_the_checkpoints(tmp_path: Path, harm: str) -> None:
    directory = RunDirectory(tmp_path)
    directory.checkpoints.mkdir()
    written = config("--n_layer=3", "--learning_rate=6e-4")
    directory.write_config(written)
    save(directory, 10, written)
    if harm == "flip":
        text = directory.config_path.read_text()
        directory.config_path.write_text(text.replace("0.0006", "0.0106"))
    elif harm == "other values without a seal":
        content = read_json(directory.config_path)
        content["values"]["learning_rate"] = 1.0
        del content["seal"]
        write_json(directory.config_path, content)
    else:
        directory.config_path.unlink()
        if harm == "folder":
            directory.config_path.mkdir()
    assert directory.read_config() == written
    (note,) = directory.config_notes
    assert "the values saved with step 10 are used" in note


def test_an_older_config_without_a_seal_is_believed_where_the_checkpoint_agrees(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.checkpoints.mkdir()
    written = config("--n_layer=3")
    directory.write_config(written)
    content = read_json(directory.config_path)
    del content["seal"]
    write_json(directory.config_path, content)
    assert directory.read_config() == written
    save(directory, 10, written)
    assert directory.read_config() == written and directory.config_notes == []


def test_a_config_changed_since_the_last_checkpoint_counts(tmp_path: Path) -> None:
    """A run that was continued with other flags and killed before it saved."""
    directory = RunDirectory(tmp_path)
    directory.checkpoints.mkdir()
    save(directory, 10, config("--n_layer=3"))
    later = config("--n_layer=3", "--max_iters=50")
    directory.write_config(later)
    assert directory.read_config() == later and directory.config_notes == []


def test_a_home_folder_is_not_a_folder_called_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunDirectory("~/run").path == tmp_path / "run"
    assert str(RunDirectory("./~/run").path) == "~/run", "which is plainly one"
    assert RunDirectory("~nobody-of-this-name/run").path == Path("~nobody-of-this-name/run")
