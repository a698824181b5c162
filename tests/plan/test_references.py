"""The published losses: all there, each with its source, and compared only where they can be."""

from __future__ import annotations

from onecard.plan.references import UNITS, all_references


def test_every_row_is_read_with_its_source() -> None:
    rows = all_references()
    assert len(rows) == 82
    assert all(row.model and row.data and row.tokenizer and row.split and row.source for row in rows)
    assert {row.unit for row in rows} == set(UNITS)
    assert len(set(rows)) == len(rows)


def test_counts_are_whole_parameters_and_tokens() -> None:
    small = [row for row in all_references() if row.model == "build-nanogpt 30M"]
    assert [row.parameters for row in small] == [30_360_000] * 4
    assert (small[-1].tokens, small[-1].loss, small[-1].lr) == (1e10, 3.558, 0.1)
    assert all(1e7 <= row.parameters <= 2e9 for row in all_references())
    assert all(row.tokens is None or 1e8 < row.tokens < 1e12 for row in all_references())


def test_a_source_that_does_not_say_how_many_tokens_gives_none() -> None:
    assert {row.tokens for row in all_references() if row.model.startswith("OpenAI GPT-2")} == {None}


def test_losses_are_possible() -> None:
    for row in all_references():
        # Bits per byte of English are near one; a guess among 50,000 tokens costs 11 nats.
        assert (0.5 < row.loss < 2) if row.unit == "bpb" else (0.5 < row.loss < 11), row


def test_a_run_read_on_its_way_only_gets_better() -> None:
    runs: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in all_references():
        if row.tokens is not None:
            runs.setdefault((row.model, row.data, row.source), []).append((row.tokens, row.loss))
    assert sum(len(run) > 2 for run in runs.values()) >= 6
    for run in runs.values():
        assert run == sorted(run)
        assert [loss for _, loss in run] == sorted((loss for _, loss in run), reverse=True)


def test_how_high_the_learning_rate_was_is_a_share_of_its_peak() -> None:
    for row in all_references():
        assert row.lr is None or 0 <= row.lr <= 1, row
    # A run read on its way ends lower than it was, and the last row of each is its end.
    for name in ("llm.c 124M", "llm.c 350M", "build-nanogpt 30M", "build-nanogpt 254M"):
        rates = [row.lr for row in all_references() if row.model == name]
        assert rates == sorted(rates, reverse=True) and rates[-1] <= 0.1


def test_nobodys_question_is_a_yardstick() -> None:
    """A run that somebody asks about would be judged by itself."""
    assert not [row for row in all_references() if "own run" in row.source or "note" in row.model]
