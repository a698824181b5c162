"""`onecard eta FOLDER`: what a run's own files tell that its log.txt does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from onecard import cli
from onecard.arch.shapes import GPT2Shape
from onecard.config.knobs import knobs, load_config
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.data.tokenizer import make_tokenizer
from onecard.files import write_json
from onecard.report.curve.findings import findings_of
from onecard.report.eta import eta_command
from onecard.report.gathering.gather import facts_of
from onecard.report.gathering.inputs import read_input
from onecard.report.gathering.known import Known
from onecard.report.gathering.run_folder import run_folder
from onecard.run.directory import RunDirectory
from onecard.run.metrics import iteration_line

SMALL = ["--n_layer=4", "--n_head=4", "--n_embd=128", "--block_size=64", "--max_iters=1000", "--dataset=mine"]
STEP_SECONDS = 0.25


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run's, with fifty lines; its vocabulary is the data's, and so the config has none."""
    monkeypatch.setattr(eta_command, "local_gpus", list)
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(tmp_path / "out")
    directory.checkpoints.mkdir(parents=True)
    directory.write_config(load_config(RunConfig, SMALL))
    write_lines(directory, range(50), STEP_SECONDS)
    return directory


def write_lines(directory: RunDirectory, steps: Iterable[int], seconds: float) -> None:
    with directory.log_path.open("a", encoding="utf-8") as file:
        file.writelines(iteration_line(step, 3.0, seconds, 0.3) + "\n" for step in steps)


