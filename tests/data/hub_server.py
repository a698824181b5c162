"""A stand-in for the Hugging Face Hub on this machine, with a switch for each way a network fails.

It speaks what onecard and huggingface_hub ask of the Hub: the commit of a revision, paged listings, and
files by way of a redirect to another path, as the Hub sends readers to its content servers.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
_PIECE = 16 * 1024


@dataclass
class Faults:
    """Numbers count down; each applies to the file contents unless it says otherwise."""

    drop_after: int | None = None  # bytes of one answer, then the connection breaks …
    drops: int = 0  # … this many times …
    reset: bool = False  # … by a reset instead of an orderly end
    ignore_range: bool = False
    unavailable: int = 0  # HTTP 503
    corrupt: int = 0  # one byte differs
    short_by: int = 0  # content smaller than listed, in an answer that is complete in itself
    expired: int = 0  # HTTP 403 of the content path, as for a signed address that is too old
    refuse: int = 0  # this status for everything, until reset
    not_json: bool = False  # listings answer with a page of HTML
    seconds_per_piece: float = 0.0  # a slow line


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class Repo:
    commit: str = COMMIT
    files: dict[str, bytes] = field(default_factory=dict)


class HubServer:
    """Add files with `put`, read `url`, count `served` bytes of content, and set `faults`."""

    def __init__(self, page_size: int = 1000) -> None:
        self.repos: dict[str, Repo] = {}
        self.texts: dict[str, bytes] = {}
        self.faults = Faults()
        self.page_size = page_size
        self.requests: list[Request] = []
        self.served = 0
        self.lock = threading.Lock()
        server = self

        class Handler(_Handler):
            hub = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    def put(self, repo: str, path: str, content: bytes) -> str:
        """Returns the SHA-256."""
        self.repos.setdefault(repo, Repo()).files[path] = content
        return hashlib.sha256(content).hexdigest()

    def contents(self) -> list[Request]:
        """The requests that reached the content path."""
        return [request for request in self.requests if request.path.startswith("/content/")]

    def take(self, fault: str) -> bool:
        """Uses up one of a counted fault."""
        with self.lock:
            left: int = getattr(self.faults, fault)
            setattr(self.faults, fault, max(0, left - 1))
            return left > 0

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def environment(server_url: str, home: Any) -> dict[str, str]:
    """What makes onecard and huggingface_hub talk to the stand-in, and keep to folders of the test."""
    return {
        "HF_ENDPOINT": server_url,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(PurePosixPath(str(home)) / "hub"),
        "XDG_CACHE_HOME": str(PurePosixPath(str(home)) / "cache"),
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_TOKEN": "",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def at_home(monkeypatch: Any, server_url: str, home: Any) -> None:
    """The same within this process, where huggingface_hub has read its environment; and no long waits."""
    from huggingface_hub import constants

    from onecard.data.hub import fetch

    settings = environment(server_url, home)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", settings["HF_HUB_CACHE"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(fetch, "WAITS_S", (0.01, 0.01))
    for module in ("utils._http", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.time", _NoWaits())


class _NoWaits:
    """For huggingface_hub: the module `time` whose sleep is short."""

    def sleep(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.01))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        address = urlsplit(self.path)
        path = unquote(address.path)
        with self.hub.lock:
            self.hub.requests.append(
                Request(self.command, path, self.headers.get("Range"), self.headers.get("Authorization"))
            )
        faults = self.hub.faults
        if faults.refuse:
            return self._status(faults.refuse)
        if path.startswith("/api/datasets/"):
            return self._api(path.removeprefix("/api/datasets/"), parse_qs(address.query))
        if path.startswith("/datasets/"):
            return self._resolve(path.removeprefix("/datasets/"))
        if path.startswith("/content/"):
            repo, _, name = path.removeprefix("/content/").partition("//")
            return self._content(self.hub.repos[repo].files[name])
        if path in self.hub.texts:
            return self._content(self.hub.texts[path])
        return self._status(404)

    # ---- commits and listings

    def _api(self, path: str, query: dict[str, list[str]]) -> None:
        owner, name, *rest = path.split("/")
        repo = self.hub.repos.get(f"{owner}/{name}")
        if repo is None:
            return self._status(401, "RepoNotFound")  # what the Hub says to strangers
        if self.hub.faults.not_json:
            return self._send(200, b"<html>please log in</html>", {"Content-Type": "text/html"})
        if not rest or rest[0] == "revision":
            if len(rest) > 1 and rest[1] not in ("main", repo.commit):
                return self._status(404, "RevisionNotFound")
            return self._json({"id": f"{owner}/{name}", "sha": repo.commit})
        if rest[0] == "tree" and len(rest) > 1:
            if rest[1] not in ("main", repo.commit):
                return self._status(404, "RevisionNotFound")
            return self._tree(repo, "/".join(rest[2:]), query)
        return self._status(404)

    def _tree(self, repo: Repo, folder: str, query: dict[str, list[str]]) -> None:
        prefix = f"{folder}/" if folder else ""
        recursive = query.get("recursive", ["false"])[0].lower() == "true"
        entries: dict[str, dict[str, Any]] = {}
        for path, content in sorted(repo.files.items()):
            if not path.startswith(prefix):
                continue
            below, _, deeper = path.removeprefix(prefix).partition("/")
            if deeper and not recursive:
                name = prefix + below
                oid = hashlib.sha1(name.encode()).hexdigest()
                entries[name] = {"type": "directory", "path": name, "size": 0, "oid": oid}
                continue
            entries[path] = _file_entry(path, content)
        if not entries:
            return self._status(404, "EntryNotFound")
        start = int(query.get("cursor", ["0"])[0])
        page = list(entries.values())[start : start + self.hub.page_size]
        headers = {}
        if start + self.hub.page_size < len(entries):
            address = urlsplit(self.path).path
            cursor = start + self.hub.page_size
            more = f"recursive={str(recursive).lower()}&cursor={cursor}"
            headers["Link"] = f'<{self.hub.url}{address}?{more}>; rel="next"'
        return self._json(page, headers)

    # ---- files

    def _resolve(self, path: str) -> None:
        repo_name, _, rest = path.partition("/resolve/")
        commit, _, name = rest.partition("/")
        repo = self.hub.repos.get(repo_name)
        if repo is None:
            return self._status(401, "RepoNotFound")
        if commit not in ("main", repo.commit):
            return self._status(404, "RevisionNotFound")
        if name not in repo.files:
            return self._status(404, "EntryNotFound", {"X-Repo-Commit": repo.commit})
        if self.hub.take("unavailable"):
            return self._status(503)
        content = repo.files[name]
        sha256 = hashlib.sha256(content).hexdigest()
        return self._send(
            302,
            b"",
            {
                # Another host as far as addresses go, as the Hub's content servers are.
                "Location": f"{self.hub.url.replace('127.0.0.1', 'localhost')}/content/{repo_name}//{name}",
                "X-Repo-Commit": repo.commit,
                "X-Linked-Etag": f'"{sha256}"',
                "X-Linked-Size": str(len(content)),
                "ETag": f'"{sha256}"',
            },
        )

    def _content(self, content: bytes) -> None:
        faults = self.hub.faults
        if self.hub.take("expired"):
            return self._status(403)
        sha256 = hashlib.sha256(content).hexdigest()
        if faults.short_by:
            content = content[: -faults.short_by]
        total, start = len(content), 0
        wanted = self.headers.get("Range")
        if wanted and not faults.ignore_range:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            if start >= total:
                return self._status(416, headers={"Content-Range": f"bytes */{total}"})
        if self.hub.take("corrupt"):
            middle = (start + total) // 2
            content = content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("ETag", f'"{sha256}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(total - start))
        self.end_headers()
        if self.command != "HEAD":
            self._pieces(content[start:])
        return None

    def _pieces(self, content: bytes) -> None:
        faults = self.hub.faults
        drops = faults.drop_after is not None and self.hub.take("drops")
        limit = min(len(content), faults.drop_after or 0) if drops else len(content)
        for start in range(0, limit, _PIECE):
            piece = content[start : min(start + _PIECE, limit)]
            with self.hub.lock:
                # Before it goes out: whoever has read everything finds everything counted.
                self.hub.served += len(piece)
            try:
                self.wfile.write(piece)
                self.wfile.flush()
            except OSError:  # the reader went away
                self.close_connection = True
                return
            if faults.seconds_per_piece:
                time.sleep(faults.seconds_per_piece)
        if drops:
            self.close_connection = True
            if faults.reset:
                # No time to linger: what was not read yet is lost and the reader hears of a reset.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

    # ---- answers

    def _json(self, content: Any, headers: dict[str, str] | None = None) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _status(self, status: int, code: str = "", headers: dict[str, str] | None = None) -> None:
        self._send(status, b"", {**({"X-Error-Code": code} if code else {}), **(headers or {})})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _file_entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": hashlib.sha1(content).hexdigest(),
    }
    if path.endswith(".parquet"):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry
