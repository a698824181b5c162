"""The named datasets from the Hugging Face Hub: which files there are, and each of them when it is needed.

huggingface_hub does the transfers, so its settings and its cache count (HF_ENDPOINT, HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE). Everything is pinned: a listing names one commit and each file's SHA-256, so a prepare that
continues another day reads the very same bytes.
"""

from __future__ import annotations

import http.client
import re
import shutil
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from onecard.data.hub import access
from onecard.data.hub.catalogue import NamedDataset
from onecard.errors import UserError
from onecard.files import StoppedError, file_sha256, temporary_beside
from onecard.language import _

_CLOSE_WAIT_S = 1.0
_TIMEOUT_S = 20.0
# Between attempts at one file: huggingface_hub has tried several times within each of them.
WAITS_S = (2.0, 10.0)


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
        if type(self.size) is not int or not 0 <= self.size < 2**63:
            raise ValueError("not a size")


@dataclass(frozen=True)
class Listing:
    """The files of a dataset at one commit, in the order they are read."""

    name: str
    repo: str
    commit: str
    files: list[RemoteFile]


@dataclass(frozen=True)
class FetchStatus:
    """How far the file is that is under way."""

    name: str
    done_bytes: int
    total_bytes: int


# ---------------------------------------------------------------- which files


def list_files(dataset: NamedDataset, revision: str | None = None) -> Listing:
    """The dataset's parquet files at `revision`, a commit of an earlier listing; else at today's."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError

    assert dataset.repo, f"{dataset.name} is not on the Hub"
    access.refuse_offline(dataset.name)
    api = HfApi(endpoint=access.endpoint())
    asked = _("commit {name}").format(name=revision) if revision else _("branch {name}").format(name="main")

    def entries(folder: str) -> list[Any]:
        return list(api.list_repo_tree(dataset.repo, folder or None, revision=commit, repo_type="dataset"))

    try:
        # Only the commit: the default answer names every file of the repository, tens of thousands of them.
        info = api.dataset_info(dataset.repo, revision=revision, expand=["sha"], timeout=_TIMEOUT_S)
        commit = str(info.sha)
        if not re.fullmatch("[0-9a-f]{40}", commit):
            raise ValueError("not a commit")
        asked = dataset.folder or _("list of files")
        try:
            found = {entry.path: entry for entry in entries(dataset.folder) if hasattr(entry, "size")}
        except EntryNotFoundError:
            if dataset.dump is None:
                raise
            above = entries(PurePosixPath(dataset.folder).parent.as_posix())
            raise access.unknown_dump(dataset, [Path(entry.path).name for entry in above]) from None
        files = [_remote_file(found[path]) for path in dataset.train_files(list(found))]
    except UserError:
        raise
    except Exception as error:  # whatever its HTTP library raises, of any version
        raise access.explained(error, dataset.name, dataset.repo, asked) from error
    if not files:
        raise UserError(
            _("no files {pattern} in {folder} at commit {commit}").format(
                pattern=dataset.pattern, folder=f"{dataset.repo}/{dataset.folder}", commit=commit[:12]
            ),
            _("the dataset was rearranged since this version of onecard"),
            access.local_hint(dataset.name),
            exit_code=1,
        )
    return Listing(dataset.name, dataset.repo, commit, files)


def _remote_file(entry: Any) -> RemoteFile:
    return RemoteFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else None)


# ---------------------------------------------------------------- each file when it is needed


class _Download(threading.Thread):
    """One file under way; when the thread has ended there is a path or an error."""

    def __init__(self, number: int, file: RemoteFile, bring: Callable[[_Download], Path]) -> None:
        super().__init__(name="onecard-fetch", daemon=True)
        self.number, self.file, self.here = number, file, 0
        self.path: Path | None = None
        self.error: BaseException | None = None
        self._bring = bring

    def run(self) -> None:
        try:
            self.path = self._bring(self)
        except BaseException as error:
            self.error = error


class Fetcher:
    """Brings the files of a listing, by number, one ahead if asked to.

    A file in the user's Hub cache is used where it is. Others come into that cache if they are to be kept,
    else into one of their own below `folder`, which `release` deletes.
    """

    def __init__(self, listing: Listing, folder: Path, keep: bool) -> None:
        self._listing = listing
        self._folder = folder
        self._keep = keep
        self._downloads: dict[int, _Download] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def get(self, number: int) -> Path:
        """Waits until the file is here and its hash is right. StoppedError if another thread closes us."""
        download = self._started(number)
        # In steps, so that Ctrl-C comes through on Windows too.
        while download.is_alive():
            download.join(0.5)
        if download.error is not None:
            with self._lock:
                self._downloads.pop(number, None)  # asked again, it tries again
            raise download.error
        assert download.path is not None
        return download.path

    def prefetch(self, number: int) -> None:
        """Begins in the background; past the last file nothing happens. Errors wait for `get`."""
        if number < len(self._listing.files):
            self._started(number)

    def release(self, number: int) -> None:
        """The file was read: deletes it unless it is in the user's cache."""
        with self._lock:
            self._downloads.pop(number, None)
        shutil.rmtree(self._own_cache(number), ignore_errors=True)

    def status(self) -> FetchStatus | None:
        """The first file under way, else None. May be asked from any thread."""
        with self._lock:
            under_way = [download for download in self._downloads.values() if download.is_alive()]
        download = min(under_way, key=lambda one: one.number, default=None)
        return FetchStatus(download.file.path, download.here, download.file.size) if download else None

    def close(self) -> None:
        """Stops what is under way, within about a second; whole files stay for next time."""
        self._stop.set()
        with self._lock:
            downloads = list(self._downloads.values())
        deadline = time.monotonic() + _CLOSE_WAIT_S
        for download in downloads:
            # One that waits for a silent server ends with its time-out, or with the process.
            download.join(max(0.0, deadline - time.monotonic()))

    def _started(self, number: int) -> _Download:
        with self._lock:
            download = self._downloads.get(number)
            if download is None:
                download = _Download(number, self._listing.files[number], self._bring)
                self._downloads[number] = download
                download.start()
            return download

    def _own_cache(self, number: int) -> Path:
        return self._folder / str(number)

    def _bring(self, download: _Download) -> Path:
        from huggingface_hub import constants

        file, own = download.file, self._own_cache(download.number)
        users = Path(constants.HF_HUB_CACHE)
        in_users = self._in_cache(users, file)
        if right := next(
            (p for p in (*in_users, *self._in_cache(own, file)) if self._is_right(p, file)), None
        ):
            return right
        access.refuse_offline(self._listing.name, file.path)
        try:
            # What is damaged in the user's cache is theirs to delete: the file comes into our own then.
            return self._fetched(download, users if self._keep and not in_users else own)
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)
            raise

    def _fetched(self, download: _Download, cache: Path) -> Path:
        file, waits = download.file, list(WAITS_S)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(cache).free) < file.size:
                why = _("{size:.2f} GB are needed, {free:.2f} GB are free")
                raise access.no_room(file.path, why.format(size=file.size / 1e9, free=free / 1e9))
        except OSError as error:
            raise access.explained(error, self._listing.name, self._listing.repo, file.path) from error
        while True:
            try:
                return self._fetched_once(download, cache)
            except access.TryAgainError:
                if not waits:
                    raise
                if self._stop.wait(waits.pop(0)):
                    raise StoppedError from None

    def _fetched_once(self, download: _Download, cache: Path) -> Path:
        from huggingface_hub import hf_hub_download

        file, listing = download.file, self._listing
        try:
            path = Path(
                hf_hub_download(
                    listing.repo, file.path, repo_type="dataset", revision=listing.commit, cache_dir=cache,
                    endpoint=access.endpoint(), tqdm_class=_bar_of(download, self._stop),
                )
            )  # fmt: skip
        except StoppedError:
            raise
        except Exception as error:  # whatever its HTTP library raises, of any version
            raise access.explained(error, listing.name, listing.repo, file.path) from error
        if file.sha256 is None or (found := file_sha256(path, self._stop)) == file.sha256:
            return path
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise access.wrong_hash(f"{listing.repo}/{file.path}", file.sha256, found)

    def _in_cache(self, cache: Path, file: RemoteFile) -> list[Path]:
        """Where a Hub cache may have the file: under this commit, or under any as the content it is."""
        from huggingface_hub import try_to_load_from_cache

        repo, commit = self._listing.repo, self._listing.commit
        named = try_to_load_from_cache(repo, file.path, cache, revision=commit, repo_type="dataset")
        blob = cache / f"datasets--{repo.replace('/', '--')}" / "blobs" / (file.sha256 or "")
        found = [Path(named)] if isinstance(named, str) else []
        return [*found, blob] if blob.is_file() else found

    def _is_right(self, path: Path, file: RemoteFile) -> bool:
        try:
            if path.stat().st_size != file.size:
                return False
            return file.sha256 is None or file_sha256(path, self._stop) == file.sha256
        except OSError:
            return False


