"""What the knobs mean: types, ranges, what contradicts what, and where every value came from."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onecard.config.knobs import Config, from_values, knobs, load_config
from onecard.config.run import RunConfig
from onecard.config.sample import SampleConfig
from onecard.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
FUZZ = settings(max_examples=200, deadline=None)
FIELDS = {f.name: f for f in knobs(RunConfig)}
SAMPLE_NAMES = frozenset(f.name for f in knobs(SampleConfig))

# nanoGPT's knobs as its train.py and sample.py set them.
NANOGPT_TRAIN = {
    "out_dir": "out", "eval_interval": 2000, "log_interval": 1, "eval_iters": 200, "eval_only": False,
    "always_save_checkpoint": True, "wandb_log": False, "wandb_project": "owt", "wandb_run_name": "gpt2",
    "dataset": "openwebtext", "gradient_accumulation_steps": 40, "batch_size": 12, "block_size": 1024,
    "n_layer": 12, "n_head": 12, "n_embd": 768, "dropout": 0.0, "bias": False, "learning_rate": 6e-4,
    "max_iters": 600_000, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0,
    "decay_lr": True, "warmup_iters": 2000, "lr_decay_iters": 600_000, "min_lr": 6e-5, "backend": "nccl",
    "compile": True,
}  # fmt: skip
NANOGPT_SAMPLE = {
    "init_from": "resume", "out_dir": "out", "start": "\n", "num_samples": 10, "max_new_tokens": 500,
    "temperature": 0.8, "top_k": 200, "seed": 1337, "compile": False,
}  # fmt: skip
# onecard chooses these itself where nanoGPT writes 'cuda', 'bfloat16' and 'scratch'.
OWN_DEFAULTS = {"device": "auto", "dtype": None, "init_from": "auto"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty working folder: no word of an argument list names a file by chance."""
    path = tmp_path_factory.mktemp("work")
    with contextlib.chdir(path):
        yield path


def train(*arguments: str) -> RunConfig:
    return load_config(RunConfig, arguments, also_known=SAMPLE_NAMES)


def refusal(*arguments: str, cls: type[Config] = RunConfig) -> UserError:
    with pytest.raises(UserError) as caught:
        load_config(cls, arguments)
    return caught.value


def config_file(folder: Path, text: str, name: str = "config.py") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- nanoGPT's users ----------------------------------------------------------------------------


def test_every_knob_of_nanogpts_training_has_its_default() -> None:
    values = train().values()
    assert {name: values[name] for name in NANOGPT_TRAIN} == NANOGPT_TRAIN
    assert {name: values[name] for name in OWN_DEFAULTS} == OWN_DEFAULTS


def test_every_knob_of_nanogpts_sampling_has_its_default() -> None:
    values = load_config(SampleConfig, []).values()
    assert {name: values[name] for name in NANOGPT_SAMPLE} == NANOGPT_SAMPLE
    assert (values["device"], values["dtype"]) == ("auto", None)


def test_values_written_for_nanogpt_are_taken_as_they_are() -> None:
    config = train("--device=cuda", "--dtype=bfloat16", "--init_from=scratch")
    assert (config.device, config.dtype, config.init_from) == ("cuda", "bfloat16", "scratch")


def test_a_config_in_the_manner_of_nanogpts_pretraining_loads(tmp_path: Path) -> None:
    text = """\
# a comment, and a command that one might run:
# $ torchrun --standalone --nproc_per_node=8 train.py config/this.py

wandb_log = True
wandb_run_name='no-space-124M'

# a sum in a comment: 12 * 1024 * 5 * 8
batch_size = 12
gradient_accumulation_steps = 5 * 8
max_iters = 300000 # a comment behind
weight_decay = 1e-1
"""
    config = train(config_file(tmp_path, text))
    assert config.wandb_log is True
    assert config.wandb_run_name == "no-space-124M"
    assert config.gradient_accumulation_steps == 40
    assert config.max_iters == 300_000
    assert config.weight_decay == 0.1
    assert config.tokens_per_step == 491_520


def test_a_config_in_the_manner_of_nanogpts_finetuning_loads(tmp_path: Path) -> None:
    text = """\
import time

out_dir = 'out-tuned'
wandb_run_name = 'ft-' + str(time.time())
init_from = 'gpt2-xl'
always_save_checkpoint = False
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20
learning_rate = 3e-5
decay_lr = False
"""
    config = train(config_file(tmp_path, text))
    assert re.fullmatch(r"ft-\d+\.\d+", config.wandb_run_name)
    assert (config.init_from, config.learning_rate, config.decay_lr) == ("gpt2-xl", 3e-5, False)
    assert any("import ignored" in note for note in config.notes)


