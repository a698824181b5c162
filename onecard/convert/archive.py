"""Memory that a file of torch.save would take, counted before any of it is loaded.

torch's restricted unpickler runs no program that a file asks for, but it does not count: a packed entry of a
zip archive may be a thousand times larger than the file, and a short pickle can ask for the same long list
to be copied a million times. Model files never do such things, so what does is refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from onecard.files import open_plain
from onecard.language import _

# gpt2-xl with its moments has 2,300 tensors, 40 instructions and 200 bytes each.
_PICKLE_BYTES, _CONTENTS_BYTES = 32 * 2**20, 8 * 2**20
_INSTRUCTIONS = 10**6
_COPIED = 16 * 10**6  # values that calls are given, each of which may copy them
_LARGEST_INTEGER = 2**71  # hashes of larger ones can be made equal, and a dictionary of them endless
# Before PyTorch 1.6: a magic number, version, machine, the content and the names of its storages.
_LEGACY_PICKLES = 5
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C

_END, _END_64, _LOCATOR_64 = b"PK\5\6", b"PK\6\6", b"PK\6\7"

_CALLED = {
    "collections.OrderedDict", "torch.Size", "torch.device", "torch.serialization._get_layout",
    "torch.nn.parameter.Parameter", "_codecs.encode", "builtins.complex",
    *(f"torch._utils._rebuild_{name}" for name in (
        "tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state", "sparse_tensor",
        "meta_tensor_no_storage",
    )),
}  # fmt: skip
_CONSTANTS = {
    "NONE", "NEWFALSE", "NEWTRUE", "BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1",
}  # fmt: skip
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class TooLargeError(Exception):
    """What is wrong with the file, in words."""


def check_archive(path: Path) -> None:
    """A zip archive as torch writes it: nothing in it is packed, and its parts are no larger than it is.

    TooLargeError if not; pickle.UnpicklingError where its pickle asks for what a model has no need of.
    """
    with open_plain(path) as file:
        _check_contents(file)
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if any(e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size for e in entries):
                raise TooLargeError(_("its parts are packed, which torch.save never does"))
            if sum(entry.file_size for entry in entries) > file.seek(0, io.SEEK_END):
                raise TooLargeError(_("its parts together are larger than the file"))
            for entry in entries:
                if entry.filename.rpartition("/")[2] != "data.pkl":
                    continue
                if entry.file_size > _PICKLE_BYTES:
                    raise TooLargeError(_("its list of tensors has {n:,} bytes").format(n=entry.file_size))
                _Weighing().read(io.BytesIO(archive.read(entry)))


def check_legacy(path: Path) -> None:
    """The same for a file from before PyTorch 1.6: one pickle after the other, and then the numbers."""
    with open_plain(path) as file:
        start = io.BytesIO(file.read(_PICKLE_BYTES))
    weighing = _Weighing()
    for _pickle in range(_LEGACY_PICKLES):
        weighing.read(start)


def _check_contents(file: BinaryIO) -> None:
    """Its table of contents is where every reader finds it, and of bearable size: two readers that find
    different ones would see different files."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 98))
    end = file.read()
    if end[-22:-18] != _END or end[-2:] != b"\0\0":
        raise TooLargeError(_("its table of contents is not at its end, where torch.save writes it"))
    length, begins = struct.unpack("<II", end[-10:-2])
    behind = size - 22
    if end[-42:-38] == _LOCATOR_64:
        (where,) = struct.unpack("<Q", end[-34:-26])
        if len(end) < 98 or where != size - 98 or end[:4] != _END_64:
            raise TooLargeError(_("its table of contents is not at its end, where torch.save writes it"))
        length, begins = struct.unpack("<QQ", end[40:56])
        behind = where
    if begins + length != behind or length > _CONTENTS_BYTES:
        raise TooLargeError(
            _("its table of contents has {n:,} bytes, or lies elsewhere than it says").format(length=length)
        )


class _Value:
    """What the unpickler would have on its stack, as far as it matters: its kind and how much it holds."""

    __slots__ = ("items", "kind", "weight")

    def __init__(self, kind: str, weight: int = 1, items: tuple[_Value, ...] = ()) -> None:
        self.kind, self.weight, self.items = kind, weight, items


_PLAIN, _NUMBER = _Value("value"), _Value("number")


