"""Where the tokens of one file begin: nanoGPT's bins have no header, llm.c's shards have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from onecard.errors import UserError
from onecard.language import _

SHARD_MAGIC = 20240520
SHARD_VERSION = 1
SHARD_HEADER_BYTES = 256 * 4


def layout(path: Path, head: bytes, n_bytes: int, dtype: np.dtype[Any]) -> tuple[int, int, np.dtype[Any]]:
    """Offset, number and type of the tokens. The magic is no GPT-2 id, so bins cannot be mistaken for it."""
    if n_bytes >= SHARD_HEADER_BYTES and int.from_bytes(head[:4], "little") == SHARD_MAGIC:
        version, count = (int.from_bytes(head[at : at + 4], "little") for at in (4, 8))
        if version != SHARD_VERSION:
            raise UserError(
                _("{path} is a token shard of version {version}; only version 1 is known").format(
                    path=path, version=version
                )
            )
        if SHARD_HEADER_BYTES + 2 * count > n_bytes:
            there = (n_bytes - SHARD_HEADER_BYTES) // 2
            raise UserError(
                _("{path} is cut short").format(path=path),
                _("its header promises {count:,} tokens, {there:,} are there").format(
                    count=count, there=there
                ),
            )
        return SHARD_HEADER_BYTES, count, np.dtype("<u2")
    if n_bytes % dtype.itemsize:
        raise UserError(
            _("{path} is damaged or not a token file").format(path=path),
            _("{n_bytes:,} bytes are not a whole number of {itemsize}-byte tokens ({name})").format(
                n_bytes=n_bytes, itemsize=dtype.itemsize, name=dtype.name
            ),
            _("prepare the data again: onecard prepare PATH --force"),
        )
    return 0, n_bytes // dtype.itemsize, dtype
