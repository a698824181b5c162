"""What terminals, shells and people do to logs changes nothing in what is read from them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_logs import D12_HEAD, NOTES_HEAD, nanochat_log, nanogpt_log

from onecard.report.log import Log
from onecard.report.reading import Seen, read, seen
from onecard.report.reading.lines import Shapes
from onecard.report.reading.tables import Table
from onecard.run.metrics import bits_per_byte_line, evaluation_line, iteration_line

NANOGPT_LINES = nanogpt_log(4384, range(0, 620, 10))
NANOCHAT_LINES = nanochat_log(9413, 40)


def log_of(text: str) -> Log:
    log = read(text.encode())
    assert log is not None
    return log


def coloured(text: str) -> str:
    return "".join(f"\x1b[1;32m{line}\x1b[0m\n" for line in text.splitlines())


def windows(text: str) -> str:
    return text.replace("\n", "\r\n")


def stamped(text: str) -> str:
    return "".join(f"[2026-11-16 02:14:07,123] INFO  {line}\n" for line in text.splitlines())


def quoted(text: str) -> str:
    return "".join(f"> > {line}\n" for line in text.splitlines())


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


def twice(text: str) -> str:
    """As when a screen and a file, or two ranks, are in one."""
    return "".join(f"{line}\n" * (2 if "loss" in line else 1) for line in text.splitlines())


@pytest.mark.parametrize(
    "change",
    [coloured, windows, stamped, quoted, among_bars, with_traceback, wrapped_at_80, wrapped_at_words,
     cut_at_the_end, twice],
    ids=lambda change: change.__name__,
)  # fmt: skip
@pytest.mark.parametrize("text", [NANOGPT_LINES, NANOCHAT_LINES], ids=["nanogpt", "nanochat"])
def test_the_steps_survive(change: Callable[[str], str], text: str) -> None:
    log, plain = log_of(change(text)), log_of(text)
    assert (log.format, log.steps, log.evaluations) == (plain.format, plain.steps, plain.evaluations)
    assert len(plain.steps) > 30


@pytest.mark.parametrize("name", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_whatever_wrote_the_file(name: str) -> None:
    assert repr(read(NANOGPT_LINES.encode(name))) == repr(log_of(NANOGPT_LINES))


def test_a_resumed_run_has_its_starts_and_one_curve() -> None:
    text = nanogpt_log(9000, range(0, 300, 10)) + nanogpt_log(4000, range(250, 400, 10), head="")
    log = log_of(text)
    assert [(int(start.steps.step[0]), len(start.steps)) for start in log.starts] == [(0, 30), (250, 15)]
    assert list(log.steps.step) == [float(step) for step in range(0, 400, 10)]
    assert log.steps.ms[25] == log.starts[1].steps.ms[0]
    assert log.settings["max_iters"] == 6000  # said once, at the first start
    # The numbers go on without a jump, but the process is another.
    text = nanogpt_log(9000, range(0, 300, 10)) + nanogpt_log(4000, range(300, 400, 10))
    assert (len(log_of(text).starts), log_of(text).last.steps.step[0]) == (2, 300)
    # A start that died before its first step is none.
    text = nanogpt_log(9000, range(30)) + "tokens per iteration will be: 1,024\nKilled\n"
    log = log_of(text)
    assert (len(log.starts), log.facts["tokens_per_step"]) == (1, 524_288)


def test_onecards_own_lines_are_read_as_they_were_written() -> None:
    lines = [iteration_line(n, 5.5 + n, 0.25, 0.238) for n in range(3)]
    lines += [evaluation_line(3, 5.4, 5.5), bits_per_byte_line(3, 1.9), iteration_line(3, 5.3, 0.25, None)]
    log = log_of("\n".join(lines) + "\n")
    assert log.format == "onecard"
    assert list(log.steps.loss) == [5.5, 6.5, 7.5, 5.3]
    assert list(log.evaluations) == [
        (3, 5.4, 5.5, 1.9, pytest.approx(math.nan, nan_ok=True), pytest.approx(math.nan, nan_ok=True))
    ]


def test_a_thousand_starts_stay_within_bounds() -> None:
    """Steps that only fall, as no run has them: neither time nor memory grows with their square."""
    text = "".join(f"iter {n}: loss 4.0000, time 400.00ms, mfu 11.00%\n" for n in range(20_000, 0, -1))
    log = log_of(text)
    assert len(log.starts) <= 256
    assert list(log.steps.step) == [1.0]


def test_a_long_log_keeps_its_extremes_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onecard.report.reading.runs.MOST_ROWS", 10_000)
    loss = [3.0 + n % 7 / 100 for n in range(60_000)]
    loss[12_345], loss[23_456] = 9.5, 0.25
    lines = [f"iter {n}: loss {value:.4f}, time 400.00ms, mfu 11.00%" for n, value in enumerate(loss)]
    log = log_of("\n".join(lines) + "\n")
    assert len(log.steps) < 10_000
    found = dict(log.steps.pairs("loss"))
    assert (found[12_345], found[23_456]) == (9.5, 0.25)
    assert list(log.steps.step[-1000:]) == list(range(59_000, 60_000))
    assert log.steps.step[0] == 0


# --- what is no log -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "empty"),
        (b"\xff\xfe", "empty"),
        (bytes(range(256)) * 4000, "binary"),
        (b"PK\x03\x04" + bytes(1000), "checkpoint"),
        (b"\x1f\x8b" + bytes(1000), "compressed"),
        (b"x" * 3_000_000, "nothing"),
        (b"The loss of this is 3.2, I think.\n", "nothing"),
        (b"Traceback (most recent call last):\nRuntimeError: CUDA out of memory\n", "traceback"),
    ],
)
def test_what_is_no_log_is_named(content: bytes, kind: str) -> None:
    assert read(content) is None
    found = seen(content)
    assert isinstance(found, Seen)
    assert found.kind == kind
    assert found.what.format(source="FILE") in str(found.error("FILE"))


# --- for all texts ------------------------------------------------------------------------------

NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 500])
MS = st.sampled_from(["4321.12", "0.00", "99.5", "1e3", "nan", "12,5", "1,234.5", "999999999.99"])
HEADS = (*NOTES_HEAD.splitlines(), *D12_HEAD.splitlines())
JUNK = (
    "", " ", "saving checkpoint to out", "UserWarning: a slow loop = bad", "Resuming training from out",
    " 40%|\u2588\u2588 | 4/10 [00:01<00:02,  2.10it/s]", " 10%|\u2588| 500/5000 [12:34<1:53:06,  1.51s/it]",
    "{'loss': 3.21, 'grad_norm': 0.9}", "max_iters = 7", "{", "}", '  "step": 7,', '  "loss": 3.1',
    "ITER 4: LOSS 3.0, TIME 5.0MS", "the step | after", "step,loss,val_loss", "| Step | Loss |", "|---|---|",
    "| 3 | 4.1 |", "0/500/1000: 10.9/5.9/5.0", "python train.py config/a.py \\", "  --batch_size=12",
    "x 3,072,000 training tokens in data; cuda:0, float16", "p\u221a\u00a9rdida", "0 | loss 3.1",
    "val loss 3.2",
)  # fmt: skip


@st.composite
def lines(draw: st.DrawFn) -> str:
    """One line of a log: mostly as it should be, in order or not, and now and then cut or wrapped."""
    n, ms = draw(NUMBERS), draw(MS)
    line = draw(
        st.sampled_from(
            [
                f"iter {n}: loss 6.1234, time 4321.{n}ms, mfu 11.52%",
                f"iter {n}: loss 6.1234, time {ms}ms, mfu -100.00%",
                f"iter {n}: loss nan, time {ms}ms",
                f"iter {n}: loss 5.5, time {ms}ms, mfu 23.80%, 276,258 tok/s, lr 8.88e-04, eta 2m55s",
                f"step {n:05d}/00010 (0.10%) | loss: 6.123456 | lrm: 0.25 | dt: 1177.12ms | "
                "tok/sec: 55,700 | bf16_mfu: 0.00 | epoch: 1 pq: 0 rg: 12 | total time: 0.20m",
                f"step {n}: train loss 4.1234, val loss 4.2345",
                f"Step {n:05d} | Validation bpb: 1.234567",
                f"step    {n}/1000 | loss 6.10 (+nanz)| norm 0.90 (+0.1z)| lr 2.1e-04 | {ms} ms | 9 tok/s",
                f'{{"step": {n}, "loss": 3.25, "lr": 0.001}}',
                f"{n},3.5,",
                f"{n},3.5,3.6",
                *draw(st.lists(st.sampled_from((*HEADS, *JUNK)), min_size=4, max_size=8)),
            ]
        )
    )
    front = draw(st.sampled_from(["", "", "", "[2026-11-16 02:14:07,123] INFO ", "x", "\x1b[1;32m", "> "]))
    line = front + line + draw(st.sampled_from(["", "", "", "\x1b[0m", " ", "y\x08", "\x00", "\x1b]0;t\x07"]))
    if draw(st.integers(0, 5)) == 0 and line:
        at = draw(st.integers(0, len(line)))
        line = line[:at] + draw(st.sampled_from(["\n", "\r", "\n\n", "", "\x08", "\x1b]open"])) + line[at:]
    return line


@st.composite
def logs(draw: st.DrawFn) -> str:
    ends = st.sampled_from(["\n", "\n", "\n", "\r\n", "\r", "\r\x1b[K\n"])
    parts = [piece for line in draw(st.lists(lines(), max_size=25)) for piece in (line, draw(ends))]
    if draw(st.booleans()):
        first = draw(st.integers(0, 600))
        parts.insert(draw(st.integers(0, len(parts))), nanogpt_log(40, range(first, first + 12), head=""))
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), nanochat_log(90, 12, head=""))
    if draw(st.booleans()):
        rows = "".join(f"{n},{4 - n / 100},{3.9 if n % 5 == 0 else ''}\n" for n in range(30))
        parts.insert(draw(st.integers(0, len(parts))), "step,loss,val_loss\n" + rows)
    return "".join(parts)


@settings(max_examples=300, deadline=None)
@given(logs(), st.sampled_from([1, 30, 200, 1000]))
def test_neither_blocks_nor_reading_many_lines_at_once_show(text: str, block: int) -> None:
    expected = repr(one_by_one(text))
    assert repr(read(text.encode(), block)) == expected
    assert repr(read(text.encode())) == expected


def one_by_one(text: str) -> Log | None:
    """Every line by itself, as simply as it can be read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shapes, "most_frequent", lambda self: None)
        patch.setattr(Table, "many", lambda self, rows: None)
        return read(text.encode())