class _Weighing:
    """Goes through a pickle's instructions and builds nothing."""

    def __init__(self) -> None:
        self._left, self._copied = _INSTRUCTIONS, 0

    def read(self, stream: BinaryIO) -> None:
        self._stack: list[_Value] = []
        self._marks: list[list[_Value]] = []
        self._memo: dict[int, _Value] = {}
        for name, argument in self._instructions(stream):
            self._one(name, argument)

    def _instructions(self, stream: BinaryIO) -> Iterator[tuple[str, Any]]:
        for opcode, argument, _place in pickletools.genops(stream):
            self._left -= 1
            if self._left < 0:
                raise TooLargeError(
                    _("its list of tensors has more than {n:,} instructions").format(n=_INSTRUCTIONS)
                )
            yield opcode.name, argument

    def _one(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _CONSTANTS:
            if isinstance(argument, int) and abs(argument) >= _LARGEST_INTEGER and argument != _LEGACY_MAGIC:
                raise TooLargeError(_("it has a whole number of more than 71 bits"))
            stack.append(_NUMBER if isinstance(argument, int) else _PLAIN)
        elif name in ("BINUNICODE", "SHORT_BINSTRING"):
            stack.append(_Value("text", 1 + len(argument)))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"):
            stack.append(_Value("container"))
        elif name in _TUPLES:
            self._tuple(self._last(_TUPLES[name]))
        elif name == "TUPLE":
            self._tuple(self._since_mark())
        elif name == "MARK":
            self._marks.append(stack)
            self._stack = []
        elif name in ("APPEND", "SETITEM"):
            self._put(self._last(1 if name == "APPEND" else 2), keys=name == "SETITEM")
        elif name in ("APPENDS", "SETITEMS"):
            self._put(self._since_mark(), keys=name == "SETITEMS")
        elif name in ("GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "BINPERSID"):
            self._special(name, argument)
        elif name not in ("PROTO", "STOP"):
            raise pickle.UnpicklingError(f"Unsupported operand {name}")

    def _special(self, name: str, argument: Any) -> None:
        if name == "GLOBAL":
            self._stack.append(_Value(_global(argument)))
        elif name == "BINPERSID":
            self._storage(self._stack.pop())
        elif name == "BUILD":
            self._count(self._stack.pop())
        else:
            arguments, called = self._stack.pop(), self._stack.pop()
            if called.kind not in _CALLED:
                raise pickle.UnpicklingError(f"GLOBAL {called.kind} is called")
            self._count(arguments)
            self._stack.append(_Value("made", arguments.weight))

    def _last(self, count: int) -> list[_Value]:
        if len(self._stack) < count:
            raise IndexError("the pickle takes more than it has put there")
        found = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return found

    def _since_mark(self) -> list[_Value]:
        found, self._stack = self._stack, self._marks.pop()
        return found

    def _tuple(self, items: list[_Value]) -> None:
        kept = tuple(items) if len(items) <= 6 else ()
        self._stack.append(_Value("tuple", _weight(items), kept))

    def _put(self, items: list[_Value], *, keys: bool) -> None:
        if keys and any(key.kind not in ("text", "number") for key in items[::2]):
            raise TooLargeError(_("a dictionary in it has keys that are neither text nor whole numbers"))
        into = self._stack[-1]
        into.weight = min(into.weight + _weight(items), _COPIED + 1)

    def _count(self, value: _Value) -> None:
        self._copied += value.weight
        if self._copied > _COPIED:
            raise TooLargeError(_("it copies the same values again and again"))

    def _storage(self, named: _Value) -> None:
        """("storage", its type, its name, a device, a size), and in old files whose part it is."""
        kinds = [item.kind for item in named.items]
        if kinds[:1] + kinds[2:5] != ["text", "text", "text", "number"]:
            raise pickle.UnpicklingError("a tensor in it has no storage that torch.save would write")
        self._stack.append(_Value("storage"))


def _weight(items: list[_Value]) -> int:
    return min(1 + sum(item.weight for item in items), _COPIED + 1)


def _global(argument: str) -> str:
    module, _space, name = argument.partition(" ")
    full = f"{'builtins' if module == '__builtin__' else module}.{name}"
    plain = module in ("torch", "torch.cuda", "torch.storage") and (
        name.endswith("Storage") or name.islower()
    )
    if full not in _CALLED and not plain:
        raise pickle.UnpicklingError(f"GLOBAL {full}")
    return full
