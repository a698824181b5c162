from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from onecard.data.prepare import pipeline, reading
from onecard.data.prepare.pipeline import Ahead, encode_all, merged
from onecard.data.prepare.reading import Batch, Place
from onecard.data.prepare.split import ByHash
from onecard.data.tokenizer import ByteTokenizer
from onecard.errors import UserError


def batch(text: str, end: Place) -> Batch:
    made = Batch(end=end)
    made.add(text.encode(), 2**31, True, end)
    return made


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("onecard-read")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    until = time.monotonic() + 60
    while reader_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert reader_threads() == []


@pytest.fixture(params=[1, 2, 4])
def encoders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(pipeline, "_ENCODERS", request.param)
    for module in (pipeline, reading):
        monkeypatch.setattr(module, "BATCH_BYTES", 2)
    return int(request.param)


class Uneven(ByteTokenizer):
    """Encodes the first texts more slowly than the later ones."""

    def encode_batch(self, texts):  # type: ignore[no-untyped-def]
        time.sleep(0.02 if next(iter(texts)) < "c" else 0.0)
        return super().encode_batch(texts)


def test_batches_come_in_order_however_fast_they_are_encoded(encoders: int) -> None:
    texts = [f"{letter}{letter}" for letter in "abcdefgh"]
    parts = [batch(text, Place(0, number + 1)) for number, text in enumerate(texts)]
    found = list(encode_all(iter(parts), Uneven(), ByHash(0), "uint16"))
    assert [part.ids_N.tolist() for part in found] == [[*text.encode(), 256] for text in texts]
    assert [part.offsets for part in found] == [[0, 3]] * 8
    assert [part.batch.end.item for part in found] == list(range(1, 9))


def test_few_very_large_documents_are_under_way_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_ENCODERS", 4)
    monkeypatch.setattr(pipeline, "_IN_FLIGHT_BYTES", 100)
    counting, now, most = threading.Lock(), 0, {60: 0, 20: 0}

    class Counting(ByteTokenizer):
        def encode_batch(self, texts):  # type: ignore[no-untyped-def]
            nonlocal now
            with counting:
                now += 1
            time.sleep(0.01)
            with counting:
                (size,) = {len(text) for text in texts}
                most[size] = max(most[size], now)
                now -= 1
            return super().encode_batch(texts)

    for size in most:
        monkeypatch.setattr(pipeline, "BATCH_BYTES", size)
        parts = [batch("x" * size, Place(0, number + 1)) for number in range(12)]
        assert len(list(encode_all(iter(parts), Counting(), ByHash(0), "uint16"))) == 12
    assert most[60] <= 2 < most[20] <= 5


def test_an_error_comes_after_everything_before_it(encoders: int) -> None:
    def failing() -> Iterator[Batch]:
        for number in range(5):
            yield batch("xx", Place(0, number + 1))
        yield batch("y", Place(0, 6))  # still held back to be merged when the error comes
        raise UserError("bad file")

    found: list[int] = []
    with pytest.raises(UserError, match="bad file"):
        for part in encode_all(failing(), ByteTokenizer(), ByHash(0), "uint16"):
            found.append(part.batch.end.item)
    assert found == [1, 2, 3, 4, 5, 6]


def test_an_error_of_the_encoder_is_raised(encoders: int) -> None:
    class Failing(ByteTokenizer):
        def encode_batch(self, texts):  # type: ignore[no-untyped-def]
            raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):
        list(encode_all(iter([batch("xx", Place(0, 1))] * 20), Failing(), ByHash(0), "uint16"))


def test_whoever_stops_early_leaves_no_thread(encoders: int) -> None:
    def endless() -> Iterator[Batch]:
        number = 0
        while True:
            number += 1
            yield batch("xx", Place(0, number))

    encoded = encode_all(endless(), ByteTokenizer(), ByHash(0), "uint16")
    next(encoded)
    encoded.close()


def test_no_more_than_a_few_batches_are_ahead() -> None:
    made = 0

    def counting() -> Iterator[int]:
        nonlocal made
        while made < 1000:
            made += 1
            yield made

    with Ahead(counting, 3) as ahead:
        assert next(iter(ahead)) == 1
        time.sleep(0.1)
        assert made <= 6


def test_waiting_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_WAIT_SECONDS", 0.01)
    told = threading.Event()

    def slow() -> Iterator[int]:
        assert told.wait(60)  # as slow as it takes until whoever waits is told
        yield 7

    with Ahead(slow, 3, told.set) as ahead:
        assert list(ahead) == [7]


def test_small_files_go_together_and_large_ones_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "BATCH_BYTES", 100)
    monkeypatch.setattr(pipeline, "_SMALL_FILES_BYTES", 40)
    small = [batch("x" * 10, Place(number + 1)) for number in range(8)]
    assert [found.end.source for found in merged(iter(small))] == [4, 8]
    large = [
        batch("x" * 60, Place(0, 1)),
        batch("x" * 3, Place(0, 2)),
        Batch(end=Place(1)),
        batch("y", Place(2)),
    ]
    assert [(found.end, found.n_bytes) for found in merged(iter(large))] == [
        (Place(0, 1), 60), (Place(1), 3), (Place(2), 1),
    ]  # fmt: skip
