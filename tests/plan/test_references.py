"""The published losses: all there, each with its source, and compared only where they can be."""

from __future__ import annotations

from onecard.plan.references import UNITS, all_references


def test_every_row_is_read_with_its_source() -> None:
    rows = all_references()
    assert len(rows) == 54
    assert all(row.model and row.data and row.tokenizer and row.split and row.source for row in rows)
    assert {row.unit for row in rows} == set(UNITS)
    assert len(set(rows)) == len(rows)


def test_counts_are_whole_parameters_and_tokens() -> None:
    notes = [row for row in all_references() if row.model == "RTX 4070 note GPT 40M"]
    assert [row.parameters for row in notes] == [40_950_000] * 7
    assert (notes[-1].tokens, notes[-1].loss) == (3.146e9, 4.17)
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