def test_a_small_run_on_the_cpu_overrides_its_config_by_flags(tmp_path: Path) -> None:
    text = """\
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
# device = 'cpu'
"""
    flags = "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 "
    flags += "--n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
    config = train(config_file(tmp_path, text), *flags.split())
    assert (config.device, config.compile, config.dropout, config.beta2) == ("cpu", False, 0.0, 0.99)
    assert (config.n_layer, config.n_head, config.n_embd) == (4, 4, 128)
    assert (config.max_iters, config.lr_decay_iters, config.warmup_iters) == (2000, 2000, 100)


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.py")), ids=lambda path: path.name)
def test_the_configs_that_come_with_onecard_load_for_training_and_sampling(path: Path) -> None:
    config = train(str(path))
    assert config.origins
    train_names = frozenset(FIELDS)
    assert load_config(SampleConfig, [str(path)], also_known=train_names).out_dir == config.out_dir


# --- ways to say it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [["--batch_size=8"], ["--batch-size=8"], ["--batch_size", "8"], ["--batch-size", "8"], ["-batch_size=8"]],
)
def test_a_flag_may_be_joined_or_apart_with_dashes_or_underscores(words: list[str]) -> None:
    assert train(*words).batch_size == 8


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--compile"], True),
        (["--compile=True"], True),
        (["--compile", "on"], True),
        (["--compile=1"], True),
        (["--compile", "1"], True),
        (["--compile=yes"], True),
        (["--compile=False"], False),
        (["--compile=false"], False),
        (["--compile", "False"], False),
        (["--compile=0"], False),
        (["--compile", "0"], False),
        (["--compile=off"], False),
        (["--no-compile"], False),
        (["--no_compile"], False),
        (["--no-compile", "--compile"], True),
    ],
)
def test_a_boolean_may_be_said_in_any_usual_way(words: list[str], expected: bool) -> None:
    assert train("--compile=False" if expected else "--compile=True", *words).compile is expected


def test_a_bare_boolean_does_not_swallow_the_config_behind_it(tmp_path: Path) -> None:
    path = config_file(tmp_path, "n_layer = 3\ncompile = False")
    config = train("--eval_only", path)
    assert (config.eval_only, config.n_layer, config.compile) == (True, 3, False)
    config = train("--no-decay_lr", path)
    assert (config.decay_lr, config.n_layer) == (False, 3)


@pytest.mark.parametrize(
    "words", [["--learning_rate", "-1"], ["--learning_rate=-1"], ["--learning-rate", "-1e-3"]]
)
def test_a_negative_number_is_a_value_and_the_error_is_about_it(words: list[str]) -> None:
    error = refusal(*words)
    assert error.what.startswith("learning_rate cannot be -")
    assert error.why == "the least is 0.0"


def test_a_flag_without_its_value_says_so() -> None:
    assert refusal("--n_layer").what == "--n_layer needs a value"
    assert refusal("--n_layer", "--compile").what == "--n_layer needs a value"


def test_what_comes_later_overrides_what_came_earlier(tmp_path: Path) -> None:
    one = config_file(tmp_path, "n_layer = 3\nn_embd = 96\nout_dir = 'one'", "one.py")
    two = config_file(tmp_path, "n_layer = 4\nout_dir = out_dir + '-two'", "two.py")
    config = train(one, two)
    assert (config.n_layer, config.n_embd, config.out_dir) == (4, 96, "one-two")
    assert train("--n_layer=5", one, two).n_layer == 4
    assert train(one, "--n_layer=5", two).n_layer == 4
    assert train(one, two, "--n_layer=5").n_layer == 5
    assert train("--n_layer=5", "--n_layer=6").n_layer == 6
    assert train(config_file(tmp_path, "n_layer = 3\nn_layer = n_layer + 1\n")).n_layer == 4


def test_a_file_may_refer_to_any_knobs_default(tmp_path: Path) -> None:
    path = config_file(
        tmp_path, "wandb_run_name = out_dir + '-x'\nlr_decay_iters = max_iters // 2\nseed = seed + 1\n"
    )
    config = train(path)
    assert (config.wandb_run_name, config.lr_decay_iters, config.seed) == ("out-x", 300_000, 1338)
    assert train("--out_dir=mine", path).wandb_run_name == "mine-x"


