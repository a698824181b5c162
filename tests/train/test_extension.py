"""A run that is made longer, through the front door: what its learning rate does, and what is said of it."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from conftest import write_bins
from tiny_runs import TINY, weights

from onecard.cli import main
from onecard.errors import UserError
from onecard.optim.schedule import rates, shown_rate
from onecard.run.checkpoint import list_checkpoints
from onecard.run.directory import RunDirectory, load_run_config
from onecard.run.metrics import read_metrics
from onecard.train import loop as loop_module
from onecard.train.loop import train

# Learning rate 1e-2 after 3 steps of warm-up, cosine to 1e-3 at step 20, where the run ends.
WORDS = [*TINY, "--lr_decay_iters=20"]
FURTHER = ["--out_dir=out", "--init_from=resume", "--max_iters=40"]
LAST = 1e-3 + 0.5 * (1 + math.cos(math.pi * 16 / 17)) * 9e-3  # of the twenty steps
MUON = [*WORDS, "--optimizer=muon", "--matrix_lr=0.05"]
NANOCHAT = [
    "--arch=nanochat", "--depth=2", "--n_embd=32", "--n_head=2", "--vocab_size=61", "--block_size=16",
    "--batch_size=4", "--gradient_accumulation_steps=2", "--dataset=tiny", "--eval_interval=5",
    "--eval_iters=1", "--sample_tokens=0", "--device=cpu", "--no-compile", "--max_iters=20",
    "--warmup_iters=2", "--out_dir=out",
]  # fmt: skip


def go(*words: str) -> int:
    return main(["train", *words])


def logged(out_dir: str = "out") -> dict[int, float]:
    return {x["step"]: x["lr"] for x in read_metrics(Path(out_dir) / "metrics.jsonl") if "lr" in x}


def after(step: int) -> list[float]:
    return [rate for at, rate in sorted(logged().items()) if at >= step]


def notes() -> list[str]:
    lines = [json.loads(line) for line in Path("out/events.jsonl").read_text().splitlines()[1:]]
    return [event for event in lines if event["event"] == "resumed"][-1]["notes"]


def the_20_steps_are_as_they_were() -> None:
    cosine = [1e-3 + 0.5 * (1 + math.cos(math.pi * (s - 3) / 17)) * 9e-3 for s in range(3, 20)]
    expected = [1e-2 * (s + 1) / 4 for s in range(3)] + cosine
    assert [logged()[s] for s in range(20)] == pytest.approx(expected)


# --- asked for -----------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--lr_decay_iters=40"]])
def test_a_rate_that_would_rise_is_refused_with_figures(
    workplace: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """Without lr_decay_iters nanoGPT's meaning is kept: min_lr to the end."""
    assert go(*WORDS) == 0
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    capsys.readouterr()
    code = go(*FURTHER, *more)
    shown = capsys.readouterr().err
    if not more:
        assert code == 0 and after(20) == pytest.approx([1e-3] * 20)
        assert "the learning rate stays at 1e-03 (min_lr) to the end, step 40" in shown
        assert "ends both together" not in shown, "which would be refused"
        return
    assert code == 2
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before
    now = 1e-3 + 0.5 * (1 + math.cos(math.pi * 17 / 37)) * 9e-3
    assert (
        f"error: --max_iters=40 would raise the learning rate from 1.1e-03 to {now:.1e} (×5.6) at step 20"
        in shown
    )
    assert [line.strip() for line in shown.splitlines() if "--extend" in line] == [
        "--extend=stay                       1.1e-03 to the end (step 40)",
        "--extend=rewarm --extend_lr=0.005   up to 5e-03 by step 22, down to 1e-03 at 40",
        "--extend=decay                      1.1e-03 until step 36, then to 0 at 40",
        "--extend=schedule                   as written: 6.1e-03 at once, 1e-03 at 40",
    ]


