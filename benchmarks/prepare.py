"""How fast and how small `onecard prepare` is: the whole pipeline beside encoders alone, and its peak memory.

    python benchmarks/prepare.py FOLDER-WITH-PARQUET [--rounds 5] [--out RESULT.json]

Speed: parquet in, bins out, against each GPT-2 encoder that is installed, fed from memory with the same
texts on the same cores. Every measurement is a process of its own, so that each begins with cold caches;
they take turns, and medians are compared. Imports and loading the vocabulary are outside the clock for
all; for the encoders alone, reading the text is too.

Memory: peak resident memory of all processes of `prepare` together, sampled and from the kernel's own
account, for inputs of 500 MB and 1 GB of text made of the same documents in other orders.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BATCH_BYTES = 4 * 2**20
# "str": a list of Python strings, what prepare has and all but one encoder take; "bytes": UTF-8, where an
# encoder takes that.
ENCODERS = ("fastokens str", "gigatoken bytes", "gigatoken str", "tokenizers str", "tiktoken str")


# ---------------------------------------------------------------- one measurement, in its own process


def measure_prepare(folder: str) -> dict[str, Any]:
    import pyarrow.parquet  # noqa: F401 - outside the clock, as for the encoders

    from onecard.data.gpt2_bpe import gpt2_tokenizer
    from onecard.data.prepare.command import prepare
    from onecard.data.prepare.options import PrepareOptions

    gpt2_tokenizer().encode_batch([""])  # loads the vocabulary
    files = [str(path) for path in sorted(Path(folder).rglob("*.parquet"))]
    with tempfile.TemporaryDirectory() as out:
        began, cpu = time.perf_counter(), time.process_time()
        facts = prepare(
            files, PrepareOptions(name="benchmark", out_root=out, tokenizer="gpt2"), progress=False
        )
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    tokens = facts.meta["tokens"] - facts.meta["documents"]  # an encoder alone writes no end-of-texts
    return {"seconds": seconds, "cpu": cpu, "tokens": tokens, "bytes": facts.meta["text_bytes"]}


def measure_encoder(kind: str, folder: str) -> dict[str, Any]:
    from onecard.data.gpt2_bpe import gpt2_tokenizer

    package, _, form = kind.partition(" ")
    ours = gpt2_tokenizer()
    vocabulary = ours.tokenizer_json()
    if package == "fastokens":
        import fastokens

        encoder = fastokens.Tokenizer.from_json_str(vocabulary)

        def count(batch: Any) -> int:
            return len(encoder.encode_batch_flat(batch, split_special_tokens=True)[0]) // 4
    elif package == "gigatoken":
        import awkward  # noqa: F401 - gigatoken loads it at its first answer: outside the clock too
        import gigatoken

        plain = json.loads(vocabulary)
        plain["added_tokens"] = []  # so that a literal <|endoftext|> is text
        encoder = gigatoken.Tokenizer.from_json(json.dumps(plain)).backend

        def count(batch: Any) -> int:
            return len(encoder.encode_batch(batch).layout.content.data)
    elif package == "tokenizers":
        import tokenizers

        encoder = tokenizers.Tokenizer.from_str(vocabulary)

        def count(batch: Any) -> int:
            return sum(len(encoding.ids) for encoding in encoder.encode_batch_fast(batch))
    else:
        encoder = ours._encoding  # tiktoken's own object

        def count(batch: Any) -> int:
            return sum(
                len(ids)
                for ids in encoder.encode_ordinary_batch(batch, num_threads=len(os.sched_getaffinity(0)))
            )

    batches, n_bytes = _batches(folder, form)
    began, cpu = time.perf_counter(), time.process_time()
    tokens = sum(count(batch) for batch in batches)
    return {
        "seconds": time.perf_counter() - began,
        "cpu": time.process_time() - cpu,
        "tokens": tokens,
        "bytes": n_bytes,
    }


def _batches(folder: str, form: str) -> tuple[list[Any], int]:
    import pyarrow.parquet as pq

    batches: list[list[Any]] = [[]]
    total = size = 0
    for path in sorted(Path(folder).rglob("*.parquet")):
        for text in pq.read_table(path, columns=["text"]).column(0).to_pylist():
            if not text:
                continue
            raw = text.encode()
            batches[-1].append(raw if form == "bytes" else text)
            total += len(raw)
            size += len(raw)
            if size >= BATCH_BYTES:
                batches.append([])
                size = 0
    return [batch for batch in batches if batch], total


# ---------------------------------------------------------------- taking turns


def in_process(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(folder: str, rounds: int) -> dict[str, Any]:
    kinds = [kind for kind in ENCODERS if _installed(kind.partition(" ")[0])]
    slow = {"tiktoken str", "tokenizers str"}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ["prepare", *kinds]}
    for number in range(rounds):
        for name in runs:
            if name in slow and number:
                continue  # once is enough to see that it is ten times slower
            arguments = ("--measure-prepare",) if name == "prepare" else ("--measure-encoder", name)
            runs[name].append(in_process(folder, *arguments))
            last = runs[name][-1]
            print(
                f"{name:16} {last['tokens'] / last['seconds'] / 1e6:8.2f}M tokens/s",
                file=sys.stderr,
                flush=True,
            )
    rates = {}
    for name, results in runs.items():
        assert len({result["tokens"] for result in results}) == 1
        each = sorted(result["tokens"] / result["seconds"] for result in results)
        rates[name] = {
            "tokens_per_s": round(statistics.median(each)),
            "all": [round(rate) for rate in each],
            "mb_per_s": round(statistics.median(r["bytes"] / r["seconds"] / 1e6 for r in results), 1),
            "cpu_seconds": round(statistics.median(r["cpu"] for r in results), 3),
            "tokens": results[0]["tokens"],
        }
    ours, best = rates["prepare"]["tokens_per_s"], max(rates["prepare"]["all"])
    for name in kinds:
        rates[name]["prepare_reaches"] = round(ours / rates[name]["tokens_per_s"], 3)
        # On a machine with other load the fastest of the rounds is what least of it disturbed.
        rates[name]["prepare_reaches_at_best"] = round(best / max(rates[name]["all"]), 3)
        rates[name]["same_number_of_tokens"] = rates[name]["tokens"] == rates["prepare"]["tokens"]
    return rates


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# ---------------------------------------------------------------- memory


def make_input(folder: str, target: Path, text_bytes: int) -> int:
    """A parquet folder of about that much text: the documents over and over, each time in another order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts: list[str] = []
    for path in sorted(Path(folder).rglob("*.parquet")):
        texts += [text for text in pq.read_table(path, columns=["text"]).column(0).to_pylist() if text]
    target.mkdir(parents=True)
    order, written, number = random.Random(0), 0, 0
    while written < text_bytes:
        order.shuffle(texts)
        rows: list[str] = []
        for text in texts:
            rows.append(f"{number} {text}")
            written += len(text.encode())
            if written >= text_bytes:
                break
        pq.write_table(
            pa.table({"text": rows}), target / f"{number:03}.parquet", compression="zstd", row_group_size=1000
        )
        number += 1
    return written