def test_a_helper_in_a_file_is_no_knob_but_a_misspelling_is_an_error(tmp_path: Path) -> None:
    assert train(config_file(tmp_path, "width = 64\nn_embd = 12 * width\n")).n_embd == 768
    path = config_file(tmp_path, "\nn_layr = 3\n")
    assert refusal(path).what == f"there is no knob called 'n_layr' ({path}:2)"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("n_layr", "n_layer"),
        ("batchsize", "batch_size"),
        ("learningrate", "learning_rate"),
        ("gradient_accumulation", "gradient_accumulation_steps"),
        ("no_compil", "compile"),
        ("max_iter", "max_iters"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_one_meant(typed: str, meant: str) -> None:
    error = refusal(f"--{typed}=3")
    assert error.what == f"there is no knob called '{typed}' (command line)"
    assert error.hint.startswith("did you mean")
    assert meant in error.hint


def test_a_name_like_no_other_is_answered_with_where_they_are_listed() -> None:
    assert "--help" in refusal("--xyzzyplugh=3").hint


def test_knobs_of_sampling_may_stand_in_a_file_for_training_but_not_in_its_flags(tmp_path: Path) -> None:
    path = config_file(tmp_path, "n_layer = 3\ntop_k = 50\ntemperature = 0.5\n")
    assert train(path).n_layer == 3
    with pytest.raises(UserError, match="top_k"):
        train("--top_k=50")
    config = load_config(SampleConfig, [path], also_known=frozenset(FIELDS))
    assert (config.top_k, config.temperature) == (50, 0.5)


# --- where values came from ---------------------------------------------------------------------


def test_only_what_the_user_set_counts_as_set(tmp_path: Path) -> None:
    path = config_file(tmp_path, "# first line\nn_layer = 12\n")
    config = train(path, "--batch_size=12", "--no-bias")
    assert config.origins == {"n_layer": f"{path}:2", "batch_size": "command line", "bias": "command line"}
    assert config.is_set("n_layer")  # though the value is the default
    assert not config.is_set("n_head")
    assert train() == config  # values compare; where they came from does not


def test_the_origin_is_that_of_the_value_in_force(tmp_path: Path) -> None:
    path = config_file(tmp_path, "n_layer = 3\n")
    assert train("--n_layer=4", path).origins["n_layer"] == f"{path}:1"
    assert train(path, "--n_layer=4").origins["n_layer"] == "command line"


def test_a_saved_config_is_rebuilt_without_knobs_it_does_not_know() -> None:
    config = train("--n_layer=3")
    values = {**config.values(), "knob_of_the_future": 1}
    rebuilt = from_values(RunConfig, values, config.origins)
    assert rebuilt == config
    assert rebuilt.is_set("n_layer")


# --- types and ranges ---------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [RunConfig, SampleConfig])
def test_every_default_is_in_its_own_range_and_can_be_written_out(cls: type[Config], tmp_path: Path) -> None:
    for field in knobs(cls):
        path = config_file(tmp_path, f"{field.name} = {field.default!r}\n")
        for words in ([path], [f"--{field.name}={field.default!r}"]):
            config = load_config(cls, words)
            value = getattr(config, field.name)
            assert value == field.default
            assert type(value) is type(field.default)
            assert config.is_set(field.name)


@pytest.mark.parametrize(
    ("word", "takes"),
    [
        ("--n_layer=3.5", "a whole number"),
        ("--n_layer=many", "a whole number"),
        ("--n_layer=", "a whole number"),
        ("--n_layer=True", "a whole number"),
        ("--n_layer=1e999", "a whole number"),
        ("--n_layer=None", "a whole number"),
        ("--n_layer=9**9**9", "a whole number"),
        ("--learning_rate=fast", "a number"),
        ("--learning_rate=False", "a number"),
        ("--learning_rate=1e999-1e999", "a number"),
        ("--compile=maybe", "True or False"),
        ("--compile=2", "True or False"),
        ("--tokens=3.2X", "a number of tokens"),
        ("--tokens=B", "a number of tokens"),
        ("--tokens=1.5", "a number of tokens"),
        ("--tokens=" + "9" * 400 + "T", "a number of tokens"),
    ],
)
def test_a_value_of_the_wrong_type_is_told_what_the_knob_takes(word: str, takes: str) -> None:
    name = word.removeprefix("--").partition("=")[0]
    error = refusal(word)
    assert error.what.startswith(f"{name} takes {takes}")
    assert error.what.endswith("(command line)")
    assert len(error.what) < 200


@pytest.mark.parametrize(
    ("line", "takes"),
    [("out_dir = 7", "text"), ("learning_rate = '1e-3'", "a number"), ("n_head = 2.5", "a whole")],
)
def test_a_wrong_type_in_a_file_names_its_line(tmp_path: Path, line: str, takes: str) -> None:
    path = config_file(tmp_path, f"\n{line}\n")
    error = refusal(path)
    assert f" takes {takes}" in error.what
    assert error.what.endswith(f"({path}:2)")


def test_whole_floats_are_whole_numbers_and_whole_numbers_are_floats(tmp_path: Path) -> None:
    config = train(
        config_file(tmp_path, "n_head = n_embd / 64\ngrad_clip = 1\nmax_iters = 6e5"), "--seed=1e3"
    )
    assert [repr(v) for v in (config.n_head, config.grad_clip, config.max_iters, config.seed)] == [
        "12",
        "1.0",
        "600000",
        "1000",
    ]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("--out_dir=7", "7"),
        ("--out_dir='a b'", "a b"),
        ("--out_dir=None", "None"),
        ("--out_dir=2024-01-01", "2024-01-01"),
        ("--out_dir=a=b", "a=b"),
        ("--out_dir=C:\\x", "C:\\x"),
    ],
)
def test_text_on_the_command_line_needs_no_quotes(word: str, text: str) -> None:
    assert train(word).out_dir == text