def write_events(directory: RunDirectory, *events: tuple[str, int]) -> None:
    lines = [{"schema": 1}, *({"event": kind, "step": step, "device": "cuda"} for kind, step in events)]
    directory.events_path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def answer(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert cli.main(["eta", str(directory.path), "--gpu=RTX 4070", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def tflops(shape: GPT2Shape) -> Any:
    tokens = load_config(RunConfig, SMALL).tokens_per_step
    return pytest.approx(shape.flops_per_token * tokens / STEP_SECONDS / 1e12)


def shape(vocab_size: int, n_layer: int = 4) -> GPT2Shape:
    return GPT2Shape(n_layer, 4, 128, vocab_size, 64, bias=False)


def save_state(directory: RunDirectory, step: str, **state: Any) -> None:
    (directory.checkpoints / step).mkdir()
    write_json(directory.checkpoints / step / "state.json", {"schema": 1, **state})


# --- the model ----------------------------------------------------------------------------------


def test_flops_are_of_the_newest_checkpoints_model(
    folder: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(folder, capsys)["tflops"] == tflops(shape(50_304)), "nothing tells more"
    save_state(folder, "step-00000010", arch="gpt2", shape=shape(99).to_json())
    assert answer(folder, capsys)["tflops"] == tflops(shape(99))
    save_state(folder, "step-00000020", arch="gpt2", shape=shape(65, n_layer=2).to_json())
    assert answer(folder, capsys)["tflops"] == tflops(shape(65, n_layer=2))
    save_state(folder, "step-100000000", arch="of the future", shape={})
    assert answer(folder, capsys)["tflops"] == tflops(shape(65, n_layer=2)), "one that nobody can read"


def test_before_the_first_checkpoint_the_plan_tells_the_model(
    folder: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write_plan({"model": {"flops_per_token": shape(65).flops_per_token}})
    assert answer(folder, capsys)["tflops"] == tflops(shape(65))


@pytest.mark.parametrize("damaged", ["{", "[]", '{"schema": 1}', '{"schema": 1, "model": []}',
                                     '{"schema": 1, "model": {"flops_per_token": -1}}'])  # fmt: skip
def test_a_damaged_plan_costs_no_answer(
    folder: RunDirectory, capsys: pytest.CaptureFixture[str], damaged: str
) -> None:
    folder.plan_path.write_text(damaged)
    save_state(folder, "step-00000010", arch="gpt2", shape=shape(65).to_json())
    assert answer(folder, capsys)["tflops"] == tflops(shape(65))


def test_else_the_data_tell_the_vocabulary(folder: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    Path("data/mine").mkdir(parents=True)
    meta = {"schema": 1, "dtype": "uint16", "tokenizer": make_tokenizer("byte").facts()}
    Path("data/mine/meta.json").write_text(json.dumps(meta))
    assert answer(folder, capsys)["tflops"] == tflops(shape(320)), "257 in a multiple of 64"
    folder.write_config(load_config(RunConfig, [*SMALL, "--vocab_size=1024"]))
    assert answer(folder, capsys)["tflops"] == tflops(shape(1024))


def test_torch_is_not_needed(folder: RunDirectory) -> None:
    save_state(folder, "step-00000010", arch="gpt2", shape=shape(65).to_json())
    program = (
        "import sys; from onecard import cli; "
        f"cli.main(['eta', {str(folder.path)!r}, '--gpu=RTX 4070']); sys.exit('torch' in sys.modules)"
    )
    path = [str(Path(__file__).resolve().parents[2])]
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {program}"], check=True)


# --- a damaged config ---------------------------------------------------------------------------


def config_with(**values: object) -> str:
    usual = load_config(RunConfig, SMALL).values()
    return json.dumps({"schema": 1, "values": usual | values, "set_by_user": {}})


DAMAGED = [
    '{"schema":1,"values":{"n_layer":"abc"},"set_by_user":{}}',
    config_with(batch_size=None),
    config_with(max_iters="x"),
    config_with(n_head=0),
    config_with(n_embd=True),
    config_with(batch_size=-12),
    config_with(n_layer=float("nan")),
    config_with(n_layer=12.5),
    config_with(max_iters=10**400),
    config_with(arch="of the future"),
    config_with(arch="nanochat", window_pattern="XYZ"),
    config_with(dataset=7),
    config_with(learning_rate=float("nan")),
    '{"schema":1,"values":[],"set_by_user":{}}',
    '{"schema":1,"values":{},"set_by_user":7}',
    '{"schema":2,"values":{},"set_by_user":{}}',
    "{",
    "[" * 20_000,
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_config_is_as_if_it_were_not_there(
    folder: RunDirectory, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    write_events(folder, ("started", 0))  # by which the log is known to be onecard's
    folder.config_path.unlink()
    without = answer(folder, capsys)
    folder.config_path.write_text(content)
    found = answer(folder, capsys)
    note = found["notes"].pop(0)
    assert str(folder.config_path) in note and "not used" in note
    assert found == without
    assert (found["format"], found["mfu"], found["tokens_per_s"]) == ("onecard", pytest.approx(0.3), None)
    assert cli.main(["eta", str(folder.path), "--max-iters=1000"]) == 0
    assert "is damaged" in " ".join(capsys.readouterr().out.split())  # a long path breaks the line


def test_for_a_damaged_config_there_is_that_of_a_checkpoint(
    folder: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = answer(folder, capsys)
    folder.config_path.write_text(config_with(n_head=0))
    save_state(folder, "step-00000010", config=load_config(RunConfig, SMALL).values())
    save_state(folder, "step-00000020", config={"n_layer": "abc"})
    found = answer(folder, capsys)
    assert found["notes"].pop(0).startswith(str(folder.config_path))
    assert {**found, "finish": None} == {**whole, "finish": None}


def test_every_config_that_is_written_is_whole(
    folder: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every config here: none may be taken for damaged."""
    for path in sorted((Path(__file__).resolve().parents[2] / "config").glob("*.py")):
        others = frozenset(field.name for field in knobs(SampleConfig))
        config = load_config(RunConfig, [str(path)], also_known=others)
        folder.write_config(config)
        found = run_folder(str(folder.path))
        assert found is not None and found.config() == config and found.damage() == "", path


def test_a_config_of_another_program_is_no_concern(
    folder: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.config_path.write_text('{"model_type": "gpt2"}')
    assert not any("config.json" in note for note in answer(folder, capsys)["notes"])


# --- the last start -----------------------------------------------------------------------------


def test_of_a_continued_run_the_last_start_counts(
    folder: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes on at the very next step: by the lines alone it is one run."""
    write_lines(folder, range(50, 80), 1.0)
    write_events(folder, ("started", 0), ("interrupted", 50), ("resumed", 50))
    found = answer(folder, capsys)
    assert found["step_ms"]["median"] == pytest.approx(1000)
    assert (found["steps_seen"], found["steps_used"], found["steps_left"]) == (30, 25, 920)
    assert cli.main(["eta", str(folder.log_path)]) == 0
    assert "steps 50 to 79 of 1,000 (the last of 2 starts)" in capsys.readouterr().out


def test_a_start_with_one_line_does_not_count_yet(
    folder: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(folder, range(50, 80), 1.0)
    write_lines(folder, [80], 30.0)
    write_events(folder, ("started", 0), ("interrupted", 50), ("resumed", 50), ("resumed", 80))
    found = answer(folder, capsys)
    assert found["step_ms"]["median"] == pytest.approx(1000)
    assert (found["steps_seen"], found["last_seen"]) == (31, 80)


def test_a_start_with_nothing_to_train_is_none(
    folder: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(folder, range(50, 80), 1.0)
    write_events(
        folder, ("started", 0), ("interrupted", 50), ("resumed", 50), ("finished", 80),
        ("resumed", 80), ("finished", 80),
    )  # fmt: skip
    assert cli.main(["eta", str(folder.path)]) == 0
    assert "steps 50 to 79 of 1,000 (the last of 2 starts)" in capsys.readouterr().out


def test_a_run_that_went_back_counts_from_there(
    folder: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(folder, range(40, 60), 1.0)  # killed at 50, its checkpoint was of step 40
    write_events(folder, ("started", 0), ("saved", 40), ("resumed", 40))
    found = answer(folder, capsys)
    assert (found["steps_seen"], found["step_ms"]["median"]) == (20, pytest.approx(1000))


def test_memory_is_shown_as_predicted_and_as_measured(folder: RunDirectory) -> None:
    """By the newest setting's event: an earlier one was another setting's."""
    events: list[dict[str, Any]] = [
        {"schema": 1},
        {"event": "started", "step": 0, "device": "cuda"},
        {"event": "memory", "step": 5, "predicted_gib": 9.0, "measured_gib": 9.5},
        {"event": "memory", "step": 9, "predicted_gib": 4.0, "measured_gib": 4.01},
        {"event": "memory", "step": 9, "predicted_gib": "damaged"},
    ]
    folder.events_path.write_text("".join(json.dumps(event) + "\n" for event in events))
    write_lines(folder, range(0, 100, 10), 0.5)
    given = read_input(str(folder.path))
    found = {finding.key: finding for finding in findings_of(facts_of(given.log, Known(), given.folder))}
    assert "4.01 GiB measured, 4.00 predicted (+0.2%)" in found["memory"].text
    assert found["memory"].good is True
