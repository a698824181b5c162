"""Which texts are held out for validation: documents by a hash of each, or the tail of the only one.

The hash decides alone, so equal documents never end up on both sides, and data that come later move nothing.
The share below the threshold is right for many documents. Of few or uneven ones it is not: 149 files gave 22%
of their tokens where 10% were wanted. So a small dataset is looked over first, and the hash gets a salt with
which the share comes near the wanted one. Salt and threshold are kept in meta.json.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onecard.data.order import finalize_array
from onecard.data.prepare.reading import DIGEST_SPAN, Batch

# More documents are even enough by themselves, and reading them twice would take long: of 23,000 (80 MB) a
# second look cost a tenth of prepare's speed.
_LOOKED_OVER_BYTES = 256 * 2**20
_LOOKED_OVER_DOCUMENTS = 2**12
_SALTS = 256
# Of the wanted share: the first salt that comes so near is taken, else the nearest of all.
_NEAR = 0.1


class Rule(Protocol):
    """Says which split each text of a batch belongs to; may cut texts, so it returns a batch."""

    def assign(self, batch: Batch) -> tuple[Batch, list[bool]]:
        """The batch, and for each text whether it is held out."""


class ByHash:
    """Documents whose salted digest lies below a threshold are held out."""

    def __init__(self, threshold: int, salt: int = 0) -> None:
        self.threshold = threshold
        self.salt = salt

    def assign(self, batch: Batch) -> tuple[Batch, list[bool]]:
        held_out: list[bool] = self.holds_out(np.array(batch.digests, np.uint64)).tolist()
        return batch, held_out

    def holds_out(self, digests_D: NDArray[np.uint64]) -> NDArray[np.bool_]:
        if self.salt:
            digests_D = finalize_array(digests_D | np.uint64(self.salt << 32)) & np.uint64(DIGEST_SPAN - 1)
        return digests_D < self.threshold


class ByTail:
    """There is only one document: what follows `border` characters is held out. Copies of it alike."""

    def __init__(self, border: int, at: int = 0) -> None:
        """`at`: how many characters of the document are behind us."""
        self.border = border
        self._at = at

    def assign(self, batch: Batch) -> tuple[Batch, list[bool]]:
        cut_up = Batch(end=batch.end, n_empty=batch.n_empty, n_bad=batch.n_bad, read=batch.read)
        held_out: list[bool] = []
        for number, text in enumerate(batch.texts):
            cut = min(max(0, self.border - self._at), len(text))
            ends = batch.ends[number]
            self._at = 0 if ends else self._at + len(text)
            # The document goes on in the other split, so only the tail is followed by end-of-text.
            for part, is_tail in ((text[:cut], False), (text[cut:], True)):
                if part or (is_tail and ends):
                    cut_up.add(part.encode(), batch.digests[number], ends and is_tail, batch.after[number])
                    cut_up.empty[-1], cut_up.bad[-1] = batch.empty[number], batch.bad[number]
                    held_out.append(is_tail)
        cut_up.characters = self._at
        return cut_up, held_out


def even_rule(batches: Iterable[Batch], threshold: int) -> ByHash:
    """The rule for documents that are looked over first; without a salt if there are many of them."""
    digests, sizes = array("Q"), array("Q")
    n_bytes = 0
    for batch in batches:
        digests.extend(batch.digests)
        sizes.extend(batch.sizes)
        n_bytes += batch.n_bytes
        if n_bytes > _LOOKED_OVER_BYTES or len(digests) > _LOOKED_OVER_DOCUMENTS:
            return ByHash(threshold)
    digests_D, sizes_D = np.frombuffer(digests, np.uint64), np.frombuffer(sizes, np.uint64)
    wanted = threshold / DIGEST_SPAN * n_bytes
    best, least = ByHash(threshold), float("inf")
    for salt in range(_SALTS):
        rule = ByHash(threshold, salt)
        held_out = int(sizes_D[rule.holds_out(digests_D)].sum())
        off = abs(held_out - wanted)
        if 0 < held_out < n_bytes and off < least:
            best, least = rule, off
            if off <= _NEAR * wanted:
                break
    return best
