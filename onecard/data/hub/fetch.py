"""The named datasets from the Hugging Face Hub: which files there are, and each of them when it is needed.

Everything is pinned: a listing names one commit and each file's SHA-256, so a job that goes on another
day reads the very same bytes. Settings (HF_ENDPOINT, HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_HUB_OFFLINE)
are read from the environment when they are needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from onecard.data.hub import access
from onecard.data.hub.catalogue import NamedDataset
from onecard.data.hub.transfer import (
    DamagedError,
    Patience,
    RefusedError,
    Transfer,
    UnreachableError,
    Wanted,
    get_json,
    is_right,
)
from onecard.errors import UserError

_CLOSE_WAIT_S = 1.0
_MOST_PAGES = 1000  # of a listing, 1,000 files each: no folder of the Hub has as many


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository. The hash is missing only for files the Hub keeps outside its large store."""

    path: str
    size: int
    sha256: str | None

    def __post_init__(self) -> None:
        # The path becomes one on this disk.
        parts = PurePosixPath(self.path.replace("\\", "/"))
        if parts.is_absolute() or ".." in parts.parts:
            raise ValueError(f"not a path inside a repository: {self.path}")
        if self.sha256 is not None and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ValueError(f"not a SHA-256: {self.sha256}")


@dataclass(frozen=True)
class Listing:
    """The files of a dataset at one commit, in the order they are read."""

    name: str
    repo: str
    commit: str
    files: list[RemoteFile]


@dataclass(frozen=True)
class FetchStatus:
    """How far the file is that is on its way."""

    name: str
    done_bytes: int
    total_bytes: int


# ---------------------------------------------------------------- which files


def list_files(
    dataset: NamedDataset, revision: str | None = None, *, patience: Patience | None = None
) -> Listing:
    """The dataset's parquet files at `revision`, a commit of an earlier listing; else at today's."""
    assert dataset.repo, f"{dataset.name} is not on the Hub"
    patience = patience or Patience()
    access.refuse_offline(dataset.name)
    api, headers = f"{access.endpoint()}/api/datasets/{dataset.repo}", access.headers()
    asked = f"commit {revision}" if revision else "branch main"
    try:
        # Only the commit: the default answer names every file of the repository, tens of thousands of them.
        info, _ = get_json(f"{api}/revision/{revision or 'main'}?expand=sha", headers, patience)
        commit = str(info["sha"])
        if not re.fullmatch("[0-9a-f]{40}", commit):
            raise ValueError("not a commit")
        asked = dataset.folder or "list of files"
        try:
            entries = _tree(f"{api}/tree/{commit}", dataset.folder, headers, patience)
        except RefusedError as error:
            if error.status != 404 or dataset.dump is None:
                raise
            parent = str(PurePosixPath(dataset.folder).parent)
            there = _tree(f"{api}/tree/{commit}", parent, headers, patience)
            raise access.unknown_dump(
                dataset, [PurePosixPath(entry["path"]).name for entry in there]
            ) from error
        by_path = {entry["path"]: entry for entry in entries if entry["type"] == "file"}
        files = [
            RemoteFile(path, _size_of(by_path[path]), (by_path[path].get("lfs") or {}).get("oid"))
            for path in dataset.train_files(list(by_path))
        ]
    except UnreachableError as error:
        raise access.unreachable(dataset.name, str(error)) from error
    except RefusedError as error:
        raise access.refused(dataset.name, dataset.repo, asked, error) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise access.unreachable(
            dataset.name, "the answer is not the Hub's; does HF_ENDPOINT point to it?"
        ) from error
    if not files:
        raise UserError(
            f"no files {dataset.pattern} in {dataset.repo}/{dataset.folder} at commit {commit[:12]}",
            "the dataset was rearranged since this version of onecard",
            access.local_hint(dataset.name),
            exit_code=1,
        )
    return Listing(dataset.name, dataset.repo, commit, files)


def _tree(address: str, folder: str, headers: dict[str, str], patience: Patience) -> list[dict[str, Any]]:
    page: str | None = f"{address}/{urllib.parse.quote(folder)}".rstrip("/")
    entries: list[dict[str, Any]] = []
    for _ in range(_MOST_PAGES):
        if page is None:
            return entries
        found, page = get_json(page, headers, patience)
        if not isinstance(found, list):
            raise ValueError("not a page of a listing")
        entries += found
    raise ValueError("a listing without end")


def _size_of(entry: dict[str, Any]) -> int:
    size = entry["size"]
    if type(size) is not int or not 0 <= size < 2**63:
        raise ValueError("no size")
    return size


# ---------------------------------------------------------------- each file when it is needed


class _Job:
    """One file on its way; its thread writes, others read."""

    def __init__(self, file: RemoteFile) -> None:
        self.file = file
        self.here = 0
        self.finished = threading.Event()
        self.path: Path | None = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def progress(self, here: int) -> None:
        self.here = here


class Fetcher:
    """Brings the files of a listing, by number, one ahead if told so.

    A file in the user's Hub cache is used where it is. Others come into the cache if they are to be
    kept, else into `folder`, from which `release` deletes them. A transfer that was cut off, by
    kill -9 too, goes on where it stopped.
    """

    def __init__(
        self, listing: Listing, folder: Path, keep: bool, *, patience: Patience | None = None
    ) -> None:
        self._listing = listing
        self._folder = folder
        self._keep = keep
        self._patience = patience or Patience()
        self._jobs: dict[int, _Job] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._awaited: _Job | None = None

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, number: int) -> Path:
        """Waits until the file is here and its hash is right. StoppedError if another thread closes us."""
        job = self._started(number)
        self._awaited = job
        # In steps, so that Ctrl-C comes through on Windows too.
        while not job.finished.wait(0.5):
            pass
        self._awaited = None
        if job.error is not None:
            with self._lock:
                self._jobs.pop(number, None)  # asked again, it tries again
            raise job.error
        assert job.path is not None
        return job.path

    def prefetch(self, number: int) -> None:
        """Begins in the background; past the last file nothing happens. Errors wait for `get`."""
        if number < len(self._listing.files):
            self._started(number)

    def release(self, number: int) -> None:
        """The file was read: deletes it if it is ours and not to be kept."""
        with self._lock:
            self._jobs.pop(number, None)
        if not self._keep:
            self._own_path(self._listing.files[number]).unlink(missing_ok=True)

    def status(self) -> FetchStatus | None:
        """The file someone waits for, else any on its way, else None. May be asked from any thread."""
        job = self._awaited
        if job is None:
            with self._lock:
                job = next((job for job in self._jobs.values() if not job.finished.is_set()), None)
        return FetchStatus(job.file.path, job.here, job.file.size) if job is not None else None

    def close(self) -> None:
        """Stops what is under way, within about a second; what has come stays for next time."""
        self._stop.set()
        with self._lock:
            threads = [job.thread for job in self._jobs.values() if job.thread is not None]
        deadline = time.monotonic() + _CLOSE_WAIT_S
        for thread in threads:
            # One that waits for a silent server ends with its time-out, or with the process.
            thread.join(max(0.0, deadline - time.monotonic()))

    def _started(self, number: int) -> _Job:
        with self._lock:
            job = self._jobs.get(number)
            if job is None:
                job = self._jobs[number] = _Job(self._listing.files[number])
                job.thread = threading.Thread(
                    target=self._work, args=(job,), daemon=True, name="onecard-fetch"
                )
                job.thread.start()
            return job

    def _work(self, job: _Job) -> None:
        try:
            job.path = self._bring(job)
        except BaseException as error:
            job.error = error
        finally:
            job.finished.set()

    def _bring(self, job: _Job) -> Path:
        file, repo = job.file, self._listing.repo
        for place in self._places(file):
            if is_right(place, file.size, file.sha256, self._stop):
                job.here = file.size
                return self._named(file, place) if place == self._blob(file) else place
        with contextlib.suppress(OSError):
            self._own_path(file).unlink()  # of another commit, or damaged
        access.refuse_offline(self._listing.name, file.path)
        blob = self._blob(file)
        # A damaged blob is the user's to delete.
        into_cache = self._keep and blob is not None and not blob.exists()
        target = blob if into_cache and blob is not None else self._own_path(file)
        partial = target.with_name(
            f"{target.name}.{(file.sha256 or self._listing.commit)[:16]}.onecard-partial"
        )
        path = urllib.parse.quote(file.path)
        url = f"{access.endpoint()}/datasets/{repo}/resolve/{self._listing.commit}/{path}"
        wanted = Wanted(url, file.size, file.sha256)
        try:
            Transfer(
                wanted, target, partial, access.headers(), self._patience, self._stop, job.progress
            ).run()
        except UnreachableError as error:
            kept = (
                f"{job.here / 1e6:,.1f} of {file.size / 1e6:,.1f} MB of {file.path} are kept"
                if job.here
                else ""
            )
            raise access.unreachable(self._listing.name, str(error), kept=kept) from error
        except RefusedError as error:
            raise access.refused(self._listing.name, repo, file.path, error) from error
        except DamagedError as error:
            raise access.damaged(f"{repo}/{file.path}", error, self._patience) from error
        return self._link(file, target) if into_cache else target

    def _own_path(self, file: RemoteFile) -> Path:
        return self._folder.joinpath(*PurePosixPath(file.path).parts)

    def _repo_cache(self) -> Path:
        return access.hub_cache() / f"datasets--{self._listing.repo.replace('/', '--')}"

    def _blob(self, file: RemoteFile) -> Path | None:
        return self._repo_cache() / "blobs" / file.sha256 if file.sha256 else None

    def _places(self, file: RemoteFile) -> list[Path]:
        """Where the file may lie already: in the cache, under this or another commit, or among our own."""
        snapshots = self._repo_cache() / "snapshots"
        commits = sorted(folder.name for folder in snapshots.glob("*")) if file.sha256 else []
        commits = [self._listing.commit, *(commit for commit in commits if commit != self._listing.commit)]
        cached = [snapshots.joinpath(commit, *PurePosixPath(file.path).parts) for commit in commits]
        blob = self._blob(file)
        return [*cached, *([blob] if blob else []), self._own_path(file)]

    def _named(self, file: RemoteFile, blob: Path) -> Path:
        """Under a name that says what it is; of a blob alone no reader can tell."""
        link = self._own_path(file)
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(blob.resolve())
        except OSError:
            return blob
        return link

    def _link(self, file: RemoteFile, blob: Path) -> Path:
        """As huggingface_hub lays out its cache: the content once, its names per commit."""
        name = self._repo_cache().joinpath("snapshots", self._listing.commit, *PurePosixPath(file.path).parts)
        name.parent.mkdir(parents=True, exist_ok=True)
        try:
            name.symlink_to(os.path.relpath(blob, name.parent))
        except FileExistsError:
            if not name.exists() or not name.samefile(blob):  # the user's, and damaged
                return self._named(file, blob)
        except OSError:  # Windows without the right to make links
            blob.replace(name)
        return name


def fetch_text(
    dataset: NamedDataset, folder: Path | None = None, *, patience: Patience | None = None
) -> Path:
    """The dataset's one text, checked by hash; it stays in onecard's cache, or in `folder`."""
    from onecard.data.gpt2_bpe import cache_dir

    assert dataset.is_text, f"{dataset.name} is not one text"
    patience, never = patience or Patience(), threading.Event()
    # One small file: without any network a person should hear of it soon.
    patience = dataclasses.replace(patience, attempts=min(patience.attempts, 3))
    name = PurePosixPath(urllib.parse.urlsplit(dataset.url).path).name
    target = (folder or cache_dir() / "text") / f"{dataset.sha256[:12]}-{name}"
    if is_right(target, dataset.size, dataset.sha256, never):
        return target
    access.refuse_offline(dataset.name)
    wanted = Wanted(dataset.url, dataset.size, dataset.sha256)
    partial = target.with_name(f"{target.name}.onecard-partial")
    try:
        Transfer(wanted, target, partial, access.USER_AGENT, patience, never, lambda here: None).run()
    except UnreachableError as error:
        raise access.unreachable(
            dataset.name, str(error), host=urllib.parse.urlsplit(dataset.url).netloc
        ) from error
    except RefusedError as error:
        raise UserError(
            f"{dataset.url} cannot be had", str(error), access.local_hint(dataset.name), exit_code=1
        ) from error
    except DamagedError as error:
        raise access.damaged(dataset.url, error, patience) from error
    return target
