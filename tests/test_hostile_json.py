"""Whatever lies in the place of a JSON file that a verb reads: it says so, and memory stays small."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hostile import harmed, sealed_again
from safetensors.torch import load_file

from onecard.cli import main
from onecard.data.prepare import pipeline, writer
from onecard.hardware.measured import AttentionRate, Load, MatmulRate, Measured, save_measured
from onecard.run.stored import list_checkpoints

CASES, AT_EVERY_CHANGE, A_TEST = 200, 20, 20
LONGEST_S, MOST_BYTES = 60, 10**9
RUN = [
    "--dataset=t", "--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4",
    "--gradient_accumulation_steps=2", "--max_iters=8", "--eval_interval=3", "--eval_iters=1", "--device=cpu",
    "--warmup_iters=0", "--no-compile", "--sample_tokens=0", "--out_dir=out", "--log_interval=1",
    "--dropout=0.0", "--lr_decay_iters=8",
]  # fmt: skip
BENCH = Measured(
    card="NVIDIA GeForce RTX 4070", date="2026-03-01T12:00:00+00:00", dtype="bfloat16", ceiling_size=8192,
    ceiling_tflops=56.0, copy_gbps=440.0, reduce_gbps=460.0, h2d_gbps=24.0, d2h_gbps=25.0, launch_us=4.0,
    matmuls=(MatmulRate(1024, 768, 768, 20.0, 21.0, 19.0), MatmulRate(4096, 3072, 768, 30.0, 31.0, 29.0)),
    attention=(AttentionRate(64, 1024, 30.0, 20.0),), load=Load(2500.0, 195.0, 66.0, 200.0), memory_gib=11.99,
)  # fmt: skip


class Verb(NamedTuple):
    words: list[str]
    reads: list[str]  # patterns of the JSON files
    result: Callable[[str], Any]  # what it came to, from what it wrote to stdout or to the disk


def _trained(_: str, folder: str = "out") -> Any:
    newest = list_checkpoints(Path(folder) / "checkpoints")[-1]
    return {name: tensor.tolist() for name, tensor in newest.model_tensors().items()}


def _new(_: str) -> Any:
    return _trained("", "new")


def _exported(_: str) -> Any:
    files = {path.name: path for path in Path("exported").iterdir()}
    tensors = load_file(files["model.safetensors"])
    return json.loads(files["config.json"].read_text()), {n: t.tolist() for n, t in tensors.items()}


def _prepared(_: str) -> Any:
    folder = Path("data") / ("half" if Path("data/half/meta.json").exists() else "t")
    meta = json.loads((folder / "meta.json").read_text())
    return (folder / "train.bin").read_bytes(), meta["tokens"], meta["splits"]


def _answer(said: str) -> Any:
    """Without the time of day, and without which onecard has written the data."""
    found = json.loads(said)
    for part in (found, found.get("time")):
        if isinstance(part, dict):
            part.pop("finish", None)
    found.pop("meta", None)
    return found


STATE, MANIFEST = "out/checkpoints/step-*/state.json", "out/checkpoints/step-*/manifest.json"
SHORT = ["--max_new_tokens=3", "--num_samples=1", "--device=cpu", "--seed=1"]
CARD = ["--gpu", "RTX 4070", "--host-ram", "32", "--json"]
IN_RUN = ["out/config.json", "out/plan.json", "out/events.jsonl", STATE]
META, BYTE = "data/t/meta.json", ["--tokenizer", "byte"]
BENCH_FILE = "cache/onecard/bench/*.json"
VERBS = {
    "train": Verb(
        ["train", "--out_dir=out"],
        [*IN_RUN, "out/metrics.jsonl", MANIFEST, META],
        _trained,
    ),
    "train while more is prepared": Verb(
        ["train", *RUN, "--dataset=growing", "--out_dir=new"],
        ["data/growing/*.json", "data/growing/.*.json"],
        _new,
    ),
    "sample": Verb(["sample", "--out_dir=out", *SHORT], ["out/config.json", STATE, MANIFEST], str),
    "train on hf": Verb(
        ["train", *RUN[4:], "--init_from=./hf", "--dataset=t", "--out_dir=new"],
        ["hf/config.json", META],
        _new,
    ),
    "export": Verb(["export", "out", "exported"], ["out/config.json", STATE, MANIFEST], _exported),
    "plan a run": Verb(["plan", "out", *CARD], ["out/config.json", STATE, META, BENCH_FILE], _answer),
    "plan data": Verb(["plan", "c.py", *CARD], [META, BENCH_FILE], _answer),
    "eta": Verb(
        ["eta", "out", "--json"],
        [*IN_RUN, META],
        _answer,
    ),
    "check": Verb(["prepare", "t", "--check", "--json"], [META], _answer),
    "prepare more": Verb(["prepare", "texts", "more", "--name", "t", *BYTE], [META], _prepared),
    "prepare on": Verb(["prepare", "texts", "--name", "half", *BYTE], ["data/half/.prepare.json"], _prepared),
}  # fmt: skip


@contextlib.contextmanager
def at(place: Path) -> Iterator[None]:
    """Works there, with a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        yield


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a run stopped at step 6 of 8, its export, a prepare stopped half way and a measured card."""
    from onecard.train.journal import Journal

    folder = tmp_path_factory.mktemp("pristine")
    for name, count in (("texts", 4), ("more", 1)):
        (folder / name).mkdir()
        for number in range(count):
            (folder / name / f"{number}.txt").write_text(f"{name} {number}, word after word. " * 60)
    (folder / "c.py").write_text("".join(f"{word[2:].replace('=', ' = ', 1)}\n" for word in _as_file(RUN)))
    plain_step, plain_append = Journal.stepped, writer.DatasetWriter.append

    def stepped(journal: Journal, step: int, *rest: float) -> None:
        plain_step(journal, step, *rest)
        if step == 6:
            raise KeyboardInterrupt

    def append(self: writer.DatasetWriter, *rest: Any) -> None:
        if self.documents() >= 2:
            raise KeyboardInterrupt
        plain_append(self, *rest)

    with at(folder), pytest.MonkeyPatch.context() as patch:
        assert main(["prepare", "texts", "--name", "t", *BYTE]) == 0
        save_measured(BENCH)
        patch.setattr(Journal, "stepped", stepped)
        assert main(["train", *RUN]) == 130
        assert main(["export", "out", "hf"]) == 0
        patch.setattr(writer.DatasetWriter, "append", append)
        patch.setattr(writer, "COMMIT_SECONDS", 0.0)
        patch.setattr(pipeline, "_SMALL_FILES_BYTES", 600)
        assert main(["prepare", "texts", "--name", "half", *BYTE]) == 130
        journal = json.loads((folder / "data/half/.prepare.json").read_text())
        assert journal["meta"]["tokens"] > 0
        shutil.copytree("data/t", "data/growing")
        with Path("data/growing/train.bin").open("ab") as bins:
            bins.write(b"\1\0" * 1000)
        Path("data/growing/.prepare.json").write_text(json.dumps({**journal, "mode": "append"}))
    return folder


def _as_file(words: list[str]) -> list[str]:
    quoted = {"--dataset", "--out_dir", "--device"}
    found = [word.partition("=") for word in words if "=" in word]
    return [f"{name}={value!r}" if name in quoted else f"{name}={value}" for name, _, value in found]


@pytest.fixture(scope="module")
def unharmed(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a verb comes to with all its files as they should be."""
    known: dict[str, Any] = {}

    def result(name: str) -> Any:
        if name not in known:
            place = tmp_path_factory.mktemp("unharmed") / "place"
            shutil.copytree(pristine, place)
            with at(place), contextlib.redirect_stdout(_Kept()) as said:
                assert main(VERBS[name].words) == 0
                known[name] = VERBS[name].result(said.text())
        return known[name]

    return result


