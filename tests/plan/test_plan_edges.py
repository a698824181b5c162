"""What users tripped over in `onecard plan`: each once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from questions import NOTES, asked, config

from onecard.cli import main
from onecard.config.knobs import load_config
from onecard.config.resolve import setting_of
from onecard.config.run import RunConfig
from onecard.plan.largest import flags_of, largest_models, longest_blocks

SMALL = ["--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=64", "--vocab_size=512"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ONECARD_LANG", "en")


def told(capsys: pytest.CaptureFixture[str], *words: str, gpu: str = "RTX 4070") -> tuple[int, str, str]:
    code = main(["plan", *words, f"--gpu={gpu}"])
    out, err = capsys.readouterr()
    return code, out, err


# --- the step stays the step --------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from([1.5, 2.2, 3.0, 12.0]))
def test_flags_that_are_shown_never_change_the_step(batch: int, accumulation: int, gib: float) -> None:
    words = [f"--batch_size={batch}", f"--gradient_accumulation_steps={accumulation}", "--vocab_size=50304"]
    found = asked([*words, "--max_iters=100"], gib=gib)
    for choice in filter(None, (found.choice, *(c for _, c in found.alternatives()))):
        pasted = load_config(RunConfig, [*words, *choice.flags.split()])
        assert pasted.sequences_per_step == batch * accumulation
        if not choice.last_micro_batch:
            assert setting_of(pasted, found.question.shape).micro_batch == choice.setting.micro_batch


def test_a_step_that_cannot_be_said_in_flags_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--batch_size=7", "--gradient_accumulation_steps=5", "--vram_limit=3", "--max_iters=100"]
    code, out, _ = told(capsys, *words)
    assert code == 0 and "micro-batches of 4, the last of 3" in out and "--batch_size=4" not in out
    # Without auto_fit nobody would split it so.
    assert main(["plan", *words, "--gpu=RTX 4070", "--auto_fit=False", "--json"]) == 1
    assert 35 % json.loads(capsys.readouterr().out)["settings"]["micro_batch"] == 0


@pytest.mark.parametrize(
    "words",
    [
        [], ["--batch_size=9", "--gradient_accumulation_steps=7"], NOTES,
        ["--block_size=500", "--batch_size=12", "--gradient_accumulation_steps=1"],
    ],
)  # fmt: skip
def test_the_largest_and_the_longest_keep_the_tokens_of_a_step(words: list[str]) -> None:
    words = [*words, "--max_iters=100", "--vocab_size=50304"]
    found = asked(words)
    longest = longest_blocks(found)
    assert longest and longest[0].choice.question.shape.block_size >= config(words).block_size
    for row in (*largest_models(found), *longest):
        pasted = load_config(RunConfig, [*words, *flags_of(row.choice).split()])
        assert pasted.tokens_per_step == config(words).tokens_per_step


# --- one answer about one setting ---------------------------------------------------------------------


def test_figures_of_a_faster_setting_are_said_to_be_its(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = told(capsys, *NOTES, "--batch_size=1", "--gradient_accumulation_steps=512")
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("A setting that is"))
    assert lines[at].endswith("faster, which train takes by itself:") and lines[at + 1] == "```python"
    _, out, _ = told(capsys, *NOTES)
    assert "faster" not in out and "```" not in out


def test_stages_begin_with_what_fits_and_end_with_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--init_from=gpt2-xl", "--gpu=RTX 4090", "--host-ram=16", "--max_iters=10", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["stages"] and all(stage["fits"] for stage in answer["stages"])
    assert answer["stages"][-1]["settings"] == {k: answer["settings"][k] for k in
                                                answer["stages"][-1]["settings"]}  # fmt: skip
    speeds = [stage["tokens_per_s"] for stage in answer["stages"]]
    assert all(after >= 0.98 * before for before, after in pairwise(speeds))


def test_low_bits_are_named_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = told(capsys, *NOTES, "--optim_states=int8")
    assert "(master_weights=fp32, optim_states=int8)" in out


def test_host_memory_that_is_short_is_in_the_answer_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--init_from=gpt2-xl", "--gpu=RTX 4070", "--host-ram=6", "--max_iters=10",
          "--offload=optimizer", "--master_weights=fp32", "--json"])  # fmt: skip
    answer = json.loads(capsys.readouterr().out)
    assert not answer["fits"]
    short = answer["memory"]
    assert short["short_gib"] > 0 or short["host_short_gib"] > 0


# --- the data that is there ---------------------------------------------------------------------------


def write_tokens(name: str, count: int) -> None:
    folder = Path("data") / name
    folder.mkdir(parents=True)
    np.zeros(count, dtype=np.uint16).tofile(folder / "train.bin")
    np.zeros(1000, dtype=np.uint16).tofile(folder / "val.bin")


def test_passes_over_the_data_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """6,000 steps of 524,288 tokens over 10M of them."""
    _, fresh, _ = told(capsys, *NOTES)
    assert "6.3 GB of training data (3.15B tokens, each read once)" in fresh and "times" not in fresh
    write_tokens("openwebtext", 10_000_000)
    _, out, _ = told(capsys, *NOTES)
    assert "10M tokens in data/openwebtext, read 314.6 times" in out and "164M fresh ones" in out
    main(["plan", *NOTES, "--gpu=RTX 4070", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["disk"]["data_tokens"] == 10_000_000 and answer["disk"]["passes"] == pytest.approx(314.57)
    assert answer["loss"]["middle"] > 4.3, "far from the 3.7 of fresh text"


def test_a_run_is_planned_by_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    from onecard.run.directory import RunDirectory

    run = load_config(RunConfig, [*SMALL, "--max_iters=70", "--out_dir=out-two"])
    Path("out-two").mkdir()
    RunDirectory("out-two").write_config(run)
    for words in (["out-two"], ["--out_dir=out-two"]):
        main(["plan", *words, "--gpu=RTX 4070", "--json"])
        answer = json.loads(capsys.readouterr().out)
        assert answer["model"]["max_iters"] == 70
        assert answer["model"]["parameters"] < 1_000_000


def test_what_is_left_of_a_run_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    from onecard.run.directory import RunDirectory

    run = RunDirectory("out-long")
    run.path.mkdir()
    run.write_config(load_config(RunConfig, [*SMALL, "--max_iters=6000", "--out_dir=out-long"]))
    answers = []
    for done in (0, 1500, 6000):
        (run.checkpoints / f"step-{done:08d}").mkdir(parents=True)
        (run.checkpoints / f"step-{done:08d}" / "state.json").write_text("{}")
        main(["plan", "out-long", "--gpu=RTX 4070", "--json"])
        answers.append(json.loads(capsys.readouterr().out))
    whole, some, none = (answer["time"]["seconds"] - answer["time"]["first_step_s"] for answer in answers)
    assert some == pytest.approx(0.75 * whole, rel=0.05) and none < 0.02 * whole
    assert [answer["model"]["steps_done"] for answer in answers] == [0, 1500, 6000]
    (run.checkpoints / "step-00006000" / "state.json").unlink()
    (run.checkpoints / "step-00001500-of-mine").mkdir()  # somebody's copy is none of ours
    (run.checkpoints / "step-00001500-of-mine" / "state.json").write_text("{}")
    _, out, _ = told(capsys, "out-long")
    assert "for the 4,500 steps that are left of 6,000, " in out
    _, out, _ = told(capsys, "out-long", "--fresh")
    assert "that are left" not in out


def test_a_finished_run_is_said_to_be_finished(capsys: pytest.CaptureFixture[str]) -> None:
    """With its loss and what comes next, instead of the cost of no steps; on a machine without a card too."""
    from onecard.run.directory import RunDirectory

    run = RunDirectory("out-small")
    (run.checkpoints / "step-00000070").mkdir(parents=True)
    (run.checkpoints / "step-00000070" / "state.json").write_text("{}")
    run.write_config(load_config(RunConfig, [*SMALL, "--max_iters=70", "--out_dir=out-small"]))
    run.metrics_path.write_text(
        '{"schema": 1}\n{"step": 0, "val_loss": 9.5}\n'
        '{"step": 70, "train_loss": 3.1, "val_loss": 3.25, "val_bpb": 1.02}\n{"step": 71, "val_loss": null}\n'
    )
    assert main(["plan", "out-small"]) == 0
    first, *then = capsys.readouterr().out.splitlines()
    assert first == (
        "the run in out-small is finished: 70 of 70 steps are done, validation loss 3.2500 "
        "(1.0200 bits per byte)"
    )
    assert then[:2] == [
        "to generate text: onecard sample out-small",
        "to use it with Hugging Face: onecard export out-small out-small-hf",
    ]
    *_, further = then[2].split("onecard train ")
    _, out, _ = told(capsys, *further.split())
    assert "for the 70 steps that are left of 140" in out, "the command that it names can be planned"
    _, out, _ = told(capsys, "out-small", "--memory")
    assert "none: all 70 steps are done" in out and "Predicted peak memory" in out


def test_the_run_in_the_usual_folder_is_the_one_that_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """As train would, and said, since nobody named it."""
    from onecard.run.directory import RunDirectory

    Path("out").mkdir()
    RunDirectory("out").write_config(load_config(RunConfig, [*SMALL, "--max_iters=70"]))
    _, out, err = told(capsys)
    assert "2 × 64" in out and "the run in out goes on" in err
    _, out, err = told(capsys, "--fresh")
    assert "12 × 768" in out and "goes on" not in err


def test_only_a_config_word_is_a_folder_and_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    from onecard.run.directory import RunDirectory

    for name in ("mk", "two"):
        Path(name).mkdir()
        RunDirectory(name).write_config(load_config(RunConfig, [*SMALL, "--max_iters=70"]))
    code, out, _ = told(capsys, "--currency", "mk", "--max_iters=10")
    assert code == 0 and "12 × 768" in out and " mk a kWh" in out
    code, _, err = told(capsys, "mk", "two")
    assert code == 2 and "one run" in err


def test_a_run_of_a_later_version_is_planned_by_what_is_known_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("later").mkdir()
    saved = {"n_layer": 2, "n_head": 2, "n_embd": 64, "max_iters": 70, "newknob": 3}
    content = {"schema": 1, "values": saved, "set_by_user": dict.fromkeys(saved, "the command line")}
    Path("later/config.json").write_text(json.dumps(content))
    code, out, _ = told(capsys, "later")
    assert code == 0 and "2 × 64" in out


def test_a_folder_that_is_no_run_is_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    Path("stuff").mkdir()
    code, _, err = told(capsys, "stuff")
    assert code == 2 and "folder" in err and "--out_dir" not in err


# --- what cannot be answered --------------------------------------------------------------------------


def test_characters_have_no_expected_loss_to_choose_a_model_by(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = told(capsys, "--vocab_size=65", "--block_size=256", "--max_iters=100", "--by=24h")
    assert "there are no losses with a vocabulary of 65" in out and "bits per byte" not in out


def test_a_speed_that_is_not_known_is_no_speed_of_zero(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--gpu=RTX 2080 Ti", "--dtype=bfloat16", "--max_iters=100", "--largest", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert all(row["tokens_per_s"] is None for row in answer["largest"])
    _, out, _ = told(capsys, "--dtype=bfloat16", "--max_iters=100", "--by=12h", gpu="RTX 2080 Ti")
    assert "How fast it would be is not known" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--init_from=gpt2", "--block_size=2048"], "longer than the checkpoint's 1024"),
        (["--max_iters=0", "--as=nanogpt"], "no steps to plan"),
    ],
)
def test_what_train_would_refuse_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = told(capsys, *words)
    assert code == 2 and said in err and not out


@pytest.mark.parametrize("name", ["[/char]", "[red]char", "char["])
def test_brackets_in_names_are_no_markup(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, f"--dataset={name}", "--max_iters=100")
    assert code == 0 and name in out


@pytest.mark.parametrize("more", [["--largest"], ["--dtype=float32"], ["--as=nanogpt"], []])
def test_nor_in_a_card_of_ones_own(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tflops=30", "--bandwidth=500", "--max_iters=100", *more]
    code, out, _ = told(capsys, *words, gpu="My [/bold] card 12GB")
    assert code in (0, 1) and "[/bold]" in out


def test_an_mfu_above_one_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--block_size=16384", "--batch_size=1", "--gradient_accumulation_steps=32", "--max_iters=100"]
    _, out, _ = told(capsys, *words)
    assert "MFU counts all of attention's matrix" in out


def test_where_nanogpt_dies(capsys: pytest.CaptureFixture[str]) -> None:
    """As PyTorch's message told it: 2.30 GiB that are free, but not in one piece."""
    fix = [
        *NOTES,
        "--batch_size=12",
        "--dtype=float16",
        "--compile=False",
        "--as=nanogpt",
        "--vram_limit=11.75",
    ]
    code, out, _ = told(capsys, *fix)
    assert code == 1 and "tries to allocate 2.30 GiB" in " ".join(out.split())
    assert "not in one piece" in " ".join(out.split())
    main(["plan", *fix, "--gpu=RTX 4070", "--json"])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert answer["runs_out"]["tried_gib"] == pytest.approx(2.30, abs=0.01)
    # Measured without the evaluation before it: 10.4 (tests/plan/others). What it leaves suits better.
    assert answer["runs_out"]["reserved_gib"] == pytest.approx(9.9, rel=0.01)
    main(["plan", *NOTES, "--as=nanogpt", "--gpu=RTX 4070", "--json"])
    assert json.loads(capsys.readouterr().out)["runs_out"] is None


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    words = ["plan", "--gpu=RTX 4070", "--max_iters=100", "--compare", "--stages", "--formulas"]
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-m", "onecard", *words], env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == 0 and b"Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize("vocabulary", [50304, 100_000])
def test_shards_are_counted_as_they_are_read(vocabulary: int, capsys: pytest.CaptureFixture[str]) -> None:
    """16 bits a token behind a head of 1,024 bytes, whatever the model's vocabulary."""
    folder = Path("data/openwebtext")
    folder.mkdir(parents=True)
    for number, count in enumerate((10_000_000, 5_000_000)):
        np.zeros(512 + count, dtype=np.uint16).tofile(folder / f"web_train_{number:06}.bin")
    main(["plan", *NOTES, f"--vocab_size={vocabulary}", "--gpu=RTX 4070", "--json"])
    assert json.loads(capsys.readouterr().out)["disk"]["data_tokens"] == 15_000_000


