"""Out-of-memory messages: PyTorch's of every age, the driver's, cuBLAS's, Triton's, the system's.

A message may have been wrapped, cut, translated or pasted with its ranks' prefixes. Its amounts are
printed with two decimals, so each is a range of bytes. Searching is linear: anchors are found first, and
patterns are tried on the few thousand characters behind one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

UNITS = {
    "bytes": 1,
    "byte": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}
# On WSL and old Windows drivers the process's memory is not known: PyTorch prints 2^64 bytes.
ABSURD = 2**50
_WINDOW = 3000


@dataclass(frozen=True)
class Amount:
    """A printed number of bytes: what it may be, by the decimals it was printed with."""

    low: int
    high: int

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2

    @property
    def is_exact(self) -> bool:
        return self.low == self.high


@dataclass(frozen=True)
class OutOfMemory:
    """One message. `kind` is torch, driver, cublas, cudnn, triton, nccl, host, shm or disk."""

    kind: str
    at: int  # its place in the text
    words: str  # the message, on one line
    device: int | None = None
    rank: int | None = None
    tried: Amount | None = None
    capacity: Amount | None = None
    free: Amount | None = None
    in_use: Amount | None = None  # by this process, CUDA's own included
    others: tuple[tuple[int | None, Amount], ...] = ()  # (pid, bytes) of other processes
    allowed: Amount | None = None  # set_per_process_memory_fraction
    allocated: Amount | None = None
    reserved: Amount | None = None  # in total
    unallocated: Amount | None = None  # reserved by PyTorch but unallocated
    in_graphs: Amount | None = None  # in private pools
    cut: bool = False  # the message ends before its amounts do

    @property
    def spare(self) -> Amount | None:
        """Reserved and not allocated."""
        if self.unallocated is not None:
            return self.unallocated
        if self.reserved is None or self.allocated is None:
            return None
        return Amount(
            max(0, self.reserved.low - self.allocated.high), max(0, self.reserved.high - self.allocated.low)
        )


def amount(number: str, unit: str) -> Amount:
    """`1.54`, `GiB`: what PyTorch may have rounded to that. Decimal commas are a translation's."""
    if "," in number and "." not in number and len(number.rpartition(",")[2]) != 3:
        number = number.replace(",", ".")
    number = number.replace(",", "")
    factor = UNITS[unit.lower()]
    decimals = len(number.partition(".")[2])
    if factor == 1:
        return Amount(int(float(number)), int(float(number)))
    half = 0.5 * 10**-decimals
    value = float(number)
    if value == int(value) and factor == 2**20:
        return Amount(int(value) * factor, int(value) * factor)  # segments are whole MiB
    return Amount(int((value - half) * factor), int((value + half) * factor))


_NUMBER = r"(\d{1,20}(?:[.,]\d{1,3})*)\s{0,3}(bytes?|[KMGT]i?B|B)\b"
_AMOUNT = re.compile(_NUMBER, re.IGNORECASE)

# Where a message may begin: plain words in small letters, each found in one pass over the text.
_ANCHORS = (
    "out of memory",
    "outofmemoryerror",
    "cuda_error_out_of_memory",
    "cudaerrormemoryallocation",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudnn_status_internal_error_host_allocation_failed",
    "out of resource",
    "outofresources",
    "tried to allocate",
    "sin memoria",
    "falta de memoria",
    "memoria insuficiente",
    "memoria agotada",
    "agotó la memoria",
    "speicher",
    "can't allocate memory",
    "cannot allocate memory",
    "defaultcpuallocator",
    "memoryerror",
    "oom-kill",
    "killed",
    "no space left on device",
    "unable to open shared memory",
    "unable to write to",
    "unable to allocate shared memory",
    "bus error",
)
# Of words that mean other things too: what must stand there, from some characters before on.
_MEANT = {
    "speicher": re.compile(
        r".{0,40}(?:(?:kein|nicht gen(?:ug|(?:ü|ue)gend)|zu wenig|unzureichender|aus dem) [^\n]{0,12}speicher"
        r"|speichermangel)",
        re.DOTALL,
    ),
    "killed": re.compile(r"(?:.{0,39}\n)?killed\b|.{0,26}out of memory: killed", re.DOTALL),
    "memoryerror": re.compile(r".{0,40}memoryerror\b", re.DOTALL),
    "unable to write to": re.compile(r".{0,40}unable to write to (?:shared memory|file <)", re.DOTALL),
}
_BEFORE = 40
_MOST_MESSAGES = 60  # more only repeat each other
_PREFIX = re.compile(
    r"^[ \t>|*`]*(?:\[?(?:default|rank)?\s?\d{1,4}\]?:\s?|\(\w{1,20} pid=\d{1,9}[^)\n]{0,40}\)\s?)",
    re.MULTILINE,
)
_RANK = re.compile(r"\[?rank\s?(\d{1,4})\]?:|\(RayWorker\w{0,20} pid|\[default(\d{1,4})\]:")