def test_each_command_of_the_refusal_works_when_pasted(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(*WORDS) == 0
    shutil.copytree("out", "kept")
    assert go(*FURTHER, "--lr_decay_iters=40") == 2
    hint = capsys.readouterr().err.split("hint:")[1]
    ways = [line.split("   ")[0].split() for line in map(str.strip, hint.splitlines()) if "--extend" in line]
    assert [way[0] for way in ways] == [
        "--extend=stay",
        "--extend=rewarm",
        "--extend=decay",
        "--extend=schedule",
    ]
    for way in ways:
        shutil.rmtree("out")
        shutil.copytree("kept", "out")
        assert go(*FURTHER, "--lr_decay_iters=40", *way) == 0
        the_20_steps_are_as_they_were()
        assert len(logged()) == 40


@pytest.mark.parametrize("words", [WORDS, MUON], ids=["adamw", "muon"])
def test_each_way_step_by_step(workplace: Path, words: list[str]) -> None:
    """In the units of the log: AdamW's rate, or that of Muon's matrices."""
    unit = 5.0 if words is MUON else 1.0  # matrix_lr 0.05 beside learning_rate 0.01
    last, low, peak = unit * LAST, unit * 1e-3, unit * 6e-3
    assert go(*words) == 0
    shutil.copytree("out", "kept")
    level, down = [last] * 16, [last * left / 4 for left in (4, 3, 2, 1)]
    up = [last + (peak - last) / 2, peak]
    cycle = [low + 0.5 * (1 + math.cos(math.pi * s / 18)) * (peak - low) for s in range(18)]
    anew = [low + 0.5 * (1 + math.cos(math.pi * (s - 3) / 37)) * unit * 9e-3 for s in range(20, 40)]
    for way, expected in {
        "stay": [last] * 20,
        "decay": level + down,
        "rewarm": up + cycle,
        "schedule": anew,
    }.items():
        shutil.rmtree("out")
        shutil.copytree("kept", "out")
        more = [f"--extend_lr={peak}"] if way == "rewarm" else []
        assert go(*FURTHER, f"--extend={way}", "--lr_decay_iters=40", *more) == 0
        assert after(20) == pytest.approx(expected), way
        assert [logged()[s] for s in range(20)] == [logged("kept")[s] for s in range(20)]
        unused = [note for note in notes() if note.startswith("lr_decay_iters is not used")]
        assert len(unused) == (way != "schedule")


def test_nanochat_of_2025_ends_at_nothing_and_goes_up_again(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*NANOCHAT, "--generation=2025", "--max_iters=300", "--eval_interval=300", "--warmdown_ratio=0.4"]
    assert (
        go(*words, "--n_embd=8", "--block_size=4", "--batch_size=1", "--gradient_accumulation_steps=1") == 0
    )
    assert (
        go(*words, "--n_embd=8", "--block_size=4", "--batch_size=1", "--gradient_accumulation_steps=1") == 0
    )
    *_, further = re.findall("to train further: onecard (.*)", capsys.readouterr().out)
    assert further.endswith("--init_from=resume --max_iters=600 --extend=rewarm --extend_lr=0.01")
    kept = shutil.copytree("out", "kept")
    assert go("--out_dir=out", "--init_from=resume", "--max_iters=600") == 2
    shown = capsys.readouterr().err
    assert "--extend=rewarm --extend_lr=0.01" in shown and "--extend=stay" not in shown
    assert "0.0083 of the peak, 2e-02: to stay there would teach it hardly anything" in shown
    assert main(shlex.split(further)) == 0
    last = 0.02 / 120
    up = [last + (0.01 - last) * (s + 1) / 30 for s in range(30)]
    down = [0.01 * left / 120 for left in range(120, 0, -1)]
    assert after(300) == pytest.approx([*up, *[0.01] * 150, *down])
    shutil.rmtree("out")
    shutil.copytree(kept, "out")
    assert go("--out_dir=out", "--init_from=resume", "--max_iters=301", "--extend=stay") == 0
    assert (
        "hardly anything is learned; --extend=rewarm --extend_lr=0.01 goes up again"
        in capsys.readouterr().err
    )
    assert after(300) == pytest.approx([last])


def test_nanochat_of_2026(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weight decay and momentum follow the horizon too."""
    words = [*NANOCHAT, "--warmdown_ratio=0.5"]
    assert go(*words) == 0
    shutil.copytree("out", "kept")
    assert go(*FURTHER) == 2
    assert "would raise the learning rate" in capsys.readouterr().err
    peak = logged()[10]
    last = peak * (0.1 + 0.9 * 0.05)
    assert logged()[19] == pytest.approx(last)
    top, low = peak * 0.5, peak * 0.05
    for way, expected in {
        "stay": [last] * 20,
        "decay": [last] * 10 + [last * left / 10 for left in range(10, 0, -1)],
        "rewarm": [last + (top - last) / 2, *[top] * 9]
        + [low + (top - low) * left / 10 for left in range(10, 0, -1)],
    }.items():
        shutil.rmtree("out")
        shutil.copytree("kept", "out")
        more = [f"--extend_lr={top}"] if way == "rewarm" else []
        assert go(*FURTHER, f"--extend={way}", *more) == 0
        assert after(20) == pytest.approx(expected), way
        config = RunDirectory("out").read_config()
        assert config is not None
        decay = [rates(s, config).decay for s in range(20, 40)]
        before = 0.5 * (1 + math.cos(math.pi * 19 / 20))
        if way == "stay":
            assert decay == pytest.approx([before] * 20)
        elif way == "decay":
            assert decay == pytest.approx([before] * 10 + [before * left / 10 for left in range(10, 0, -1)])
        else:
            cosine = [0.5 * (1 + math.cos(math.pi * s / 18)) for s in range(18)]
            assert decay == pytest.approx([before + (1 - before) / 2, 1.0, *cosine])


# --- going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [["stay"], ["rewarm", "--extend_lr=6e-3"], ["decay"], ["schedule"]])
def test_an_extension_stopped_in_its_middle_goes_on_bit_for_bit(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: list[str]
) -> None:
    """By its folder alone, or by the same command again; also where nothing of it had been saved."""
    assert go(*WORDS) == 0
    for name in ("folder", "command", "unsaved"):
        shutil.copytree("out", name)
    flags = ["--init_from=resume", "--max_iters=40", "--lr_decay_iters=40", f"--extend={way[0]}", *way[1:]]
    assert go("--out_dir=out", *flags) == 0
    real = loop_module.Training._step

    class KilledError(BaseException):
        pass

    def killed(at: int) -> None:
        def step(training: loop_module.Training, *more: object) -> bool:
            if training.position.step == at:
                raise KilledError
            return real(training, *more)  # type: ignore[arg-type]

        monkeypatch.setattr(loop_module.Training, "_step", step)

    for name, again, at in (
        ("folder", [], 33),
        ("command", flags, 33),
        ("unsaved", [], 22),
    ):
        killed(at)
        with pytest.raises(KilledError):
            go(f"--out_dir={name}", *flags)
        monkeypatch.setattr(loop_module.Training, "_step", real)
        assert go(f"--out_dir={name}", *again) == 0
        assert logged(name) == logged(), name
        assert all(torch.equal(tensor, weights(name)[key]) for key, tensor in weights().items()), name
    assert (
        f"extended at step 20 (--extend={way[0]}): the learning rate was 1.1e-03 until there, then "
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("words", [WORDS, NANOCHAT])
def test_a_rewarm_without_its_peak_is_reported_one_that_works(
    workplace: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Muon's rate is scaled by the batch: half of it is what a log line shows."""
    assert go(*words) == 0
    peak = max(logged().values())
    assert go(*FURTHER, "--extend=rewarm") == 2
    refused = capsys.readouterr().err
    assert "a rewarm needs the rate it goes up to" in refused
    proposed = refused.split("hint: half the peak: ")[1].split()
    assert float(proposed[1].removeprefix("--extend_lr=")) == pytest.approx(peak / 2, rel=0.1)
    assert go(*FURTHER, *proposed) == 0


def test_a_peak_above_all_rates_so_far_is_said(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(*WORDS) == 0
    assert go(*FURTHER, "--extend=rewarm", "--extend_lr=0.04") == 0
    assert "its peak is 4 times the highest rate of the schedule, 1e-02" in capsys.readouterr().err


def test_the_original_command_with_the_new_flags_needs_no_word_of_resuming(workplace: Path) -> None:
    """And a config file with them goes on as often as one likes."""
    names = [word.removeprefix("--").split("=") for word in WORDS if "=" in word]
    lines = [f"{name} = {value!r}" if value.isalpha() else f"{name} = {value}" for name, value in names]
    Path("c.py").write_text("\n".join([*lines, "compile = False"]))
    assert train(load_run_config(["c.py"])).values["step"] == 20
    longer = ["c.py", "--max_iters=30", "--extend=stay"]
    for _ in range(2):
        assert train(load_run_config(longer)).values["step"] == 30
    assert after(20) == pytest.approx([LAST] * 10)
    with pytest.raises(UserError, match="different config") as refused:
        train(load_run_config(["c.py", "--max_iters=30"]))
    assert "extend: 'stay' there, None now" in refused.value.why


def test_leaving_the_way_out_in_the_middle_would_raise_it_as_well(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(*WORDS, "--eval_interval=10") == 0
    assert go(*FURTHER, "--extend=stay") == 0
    shutil.rmtree(Path("out/checkpoints/step-00000040"))
    capsys.readouterr()
    plain = ["--out_dir=out", "--init_from=resume", "--lr_decay_iters=40", "--extend=auto"]
    assert go(*plain) == 2
    shown = capsys.readouterr().err
    assert "without --extend=stay the learning rate would rise from 1.1e-03 to 2.5e-03 (×2.3)" in shown
    assert go(*plain[:-1], "--extend=stay") == 0
    assert after(20) == pytest.approx([LAST] * 20)


def test_an_extension_is_extended(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each begins where the one before ends; what it was to do is asked anew."""
    assert go(*WORDS) == 0
    assert go(*FURTHER, "--extend=rewarm", "--extend_lr=6e-3") == 0
    until_40 = logged()
    capsys.readouterr()
    further = ["--out_dir=out", "--init_from=resume", "--max_iters=60", "--lr_decay_iters=60"]
    assert go(*further) == 2
    assert "would raise the learning rate" in capsys.readouterr().err
    assert go("--out_dir=out", "--max_iters=60", "--extend=decay") == 0
    last = 1e-3 + 0.5 * (1 + math.cos(math.pi * 17 / 18)) * 5e-3
    assert after(40) == pytest.approx([last] * 16 + [last * left / 4 for left in (4, 3, 2, 1)])
    assert {step: rate for step, rate in logged().items() if step < 40} == until_40
    config = RunDirectory("out").read_config()
    assert config is not None and [shown_rate(s, config) for s in range(60)] == list(logged().values())
    capsys.readouterr()
    assert go("--out_dir=out", "--max_iters=80", "--extend=rewarm", "--extend_lr=1e-4") == 2
    assert "is not above the rate of the last step, 2.6e-04" in capsys.readouterr().err


def test_another_way_may_be_taken_in_the_middle(workplace: Path) -> None:
    """Level for as long as it learns, then down: the decay begins where one is."""
    assert go(*WORDS, "--eval_interval=10") == 0
    assert go(*FURTHER, "--extend=stay") == 0
    shutil.rmtree(Path("out/checkpoints/step-00000040"))
    assert go("--out_dir=out", "--init_from=resume", "--extend=decay") == 0
    assert after(20) == pytest.approx([LAST] * 19 + [LAST / 2])
    reported = "the learning rate was 1.1e-03 until there, then 1.1e-03 until step 38, then to 0 at 40"
    assert f"extended at step 30 (--extend=decay): {reported}" in notes()


def test_a_checkpoint_from_before_the_extension_first_ends_the_old_schedule(workplace: Path) -> None:
    assert go(*WORDS, "--eval_interval=10") == 0
    assert go(*FURTHER, "--extend=stay") == 0
    shutil.copytree("out", "whole")
    for checkpoint in list_checkpoints(Path("out/checkpoints")):
        shutil.rmtree(checkpoint.path)
    assert go(*WORDS, "--out_dir=other", "--max_iters=10") == 0
    shutil.copytree("other/checkpoints/step-00000010", "out/checkpoints/step-00000010")
    assert go("--out_dir=out") == 0
    assert logged() == logged("whole")
    the_20_steps_are_as_they_were()


def test_an_old_folder_without_the_new_fields_still_opens(workplace: Path) -> None:
    assert go(*WORDS, "--max_iters=10", "--lr_decay_iters=10") == 0
    for path in (Path("out/config.json"), *Path("out").glob("checkpoints/*/state.json")):
        content = json.loads(path.read_text())
        values = content["values"] if "values" in content else content["config"]
        for name in ("extend", "extend_lr", "extended"):
            del values[name]
        path.write_text(json.dumps(content))
        if path.name == "state.json":
            _described_anew(path)
    assert go("--out_dir=out", "--init_from=resume", "--max_iters=20", "--lr_decay_iters=20") == 2
    assert go("--out_dir=out", "--init_from=resume", "--max_iters=20", "--extend=stay") == 0
    assert after(10) == pytest.approx([logged()[9]] * 10)


def _described_anew(state: Path) -> None:
    from onecard.files import file_sha256

    manifest = state.with_name("manifest.json")
    content = json.loads(manifest.read_text())
    content["files"]["state.json"] = {"bytes": state.stat().st_size, "sha256": file_sha256(state)}
    manifest.write_text(json.dumps(content))


# --- what is no rise -----------------------------------------------------------------------------


def test_a_warm_up_that_is_not_over_is_no_rise(workplace: Path) -> None:
    assert go(*WORDS, "--warmup_iters=15", "--max_iters=10") == 0
    assert go("--out_dir=out", "--init_from=resume", "--max_iters=12") == 0
    assert after(10) == pytest.approx([1e-2 * 11 / 16, 1e-2 * 12 / 16])


def test_a_rate_that_the_user_sets_is_his_and_is_reported(workplace: Path) -> None:
    assert go(*WORDS, "--max_iters=10") == 0
    assert go("--out_dir=out", "--init_from=resume", "--max_iters=12", "--learning_rate=2e-2") == 0
    (reported,) = [note for note in notes() if "learning rate rises" in note]
    assert (
        "(×" in reported and "at step 10" in reported and "learning_rate is 0.02 now, 0.01 before" in reported
    )
    assert go("--out_dir=out", "--init_from=resume", "--max_iters=13", "--learning_rate=1e-2") == 0
    assert any("the learning rate falls from" in note for note in notes())


def test_with_a_rate_set_anew_the_length_still_must_not_raise_it(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its end the run is at min_lr: not the new rate but the new length makes it rise there."""
    assert go(*WORDS) == 0
    assert go(*FURTHER, "--lr_decay_iters=40", "--learning_rate=2e-2") == 2
    assert "would raise the learning rate" in capsys.readouterr().err
    assert go(*FURTHER, "--extend=stay", "--learning_rate=2e-2") == 0
    assert after(20) == pytest.approx([2 * LAST] * 20)  # the same part of the rate that holds now


def test_a_horizon_in_tokens_is_as_much_a_rise(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in WORDS if not word.startswith(("--max_iters", "--lr_decay", "--warmup"))]
    assert go(*words, "--tokens=1000") == 0
    assert go("--out_dir=out", "--init_from=resume", "--tokens=2000") == 2
    assert "--max_iters=16 would raise" in capsys.readouterr().err
    assert go("--out_dir=out", "--tokens=2000", "--extend=stay") == 0
    assert len({round(rate, 12) for rate in after(7)}) == 1


# --- what cannot be extended ---------------------------------------------------------------------


def test_there_must_be_something_to_extend(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(*WORDS, "--extend=stay") == 2
    assert "this is a new one" in capsys.readouterr().err
    assert not Path("out").exists()
    assert go(*WORDS) == 0
    for words in (
        ["--extend=stay"],
        ["--extend=stay", "--max_iters=10"],
        ["--extend=decay", "--max_iters=20"],
    ):
        assert go("--out_dir=out", "--init_from=resume", *words) == 2
        shown = capsys.readouterr().err
        assert "has nothing to extend" in shown and f"--max_iters=40 {words[0]}" in shown
    assert go(*WORDS, "--init_from=./out", "--out_dir=second", "--extend=stay") == 2
    assert not Path("second").exists()


def test_what_a_finished_run_prints_works_when_pasted(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(*WORDS) == 0
    for end in (40, 80):
        assert go("--out_dir=out") == 0
        *_, further = re.findall("to train further: onecard (.*)", capsys.readouterr().out)
        assert further == f"train --out_dir=out --init_from=resume --max_iters={end} --extend=stay"
        assert main(shlex.split(further)) == 0
    assert after(20) == pytest.approx([LAST] * 60)


def test_plan_answers_for_an_extension(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert go(*WORDS) == 0
    capsys.readouterr()
    words = ["plan", "out", "--max_iters=40", "--extend=stay", "--gpu=RTX 4070"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "20 steps" in shown.out and "lr_decay_iters" not in shown.err


def test_nanogpts_checkpoint_has_a_schedule_too(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was saved at iteration 30 of 60, by the schedule in its config."""
    fixture = Path(__file__).parent.parent / "fixtures" / "nanogpt" / "ckpt.pt"
    write_bins(workplace / "data" / "twenty", train=4_000, val=800, vocab=21)
    Path("out").mkdir()
    Path("out/ckpt.pt").write_bytes(fixture.read_bytes())
    words = [*WORDS, "--dataset=twenty", "--init_from=resume", "--max_iters=90"]
    assert go(*words, "--lr_decay_iters=90") == 2
    assert "would raise the learning rate from 6.3e-03 to 8e-03 (×1.3) at step 30" in capsys.readouterr().err
    last = 1e-3 + 0.5 * (1 + math.cos(math.pi * 25 / 56)) * 9e-3
    assert go(*words, "--max_iters=40", "--extend=stay") == 0
    assert after(30) == pytest.approx([last] * 10)


@pytest.mark.parametrize("way", ["stay", "decay"])
def test_a_constant_rate_may_be_extended_too(workplace: Path, way: str) -> None:
    assert go(*WORDS, "--decay_lr=False", "--max_iters=10") == 0
    assert go("--out_dir=out", "--init_from=resume", "--max_iters=20", f"--extend={way}") == 0
    expected = [1e-2] * 10 if way == "stay" else [1e-2] * 9 + [5e-3]
    assert after(10) == pytest.approx(expected)
