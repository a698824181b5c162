"""The doors: exit codes, messages for people, and nanoGPT's two commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import onecard
from onecard import cli
from onecard.cli.configs import config_of_sample
from onecard.cli.verbs import NOT_YET, VERBS
from onecard.config.knobs import Config, knobs, load_config
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Answer:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str

    def is_wrong_use(self) -> bool:
        """Exit code 2, `error:` first and `hint:` further on, both on stderr, and no traceback."""
        lines = self.err.splitlines()
        told = lines[0].startswith("error: ") and any(line.startswith("hint: ") for line in lines)
        return self.code == 2 and told and self.out == "" and "Traceback" not in self.err


Command = Callable[..., Answer]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    """`onecard ARGUMENTS` in this process."""

    def command(*arguments: str) -> Answer:
        code = cli.main(arguments)
        return Answer(code, *capsys.readouterr())

    return command


def in_a_process(*command: str) -> Answer:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=60
    )
    return Answer(result.returncode, result.stdout, result.stderr)


def processor_seconds_of_children() -> float:
    """What processes that have ended have computed for; how long they waited for others is not in it."""
    times = os.times()
    return times.children_user + times.children_system


def test_threads_do_not_wait_by_spinning_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch is imported, which is when its OpenMP looks."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)  # commands that ran in this process have set one
    program = (
        "import os, sys; from onecard import cli; cli.main(['gpus', 'H200']); "
        "assert 'torch' not in sys.modules; print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    assert in_a_process("-c", program).out.splitlines()[-1] == "1000"
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        said = f"import os; os.environ['{name}'] = 'active'; " + program
        assert in_a_process("-c", said).out.splitlines()[-1] == ("active" if "SPIN" in name else "None")


# --- help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_goes_to_stdout_and_names_every_verb(run: Command, word: str) -> None:
    answer = run(word)
    assert (answer.code, answer.err) == (0, "")
    assert {"prepare", "train", "sample", "export", "gpus", "bench"} <= set(VERBS)
    assert [verb for verb in VERBS if f"onecard {verb} " not in answer.out] == []


def test_no_arguments_show_the_help_and_count_as_wrong_use(run: Command) -> None:
    answer = run()
    assert answer.code == 2
    assert answer.out == run("--help").out


CONFIGS = [("plan", RunConfig), ("train", RunConfig), ("sample", SampleConfig)]


def flags_in(page: str) -> list[tuple[str, str]]:
    """(name, default) of the knobs on a page."""
    return re.findall(r"^  --(\w+)=(\S+)", page, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("verb", "cls"), [("plan", RunConfig), ("train", RunConfig), ("sample", SampleConfig)]
)
def test_all_knobs_are_listed_once_with_their_defaults(run: Command, verb: str, cls: type[Config]) -> None:
    answer = run(verb, "--n_layer=many", "--help-all")
    assert (answer.code, answer.err) == (0, "")
    expected = {f.name: "auto" if f.default is None else repr(f.default) for f in knobs(cls)}
    assert dict(flags_in(answer.out)) == expected
    assert len(flags_in(answer.out)) == len(expected)


@pytest.mark.parametrize(
    ("verb", "cls"), [("plan", RunConfig), ("train", RunConfig), ("sample", SampleConfig)]
)
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_has_the_knobs_that_people_use_and_says_how_many_more_there_are(
    run: Command, verb: str, cls: type[Config], word: str
) -> None:
    answer = run(verb, "--n_layer=many", word)
    shown = [name for name, _ in flags_in(answer.out)]
    assert (answer.code, answer.err) == (0, "")
    assert shown == [f.name for f in knobs(cls) if f.metadata["common"]]
    assert len(shown) <= 15
    assert f"{len(knobs(cls)) - len(shown)} more: onecard {verb} --help-all" in answer.out


KNOB_GROUPS = [
    "model",
    "batch and horizon",
    "speed and memory",
    "optimizer",
    "schedule",
    "data",
    "output",
    "other",
]


@pytest.mark.parametrize(
    ("verb", "own"),
    [
        ("plan", ["the card", "what to answer", "money"]),
        ("train", ["a job that is running", "options"]),
    ],
)
def test_all_help_goes_from_what_is_asked_first_to_what_is_asked_last(
    run: Command, verb: str, own: list[str]
) -> None:
    out = run(verb, "--help-all").out
    assert re.findall(r"^([^\s-][^:\n]*):$", out, flags=re.MULTILINE) == [*own, *KNOB_GROUPS]
    groups = dict(re.findall(r"^([^\s-][^:\n]*):\n((?:  .*\n?)+)", out, flags=re.MULTILINE))
    assert {"n_layer", "depth", "vocab_size"} <= set(re.findall(r"--(\w+)", groups["model"]))
    assert {"batch_size", "block_size", "tokens"} <= set(re.findall(r"--(\w+)", groups["batch and horizon"]))
    memory = set(re.findall(r"--(\w+)", groups["speed and memory"]))
    assert {"recompute", "offload", "vram_limit", "compile", "dtype"} <= memory


@pytest.mark.parametrize("name", VERBS)
def test_every_option_of_a_verb_is_on_its_page_with_what_it_does(run: Command, name: str) -> None:
    verb = VERBS[name]
    answer = run(name, "--help")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"onecard {name} {verb.usage}")
    for field in knobs(verb.options):
        shown = f"  --{field.name.rstrip('_').replace('_', '-')}"
        assert re.search(rf"^{re.escape(shown)}( [A-Z,.]+)?\s+\S", answer.out, flags=re.MULTILINE), shown
    words = " ".join(answer.out.split())
    assert [text for _, text in verb.words if " ".join(text.split()) not in words] == []


@pytest.mark.parametrize(
    "words", [[], *([verb, each] for verb in VERBS for each in ("--help", "--help-all"))]
)
@pytest.mark.parametrize("language", ["en", "de", "es"])
def test_help_fits_a_terminal_of_80_columns(
    run: Command, words: list[str], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONECARD_LANG", language)
    monkeypatch.setenv("COLUMNS", "1000")
    whole = run(*words).out.split()
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*words).out
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert shown.split() == whole, "nothing is lost, and no word is broken"


def test_help_is_instant() -> None:
    seconds = []
    for _ in range(3):
        started = processor_seconds_of_children()
        code = "import sys; from onecard.cli import main; main(['plan', '--help']); " \
               "sys.exit('torch' in sys.modules or 'rich' in sys.modules)"  # fmt: skip
        assert in_a_process("-c", code).code == 0
        seconds.append(processor_seconds_of_children() - started)
    assert min(seconds) < 0.5


def test_the_version_is_the_packages(run: Command) -> None:
    assert run("--version") == Answer(0, f"{onecard.__version__}\n", "")


def test_the_cards_are_given_as_json_to_programs(run: Command) -> None:
    answer = run("gpus", "4070", "--json")
    assert (answer.code, answer.err) == (0, "")
    assert json.loads(answer.out)


# --- wrong use ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["--foo"],
        [""],
        ["gpus", "--jsn"],
        ["gpus", "4070", "4080"],
        ["gpus", "no such card"],
        ["prepare"],
        ["prepare", "x", "--val_fraction=some"],
        ["prepare", "x", "--tokenizer=words"],
        ["export"],
        ["export", "out"],
        ["export", "out", "target", "--to=elsewhere"],
        ["train", "--n_layr=3"],
        ["train", "--n_layer"],
        ["train", "--"],
        ["train", "no_such_config.py"],
        ["train", "--n_embd=100", "--n_head=3"],
        ["train", "--device=tpu"],
        ["train", "--init_from=nowhere"],
        ["sample", "--n_layer=3"],
        ["sample", "--init_from=scratch"],
    ],
)
def test_wrong_use_is_told_with_a_hint_and_ends_with_two(
    run: Command, arguments: list[str], tmp_path: Path
) -> None:
    answer = run(*arguments)
    assert answer.is_wrong_use(), answer
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_verb_is_answered_with_the_one_meant(run: Command) -> None:
    assert "did you mean train?" in run("trian").err
    assert "did you mean gpus?" in run("gpu").err


@pytest.mark.parametrize("verb", NOT_YET)
def test_a_verb_that_is_to_come_says_so(run: Command, verb: str) -> None:
    answer = run(verb, "out", "--anything")
    assert answer.is_wrong_use()
    assert answer.err.startswith(f"error: onecard {verb} is not here yet\n")
    assert verb not in VERBS


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["plan", "--compair"], "did you mean --compare?"),
        (["plan", "--hostram=32"], "did you mean --host-ram?"),
        (["plan", "--n_layr=3"], "did you mean n_layer or min_lr?"),
        (["prepare", "x", "--tokenzier=byte"], "did you mean --tokenizer?"),
        (["train", "--learning_rate=0,001"], "--learning_rate=0.001"),
        (["plan", "--price", "0,30"], "--price=0.30"),
    ],
)
def test_a_slip_is_answered_with_what_was_meant(run: Command, words: list[str], hint: str) -> None:
    answer = run(*words)
    assert answer.is_wrong_use(), answer
    assert f"hint: {hint}" in answer.err


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"), ("BF16", "bfloat16")],
)
def test_types_may_be_written_short(spelling: str, dtype: str) -> None:
    assert load_config(RunConfig, [f"--dtype={spelling}"]).dtype == dtype
    assert load_config(RunConfig, ["--master_weights=bfloat16"]).master_weights == "bf16"


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["out-x"], ["--out_dir=out-x"]),
        (["out-x", "Hello there"], ["--out_dir=out-x", "--start=Hello there"]),
        (["out-x", "--top_k", "3", "Hello"], ["--out_dir=out-x", "--top_k", "3", "--start=Hello"]),
        (["config/x.py", "--start=Hi"], ["config/x.py", "--start=Hi"]),
        ([], []),
        (["Once upon a time"], ["--start=Once upon a time"]),
        (["--out_dir=out-x", "Hello"], ["--out_dir=out-x", "--start=Hello"]),
        (["--out_dir", "out-x", "Hello"], ["--out_dir", "out-x", "--start=Hello"]),
        (["out-x", "out-x"], ["--out_dir=out-x", "--start=out-x"]),
        (["out-x", "--device", "cpu", "cpu"], ["--out_dir=out-x", "--device", "cpu", "--start=cpu"]),
        (["out-x", "- one item"], ["--out_dir=out-x", "--start=- one item"]),
        (["out-x", "open a.py"], ["--out_dir=out-x", "--start=open a.py"]),
        (["out-x", "two\nlines"], ["--out_dir=out-x", "--start=two\nlines"]),
        (["out-x", ""], ["--out_dir=out-x", "--start="]),
    ],
)
def test_sample_takes_a_run_and_a_text(words: list[str], flags: list[str]) -> None:
    assert config_of_sample(words) == flags


def test_a_text_that_begins_with_a_dash_reaches_sample(run: Command) -> None:
    assert run("sample", "out-x", "- one item").err.startswith("error: there is no run folder out-x\n")
    assert "did you mean start?" in run("sample", "out-x", "--strat").err


def test_two_texts_and_a_text_before_its_run_are_refused(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert "given twice" in run("sample", "mine", "Hello", "--start=Bye").err
    assert run("sample", "Hello there", "mine").err == (
        "error: the run comes first, then the text\nhint: onecard sample mine 'Hello there'\n"
    )


def test_a_run_that_is_missing_names_those_there_are(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("older/checkpoints", "newer/checkpoints", "deep/theirs/checkpoints")):
        (tmp_path / name).mkdir(parents=True)
        os.utime(tmp_path / name, (age, age))
    assert run("sample", "Hello").err == "error: there is no run folder Hello\nhint: runs: newer, older\n"
    assert "runs: deep/theirs, newer, older\n" in run("sample", "deep/mine").err
    assert "runs: older, newer\n" in run("export", "oldr", "target").err, "the one that was meant first"


def test_a_range_error_names_the_limit(run: Command) -> None:
    answer = run("train", "--n_layer=10**9")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "error: n_layer cannot be 1000000000 (command line)\n  the most is 1024\n"


def test_one_process_may_run_several_verbs(run: Command) -> None:
    assert [run("gpus", "4070").code, run("gpus", "4080").code, run("--version").code] == [0, 0, 0]


@pytest.mark.parametrize("verb", ["train", "sample"])
def test_a_card_asked_for_and_missing_is_an_error_and_no_fall_back(run: Command, verb: str) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a card that torch can use")
    answer = run(verb, "--device=cuda", "--init_from=gpt2")
    assert answer.code == 2
    assert answer.err.startswith("error: ")
    assert "cuda" in answer.err
    assert "--device=cpu" in answer.err


# --- how a command ends -------------------------------------------------------------------------


def replace_train(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(options: object, words: Sequence[str]) -> int:
        raise error

    monkeypatch.setitem(VERBS, "train", replace(VERBS["train"], run=fail))


@pytest.mark.parametrize("exit_code", [1, 2])
def test_a_user_error_decides_the_exit_code(
    run: Command, monkeypatch: pytest.MonkeyPatch, exit_code: int
) -> None:
    replace_train(monkeypatch, UserError("what", "why\nmore", "do this\nor that", exit_code=exit_code))
    answer = run("train")
    assert answer == Answer(exit_code, "", "error: what\n  why\n  more\nhint: do this\n      or that\n")


def test_ctrl_c_ends_with_130_and_no_traceback(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_train(monkeypatch, KeyboardInterrupt())
    assert run("train") == Answer(130, "", "interrupted\n")


def test_a_bug_in_onecard_keeps_its_traceback(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_train(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        run("train")


def test_the_exit_code_reaches_the_shell() -> None:
    assert in_a_process("-m", "onecard", "--version") == Answer(0, f"{onecard.__version__}\n", "")
    assert in_a_process("-m", "onecard", "trian").is_wrong_use()


# --- nanoGPT's two doors ------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["train", "sample"])
def test_a_door_has_two_lines_and_leads_to_its_verb(run: Command, verb: str) -> None:
    door = ROOT / f"{verb}.py"
    assert len([line for line in door.read_text(encoding="utf-8").splitlines() if line]) == 2
    assert in_a_process(str(door), "--help") == run(verb, "--help")
    assert in_a_process(str(door), "--n_layr=3", "--top_q=1") == run(verb, "--n_layr=3", "--top_q=1")


def test_the_training_door_refuses_a_billion_layers_at_once() -> None:
    started = processor_seconds_of_children()
    answer = in_a_process(str(ROOT / "train.py"), "--n_layer=10**9")
    assert answer.code == 2
    assert answer.err.startswith("error: n_layer cannot be 1000000000")
    assert "Traceback" not in answer.err
    assert processor_seconds_of_children() - started < 1.5  # a tenth of a second by itself
