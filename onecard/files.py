"""Files that are whole or not there, reading that ends, and folders that one process owns at a time."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import os
import re
import secrets
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_HASH_BLOCK = 4 * 2**20
LINE_BYTES = 2**20  # of a file of lines, such as metrics.jsonl, at most
JSON_BYTES = 16 * 2**20  # more than any JSON file of ours, and little enough to hold parsed
DATA_JSON_BYTES = 96 * 2**20  # but for what names every source file of a dataset: some 480,000 of them
# Parsed, a value takes up to a hundred times its bytes. A dataset of so many files has half as many.
_MOST_CONTAINERS, _MOST_VALUES = 10**6, 4 * 10**6


class StoppedError(Exception):
    """The work was called off."""


class AlreadyLockedError(Exception):
    """Another process holds the lock."""


def open_plain(path: Path) -> BinaryIO:
    """An ordinary file, opened for reading. A FIFO would be waited for and a device read without end: these
    and folders are an OSError."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    _must_be_ordinary(path.stat(), path)  # before it is opened, which some devices notice
    descriptor = os.open(path, flags)
    try:
        _must_be_ordinary(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _must_be_ordinary(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))


def read_bounded(path: Path, most: int) -> bytes:
    """All of an ordinary file; one of more than `most` bytes is an OSError."""
    with open_plain(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most:,} bytes", str(path))
    return content


def lines_of(path: Path, longest: int = LINE_BYTES) -> Iterator[bytes]:
    """The lines of an ordinary file. What goes on for longer than `longest` is damage, and the end."""
    with open_plain(path) as file:
        while line := file.readline(longest):
            if len(line) == longest and not line.endswith(b"\n"):
                return
            yield line


def parse_json(text: str | bytes) -> Any:
    """As json.loads has it; whatever is wrong with the text is a ValueError: nested too deeply, more values
    than memory should be spent on, or a name twice in an object, of which one value would be lost."""
    if _count(text, "{") + _count(text, "[") > _MOST_CONTAINERS or _count(text, ",") > _MOST_VALUES:
        raise ValueError("it has too many values")
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _count(text: str | bytes, sign: str) -> int:
    return text.count(sign) if isinstance(text, str) else text.count(sign.encode())


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{twice[:40]!r} is in it twice")
    return content


def load_json(path: Path, most: int = JSON_BYTES) -> Any:
    """The content of a JSON file in UTF-8. OSError: it cannot be read. ValueError: it is not JSON."""
    return parse_json(read_bounded(path, most).decode("utf-8"))


def file_sha256(path: Path, stop: threading.Event | None = None) -> str:
    """Of a file of any size; StoppedError soon after `stop` is set."""
    digest = hashlib.sha256()
    with open_plain(path) as file:
        while block := file.read(_HASH_BLOCK):
            if stop is not None and stop.is_set():
                raise StoppedError
            digest.update(block)
    return digest.hexdigest()


def flush_to_disk(path: Path) -> None:
    """fsync a file or a folder. A rename is durable only with its folder; Windows cannot open one."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, content: str) -> None:
    """Atomically: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(path.name + ".part")
    temporary.unlink(missing_ok=True)  # a link or a FIFO of that name must not be written through
    with temporary.open("x", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def temporary_beside(target: Path) -> Path:
    """A hidden name beside the target, for what is not whole yet.

    What processes that are gone have left there under such names is removed. Where another process has got
    the number of one that is gone, its leftover waits until that one has ended as well.
    """
    name = re.compile(rf"\.{re.escape(target.name)}\.([0-9]{{1,10}})-[0-9a-f]{{8}}\.tmp")
    with contextlib.suppress(OSError):
        for path in target.parent.iterdir():
            found = name.fullmatch(path.name)
            if found and path not in _being_built and not _is_alive(int(found[1])):
                remove_any(path)
    place = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    _being_built.add(place)
    return place


_being_built: set[Path] = (
    set()
)  # by this process, which a leftover of an earlier one may share its number with


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return False  # another one that had this number, or what failed here
    if os.name == "nt":
        return True  # asking would end it
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # somebody else's
    return True


def remove_any(path: Path) -> None:
    """A folder with all in it, or whatever else has this name; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def exclusive_lock(path: Path) -> BinaryIO:
    """Held while the returned file is open; it goes with the process, even by kill -9."""
    with contextlib.suppress(FileNotFoundError):
        _must_be_ordinary(path.stat(), path)
    file = path.open("ab")
    try:
        import fcntl
    except ImportError:
        _lock_on_windows(file)
        return file
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise AlreadyLockedError from None
    except OSError:
        pass  # a file system without locks
    return file


def _lock_on_windows(file: BinaryIO) -> None:
    try:
        msvcrt: Any = importlib.import_module("msvcrt")
    except ImportError:  # neither of the two systems
        return
    file.seek(0)
    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except PermissionError:  # a byte that another one has
        file.close()
        raise AlreadyLockedError from None
    except OSError:
        pass  # a file system without locks