# What an amount is, by the words around it: (field, words before it, words after it). The first that fits.
_OLD = (
    ("capacity", "", r"\s*total capacity"),
    ("allocated", "", r"\s*already allocated"),
    ("free", "", r"\s*free"),
    ("reserved", "", r"\s*(?:reserved|cached)"),
)
_SAID = (
    (
        "tried",
        r"(?:allocate|asignar|reservar|zuzuweisen|allokieren|anzufordern|Versucht\w*"
        r"|Intent\w+)\W{0,4}(?:\w{1,12}\s){0,2}$",
        "",
    ),
    (
        "in_graphs",
        "",
        r"\s*(?:allocated|asignados?|zugewiesen)?\s*(?:are )?(?:in|en) (?:private|privad"
        r"|privaten)",
    ),
    (
        "capacity",
        r"(?:capaci?ty|capacidad|Kapazit\w+|Gesamt\w*)(?:\s\w{1,12}){0,2}\W{0,3}$",
        r"\s*(?:total"
        r"|capacidad total"
        r"|de capacidad)",
    ),
    (
        "unallocated",
        "",
        r"\s*(?:is |are |sind |ist |están? )?(?:reserved|reservad\w*"
        r"|reserviert)[^.;,]{0,30}(?:unallocated|not allocated|sin asignar|no asignad"
        r"|nicht zugewiesen|nicht belegt|aber nicht)",
    ),
    (
        "allocated",
        r"(?:allocated memory|memoria asignada|zugewiesenen? Speichers?)\W{0,4}$",
        r"\s*(?:is |are |está\w* "
        r"|sind |ist "
        r"|ya )?(?:already "
        r"|bereits )?(?:allocated"
        r"|asignad\w*"
        r"|zugewiesen|belegt)",
    ),
    ("free", "", r"\s*(?:is|are|está\w*|sind|ist|son)?\s*(?:free|libres?|frei)"),
    ("allowed", "", r"\s*(?:allowed|permitid\w*|erlaubt)"),
    ("reserved", "", r"\s*(?:reserved|reservad\w*|reserviert|cached)"),
    (
        "in_use",
        "",
        r"\s*(?:of |de )?(?:memory|GPU memory|memoria|Speicher)?\s*(?:is )?(?:in use|en uso"
        r"|used|in Benutzung|in Verwendung|belegt)",
    ),
)
_RULES = {
    rules: [
        (
            name,
            re.compile(before, re.IGNORECASE) if before else None,
            re.compile(after, re.IGNORECASE) if after else None,
        )
        for name, before, after in rules
    ]
    for rules in (_OLD, _SAID)
}
_PROCESS = re.compile(r"\b(?:Process|Proceso|Prozess) (\d{1,9})\D{0,40}$", re.IGNORECASE)
_DEVICE = re.compile(r"\bGPU (\d{1,3})\b")
_WARNING = re.compile(r"\s*(?:\[rank\d{1,4}\]:\s?)?(?:[WEI]\d{4} |WARNING)|.{0,200}select_algorithm")
# Where the next message or another part of the paste begins.
_ENDS = re.compile(
    r"CUDA out of memory|HIP out of memory|Traceback \(most recent|During handling of|OutOfMemoryError:"
    r"|#memory-management"
    r"|See documentation for"
)


def find(text: str) -> list[OutOfMemory]:
    """Every message in the text, in its order; several of one place are taken together."""
    found: list[OutOfMemory] = []
    end = -1
    for begin, stop in _places(text):
        if begin < end:
            continue
        message = _read(text, begin, stop)
        if message is None:
            continue
        if found and found[-1].kind == message.kind == "torch" and message.tried is None:
            continue  # the same error named again, as by a launcher
        found.append(message)
        end = message.at + 1 if message.tried is None else stop + 60
        if len(found) >= _MOST_MESSAGES:
            break
    return found