PIECES = st.sampled_from(
    ["iter ", "step ", "Step ", "7", "00", "/", ": ", "loss ", "loss: ", ", time ", "ms", ", mfu ", "%",
     " | ", "dt: ", "tok/sec: ", "nan", "inf", "1e999", "-100.00", "(0.1%)", "\n", "\r", "\x1b[0m", ",",
     "tokens per iteration will be: ", "n_embd = ", "max_iters = ", "5 * ", "(", "{", "}", '"step": ',
     "Estimated FLOPs per token: ", "1.2e+10", "| 3/7 [00:01<00:02, ", "1.5s/it", "{'loss': ", "9" * 30]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(st.one_of(PIECES, st.text(max_size=3)), max_size=60).map("".join)))
def test_no_text_is_too_strange(text: str) -> None:
    log = read(text.encode("utf-8", "surrogatepass"))
    assert log is None or all(ms > 0 or math.isnan(ms) for ms in log.steps.ms)
    assert log is not None or seen(text.encode("utf-8", "surrogatepass")).what


@settings(max_examples=100, deadline=None)
@given(st.binary())
def test_no_bytes_are_too_strange(content: bytes) -> None:
    assert read(content) is None or isinstance(read(content), Log)


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
def test_what_is_written_is_read_back(rows: list[tuple[float, float, float]], first: int, every: int) -> None:
    numbers = range(first, first + every * len(rows), every)
    written = [
        iteration_line(n, loss, ms / 1000, mfu) for n, (ms, loss, mfu) in zip(numbers, rows, strict=True)
    ]
    log = log_of("\n".join(written) + "\n")
    assert list(log.steps.step) == list(numbers)
    for found, (ms, loss, mfu) in zip(
        zip(log.steps.ms, log.steps.loss, log.steps.mfu, strict=True), rows, strict=True
    ):
        assert found == (pytest.approx(ms), loss, pytest.approx(mfu, abs=1e-4))


