"""Tables in a terminal: whole, whatever its width."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from onecard.terminal import Row, lines_of, print_parts, print_rows, terms_together

HEADINGS = ["tokens/s", "GiB with CUDA itself", "EUR"]
ROWS = [
    Row("exact", ("54,929", "5.50", "119.44"), "chosen"),
    Row("exact, recompute block", ("46,511", "2.23", "141.05"), "does not fit: 1 GiB short"),
]


def texts(width: int, rows: list[Row] = ROWS) -> list[str]:
    return [text.rstrip() for text, _style in lines_of(width, "way", HEADINGS, rows, "notes")]


def test_where_there_is_room_a_row_is_a_line() -> None:
    assert texts(100) == [
        "way                     tokens/s  GiB with CUDA itself     EUR  notes",
        "exact                     54,929                  5.50  119.44  chosen",
        "exact, recompute block    46,511                  2.23  141.05  does not fit: 1 GiB short",
    ]


def test_with_less_room_headings_break() -> None:
    assert texts(84) == [
        "                                     GiB",
        "                                    with",
        "                                    CUDA",
        "way                     tokens/s  itself     EUR  notes",
        "exact                     54,929    5.50  119.44  chosen",
        "exact, recompute block    46,511    2.23  141.05  does not fit: 1 GiB short",
    ]


def test_a_long_note_goes_on_below_itself() -> None:
    flags = "--batch_size=12 --gradient_accumulation_steps=41 --recompute=block"
    assert texts(66, [Row("exact", ("1", "2", "3"), flags)])[-3:] == [
        "exact         1       2    3  --batch_size=12",
        "                              --gradient_accumulation_steps=41",
        "                              --recompute=block",
    ]


def test_with_little_room_figures_come_below_their_name() -> None:
    assert texts(44) == [
        "  tokens/s  GiB with CUDA itself     EUR",
        "exact · chosen",
        "    54,929                  5.50  119.44",
        "exact, recompute block · does not fit: 1 GiB",
        "short",
        "    46,511                  2.23  141.05",
    ]


words = st.text("abcdefgh×–", min_size=1, max_size=12)
sentences = st.lists(words, min_size=1, max_size=6).map(" ".join)


@given(
    st.lists(st.tuples(sentences, st.tuples(words, words, words), st.one_of(st.just(""), sentences))),
    st.integers(60, 200),
)
def test_nothing_is_lost_and_nothing_runs_over(
    cells: list[tuple[str, tuple[str, str, str], str]], width: int
) -> None:
    rows = [Row(name, figures, note) for name, figures, note in cells]
    shown = texts(width, rows)
    assert max(map(len, shown), default=0) <= width
    for row in rows:
        assert any(row.figures[0] in text and row.figures[2] in text for text in shown)
    everything = " ".join(shown)
    assert all(word in everything for row in rows for word in (row.name + " " + row.note).split())


def printed(width: int) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width), out


def test_brackets_are_no_markup() -> None:
    console, out = printed(80)
    print_rows(console, "[t]", "what", ["[red]EUR"], [Row("a[/b]", ("1",))])
    assert out.getvalue().splitlines() == ["[t]", "what   [red]EUR", "a[/b]         1"]


@pytest.mark.parametrize(("width", "lines"), [(80, 1), (30, 2), (12, 4)])
def test_parts_break_between_them(width: int, lines: int) -> None:
    console, out = printed(width)
    parts = ["weights 0.69", "logits 0.38", "free 6.32", "a b"]
    print_parts(console, [Text(part) for part in parts], " · ")
    shown = out.getvalue().splitlines()
    assert len(shown) == lines
    assert [part for line in shown for part in line.split(" · ")] == parts


def test_a_formula_breaks_between_its_terms() -> None:
    console, out = printed(40)
    formula = terms_together("12 × 768·3072·4 + 12 × 3072·768·4 + 25 × 768·4")
    print_rows(console, "", "what", ["GiB"], [Row("weights", ("0.463",), formula)], "formula")
    shown = [line[16:] for line in out.getvalue().splitlines()]
    assert shown == ["formula", "12 × 768·3072·4 +", "12 × 3072·768·4 +", "25 × 768·4"]


FLAGS = [
    Row("exact", ("1.17B", "11.81", "6,632"),
        "--n_layer=28 --n_head=28 --n_embd=1792 --block_size=1024 --batch_size=4 --offload=optimizer"),
    Row("low-bit", ("2.75B", "11.74", "1,587"), "--n_layer=37 (micro-batches of 4, the last of 3)"),
]  # fmt: skip


@given(st.integers(40, 200))
def test_flags_can_be_pasted_at_any_width(width: int) -> None:
    """A shell reads the broken lines as the one line they were."""
    lines = [text.rstrip() for text, _style in lines_of(width, "", HEADINGS, FLAGS, "flags", pasted=True)]
    assert all(len(line) <= width for line in lines)
    for row in FLAGS:
        words = row.note.partition(" (")[0].split()
        first, last = (
            next(i for i, line in enumerate(lines) if word in line) for word in (words[0], words[-1])
        )
        block = [line[line.index("--") :] for line in lines[first : last + 1]]
        assert [line.endswith(" \\") for line in block] == [True] * (len(block) - 1) + [False]
        pasted = " ".join(line.removesuffix(" \\") for line in block)
        assert pasted.partition(" (")[0].split() == words
