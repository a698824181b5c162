"""Writing tensors as safetensors, one after the other.

The library's own writer first copies all of them from the card to host memory, which for a large model is
more than a desktop has left, and what the system does then is to end the run. Here it is one at a time. What
is written is the library's format, and read by it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# As the format's readers know them.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
_ALIGNED = 8  # bytes: where the tensors begin


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the file's size and SHA-256, as of what was meant to be written."""
    # Wide numbers first, as the library has them: each then lies at a multiple of its size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = dict[str, Any](), 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    digest, head = hashlib.sha256(), struct.pack("<Q", len(text)) + text
    with path.open("xb") as file:
        digest.update(head)
        file.write(head)
        for _name, tensor in ordered:
            here = memoryview(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            digest.update(here)
            file.write(here)
            del here
    return {"bytes": len(head) + end, "sha256": digest.hexdigest()}