def test_tokens_are_as_wide_as_the_data_says(capsys: pytest.CaptureFixture[str]) -> None:
    write_tokens("openwebtext", 10_000_000)
    Path("data/openwebtext/meta.json").write_text('{"dtype": "uint32"}')
    main(["plan", *NOTES, "--gpu=RTX 4070", "--json"])
    assert json.loads(capsys.readouterr().out)["disk"]["data_tokens"] == 5_000_000


@pytest.mark.parametrize("more", [[], ["--compare", "--stages"], ["--largest"], ["--as=nanogpt"]])
def test_no_line_ends_in_spaces(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = told(capsys, *NOTES, *more)
    assert out and not [line for line in out.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("language", ["en", "de", "es"])
def test_weights_alone_are_too_much_for_nanogpt(
    language: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONECARD_LANG", language)
    words = ["--as=nanogpt", "--n_layer=48", "--n_embd=6400", "--n_head=25", "--max_iters=100"]
    code, out, _ = told(capsys, *words)
    moment = {"en": "loading the model", "de": "Laden des Modells", "es": "carga del modelo"}[language]
    assert code == 1 and f"({moment})" in out and "MIME" not in out


def test_uneven_splits_are_said_in_the_readers_language(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ONECARD_LANG", "de")
    words = ["--batch_size=7", "--gradient_accumulation_steps=5", "--max_iters=100", "--vocab_size=50304"]
    choice = asked(words, gib=3.0).choice
    assert choice is not None and choice.last_micro_batch
    assert "von 4, der letzte von 3" in choice.described and "von" not in choice.flags
