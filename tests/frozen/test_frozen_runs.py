"""Runs that an earlier onecard stopped in the middle: how they go on, their text and their exports.

runs/ holds their folders. Losses and weights are held to a tolerance, as every CPU sums in an order of its
own; bit for bit they are compared on the kind of CPU on which they were recorded.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import text_of
from doors import Answer, onecard
from recorder import HERE, RECORDED, RECORDING, frozen, read
from safetensors.torch import load_file
from torch import Tensor

RUNS = HERE / "runs"
VERSION = "torch-" + ".".join(torch.__version__.split(".")[:2])
COMMON = (
    "--dataset=text", "--block_size=32", "--batch_size=4", "--gradient_accumulation_steps=3", "--n_layer=2",
    "--n_head=2", "--max_iters=180", "--eval_interval=172", "--eval_iters=4", "--log_interval=1",
    "--warmup_iters=5", "--lr_decay_iters=180", "--learning_rate=2e-2", "--min_lr=2e-3", "--device=cpu",
    "--dtype=float32", "--no-compile", "--sample_tokens=20", "--out_dir=out",
)  # fmt: skip
STOPPED = 160  # steps done in the folders under runs/
CASES: dict[str, tuple[str, ...]] = {
    "gpt2": ("--n_embd=16", "--dropout=0.1"),
    "low-bit": ("--n_embd=32", "--master_weights=bf16", "--optim_states=int8"),
    "nanochat-2025": ("--arch=nanochat", "--generation=2025", "--n_embd=16", "--matrix_lr=0.5",
                      "--embedding_lr=5"),
    # Of two layers the last would be its own backout, which the norm after it undoes.
    "nanochat-2026": ("--arch=nanochat", "--n_embd=24", "--n_layer=3", "--matrix_lr=0.5", "--embedding_lr=5",
                      "--unembedding_lr=0.3", "--scalar_lr=0.05"),
}  # fmt: skip
# What a model computed: all else is the same on every machine.
COMPUTED = (
    "loss", "grad_norm", "train_loss", "val_loss", "train_bpb", "val_bpb", "best_val_loss", "best_train_loss",
    "first_val_loss", "first_val_bpb", "weights",
)  # fmt: skip
# On another CPU a bf16 weight may be rounded to its neighbour.
TOLERANCE = {"low-bit": 1e-2}
# How long it took, how much memory this machine gave, when it was and by which versions.
OF_THE_MACHINE = frozenset(
    ("step_seconds", "tokens_per_second", "memory_gib", "seconds", "eval_seconds", "mfu", "at", "versions",
     "onecard", "torch")
)  # fmt: skip
_LOSS = re.compile(r"\d+\.\d{3,}")
_PACE = re.compile(r"[\d,.]+ (tokens/s|s\b)|\b[\d.]+(ms|s|m\d+s)\b|[\d,]+ tok/s|eta \S+")


def train(case: str, folder: Path, stop_at: int | None = None) -> Answer:
    def seen(text: str) -> None:
        if text.startswith(f"iter {stop_at}:"):
            signal.raise_signal(signal.SIGINT)

    return onecard("train", *COMMON, *CASES[case], folder=folder, seen=seen, COLUMNS="1000")


def the_run(case: str, folder: Path) -> Path:
    """`folder` with its data and, in out/, the run as it was stopped. It is recorded where it is missing."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(text_of(9, 3000), encoding="utf-8")
    assert onecard("prepare", "text.txt", "--tokenizer=char", folder=folder).code == 0
    if RECORDING and not (RUNS / case).exists():
        assert train(case, folder, STOPPED - 1).code == 130
        shutil.copytree(folder / "out", RUNS / case, ignore=shutil.ignore_patterns(".*"))
        shutil.rmtree(folder / "out")
    shutil.copytree(RUNS / case, folder / "out")
    return folder


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of each case the folder of its run, gone on to the end, and what was said."""

    @cache
    def go_on(case: str) -> tuple[Path, Answer]:
        folder = the_run(case, tmp_path_factory.mktemp("continued") / case)
        return folder, train(case, folder)

    return go_on


def recorded_with(name: str, suffix: str = ".json") -> str:
    """The recording of this torch; where there is none, of the newest, whose figures must do."""
    mine = f"runs/{VERSION}/{name}{suffix}"
    if RECORDING or (RECORDED / mine).exists():
        return mine
    return f"runs/{max((RECORDED / 'runs').glob('torch-*')).name}/{name}{suffix}"


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_goes_on_as_recorded(case: str, continued: Any) -> None:
    folder, answer = continued(case)
    assert answer.code == 0, answer.err
    out = folder / "out"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()[1:]]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()[1:]]
    newest = max((out / "checkpoints").iterdir())
    tensors = load_file(newest / "model.safetensors")
    found = {
        "said": _LOSS.sub("...", _PACE.sub("...", answer.out)).splitlines(),
        "files": sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()),
        "metrics": without_machine([line for line in lines if line["step"] >= STOPPED]),
        "events": without_machine(events),
        "config": json.loads((out / "config.json").read_text()),
        "plan": json.loads((out / "plan.json").read_text()),
        "state": without_machine(json.loads((newest / "state.json").read_text())),
        "weights": {name: described(tensor) for name, tensor in sorted(tensors.items())},
        "optimizer": {name: [str(tensor.dtype), list(tensor.shape)]
                      for name, tensor in sorted(load_file(newest / "optimizer.safetensors").items())},
    }  # fmt: skip
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 180 and losses[-1] < losses[0] - 0.5
    frozen(recorded_with(case), found, loose=COMPUTED, tolerance=TOLERANCE.get(case, 2e-4))


@pytest.mark.parametrize("case", CASES)
def test_bit_for_bit_on_the_cpu_it_was_recorded_on(case: str, continued: Any) -> None:
    name = recorded_with(case, "-bits.json")
    if not RECORDING and read(name)["cpu"] != cpu():
        pytest.skip(f"recorded on {read(name)['cpu']}, this is {cpu()}")
    folder, _ = continued(case)
    newest = max((folder / "out" / "checkpoints").iterdir())
    files = {part: load_file(newest / f"{part}.safetensors") for part in ("model", "optimizer")}
    bits = {part: {key: bits_of(tensor) for key, tensor in sorted(tensors.items())}
            for part, tensors in files.items()}  # fmt: skip
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()[1:]]
    losses = [float(line["loss"]).hex() for line in lines if line["step"] >= STOPPED and "loss" in line]
    frozen(name, {"cpu": cpu(), "losses": losses, **bits})


@pytest.mark.parametrize("case", CASES)
def test_text_of_a_stopped_run_is_as_recorded(case: str, tmp_path: Path) -> None:
    folder = the_run(case, tmp_path)
    words = ("--out_dir=out", "--device=cpu", "--dtype=float32", "--start=The ", "--max_new_tokens=60")
    ways = {
        "greedy": ("--temperature=0", "--num_samples=1"),
        "seeded": ("--num_samples=3", "--seed=7", "--top_k=10"),
        "nucleus": ("--num_samples=2", "--temperature=1", "--top_k=0", "--top_p=0.9"),
    }
    told = []
    for way, more in ways.items():
        answer = onecard("sample", *words, *more, folder=folder, COLUMNS="1000")
        told.append(f"===== {way}: exit code {answer.code}\n{_PACE.sub('...', answer.err)}{answer.out}")
    frozen(f"runs/{case}-text.txt", "".join(told))


EXPORTS = [("gpt2", "folder"), ("gpt2", "ckpt.pt"), ("low-bit", "folder"), ("low-bit", "ckpt.pt"),
           ("nanochat-2025", "folder")]  # fmt: skip


@pytest.mark.parametrize(("case", "target"), EXPORTS)
def test_exports_of_a_stopped_run_are_as_recorded(case: str, target: str, tmp_path: Path) -> None:
    """Every tensor by the hash of its bytes: an export computes nothing."""
    folder = the_run(case, tmp_path)
    answer = onecard("export", "out", target, folder=folder)
    assert answer.code == 0, answer.err
    path = folder / target
    if path.is_file():
        content: Any = tree(torch.load(path, weights_only=True))
    else:
        files = sorted(path.iterdir())
        content = {file.name: json.loads(file.read_text()) for file in files if file.suffix == ".json"}
        content |= {file.name: tree(load_file(file)) for file in files if file.suffix != ".json"}
    frozen(f"runs/{case}-{target}.json", {"said": answer.out, "notes": answer.err, "content": content})


def without_machine(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_machine(item) for key, item in value.items() if key not in OF_THE_MACHINE}
    return [without_machine(item) for item in value] if isinstance(value, list) else value


def described(tensor: Tensor) -> list[Any]:
    values = tensor.double()
    return [str(tensor.dtype), list(tensor.shape), values.mean().item(), values.square().mean().sqrt().item()]


def bits_of(tensor: Tensor) -> str:
    raw = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def tree(value: Any) -> Any:
    """Tensors by their type, shape and bits."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} {bits_of(value)}"
    if isinstance(value, dict):
        return {str(key): tree(item) for key, item in value.items()}
    return [tree(item) for item in value] if isinstance(value, list | tuple) else value


def cpu() -> str:
    """What decides in which order a CPU sums: its kind, what torch uses of it, and the build of torch."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    keys = ("vendor_id", "cpu family", "model")
    found = [match[1] for key in keys if (match := re.search(rf"^{key}\s*:\s*(.*)$", text, re.MULTILINE))]
    return ", ".join([" ".join(found), torch.backends.cpu.get_cpu_capability(), torch.__version__])
