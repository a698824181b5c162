"""Reading many lines at once, block by block, gives what reading them one by one gives."""

from __future__ import annotations

from dataclasses import astuple

from hypothesis import given, settings
from hypothesis import strategies as st
from slow_reader import Found, read_slowly
from written_logs import D12_HEAD, NOTES_HEAD, nanochat_log, nanogpt_log

from onecard.report import log_text
from onecard.report.log_patterns import FACTS, HEAD_WORDS, PLAIN_ITER, PLAIN_STEP, START
from onecard.report.log_text import blocks, clean
from onecard.report.logs import _Reader

NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 500])
MS = st.sampled_from(["4321.12", "0.00", "99.5", "1e3", "nan", "12,5", "1,234.5", "999999999.99"])
HEADS = (*NOTES_HEAD.splitlines(), *D12_HEAD.splitlines())
JUNK = (
    "", " ", "saving checkpoint to out", "UserWarning: a slow loop = bad", "Resuming training from out",
    " 40%|\u2588\u2588 | 4/10 [00:01<00:02,  2.10it/s]", " 10%|\u2588| 500/5000 [12:34<1:53:06,  1.51s/it]",
    "{'loss': 3.21, 'grad_norm': 0.9}", "max_iters = 7", "iter 3: lo\u017f\u017f 3.0, time 5.0ms, mfu 1.00%",
    "ITER 4: LOSS 3.0, TIME 5.0MS", "the step | after",
    "x 3,072,000 training tokens in data; cuda:0, float16",
)  # fmt: skip


@st.composite
def lines(draw: st.DrawFn) -> str:
    """One line of a log: mostly as it should be, in order or not, and now and then cut or wrapped."""
    number, ms = draw(NUMBERS), draw(MS)
    line = draw(
        st.sampled_from(
            [
                f"iter {number}: loss 6.1234, time 4321.{number}ms, mfu 11.52%",
                f"iter {number}: loss 6.1234, time {ms}ms, mfu -100.00%",
                f"iter {number}: loss nan, time {ms}ms",
                f"iter {number}: loss 5.5, time {ms}ms, mfu 23.80%, 276,258 tok/s, lr 8.88e-04, eta 2m55s",
                f"iter {number}: loss 5.5, time 7.5ms, mfu 23.80%, 0 tok/s",
                f"step {number:05d}/00010 (0.10%) | loss: 6.123456 | lrm: 0.25 | dt: 1177.12ms | "
                "tok/sec: 55,700 | bf16_mfu: 0.00 | epoch: 1 pq: 0 rg: 12 | total time: 0.20m",
                f"step {number}/10 (0.1%) | loss: 6.1 | lrm: 1.0 | dt: {ms}ms | tok/sec: 5,7 | mfu: 4.99 | s",
                f"step {number}: train loss 4.1234, val loss 4.2345",
                f"Step {number:05d} | Validation bpb: 1.234567",
                *draw(st.lists(st.sampled_from((*HEADS, *JUNK)), min_size=4, max_size=8)),
            ]
        )
    )
    front = draw(st.sampled_from(["", "", "", "[2026-11-16 02:14:07,123] INFO ", "x", "\x1b[1;32m", "loss "]))
    line = (
        front
        + line
        + draw(st.sampled_from(["", "", "", "\x1b[0m", " ", "y\x08", "\x00", "\x1b]0;title\x07"]))
    )
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
        parts.insert(draw(st.integers(0, len(parts))), nanogpt_log(40, range(first, first + 9), head=""))
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), nanochat_log(90, 6, head=""))
    return "".join(parts)


def read_fast(text: str, block: int) -> Found:
    reader = _Reader()
    for piece in blocks(text, block):
        reader.read(piece)
    reader.finish()
    starts = [
        vars(start) | {"steps": {kind: [astuple(s) for s in steps] for kind, steps in start.steps.items()}}
        for start in reader._starts
    ]
    return starts, reader._bars, reader._trainer_loss


def same(text: str, block: int) -> None:
    starts, bars, loss = read_fast(text, block)
    expected, all_bars, last_loss = read_slowly(text)
    assert repr(starts) == repr(expected)  # as text: a loss may be nan
    if not any(start["steps"] for start in starts):  # with steps, nobody asks for bars
        assert (bars, repr(loss)) == (all_bars, repr(last_loss))


@settings(max_examples=400, deadline=None)
@given(logs(), st.sampled_from([1, 30, 200, 1000, 1 << 18]))
def test_fast_and_slow_agree(text: str, block: int) -> None:
    same(text, block)


CHARACTERS = st.sampled_from("ab\n\r\x08\x00\x1b]\x07[0m\\")


@settings(max_examples=400, deadline=None)
@given(st.text(CHARACTERS, max_size=60), st.integers(1, 20))
def test_blocks_have_the_lines_of_the_whole(text: str, block: int) -> None:
    assert "\n".join(blocks(text, block)) == clean(text)
    whole = log_text.TERMINAL.sub("", text)
    assert clean(text).split("\n") == log_text.re.split(r"\r\n|\n|\r", whole)


def test_what_these_programs_print_is_plain() -> None:
    """Else it would all be read the slow way, and nobody would notice."""
    text = nanogpt_log(4384, range(40), head="", evaluations=0)
    assert len(PLAIN_ITER.findall(text)) == 40
    assert len(PLAIN_STEP.findall(nanochat_log(9413, 40, head="", evaluate=0))) == 40
    old = nanochat_log(9413, 40, head="", evaluate=0, field="mfu", mfu=4.99)
    assert len(PLAIN_STEP.findall(old)) == 40


def test_every_line_of_a_head_has_one_of_its_words() -> None:
    words = (*HEADS, *JUNK, "Number of parameters: 1,234", "Resuming training from out", "Vocab size: 7")
    telling = [line for line in words if START.search(line) or any(q.search(line) for _n, q, _r in FACTS)]
    assert len(telling) > 12
    assert [line for line in telling if not any(word in line for word in HEAD_WORDS)] == []