@pytest.mark.parametrize("word", ["auto", "None", "'auto'"])
@pytest.mark.parametrize("name", ["dtype", "vocab_size", "tokens"])
def test_auto_and_none_leave_the_choice_to_onecard(name: str, word: str) -> None:
    assert getattr(train(f"--{name}={word}"), name) is None


def test_numbers_beyond_a_knobs_range_are_told_the_limit_exactly() -> None:
    for field in knobs(RunConfig):
        if field.metadata["kind"] not in ("int", "float"):
            continue
        for limit, beyond, word in (
            (field.metadata["low"], -1, "least"),
            (field.metadata["high"], 1, "most"),
        ):
            if limit is None:
                continue
            value = limit + beyond
            error = refusal(f"--{field.name}={value!r}")
            if isinstance(value, int) and abs(value) > 10**18:
                continue  # too large to be read as a number at all
            assert error.what == f"{field.name} cannot be {value!r} (command line)"
            assert error.why == f"the {word} is {limit}"


def test_the_message_about_a_limit_shows_the_difference() -> None:
    error = refusal("--batch_size=1048577")
    assert ("1048577" in error.what, "1048576" in error.why) == (True, True)
    assert "0.9999995" in refusal("--beta1=0.9999995").what


@pytest.mark.parametrize("word", ["--max_iters=1e300", "--warmup_iters=1e19", "--tokens=9999999999T"])
def test_whole_numbers_have_a_limit_even_if_the_knob_names_none(word: str) -> None:
    error = refusal(word)
    assert "cannot be" in error.what
    assert error.why == f"the most is {10**18}"


def test_a_billion_layers_are_refused_at_once() -> None:
    started = time.process_time()
    error = refusal("--n_layer=10**9")
    assert time.process_time() - started < 1.0
    assert error.what == "n_layer cannot be 1000000000 (command line)"
    assert error.why == "the most is 1024"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_three_dtypes_are_taken(dtype: str) -> None:
    assert train(f"--dtype={dtype}").dtype == dtype


@pytest.mark.parametrize(
    ("typed", "meant"), [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("FP32", "float32")]
)
def test_dtypes_may_be_written_short(typed: str, meant: str) -> None:
    assert train(f"--dtype={typed}").dtype == meant


@pytest.mark.parametrize(("typed", "meant"), [("blfoat16", "bfloat16"), ("fp8", None)])
def test_another_dtype_is_answered_with_the_choices(typed: str, meant: str | None) -> None:
    error = refusal(f"--dtype={typed}")
    assert error.what == f"dtype cannot be '{typed}' (command line)"
    assert error.why == "it is one of: float32, bfloat16, float16, auto"
    assert error.hint == ("" if meant is None else f"did you mean {meant}?")


