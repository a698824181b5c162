"""One file over HTTP, however often the line breaks: resumed, checked by hash, whole or not there.

huggingface_hub (2.4) begins anew when a transfer fails for good or its process dies: each one has a
temporary file of its own. Files of 2 GB over a home line need better, hence plain ranges over urllib.
"""

from __future__ import annotations

import errno
import functools
import http.client
import os
import shutil
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from onecard.errors import UserError
from onecard.files import (
    JSON_BYTES,
    AlreadyLockedError,
    StoppedError,
    exclusive_lock,
    file_sha256,
    parse_json,
)

_CHUNK = 2**20
_LONGEST_ASKED_WAIT_S = 60.0
# 408 and 429 ask for another try; 5xx are the server's own trouble.
_TRANSIENT = {408, 425, 429}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class Patience:
    """When to try again and when to give up."""

    # In a row without one new byte.
    attempts: int = 5
    first_wait_s: float = 1.0
    longest_wait_s: float = 30.0
    # Silence of the other side.
    timeout_s: float = 20.0
    # After the first transfer, if its content was wrong.
    refetches: int = 2

    def wait_s(self, attempt: int) -> float:
        return float(min(self.first_wait_s * 2 ** min(attempt, 16), self.longest_wait_s))


class UnreachableError(Exception):
    """The other side cannot be reached, or the line breaks all the time."""


class RefusedError(Exception):
    """The other side answered, and the answer is no."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status} {reason}".strip())
        self.status = status


class DamagedError(Exception):
    """What comes is not what was promised, time and again."""

    def __init__(self, measure: str, expected: str, found: str) -> None:
        super().__init__(f"{measure}: expected {expected}, found {found}")


@dataclass(frozen=True)
class Wanted:
    """A file to fetch. Without a hash only its size is checked."""

    url: str
    size: int
    sha256: str | None


class _CarefulRedirects(urllib.request.HTTPRedirectHandler):
    """A token goes to the host it is meant for and to no other: file contents come from elsewhere."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str) -> Any:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.get_header("Authorization")
        if following is not None and token and following.host == req.host and following.type == req.type:
            following.add_unredirected_header("Authorization", token)
        return following


@functools.cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"]:
        # Pythons that come without the system's certificates; certifi comes with huggingface_hub.
        try:
            import certifi

            context.load_verify_locations(certifi.where())
        except ImportError:
            pass
    return context


def _open(url: str, headers: dict[str, str], timeout_s: float) -> http.client.HTTPResponse:
    request = urllib.request.Request(url)
    for name, value in headers.items():
        if name.lower() == "authorization":
            request.add_unredirected_header("Authorization", value)
        else:
            request.add_header(name, value)
    # Built anew, for it takes the proxies from the environment.
    opener = urllib.request.build_opener(_CarefulRedirects, urllib.request.HTTPSHandler(context=_tls()))
    answer: http.client.HTTPResponse = opener.open(request, timeout=timeout_s)
    return answer


@dataclass(frozen=True)
class _Break:
    """Why a transfer ended early, and how long the other side asked us to stay away."""

    reason: str
    asked_wait_s: float = 0.0