def _places(text: str) -> list[tuple[int, int]]:
    """Where an anchor stands: (begin, end), in their order; of one that comes often the first ones."""
    low = text.lower()
    if len(low) != len(text):  # a letter that is two in small: places would not be the same
        low = text
    places = []
    for word in _ANCHORS:
        at = low.find(word)
        tries = 0
        while at >= 0 and tries < 4 * _MOST_MESSAGES:
            meant = _MEANT.get(word)
            around = low[max(0, at - _BEFORE) : at + len(word) + _BEFORE]
            if meant is None or meant.match(around):
                places.append((at, at + len(word)))
            at = low.find(word, at + 1)
            tries += 1
    return sorted(places)


def first(text: str) -> OutOfMemory | None:
    """The error that came first and says most: of several ranks, the one that did not follow from others."""
    found = find(text)
    return next((m for m in found if m.tried is not None), found[0] if found else None)


def _read(text: str, at: int, stop: int) -> OutOfMemory | None:
    kind = _kind(text[at:stop].lower(), text[max(0, at - 120) : stop + 160].lower())
    if kind is None:
        return None
    begin = text.rfind("\n", 0, at) + 1
    if kind == "triton" and _WARNING.match(text[begin:at]):
        return None  # of a kernel that was only tried: the compiler takes another
    window = text[at : at + _WINDOW]
    rank = _RANK.search(text[begin:at])
    words = " ".join(_PREFIX.sub("", window).split())
    if ends := _ENDS.search(words, stop - at + 1):
        words = words[: ends.start()]
    message = OutOfMemory(kind, at, words[:900], rank=int(rank[1] or rank[2] or 0) if rank else None)
    if device := _DEVICE.search(words):
        message = replace(message, device=int(device[1]))
    return _with_amounts(message, words)


def _kind(anchor: str, around: str) -> str | None:
    """None for words that only mention memory."""
    if "out of resource" in anchor or "outofresources" in anchor:
        return "triton" if "shared memory" in around or "triton" in around or "required" in around else None
    if "cublas" in anchor or "cudnn" in anchor:
        return "cublas" if "cublas" in anchor else "cudnn"
    if "space left" in anchor:
        return "shm" if "torch_" in around or "/dev/shm" in around else "disk"
    if anchor.startswith("unable to"):
        return "shm"
    if anchor == "bus error":
        return "shm" if "shared memory" in around or "shm" in around or "dataloader" in around else None
    if "defaultcpuallocator" in anchor or "can't allocate" in anchor or "cannot allocate" in anchor:
        return "host"
    if anchor in ("memoryerror", "oom-kill", "out of memory: kill", "killed"):
        return "host" if "outofmemoryerror" not in around else "torch"
    if "nccl" in around:
        return "nccl"
    if anchor in ("cuda_error_out_of_memory", "cudaerrormemoryallocation"):
        return "driver"
    if "cuda error: out of memory" in around or "cuda runtime error (2)" in around:
        return "driver" if "tried to allocate" not in around else "torch"
    return "torch"


def _with_amounts(message: OutOfMemory, words: str) -> OutOfMemory:
    old = re.search(r"total capacity;|already allocated;|capacidad total;|; [^;]{3,40};", words) is not None
    rules = [*(_RULES[_OLD] if old else []), *_RULES[_SAID]]
    said: dict[str, Amount] = {}
    others: list[tuple[int | None, Amount]] = []
    unnamed: list[Amount] = []
    for found in _AMOUNT.finditer(words):
        value = amount(found[1], found[2])
        before, after = (
            words[max(0, found.start() - 60) : found.start()],
            words[found.end() : found.end() + 70],
        )
        if process := _PROCESS.search(before):
            if value.low < ABSURD:
                others.append((int(process[1]), value))
            continue
        name = next(
            (
                name
                for name, b, a in rules
                if name not in said and ((b and b.search(before)) or (a and a.match(after)))
            ),
            None,
        )
        if name is None:
            # PyTorch counts in GiB and MiB; "the 12 GB card is out of memory" is a person's sentence.
            unnamed += [value] if "i" in found[2].lower() or message.kind == "host" else []
        elif value.low < ABSURD or name == "tried":
            said[name] = value
    if "tried" not in said and unnamed and message.kind in ("torch", "host"):
        said["tried"] = unnamed[0]  # the first amount of any such message, in any language
    wanted = 4 if old else 5
    cut = message.kind == "torch" and "tried" in said and len(said) < wanted - 1
    return replace(message, **said, others=tuple(others), cut=cut)  # type: ignore[arg-type]