@pytest.mark.parametrize(
    "value",
    ["auto", "scratch", "resume", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "./run", "a/b", "ckpt.pt"],
)
def test_init_from_takes_its_words_and_paths(value: str) -> None:
    assert train(f"--init_from={value}").init_from == value


def test_init_from_with_another_word_is_answered_with_what_it_may_be() -> None:
    assert refusal("--init_from=gpt2-medum").hint == "did you mean gpt2-medium?"
    assert refusal("--init_from=myrun").hint == "for a folder here: --init_from=./myrun"
    assert "gpt2-xl" in refusal("--init_from=myrun").why


@pytest.mark.parametrize("value", ["auto", "scratch"])
def test_there_is_nothing_to_sample_from_scratch(value: str) -> None:
    assert "nothing to sample" in refusal(f"--init_from={value}", cls=SampleConfig).what


# --- knobs that depend on each other ------------------------------------------------------------


def test_a_horizon_in_tokens_sets_the_steps_and_the_schedule_follows() -> None:
    config = train("--tokens=3.2B")
    assert config.tokens == 3_200_000_000
    assert config.max_iters == 6511  # 3.2B / 491,520 = 6510.4
    assert config.lr_decay_iters == 6511
    assert config.warmup_iters == 651
    assert not config.is_set("max_iters")


def test_a_long_horizon_keeps_the_usual_warm_up() -> None:
    config = train("--tokens=100B")
    assert (config.max_iters, config.warmup_iters) == (203_451, 2000)


def test_a_schedule_the_user_set_does_not_follow_the_horizon() -> None:
    config = train("--tokens=3.2B", "--lr_decay_iters=5000", "--warmup_iters=100")
    assert (config.max_iters, config.lr_decay_iters, config.warmup_iters) == (6511, 5000, 100)
    assert train("--tokens=3.2B", "--lr_decay_iters=5000").warmup_iters == 500


def test_the_horizon_counts_in_the_users_own_steps() -> None:
    config = train("--batch_size=2", "--gradient_accumulation_steps=3", "--block_size=5", "--tokens=301")
    assert config.tokens_per_step == 30
    assert config.max_iters == 11


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("5_000_000", 5_000_000),
        ("100M", 100_000_000),
        ("100m", 100_000_000),
        ("1.1B", 1_100_000_000),
        ("2k", 2000),
        ("0.001T", 10**9),
        ("3e9", 3 * 10**9),
        ("3 * 10**9", 3 * 10**9),
        (" 3 B ", 3 * 10**9),
    ],
)
def test_tokens_may_be_written_as_people_write_them(tmp_path: Path, text: str, tokens: int) -> None:
    assert train(f"--tokens={text}").tokens == tokens
    in_file = repr(text) if text.strip()[-1].isalpha() else text
    assert train(config_file(tmp_path, f"tokens = {in_file}")).tokens == tokens


@given(
    tokens=st.integers(1, 10**18),
    batch=st.integers(1, 64),
    steps=st.integers(1, 64),
    block=st.integers(1, 4096),
)
@FUZZ
def test_the_steps_are_the_fewest_that_reach_the_horizon(
    tokens: int, batch: int, steps: int, block: int
) -> None:
    words = [f"--batch_size={batch}", f"--gradient_accumulation_steps={steps}", f"--block_size={block}"]
    config = train(f"--tokens={tokens}", *words)
    assert (config.max_iters - 1) * batch * steps * block < tokens <= config.max_iters * batch * steps * block
    assert config.warmup_iters < config.lr_decay_iters == config.max_iters


def test_tokens_and_max_iters_together_are_an_error_that_names_both_places(tmp_path: Path) -> None:
    path = config_file(tmp_path, "max_iters = 100\ntokens = 1_000_000\n")
    error = refusal(path)
    assert error.what == "tokens and max_iters are both set"
    assert f"{path}:1" in error.why and f"{path}:2" in error.why
    assert "command line" in refusal("--tokens=1M", "--max_iters=100").why


def test_max_iters_may_stand_beside_tokens_left_at_auto() -> None:
    config = train("--tokens=auto", "--max_iters=5000", "--lr_decay_iters=5000")
    assert (config.tokens, config.max_iters) == (None, 5000)


