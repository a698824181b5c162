from __future__ import annotations

import hashlib
import json
import math
import pickle
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onecard.data.check import claims as check_meta
from onecard.data.check import survey
from onecard.data.check.report import CheckReport, check
from onecard.data.check.survey import TokenRow
from onecard.data.check.text import token_text
from onecard.data.prepare.command import prepare
from onecard.data.prepare.options import PrepareOptions
from onecard.data.shards import SHARD_HEADER_BYTES, SHARD_MAGIC
from onecard.data.tokenizer import ByteTokenizer, make_tokenizer
from onecard.errors import UserError

EOT = 256
GPT2_EOT = 50256


def made(tmp_path: Path, tokenizer: str = "byte", documents: int = 120) -> Path:
    """A dataset as prepare writes it."""
    corpus = tmp_path / "corpus.jsonl"
    with corpus.open("w", encoding="utf-8") as file:
        for number in range(documents):
            file.write(json.dumps({"text": f"Ein Stück {number}: größer.\n" * (1 + number % 5)}) + "\n")
    prepare(
        [str(corpus)],
        PrepareOptions(name="it", out_root=str(tmp_path / "data"), tokenizer=tokenizer),
        progress=False,
    )
    return tmp_path / "data" / "it"


def look(folder: Path, **options: Any) -> CheckReport:
    report = check(folder, progress=False, **options)
    # Whatever was found can be written down and read by a person.
    assert json.loads(json.dumps(report.to_json())) == report.to_json()
    assert report.text().encode("utf-8")
    return report


def only_problem(report: CheckReport) -> str:
    assert not report.ok
    assert len(report.problems) == 1, report.problems
    assert report.problems[0].split()[0] in report.text()
    return report.problems[0]


def tokens_of(folder: Path, split: str) -> np.ndarray:
    return np.fromfile(folder / f"{split}.bin", "<u2")


def change_meta(folder: Path, **changes: Any) -> None:
    path = folder / "meta.json"
    meta = json.loads(path.read_text(encoding="utf-8"))
    for key, value in changes.items():
        place = meta
        *parents, last = key.split("__")
        for parent in parents:
            place = place[parent]
        place[last] = value
    path.write_text(json.dumps(meta), encoding="utf-8")


def set_split(folder: Path, split: str, tokens: list[int]) -> None:
    """Other tokens, and a meta.json that agrees with them."""
    row = np.array(tokens, "<u2")
    row.tofile(folder / f"{split}.bin")
    text_bytes = int((row != EOT).sum())
    facts = {
        "file": f"{split}.bin",
        "tokens": len(row),
        "documents": int((row == EOT).sum()),
        "text_bytes": text_bytes,
        "sha256": hashlib.sha256(row.tobytes()).hexdigest(),
    }
    change_meta(folder, **{f"splits__{split}": facts})
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    totals = {key: sum(part[key] for part in meta["splits"].values()) for key in ("tokens", "text_bytes")}
    change_meta(folder, **totals)


def row_of(*texts: str) -> list[int]:
    return [token for text in texts for token in [*text.encode(), EOT]]


def plain_bins(folder: Path, train: list[int], val: list[int]) -> Path:
    folder.mkdir(exist_ok=True)
    np.array(train, "<u2").tofile(folder / "train.bin")
    np.array(val, "<u2").tofile(folder / "val.bin")
    return folder


def write_shard(path: Path, tokens: list[int]) -> None:
    header = np.zeros(SHARD_HEADER_BYTES // 4, "<i4")
    header[:3] = SHARD_MAGIC, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, "<u2").tobytes())


# ---------------------------------------------------------------- what prepare wrote


