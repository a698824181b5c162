"""The one reader of logs: bytes of any log, table or paste in, a Log out."""

from __future__ import annotations

from typing import BinaryIO

from onecard.report.log import Log
from onecard.report.reading.assemble import log_of
from onecard.report.reading.reader import Reader
from onecard.report.reading.text import BLOCK, blocks


def read(content: bytes | BinaryIO, block: int = BLOCK) -> Log | None:
    """What there is to know from a log; None where no training line is in it. It is read block by block."""
    reader = Reader()
    for text in blocks(content, block):
        reader.read(text)
    reader.finish()
    return log_of(reader)
