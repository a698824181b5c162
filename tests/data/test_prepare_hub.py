"""Named datasets from a stand-in of the Hub, through the whole of prepare."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, Faults, HubServer, at_home

from onecard.data.hub import catalogue
from onecard.data.hub import fetch as hub
from onecard.data.prepare import origin, pipeline, reading
from onecard.data.prepare.command import prepare
from onecard.data.prepare.options import PrepareOptions
from onecard.data.prepare.outcome import PreparedFacts
from onecard.data.tokenizer import load_tokenizer
from onecard.errors import UserError

REPO = "HuggingFaceFW/fineweb"
DUMP = "CC-MAIN-2013-20"
OUTPUT = ["meta.json", "train.bin", "val.bin"]
N_FILES, ROWS = 4, 120


def parquet(number: int) -> bytes:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    chance = random.Random(number)
    rows = [f"Page {number}.{row} " + chance.randbytes(300).hex() for row in range(ROWS)]
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": rows, "id": list(range(ROWS))}), buffer, row_group_size=25)
    return buffer.getvalue()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as running:
        at_home(monkeypatch, running.url, tmp_path / "home")
        for number in range(N_FILES):
            running.put(REPO, f"data/{DUMP}/000_0000{number}.parquet", parquet(number))
            running.put(REPO, f"sample/100BT/000_0000{number}.parquet", parquet(10 + number))
        yield running


def run(root: Path, **options: Any) -> PreparedFacts:
    progress = options.pop("progress", False)
    options = {"tokenizer": "byte", "dump": DUMP, "val_fraction": 0.1} | options
    return prepare(["fineweb"], PrepareOptions(out_root=str(root / "data"), **options), progress=progress)


def outputs(folder: Path) -> dict[str, bytes]:
    assert sorted(path.name for path in folder.iterdir() if path.name != ".prepare.lock") == OUTPUT
    return {name: (folder / name).read_bytes() for name in OUTPUT}


def test_fineweb_gives_what_its_files_give(server: HubServer, tmp_path: Path) -> None:
    facts = run(tmp_path)
    assert facts.folder.name == "fineweb"
    assert facts.meta["dataset"] == {
        "name": "fineweb", "repo": REPO, "folder": f"data/{DUMP}", "commit": COMMIT,
    }  # fmt: skip
    assert facts.meta["documents"] == N_FILES * ROWS
    assert [source["name"] for source in facts.meta["sources"]] == [
        f"data/{DUMP}/000_0000{number}.parquet" for number in range(N_FILES)
    ]
    local = tmp_path / "local"
    local.mkdir()
    for number in range(N_FILES):
        (local / f"{number}.parquet").write_bytes(parquet(number))
    same = prepare(
        [str(local)],
        PrepareOptions(out_root=str(tmp_path / "data"), tokenizer="byte", val_fraction=0.1),
        progress=False,
    )
    for name in ("train.bin", "val.bin"):
        assert (facts.folder / name).read_bytes() == (same.folder / name).read_bytes()
    outputs(facts.folder)  # and no parquet left behind
    assert run(tmp_path).already


def test_no_more_files_are_fetched_than_needed(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (reading, pipeline):
        monkeypatch.setattr(module, "BATCH_BYTES", 5000)
    size = len(parquet(0))
    tokens = 100_000  # one file has about 73,000 bytes of text
    facts = run(tmp_path, tokens=tokens)
    assert facts.meta["splits"]["train"]["tokens"] >= tokens
    assert len(facts.meta["sources"]) == 2
    assert server.served <= 2 * size + 5000
    before = (facts.folder / "train.bin").read_bytes()
    more = run(tmp_path, tokens=2 * tokens)
    assert (more.folder / "train.bin").read_bytes().startswith(before)
    assert outputs(more.folder) == outputs(run(tmp_path / "once", tokens=2 * tokens).folder)


def test_a_later_continuation_reads_the_commit_of_the_first(server: HubServer, tmp_path: Path) -> None:
    run(tmp_path, tokens=10_000)
    asked = len(server.requests)
    run(tmp_path, tokens=20_000)
    pinned = [request.path for request in server.requests[asked:] if "/revision/" in request.path]
    assert pinned
    assert all(COMMIT in path for path in pinned)


def test_without_a_dump_the_sample_is_read_in_mixed_order(server: HubServer, tmp_path: Path) -> None:
    facts = run(tmp_path, dump=None)
    names = [source["name"] for source in facts.meta["sources"]]
    assert sorted(names) == [f"sample/100BT/000_0000{number}.parquet" for number in range(N_FILES)]
    assert names == catalogue.lookup("fineweb").train_files(names)
    with pytest.raises(UserError, match="something else") as caught:
        run(tmp_path)
    assert "dataset" in caught.value.why


def test_keep_leaves_the_parquet_in_the_hub_cache(server: HubServer, tmp_path: Path) -> None:
    run(tmp_path, keep=True)
    kept = list((tmp_path / "home").rglob("*.parquet"))
    assert len(kept) == N_FILES
    served = server.served
    outputs(run(tmp_path / "again").folder)
    assert server.served == served  # from the cache, and the cache is left alone
    assert len(list((tmp_path / "home").rglob("*.parquet"))) == N_FILES


@pytest.mark.parametrize(
    "faults",
    [
        Faults(drop_after=30_000, drops=4),
        Faults(drop_after=30_000, drops=2, reset=True),
        Faults(expired=1),
        Faults(unavailable=1),
        Faults(corrupt=1),
        Faults(drop_after=20_000, drops=2, ignore_range=True),
    ],
)
def test_a_bad_line_changes_nothing(server: HubServer, tmp_path: Path, faults: Faults) -> None:
    expected = outputs(run(tmp_path / "calm").folder)
    server.faults = faults
    assert outputs(run(tmp_path).folder) == expected


def test_a_file_that_stays_wrong_keeps_what_came_before(server: HubServer, tmp_path: Path) -> None:
    expected = outputs(run(tmp_path / "calm").folder)
    path = f"data/{DUMP}/000_00002.parquet"
    good = server.repos[REPO].files[path]
    run(tmp_path, tokens=20_000)  # the listing's commit is pinned; then the server goes bad
    server.faults = Faults(corrupt=1000)
    with pytest.raises(UserError, match="parquet"):
        run(tmp_path)
    server.faults = Faults()
    assert server.repos[REPO].files[path] == good
    assert outputs(run(tmp_path).folder) == expected


def test_no_network_names_the_way_out(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError) as caught:
        run(tmp_path)
    assert "onecard prepare" in caught.value.hint
    assert "--name fineweb" in caught.value.hint
    assert not (tmp_path / "data" / "fineweb").exists()


def test_what_will_be_fetched_and_kept_is_said_first(
    server: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, progress=True, tokens=20_000)
    said = capsys.readouterr().err
    assert "HuggingFaceFW/fineweb" in said
    assert "of parquet to download" in said
    assert "removed once it is used" in said
    assert "0.0 MB of tokens to keep" in said  # 40 kB of them


def test_no_room_for_the_download_is_told_first(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="not enough room"):
        run(tmp_path)
    assert server.served == 0


def test_shakespeare_is_nanogpts_in_both_forms(server: HubServer, tmp_path: Path, monkeypatch: Any) -> None:
    text = "First Citizen:\nSpeak, speak.\n\n" * 100
    raw = text.encode()
    server.texts["/input.txt"] = raw
    import dataclasses
    import hashlib

    for name in ("shakespeare", "shakespeare_char"):
        entry = dataclasses.replace(
            catalogue.lookup(name), url=f"{server.url}/input.txt", size=len(raw),
            sha256=hashlib.sha256(raw).hexdigest(),
        )  # fmt: skip
        monkeypatch.setitem(catalogue._BY_NAME, name, entry)
    facts = prepare(["shakespeare_char"], PrepareOptions(out_root=str(tmp_path / "data")), progress=False)
    assert facts.folder.name == "shakespeare_char"
    assert facts.meta["tokenizer"]["name"] == "char"
    assert facts.meta["splits"]["train"]["tokens"] == int(len(text) * 0.9)
    assert facts.meta["splits"]["val"]["tokens"] == len(text) - int(len(text) * 0.9)
    tokenizer = load_tokenizer(facts.folder)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("Speak")) == "Speak"
    both = prepare(
        ["shakespeare"], PrepareOptions(out_root=str(tmp_path / "data"), tokenizer="byte"), progress=False
    )
    assert both.folder.name == "shakespeare"
    assert both.meta["tokenizer"]["name"] == "byte"


# ---------------------------------------------------------------- kill -9

_VICTIM = """
import sys, time
from pathlib import Path
from onecard.data.prepare import pipeline
from onecard.data.prepare import reading
from onecard.data.prepare import writer
from onecard.data.prepare.command import prepare
from onecard.data.prepare.options import PrepareOptions
writer.COMMIT_SECONDS = 0.0
reading.BATCH_BYTES = pipeline.BATCH_BYTES = 4000
print("ready", flush=True)
prepare(["fineweb"], PrepareOptions(out_root=sys.argv[1], tokenizer="byte",
        dump=sys.argv[2], val_fraction=0.1), progress=False)
