"""PyTorch's caching allocator on paper: what is allocated, and what it has reserved from the driver for that.

Reserved memory is what a card has to have, and it is more than the tensors: freed blocks are kept, the
smallest one that is large enough is cut for the next tensor, and a tensor no free block can hold takes a new
segment even where several free ones together would do. The rules are those of PyTorch's default settings
(no expandable segments). Played through with a trainer's allocations in their order, they give both figures.

With a limit, segments that are free as a whole go back to the driver where a new one would be too much, and
only what does not fit then has run out: tensors may do with less than is reserved for them where nothing is
short, at the price of asking the driver again and again.

One rule is not PyTorch's but the driver's: of free blocks of one size the one at the lowest address is taken,
and a new segment lies below those before it. This was inferred: of the measured runs one (12 layers, 384
wide, 16×1024, eager) reserved 18.27 GiB, as this order gives, and not the 15.20 GiB of the opposite one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass

MIB = 2**20
GRAIN = 512  # every size is rounded up to a multiple of it
SMALL = MIB  # tensors up to here share segments of their own
SMALL_SEGMENT = 2 * MIB
MEDIUM = 10 * MIB  # larger tensors than these up to here share segments of 20 MiB
MEDIUM_SEGMENT = 20 * MIB
SEGMENT_GRAIN = 2 * MIB
WORTH_SPLITTING = MIB  # a large block's end of no more than this stays with the tensor

Key = tuple[str, tuple[int, ...]]  # what a tensor is for, and the factors of its bytes


@dataclass(eq=False)
class Block:
    """A piece of a segment, in use or free."""

    size: int
    address: int
    small: bool
    key: Key | None = None  # None: free
    before: Block | None = None
    after: Block | None = None


class RanOutError(Exception):
    """What PyTorch's own error says: bytes tried, and what was allocated and reserved at that moment.

    `tried` is the segment, as there: for a tensor of 3 MiB it is one of 20.
    """

    def __init__(self, tried: int, tensor: int, allocated: int, reserved: int, moment: str) -> None:
        super().__init__(f"{tried} bytes at {moment}")
        self.tried, self.tensor, self.allocated, self.reserved = tried, tensor, allocated, reserved
        self.moment = moment


class CachingAllocator:
    """take() and give_back() as tensors come and go; peaks and what was alive at the highest one."""

    def __init__(self, limit: float = math.inf) -> None:
        self.limit = limit  # bytes of all segments together
        self.allocated = self.peak_allocated = 0
        self.reserved = self.peak_reserved = 0
        self.retries = 0  # how often all free segments went back to the driver for the sake of a new one
        self.moment = ""  # set by whoever plays a step through
        self.peak_moment = ""
        self.alive: Counter[Key] = Counter()
        self.alive_at_peak: Counter[Key] = Counter()
        self._lowest_address = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def take(self, what: str, *factors: int) -> Block:
        """A tensor whose bytes are the product of the factors."""
        size = max(GRAIN, -(-math.prod(factors) // GRAIN) * GRAIN)
        block = self._free_block(size) or self._new_segment(size)
        left = block.size - size
        if left >= GRAIN if block.small else left > WORTH_SPLITTING:
            self._split(block, size)
        block.key = (what, factors)
        self.alive[block.key] += 1
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated, self.peak_moment = self.allocated, self.moment
            self.alive_at_peak = self.alive.copy()
        return block

    def give_back(self, *blocks: Block) -> None:
        for block in blocks:
            assert block.key is not None, "given back twice"
            self.allocated -= block.size
            self.alive[block.key] -= 1
            if not self.alive[block.key]:
                del self.alive[block.key]
            block.key = None
            if block.after is not None and block.after.key is None:
                self._unlist(block.after)
                self._join(block, block.after)
            if block.before is not None and block.before.key is None:
                self._unlist(block.before)
                block = block.before
                assert block.after is not None
                self._join(block, block.after)
            self._list(block)

    def _free_block(self, size: int) -> Block | None:
        """The smallest that is large enough."""
        free = self._free[size <= SMALL]
        i = bisect_left(free, size, key=lambda entry: entry[0])
        return free.pop(i)[2] if i < len(free) else None

    def _new_segment(self, size: int) -> Block:
        if size <= SMALL:
            segment = SMALL_SEGMENT
        elif size < MEDIUM:
            segment = MEDIUM_SEGMENT
        else:
            segment = -(-size // SEGMENT_GRAIN) * SEGMENT_GRAIN
        if self.reserved + segment > self.limit:
            self._free_segments()
            if self.reserved + segment > self.limit:
                raise RanOutError(segment, size, self.allocated, self.reserved, self.moment)
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._lowest_address -= segment
        return Block(segment, self._lowest_address, size <= SMALL)

    def _free_segments(self) -> None:
        """Back to the driver: those of which nothing is in use."""
        self.retries += 1
        for small, free in self._free.items():
            whole = [block for _size, _address, block in free if block.before is None and block.after is None]
            self.reserved -= sum(block.size for block in whole)
            self._free[small] = [entry for entry in free if entry[2] not in whole]

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.address + size, block.small)
        block.size = size
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after = rest
        self._list(rest)

    def _join(self, block: Block, after: Block) -> None:
        block.size += after.size
        block.after = after.after
        if block.after is not None:
            block.after.before = block

    def _list(self, block: Block) -> None:
        insort(self._free[block.small], (block.size, block.address, block), key=lambda entry: entry[:2])

    def _unlist(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.address), key=lambda entry: entry[:2])]