def _judge(error: Exception, url: str) -> _Break:
    """A reason to try again; raises where trying again is useless."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        # The content's own host refuses a signed address that has expired; the next attempt gets another.
        expired = error.code in (401, 403) and error.geturl() != url
        if error.code < 500 and error.code not in _TRANSIENT and not expired:
            raise RefusedError(error.code, str(error.reason)) from error
        asked = str(error.headers.get("Retry-After") or "")
        wait_s = min(float(asked), _LONGEST_ASKED_WAIT_S) if asked.isdecimal() else 0.0
        return _Break(f"HTTP {error.code} {error.reason}".strip(), wait_s)
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        raise UnreachableError(f"its certificate cannot be checked: {cause.verify_message}") from error
    if isinstance(cause, TimeoutError):
        return _Break("no answer in time")
    told = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return _Break(told or type(cause).__name__)


# What a broken line looks like: URLError and resets are OSErrors, half answers HTTPExceptions.
_LINE_ERRORS = (OSError, http.client.HTTPException)


def get_json(url: str, headers: dict[str, str], patience: Patience) -> tuple[Any, str | None]:
    """The answer, and the address of the next page if there is one."""
    # The first contact: without any network a person should hear of it soon.
    attempts = min(patience.attempts, 3)
    for attempt in range(attempts):
        try:
            with _open(url, headers, patience.timeout_s) as answer:
                return _bounded_json(answer), _next_page(answer.headers.get("Link"), url)
        except _LINE_ERRORS as error:
            broken = _judge(error, url)
        except ValueError:
            broken = _Break("the answer is not the Hub's; a log-in page of this network, perhaps?")
        if attempt + 1 < attempts:
            time.sleep(max(patience.wait_s(attempt), broken.asked_wait_s))
    raise UnreachableError(broken.reason)


def _bounded_json(answer: http.client.HTTPResponse) -> Any:
    """A page of the Hub's is far smaller than what is refused here."""
    content = answer.read(JSON_BYTES + 1)
    if len(content) > JSON_BYTES:
        raise ValueError("too long an answer")
    return parse_json(content)


def _next_page(link: str | None, url: str) -> str | None:
    for entry in (link or "").split(","):
        address, _, relation = entry.partition(";")
        if relation.strip().replace('"', "") == "rel=next":
            page = urllib.parse.urlsplit(address.strip().removeprefix("<").removesuffix(">"))
            # A mirror hands on the Hub's own address, which may be out of reach: stay with the mirror.
            return urllib.parse.urljoin(url, urllib.parse.urlunsplit(("", "", page.path, page.query, "")))
    return None


def is_right(path: Path, size: int, sha256: str | None, stop: threading.Event) -> bool:
    """Whether the file is there with this content."""
    try:
        if not path.is_file() or path.stat().st_size != size:
            return False
        return sha256 is None or file_sha256(path, stop) == sha256
    except OSError:
        return False