def _bar_of(download: _Download, stop: threading.Event) -> type[Any]:
    """A progress bar for huggingface_hub that shows nothing: it counts, and `stop` ends the transfer."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._seen = 0
            super().__init__(*arguments, **options | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if stop.is_set():
                raise StoppedError
            # There may be two bars, one for what came and one for what is written.
            self._seen += int(n or 0)
            download.here = max(download.here, min(self._seen, download.file.size))
            return None

    return Bar


# ---------------------------------------------------------------- one text


def fetch_text(dataset: NamedDataset, folder: Path | None = None) -> Path:
    """The dataset's one text, checked by hash; it stays in onecard's cache, or in `folder`."""
    from onecard.data.gpt2_bpe import cache_dir

    assert dataset.is_text, f"{dataset.name} is not one text"
    address = urllib.parse.urlsplit(dataset.url)
    target = (folder or cache_dir() / "text") / f"{dataset.sha256[:12]}-{PurePosixPath(address.path).name}"
    if target.is_file() and file_sha256(target) == dataset.sha256:
        return target
    access.refuse_offline(dataset.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary_beside(target)
    try:
        with urllib.request.urlopen(dataset.url, timeout=_TIMEOUT_S) as answer:
            partial.write_bytes(answer.read(dataset.size + 1))
        if (found := file_sha256(partial)) != dataset.sha256:
            raise access.wrong_hash(dataset.url, dataset.sha256, found)
        partial.replace(target)
    except urllib.error.HTTPError as error:
        what = _("{address} cannot be fetched").format(address=dataset.url)
        hint = access.local_hint(dataset.name)
        raise UserError(what, f"HTTP {error.code} {error.reason}", hint, exit_code=1) from error
    except (OSError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", None) or error)
        raise access.unreachable(dataset.name, reason, address.netloc) from error
    finally:
        partial.unlink(missing_ok=True)
    return target