def test_of_two_tables_the_first_one_is_read() -> None:
    table = "| step | val loss |\n|---|---|\n| 0 | {} |\n| 500 | {} |\n\n"
    log = log_of("Run A:\n" + table.format(10.9, 5.1) + "Run B:\n" + table.format(10.8, 4.1))
    assert log.evaluations.pairs("val") == [(0, 10.9), (500, 5.1)]
    assert log.remarks
    # Of one run, where each has what the other lacks.
    other = "| step | train loss |\n|---|---|\n| 0 | 10.7 |\n| 500 | 5.0 |\n"
    log = log_of(table.format(10.9, 5.1) + other)
    assert (log.evaluations.pairs("val"), log.steps.pairs("loss")) == (
        [(0, 10.9), (500, 5.1)], [(0, 10.7), (500, 5.0)]
    )  # fmt: skip
    assert not log.remarks


def test_of_an_export_with_several_runs_the_first_one_is_read() -> None:
    text = '"Step","a - val/loss","a - val/loss__MIN","b - val/loss","b - val/loss__MIN"\n'
    log = log_of(text + '"0","10.9","10.9","10.8","10.8"\n"100","7.1","7.1","6.1","6.1"\n')
    assert log.evaluations.pairs("val") == [(0, 10.9), (100, 7.1)]
    assert log.remarks
