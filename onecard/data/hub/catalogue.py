"""The datasets `onecard prepare` knows by name: where they lie, which files, in which order, on which terms.

Nothing here touches the network; fetch.py fetches what is described here.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Literal

from onecard.errors import UserError
from onecard.language import _

_DUMP_FORM = re.compile(r"CC-MAIN-\d{4}-\d{2}")
_DUMP_EXAMPLE = "CC-MAIN-2013-20"

Order = Literal["natural", "mixed"]


@dataclass(frozen=True)
class NamedDataset:
    """One entry, with the flags of the command already applied.

    Either parquet files of `repo`, a dataset on the Hugging Face Hub, or one text at `url`.
    """

    name: str
    description: str
    licence: str
    # Where description and licence are stated.
    source: str
    tokenizer: str = "gpt2"
    # ---- parquet on the Hub
    repo: str = ""
    # Inside the repository; "" is its root.
    folder: str = ""
    # Of file names in the folder: validation files of their own are left out, ours are chosen by document.
    pattern: str = "*.parquet"
    order: Order = "natural"
    text_column: str = "text"
    dump: str | None = None
    edu: bool = False
    # Estimates, for sizes and times in advance; nothing is computed from them.
    parquet_bytes_per_token: float = 0.0
    text_bytes_per_parquet_byte: float = 0.0
    all_tokens: float = 0.0  # GPT-2's; 0 where nobody has counted
    # ---- one text
    url: str = ""
    size: int = 0
    sha256: str = ""

    @property
    def is_text(self) -> bool:
        return bool(self.url)

    def train_files(self, paths: list[str]) -> list[str]:
        """Those of the repository's paths that belong to this dataset, in the order they are read."""
        chosen = [
            path
            for path in paths
            if PurePosixPath(path).parent == PurePosixPath(self.folder)
            and fnmatch.fnmatchcase(PurePosixPath(path).name, self.pattern)
        ]
        return sorted(chosen, key=_natural if self.order == "natural" else _mixed)


def _natural(path: str) -> tuple[list[tuple[int, str]], str]:
    """shard_2 before shard_10."""
    parts = re.split(r"(\d+)", path)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts], path


def _mixed(path: str) -> tuple[bytes, str]:
    """Shuffled, but the same for everyone and for ever: it depends on the file's name only."""
    return hashlib.blake2b(PurePosixPath(path).name.encode(), digest_size=8).digest(), path


_FINEWEB = NamedDataset(
    name="fineweb",
    description="English web pages of 2013 to 2025, filtered and deduplicated from Common Crawl",
    licence="ODC-By 1.0",
    source="https://huggingface.co/datasets/HuggingFaceFW/fineweb",
    repo="HuggingFaceFW/fineweb",
    # The sample is stored crawl by crawl, some 20 crawls to a file. In mixed order a prefix of it is
    # a fair mix of the years, and a file is still read from end to end.
    folder="sample/100BT",
    order="mixed",
    parquet_bytes_per_token=2.8,
    text_bytes_per_parquet_byte=1.65,
)

# A classifier's choice out of the same pages; same layout.
_FINEWEB_EDU = replace(
    _FINEWEB,
    description="The pages of FineWeb that a classifier found most educational",
    source="https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu",
    repo="HuggingFaceFW/fineweb-edu",
    edu=True,
    parquet_bytes_per_token=2.9,
)

_SHAKESPEARE = NamedDataset(
    name="shakespeare",
    description="Tiny Shakespeare: 40,000 lines of his plays in one text of 1.1 MB",
    licence="public domain (the text)",
    source="https://github.com/karpathy/char-rnn",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/"
    "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
    size=1_115_394,
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)

_ALL = (
    _FINEWEB,
    NamedDataset(
        name="openwebtext",
        description="Web pages linked from Reddit, an open remake of the text GPT-2 was trained on",
        licence="CC0 1.0 (the collection; the pages keep their own)",
        source="https://huggingface.co/datasets/Skylion007/openwebtext",
        repo="Skylion007/openwebtext",
        folder="plain_text",
        pattern="train-*.parquet",
        parquet_bytes_per_token=2.7,
        all_tokens=9.04e9,  # as nanoGPT's prepare.py counts
        text_bytes_per_parquet_byte=1.64,
    ),
    NamedDataset(
        name="tinystories",
        description="Short stories in the words of a small child, written by GPT-3.5 and GPT-4",
        licence="CDLA-Sharing 1.0",
        source="https://huggingface.co/datasets/roneneldan/TinyStories",
        repo="roneneldan/TinyStories",
        folder="data",
        pattern="train-*.parquet",
        parquet_bytes_per_token=2.1,
        text_bytes_per_parquet_byte=1.9,
    ),
    NamedDataset(
        name="climbmix",
        description="NVIDIA's ClimbMix of 400B tokens, shuffled and in text form as nanochat uses it",
        licence="CC BY-NC 4.0 (of nvidia/Nemotron-ClimbMix)",
        source="https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle",
        repo="karpathy/climbmix-400b-shuffle",
        pattern="shard_*.parquet",
        parquet_bytes_per_token=1.7,
        all_tokens=400e9,
        text_bytes_per_parquet_byte=2.5,
    ),
    _SHAKESPEARE,
    replace(_SHAKESPEARE, name="shakespeare_char", tokenizer="char"),
)

_BY_NAME = {dataset.name: dataset for dataset in _ALL}
NAMES: tuple[str, ...] = tuple(_BY_NAME)


def lookup(name: str, *, dump: str | None = None, edu: bool = False) -> NamedDataset:
    """The entry of that name with the flags applied. KeyError for a name that is not in NAMES.

    Whether the Hub has that dump only its listing can tell; see hub.list_files.
    """
    dataset = _BY_NAME[name]
    if name != _FINEWEB.name:
        given = [flag for flag, is_given in (("--dump", dump is not None), ("--edu", edu)) if is_given]
        if given:
            raise UserError(
                _("{name} has no {given}").format(name=name, given=_(" and no ").join(given)),
                _("only fineweb has"),
                hint=f"onecard prepare {name}, or: onecard prepare fineweb {_flags(dump, edu)}",
            )
        return dataset
    if edu:
        dataset = _FINEWEB_EDU
    if dump is None:
        return dataset
    if not _DUMP_FORM.fullmatch(dump):
        tidied = dump.strip().upper()
        hint = tidied if _DUMP_FORM.fullmatch(tidied) else _DUMP_EXAMPLE
        raise UserError(
            _("--dump {name} is not the name of a crawl").format(name=dump or repr(dump)),
            _("crawls are called after year and week: CC-MAIN-YYYY-WW"),
            f"onecard prepare fineweb {_flags(hint, edu)}",
        )
    # Within one crawl the files are alike: the order of their names will do.
    return replace(dataset, folder=f"data/{dump}", order="natural", dump=dump)


def _flags(dump: str | None, edu: bool) -> str:
    return " ".join(([f"--dump {dump}"] if dump is not None else []) + (["--edu"] if edu else []))
