"""Text made from a seed, in every kind of file that `prepare` reads."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

_TEXT = """
the of and to in is was that for it with as his on be at by had this not are but from have they
which one you were all her she there would their we him been has when who will no more if out so up
said what its about than into them can only other time new some could these two may first then do
any like my now over such our man me even most made after also did many off before must well back
through years much where your way down should because long each just state those people too mister
good make world still see work life
"""
_WORDS = _TEXT.split()
_ODD = (
    "naïve café",
    "Straße – «quoted»",
    "日本語の文",
    "emoji 🙂 here",
    "tab\tand  two spaces",
    "x = 3.14159;\r\n",
)


def text_of(seed: int, words: int) -> str:
    """Sentences; the same on every machine."""
    chance, found = random.Random(seed), list[str]()
    while len(found) < words:
        sentence = [
            _WORDS[int(len(_WORDS) * chance.random() ** 2)] for _ in range(3 + int(9 * chance.random()))
        ]
        found += [
            sentence[0].capitalize(),
            *sentence[1:-1],
            sentence[-1] + ".\n" * (1 + (chance.random() < 0.2)),
        ]
    return " ".join(found).replace("\n ", "\n")


def documents(seed: int, count: int) -> list[str]:
    """Of different lengths, some empty, some with odd characters."""
    chance, found = random.Random(seed), []
    for number in range(count):
        text = text_of(1000 * seed + number, int(60 * chance.random()))
        odd = _ODD[number % len(_ODD)] if chance.random() < 0.3 else ""
        found.append("" if chance.random() < 0.05 else f"{text}{odd}")
    return found


def write_corpus(folder: Path) -> Path:
    """A file of each kind, with empty documents and bad bytes among them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    (folder / "a.txt").write_bytes(text_of(1, 700).encode() + b"bad \xff byte\n" + _ODD[2].encode())
    (folder / "b.jsonl").write_text(_lines(documents(2, 60)), encoding="utf-8")
    column = [text or None for text in documents(3, 50)]
    pq.write_table(pa.table({"text": column, "n": list(range(50))}), folder / "c.parquet", row_group_size=17)
    (folder / "d.txt.gz").write_bytes(gzip.compress(text_of(4, 400).encode(), mtime=0))
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(_lines(documents(5, 40)).encode(), mtime=0))
    with pa.CompressedOutputStream(pa.OSFile(str(folder / "f.jsonl.zst"), "wb"), "zstd") as stream:
        stream.write(_lines(documents(6, 40)).encode())
    for number in range(8):
        (folder / f"g{number}.txt").write_text(text_of(70 + number, 30), encoding="utf-8")
    return folder


def _lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts))
