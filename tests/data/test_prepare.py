from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onecard.data import gpt2_bpe
from onecard.data.bins import open_split
from onecard.data.prepare import build, reading, writer
from onecard.data.prepare import command as prepare
from onecard.data.prepare import split as rules
from onecard.data.prepare.options import PrepareOptions
from onecard.data.prepare.outcome import PreparedFacts, summary
from onecard.data.tokenizer import ByteTokenizer, load_tokenizer
from onecard.errors import UserError

OUTPUT = ["meta.json", "train.bin", "val.bin"]


def make_corpus(folder: Path, documents: int = 200) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        (folder / f"{number:04}.txt").write_text(f"Document {number}.\n" * (1 + number % 7))
    return folder


def run(*inputs: Path | str, root: Path, **options: Any) -> PreparedFacts:
    progress = options.pop("progress", False)
    options = {"tokenizer": "byte", "out_root": str(root / "data")} | options
    return prepare.prepare([str(given) for given in inputs], PrepareOptions(**options), progress=progress)


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def documents_in(path: Path, dtype: str = "<u2") -> list[str]:
    """Byte tokens split at end-of-text."""
    ids = np.fromfile(path, dtype).tolist()
    assert ids[-1] == 256
    texts, here = [], bytearray()
    for token in ids:
        if token == 256:
            texts.append(here.decode())
            here = bytearray()
        else:
            here.append(token)
    return texts


