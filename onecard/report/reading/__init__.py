"""The one reader of logs: bytes of any log, table or paste in, a Log out."""

from __future__ import annotations

from onecard.report.log import Log
from onecard.report.reading.assemble import log_of
from onecard.report.reading.reader import Reader
from onecard.report.reading.seeing import Seen, seen
from onecard.report.reading.text import BLOCK, Stream, blocks

__all__ = ["Seen", "read", "seen"]

# A file in whose first characters there is no row of a log is none.
MOST_WITHOUT_ROWS = 16_000_000


def read(content: bytes | Stream, block: int = BLOCK) -> Log | None:
    """What there is to know from a log; None where no training line is in it. It is read block by block."""
    reader = Reader()
    length = 0
    for text in blocks(content, block):
        reader.read(text)
        length += len(text)
        if length > MOST_WITHOUT_ROWS and not reader.has_rows:
            break
    reader.finish()
    return log_of(reader)