class Transfer:
    """Brings one file. What has come lies in `partial` and is taken up again, by another process too."""

    def __init__(
        self,
        wanted: Wanted,
        target: Path,
        partial: Path,
        headers: dict[str, str],
        patience: Patience,
        stop: threading.Event,
        progress: Callable[[int], None],
    ) -> None:
        self._wanted = wanted
        self._target = target
        self._partial = partial
        self._headers = headers
        self._patience = patience
        self._stop = stop
        self._progress = progress

    def run(self) -> None:
        """Returns when `target` is whole and right."""
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            file = self._own_partial()
        except OSError as error:
            raise self._cannot_write(error) from error
        if file is None:
            return
        with file:
            self._fill_and_check(file)
            if os.name == "nt":  # renames no open file
                file.close()
            self._partial.replace(self._target)

    def _own_partial(self) -> BinaryIO | None:
        """Open for appending and ours alone; None if another process has just brought the file."""
        while True:
            try:
                file = exclusive_lock(self._partial, holds_data=True)
            except AlreadyLockedError:
                self._progress(self._have())
                self._pause(0.2)
                continue
            try:
                if os.name == "nt" or os.path.samestat(os.fstat(file.fileno()), self._partial.stat()):
                    if not self._is_there():
                        return file
                    file.close()
                    self._partial.unlink(missing_ok=True)
                    return None
            except FileNotFoundError:
                pass  # moved away between open and lock: it is the finished file
            file.close()

    def _is_there(self) -> bool:
        return is_right(self._target, self._wanted.size, self._wanted.sha256, self._stop)

    def _fill_and_check(self, file: BinaryIO) -> None:
        damage: DamagedError | None = None
        for _ in range(self._patience.refetches + 1):
            try:
                self._fill(file)
                if self._wanted.sha256 is None:
                    return
                found = file_sha256(self._partial, self._stop)
                if found == self._wanted.sha256:
                    return
                raise DamagedError("SHA-256", self._wanted.sha256, found)
            except DamagedError as error:
                damage = error
                file.truncate(0)
                self._progress(0)
        assert damage is not None
        file.close()
        self._partial.unlink(missing_ok=True)
        raise damage

    def _fill(self, file: BinaryIO) -> None:
        """Until the size is reached. Only bytes beyond what was reached before count as progress."""
        failures, reached = 0, self._have()
        self._progress(reached)
        while (have := self._have()) != self._wanted.size:
            if have > self._wanted.size:
                raise self._wrong_size(have)
            self._check_room(have)
            broken = self._stream(file, have)
            if (have := self._have()) == self._wanted.size:
                return
            failures, reached = (0, have) if have > reached else (failures + 1, reached)
            if failures >= self._patience.attempts:
                raise UnreachableError(broken.reason)
            self._pause(max(self._patience.wait_s(max(failures - 1, 0)), broken.asked_wait_s))

    def _stream(self, file: BinaryIO, have: int) -> _Break:
        headers = {**self._headers, **({"Range": f"bytes={have}-"} if have else {})}
        try:
            with _open(self._wanted.url, headers, self._patience.timeout_s) as answer:
                have = self._place(file, answer, have)
                while chunk := answer.read1(_CHUNK):
                    if self._stop.is_set():
                        raise StoppedError
                    have += len(chunk)
                    if have > self._wanted.size:
                        raise self._wrong_size(have)
                    self._write(file, chunk)
                    self._progress(have)
        except _LINE_ERRORS as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == 416:
                # We have less than was promised, and the other side says there is no more.
                error.close()
                raise self._wrong_size(have) from error
            return _judge(error, self._wanted.url)
        return _Break("the connection was closed in the middle of the file")

    def _place(self, file: BinaryIO, answer: http.client.HTTPResponse, have: int) -> int:
        """Where the answer's first byte belongs; servers may ignore a range and send it all."""
        if answer.status == 206:
            span, _, total = (answer.headers.get("Content-Range") or "").removeprefix("bytes ").partition("/")
            if total.isdecimal() and int(total) != self._wanted.size:
                raise self._wrong_size(int(total))
            if span.partition("-")[0] == str(have):
                return have
            raise http.client.HTTPException("a range was sent that was not asked for")
        length = answer.headers.get("Content-Length") or ""
        if length.isdecimal() and int(length) != self._wanted.size:
            raise self._wrong_size(int(length))
        file.truncate(0)
        return 0

    def _write(self, file: BinaryIO, chunk: bytes) -> None:
        try:
            # Past the buffer: what has come counts even if this process is killed, and a disk that is
            # full says so here and not when the file is closed.
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        except OSError as error:
            raise self._cannot_write(error) from error

    def _check_room(self, have: int) -> None:
        free = shutil.disk_usage(self._partial.parent).free
        if free < self._wanted.size - have:
            raise self._no_room(f"{free / 1e9:.2f} GB are free")

    def _cannot_write(self, error: OSError) -> UserError:
        if error.errno in _NO_ROOM:
            return self._no_room(str(error.strerror))
        return UserError(f"cannot write to {self._partial.parent}", str(error.strerror or error), exit_code=1)

    def _no_room(self, why: str) -> UserError:
        have, name = self._have(), self._target.name
        return UserError(
            f"no room for {name} in {self._partial.parent}",
            f"{why}, {(self._wanted.size - have) / 1e9:.2f} GB more are needed",
            f"make room and give the same command again; the {have / 1e9:.2f} GB already here are kept",
            exit_code=1,
        )

    def _wrong_size(self, found: int) -> DamagedError:
        return DamagedError("size in bytes", f"{self._wanted.size:,}", f"{found:,}")

    def _have(self) -> int:
        try:
            return self._partial.stat().st_size
        except OSError:
            return 0

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise StoppedError