def test_a_schedule_that_ends_far_from_the_run_gets_a_note() -> None:
    (beyond,) = train("--max_iters=5000").notes
    assert "hardly decays" in beyond
    (before,) = train("--max_iters=100000", "--lr_decay_iters=5000").notes
    assert "stays at min_lr from step 5000 on" in before
    assert not train("--max_iters=5000", "--lr_decay_iters=5000").notes
    assert not train("--max_iters=5000", "--decay_lr=False").notes


def test_a_learning_rate_that_would_rise_is_refused_and_the_hint_works() -> None:
    error = refusal("--learning_rate=1e-5")
    assert error.what == "min_lr 6e-05 is above learning_rate 1e-05"
    assert "at its default" in error.why
    assert train("--learning_rate=1e-5", error.hint.split(",")[0]).min_lr == 1e-6
    assert train("--learning_rate=1e-5", "--decay_lr=False").learning_rate == 1e-5


def test_a_warm_up_that_outlasts_the_run_gets_a_note_whose_hint_works() -> None:
    """nanoGPT runs such a config, so it runs here."""
    (note,) = train("--max_iters=20", "--lr_decay_iters=20").notes
    assert "warm-up of 2000 steps" in note
    hint = note.split("(")[1].rstrip(")")
    assert hint == "--warmup_iters=2"
    assert train("--max_iters=20", "--lr_decay_iters=20", hint).notes == ()
    assert train("--lr_decay_iters=1000").notes == ()  # without a horizon there is nothing to compare with


def test_starting_over_and_continuing_contradict_each_other() -> None:
    assert "fresh" in refusal("--fresh", "--init_from=resume").what


@given(n_embd=st.integers(1, 2**16), n_head=st.integers(1, 1024))
@FUZZ
def test_a_width_the_heads_cannot_share_is_answered_with_the_nearest_that_work(
    n_embd: int, n_head: int
) -> None:
    words = [f"--n_embd={n_embd}", f"--n_head={n_head}"]
    if n_embd % n_head == 0:
        assert train(*words).n_embd == n_embd
        return
    error = refusal(*words)
    hinted = re.fullmatch(r"(--n_embd=(\d+)) or (--n_head=(\d+)) works", error.hint)
    assert hinted is not None
    assert train(*words, hinted[1]).n_head == n_head
    assert train(*words, hinted[3]).n_embd == n_embd
    widths = (n for n in range(n_head, 2**16 + 1, n_head))
    heads = (n for n in range(1, 1025) if n_embd % n == 0)
    assert abs(int(hinted[2]) - n_embd) == min(abs(n - n_embd) for n in widths)
    assert abs(int(hinted[4]) - n_head) == min(abs(n - n_head) for n in heads)


@pytest.mark.parametrize(("n_embd", "n_head"), [(65536, 1000), (1027, 1024)])
def test_the_nearest_width_that_works_is_within_the_range(n_embd: int, n_head: int) -> None:
    words = [f"--n_embd={n_embd}", f"--n_head={n_head}"]
    for hint in re.findall(r"--\S+", refusal(*words).hint):
        train(*words, hint)


# --- properties ---------------------------------------------------------------------------------


