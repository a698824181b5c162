"""What is written is read by the library whose format it is, and takes one tensor's copy at a time."""

from __future__ import annotations

import json
import struct
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from onecard.files import file_sha256
from onecard.run.tensor_file import write_tensors

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    names = draw(st.lists(st.text(min_size=1, max_size=12), unique=True, max_size=6))
    made = {}
    for number, name in enumerate(n for n in names if n != "__metadata__"):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 50
        made[name] = noise.to(draw(st.sampled_from(DTYPES)))
        if draw(st.booleans()):
            made[name] = made[name].transpose(0, -1) if shape else made[name]
    return made


@given(written=tensors())
def test_the_library_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, written: dict[str, Tensor]
) -> None:
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    facts = write_tensors(path, written)
    found = load_file(path)
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor) or tensor.dtype.is_floating_point
        assert found[name].reshape(-1).view(torch.uint8).tolist() == (
            tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
        ), "to the bit"
    assert facts == {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def test_it_is_laid_out_as_the_library_does_it(tmp_path: Path) -> None:
    written = {"b": torch.ones(3, dtype=torch.int8), "a": torch.ones(5), "c": torch.ones((2, 2)).bfloat16()}
    write_tensors(tmp_path / "ours", written)
    save_file(written, tmp_path / "theirs")
    ours, theirs = ((tmp_path / name).read_bytes() for name in ("ours", "theirs"))
    headers = []
    for data in (ours, theirs):
        (length,) = struct.unpack("<Q", data[:8])
        assert length % 8 == 0
        headers.append((json.loads(data[8 : 8 + length]), data[8 + length :]))
    assert headers[0] == headers[1]


def test_one_copy_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what has to be copied: as from a card, here of what is not contiguous."""
    plain, copies, most = Tensor.contiguous, list[Any](), [0]

    def contiguous(tensor: Tensor) -> Tensor:
        copy = plain(tensor)
        copies.append(weakref.ref(copy))
        most[0] = max(most[0], sum(ref() is not None for ref in copies))
        return copy

    monkeypatch.setattr(Tensor, "contiguous", contiguous)
    write_tensors(tmp_path / "file", {str(n): torch.ones(64, 32).T for n in range(8)})
    assert len(copies) == 8 and most == [1]


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("somebody's")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "file", {"a": torch.ones(2)})
    assert (tmp_path / "file").read_text() == "somebody's"
