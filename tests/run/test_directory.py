from __future__ import annotations

from pathlib import Path

import pytest

from onecard.config import RunConfig
from onecard.errors import UserError
from onecard.files import write_json
from onecard.knobs import load_config
from onecard.run.directory import RunDirectory, differences, read_json, refuse_a_slip


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
        (directory.path / "mark").write_text(str(number))
        with directory.claimed(fresh=True) as aside:
            assert aside == tmp_path / f"run.before-{number}"
    assert (tmp_path / "run.before-2" / "mark").read_text() == "2"


def test_a_fresh_start_leaves_a_folder_alone_that_holds_no_run(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "photo").write_text("x")
    with RunDirectory(tmp_path / "precious").claimed(fresh=True) as aside:
        assert aside is None
    assert (tmp_path / "precious" / "photo").exists()


def test_a_fresh_start_behind_a_link_keeps_the_link_working(tmp_path: Path) -> None:
    (tmp_path / "big" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "big" / "real")
    directory = RunDirectory(tmp_path / "link")
    with directory.claimed(fresh=False):
        (directory.path / "mark").write_text("1")
    with directory.claimed(fresh=True) as aside:
        assert aside == tmp_path / "big" / "real.before-1"
    assert (tmp_path / "big" / "real.before-1" / "mark").read_text() == "1"
    assert directory.checkpoints.is_dir()
    assert not (tmp_path / "link" / "mark").exists()


def test_the_folder_one_stands_in_is_not_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
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
    for name in ("out-demo", "elsewhere"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    refuse_a_slip(load_config(RunConfig, ["--out_dir=out-demo"]))
    refuse_a_slip(load_config(RunConfig, ["--out_dir=out-dmeo", "--dataset=tiny"]))
    refuse_a_slip(load_config(RunConfig, ["--out_dir=out-dmeo", "--init_from=scratch"]))
    with pytest.raises(UserError, match="there is no run in out-dmeo") as refused:
        refuse_a_slip(load_config(RunConfig, ["--out_dir=out-dmeo"]))
    assert refused.value.hint.startswith("runs here: out-demo, elsewhere\n"), "the one that was meant first"
    with pytest.raises(UserError) as refused:
        refuse_a_slip(load_config(RunConfig, ["--out_dir=runs-of-mine"]))
    assert "out-demo" in refused.value.hint and "elsewhere" in refused.value.hint
