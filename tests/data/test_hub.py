"""Fetching from a stand-in of the Hub that breaks in every way a network does. Nothing leaves the machine."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_server import COMMIT, Faults, HubServer, environment

from onecard.data.hub import transfer
from onecard.data.hub.catalogue import NamedDataset, lookup
from onecard.data.hub.fetch import Fetcher, FetchStatus, Listing, RemoteFile, fetch_text, list_files
from onecard.data.hub.transfer import Patience, StoppedError
from onecard.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SIZE = 300_000
QUICK = Patience(attempts=3, first_wait_s=0.001, longest_wait_s=0.002, timeout_s=5.0)
REPO = "roneneldan/TinyStories"
NAMES = [f"data/train-0000{number}-of-00003.parquet" for number in range(3)]
# The file's own folder inside the user's cache, as huggingface_hub lays it out.
CACHE = "hub/datasets--roneneldan--TinyStories"


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def nothing_leaves_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def only_here(host: Any, *rest: Any, **more: Any) -> Any:
        assert host in ("127.0.0.1", "localhost"), f"a test asks for {host}"
        return resolve(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", only_here)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        for name, value in environment(server.url, tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        for number, path in enumerate(NAMES):
            server.put(REPO, path, content_of(number))
        server.put(REPO, "data/validation-00000-of-00001.parquet", b"not for training")
        server.put(REPO, "README.md", b"a card")
        yield server


@pytest.fixture
def listing(hub: HubServer) -> Listing:
    return list_files(lookup("tinystories"), patience=QUICK)


def fetcher(listing: Listing, folder: Path, keep: bool = False) -> Fetcher:
    return Fetcher(listing, folder / ".parquet", keep, patience=QUICK)


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# --- which files --------------------------------------------------------------------------------


def test_a_listing_is_pinned_and_says_what_to_expect(hub: HubServer, listing: Listing) -> None:
    assert (listing.name, listing.repo, listing.commit) == ("tinystories", REPO, COMMIT)
    assert [file.path for file in listing.files] == NAMES
    assert listing.files[1] == RemoteFile(NAMES[1], SIZE, sha256(content_of(1)))


def test_a_long_listing_comes_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer(page_size=7) as server:
        for name, value in environment(server.url, tmp_path).items():
            monkeypatch.setenv(name, value)
        for number in range(40):
            server.put("karpathy/climbmix-400b-shuffle", f"shard_{number:05}.parquet", bytes([number]))
        listing = list_files(lookup("climbmix"), patience=QUICK)
        assert [file.path for file in listing.files] == [f"shard_{number:05}.parquet" for number in range(40)]
        assert sum("/tree/" in request.path for request in server.requests) == 6


def test_the_next_page_of_a_mirror_is_the_mirrors() -> None:
    link = '<https://huggingface.co/api/datasets/a/b/tree/main?cursor=x%3D%3D>; rel="next"'
    found = transfer._next_page(link, "https://mirror.example/api/datasets/a/b/tree/main?recursive=false")
    assert found == "https://mirror.example/api/datasets/a/b/tree/main?cursor=x%3D%3D"
    assert transfer._next_page(link.replace("next", "prev"), "https://mirror.example/") is None


def test_a_given_commit_is_the_one_listed(hub: HubServer, listing: Listing) -> None:
    hub.requests.clear()
    assert list_files(lookup("tinystories"), listing.commit, patience=QUICK) == listing
    assert all(COMMIT in request.path for request in hub.requests)


def test_a_commit_that_is_gone(hub: HubServer) -> None:
    with pytest.raises(UserError, match=r"there is no commit f+ in roneneldan/TinyStories"):
        list_files(lookup("tinystories"), "f" * 40, patience=QUICK)


def test_an_unknown_crawl_names_its_neighbours(hub: HubServer) -> None:
    for year in (2013, 2019, 2024):
        hub.put("HuggingFaceFW/fineweb-edu", f"data/CC-MAIN-{year}-20/000_00000.parquet", b"x")
    with pytest.raises(UserError, match="has no crawl CC-MAIN-2014-20") as caught:
        list_files(lookup("fineweb", dump="CC-MAIN-2014-20", edu=True), patience=QUICK)
    assert "CC-MAIN-2024-20" in caught.value.why and "there are 3" in caught.value.why
    assert caught.value.hint.startswith("onecard prepare fineweb --dump CC-MAIN-20")
    assert caught.value.hint.endswith(" --edu")


def test_a_crawl_that_is_there(hub: HubServer) -> None:
    for path in ("data/CC-MAIN-2013-20/000_00010.parquet", "data/CC-MAIN-2013-20/000_00009.parquet"):
        hub.put("HuggingFaceFW/fineweb", path, b"x")
    listing = list_files(lookup("fineweb", dump="CC-MAIN-2013-20"), patience=QUICK)
    assert [file.path for file in listing.files] == [
        "data/CC-MAIN-2013-20/000_00009.parquet",
        "data/CC-MAIN-2013-20/000_00010.parquet",
    ]


def test_a_rearranged_repository(hub: HubServer) -> None:
    hub.repos[REPO].files = {"data/all.parquet": b"x"}
    with pytest.raises(UserError, match="no files train-") as caught:
        list_files(lookup("tinystories"), patience=QUICK)
    assert "onecard prepare FILES-OR-FOLDER --name tinystories" in caught.value.hint


def test_a_path_that_leads_out_is_not_accepted(hub: HubServer) -> None:
    with pytest.raises(ValueError, match="not a path inside"):
        RemoteFile("data/../../../etc/passwd", 1, None)


def test_a_listing_outlives_a_busy_server(hub: HubServer) -> None:
    hub.faults = Faults(unavailable_api=2)
    assert len(list_files(lookup("tinystories"), patience=QUICK).files) == 3


def test_a_page_that_is_not_the_hubs(hub: HubServer) -> None:
    hub.faults = Faults(not_json=True)
    with pytest.raises(UserError, match="cannot reach") as caught:
        list_files(lookup("tinystories"), patience=QUICK)
    assert "log-in page" in caught.value.why


# --- each file ----------------------------------------------------------------------------------


def test_a_file_comes_whole_and_goes_when_released(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    with fetcher(listing, tmp_path) as fetch:
        path = fetch.get(1)
        assert path.suffix == ".parquet"
        assert path.read_bytes() == content_of(1)
        assert fetch.get(1) == path
        assert hub.served == SIZE
        fetch.release(1)
        assert not path.exists()
    assert files_below(tmp_path) == []


def test_a_file_comes_in_the_background(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    with fetcher(listing, tmp_path) as fetch:
        fetch.prefetch(0)
        fetch.prefetch(3)  # past the end
        deadline = time.monotonic() + 60
        while fetch.status() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert hub.served == SIZE
        assert fetch.get(0).read_bytes() == content_of(0)
        assert hub.served == SIZE


def test_an_error_in_the_background_waits_for_get(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    with fetcher(listing, tmp_path) as fetch:
        hub.faults = Faults(refuse=404)
        fetch.prefetch(0)
        with pytest.raises(UserError, match=r"there is no data/train-00000.* in roneneldan/TinyStories"):
            fetch.get(0)
        hub.faults = Faults()
        assert fetch.get(0).read_bytes() == content_of(0)


def test_the_status_can_be_read_from_another_thread(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    hub.faults = Faults(seconds_per_piece=0.05)
    seen: list[FetchStatus] = []
    with fetcher(listing, tmp_path) as fetch:
        assert fetch.status() is None
        finished = threading.Event()

        def watch() -> None:
            while not finished.wait(0.005):
                if status := fetch.status():
                    seen.append(status)

        watcher = threading.Thread(target=watch)
        watcher.start()
        fetch.get(2)
        finished.set()
        watcher.join()
        assert fetch.status() is None
    assert {(status.name, status.total_bytes) for status in seen} == {(NAMES[2], SIZE)}
    done = [status.done_bytes for status in seen]
    assert done == sorted(done) and len(set(done)) > 3


def test_closing_is_quick_and_what_has_come_is_not_fetched_again(
    hub: HubServer, listing: Listing, tmp_path: Path
) -> None:
    hub.faults = Faults(seconds_per_piece=0.5)  # about 9 s in all
    fetch = fetcher(listing, tmp_path)
    fetch.prefetch(0)
    while (status := fetch.status()) is None or not status.done_bytes:
        time.sleep(0.01)
    began = time.monotonic()
    fetch.close()
    assert time.monotonic() - began < 5  # a second by itself; tests share the machine
    with pytest.raises(StoppedError):
        fetch.get(0)
    [partial] = files_below(tmp_path / ".parquet")
    kept = (tmp_path / ".parquet" / partial).stat().st_size
    assert 0 < kept < SIZE
    hub.faults = Faults()
    hub.requests.clear()
    with fetcher(listing, tmp_path) as again:
        assert again.get(0).read_bytes() == content_of(0)
    assert [request.range for request in hub.contents()] == [f"bytes={kept}-"]


# --- a line that breaks -------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True])
def test_a_broken_transfer_goes_on_where_it_stopped(
    hub: HubServer, listing: Listing, tmp_path: Path, reset: bool
) -> None:
    # More breaks than attempts: as long as bytes come, nobody gives up.
    hub.faults = Faults(drop_after=50_000, drops=5, reset=reset)
    with fetcher(listing, tmp_path) as fetch:
        assert fetch.get(0).read_bytes() == content_of(0)
    if not reset:  # after a reset some bytes are lost on the way
        assert hub.served == SIZE
        assert [request.range for request in hub.contents()] == [
            None, *(f"bytes={50_000 * number}-" for number in range(1, 6)),
        ]  # fmt: skip


def test_a_server_that_ignores_ranges_sends_it_all_again(
    hub: HubServer, listing: Listing, tmp_path: Path
) -> None:
    hub.faults = Faults(drop_after=50_000, drops=1, ignore_range=True)
    with fetcher(listing, tmp_path) as fetch:
        assert fetch.get(0).read_bytes() == content_of(0)
    assert hub.served == 50_000 + SIZE


def test_the_same_bytes_over_and_over_are_no_progress(
    hub: HubServer, listing: Listing, tmp_path: Path
) -> None:
    hub.faults = Faults(drop_after=50_000, drops=10_000, ignore_range=True)
    with fetcher(listing, tmp_path) as fetch, pytest.raises(UserError, match="cannot reach") as caught:
        fetch.get(0)
    assert "the connection was closed in the middle of the file" in caught.value.why
    assert "0.1 of 0.3 MB of data/train-00000-of-00003.parquet are kept" in caught.value.why
    assert len(hub.contents()) == 1 + QUICK.attempts


def test_a_busy_server_is_asked_again(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    hub.faults = Faults(unavailable=2)
    with fetcher(listing, tmp_path) as fetch:
        assert fetch.get(0).read_bytes() == content_of(0)
    hub.faults = Faults(unavailable=1000)
    with fetcher(listing, tmp_path) as fetch, pytest.raises(UserError) as caught:
        fetch.get(1)
    assert "HTTP 503" in caught.value.why


def test_an_expired_address_of_the_content_is_renewed(
    hub: HubServer, listing: Listing, tmp_path: Path
) -> None:
    hub.faults = Faults(expired=2)
    with fetcher(listing, tmp_path) as fetch:
        assert fetch.get(0).read_bytes() == content_of(0)


def test_a_silent_server_is_a_broken_line(
    hub: HubServer, listing: Listing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = dataclasses.replace(QUICK, timeout_s=0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with Fetcher(listing, tmp_path, False, patience=hasty) as fetch, pytest.raises(UserError) as caught:
            fetch.get(0)
    assert "no answer in time" in caught.value.why


def test_a_line_that_falls_silent_goes_on_where_it_stopped(
    hub: HubServer, listing: Listing, tmp_path: Path
) -> None:
    hub.faults = Faults(seconds_per_piece=5.0)
    hasty = dataclasses.replace(QUICK, timeout_s=0.3)

    def asked_for() -> list[str | None]:
        """In order, each once: on a busy machine an answer may be late and be asked for again."""
        return list(dict.fromkeys(request.range for request in hub.contents()))

    with Fetcher(listing, tmp_path, False, patience=hasty) as fetch:
        fetch.prefetch(0)
        deadline = time.monotonic() + 60
        while len(asked_for()) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        hub.faults.seconds_per_piece = 0.0
        assert fetch.get(0).read_bytes() == content_of(0)
    assert asked_for()[:3] == [None, "bytes=16384-", "bytes=32768-"]


_DOWNLOAD = """
import json, sys
from pathlib import Path
from onecard.data.hub.fetch import Fetcher, Listing, RemoteFile
facts = json.loads(sys.argv[1])
listing = Listing(**facts | {"files": [RemoteFile(**file) for file in facts["files"]]})
Fetcher(listing, Path(sys.argv[2]), keep=sys.argv[3] == "keep").get(0)
"""


@pytest.mark.parametrize("keep", [False, True])
def test_a_killed_process_leaves_what_it_had(
    hub: HubServer, listing: Listing, tmp_path: Path, keep: bool
) -> None:
    hub.faults = Faults(seconds_per_piece=0.2)
    mode = "keep" if keep else "lend"
    command = [
        sys.executable,
        "-c",
        _DOWNLOAD,
        json.dumps(dataclasses.asdict(listing)),
        str(tmp_path / ".parquet"),
        mode,
    ]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        deadline = time.monotonic() + 30
        while not (partials := list(tmp_path.rglob("*.onecard-partial"))) or not partials[0].stat().st_size:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = partials[0].stat().st_size
    assert 0 < kept < SIZE
    hub.faults = Faults()
    hub.requests.clear()
    with fetcher(listing, tmp_path, keep) as fetch:
        assert fetch.get(0).read_bytes() == content_of(0)
    assert [request.range for request in hub.contents()] == [f"bytes={kept}-"]
    assert not list(tmp_path.rglob("*.onecard-partial"))


def test_a_file_of_an_earlier_process_is_used(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    fetcher(listing, tmp_path).get(0)
    with fetcher(listing, tmp_path) as fetch:
        fetch.get(0)
        assert hub.served == SIZE
        fetch.release(0)
    assert files_below(tmp_path) == []


def test_a_file_consumed_by_an_earlier_process_can_be_released(listing: Listing, tmp_path: Path) -> None:
    path = fetcher(listing, tmp_path).get(0)
    fetcher(listing, tmp_path).release(0)
    assert not path.exists()


# --- content that is wrong ----------------------------------------------------------------------


def test_a_damaged_file_is_fetched_again(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    hub.faults = Faults(corrupt=2)
    with fetcher(listing, tmp_path) as fetch:
        assert fetch.get(0).read_bytes() == content_of(0)
    assert hub.served == 3 * SIZE


def test_a_file_that_is_always_damaged_is_not_kept(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    hub.faults = Faults(corrupt=1000)
    with fetcher(listing, tmp_path) as fetch, pytest.raises(UserError, match="arrives damaged") as caught:
        fetch.get(0)
    assert NAMES[0] in caught.value.what
    middle = SIZE // 2
    content = content_of(0)
    found = content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]
    assert sha256(content) in caught.value.why and sha256(found) in caught.value.why
    assert hub.served == 3 * SIZE
    assert files_below(tmp_path) == []


def test_a_file_of_another_size_is_not_kept(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    hub.faults = Faults(short_by=10)
    with fetcher(listing, tmp_path) as fetch, pytest.raises(UserError) as caught:
        fetch.get(0)
    assert "expected 300,000, found 299,990" in caught.value.why
    assert files_below(tmp_path) == []


def test_what_lies_under_our_own_name_but_is_other_content_is_replaced(
    hub: HubServer, listing: Listing, tmp_path: Path
) -> None:
    ours = tmp_path / ".parquet" / NAMES[0]
    ours.parent.mkdir(parents=True)
    ours.write_bytes(content_of(1))
    with fetcher(listing, tmp_path) as fetch:
        assert fetch.get(0).read_bytes() == content_of(0)


# --- the user's own cache -----------------------------------------------------------------------


def put_into_cache(home: Path, number: int, commit: str = COMMIT, linked: bool = True) -> Path:
    """As huggingface_hub lays it out."""
    blob = home / CACHE / "blobs" / sha256(content_of(number))
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content_of(number))
    name = home / CACHE / "snapshots" / commit / NAMES[number]
    name.parent.mkdir(parents=True, exist_ok=True)
    if not linked:
        return blob
    name.symlink_to(os.path.relpath(blob, name.parent))
    return name


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("commit", [COMMIT, "e" * 40])
def test_a_file_in_the_users_cache_is_used_in_place(
    hub: HubServer, listing: Listing, tmp_path: Path, commit: str, keep: bool
) -> None:
    name = put_into_cache(tmp_path / "home", 1, commit)
    with fetcher(listing, tmp_path, keep) as fetch:
        assert fetch.get(1) == name
        fetch.release(1)
    assert name.read_bytes() == content_of(1)
    assert hub.served == 0
    assert not (tmp_path / ".parquet").exists()


def test_a_blob_without_a_name_is_used_under_one(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    blob = put_into_cache(tmp_path / "home", 1, linked=False)
    with fetcher(listing, tmp_path) as fetch:
        path = fetch.get(1)
        assert path.suffix == ".parquet" and path.resolve() == blob.resolve()
        fetch.release(1)
        assert not path.is_symlink()
    assert blob.read_bytes() == content_of(1)
    assert hub.served == 0


@pytest.mark.parametrize("keep", [False, True])
def test_a_damaged_file_in_the_users_cache_is_neither_used_nor_touched(
    hub: HubServer, listing: Listing, tmp_path: Path, keep: bool
) -> None:
    name = put_into_cache(tmp_path / "home", 1)
    damage = bytes(SIZE)
    name.write_bytes(damage)
    with fetcher(listing, tmp_path, keep) as fetch:
        assert fetch.get(1).read_bytes() == content_of(1)
        fetch.release(1)
    assert name.read_bytes() == damage


def test_kept_files_lie_in_the_cache_for_others(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    with fetcher(listing, tmp_path, keep=True) as fetch:
        path = fetch.get(0)
        assert path == tmp_path / "home" / CACHE / "snapshots" / COMMIT / NAMES[0]
        fetch.release(0)
    assert path.read_bytes() == content_of(0)
    huggingface_hub = pytest.importorskip("huggingface_hub")
    found = huggingface_hub.try_to_load_from_cache(
        REPO, NAMES[0], cache_dir=tmp_path / "home" / "hub", revision=COMMIT, repo_type="dataset"
    )
    assert Path(found) == path


def test_without_keeping_the_cache_stays_as_it_was(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    with fetcher(listing, tmp_path) as fetch:
        fetch.get(0)
        fetch.release(0)
    assert files_below(tmp_path) == []


_BY_HUGGINGFACE_HUB = """
import sys
from huggingface_hub import HfApi, hf_hub_download
print(hf_hub_download(sys.argv[1], sys.argv[2], repo_type="dataset"))
print(len(list(HfApi().list_repo_tree(sys.argv[1], "data", repo_type="dataset"))))
"""


def test_what_huggingface_hub_has_fetched_is_used(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    """Also says that the stand-in is good enough for the real client."""
    pytest.importorskip("huggingface_hub")
    done = subprocess.run(
        [sys.executable, "-c", _BY_HUGGINGFACE_HUB, REPO, NAMES[0]],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    path, count = done.stdout.split()
    assert count == "4"
    hub.served = 0
    with fetcher(listing, tmp_path) as fetch:
        assert fetch.get(0).samefile(path)
        fetch.release(0)
    assert Path(path).read_bytes() == content_of(0)
    assert hub.served == 0


# --- refused, unreachable, full -----------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_dataset_asks_for_a_log_in(
    hub: HubServer, listing: Listing, tmp_path: Path, status: int
) -> None:
    hub.faults = Faults(refuse=status)
    with pytest.raises(UserError, match=f"does not give out {REPO}") as caught:
        list_files(lookup("tinystories"), patience=QUICK)
    assert caught.value.hint.startswith("hf auth login")
    with fetcher(listing, tmp_path) as fetch, pytest.raises(UserError) as caught:
        fetch.get(0)
    assert caught.value.hint.startswith("hf auth login")


def test_a_token_is_sent_to_the_hub_and_to_nobody_else(
    hub: HubServer, listing: Listing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.requests.clear()
    list_files(lookup("tinystories"), patience=QUICK)
    with fetcher(listing, tmp_path) as fetch:
        fetch.get(0)
    for request in hub.requests:
        expected = None if request.path.startswith("/content/") else "Bearer hf_secret"
        assert request.authorization == expected, request


def nobody_listens() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_without_a_network(
    hub: HubServer, listing: Listing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", nobody_listens())
    with pytest.raises(UserError, match=r"cannot reach 127\.0\.0\.1") as caught:
        list_files(lookup("tinystories"), patience=QUICK)
    assert "onecard prepare FILES-OR-FOLDER --name tinystories" in caught.value.hint
    assert caught.value.exit_code == 1
    with fetcher(listing, tmp_path) as fetch, pytest.raises(UserError, match="cannot reach") as caught:
        fetch.get(0)
    assert "refused" in caught.value.why
    assert "onecard prepare FILES-OR-FOLDER --name tinystories" in caught.value.hint


def test_switched_off_nothing_is_sent_but_what_is_here_is_used(
    hub: HubServer, listing: Listing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_into_cache(tmp_path / "home", 1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    with pytest.raises(UserError, match="tinystories is not on this machine") as caught:
        list_files(lookup("tinystories"), patience=QUICK)
    assert "onecard prepare FILES-OR-FOLDER --name tinystories" in caught.value.hint
    with fetcher(listing, tmp_path) as fetch:
        assert fetch.get(1).read_bytes() == content_of(1)
        with pytest.raises(UserError, match=f"{NAMES[0]} is not on this machine"):
            fetch.get(0)
    assert hub.requests == []


def test_no_room_is_noticed_before(
    hub: HubServer, listing: Listing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda _: SimpleNamespace(free=5))
    hub.requests.clear()
    with fetcher(listing, tmp_path) as fetch, pytest.raises(UserError, match="no room for train-00000"):
        fetch.get(0)
    assert hub.requests == []


def test_a_disk_that_fills_up_on_the_way(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    """A limit on the size of files fails a write as a full disk does, in the middle of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with fetcher(listing, tmp_path) as fetch, pytest.raises(UserError, match="no room for") as caught:
            fetch.get(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "already here are kept" in caught.value.hint
    hub.requests.clear()
    with fetcher(listing, tmp_path) as fetch:
        assert fetch.get(0).read_bytes() == content_of(0)
    assert [request.range for request in hub.contents()] == ["bytes=200000-"]


def test_a_folder_that_cannot_be_written(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    (tmp_path / ".parquet").write_text("a file where a folder should be")
    with fetcher(listing, tmp_path) as fetch, pytest.raises(UserError, match="cannot write"):
        fetch.get(0)


def test_two_at_once_fetch_a_kept_file_only_once(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    hub.faults = Faults(seconds_per_piece=0.02)
    with fetcher(listing, tmp_path / "a", True) as one, fetcher(listing, tmp_path / "b", True) as other:
        one.prefetch(0)
        other.prefetch(0)
        assert one.get(0).read_bytes() == other.get(0).read_bytes() == content_of(0)
    assert hub.served == SIZE
    assert not list(tmp_path.rglob("*.onecard-partial"))


def test_the_guard_of_these_tests_guards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment("https://huggingface.co", tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_ENDPOINT")
    with pytest.raises(AssertionError, match="asks for huggingface"):
        list_files(lookup("tinystories"), patience=QUICK)


# --- one text -----------------------------------------------------------------------------------


TEXT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 3000


@pytest.fixture
def text(hub: HubServer) -> NamedDataset:
    hub.texts["/tiny/input.txt"] = TEXT
    return dataclasses.replace(
        lookup("shakespeare"), url=f"{hub.url}/tiny/input.txt", size=len(TEXT), sha256=sha256(TEXT)
    )


def test_a_text_is_fetched_once(hub: HubServer, text: NamedDataset, tmp_path: Path) -> None:
    path = fetch_text(text, patience=QUICK)
    assert path.read_bytes() == TEXT
    assert path.is_relative_to(tmp_path / "home" / "cache" / "onecard") and path.suffix == ".txt"
    assert fetch_text(text, patience=QUICK) == path
    assert hub.served == len(TEXT)
    assert fetch_text(text, tmp_path / "here", patience=QUICK).parent == tmp_path / "here"


def test_a_text_over_a_bad_line(hub: HubServer, text: NamedDataset) -> None:
    hub.faults = Faults(drop_after=50_000, drops=2, corrupt=1)
    assert fetch_text(text, patience=QUICK).read_bytes() == TEXT


@pytest.mark.parametrize(
    ("faults", "what"),
    [
        (Faults(refuse=404), "cannot be had"),
        (Faults(corrupt=1000), "arrives damaged"),
        (Faults(refuse=500), "cannot reach 127"),
    ],
)
def test_a_text_that_cannot_be_had(
    hub: HubServer, text: NamedDataset, tmp_path: Path, faults: Faults, what: str
) -> None:
    hub.faults = faults
    with pytest.raises(UserError, match=what):
        fetch_text(text, patience=QUICK)
    hub.faults = Faults()
    assert fetch_text(text, patience=QUICK).read_bytes() == TEXT


def test_a_text_with_the_network_switched_off(
    hub: HubServer, text: NamedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="shakespeare is not on this machine") as caught:
        fetch_text(text, patience=QUICK)
    assert "--name shakespeare" in caught.value.hint


@pytest.mark.parametrize(
    "answer",
    [
        b"[" * 100_000, b"[" + b"[]," * 1_100_000 + b"0]", b" " * (17 * 2**20) + b"{}", b"\xff\xfe", b"null",
        b'[{"type": "file", "path": "data/train-1.parquet", "size": "3"}]',
        b'[{"type": "file", "path": "data/train-1.parquet", "size": -1}]',
        b'[{"type": "file", "path": "data/train-1.parquet", "size": 1e999}]',
        b'[{"type": "file", "path": "data/train-1.parquet", "size": 3, "lfs": [1]}]',
        b'[{"type": "file", "path": ["data/train-1.parquet"], "size": 3}]',
        b'{"a": 1, "a": 2}', b"[]", b"[3]",
    ],
)  # fmt: skip
def test_an_answer_that_no_hub_gives(hub: HubServer, answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = transfer._open

    def opened(url: str, *rest: Any) -> Any:
        found = plain(url, *rest)
        if "/tree/" in url:
            found.fp = io.BytesIO(answer)
            found.length, found.chunked = len(answer), False
        return found

    monkeypatch.setattr(transfer, "_open", opened)
    with pytest.raises(UserError, match=r"cannot reach|no files") as raised:
        list_files(lookup("tinystories"), patience=QUICK)
    assert len(str(raised.value)) < 1000
