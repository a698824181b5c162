"""Checkpoints that would take far more memory than their size are refused before they are loaded."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onecard.convert.nanogpt import read_nanogpt_checkpoint
from onecard.convert.reading import load_without_executing
from onecard.errors import UserError

FIXTURE = Path(__file__).parents[1] / "fixtures" / "nanogpt" / "ckpt.pt"
BEGIN, END = b"\x80\x02", b"."


def long_list(count: int, *, memo: int = 0) -> bytes:
    return b"](" + b"K\1" * count + b"e" + b"q" + bytes([memo])


def called(module: str, name: str, arguments: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + arguments + b"R"


def zipped(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED, **more: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
        for name, entry in more.items():
            archive.writestr(f"archive/data/{name}", entry)
    return path


def refusal(path: Path) -> str:
    """What is said; and no more memory is taken than reading the pickle needs."""
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as raised:
            load_without_executing(path)
        assert tracemalloc.get_traced_memory()[1] < 300 * 2**20
    finally:
        tracemalloc.stop()
    return str(raised.value)


def test_a_packed_archive_is_not_unpacked(tmp_path: Path) -> None:
    """A thousand times its size, and what is mapped of it would be the packed bytes."""
    with (
        zipfile.ZipFile(FIXTURE) as archive,
        zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as to,
    ):
        for entry in archive.infolist():
            to.writestr(entry.filename, archive.read(entry))
    assert "packed, which torch.save never does" in refusal(tmp_path / "c.pt")
    bomb = zipped(tmp_path / "bomb.pt", BEGIN + b"N" * 10**8 + END, zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 2**20
    assert "packed, which torch.save never does" in refusal(bomb)


def test_parts_that_lie_over_each_other_are_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "c.pt", BEGIN + b"N" + END, zeros=bytes(10**6))
    content = bytearray(path.read_bytes())
    at = content.rfind(b"PK\1\2")
    entry = bytes(content[at : content.rfind(b"PK\5\6")])  # one part named a hundred times more
    end = content[content.rfind(b"PK\5\6") :]
    count, length = struct.unpack("<HI", end[10:16])
    struct.pack_into("<HHI", end, 8, count + 100, count + 100, length + 100 * len(entry))
    path.write_bytes(content[: content.rfind(b"PK\5\6")] + entry * 100 + end)
    assert "together are larger than the file" in refusal(path)


def test_two_tables_of_contents_are_refused(tmp_path: Path) -> None:
    """Readers that look for it in other places would see other files."""
    path = zipped(tmp_path / "c.pt", BEGIN + b"N" + END)
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"behind its end"
    assert "table of contents is not at its end" in refusal(path)


COPIES, DAMAGED = "copies the same values again and again", "is damaged"
LIST, INTEGER = long_list(100_000), b"J\xff\xff\xff\x7f\x85"
TEXT = b"X\0\0\x10\0" + b"a" * 2**20 + b"q\0X\5\0\0\0utf32q\1"
DOUBLED = b"K\1\x85" + b"q\0h\0\x86" * 40  # a tuple of 2^40 values, which are all the same
COLLIDING = [((2**61 - 1) * n + 2**150).to_bytes(20, "little") for n in range(9)]
STORAGE = b"(X\7\0\0\0storagectorch\nFloatStorage\n"
HOSTILE = {
    "long": (b"N" * (33 * 2**20), "its list of tensors has"),
    "dictionaries": (b"}" * 1_100_000, "more than 1,000,000 instructions"),
    "bytearray": (called("builtins", "bytearray", INTEGER), "builtins.bytearray"),
    "tensor": (called("torch", "Tensor", INTEGER), "torch.Tensor"),
    "storage": (called("torch.storage", "UntypedStorage", INTEGER), "torch.storage.UntypedStorage"),
    "copied dictionary": (
        LIST + b"]q\1(" + called("collections", "OrderedDict", b"h\0\x85") * 1000 + b"e",
        COPIES,
    ),
    "copied size": (LIST + b"(" + called("torch", "Size", b"h\0\x85") * 1000 + b"t", COPIES),
    "copied text": (TEXT + b"(" + called("_codecs", "encode", b"h\0h\1\x86") * 1000 + b"t", COPIES),
    "keys of one hash": (
        b"}(" + b"".join(b"\x8a\x14" + number + b"N" for number in COLLIDING) + b"u",
        "more than 71 bits",
    ),
    "keys of tuples": (b"}" + DOUBLED + b"Ns", "neither text nor whole numbers"),
    "endless name": (STORAGE + DOUBLED + b"X\3\0\0\0cpuK\1tQ", "more than tensors and plain values"),
    "long text": (b"X\xff\xff\xff\x7fabc", DAMAGED),
    "nothing there": (b"h\7", DAMAGED),
    "no mark": (b"t", DAMAGED),
    "empty": (b"\x85", DAMAGED),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_a_pickle_that_asks_for_memory_is_refused(tmp_path: Path, name: str, form: str) -> None:
    content, said = HOSTILE[name]
    path = tmp_path / "c.pt"
    if form == "zip":
        zipped(path, BEGIN + content + END)
    else:
        begin = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
        path.write_bytes(b"".join(begin) + BEGIN + content + END + pickle.dumps([], 2))
        said = "more than 1,000,000 instructions" if name == "long" else said
    assert said in refusal(path)


def test_places_in_the_memo_may_have_any_number(tmp_path: Path) -> None:
    """They are keys of a dictionary: a large one takes no memory."""
    content = BEGIN + b"X\1\0\0\0ar\xff\xff\xff\xffj\xff\xff\xff\xff\x86" + END
    assert load_without_executing(zipped(tmp_path / "c.pt", content)) == ("a", "a")


def test_values_that_are_shared_are_no_harm(tmp_path: Path) -> None:
    content = b"]" + b"".join(b"q\0](h\0h\0e" for _ in range(100))
    found = load_without_executing(zipped(tmp_path / "c.pt", BEGIN + content + END))
    assert len(found) == 2
    assert found[0] is found[1]


@pytest.mark.parametrize("legacy", [False, True])
def test_what_torch_saves_loads(tmp_path: Path, legacy: bool) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "type": torch.float16,
        "parameter": model.weight, "numbers": (1, 2**62, -0.5, None, True, "é"), "shape": torch.Size((1, 2)),
        "view": torch.arange(10)[2:5], "bf16": torch.ones(3, dtype=torch.bfloat16),
    }  # fmt: skip
    torch.save(saved, tmp_path / "c.pt", _use_new_zipfile_serialization=not legacy)
    found = load_without_executing(tmp_path / "c.pt")
    assert found["numbers"] == saved["numbers"]
    assert found["view"].tolist() == [2, 3, 4]
    assert torch.equal(found["model"]["weight"], model.weight)


def _widened(saved: dict[str, Any]) -> None:
    """Every number of the token embedding is one and the same number in the file."""
    embedding = saved["model"]["transformer.wte.weight"]
    wide = torch.zeros(1, dtype=torch.float16).expand(2**24, embedding.shape[1])
    saved["model"]["transformer.wte.weight"] = saved["model"]["lm_head.weight"] = wide
    saved["model_args"]["vocab_size"] = 2**24


def _repeated_groups(saved: dict[str, Any]) -> None:
    saved["optimizer"]["param_groups"] = [saved["optimizer"]["param_groups"][0]] * 1000


def _layers(saved: dict[str, Any]) -> None:
    saved["model_args"]["n_layer"] = 10**9


def _width(saved: dict[str, Any]) -> None:
    saved["model_args"] |= {"n_embd": 2**16, "n_head": 1, "vocab_size": 2**24}


def _deep(saved: dict[str, Any]) -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep, deep]
    saved["model_args"]["n_layer"] = deep


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_widened, "promises more numbers than it holds"),
        (_repeated_groups, "its parameter groups have sizes"),
        (_layers, "n_layer is 1000000000"),
        (_width, "has the wrong shape"),
        (_deep, "n_layer is [["),
    ],
)
def test_checkpoints_that_promise_too_much(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    saved = torch.load(FIXTURE, weights_only=True)
    change(saved)
    torch.save(saved, tmp_path / "c.pt")
    with pytest.raises(UserError, match=r".") as raised:
        read_nanogpt_checkpoint(tmp_path / "c.pt")
    assert said in str(raised.value)
    assert len(str(raised.value)) < 1000
