from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from onecard.data.batches import DataState, Sequences, fixed_blocks
from onecard.data.bins import TokenFile
from onecard.errors import UserError


class Row:
    """Tokens that are their own positions, so that what was read tells from where."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.grown = n

    def __len__(self) -> int:
        return self.n

    def refresh(self) -> int:
        self.n = self.grown
        return self.n

    def gather(self, positions: ArrayLike, length: int) -> NDArray[np.int64]:
        position_B = np.asarray(positions, np.int64)
        assert position_B.size == 0 or position_B.max() + length <= self.n
        return position_B[:, None] + np.arange(length)


def one_epoch(sequences: Sequences, epoch: int) -> NDArray[np.int64]:
    tokens = len(sequences.tokens)
    state = DataState(epoch, 0, tokens, 0)
    rows_BL, _, _ = sequences.take(state, sequences.n_blocks(epoch, tokens))
    return rows_BL


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 3000), block_size=st.integers(1, 64), seed=st.integers(0, 2**32), epoch=st.integers(0, 5)
)
def test_every_block_exactly_once_per_epoch(n: int, block_size: int, seed: int, epoch: int) -> None:
    block_size = min(block_size, n - 1)
    sequences = Sequences(Row(n), block_size, seed)
    rows_BL = one_epoch(sequences, epoch)
    phase = sequences.phase(epoch, n)
    inputs_N = np.sort(rows_BL[:, :-1].ravel())
    # Each input token once, without a gap, from the phase on; less than a block is left at the end.
    assert 0 <= phase < block_size
    assert np.array_equal(inputs_N, phase + np.arange(len(inputs_N)))
    assert n - 1 - (phase + len(inputs_N)) < block_size


def test_epochs_differ_in_order_and_phase() -> None:
    sequences = Sequences(Row(100_000), 64, seed=1)
    first_B, second_B = (one_epoch(sequences, epoch)[:, 0] for epoch in (0, 1))
    assert first_B[0] % 64 != second_B[0] % 64
    size = min(len(first_B), len(second_B))
    assert abs(np.corrcoef(first_B[:size], second_B[:size])[0, 1]) < 0.1
    assert len({sequences.phase(epoch, 100_000) for epoch in range(200)}) > 50


def test_seeds_differ() -> None:
    orders = [one_epoch(Sequences(Row(5000), 16, seed), 0)[:, 0].tolist() for seed in (0, 1, 2)]
    assert orders[0] != orders[1] != orders[2]


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(20, 600),
    seed=st.integers(0, 1000),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
)
def test_how_calls_are_split_does_not_matter(n: int, seed: int, sizes: list[int]) -> None:
    sequences = Sequences(Row(n), 8, seed)
    whole_BL, whole_ids, whole_state = sequences.take(sequences.start(), sum(sizes))
    state = sequences.start()
    rows, ids = [], []
    for size in sizes:
        rows_BL, id_B, state = sequences.take(state, size)
        rows.append(rows_BL)
        ids.append(id_B)
    assert np.array_equal(np.concatenate(rows), whole_BL)
    assert np.array_equal(np.concatenate(ids), whole_ids)
    assert state == whole_state
    assert state.sequences == sum(sizes)
    assert sequences.skip(sequences.start(), sum(sizes)) == state


def test_resume_from_a_saved_state_sees_what_it_would_have_seen() -> None:
    sequences = Sequences(Row(1000), 16, seed=3)
    whole_BL, _, _ = sequences.take(sequences.start(), 300)
    _, _, state = sequences.take(sequences.start(), 123)
    resumed = Sequences(Row(1000), 16, seed=3)
    rest_BL, _, _ = resumed.take(DataState.from_json(state.to_json()), 177)
    assert np.array_equal(rest_BL, whole_BL[123:])


def test_ids_never_repeat_and_do_not_depend_on_growth() -> None:
    sequences = Sequences(Row(500), 4, seed=9)
    _, id_B, _ = sequences.take(sequences.start(), 5000)
    assert id_B.dtype == np.uint64
    assert len(np.unique(id_B)) == 5000
    grown = Sequences(Row(900), 4, seed=9)
    _, early_B, _ = grown.take(grown.start(), 50)
    assert np.array_equal(early_B, id_B[:50])


def test_data_added_in_mid_epoch_waits_for_the_next() -> None:
    undisturbed = Sequences(Row(1000), 10, seed=5)
    blocks = undisturbed.n_blocks(0, 1000)
    expected_BL, _, _ = undisturbed.take(undisturbed.start(), blocks)

    row = Row(1000)
    sequences = Sequences(row, 10, seed=5)
    first_BL, _, state = sequences.take(sequences.start(), 40)
    row.grown = row.n = 2500  # a resumed run opens the longer file
    rest_BL, _, state = sequences.take(state, blocks - 40)
    assert np.array_equal(np.concatenate([first_BL, rest_BL]), expected_BL)
    assert state == DataState(0, blocks, 1000, blocks)

    next_BL, _, state = sequences.take(state, sequences.n_blocks(1, 2500))
    assert state.epoch == 1
    assert state.epoch_tokens == 2500
    phase = sequences.phase(1, 2500)
    assert np.array_equal(np.sort(next_BL[:, 0]), phase + 10 * np.arange(len(next_BL)))


def test_growth_on_disk_enters_with_the_next_epoch(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    np.arange(101).astype("<u2").tofile(path)
    sequences = Sequences(TokenFile.open(path), 10, seed=1)
    _, _, state = sequences.take(sequences.start(), 3)
    with path.open("ab") as file:
        file.write(np.arange(101, 301).astype("<u2").tobytes())
    rows_BL, _, state = sequences.take(state, sequences.n_blocks(0, 101) - 3)
    assert rows_BL.max() <= 100
    _, _, state = sequences.take(state, 1)
    assert state.epoch == 1
    assert state.epoch_tokens == 301


def test_data_that_became_shorter_is_refused() -> None:
    sequences = Sequences(Row(1000), 10, seed=5)
    state = dataclasses.replace(sequences.start(), epoch_tokens=1200)
    for use in (sequences.take, sequences.skip):
        with pytest.raises(UserError, match="became shorter") as caught:
            use(state, 1)
        assert "1,200" in caught.value.why


def test_data_replaced_by_a_shorter_file_at_the_epoch_end_is_refused() -> None:
    row = Row(1000)
    sequences = Sequences(row, 10, seed=5)
    state = sequences.skip(sequences.start(), sequences.n_blocks(0, 1000))
    row.grown = 500
    with pytest.raises(UserError, match="became shorter"):
        sequences.take(state, 1)


def test_one_block_is_enough_and_none_is_an_error() -> None:
    sequences = Sequences(Row(11), 10, seed=5)
    rows_BL, _, state = sequences.take(sequences.start(), 3)
    assert (rows_BL == np.arange(11)).all()
    assert state.epoch == 2
    with pytest.raises(UserError, match="too short"):
        Sequences(Row(10), 10, seed=5)


@pytest.mark.parametrize(
    "damage", [{"epoch": "1"}, {"index": -1}, {"sequences": None}, {"epoch_tokens": 1.5}]
)
def test_a_damaged_state_is_refused(damage: dict[str, object]) -> None:
    good: dict[str, object] = {"epoch": 0, "index": 0, "epoch_tokens": 10, "sequences": 0}
    assert DataState.from_json(good) == DataState(0, 0, 10, 0)
    with pytest.raises(UserError, match="damaged"):
        DataState.from_json(good | damage)


def test_evaluation_blocks_are_fixed_nested_and_split_freely() -> None:
    row = Row(10_001)
    few, many = (fixed_blocks(row, 10, count, seed=1) for count in (50, 400))
    assert np.array_equal(many.positions[:50], few.positions)
    assert np.array_equal(np.concatenate(list(many.batches(7))), np.concatenate(list(many.batches(64))))
    everything = fixed_blocks(row, 10, 10**9, seed=1)
    assert np.array_equal(np.sort(everything.positions), 10 * np.arange(1000))
    assert everything.gather(998, 10).shape == (2, 11)
    with pytest.raises(UserError, match="too short"):
        fixed_blocks(Row(10), 10, 5, seed=1)


def test_a_pinned_evaluation_set_survives_growth() -> None:
    before = fixed_blocks(Row(1001), 10, 20, seed=1)
    after = fixed_blocks(Row(5001), 10, 20, seed=1, n_tokens=1001)
    assert np.array_equal(before.positions, after.positions)
    with pytest.raises(UserError, match="became shorter"):
        fixed_blocks(Row(500), 10, 20, seed=1, n_tokens=1001)


# ---------------------------------------------------------------- reading ahead


torch = pytest.importorskip("torch")


def prefetch_threads() -> int:
    """Of what every thread is doing: this kind is in no list of Python's."""
    return sum("_read_ahead" in functions_of(frame) for frame in sys._current_frames().values())