def test_documents_end_up_once_each_with_end_of_text(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    facts = run(corpus, root=tmp_path)
    folder = tmp_path / "data" / "corpus"
    assert facts.folder == folder
    assert visible(folder) == OUTPUT
    train, val = documents_in(folder / "train.bin"), documents_in(folder / "val.bin")
    originals = [path.read_text() for path in sorted(corpus.iterdir())]
    assert sorted(train + val) == sorted(originals)
    assert train == [text for text in originals if text in set(train)]  # in the order of the files
    assert not facts.already


def test_meta_json_says_everything(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    facts = run(corpus, root=tmp_path)
    folder = facts.folder
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    assert meta == facts.meta
    assert meta["schema"] == 1
    assert meta["dtype"] == "uint16"
    assert meta["eot"] == 256
    assert meta["split"] == build.BY_HASH
    assert meta["tokenizer"] == ByteTokenizer().facts()
    assert meta["sources"][3] == {
        "name": "corpus/0003.txt",
        "bytes": (corpus / "0003.txt").stat().st_size,
        "sha256": hashlib.sha256((corpus / "0003.txt").read_bytes()).hexdigest(),
    }
    for split in ("train", "val"):
        part, path = meta["splits"][split], folder / f"{split}.bin"
        assert part["tokens"] * 2 == path.stat().st_size
        assert part["tokens"] == part["text_bytes"] + part["documents"]
        assert part["bytes_per_token"] == pytest.approx(part["text_bytes"] / part["tokens"], abs=1e-6)
        assert part["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert meta["documents"] == 200
    assert meta["text_bytes"] == sum(path.stat().st_size for path in corpus.iterdir())
    assert str(tmp_path) not in json.dumps(meta)  # nobody else's business
    json.dumps(facts.to_json())
    assert "200 documents" in summary(facts)
    assert "already" not in summary(facts)


def test_output_is_readable_by_the_other_rooms(tmp_path: Path) -> None:
    folder = run(make_corpus(tmp_path / "corpus"), root=tmp_path).folder
    for split in ("train", "val"):
        tokens = open_split(folder, split, 16, 257)  # type: ignore[arg-type]
        assert tokens.gather([0], 9).tolist()[0] == list(b"Document ")
    assert isinstance(load_tokenizer(folder), ByteTokenizer)


def test_same_input_same_bytes(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    folders = [run(corpus, root=tmp_path / name).folder for name in "ab"]
    for name in OUTPUT:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


# ---------------------------------------------------------------- what is held out


def test_validation_share_is_about_what_was_asked(tmp_path: Path) -> None:
    meta = run(make_corpus(tmp_path / "c", 600), root=tmp_path, val_fraction=0.2).meta
    assert 80 <= meta["splits"]["val"]["documents"] <= 160
    assert meta["val_fraction"] == 0.2


def test_adding_data_never_moves_training_text_into_validation(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "c", 300)
    before = run(corpus, root=tmp_path).folder
    old_train = set(documents_in(before / "train.bin"))
    (corpus / "large.jsonl").write_text(
        "".join(json.dumps({"text": f"{number} " * 2000}) + "\n" for number in range(3000))
    )
    after = run(corpus, root=tmp_path, name="more")
    new_val = set(documents_in(after.folder / "val.bin"))
    assert new_val
    assert not old_train & new_val
    assert after.meta["val_fraction"] < 0.1  # more data, smaller share


def test_duplicates_stay_on_one_side(tmp_path: Path) -> None:
    rows = [{"text": f"text {number % 40}"} for number in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = run(tmp_path / "a.jsonl", root=tmp_path, val_fraction=0.3).folder
    train, val = (documents_in(folder / f"{split}.bin") for split in ("train", "val"))
    assert len(train) + len(val) == 400
    assert val
    assert not set(train) & set(val)


def test_two_documents_give_both_splits_one(tmp_path: Path) -> None:
    for pair in range(8):
        corpus = tmp_path / f"c{pair}"
        corpus.mkdir()
        texts = [f"first {pair}", f"second {pair}"]
        for number, text in enumerate(texts):
            (corpus / f"{number}.txt").write_text(text)
        for fraction in (0.001, 0.5):
            folder = run(corpus, root=tmp_path, name=f"n{pair}_{fraction}", val_fraction=fraction).folder
            train, val = (documents_in(folder / f"{split}.bin") for split in ("train", "val"))
            assert sorted(train + val) == texts
            assert len(val) == 1


def test_the_only_text_is_split_as_nanogpt_splits_shakespeare(tmp_path: Path) -> None:
    text = "".join(f"{number} line of the play ñ\n" for number in range(1000))
    (tmp_path / "play.txt").write_text(text, encoding="utf-8")
    facts = run(tmp_path / "play.txt", root=tmp_path, tokenizer="char")
    characters = sorted(set(text))
    expected = [characters.index(character) for character in text]
    border = int(len(text) * 0.9)
    assert np.fromfile(facts.folder / "train.bin", "<u2").tolist() == expected[:border]
    assert np.fromfile(facts.folder / "val.bin", "<u2").tolist() == expected[border:]
    assert facts.meta["split"] == build.BY_TAIL
    assert facts.meta["eot"] is None
    assert facts.meta["documents"] == 1
    tokenizer = load_tokenizer(facts.folder)
    assert tokenizer is not None
    assert tokenizer.decode(expected) == text


def test_end_of_text_closes_only_the_end_of_the_only_text(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text("abcdefghij" * 10)
    folder = run(tmp_path / "play.txt", root=tmp_path).folder
    assert bytes(np.fromfile(folder / "train.bin", "<u2").astype("u1")) == b"abcdefghij" * 9
    assert documents_in(folder / "val.bin") == ["abcdefghij"]


@pytest.mark.parametrize("copies", [1, 3])
def test_copies_of_the_only_document_do_not_leak(tmp_path: Path, copies: int) -> None:
    row = json.dumps({"text": "abcdefghij"}) + "\n"
    (tmp_path / "a.jsonl").write_text(row * copies)
    facts = run(tmp_path / "a.jsonl", root=tmp_path)
    assert facts.meta["split"] == build.BY_TAIL
    assert facts.meta["documents"] == copies
    assert documents_in(facts.folder / "val.bin") == ["j"] * copies
    assert np.fromfile(facts.folder / "train.bin", "<u2").tolist() == list(b"abcdefghi" * copies)


def test_a_large_only_text_is_split_at_the_same_place_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "play.txt").write_text("Some words of a long play.\n\n" * 400)
    whole = run(tmp_path / "play.txt", root=tmp_path / "whole").folder
    monkeypatch.setattr(reading, "PIECE_BYTES", 500)
    pieces = run(tmp_path / "play.txt", root=tmp_path / "pieces").folder
    for name in OUTPUT:
        assert (whole / name).read_bytes() == (pieces / name).read_bytes()


# ---------------------------------------------------------------- tokenizers


@pytest.mark.skipif(
    gpt2_bpe._carried() is None, reason="needs GPT-2's merges: pip install 'onecard[gpt2-offline]'"
)
def test_gpt2_in_pieces_gives_the_ids_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    assert tiktoken
    text = "A line, it's long.\n\n  Another\tone\n" * 300
    rows = [{"text": text}, {"text": "second"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = tmp_path / "c"
    corpus.mkdir()
    for number, row in enumerate(rows):
        (corpus / f"{number}.txt").write_text(row["text"])
    whole = run(tmp_path / "a.jsonl", root=tmp_path, tokenizer="gpt2").folder
    monkeypatch.setattr(reading, "PIECE_BYTES", 400)
    pieces = run(corpus, root=tmp_path, tokenizer="gpt2").folder
    for name in ("train.bin", "val.bin"):
        assert (whole / name).read_bytes() == (pieces / name).read_bytes()
        assert np.fromfile(whole / name, "<u2")[-1] == 50256


def test_a_vocabulary_beyond_65536_needs_wider_numbers(tmp_path: Path) -> None:
    text = "".join(chr(point) for point in range(0x20, 0x11000) if not 0xD800 <= point < 0xE000) * 2
    (tmp_path / "a.txt").write_text(text[0x10000 - 100 :] + text, encoding="utf-8", newline="")
    facts = run(tmp_path / "a.txt", root=tmp_path, tokenizer="char")
    n_vocab = facts.meta["tokenizer"]["n_vocab"]
    assert n_vocab > 65536
    assert facts.meta["dtype"] == "uint32"
    assert len(open_split(facts.folder, "train", 8, n_vocab)) == facts.meta["splits"]["train"]["tokens"]


# ---------------------------------------------------------------- what is there already


def test_done_already_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "c", 20)
    first = run(corpus, root=tmp_path)
    before = (first.folder / "train.bin").stat().st_mtime_ns
    again = run(corpus, root=tmp_path)
    assert again.already
    assert again.meta == first.meta
    assert "already prepared" in summary(again)
    assert (first.folder / "train.bin").stat().st_mtime_ns == before


def test_something_else_of_that_name_is_not_overwritten(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "c", 20)
    folder = run(corpus, root=tmp_path).folder
    before = {name: (folder / name).read_bytes() for name in OUTPUT}
    with pytest.raises(UserError, match="something else") as caught:
        run(corpus, root=tmp_path, tokenizer="char")
    assert "tokenizer" in caught.value.why
    assert "--force" in caught.value.hint
    (corpus / "0003.txt").write_text("changed!")
    with pytest.raises(UserError, match="something else") as caught:
        run(corpus, root=tmp_path)
    assert "sources" in caught.value.why
    assert {name: (folder / name).read_bytes() for name in OUTPUT} == before
    assert not run(corpus, root=tmp_path, force=True).already
    assert (folder / "train.bin").read_bytes() != before["train.bin"]


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.pkl"])
def test_other_peoples_files_are_not_overwritten(tmp_path: Path, name: str) -> None:
    corpus = make_corpus(tmp_path / "c", 20)
    folder = tmp_path / "data" / "c"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(b"mine")
    with pytest.raises(UserError, match="already holds"):
        run(corpus, root=tmp_path)
    assert (folder / name).read_bytes() == b"mine"


def test_a_folder_with_the_text_in_it_is_fine(tmp_path: Path) -> None:
    """nanoGPT keeps input.txt beside the bins; a second run must not read its own output."""
    folder = make_corpus(tmp_path / "data" / "play", 20)
    assert not run(folder, root=tmp_path).already
    assert run(folder, root=tmp_path).already


def test_files_of_the_user_beside_the_text_are_left_alone(tmp_path: Path) -> None:
    folder = make_corpus(tmp_path / "data" / "mine", 20)
    own = {"tokenizer.json": '{"mine": 1}', "prepare.json": "[]", "notes.partial": "x"}
    for name, content in own.items():
        (folder / name).write_text(content)
    run(folder, root=tmp_path)
    run(folder, root=tmp_path, force=True)
    assert {name: (folder / name).read_text() for name in own} == own


def test_a_damaged_dataset_is_not_replaced_by_other_text(tmp_path: Path) -> None:
    folder = run(make_corpus(tmp_path / "c", 20), root=tmp_path).folder
    (folder / "val.bin").unlink()
    before = (folder / "train.bin").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    for number in range(3):
        (other / f"{number}.txt").write_text("other text")
    with pytest.raises(UserError, match="something else"):
        run(other, root=tmp_path, name="c")
    assert (folder / "train.bin").read_bytes() == before


@pytest.mark.parametrize(
    "change", [{"position": {}}, {"position": "x"}, {"splits": 3}, {"sources": None}, {"split_at": -1}]
)
def test_a_meta_edited_by_hand_is_an_error_not_a_crash(tmp_path: Path, change: dict[str, Any]) -> None:
    corpus = make_corpus(tmp_path / "c", 20)
    folder = run(corpus, root=tmp_path).folder
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(UserError, match="damaged or of an earlier version"):
        run(corpus, root=tmp_path)
    assert not run(corpus, root=tmp_path, force=True).already


def test_what_was_read_is_told_by_kind(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "c", 20)
    (corpus / "table.csv").write_text("a,b\n1,2\n")
    assert "read: 20 .txt, 1 .csv" in summary(run(corpus, root=tmp_path))


def test_more_tokens_than_there_are_is_said(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "c", 20)
    for _ in range(2):
        facts = run(corpus, root=tmp_path, tokens=10**9)
        assert any("are all there are" in remark for remark in facts.remarks)


def test_bins_that_were_damaged_since_are_made_again(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "c", 20)
    folder = run(corpus, root=tmp_path).folder
    good = (folder / "val.bin").read_bytes()
    (folder / "val.bin").write_bytes(good[:-2])
    assert not run(corpus, root=tmp_path).already
    assert (folder / "val.bin").read_bytes() == good


# ---------------------------------------------------------------- side by side


def test_two_at_once_do_not_mix(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    corpus = make_corpus(tmp_path / "c", 20)
    with (
        writer.LockedFolder(tmp_path / "data" / "c"),
        pytest.raises(UserError, match="another onecard prepare"),
    ):
        run(corpus, root=tmp_path)


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(tmp_path / "c", 20)
    original = ByteTokenizer.encode_array

    def encode_and_change(self: ByteTokenizer, text: str) -> Any:
        (corpus / "0001.txt").write_text("longer than before " * 9)
        return original(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode_array", encode_and_change)
    with pytest.raises(UserError, match="changed while"):
        run(corpus, root=tmp_path)
    assert not (tmp_path / "data" / "c" / "train.bin").exists()


# ---------------------------------------------------------------- wrong use


def test_no_room_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(tmp_path / "c", 20)
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="not enough room"):
        run(corpus, root=tmp_path)


def test_wrong_use(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "c", 3)
    wrong: list[tuple[list[Path], dict[str, Any], str]] = [
        ([], {}, "nothing to prepare"),
        ([corpus, corpus], {}, "need a name"),
        ([corpus], {"name": "../up"}, "cannot be the name"),
        ([corpus], {"name": ".hidden"}, "cannot be the name"),
        ([corpus], {"tokenizer": "bpe"}, "no tokenizer 'bpe'"),
        ([corpus], {"val_fraction": 0.9}, "val_fraction"),
        ([corpus], {"val_fraction": 0.0}, "val_fraction"),
        ([corpus], {"tokens": 0}, "at least 1"),
        ([corpus], {"dump": "CC-MAIN-2013-20"}, "belongs to fineweb"),
        ([corpus], {"edu": True}, "belongs to fineweb"),
        ([corpus], {"train_tokenizer": 600, "tokenizer": "byte"}, "exclude each other"),
    ]
    for inputs, options, message in wrong:
        with pytest.raises(UserError, match=message):
            run(*inputs, root=tmp_path, **options)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../x", "begins with a dot"), ("/x", "holds '/'"), ("a/../b", "holds '/'"), ("", "is empty"),
        (" ", "is empty"), ("a\nb", "holds '\\\\n'"), ("\x1b[2J", "holds '\\\\x1b'"),
        ("x ", "ends with a space"), ("ab.", "ends with a dot"),
        ("ñ" * 101, "is too long"), ("..", "begins with a dot"),
    ],
)  # fmt: skip
def test_names_that_are_no_folders(tmp_path: Path, name: str, why: str) -> None:
    corpus = make_corpus(tmp_path / "c", 3)
    with pytest.raises(UserError, match="cannot be the name") as caught:
        run(corpus, root=tmp_path, name=name)
    assert re.search(why, caught.value.why) and "--name NAME" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_file_with_an_odd_name_is_prepared_under_another(tmp_path: Path) -> None:
    odd = tmp_path / "a\nb\x1b[31m.txt"
    odd.write_text("text " * 100)
    with pytest.raises(UserError, match="cannot be the name"):
        run(odd, root=tmp_path)
    facts = run(odd, root=tmp_path, name="b")
    assert facts.meta["sources"][0]["name"] == odd.name


@pytest.mark.parametrize("given", ["", "  ", "a\0b"])
def test_an_empty_name_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    make_corpus(tmp_path / "c", 3)
    monkeypatch.chdir(tmp_path / "c")
    with pytest.raises(UserError, match="is no name of a file or folder"):
        run(given, root=tmp_path, name="x")


@pytest.mark.parametrize("root", ["", " ", "a\nb", "a\0b", "file", "file/below"])
def test_roots_that_are_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    corpus = make_corpus(tmp_path / "c", 3)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"is no name of a folder|cannot be a folder") as caught:
        prepare.prepare([str(corpus)], PrepareOptions(out_root=str(root)), progress=False)
    assert "--out-root data" in caught.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "file"]


def test_what_unpacks_without_end_is_taken_with_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_LOOKED_OVER_DOCUMENTS", 0)
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    corpus = make_corpus(tmp_path / "c", 50)
    (corpus / "a.txt").write_text("a larger text\n" * 20_000)
    same = pa.array(["a text " * 5000]).dictionary_encode().take(pa.array([0] * 20_000))
    pq.write_table(pa.table({"text": same}), corpus / "z.parquet", row_group_size=10**9)
    with pytest.raises(UserError, match=r"z\.parquet unpacks to") as caught:
        run(corpus, root=tmp_path)
    # What came before it is there, and nothing of it.
    assert "tokens from before it are kept" in caught.value.why
    facts = run(corpus, root=tmp_path, tokens=1_000_000)
    assert facts.meta["splits"]["train"]["tokens"] < 1_100_000 and not facts.already


def test_copies_of_one_document_do_not_go_on_beyond_the_tokens_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is ever held out; what is written until that is known is little."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    same = pa.array(["the same " * 50]).dictionary_encode().take(pa.array([0] * 300_000))
    pq.write_table(pa.table({"text": same}), tmp_path / "a.parquet", row_group_size=10**9)
    written = list[int]()
    append = writer.DatasetWriter.append

    def counted(self: writer.DatasetWriter, *given: Any) -> None:
        append(self, *given)
        written.append(self.tokens("train"))

    monkeypatch.setattr(writer.DatasetWriter, "append", counted)
    with pytest.raises(UserError, match="more than one document"):
        run(tmp_path / "a.parquet", root=tmp_path, tokens=100_000)
    assert 100_000 <= max(written) < 10_000_000


def test_copies_of_two_documents_end_with_the_tokens_wanted(tmp_path: Path) -> None:
    """Both are above the threshold of those held out: the lower one is, then."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    two = pa.array(["the same " * 50, "another"]).dictionary_encode().take(pa.array([0, 1] * 150_000))
    pq.write_table(pa.table({"text": two}), tmp_path / "a.parquet", row_group_size=10**9)
    facts = run(tmp_path / "a.parquet", root=tmp_path, tokens=100_000, val_fraction=0.01)
    splits = facts.meta["splits"]
    assert 100_000 <= splits["train"]["tokens"] < 101_000
    assert 0 < splits["val"]["tokens"] < 6_000_000  # all copies of one


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", "x"), ("a.jsonl", '{"text": ""}\n'), ("a.txt", "\ufeff"), ("b.jsonl", "\n")],
)
def test_no_text_at_all(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="nothing was prepared"):
        run(tmp_path / name, root=tmp_path)
    assert not (tmp_path / "data" / "a").exists()


def test_small_validation_and_mended_bytes_are_noted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text \xff" * 50)
    facts = run(tmp_path / "a.txt", root=tmp_path)
    assert any("not UTF-8" in note for note in facts.meta["notes"])
    assert "validation has only" in summary(facts)


def test_stdlib_has_enough_to_validate_on(tmp_path: Path) -> None:
    facts = run("stdlib", root=tmp_path)
    assert facts.folder.name == "stdlib"
    assert facts.meta["splits"]["val"]["tokens"] > 300_000  # bytes; a third of that in GPT-2 tokens
    assert facts.meta["splits"]["train"]["tokens"] > 9_000_000


def test_progress_is_plain_lines_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from onecard.data.prepare import progress

    monkeypatch.setattr(progress, "_LINE_EVERY_S", -1.0)
    run(make_corpus(tmp_path / "c", 3), root=tmp_path, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "tokenizing: " in shown.err
    assert "MB/s" in shown.err
    assert "3 documents" in shown.err
    assert "left" in shown.err


def test_progress_is_a_bar_in_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    from onecard.data.prepare import progress

    monkeypatch.setattr(progress, "_BAR_EVERY_S", -1.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(make_corpus(tmp_path / "c", 3), root=tmp_path, progress=True)
    assert capsys.readouterr().out == ""