print("done", flush=True)
"""


@pytest.mark.slow
def test_kills_while_downloading_and_tokenizing_change_nothing(server: HubServer, tmp_path: Path) -> None:
    expected = outputs(run(tmp_path / "calm").folder)
    total = server.served
    server.faults = Faults(seconds_per_piece=0.02)
    chance = random.Random(5)
    folder = tmp_path / "data" / "fineweb"
    for kill in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", _VICTIM, str(tmp_path / "data"), DUMP],
            stdout=subprocess.PIPE, text=True, env=os.environ.copy(),
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if kill == 11:
            server.faults = Faults()
            assert process.stdout.read() == "done\n"
        else:
            time.sleep(chance.uniform(0.0, 0.25))
            process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert outputs(folder) == expected
    # What was downloaded before a kill was not downloaded again, but for what was on its way.
    assert server.served - total < 2 * total
    assert json.loads(expected["meta.json"])["documents"] == N_FILES * ROWS


def test_origin_sizes_are_of_what_is_needed(server: HubServer, tmp_path: Path) -> None:
    from onecard.data.prepare.remote import RemoteFiles

    dataset = catalogue.lookup("fineweb", dump=DUMP)
    files = RemoteFiles(dataset, hub.list_files(dataset), tmp_path, False, 100)
    try:
        assert isinstance(files, origin.Origin)
        assert files.files_needed() == 1
        assert files.total_bytes == len(parquet(0))
    finally:
        files.close()