def peak_memory(folder: Path) -> dict[str, Any]:
    """Of the command and everything it starts."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", "from onecard.cli import main; raise SystemExit(main())"]
        command += ["prepare", str(folder), "--name", "benchmark", "--out-root", out]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        most, samples, stop = {"rss": 0, "high": 0, "processes": 0}, 0, threading.Event()

        def watch() -> None:
            nonlocal samples
            while not stop.wait(0.01):
                family = _family(process.pid)
                most["rss"] = max(most["rss"], sum(_rss(pid) for pid in family))
                most["high"] = max(most["high"], _high_water(process.pid))
                most["processes"] = max(most["processes"], len(family))
                samples += 1

        watcher = threading.Thread(target=watch)
        watcher.start()
        began = time.perf_counter()
        assert process.wait() == 0, "prepare failed"
        stop.set()
        watcher.join()
        return {
            "seconds": round(time.perf_counter() - began, 2),
            "sampled_peak_mb": round(most["rss"] / 1e6),
            "kernel_peak_mb_of_the_process": round(most["high"] / 1e6),
            "processes": most["processes"],
            "samples": samples,
        }


def _family(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return [pid]
    return [pid] + [member for child in text.split() for member in _family(int(child))]


def _high_water(pid: int) -> int:
    """The kernel's own account of the most a process ever held."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


# ---------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--measure-prepare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--measure-encoder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_prepare:
        print(json.dumps(measure_prepare(options.folder)))
        return
    if options.measure_encoder:
        print(json.dumps(measure_encoder(options.measure_encoder, options.folder)))
        return

    result: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": f"python benchmarks/prepare.py FOLDER-WITH-PARQUET --rounds {options.rounds}",
        "cpu": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "python": platform.python_version(),
        "versions": {
            package: importlib.metadata.version(package)
            for package in ("numpy", "pyarrow", "tiktoken", "fastokens", "gigatoken", "tokenizers")
            if _installed(package)
        },
        "speed": compare(options.folder, options.rounds),
    }
    if not options.no_memory:
        result["memory"] = {}
        with tempfile.TemporaryDirectory() as scratch:
            for name, size in (("500 MB", 500_000_000), ("1 GB", 1_000_000_000)):
                folder = Path(scratch) / name.replace(" ", "")
                make_input(options.folder, folder, size)
                result["memory"][name] = peak_memory(folder)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
