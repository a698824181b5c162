"""What nanochat's own model keeps for backward, counted on a CPU, beside what plan says it keeps.

    python benchmarks/nanochat_saved.py --nanochat CLONE --nanochat_2025 CLONE --out FILE.json

`--nanochat` is a clone as of 2026, `--nanochat_2025` one as of October 2025: each has to hold the package
`nanochat` only. Its gpt.py runs as it is, in a process per generation and precision. Every storage that its
backward would read is counted once, as saved_tensors_hooks show it; weights, buffers and inputs are not.
2025 runs in float32, as it does on a CPU. 2026 runs in float32 and in bfloat16.

One thing is put in its place: RMS norm. On a card it is one kernel that keeps its input and one number a
row, on a CPU several that keep more in bfloat16.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from command_line import command_line  # noqa: E402
from memory_speed import Row, write  # noqa: E402

SHAPES = 20  # of each generation and precision
_RUNS = (("2025", "float32"), ("2026", "float32"), ("2026", "bfloat16"))


def shapes(generation: str, dtype: str) -> list[Row]:
    """Random sizes, the same ones every time; heads of several widths, windows shorter and longer than T."""
    chance = random.Random(f"{generation} {dtype}")
    found = []
    for _ in range(SHAPES):
        heads = chance.randint(1, 4)
        sizes: Row = {
            "n_layer": chance.randint(1, 7), "n_head": heads,
            "n_embd": heads * chance.choice((32, 48, 64, 96, 128)),
            "vocab_size": chance.randint(65, 2600), "block_size": chance.randint(2, 640),
            "batch": chance.randint(1, 3),
        }  # fmt: skip
        if generation == "2026":
            sizes["window_pattern"] = chance.choice(("SSSL", "L", "SL", "SSL"))
        found.append(sizes)
    return found


class Kept:
    """Storages that backward would read, each once."""

    def __init__(self, apart: list[Any]) -> None:
        self._apart = {tensor.untyped_storage().data_ptr() for tensor in apart}
        self._storages: dict[int, Any] = {}  # held, so that an address is not used again

    def keep(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._apart:
            self._storages[storage.data_ptr()] = storage
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


def counted(folder: str, generation: str, dtype: str) -> list[int]:
    """Bytes by nanochat's own code, in a process of its own: it chooses its precision when it is imported."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]  # no kernel is fetched
    sys.path.insert(0, folder)
    import torch.nn.functional as functional

    theirs = importlib.import_module("nanochat.gpt")
    functional.rms_norm = _rms_norm  # type: ignore[assignment]
    found = []
    for sizes in shapes(generation, dtype):
        options = {name: value for name, value in sizes.items() if name not in ("batch", "block_size")}
        shape = theirs.GPTConfig(n_kv_head=sizes["n_head"], sequence_len=sizes["block_size"], **options)
        model = theirs.GPT(shape)
        model.init_weights()
        tokens = torch.randint(0, sizes["vocab_size"], (2, sizes["batch"], sizes["block_size"]))
        inputs = tokens[0].to(torch.int32 if generation == "2025" else torch.int64)
        kept = Kept([*model.parameters(), *model.buffers(), inputs, tokens])
        with saved_tensors_hooks(kept.keep, lambda tensor: tensor):
            loss = model(inputs, tokens[1])
        found.append(kept.bytes)
        del loss
    return found


def _rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """As the kernel for cards: keeps its input and one number a row."""
    import torch

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            wide = x.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps)
            ctx.save_for_backward(x, scale)
            return (wide * scale).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise NotImplementedError("only what is kept is counted")

    assert weight is None and eps is None
    return Kernel.apply(x)  # type: ignore[no-untyped-call]


def predicted(sizes: Row, generation: str, dtype: str) -> int:
    """Bytes by plan."""
    from onecard.arch.shapes import Nanochat2026Shape, NanochatShape
    from onecard.plan.others.nanochat_eager import EagerNanochat

    of_shape = {name: value for name, value in sizes.items() if name != "batch"}
    kind = NanochatShape if generation == "2025" else Nanochat2026Shape
    step = EagerNanochat(kind(**of_shape), sizes["batch"], dtype=dtype)
    step.load()
    step.tape.pads_masks = False
    return step.kept_bytes()


def run(options: argparse.Namespace) -> None:
    import torch

    folders = {"2025": options.nanochat_2025, "2026": options.nanochat}
    rows: list[Row] = []
    for generation, dtype in _RUNS:
        call = [sys.executable, __file__, "--counts", str(folders[generation]), generation, dtype]
        environment = os.environ | {"NANOCHAT_DTYPE": dtype}
        done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        kept = json.loads(done.stdout.splitlines()[-1])
        for sizes, counted_bytes in zip(shapes(generation, dtype), kept, strict=True):
            rows.append({"generation": int(generation), "dtype": dtype} | sizes | {"kept": counted_bytes})
            said = predicted(sizes, generation, dtype)
            difference = "" if said == counted_bytes else f", {said - counted_bytes:+}"
            print(f"{generation} {dtype} {sizes}: {counted_bytes}{difference}")
    results = {
        "what": "bytes that nanochat's own model keeps for backward, by saved_tensors_hooks on a CPU",
        "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "python": platform.python_version(),
        "command": command_line(), "rows": rows,
    }  # fmt: skip
    write(options.out, results)


def main() -> None:
    if sys.argv[1:2] == ["--counts"]:
        print(json.dumps(counted(*sys.argv[2:5])))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nanochat", type=Path, required=True, metavar="CLONE")
    parser.add_argument("--nanochat_2025", type=Path, required=True, metavar="CLONE")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
