"""Fetching from a stand-in of the Hub that breaks in every way a network does. Nothing leaves the machine."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_server import COMMIT, Faults, HubServer, at_home

from onecard.data.hub import fetch as module
from onecard.data.hub.catalogue import NamedDataset, lookup
from onecard.data.hub.fetch import Fetcher, Listing, RemoteFile, fetch_text, list_files
from onecard.errors import UserError
from onecard.files import StoppedError

ROOT = Path(__file__).resolve().parents[2]
SIZE = 300_000
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
        at_home(monkeypatch, server.url, tmp_path / "home")
        for number, path in enumerate(NAMES):
            server.put(REPO, path, content_of(number))
        server.put(REPO, "data/validation-00000-of-00001.parquet", b"not for training")
        server.put(REPO, "README.md", b"a card")
        yield server


@pytest.fixture
def listing(hub: HubServer) -> Listing:
    return list_files(lookup("tinystories"))


def fetcher(listing: Listing, folder: Path, keep: bool = False) -> Fetcher:
    return Fetcher(listing, folder / ".parquet", keep)


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# --- which files --------------------------------------------------------------------------------


def test_a_listing_is_pinned_and_says_what_to_expect(hub: HubServer, listing: Listing) -> None:
    assert (listing.name, listing.repo, listing.commit) == ("tinystories", REPO, COMMIT)
    assert [file.path for file in listing.files] == NAMES
    assert listing.files[1] == RemoteFile(NAMES[1], SIZE, sha256(content_of(1)))


def test_a_long_listing_comes_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer(page_size=7) as server:
        at_home(monkeypatch, server.url, tmp_path)
        for number in range(40):
            server.put("karpathy/climbmix-400b-shuffle", f"shard_{number:05}.parquet", bytes([number]))
        listing = list_files(lookup("climbmix"))
        assert [file.path for file in listing.files] == [f"shard_{number:05}.parquet" for number in range(40)]
        assert sum("/tree/" in request.path for request in server.requests) == 6


def test_a_given_commit_is_the_one_listed(hub: HubServer, listing: Listing) -> None:
    hub.requests.clear()
    assert list_files(lookup("tinystories"), listing.commit) == listing
    assert all(COMMIT in request.path for request in hub.requests)


def test_a_commit_that_is_gone(hub: HubServer) -> None:
    with pytest.raises(UserError, match=r"there is no commit f+ in roneneldan/TinyStories"):
        list_files(lookup("tinystories"), "f" * 40)


def test_an_unknown_crawl_names_its_neighbours(hub: HubServer) -> None:
    for year in (2013, 2019, 2024):
        hub.put("HuggingFaceFW/fineweb-edu", f"data/CC-MAIN-{year}-20/000_00000.parquet", b"x")
    with pytest.raises(UserError, match="has no crawl CC-MAIN-2014-20") as caught:
        list_files(lookup("fineweb", dump="CC-MAIN-2014-20", edu=True))
    assert "CC-MAIN-2024-20" in caught.value.why and "there are 3" in caught.value.why
    assert caught.value.hint.startswith("onecard prepare fineweb --dump CC-MAIN-20")
    assert caught.value.hint.endswith(" --edu")


def test_a_crawl_that_is_there(hub: HubServer) -> None:
    for path in ("data/CC-MAIN-2013-20/000_00010.parquet", "data/CC-MAIN-2013-20/000_00009.parquet"):
        hub.put("HuggingFaceFW/fineweb", path, b"x")
    listing = list_files(lookup("fineweb", dump="CC-MAIN-2013-20"))
    assert [file.path for file in listing.files] == [
        "data/CC-MAIN-2013-20/000_00009.parquet",
        "data/CC-MAIN-2013-20/000_00010.parquet",
    ]


def test_a_rearranged_repository(hub: HubServer) -> None:
    hub.repos[REPO].files = {"data/all.parquet": b"x"}
    with pytest.raises(UserError, match="no files train-") as caught:
        list_files(lookup("tinystories"))
    assert "onecard prepare FILES-OR-FOLDER --name tinystories" in caught.value.hint


def test_a_path_that_leads_out_is_not_accepted(hub: HubServer) -> None:
    with pytest.raises(ValueError, match="not a path inside"):
        RemoteFile("data/../../../etc/passwd", 1, None)


def test_a_page_that_is_not_the_hubs(hub: HubServer) -> None:
    hub.faults = Faults(not_json=True)
    with pytest.raises(UserError, match="cannot reach") as caught:
        list_files(lookup("tinystories"))
    assert "log-in page" in caught.value.why


# --- each file ----------------------------------------------------------------------------------


def test_a_file_comes_whole_and_goes_when_released(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    with closing(fetcher(listing, tmp_path)) as fetch:
        path = fetch.get(1)
        assert path.suffix == ".parquet"
        assert path.read_bytes() == content_of(1)
        assert fetch.get(1) == path
        assert hub.served == SIZE
        fetch.release(1)
        assert not path.exists()
    assert files_below(tmp_path) == []


def test_a_file_comes_in_the_background(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    with closing(fetcher(listing, tmp_path)) as fetch:
        fetch.prefetch(0)
        fetch.prefetch(3)  # past the end
        deadline = time.monotonic() + 60
        while fetch.status() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert hub.served == SIZE
        assert fetch.get(0).read_bytes() == content_of(0)
        assert hub.served == SIZE


def test_an_error_in_the_background_waits_for_get(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    with closing(fetcher(listing, tmp_path)) as fetch:
        hub.faults = Faults(refuse=404)
        fetch.prefetch(0)
        with pytest.raises(UserError, match=r"there is no data/train-00000.* in roneneldan/TinyStories"):
            fetch.get(0)
        hub.faults = Faults()
        assert fetch.get(0).read_bytes() == content_of(0)


def wait_for(server: HubServer, served: int) -> None:
    deadline = time.monotonic() + 60
    while server.served < served and time.monotonic() < deadline:
        time.sleep(0.01)


def test_the_status_names_the_file_under_way(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    hub.faults = Faults(seconds_per_piece=0.02)
    with closing(fetcher(listing, tmp_path)) as fetch:
        assert fetch.status() is None
        fetch.prefetch(2)
        status = fetch.status()
        assert status is not None
        assert (status.name, status.total_bytes) == (NAMES[2], SIZE) and 0 <= status.done_bytes <= SIZE
        fetch.get(2)
        assert fetch.status() is None


def test_what_has_come_is_counted(
    hub: HubServer, listing: Listing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 20_000)
    hub.faults = Faults(seconds_per_piece=0.05)
    seen: list[int] = []
    with closing(fetcher(listing, tmp_path)) as fetch:
        fetch.prefetch(2)
        while (status := fetch.status()) is not None:
            seen.append(status.done_bytes)
            time.sleep(0.005)
    assert seen == sorted(seen) and len(set(seen)) > 3


def test_closing_is_quick_and_leaves_nothing_half(
    hub: HubServer, listing: Listing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 20_000)
    hub.faults = Faults(seconds_per_piece=0.2)  # some 4 s in all
    fetch = fetcher(listing, tmp_path)
    fetch.prefetch(0)
    wait_for(hub, 1)
    began = time.monotonic()
    fetch.close()
    assert time.monotonic() - began < 3  # a second by itself; tests share the machine
    with pytest.raises(StoppedError):
        fetch.get(0)
    assert files_below(tmp_path / ".parquet") == []


# --- a line that breaks -------------------------------------------------------------------------


def test_a_broken_transfer_goes_on(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    hub.faults = Faults(drop_after=50_000, drops=3)
    with closing(fetcher(listing, tmp_path)) as fetch:
        assert fetch.get(0).read_bytes() == content_of(0)


def test_a_busy_server_is_asked_again(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    hub.faults = Faults(unavailable=1)
    with closing(fetcher(listing, tmp_path)) as fetch:
        assert fetch.get(0).read_bytes() == content_of(0)
    hub.faults = Faults(unavailable=1000)
    with (
        closing(fetcher(listing, tmp_path)) as fetch,
        pytest.raises(UserError, match="the Hub refuses") as caught,
    ):
        fetch.get(1)
    assert "HTTP 503" in caught.value.why


def test_a_silent_server_is_a_broken_line(
    hub: HubServer, listing: Listing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UserError, match="cannot reach") as caught:
            list_files(lookup("tinystories"))
    assert "timed out" in caught.value.why


def test_a_file_of_an_earlier_process_is_used(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    fetcher(listing, tmp_path).get(0)
    with closing(fetcher(listing, tmp_path)) as fetch:
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
    with closing(fetcher(listing, tmp_path)) as fetch:
        assert fetch.get(0).read_bytes() == content_of(0)
    assert hub.served == 3 * SIZE


def test_a_file_that_is_always_damaged_is_not_kept(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    hub.faults = Faults(corrupt=1000)
    with (
        closing(fetcher(listing, tmp_path)) as fetch,
        pytest.raises(UserError, match="arrives damaged") as caught,
    ):
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
    with closing(fetcher(listing, tmp_path)) as fetch, pytest.raises(UserError) as caught:
        fetch.get(0)
    assert "of size 300000 but has size 299990" in caught.value.why
    assert files_below(tmp_path) == []


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
    with closing(fetcher(listing, tmp_path, keep)) as fetch:
        assert fetch.get(1).samefile(name)
        fetch.release(1)
    assert name.read_bytes() == content_of(1)
    assert hub.served == 0
    assert not (tmp_path / ".parquet").exists()


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_in_the_cache_under_another_name_is_used(
    hub: HubServer, listing: Listing, tmp_path: Path, keep: bool
) -> None:
    blob = put_into_cache(tmp_path / "home", 1, linked=False)
    with closing(fetcher(listing, tmp_path, keep)) as fetch:
        assert fetch.get(1).samefile(blob)
        fetch.release(1)
    assert blob.read_bytes() == content_of(1)
    assert hub.served == 0


@pytest.mark.parametrize("keep", [False, True])
def test_a_damaged_file_in_the_users_cache_is_neither_used_nor_touched(
    hub: HubServer, listing: Listing, tmp_path: Path, keep: bool
) -> None:
    name = put_into_cache(tmp_path / "home", 1)
    damage = bytes(SIZE)
    name.write_bytes(damage)
    with closing(fetcher(listing, tmp_path, keep)) as fetch:
        assert fetch.get(1).read_bytes() == content_of(1)
        fetch.release(1)
    assert name.read_bytes() == damage


def test_kept_files_lie_in_the_cache_for_others(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    with closing(fetcher(listing, tmp_path, keep=True)) as fetch:
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
    with closing(fetcher(listing, tmp_path)) as fetch:
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
    with closing(fetcher(listing, tmp_path)) as fetch:
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
    with pytest.raises(UserError, match=f"does not give access to {REPO}") as caught:
        list_files(lookup("tinystories"))
    assert caught.value.hint.startswith("hf auth login")
    with closing(fetcher(listing, tmp_path)) as fetch, pytest.raises(UserError) as caught:
        fetch.get(0)
    assert caught.value.hint.startswith("hf auth login")


def test_a_token_is_sent_to_the_hub_and_to_nobody_else(
    hub: HubServer, listing: Listing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.requests.clear()
    list_files(lookup("tinystories"))
    with closing(fetcher(listing, tmp_path)) as fetch:
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
        list_files(lookup("tinystories"))
    assert "onecard prepare FILES-OR-FOLDER --name tinystories" in caught.value.hint
    assert caught.value.exit_code == 1
    with (
        closing(fetcher(listing, tmp_path)) as fetch,
        pytest.raises(UserError, match="cannot reach") as caught,
    ):
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
        list_files(lookup("tinystories"))
    assert "onecard prepare FILES-OR-FOLDER --name tinystories" in caught.value.hint
    with closing(fetcher(listing, tmp_path)) as fetch:
        assert fetch.get(1).read_bytes() == content_of(1)
        with pytest.raises(UserError, match=f"{NAMES[0]} is not on this machine"):
            fetch.get(0)
    assert hub.requests == []


def test_no_room_is_noticed_before(
    hub: HubServer, listing: Listing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=5))
    hub.requests.clear()
    with (
        closing(fetcher(listing, tmp_path)) as fetch,
        pytest.raises(UserError, match=r"no room for .*train-00000"),
    ):
        fetch.get(0)
    assert hub.requests == []


def test_a_disk_that_fills_up_on_the_way(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    """A limit on the size of files fails a write as a full disk does, in the middle of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with closing(fetcher(listing, tmp_path)) as fetch, pytest.raises(UserError, match="no room for"):
            fetch.get(0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with closing(fetcher(listing, tmp_path)) as fetch:
        assert fetch.get(0).read_bytes() == content_of(0)


def test_a_folder_that_cannot_be_written(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    (tmp_path / ".parquet").write_text("a file where a folder should be")
    with closing(fetcher(listing, tmp_path)) as fetch, pytest.raises(UserError, match="cannot write"):
        fetch.get(0)


def test_two_at_once_fetch_a_kept_file_only_once(hub: HubServer, listing: Listing, tmp_path: Path) -> None:
    hub.faults = Faults(seconds_per_piece=0.02)
    with (
        closing(fetcher(listing, tmp_path / "a", True)) as one,
        closing(fetcher(listing, tmp_path / "b", True)) as other,
    ):
        one.prefetch(0)
        other.prefetch(0)
        assert one.get(0).read_bytes() == other.get(0).read_bytes() == content_of(0)
    assert hub.served == SIZE
    assert not list(tmp_path.rglob("*.onecard-partial"))


def test_the_guard_of_these_tests_guards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_home(monkeypatch, "https://huggingface.co", tmp_path)
    with pytest.raises(UserError, match="a test asks for huggingface"):
        list_files(lookup("tinystories"))


# --- one text -----------------------------------------------------------------------------------


TEXT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 3000


@pytest.fixture
def text(hub: HubServer) -> NamedDataset:
    hub.texts["/tiny/input.txt"] = TEXT
    return dataclasses.replace(
        lookup("shakespeare"), url=f"{hub.url}/tiny/input.txt", size=len(TEXT), sha256=sha256(TEXT)
    )


def test_a_text_is_fetched_once(hub: HubServer, text: NamedDataset, tmp_path: Path) -> None:
    path = fetch_text(text)
    assert path.read_bytes() == TEXT
    assert path.is_relative_to(tmp_path / "home" / "cache" / "onecard") and path.suffix == ".txt"
    assert fetch_text(text) == path
    assert hub.served == len(TEXT)
    assert fetch_text(text, tmp_path / "here").parent == tmp_path / "here"


@pytest.mark.parametrize(
    ("faults", "what"),
    [
        (Faults(refuse=404), "cannot be fetched"),
        (Faults(corrupt=1000), "arrives damaged"),
        (Faults(refuse=500), "HTTP 500"),
    ],
)
def test_a_text_that_cannot_be_had(
    hub: HubServer, text: NamedDataset, tmp_path: Path, faults: Faults, what: str
) -> None:
    hub.faults = faults
    with pytest.raises(UserError, match=what):
        fetch_text(text)
    hub.faults = Faults()
    assert fetch_text(text).read_bytes() == TEXT


def test_a_text_with_the_network_switched_off(
    hub: HubServer, text: NamedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="shakespeare is not on this machine") as caught:
        fetch_text(text)
    assert "--name shakespeare" in caught.value.hint
