"""Logs as people have them: every format, and everything that terminals and shells do to them."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_logs import nanochat_log, nanogpt_log

from onecard.report.log_text import decode
from onecard.report.logs import Log, read_log
from onecard.report.steps import LoggedStep
from onecard.run.metrics import bits_per_byte_line, evaluation_line, iteration_line

NANOGPT_LINES = nanogpt_log(4384, range(0, 620, 10))
NANOCHAT_LINES = nanochat_log(9413, 40)


def read(text: str) -> Log:
    log = read_log(text)
    assert log is not None
    return log


def test_nanogpt_with_its_head() -> None:
    log = read(NANOGPT_LINES)
    assert (log.format, len(log.steps), log.evaluations) == ("nanogpt", 62, (0, 500))
    assert log.tokens_per_step == 524_288
    assert log.facts["parameters"] == 40_560_000
    expected = {"batch_size": 16, "gradient_accumulation_steps": 32, "block_size": 1024,
                "n_layer": 12, "n_head": 12,
                "n_embd": 384, "max_iters": 6000, "eval_interval": 500, "eval_iters": 50, "dtype": "bfloat16",
                "log_interval": 10}  # fmt: skip
    assert log.settings == expected
    assert [step.number for step in log.steps if step.after_evaluation] == [0, 500]
    assert log.steps[0].mfu == -1.0


def test_nanochat_of_2026_with_its_head() -> None:
    log = read(NANOCHAT_LINES)
    assert (log.format, len(log.steps), log.evaluations) == ("nanochat", 40, (0,))
    facts = {"last_step": 2520, "tokens_per_step": 524_288, "flops_per_token": 8.87e8, "dtype": "bfloat16",
             "gpu": "NVIDIA GeForce RTX 4070", "peak_flops": float("inf")}  # fmt: skip
    assert facts.items() <= log.facts.items()
    assert (log.steps[-1].number, log.steps[-1].mfu, log.cards) == (39, 0.0, 1)


def test_the_line_of_the_facts_word_for_word() -> None:
    line = (
        "step 00010/10000 (0.10%) | loss: 6.123456 | lrm: 0.25 | dt: 1177.12ms | tok/sec: 55,700 | "
        "bf16_mfu: 0.00 | epoch: 1 pq: 0 rg: 12 | total time: 0.20m | eta: 196.1m"
    )
    assert read(line).steps == (LoggedStep(10, 1177.12, 6.123456, 0.0, 55_700.0),)
    assert read("iter 200: loss 6.1234, time 4321.12ms, mfu 11.52%").steps == (
        LoggedStep(200, 4321.12, 6.1234, pytest.approx(0.1152)),
    )


def test_nanochat_of_2025_is_known_by_its_field() -> None:
    assert read(nanochat_log(9413, 8, field="mfu", mfu=4.99)).format == "nanochat-2025"


def test_nanochat_on_eight_cards() -> None:
    head = "Tokens / micro-batch / rank: 32 x 2048 = 65,536\nTokens / micro-batch: 524,288\n"
    assert read(nanochat_log(1000, 5, head=head)).cards == 8


def test_onecards_screen_and_its_file() -> None:
    screen = "iter 300: loss 5.5680, time 238.02ms, mfu 23.80%, 276,258 tok/s, lr 8.88e-04, eta 2m55s\n"
    log = read(screen)
    assert (log.format, log.steps) == (
        "onecard",
        (LoggedStep(300, 238.02, 5.568, pytest.approx(0.238), 276_258.0),),
    )
    file = [iteration_line(n, 5.5, 0.25, 0.238) for n in range(3)]
    file += [evaluation_line(3, 5.4, 5.5), bits_per_byte_line(3, 1.9), iteration_line(3, 5.3, 0.25, 0.238)]
    log = read("\n".join(file))
    assert (log.format, len(log.steps), log.evaluations) == ("onecard", 4, (3, 3))
    assert read(iteration_line(7, 5.5, 0.25, None)).format == "onecard"  # on a CPU there is no MFU


def test_huggingface_with_its_bar() -> None:
    text = (
        "Downloading: 100%|██| 3/3 [00:01<00:00,  2.10it/s]\n"
        " 10%|█         | 500/5000 [12:34<1:53:06,  1.51s/it]\r"
        " 10%|█         | 501/5000 [12:36<1:53:04,  1.50s/it]\r"
        "{'loss': 3.21, 'grad_norm': 0.9, 'learning_rate': 5e-05, 'epoch': 0.1}\n"
    )
    log = read(text)
    assert (log.format, log.facts["last_step"]) == ("huggingface", 5000)
    assert log.steps == (LoggedStep(500, 1510.0), LoggedStep(501, 1500.0, 3.21))
    assert read_log("Downloading: 30%|██| 3/10 [00:01<00:00,  2.10it/s]") is None


# --- what happens to logs on their way ----------------------------------------------------------


def coloured(text: str) -> str:
    return "".join(f"\x1b[1;32m{line}\x1b[0m\n" for line in text.splitlines())


def stamped(text: str) -> str:
    return "".join(f"[2026-11-16 02:14:07,123] INFO  {line}\n" for line in text.splitlines())


def windows(text: str) -> str:
    return text.replace("\n", "\r\n")


def among_bars(text: str) -> str:
    return text.replace("\niter", "\r 40%|████      | 4/10 [00:01<00:02]\r\x1b[K\niter").replace(
        "\nstep", "\r 40%|████  | 4/10 [00:01<00:02]\r\nstep"
    )


def with_traceback(text: str) -> str:
    return (
        text + "Traceback (most recent call last):\n  File 'train.py', line 3\ntorch.OutOfMemoryError: CUDA\n"
    )


def wrapped_at_80(text: str) -> str:
    return "\n".join(line[i : i + 80] for line in text.splitlines() for i in range(0, max(len(line), 1), 80))


def wrapped_at_words(text: str) -> str:
    return "\n".join("\n".join(textwrap.wrap(line, 50)) for line in text.splitlines())


def cut_at_the_end(text: str) -> str:
    return text + text.splitlines()[-1][:25]


@pytest.mark.parametrize(
    "change",
    [coloured, windows, among_bars, with_traceback, wrapped_at_80, wrapped_at_words, cut_at_the_end],
    ids=lambda change: change.__name__,
)
@pytest.mark.parametrize("text", [NANOGPT_LINES, NANOCHAT_LINES], ids=["nanogpt", "nanochat"])
def test_the_steps_survive(change: object, text: str) -> None:
    assert callable(change)
    log, plain = read(change(text)), read(text)
    assert (log.format, log.steps, log.evaluations) == (plain.format, plain.steps, plain.evaluations)


def test_timestamps_in_front() -> None:
    assert read(stamped(NANOGPT_LINES)).steps == read(NANOGPT_LINES).steps
    assert read(stamped(NANOGPT_LINES)).tokens_per_step == 524_288


@pytest.mark.parametrize("name", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_whatever_wrote_the_file(name: str) -> None:
    assert read(decode(NANOGPT_LINES.encode(name))) == read(NANOGPT_LINES)


def test_a_resumed_run_is_read_from_its_last_start() -> None:
    text = nanogpt_log(9000, range(0, 300, 10)) + nanogpt_log(4000, range(250, 400, 10), head="")
    log = read(text)
    assert (log.steps[0].number, len(log.steps), log.starts) == (250, 15, 2)
    assert log.settings["max_iters"] == 6000  # said once, at the first start
    # The numbers go on without a jump, but the process is another.
    text = nanogpt_log(9000, range(0, 300, 10)) + nanogpt_log(4000, range(300, 400, 10))
    assert (read(text).steps[0].number, read(text).starts) == (300, 2)
    # A start that died before its first step is none.
    assert read(nanogpt_log(9000, range(30)) + "tokens per iteration will be: 1,024\nKilled\n").starts == 1


def test_decimal_commas_are_no_thousands() -> None:
    log = read("iter 7: loss 3,1234, time 4321,12ms, mfu 11,52%\n")
    assert log.steps == (LoggedStep(7, pytest.approx(4321.12), pytest.approx(3.1234), pytest.approx(0.1152)),)
    log = read("iter 7: loss 3.1234, time 14,321.12ms, mfu 11.52%\n")
    assert log.steps[0].ms == pytest.approx(14321.12)


def test_a_line_that_is_there_twice_counts_once() -> None:
    line = "iter 7: loss 6.1, time 432.10ms, mfu 11.52%\n"
    assert len(read(line * 2).steps) == 1


# --- for all texts ------------------------------------------------------------------------------

PIECES = st.sampled_from(
    ["iter ", "step ", "Step ", "7", "00", "/", ": ", "loss ", "loss: ", ", time ", "ms", ", mfu ", "%",
     " | ",
     "dt: ", "tok/sec: ", "bf16_mfu: ", "nan", "inf", "1e999", "-100.00", "(0.1%)", "\n", "\r", "\x1b[0m",
     "tokens per iteration will be: ", "n_embd = ", "max_iters = ", "5 * ", "(",
     "Estimated FLOPs per token: ",
     "1.2e+10", "Peak FLOPS (BF16): ", "| 3/7 [00:01<00:02, ", "1.5s/it", "{'loss': ", "9" * 30]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(st.one_of(PIECES, st.text(max_size=3)), max_size=60).map("".join)))
def test_no_text_is_too_strange(text: str) -> None:
    log = read_log(text)
    assert log is None or all(step.ms > 0 for step in log.steps)


@settings(max_examples=100, deadline=None)
@given(st.binary())
def test_no_bytes_are_too_strange(content: bytes) -> None:
    assert isinstance(decode(content), str)


STEPS = st.lists(
    st.tuples(
        st.floats(0.01, 1e6).map(lambda ms: round(ms, 2)),
        st.floats(0, 20).map(lambda loss: round(loss, 4)),
        st.floats(0, 2).map(lambda mfu: round(mfu, 4)),
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=100, deadline=None)
@given(STEPS, st.integers(0, 10**6), st.integers(1, 100))
def test_what_is_written_is_read_back(
    steps: list[tuple[float, float, float]], first: int, every: int
) -> None:
    numbers = range(first, first + every * len(steps), every)
    lines = [
        iteration_line(n, loss, ms / 1000, mfu) for n, (ms, loss, mfu) in zip(numbers, steps, strict=True)
    ]
    log = read("\n".join(lines))
    assert [step.number for step in log.steps] == list(numbers)
    for step, (ms, loss, mfu) in zip(log.steps, steps, strict=True):
        assert (step.ms, step.loss, step.mfu) == (pytest.approx(ms), loss, pytest.approx(mfu, abs=1e-4))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 99_999), st.floats(0.01, 1e6), st.integers(0, 10**9), st.floats(0, 99))
def test_nanochats_line_is_read_back(number: int, ms: float, speed: int, mfu: float) -> None:
    line = (
        f"step {number:05d}/99999 (12.34%) | loss: 3.141593 | lrm: 1.00 | dt: {ms:.2f}ms | "
        f"tok/sec: {speed:,} | bf16_mfu: {mfu:.2f} | epoch: 1 | total time: 0.20m"
    )
    (step,) = read(line).steps
    assert (step.number, step.ms, step.loss) == (number, round(ms, 2), 3.141593)
    assert step.mfu == pytest.approx(round(mfu, 2) / 100)
    assert (step.tokens_per_s or 0) == speed