def functions_of(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


@pytest.mark.parametrize("micro_batch", [1, 3, 8, 20])
def test_prefetched_steps_are_the_sequences_in_order(micro_batch: int) -> None:
    from onecard.data.prefetch import Prefetcher

    sequences = Sequences(Row(500), 16, seed=4)
    expected_BL, expected_ids, expected_state = sequences.take(sequences.start(), 8 * 10)
    rows, ids, sizes = [], [], []
    with Prefetcher(sequences, sequences.start(), step_sequences=8, micro_batch=micro_batch) as prefetcher:
        for _ in range(10):
            micros, state = prefetcher.next_step()
            assert sum(micros.sizes) == 8
            for micro in micros:
                assert micro.x.is_contiguous()
                assert micro.y.is_contiguous()
                assert micro.x.dtype == torch.int64
                rows.append(torch.cat([micro.x, micro.y[:, -1:]], dim=1).numpy())
                ids.append(micro.ids.numpy().view(np.uint64))
                sizes.append(micro.n_sequences)
                assert torch.equal(micro.x[:, 1:], micro.y[:, :-1])
    assert np.array_equal(np.concatenate(rows), expected_BL)
    assert np.array_equal(np.concatenate(ids), expected_ids)
    assert state == expected_state
    assert max(sizes) == min(micro_batch, 8)
    assert prefetch_threads() == 0


def test_state_is_of_what_was_consumed_not_of_what_was_read_ahead() -> None:
    from onecard.data.prefetch import Prefetcher

    sequences = Sequences(Row(5000), 16, seed=4)
    with Prefetcher(sequences, sequences.start(), step_sequences=4, micro_batch=1, depth=50) as prefetcher:
        micros, state = prefetcher.next_step()
        assert len(list(micros)) == 4
        assert state.sequences == 4


def test_a_step_may_be_abandoned_midway() -> None:
    from onecard.data.prefetch import Prefetcher

    sequences = Sequences(Row(5000), 16, seed=4)
    begun = sequences.start()
    with Prefetcher(sequences, begun, step_sequences=8, micro_batch=4) as prefetcher:
        micros, _ = prefetcher.next_step()
        abandoned = next(micros)
        with pytest.raises(RuntimeError, match="abandoned"):
            prefetcher.next_step()
    with Prefetcher(sequences, begun, step_sequences=8, micro_batch=2) as prefetcher:
        again = list(prefetcher.next_step().micros)
        assert prefetch_threads() == 1
    assert torch.equal(torch.cat([again[0].x, again[1].x]), abandoned.x)
    assert prefetch_threads() == 0
    with pytest.raises(RuntimeError, match="closed"):
        prefetcher.next_step()


def test_reads_no_further_ahead_than_asked() -> None:
    from onecard.data.prefetch import Prefetcher

    class Counting(Row):
        reads = 0

        def gather(self, positions: ArrayLike, length: int) -> NDArray[np.int64]:
            self.reads += 1
            return super().gather(positions, length)

    row = Counting(100_000)
    sequences = Sequences(row, 16, seed=4)
    with Prefetcher(sequences, sequences.start(), step_sequences=512, micro_batch=1) as prefetcher:
        next(prefetcher.next_step().micros)
        threading.Event().wait(0.1)
        # One consumed, two waiting, one in the thread's hand.
        assert row.reads <= 4


def test_errors_of_the_thread_reach_the_consumer() -> None:
    from onecard.data.prefetch import Prefetcher

    class Failing(Row):
        def gather(self, positions: ArrayLike, length: int) -> NDArray[np.int64]:
            raise UserError("the disk is gone")

    sequences = Sequences(Failing(1000), 16, seed=4)
    with Prefetcher(sequences, sequences.start(), step_sequences=4, micro_batch=2) as prefetcher:
        micros, _ = prefetcher.next_step()
        for _ in range(2):
            with pytest.raises(UserError, match="the disk is gone"):
                next(micros)
    assert prefetch_threads() == 0
