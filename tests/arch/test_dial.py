"""nanochat's dial: the figures nanochat prints for its own depths."""

from __future__ import annotations

import pytest

from onecard.arch import dial
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.errors import UserError


def config(*words: str) -> RunConfig:
    return load_config(RunConfig, words)


def test_d20_and_d32_of_2025_are_those_of_the_speedrun() -> None:
    d20, d32 = config("--depth=20", "--generation=2025"), config("--depth=32", "--generation=2025")
    assert d20.shape(65536).parameters == 560_988_160
    assert d32.shape(65536).parameters == 1_879_048_192
    assert (d20.n_embd, d20.n_head, d32.n_embd, d32.n_head) == (1280, 10, 2048, 16)
    assert d20.tokens == 20 * 560_988_160
    assert d32.tokens_per_step == 524_288
    assert d32.block_size == 2048
    # 71,680 steps are what nanochat's own d32 took; ours round up.
    assert d32.max_iters == -(-20 * 1_879_048_192 // 524_288) == 71_680
    assert (d32.warmup_iters, d32.warmdown_ratio, d32.final_lr_frac, d32.grad_clip) == (0, 0.2, 0.0, 1.0)
    assert d32.by_muon


def test_a_depth_says_nanochat_and_every_value_can_be_ones_own() -> None:
    own = config("--depth=8", "--generation=2025", "--n_embd=384", "--n_head=3", "--matrix_lr=0.01",
                 "--max_iters=77", "--weight_decay=0.05", "--batch_size=2", "--block_size=512")  # fmt: skip
    assert own.arch == "nanochat"
    assert (own.n_layer, own.n_embd, own.n_head, own.block_size) == (8, 384, 3, 512)
    assert (own.matrix_lr, own.max_iters, own.weight_decay) == (0.01, 77, 0.05)
    assert own.tokens_per_step == 524_288
    assert own.tokens is None


def test_nanochats_flags() -> None:
    flags = config("--depth", "4", "--device-batch-size", "2", "--max-seq-len=512", "--total-batch-size=4096",
                   "--run=first", "--num-iterations=20", "--eval-every=5", "--warmup-steps=3")  # fmt: skip
    assert (flags.batch_size, flags.block_size, flags.gradient_accumulation_steps) == (2, 512, 4)
    assert (flags.max_iters, flags.eval_interval, flags.warmup_iters) == (20, 5, 3)
    assert (flags.wandb_log, flags.wandb_run_name, flags.wandb_project) == (True, "first", "nanochat")
    assert not config("--depth=4", "--run=dummy").wandb_log


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--depth=8", "--dropout=0.1"], "nanochat has no dropout"),
        (["--depth=8", "--bias=True"], "nanochat has no biases"),
        (["--depth=8", "--optimizer=adamw"], "nanochat learns by Muon"),
        (["--arch=gpt2", "--depth=8"], "depth belongs to arch='nanochat'"),
        (["--final_lr_frac=0.1"], "final_lr_frac belongs to arch='nanochat'"),
        (["--depth=8", "--total_batch_size=1000"], "no whole number of micro-batches"),
        (["--total_batch_size=49152", "--gradient_accumulation_steps=3"], "contradict each other"),
        (["--depth=8", "--generation=2025", "--n_embd=9", "--n_head=3"], "an even number of channels"),
        (["--depth=8", "--n_embd=16", "--n_head=1"], "n_embd is 16"),
        (["--depth=8", "--window_pattern=SXL"], "window_pattern is 'SXL'"),
        (["--depth=8", "--n_layer=6"], "depth is 8 and n_layer 6"),
        (["--depth=8", "--tokens=1B", "--max_iters=3"], "tokens and max_iters are both set"),
    ],
)
def test_what_contradicts_itself_is_refused(words: list[str], what: str) -> None:
    with pytest.raises(UserError, match=what):
        config(*words)


@pytest.mark.parametrize("generation", [2025, 2026])
@pytest.mark.parametrize("depth", range(1, 41))
def test_every_depth_makes_a_model(generation: int, depth: int) -> None:
    made = config(f"--depth={depth}", f"--generation={generation}")
    assert made.n_embd % made.n_head == 0
    assert made.tokens_per_step % (made.batch_size * made.block_size) == 0
    assert made.max_iters > 0


def test_nanochats_minus_one_is_auto() -> None:
    assert config("--depth=12", "--num-iterations=-1", "--total-batch-size=-1").max_iters == 2520


def test_what_is_set_and_unused_is_reported() -> None:
    (note,) = config("--depth=12", "--learning_rate=1e-5", "--lr_decay_iters=100").notes
    assert note.startswith("learning_rate, lr_decay_iters not used")
    assert "window_pattern" in config("--depth=12", "--generation=2025", "--window_pattern=L").notes[0]
    assert config("--matrix_lr=0.01").notes[0].startswith("matrix_lr not used")
    assert config("--matrix_lr=0.01", "--optimizer=muon").notes == ()


def test_wider_models_learn_embeddings_more_slowly() -> None:
    assert dial.width_lr_scale(768) == 1.0
    assert dial.width_lr_scale(4 * 768) == 0.5


def test_nanochats_other_flags_are_answered() -> None:
    with pytest.raises(UserError, match="no knob called 'target_param_data_ratio'") as refused:
        config("--depth=12", "--target-param-data-ratio=20")
    assert "--tokens" in refused.value.hint
    assert config("--depth=12", "--core-metric-every=-1", "--sample-every=-1").depth == 12
    with pytest.raises(UserError) as near:
        config("--num_iteration=5")
    assert "num_iterations" in near.value.hint