@pytest.mark.parametrize("tokenizer", ["byte", "char", "gpt2"])
def test_what_prepare_wrote_is_ok(tmp_path: Path, tokenizer: str) -> None:
    folder = made(tmp_path, tokenizer)
    report = look(folder)
    assert report.problems == []
    assert report.ok
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    for split, part in report.splits.items():
        assert set(part.checks.values()) == {"ok"}
        assert part.tokens == meta["splits"][split]["tokens"]
        assert part.text_bytes == meta["splits"][split]["text_bytes"]
        assert part.documents == (None if tokenizer == "char" else meta["splits"][split]["documents"])
    assert report.text().endswith("ok: everything meta.json says is so")


def test_a_report_is_as_wide_as_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a document is left out for that, and a pipe gets its lines as they are."""
    (tmp_path / "a.txt").write_text("a long line of many words " * 40 + "x" * 200)
    (tmp_path / "b.txt").write_text("another line of words " * 40)
    prepare(
        [str(tmp_path)],
        PrepareOptions(name="it", out_root=str(tmp_path / "data"), tokenizer="byte"),
        progress=False,
    )
    report = look(tmp_path / "data" / "it")
    whole = report.text()
    assert max(map(len, whole.splitlines())) > 200
    monkeypatch.setenv("COLUMNS", "80")
    lines = report.text().splitlines()[1:]  # the first has the folder's name
    assert max(map(len, lines)) <= 80

    def samples(text: str) -> str:
        shown = [line[4:] for line in text.splitlines() if line.startswith("  | ")]
        return "".join("".join(shown).split())

    assert samples(report.text()) == samples(whole)


def test_a_single_text_cut_into_two_splits_is_ok(tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_text("It was a dark night. " * 200)
    facts = prepare(
        [str(text)], PrepareOptions(out_root=str(tmp_path / "data"), tokenizer="byte"), progress=False
    )
    report = look(facts.folder)
    assert report.problems == []
    assert report.splits["train"].documents is None
    assert report.splits["train"].samples[0]["text"].startswith("It was a dark night.")
    assert len(report.splits["train"].samples) == 3


def test_char_data_has_no_document_statistics(tmp_path: Path) -> None:
    report = look(made(tmp_path, "char"))
    part = report.splits["train"]
    assert part.documents is part.lengths is part.duplicates is None
    assert part.histogram == []
    assert "exact duplicates" not in report.text()
    assert any("no end-of-text" in note for note in report.notes)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    folder = made(tmp_path)
    data = bytearray((folder / "train.bin").read_bytes())
    data[400] ^= 1
    (folder / "train.bin").write_bytes(data)
    report = look(folder)
    assert "train.bin: these are not the tokens that were prepared" in only_problem(report)
    assert report.splits["train"].checks["SHA-256"] == "WRONG"
    assert report.splits["val"].checks["SHA-256"] == "ok"


@pytest.mark.parametrize("cut", [2, 7, 200])
def test_a_truncated_bin_is_told_with_what_was_expected_and_found(tmp_path: Path, cut: int) -> None:
    folder = made(tmp_path)
    path = folder / "val.bin"
    before = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-cut])
    problem = only_problem(look(folder))
    assert "val.bin is cut short" in problem
    assert f"{before // 2:,} tokens ({before:,} bytes)" in problem
    assert f"{(before - cut) // 2:,} are there ({before - cut:,} bytes)" in problem


def test_an_empty_bin_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / "val.bin").write_bytes(b"")
    assert "val.bin is cut short" in only_problem(look(folder))


@pytest.mark.parametrize("extra", [b"\x01", b"\x01\x00\x02\x00"])
def test_what_lies_behind_the_end_is_a_problem(tmp_path: Path, extra: bytes) -> None:
    folder = made(tmp_path)
    with (folder / "train.bin").open("ab") as file:
        file.write(extra)
    report = look(folder)
    problem = only_problem(report)
    assert "train.bin is too long" in problem
    assert f"{len(extra)} more bytes" in problem
    # What meta.json counts is intact, and that is said too.
    assert report.splits["train"].checks["SHA-256"] == "ok"


@pytest.mark.parametrize("extra", [b"\x01", b"\x01\x00\x02\x00"])
def test_a_growing_dataset_is_checked_as_far_as_meta_counts(tmp_path: Path, extra: bytes) -> None:
    folder = made(tmp_path)
    (folder / ".prepare.json").write_text("{}")
    n_tokens = len(tokens_of(folder, "train"))
    with (folder / "train.bin").open("ab") as file:
        file.write(extra)
    report = look(folder)
    assert report.ok
    assert report.growing
    assert report.splits["train"].tokens == n_tokens
    assert any("more is being prepared" in note for note in report.notes)


def test_a_growing_dataset_may_still_be_damaged(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / ".prepare.json").write_text("{}")
    data = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(b"x" + data[1:] + data)
    assert "not the tokens that were prepared" in only_problem(look(folder))


def test_the_first_id_out_of_range_is_told_with_its_position(tmp_path: Path) -> None:
    folder = made(tmp_path)
    row = tokens_of(folder, "train")
    row[[1234, 1300]] = 300, 60000
    row.tofile(folder / "train.bin")
    report = look(folder)
    (problem,) = (p for p in report.problems if "vocabulary" in p)
    assert "train.bin, token 1,234: id 300 is not in the vocabulary of 257 (2 such ids in train)" in problem
    assert report.splits["train"].checks["ids"] == "WRONG"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"splits__train__documents": 7}, "documents counted, meta.json says 7"),
        ({"splits__val__text_bytes": 9}, "text bytes counted, meta.json says 9"),
        ({"tokens": 5}, "meta.json says 5 tokens in all"),
        ({"tokenizer__hash": "0" * 64}, "another byte tokenizer"),
        ({"tokenizer__n_vocab": 300}, "300 ids"),
        ({"eot": 0}, "end-of-text 256 (or 0)"),
        ({"splits__train__tokens": "many"}, "does not say how many tokens train.bin has"),
    ],
)
def test_every_claim_of_meta_is_compared(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    folder = made(tmp_path)
    change_meta(folder, **changes)
    report = look(folder)
    assert not report.ok
    assert any(expected in problem for problem in report.problems), report.problems


def test_wide_tokens_are_read_and_a_wild_id_needs_no_memory(tmp_path: Path) -> None:
    folder = made(tmp_path)
    for split in ("train", "val"):
        row = tokens_of(folder, split).astype("<u4")
        row.tofile(folder / f"{split}.bin")
        change_meta(folder, dtype="uint32", **{f"splits__{split}__sha256": hashlib.sha256(row).hexdigest()})
    assert look(folder).ok
    row[5] = 4_000_000_000
    row.tofile(folder / "val.bin")
    assert any("val.bin, token 5: id 4,000,000,000" in problem for problem in look(folder).problems)


def test_a_missing_split_is_a_problem(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / "val.bin").unlink()
    assert only_problem(look(folder)) == "val.bin is missing"


# ---------------------------------------------------------------- documents


def test_duplicates_empties_and_lengths(tmp_path: Path) -> None:
    folder = made(tmp_path)
    set_split(folder, "train", row_of("alpha", "beta!", "", "alpha", "gamma ray", "alpha", "", "beta!"))
    part = look(folder).splits["train"]
    assert part.documents == 8
    assert part.empty_documents == 2
    assert part.duplicates == {
        "documents": 3, "share": 3 / 6, "texts": 2, "most_times": 3, "most_text": "alpha",
    }  # fmt: skip
    assert part.lengths == {"min": 0, "median": 5, "mean": 34 / 8, "p95": pytest.approx(7.6), "max": 9}
    assert part.histogram == [
        {"from": 0, "to": 0, "documents": 2},
        {"from": 1, "to": 1, "documents": 0},
        {"from": 2, "to": 3, "documents": 0},
        {"from": 4, "to": 7, "documents": 5},
        {"from": 8, "to": 15, "documents": 1},
    ]


def test_a_leak_is_a_problem_where_the_split_rules_it_out(tmp_path: Path) -> None:
    folder = made(tmp_path)
    set_split(folder, "train", row_of("one", "two", "two", "three"))
    set_split(folder, "val", row_of("two", "four", "", "five", "two"))
    report = look(folder)
    assert "2 documents of val (50.00%) are in train too" in only_problem(report)
    assert report.in_both == {"in_train": 2, "in_val": 2, "share_of_val": 0.5, "example": "two"}
    change_meta(folder, split="some other rule")
    report = look(folder)
    assert report.ok
    assert any("are in train too" in note for note in report.notes)


def test_samples_are_drawn_by_seed_and_are_whole_beginnings(tmp_path: Path) -> None:
    folder = made(tmp_path)
    texts = [f"Text {number} " + "x" * (600 * (number % 2)) for number in range(50)]
    set_split(folder, "train", row_of(*texts))
    first, again, other = (look(folder, samples=4, seed=seed).splits["train"] for seed in (1, 1, 2))
    assert first.samples == again.samples != other.samples
    assert len(first.samples) == 4
    for sample in first.samples:
        text = texts[sample["document"] - 1]
        assert sample["text"] == text[:300]
        assert sample["tokens"] == len(text)
        assert tokens_of(folder, "train")[sample["position"]] == ord("T")
    assert len(look(folder, samples=99).splits["train"].samples) == 50
    assert look(folder, samples=0).splits["train"].samples == []


def test_a_part_of_a_character_is_shown_as_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert token_text(tokenizer, 0xC3, EOT) == "b'\\xc3'"
    assert token_text(tokenizer, 10, EOT) == "'\\n'"
    assert token_text(tokenizer, EOT, EOT) == "<|endoftext|>"


# ---------------------------------------------------------------- bins of others


def test_nanogpt_bins_are_taken_for_gpt2(tmp_path: Path) -> None:
    ids = make_tokenizer("gpt2").encode
    row = [*ids("Hello there, hello."), GPT2_EOT, *ids("Another one."), GPT2_EOT]
    report = look(plain_bins(tmp_path / "own", row, row))
    assert report.ok
    assert report.splits["train"].documents == 2
    assert report.splits["train"].checks["size"] == "not recorded"
    assert report.splits["train"].text_bytes == len("Hello there, hello.Another one.")
    # nanoGPT splits at random, so this happens there and is only worth a note.
    assert report.in_both is not None
    assert report.in_both["in_val"] == 2
    notes = " ".join(report.notes)
    assert "GPT-2" in notes
    assert "not verified" in notes
    assert "are in train too" in notes
    assert "not recorded" in report.text()


def test_without_gpt2s_merges_the_figures_are_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(name: str) -> None:
        raise UserError("GPT-2's merges file (vocab.bpe) was not found")

    monkeypatch.setattr(check_meta, "make_tokenizer", nowhere)
    report = look(plain_bins(tmp_path / "own", [1, 2, GPT2_EOT, 3, GPT2_EOT], [4, GPT2_EOT]))
    assert report.ok
    part = report.splits["train"]
    assert (part.documents, part.text_bytes, part.samples) == (2, None, [])
    assert any("cannot be shown as text" in note for note in report.notes)


def test_nanogpt_characters_come_from_meta_pkl(tmp_path: Path) -> None:
    folder = plain_bins(tmp_path / "own", [0, 1, 2, 1], [2, 2])
    itos = dict(enumerate("abc"))
    (folder / "meta.pkl").write_bytes(
        pickle.dumps({"vocab_size": 3, "itos": itos, "stoi": {c: n for n, c in itos.items()}})
    )
    report = look(folder, samples=1)
    assert report.tokenizer == {"name": "char", "n_vocab": 3, "eot": None}
    assert report.splits["train"].samples[0]["text"] == "abcb"


def test_bins_of_another_vocabulary_are_a_problem(tmp_path: Path) -> None:
    folder = plain_bins(tmp_path / "own", [1, 2, 50257], [4])
    assert "train.bin, token 2: id 50,257" in only_problem(look(folder))


def test_shards_are_one_row_with_end_of_text_in_front(tmp_path: Path) -> None:
    # As llm.c writes them: a document goes on in the next shard.
    write_shard(tmp_path / "web_train_000001.bin", [GPT2_EOT, 11, 12, GPT2_EOT, 13])
    write_shard(tmp_path / "web_train_000002.bin", [14, 15, GPT2_EOT, 11, 12])
    write_shard(tmp_path / "web_val_000000.bin", [GPT2_EOT, 13, 14, 15, GPT2_EOT, 99])
    report = look(tmp_path)
    train = report.splits["train"]
    assert train.files == ["web_train_000001.bin", "web_train_000002.bin"]
    assert (train.documents, train.empty_documents, train.tokens) == (3, 0, 10)
    assert [sample["position"] for sample in train.samples] == [1, 4, 8]
    assert train.duplicates is not None
    assert train.duplicates["documents"] == 1
    assert report.in_both is not None
    assert report.in_both["in_val"] == 1


def test_damage_in_a_shard_names_the_shard(tmp_path: Path) -> None:
    write_shard(tmp_path / "web_train_000001.bin", [1, 2, 3])
    write_shard(tmp_path / "web_train_000002.bin", [4, 60000, 5])
    write_shard(tmp_path / "web_val_000001.bin", [4, 5, 6])
    path = tmp_path / "web_val_000001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    problems = look(tmp_path).problems
    assert any(problem.startswith("web_train_000002.bin, token 1: id 60,000") for problem in problems)
    assert "web_val_000001.bin is cut short: its header promises 3 tokens, 2 are there" in problems


def test_what_cannot_be_checked_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no dataset"):
        check(tmp_path / "nowhere", progress=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no train\.bin"):
        check(tmp_path / "empty", progress=False)
    (tmp_path / "empty" / ".prepare.json").write_text("{}")
    with pytest.raises(UserError, match="not finished yet"):
        check(tmp_path / "empty", progress=False)
    (tmp_path / "odd" / "train.bin").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot read"):
        check(tmp_path / "odd", progress=False)
    folder = made(tmp_path)
    change_meta(folder, dtype="float64")
    with pytest.raises(UserError, match="float64"):
        check(folder, progress=False)


def test_a_bin_that_shrinks_meanwhile_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    np.zeros(100, "<u2").tofile(path)
    row = TokenRow([path], np.dtype("<u2"))
    path.write_bytes(b"\0" * 50)
    with pytest.raises(UserError, match="became shorter"):
        row.read(0, 100)


# ---------------------------------------------------------------- windows


def naive(row: list[int], eot: int) -> dict[str, Any]:
    """The same facts, the slow and obvious way."""
    texts: list[list[int]] = [[]]
    for token in row:
        if token == eot:
            texts.append([])
        else:
            texts[-1].append(token)
    if not texts[-1]:
        texts.pop()
    elif not texts[0]:
        texts.pop(0)
    counts = Counter(row)
    full = Counter(tuple(text) for text in texts if text)
    return {
        "counts": counts,
        "lengths": [len(text) for text in texts],
        "copies": sum(times - 1 for times in full.values()),
        "texts": sum(times > 1 for times in full.values()),
        "most": max((times for times in full.values() if times > 1), default=0),
        "entropy": -sum(n / len(row) * math.log(n / len(row)) for n in counts.values()),
        "full": full,
    }


# Built of few documents, so that the same one is met again in a row and in the other.
pieces_of_rows = st.sampled_from([[3], [0, 3], [1, 3], [2, 1, 0, 3], [0], [2], [4]])
rows = st.lists(pieces_of_rows, min_size=1, max_size=30).map(
    lambda pieces: [token for piece in pieces for token in piece]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(train=rows, val=rows, cut=st.integers(0, 60), window=st.integers(1, 9))
def test_results_do_not_depend_on_windows_or_files(
    tmp_path: Path, train: list[int], val: list[int], cut: int, window: int
) -> None:
    """Ids 0 to 3, of which 3 ends a document; 4 is out of range."""
    pieces = {"train": [train[:cut], train[cut:]], "val": [val]}
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "WINDOW_TOKENS", window)
        for split, parts in pieces.items():
            paths = [tmp_path / f"{split}{number}" for number in range(len(parts))]
            for path, part in zip(paths, parts, strict=True):
                np.array(part, "<u2").tofile(path)
            row = TokenRow(paths, np.dtype("<u2"))
            found[split] = survey.survey(row, len(row), 4, 3, lambda tokens, documents: None)
    for split, row_ in (("train", train), ("val", val)):
        there, expected = found[split], naive(row_, 3)
        assert there.tokens == len(row_)
        assert there.sha256 == hashlib.sha256(np.array(row_, "<u2").tobytes()).hexdigest()
        assert there.counts_V.tolist() == [expected["counts"][token] for token in range(4)]
        bad = [(at, token) for at, token in enumerate(row_) if token > 3]
        assert (there.out_of_range, there.first_out_of_range) == (len(bad), bad[0] if bad else None)
        if not bad:
            assert survey.entropy(there.counts_V) == pytest.approx(expected["entropy"], abs=1e-12)
        if 3 not in row_:
            assert there.documents is None
            continue
        assert there.documents is not None
        assert there.documents.lengths_D.tolist() == expected["lengths"]
        for number, length in enumerate(expected["lengths"]):
            start = there.documents.start(number)
            assert 3 not in row_[start : start + length]
            assert start + length == len(row_) or row_[start + length] == 3
        again = survey.repeats(there.documents.sorted_hashes())
        assert (again.copies, again.texts, again.most_times) == tuple(
            expected[key] for key in ("copies", "texts", "most")
        )
    if found["train"].documents and found["val"].documents:
        both = survey.shared(*(found[split].documents.sorted_hashes() for split in ("train", "val")))
        in_train, in_val = naive(train, 3)["full"], naive(val, 3)["full"]
        assert both.in_train == sum(times for text, times in in_train.items() if text in in_val)
        assert both.in_val == sum(times for text, times in in_val.items() if text in in_train)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 5000), min_size=1))
def test_the_histogram_counts_every_document_once(lengths: list[int]) -> None:
    rows = survey.histogram(np.sort(np.array(lengths, np.int64)))
    for low, high, count in rows:
        assert count == sum(low <= length <= high for length in lengths)
    assert sum(count for _, _, count in rows) == len(lengths)
    assert rows[0][2]
    assert rows[-1][2]


def test_whole_reports_do_not_depend_on_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path)
    whole = look(folder).to_json()
    monkeypatch.setattr(survey, "WINDOW_TOKENS", 7)
    assert look(folder).to_json() == whole


def test_memory_is_a_window_and_a_few_bytes_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = np.random.default_rng(0).integers(0, 50_000, 4_000_000).astype("<u2")
    row[::400] = GPT2_EOT
    row.tofile(tmp_path / "train.bin")
    row[:100].tofile(tmp_path / "val.bin")
    monkeypatch.setattr(survey, "WINDOW_TOKENS", 2**14)
    make_tokenizer("gpt2")  # its tables are not what is measured
    tracemalloc.start()
    try:
        look(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Three tables of 50,257 counts and 10,000 documents; the tokens themselves are 8 MB.
    assert peak < 5e6


def test_progress_goes_to_stderr_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(made(tmp_path), progress=True)
    assert capsys.readouterr().out == ""
