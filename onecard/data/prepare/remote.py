"""A named dataset's files as an origin: fetched one ahead of the reader, removed once they are used."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from onecard.data.hub.catalogue import NamedDataset
from onecard.data.hub.fetch import Fetcher, Listing
from onecard.data.prepare.origin import Origin
from onecard.data.prepare.progress import short
from onecard.data.prepare.sources import SourceFile
from onecard.files import file_sha256
from onecard.language import _

DOWNLOADS = ".download"


class RemoteFiles(Origin):
    """Parquet files of the Hub, pinned to one commit."""

    def __init__(
        self,
        dataset: NamedDataset,
        listing: Listing,
        folder: Path,
        keep: bool,
        tokens: int | None,
        tokenizer: str = "gpt2",
    ) -> None:
        self.listing = listing
        self.dataset = {
            "name": dataset.name,
            "repo": listing.repo,
            "folder": dataset.folder,
            "commit": listing.commit,
        }
        self._named = dataset
        self._tokens = tokens
        # The catalogue's figure is for GPT-2's tokens; bytes and characters are about one a byte of text.
        self._parquet_per_token = (
            1 / dataset.text_bytes_per_parquet_byte
            if tokenizer in ("byte", "char")
            else dataset.parquet_bytes_per_token
        )
        self._fetcher = Fetcher(listing, folder / DOWNLOADS, keep)
        self._folder = folder / DOWNLOADS
        self._sha256: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.listing.files)

    def name(self, number: int) -> str:
        return self.listing.files[number].path

    def size(self, number: int) -> int:
        return self.listing.files[number].size

    def open(self, number: int) -> SourceFile:
        path = self._fetcher.get(number)
        # The next one, if this one will not be enough by the estimate.
        if number + 1 < len(self) and number + 1 < self.files_needed():
            self._fetcher.prefetch(number + 1)
        known = self.listing.files[number].sha256
        self._sha256[number] = known or file_sha256(path)
        bounded = self._tokens is None
        return SourceFile(path, self.size(number), self.name(number), "parquet", bounded=bounded)

    def sha256(self, number: int) -> str:
        known = self.listing.files[number].sha256
        return known if known is not None else self._sha256[number]

    def partly_read(self, number: int) -> dict[str, Any]:
        return {"sha256": self.sha256(number)}

    def text_bytes(self) -> int:
        return int(self.total_bytes * self._named.text_bytes_per_parquet_byte)

    def files_needed(self) -> int:
        """How many files hold the tokens that are wanted, by the estimate of the catalogue."""
        if self._tokens is None:
            return len(self)
        wanted, count = self._tokens * self._parquet_per_token, 0
        while count < len(self) and wanted > 0:
            wanted -= self.size(count)
            count += 1
        return count

    @property
    def total_bytes(self) -> int:
        """Bytes of the files that will be read, by the estimate."""
        return sum(self.size(number) for number in range(self.files_needed()))

    def release(self, number: int) -> None:
        self._fetcher.release(number)

    def status(self) -> str:
        coming = self._fetcher.status()
        if coming is None:
            return ""
        line = _("fetching {name}: {done:.2f} of {total:.2f} GB")
        return line.format(name=coming.name, done=coming.done_bytes / 1e9, total=coming.total_bytes / 1e9)

    def finished(self) -> None:
        """Removes what was fetched too early or half used, once all is written."""
        self._fetcher.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        # What was interrupted stays, to be continued.
        self._fetcher.close()
        if self._folder.is_dir() and not any(path.is_file() for path in self._folder.rglob("*")):
            shutil.rmtree(self._folder, ignore_errors=True)

    def announcement(self, itemsize: int, keep: bool) -> str:
        """What will be downloaded and what will be kept."""
        count = self.files_needed()
        tokens = self._tokens or int(self.total_bytes / self._parquet_per_token)
        after = _("kept in the Hub cache") if keep else _("each removed once it is used; --keep keeps them")
        where = f"{self.listing.repo}/{self._named.folder}"
        first = _("{name}: {where} at {commit}, {licence}").format(
            name=self._named.name, where=where, commit=self.listing.commit[:12], licence=self._named.licence
        )
        second = _(
            "about {tokens} training tokens from {n:,} of {files:,} files: {parquet} of parquet to download "
            "({after}), {kept} of tokens to keep"
        )
        return f"{first}\n  " + second.format(
            tokens=short(tokens), n=count, files=len(self), parquet=_size(self.total_bytes), after=after,
            kept=_size(tokens * itemsize),
        )  # fmt: skip


def _size(n_bytes: float) -> str:
    return (
        _("{n:.1f} GB").format(n=n_bytes / 1e9) if n_bytes >= 1e8 else _("{n:.1f} MB").format(n=n_bytes / 1e6)
    )


def stored_commit(meta: dict[str, Any]) -> str | None:
    """The commit an earlier prepare of a named dataset read from."""
    dataset = meta.get("dataset")
    return str(dataset["commit"]) if isinstance(dataset, dict) and dataset.get("commit") else None