def values_of(field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    """Any value the knob takes, by itself."""
    kind, low, high = (field.metadata[key] for key in ("kind", "low", "high"))
    if field.metadata["choices"]:
        some: st.SearchStrategy[Any] = st.sampled_from(field.metadata["choices"])
    elif field.name == "init_from":
        some = st.sampled_from(["resume", "gpt2", "gpt2-xl", "./run", "old/ckpt.pt"])
    elif kind == "bool":
        some = st.booleans()
    elif kind == "float":
        some = st.floats(low, 1e6 if high is None else high)
    elif kind == "str":
        some = st.text(max_size=30)
    else:
        some = st.integers(low, high)
    return st.none() | some if field.default is None else some


@st.composite
def valid_values(draw: st.DrawFn, cls: type[Config]) -> dict[str, Any]:
    """Values for some of the knobs that do not contradict each other."""
    fields = knobs(cls)
    chosen = draw(st.sets(st.sampled_from([f.name for f in fields])))
    values = {f.name: draw(values_of(f)) for f in fields if f.name in chosen}
    if cls is not RunConfig:
        return values
    if {"n_embd", "n_head"} & chosen:
        values["n_head"] = draw(st.integers(1, 64))
        values["n_embd"] = values["n_head"] * draw(st.integers(1, 1024))
    if {"learning_rate", "min_lr"} & chosen:
        low, high = sorted(draw(st.tuples(st.floats(0, 100), st.floats(0, 100))))
        values |= {"min_lr": low, "learning_rate": high}
    if {"warmup_iters", "lr_decay_iters", "max_iters", "tokens"} & chosen:
        values["lr_decay_iters"] = draw(st.integers(1, 10**18))
        values["warmup_iters"] = draw(st.integers(0, values["lr_decay_iters"] - 1))
    if values.get("tokens") is not None:
        values.pop("max_iters", None)
    values.pop("extend_lr", None)
    if values.get("extend") == "rewarm":
        values["extend_lr"] = draw(st.floats(1e-9, 100))
    if values.get("fresh"):
        values.pop("init_from", None)
    if values.get("total_batch_size") is not None:
        size = {name: values.get(name, 8) for name in ("batch_size", "block_size")}
        micros = draw(st.integers(1, 1000))
        values |= size | {"total_batch_size": size["batch_size"] * size["block_size"] * micros}
        values.pop("gradient_accumulation_steps", None)
    if values.get("depth") is not None or values.get("arch") == "nanochat":
        values |= {"arch": "nanochat", "depth": draw(st.integers(1, 40))}
        if "window_pattern" in values:
            values["window_pattern"] = draw(st.sampled_from(["L", "SL", "sssl"]))
        # Any of these may contradict what the depth gives.
        for name in ("dropout", "bias", "optimizer", "n_layer", "n_embd", "n_head", "batch_size",
                     "block_size", "total_batch_size"):  # fmt: skip
            values.pop(name, None)
        return values
    for name in NANOCHATS:
        values.pop(name, None)
    return values


NANOCHATS = (
    "generation", "embedding_lr", "unembedding_lr", "scalar_lr", "warmdown_ratio", "final_lr_frac",
    "window_pattern", "value_embeddings",
)  # fmt: skip


def assert_same(config: Config, values: dict[str, Any]) -> None:
    # Where nothing is the default, the word auto says it, in a knob of text too.
    unset = {field.name for field in knobs(type(config)) if field.default is None}
    values = {n: None if n in unset and v == "auto" else v for n, v in values.items()}
    nanochat = values.get("arch") == "nanochat"
    set_to = {n: repr(v) for n, v in values.items() if not (nanochat and v is None)}
    assert {name: repr(getattr(config, name)) for name in set_to} == set_to
    assert set(config.origins) == set(values)
    if nanochat:
        return  # nearly everything follows the depth
    followers = {"max_iters"} if values.get("tokens") is not None else set()
    if values.get("total_batch_size") is not None:
        followers |= {"gradient_accumulation_steps"}
    if values.get("run") is not None:
        followers |= {"wandb_log", "wandb_run_name", "wandb_project"}
    for field in knobs(type(config)):
        if field.name not in values and field.name not in followers:
            assert getattr(config, field.name) == field.default


def test_a_rewarm_and_its_peak_come_together() -> None:
    assert load_config(RunConfig, ["--extend=rewarm", "--extend_lr=3e-4"]).extend_lr == 3e-4
    for words in (["--extend=stay", "--extend_lr=3e-4"], ["--extend_lr=3e-4"]):
        with pytest.raises(UserError) as refused:
            load_config(RunConfig, words)
        assert "--extend=rewarm --extend_lr=" in refused.value.hint
    with pytest.raises(UserError, match="it is one of: stay, rewarm, decay, schedule") as refused:
        load_config(RunConfig, ["--extend=rewarn"])
    assert refused.value.hint == "did you mean rewarm?"


def test_what_onecard_writes_down_itself_is_nobodys_flag() -> None:
    with pytest.raises(UserError, match="extended"):
        load_config(RunConfig, ["--extended=[]"])
    assert "extended" not in FIELDS and RunConfig().values()["extended"] is None
    assert from_values(RunConfig, {"extended": "[]"}, {"extended": "command line"}).extended == "[]"


def test_auto_is_no_name_of_a_run(folder: Path) -> None:
    """Found by a random example of the test below, which held every text to be a name."""
    path = config_file(folder, "run = 'auto'\n")
    for words in ([path], ["--run=auto"], ["--run='auto'"], ["--run", "auto"]):
        config = load_config(RunConfig, words)
        assert_same(config, {"run": "auto"})
        assert config.run is None and not config.wandb_log


@pytest.mark.parametrize("cls", [RunConfig, SampleConfig])
@given(data=st.data())
@FUZZ
def test_valid_values_come_back_the_same_from_a_file(
    folder: Path, cls: type[Config], data: st.DataObject
) -> None:
    values = data.draw(valid_values(cls))
    path = config_file(folder, "".join(f"{name} = {value!r}\n" for name, value in values.items()))
    assert_same(load_config(cls, [path]), values)


@pytest.mark.parametrize("cls", [RunConfig, SampleConfig])
@given(data=st.data())
@FUZZ
def test_valid_values_come_back_the_same_from_the_command_line(
    cls: type[Config], data: st.DataObject
) -> None:
    values = data.draw(valid_values(cls))
    words: list[str] = []
    for name, value in values.items():
        flag = "--" + (name.replace("_", "-") if data.draw(st.booleans()) else name)
        words += [f"{flag}={value!r}"] if data.draw(st.booleans()) else [flag, repr(value)]
    assert_same(load_config(cls, words), values)


NAMES = st.sampled_from(sorted(FIELDS)) | st.text(max_size=8)
VALUES = (
    st.text(max_size=12) | st.integers().map(str) | st.floats().map(repr) | st.sampled_from(["auto", "3B"])
)
WORDS = st.one_of(
    st.text(max_size=12),
    st.builds("--{}".format, NAMES),
    st.builds("--{}={}".format, NAMES, VALUES),
    st.builds("--no-{}".format, NAMES),
)


@pytest.mark.parametrize("cls", [RunConfig, SampleConfig])
@given(words=st.lists(WORDS, max_size=6))
@FUZZ
def test_any_argument_list_is_taken_or_refused_with_a_user_error(
    folder: Path, cls: type[Config], words: list[str]
) -> None:
    with contextlib.suppress(UserError):
        config = load_config(cls, words)
        assert {type(v) for v in config.values().values()} <= {int, float, str, bool, type(None)}


LINES = st.builds("{} = {}".format, st.sampled_from(sorted(FIELDS)), VALUES | VALUES.map(repr))


@given(lines=st.lists(LINES | st.text(max_size=12), max_size=6))
@FUZZ
def test_any_lines_about_real_knobs_are_taken_or_refused_with_a_user_error(
    folder: Path, lines: list[str]
) -> None:
    with contextlib.suppress(UserError):
        train(config_file(folder, "\n".join(lines)))


# --- for --help ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "recompute"),
    [
        (["--gradient-checkpointing=1"], "block"),
        (["--gradient_checkpointing=0"], "none"),
        (["--gradient_checkpointing"], "block"),
        (["--no-gradient_checkpointing"], "none"),
    ],
)
def test_another_projects_switch_is_a_switch_like_ours(words: list[str], recompute: str) -> None:
    assert load_config(RunConfig, words).recompute == recompute


