"""Killed at any moment and started again, prepare gives the bytes of an undisturbed run."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onecard.data.batches import Sequences
from onecard.data.bins import open_split
from onecard.data.prepare import pipeline, reading, split, writer
from onecard.data.prepare.command import prepare
from onecard.data.prepare.options import PrepareOptions
from onecard.data.prepare.origin import LocalFiles
from onecard.data.prepare.outcome import PreparedFacts, summary
from onecard.data.prepare.reading import Place
from onecard.data.tokenizer import ByteTokenizer
from onecard.errors import UserError

OUTPUT = ["meta.json", "train.bin", "val.bin"]


def make_corpus(folder: Path, documents: int = 120) -> Path:
    """Every kind of file, with empty documents and bad bytes in it."""
    folder.mkdir(parents=True)
    text = [f"Document {n}. " + "words and words " * (n % 23) for n in range(documents)]
    rows = [json.dumps({"text": "" if n % 17 == 3 else t}) + "\n" for n, t in enumerate(text)]
    (folder / "a.jsonl").write_text("".join(rows))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(f"{row}\n" for row in rows[::-1]).encode()))
    (folder / "c.txt").write_bytes(b"a long text \xff with a bad byte\n" * 400)
    for number in range(20):
        (folder / f"d{number:02}.txt").write_text(f"note {number} " * (number + 1))
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    column: list[str | None] = [t.upper() if n % 13 else None for n, t in enumerate(text)]
    pq.write_table(pa.table({"text": column}), folder / "e.parquet", row_group_size=37)
    return folder


def run(*inputs: Path | str, root: Path, **options: Any) -> PreparedFacts:
    progress = options.pop("progress", False)
    options = {"tokenizer": "byte", "out_root": str(root / "data")} | options
    return prepare([str(given) for given in inputs], PrepareOptions(**options), progress=progress)


def outputs(folder: Path) -> dict[str, bytes]:
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    assert [name for name in names if name != "meta.pkl"] == OUTPUT
    return {name: (folder / name).read_bytes() for name in names}


def assert_same(folder: Path, expected: dict[str, bytes]) -> None:
    """Byte for byte; what differs is shown in words first."""
    found = outputs(folder)
    assert json.loads(found["meta.json"]) == json.loads(expected["meta.json"])
    assert {name: len(content) for name, content in found.items()} == {
        name: len(content) for name, content in expected.items()
    }
    assert found == expected


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch every few documents, a commit after each."""
    monkeypatch.setattr(writer, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(reading, "BATCH_BYTES", 600)
    monkeypatch.setattr(pipeline, "BATCH_BYTES", 600)
    monkeypatch.setattr(reading, "PIECE_BYTES", 700)


# ---------------------------------------------------------------- kill -9

# What the killed process runs; argv: corpus, output root, tokens wanted or 0. Slow, so that there is
# something to kill.
_VICTIM = """
import sys, time
from pathlib import Path
from onecard.data.prepare import pipeline
from onecard.data.prepare import reading
from onecard.data.prepare import writer
from onecard.data.prepare.command import prepare
from onecard.data.prepare.options import PrepareOptions
from onecard.data.tokenizer import ByteTokenizer
writer.COMMIT_SECONDS = 0.0
reading.BATCH_BYTES = pipeline.BATCH_BYTES = 600
reading.PIECE_BYTES = 700
encode = ByteTokenizer.encode_batch
def slow(self, texts):
    time.sleep(0.004)
    return encode(self, texts)
ByteTokenizer.encode_batch = slow
print("ready", flush=True)
prepare([sys.argv[1]], PrepareOptions(out_root=sys.argv[2], tokenizer="byte",
        tokens=int(sys.argv[3]) or None), progress=False)
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [0, 45_000])
def test_twenty_random_kills_change_nothing(tmp_path: Path, tokens: int, small_steps: None) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    expected = outputs(run(corpus, root=tmp_path / "calm", tokens=tokens or None).folder)
    chance = random.Random(tokens)
    kills, folder = 0, tmp_path / "data" / "corpus"
    progress: set[str] = set()

    def begin(root: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _VICTIM, str(corpus), str(root), str(tokens)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    undisturbed = begin(tmp_path / "undisturbed")
    began = time.perf_counter()
    undisturbed.communicate()
    span = 0.8 * (time.perf_counter() - began)  # somewhere within the work, on busy machines too
    while True:
        process = begin(tmp_path / "data")
        assert process.stdout is not None
        if kills >= 20:
            assert process.stdout.read() == "done\n"
            break
        time.sleep(chance.uniform(0.0, span))
        process.send_signal(signal.SIGKILL)
        if "done" in process.stdout.read():
            # Quicker than expected: everything is there, so begin again.
            assert_same(folder, expected)
            for path in folder.iterdir():
                path.unlink()
        kills += 1
        process.wait()
        if (folder / ".prepare.json").exists():
            progress.add((folder / ".prepare.json").read_text())
    assert len(progress) >= 3, "the kills came at different points of the work"
    assert_same(folder, expected)


def killed_at(number: int, after: bool, work: Callable[[], object]) -> bool:
    """Run `work` in a child that kills itself at its n-th step on disk; whether it came that far."""
    child = os.fork()
    if child == 0:
        done = 0

        def dying(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal done
                done += 1
                if done == number and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                this = done
                try:
                    return original(*args, **options)
                finally:
                    if this == number:
                        os.kill(os.getpid(), signal.SIGKILL)

            return call

        try:
            for name in ("fsync", "replace", "rename", "unlink", "remove", "truncate"):
                setattr(os, name, dying(getattr(os, name)))
            work()
        except BaseException:
            os._exit(99)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the undisturbed work failed"
    return False


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("growing", "piece_bytes"), [(False, 700), (True, 700), (True, 10**6)])
def test_a_kill_at_each_rename_and_fsync_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool, growing: bool, piece_bytes: int
) -> None:
    monkeypatch.setattr(writer, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(reading, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(reading, "BATCH_BYTES", 4000)
    monkeypatch.setattr(pipeline, "BATCH_BYTES", 4000)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(12):
        (corpus / f"{number:02}.txt").write_text(f"Text {number}. " * 200)
    expected = outputs(run(corpus, root=tmp_path / "calm").folder)
    number = 0
    while True:
        number += 1
        root = tmp_path / f"{number}"
        if growing:
            first = run(corpus, root=root, tokens=9000).folder
            before = (first / "train.bin").read_bytes()
            old_tokens = len(before) // 2
        if not killed_at(number, after, lambda root=root: run(corpus, root=root)):  # type: ignore[misc]
            break
        folder = root / "data" / "corpus"
        if growing:
            # Readers of the dataset see the old tokens or all of the new ones, at every moment.
            tokens = open_split(folder, "train", 8, 257)
            assert len(tokens) in (old_tokens, len(expected["train.bin"]) // 2)
            assert tokens.read(0, old_tokens).astype("<u2").tobytes() == before
        elif (folder / "meta.json").exists():
            open_split(folder, "train", 8, 257)
        run(corpus, root=root)
        assert_same(folder, expected)
    assert number > 15


# ---------------------------------------------------------------- errors and interruptions


FAULTS = ["encoder", "disk full", "rename", "interrupt", "interrupt between splits"]


def inject(kind: str, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    """Let something break when part of the work is done; the error a caller must then see."""
    calls = 0

    def fails_at(limit: int, error: BaseException, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > limit:
                raise error
            return original(*args, **options)

        return call

    full = OSError(errno.ENOSPC, "No space left on device")
    patches: dict[str, tuple[Any, str, int, BaseException]] = {
        "disk full": (writer._SplitWriter, "append", 10, full),
        "rename": (Path, "replace", 12, full),
        "encoder": (ByteTokenizer, "encode_batch", 10, ValueError("bug")),
        "interrupt": (writer._SplitWriter, "append", 10, KeyboardInterrupt()),
        # Every batch appends to train, then to val: this comes in the middle of one.
        "interrupt between splits": (writer.DatasetWriter, "append", 11, KeyboardInterrupt()),
    }
    target, name, limit, error = patches[kind]
    monkeypatch.setattr(target, name, fails_at(limit, error, getattr(target, name)))
    return UserError if error is full else type(error)


@pytest.mark.parametrize("kind", FAULTS)
def test_after_a_failure_the_same_command_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, small_steps: None
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    expected = outputs(run(corpus, root=tmp_path / "calm").folder)
    with monkeypatch.context() as patch, pytest.raises(inject(kind, patch)) as caught:
        run(corpus, root=tmp_path)
    if isinstance(caught.value, UserError):
        assert "disk is full" in caught.value.what
        assert "kept" in caught.value.why
        assert "continues" in caught.value.hint
    folder = tmp_path / "data" / "corpus"
    assert (folder / ".prepare.json").exists()
    with pytest.raises(UserError, match="not finished yet"):
        open_split(folder, "train", 8, 257)
    assert not run(corpus, root=tmp_path).already
    assert_same(folder, expected)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_failure_while_replacing_leaves_the_old_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, small_steps: None
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    folder = run(corpus, root=tmp_path).folder
    before = outputs(folder)
    (corpus / "a.jsonl").write_text('{"text": "changed"}\n' * 30)
    with monkeypatch.context() as patch, pytest.raises(inject(kind, patch)):
        run(corpus, root=tmp_path, force=True)
    assert {name: (folder / name).read_bytes() for name in OUTPUT} == before
    open_split(folder, "train", 8, 257)
    run(corpus, root=tmp_path, force=True)
    assert outputs(folder) == outputs(run(corpus, root=tmp_path / "calm").folder)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_failure_while_growing_leaves_the_old_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, small_steps: None
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    folder = run(corpus, root=tmp_path, tokens=20_000).folder
    before = outputs(folder)
    count = len(before["train.bin"]) // 2
    with monkeypatch.context() as patch, pytest.raises(inject(kind, patch)):
        run(corpus, root=tmp_path)
    assert (folder / "meta.json").read_bytes() == before["meta.json"]
    tokens = open_split(folder, "train", 8, 257)
    assert len(tokens) == count
    assert tokens.read(0, count).astype("<u2").tobytes() == before["train.bin"]
    run(corpus, root=tmp_path)
    assert outputs(folder) == outputs(run(corpus, root=tmp_path / "calm").folder)


def test_all_whole_files_before_a_damaged_one_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batches of their real size: what was read but not yet written when the error came counts too."""
    monkeypatch.setattr(split, "_LOOKED_OVER_DOCUMENTS", 0)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name in "ab":
        rows = [json.dumps({"text": f"{name} {n} " * 50}) + "\n" for n in range(4000)]
        (corpus / f"{name}.jsonl").write_text("".join(rows))
    expected = run(corpus, root=tmp_path / "calm").meta
    (corpus / "c.jsonl").write_text('{"text": "fine"}\nnot json\n')
    with pytest.raises(UserError, match=r"c\.jsonl, line 2") as caught:
        run(corpus, root=tmp_path)
    kept = json.loads((tmp_path / "data" / "corpus" / ".prepare.json").read_text())["meta"]
    assert kept["documents"] == expected["documents"] == 8000
    assert f"{expected['tokens']:,} tokens from before it are kept" in caught.value.why
    (corpus / "c.jsonl").unlink()
    assert run(corpus, root=tmp_path).meta == expected


def test_new_bins_under_an_old_meta_are_noticed(tmp_path: Path) -> None:
    """Killed between the renames of a replacement and its meta.json: never the new bins by the old facts."""
    corpus = make_corpus(tmp_path / "corpus")
    folder = run(corpus, root=tmp_path).folder
    (corpus / "more.txt").write_text("more text " * 500)
    other = run(corpus, root=tmp_path / "other", tokenizer="char").folder
    for name in ("train.bin", "val.bin"):
        (folder / name).write_bytes((other / name).read_bytes())
    meta = json.loads((other / "meta.json").read_text())
    writer.write_journal(folder, {"mode": "new", "finished": True, "meta": meta})
    with pytest.raises(UserError, match="does not belong"):
        open_split(folder, "train", 8, 257)
    assert run(corpus, root=tmp_path, tokenizer="char").already
    assert_same(folder, outputs(other))


def test_force_replaces_an_unfinished_prepare_of_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_steps: None
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    with monkeypatch.context() as patch, pytest.raises(inject("interrupt", patch)):
        run(corpus, root=tmp_path)
    (corpus / "a.jsonl").write_text('{"text": "other text"}\n' * 50)
    run(corpus, root=tmp_path, force=True)
    assert_same(tmp_path / "data" / "corpus", outputs(run(corpus, root=tmp_path / "calm").folder))


def test_few_tokens_still_have_something_to_validate_on(tmp_path: Path) -> None:
    rows = [{"text": f"{n:05} words"} for n in range(5000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    meta = run(tmp_path / "a.jsonl", root=tmp_path, tokens=100, val_fraction=0.005).meta
    assert meta["splits"]["train"]["tokens"] >= 100
    assert meta["splits"]["val"]["tokens"] > 0


@pytest.mark.parametrize("form", ["text", "copies"])
@pytest.mark.parametrize("calls", [3, 4, 9, 10])
def test_the_only_document_continues_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_steps: None, form: str, calls: int
) -> None:
    """Split by its tail, in pieces or in several copies: the cut stays where it was."""
    if form == "text":
        path = tmp_path / "play.txt"
        path.write_text("To be, or not to be, that is the question. ñ\n" * 150)
    else:
        path = tmp_path / "copies.jsonl"
        path.write_text((json.dumps({"text": "abcdefghij" * 100}) + "\n") * 6)
    expected = outputs(run(path, root=tmp_path / "calm").folder)
    original, count = writer.DatasetWriter.append, 0

    def interrupted(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == calls:
            raise KeyboardInterrupt
        original(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer.DatasetWriter, "append", interrupted)
        run(path, root=tmp_path)
    if calls == 10:
        # And if the disk lost what it had promised: from the beginning, with the cut where it belongs.
        partial = tmp_path / "data" / path.stem / "train.bin.partial"
        partial.write_bytes(b"x" + partial.read_bytes()[1:])
    folder = run(path, root=tmp_path).folder
    assert_same(folder, expected)


@pytest.mark.parametrize("looked_over", [True, False])
@pytest.mark.parametrize("damage", ["broken line", "truncated parquet", "damaged gzip"])
def test_a_damaged_file_keeps_what_was_before_it_and_can_be_replaced(
    tmp_path: Path, damage: str, looked_over: bool, small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is small enough to be looked over first is refused before anything is written."""
    if not looked_over:
        monkeypatch.setattr(split, "_LOOKED_OVER_DOCUMENTS", 0)
    corpus = make_corpus(tmp_path / "corpus")
    expected = outputs(run(corpus, root=tmp_path / "calm").folder)
    name = {"broken line": "a.jsonl", "truncated parquet": "e.parquet", "damaged gzip": "b.jsonl.gz"}[damage]
    path = corpus / name
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2] + (b'\n{"text": \n' if damage == "broken line" else b""))
    with pytest.raises(UserError, match=name.replace(".", r"\.")) as caught:
        run(corpus, root=tmp_path)
    if damage == "broken line" or looked_over:  # of the first file too: nothing came before it
        assert not (tmp_path / "data" / "corpus").exists()
    else:
        assert "tokens from before it are kept" in caught.value.why
        assert "continues" in caught.value.hint
        kept = json.loads((tmp_path / "data" / "corpus" / ".prepare.json").read_text())["meta"]
        assert kept["tokens"] > 0
        assert kept["position"]["item"] == 0
    path.write_bytes(good)
    run(corpus, root=tmp_path)
    assert_same(tmp_path / "data" / "corpus", expected)


def test_a_full_disk_is_noticed_between_two_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_steps: None
) -> None:
    import shutil

    corpus = make_corpus(tmp_path / "corpus")
    expected = outputs(run(corpus, root=tmp_path / "calm").folder)
    real, calls = shutil.disk_usage, 0

    def filling(path: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(path)._replace(free=2**40 if calls < 8 else 2**20)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", filling)
        with pytest.raises(UserError, match="disk is nearly full"):
            run(corpus, root=tmp_path)
    run(corpus, root=tmp_path)
    assert_same(tmp_path / "data" / "corpus", expected)


def test_the_last_of_a_disk_is_left_alone_and_what_is_there_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_steps: None
) -> None:
    """A disk of 70 MB where each byte of the bins takes 4 KB. No commit is due by time."""
    import shutil

    corpus = make_corpus(tmp_path / "corpus")
    expected = outputs(run(corpus, root=tmp_path / "calm").folder)
    folder, real = tmp_path / "data" / "corpus", shutil.disk_usage
    free = list[int]()

    def filling(path: Any) -> Any:
        written = sum(file.stat().st_size for file in folder.glob("*.partial"))
        free.append(70 * 10**6 - 4096 * written)
        return real(path)._replace(free=free[-1])

    with monkeypatch.context() as patch:
        patch.setattr(writer, "COMMIT_SECONDS", 1000.0)
        patch.setattr(shutil, "disk_usage", filling)
        with pytest.raises(UserError, match="disk is nearly full") as caught:
            run(corpus, root=tmp_path)
    assert 0 < free[-1] < 2**25
    tokens = json.loads((folder / ".prepare.json").read_text())["meta"]["tokens"]
    assert tokens > 5000 and f"the {tokens:,} tokens so far are kept" in caught.value.what
    assert "run the same command again" in caught.value.hint
    read = list[Place]()
    origin_read = LocalFiles.read
    monkeypatch.setattr(LocalFiles, "read", lambda *given: (read.append(given[2]), origin_read(*given))[1])
    run(corpus, root=tmp_path)
    assert read[0] > Place()  # it went on
    assert_same(folder, expected)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="Linux's")
def test_tokens_go_to_disk_while_others_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece after piece, none left out, each out of Python's buffer: a commit then waits for little."""
    corpus, begun = make_corpus(tmp_path / "corpus"), dict[int, int]()

    def advise(file: int, start: int, size: int, advice: int) -> None:
        assert begun.get(file, 0) == start and os.fstat(file).st_size >= start + size
        begun[file] = start + size

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(writer, "_BEGIN_BYTES", 200)
    for module in (pipeline, reading):
        monkeypatch.setattr(module, "BATCH_BYTES", 100)
    folder = run(corpus, root=tmp_path).folder
    assert 0 < (folder / "train.bin").stat().st_size - max(begun.values()) < 2000


def test_a_full_disk_is_told_whatever_still_lay_in_a_buffer(tmp_path: Path) -> None:
    """Many short stretches of both splits: closing the files finds the disk full once more."""
    lines = (json.dumps({"text": f"{number} is a number"}) for number in range(20_000))
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "from onecard.cli import main;"
        "main(['prepare', 'many.jsonl', '--name', 'x', '--tokenizer', 'byte', '--val-fraction', '0.5'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "error: cannot write data/x" in done.stderr, done.stderr
    assert "the system refused" not in done.stderr


def test_an_unfinished_prepare_of_something_else_is_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_steps: None
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    with monkeypatch.context() as patch, pytest.raises(inject("interrupt", patch)):
        run(corpus, root=tmp_path)
    with pytest.raises(UserError, match="unfinished prepare of something else") as caught:
        run(corpus, root=tmp_path, tokenizer="char")
    assert "--force" in caught.value.hint
    path = corpus / "a.jsonl"
    path.write_bytes(path.read_bytes().replace(b"Document 1.", b"Document 7."))
    with pytest.raises(UserError, match="unfinished prepare of something else"):
        run(corpus, root=tmp_path)
    run(corpus, root=tmp_path, tokenizer="char", force=True)
    calm = run(corpus, root=tmp_path / "calm", tokenizer="char").folder
    assert outputs(tmp_path / "data" / "corpus") == outputs(calm)


def test_a_touched_but_equal_file_is_still_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_steps: None
) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    expected = outputs(run(corpus, root=tmp_path / "calm").folder)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_READ_AHEAD", 1)
        with pytest.raises(ValueError, match="bug"):
            inject("encoder", patch)
            run(corpus, root=tmp_path)
    state = json.loads((tmp_path / "data" / "corpus" / ".prepare.json").read_text())
    finished = [entry["name"] for entry in state["meta"]["sources"] if "sha256" in entry]
    for name in finished:
        os.utime(tmp_path / name, ns=(1, 1))
    run(corpus, root=tmp_path)
    assert_same(tmp_path / "data" / "corpus", expected)


def test_what_the_journal_promises_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_steps: None
) -> None:
    """A disk that lost what it had said to have written: the work begins again, no wrong tokens."""
    corpus = make_corpus(tmp_path / "corpus")
    expected = outputs(run(corpus, root=tmp_path / "calm").folder)
    with monkeypatch.context() as patch, pytest.raises(inject("interrupt", patch)):
        run(corpus, root=tmp_path)
    partial = tmp_path / "data" / "corpus" / "train.bin.partial"
    raw = bytearray(partial.read_bytes())
    raw[10] ^= 1
    partial.write_bytes(raw)
    run(corpus, root=tmp_path)
    assert_same(tmp_path / "data" / "corpus", expected)


def test_leftovers_without_a_journal_are_written_over(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    folder = tmp_path / "data" / "corpus"
    folder.mkdir(parents=True)
    (folder / "train.bin.partial").write_bytes(b"half" * 10_000)
    (folder / ".prepare.json").write_text('{"schema": 1, "mode": "new", "meta": {}}')
    run(corpus, root=tmp_path)
    assert outputs(folder) == outputs(run(corpus, root=tmp_path / "calm").folder)


# ---------------------------------------------------------------- more tokens later


@pytest.mark.parametrize("steps", [[1], [1000, 20_000], [5000, 5001, 30_000, 31_000]])
def test_raised_step_by_step_gives_what_one_run_gives(tmp_path: Path, steps: list[int]) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    before = b""
    for tokens in steps:
        facts = run(corpus, root=tmp_path, tokens=tokens)
        now = (facts.folder / "train.bin").read_bytes()
        assert len(now) // 2 >= tokens
        assert now.startswith(before)
        before = now
        once = run(corpus, root=tmp_path / f"once{tokens}", tokens=tokens)
        assert outputs(facts.folder) == outputs(once.folder)
    assert run(corpus, root=tmp_path, tokens=steps[-1]).already
    facts = run(corpus, root=tmp_path)
    assert not facts.already
    assert "tokens added" in summary(facts)
    assert outputs(facts.folder) == outputs(run(corpus, root=tmp_path / "all").folder)
    assert run(corpus, root=tmp_path, tokens=10**9).already


def test_enough_is_reached_with_the_first_document_that_brings_it(tmp_path: Path) -> None:
    rows = [{"text": f"{n:04}" * 25} for n in range(500)]  # 100 bytes and an end-of-text each
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = run(tmp_path / "a.jsonl", root=tmp_path, tokens=10_000, val_fraction=0.1)
    assert facts.meta["splits"]["train"]["tokens"] == 100 * 101
    ids = np.fromfile(facts.folder / "train.bin", "<u2")
    assert ids[-1] == 256


def test_new_files_are_appended_after_the_old_ones(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    before = outputs(run(corpus, root=tmp_path).folder)
    (corpus / "0_first_by_name.txt").write_text("new text, first by name")
    facts = run(corpus, root=tmp_path)
    after = outputs(facts.folder)
    assert after["train.bin"].startswith(before["train.bin"])
    assert after["val.bin"].startswith(before["val.bin"])
    assert facts.meta["sources"][-1]["name"] == "corpus/0_first_by_name.txt"
    assert facts.meta["val_fraction"] == json.loads(before["meta.json"])["val_fraction"]
    # Without one of the old files it is another dataset.
    (corpus / "a.jsonl").unlink()
    with pytest.raises(UserError, match="something else"):
        run(corpus, root=tmp_path)


def test_one_text_cut_by_its_tail_does_not_grow(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text("line of a play\n" * 100)
    run(tmp_path / "play.txt", root=tmp_path)
    (tmp_path / "more.txt").write_text("another\n")
    with pytest.raises(UserError, match="something else") as caught:
        run(tmp_path / "play.txt", tmp_path / "more.txt", root=tmp_path, name="play")
    assert "tail" in caught.value.why
    with pytest.raises(UserError, match="--tokens needs more than one document"):
        run(tmp_path / "more.txt", root=tmp_path, tokens=5)


def test_appending_to_changed_bins_is_refused(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    folder = run(corpus, root=tmp_path, tokens=5000).folder
    raw = bytearray((folder / "train.bin").read_bytes())
    raw[4] ^= 1
    (folder / "train.bin").write_bytes(raw)
    with pytest.raises(UserError, match="was changed since"):
        run(corpus, root=tmp_path)
    assert (folder / "train.bin").read_bytes() == raw


def test_a_run_in_the_middle_of_an_epoch_is_not_disturbed(tmp_path: Path, small_steps: None) -> None:
    """Sequences of the present epoch stay what they were while the bins grow, and after it."""
    corpus = make_corpus(tmp_path / "corpus")
    folder = run(corpus, root=tmp_path, tokens=20_000).folder
    calm_folder = run(corpus, root=tmp_path / "calm", tokens=20_000).folder
    calm, busy = (Sequences(open_split(f, "train", 32, 257), 32, seed=1) for f in (calm_folder, folder))
    state = busy.start()
    for step in range(12):
        if step == 4:
            run(corpus, root=tmp_path, tokens=30_000)
        if step == 8:
            run(corpus, root=tmp_path)
        located = [sequences.locate(state, 8) for sequences in (calm, busy)]
        positions = [located_.positions for located_ in located]
        np.testing.assert_array_equal(*positions)
        np.testing.assert_array_equal(
            calm.tokens.gather(positions[0], 33), busy.tokens.gather(positions[1], 33)
        )
        assert located[0].next_state == located[1].next_state
        state = located[0].next_state
