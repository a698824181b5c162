from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import write_bins

from onecard.arch.layout import RECOMPUTE
from onecard.arch.shapes import GPT2Shape
from onecard.model import compiling
from onecard.model.gpt2 import GPT2
from onecard.train.fit import MOST_MICRO_BATCHES
from onecard.train.step import Stepper

ROOT = Path(__file__).resolve().parents[2]
RUN = [
    "--dataset=tiny", "--vocab_size=61", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16",
    "--batch_size=4", "--gradient_accumulation_steps=1", "--max_iters=6", "--eval_interval=6",
    "--eval_iters=1", "--device=cpu", "--sample_tokens=0", "--decay_lr=False",
]  # fmt: skip


def run_training(folder: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    write_bins(folder / "data" / "tiny", train=3_000, val=600)
    plain = {k: v for k, v in os.environ.items() if k not in ("CXX", "CC")}
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *RUN, *more],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**plain, "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), **environment},
    )


def losses(text: str) -> list[float]:
    return [
        float(line.split("loss ")[1].split(",")[0]) for line in text.splitlines() if line.startswith("iter ")
    ]


@pytest.mark.slow
def test_without_a_compiler_the_run_goes_on_eager_and_says_why(tmp_path: Path) -> None:
    done = run_training(tmp_path, PATH="/nonexistent", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "running without torch.compile" in done.stderr
    assert len(losses(done.stderr)) == 6


@pytest.mark.slow
def test_a_compiled_run_gives_the_eager_losses(tmp_path: Path) -> None:
    compiled = run_training(tmp_path, PYTHONPATH=str(ROOT))
    assert compiled.returncode == 0, compiled.stderr
    if "running without torch.compile" in compiled.stderr:
        pytest.skip("this machine has no compiler")
    assert list((tmp_path / "compiled").rglob("*.so")), "nothing was kept for the next run"
    eager = run_training(tmp_path, "--no-compile", "--out_dir=eager", PYTHONPATH=str(ROOT))
    assert losses(compiled.stderr) == pytest.approx(losses(eager.stderr), abs=2e-4)


@pytest.mark.parametrize("recomputes", [(), pytest.param(RECOMPUTE, marks=pytest.mark.long)])
def test_all_that_fitting_may_change_is_foreseen(recomputes: tuple[str, ...]) -> None:
    """Five sizes of micro-batches, each with a smaller last one, in every setting of recompute."""
    torch.compiler.reset()
    before = torch._dynamo.config.recompile_limit
    model = GPT2.initialised(GPT2Shape(1, 1, 8, 20, 4, False), 0)
    Stepper(model, device="cpu", dtype="float32")  # gives it its accumulators
    model.compile_parts(backend="eager")
    try:
        for size in range(1, 2 * MOST_MICRO_BATCHES + 1):
            tokens = torch.zeros(size, 4, dtype=torch.int64)
            model.loss_sum(tokens, tokens)
            for model.recompute in recomputes:
                model.loss_sum(tokens, tokens, scale=torch.ones(()))
    finally:
        torch._dynamo.config.recompile_limit = before
        torch.compiler.reset()


def test_more_shapes_than_foreseen_are_an_error_a_person_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never a silent fall to uncompiled code."""
    monkeypatch.setattr(compiling, "_MOST_SHAPES", 3)
    before = torch._dynamo.config.recompile_limit
    torch.compiler.reset()
    model = GPT2.initialised(GPT2Shape(1, 1, 8, 20, 16, False), 0)
    model.compile_parts(backend="eager")
    counted = compiling.graphs_compiled()
    try:
        with pytest.raises(Exception, match="fullgraph") as raised:
            for length in range(2, 10):
                model.loss_sum(
                    torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, length, dtype=torch.int64)
                )
        assert length == 5
        assert (
            compiling.graphs_compiled() == counted + 3 * 3
        )  # a layer, the norm and the loss, each three times
        error = compiling.too_many_shapes(raised.value)
        assert error is not None
        assert "--no-compile" in error.hint
        assert compiling.too_many_shapes(RuntimeError("something else")) is None
    finally:
        torch._dynamo.config.recompile_limit = before
        torch.compiler.reset()


def test_compiled_code_is_kept_where_a_reboot_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing the compiler names a temporary folder before we can: that is not the user's choice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = str(tmp_path / "onecard" / "compiled")
    own = Path(tempfile.gettempdir()) / "torchinductor_somebody"
    for named, expected in ((None, ours), (str(own), ours), (str(tmp_path / "own"), str(tmp_path / "own"))):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if named is not None:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named)
        compiling.set_compile_cache()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == expected


def test_where_nothing_can_be_kept_torch_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for named in (None, str(Path(tempfile.gettempdir()) / "torchinductor_somebody")):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if named is not None:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named)
        compiling.set_compile_cache()
        assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == named


def test_what_an_interrupted_compilation_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty library is found and fails to load, in every later run: "file too short"."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    left, whole, at_work = (tmp_path / "ab" / name for name in ("left.so", "whole.so", "at_work.so"))
    left.parent.mkdir()
    for path in (left, whole, at_work):
        path.write_bytes(b"\x7fELF" if path is whole else b"")
    os.utime(left, (1e9, 1e9))
    os.utime(whole, (1e9, 1e9))
    compiling.set_compile_cache()
    assert (left.exists(), whole.exists(), at_work.exists()) == (False, True, True)