def test_numbers_too_large_and_switches_for_choices_say_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be") as refused:
        load_config(RunConfig, ["--loss_chunk=999999999999999999999999"])
    assert "too large" in str(refused.value)
    with pytest.raises(UserError, match="it is one of: none, mlp, block"):
        load_config(RunConfig, [config_file(tmp_path, "recompute = True\n")])


@pytest.mark.parametrize(
    ("written", "said", "decay", "left"),
    [
        ("max_iters = 600\nlr_decay_iters = 600\n", "--tokens=983040", 80, "lr_decay_iters and max_iters of"),
        ("max_iters = 600\nlr_decay_iters = 500\n", "--tokens=983040", 500, "max_iters of"),
        ("tokens = 12288000\n", "--max_iters=80", RunConfig.lr_decay_iters, "tokens of"),
    ],
)
def test_the_command_line_beats_a_file_also_in_another_unit(
    tmp_path: Path, written: str, said: str, decay: int, left: str
) -> None:
    """`--tokens=3B` to a config of nanoGPT's, which says how many iterations."""
    path = config_file(tmp_path, "gradient_accumulation_steps = 1\n" + written)
    config = train(path, said)
    assert (config.max_iters, config.lr_decay_iters) == (80, decay)
    (note,) = (n for n in config.notes if "--tokens is used" in n or "--max_iters is used" in n)
    assert f"; {left} {path} {'are' if ' and ' in left else 'is'} not" in note
