"""benchmarks/peers.py in its tiny mode: every trainer that needs no clone runs, and what it finds is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "peers.py"
# As much of a clone as the script asks for: model.py with its two names, here of the plain trainer.
MODEL = """
import sys
from dataclasses import dataclass
sys.path.insert(0, {benchmarks!r})
import torch
from plain_gpt2 import PlainGPT2

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(PlainGPT2):
    def __init__(self, c):
        super().__init__(c.n_layer, c.n_head, c.n_embd, c.vocab_size, c.block_size)

    def configure_optimizers(self, decay, rate, betas, kind):
        return torch.optim.AdamW(self.parameters(), lr=rate, betas=betas)
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="its jobs are forks")


def script(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.long
def test_the_tiny_mode_measures_keeps_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "model.py").write_text(MODEL.format(benchmarks=str(ROOT / "benchmarks")))
    file = tmp_path / "found.json"
    tiny = ["--device", "cpu", "--tiny", "--nanogpt", str(tmp_path / "clone"), "--out", str(file)]
    tried = [*tiny, "--parts", "nanogpt", "onecard", "--only", "L256 32x512"]
    done = script(*tried)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert not [row for row in rows.values() if "error" in row], rows
    assert {row["job"]["contender"] for row in rows.values()} == {"nanogpt", "onecard"}
    assert any("evaluation" in row["peaks"] for row in rows.values())
    assert all(row["seconds"] > 0 and row["tokens_per_s"] > 0 for row in rows.values())
    assert str(tmp_path) not in file.read_text(), "results name no folder of this machine"

    assert "--resume" in script(*tried).stderr, "an earlier result is not written over"
    again = script(*tried, "--resume")
    assert again.returncode == 0 and "tokens/s" not in again.stdout, "nothing is measured twice"
    assert script("--report", str(file)).returncode == 0


def test_today_s_predictions_are_shown_beside_the_committed_result() -> None:
    result = sorted((ROOT / "benchmarks" / "results").glob("*-peers-h200.json"))[-1]
    done = script("--report", str(result))
    assert done.returncode == 0, done.stderr
    told = {line.split(":")[0]: line for line in done.stdout.splitlines() if "in the middle" in line}
    assert "off 0.0% in the middle" in told["onecard allocated"]
    assert "off 0.0% in the middle" in told["nanogpt allocated"]