class _Kept:
    def __init__(self) -> None:
        self.parts: list[str] = []

    def write(self, text: str) -> int:
        self.parts.append(text)
        return len(text)

    def flush(self) -> None:
        pass

    encoding = "utf-8"

    def isatty(self) -> bool:
        return False

    def text(self) -> str:
        return "".join(self.parts)


def _other(expected: Any, found: Any) -> str:
    """What is not the same, as a message has room for it."""
    if isinstance(expected, dict):
        names = [name for name in expected if expected[name] != found.get(name)]
        return "; ".join(f"{name}: {expected[name]!r:.300}, now {found.get(name)!r:.300}" for name in names)
    return f"{expected!r:.500}, now {found!r:.500}"


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """A FIFO is waited for, and a device read, without end: an alarm ends both."""

    def ring(*unused: object) -> None:
        raise AssertionError(f"nothing came for {LONGEST_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def peak_bytes(*, begin: bool = False) -> int:
    """The most memory since the last `begin`; what there is now where the system does not say."""
    if begin:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured as Linux does")
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.long] if first >= AT_EVERY_CHANGE else [])
        for first in range(0, CASES, A_TEST)
    ],
)
def test_a_hostile_file_is_told_and_costs_little(
    pristine: Path, unharmed: Callable[[str], Any], first: int, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for seed in range(first, first + A_TEST):
        name = list(VERBS)[seed % len(VERBS)]
        expected, verb = unharmed(name), VERBS[name]
        chance, place = random.Random(seed), tmp_path / str(seed)
        shutil.copytree(pristine, place)
        with at(place):
            files = sorted(path for pattern in verb.reads for path in Path().glob(pattern))
            path = chance.choice(files)
            done = harmed(path, chance)
            done += ", sealed again" if (resealed := chance.random() < 0.5 and sealed_again(path)) else ""
            before = peak_bytes(begin=True)
            capsys.readouterr()
            with in_time():
                code = main(verb.words)
            used = peak_bytes() - before
            out, err = capsys.readouterr()
            why = f"seed {seed}: {name} with {path} {done}: {code}\n{out[-2000:]}\n{err[-2000:]}"
            assert code in (0, 1, 2), why
            assert len(out) + len(err) < 10**5, why
            assert used < MOST_BYTES, f"{used:,} bytes, {why}"
            if code == 2 or (code and name not in ("check", "plan a run", "plan data")):
                assert err.startswith("error: ") or "\nerror: " in err, why
            elif not resealed and code == 0:
                found = verb.result(out)
                told = path.name in out + err or "damaged" in out + err
                if name == "train on hf":  # without its mark the folder is as transformers writes them
                    told = told or '"onecard": {' not in path.read_text()
                assert found == expected or told, f"{_other(expected, found)}, {why}"
        shutil.rmtree(place)


def test_the_measure_of_memory_sees_what_is_taken() -> None:
    before = peak_bytes(begin=True)
    taken = bytearray(b"1") * (200 * 10**6)
    assert len(taken) and peak_bytes() - before > 150 * 10**6
    del taken
