"""The pictures in docs/report.md: python tools/report_pictures.py docs (`make picture`; needs Chromium).

The log is made up, in nanoGPT's form: a 124M model under way, with a resume. What is said of it is the real
answer.
"""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HEAD = """\
Overriding config with config/train_edu.py:
out_dir = 'out-edu'
dataset = 'fineweb_edu'
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 40
n_layer = 12
n_head = 12
n_embd = 768
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 700
max_iters = 20000
lr_decay_iters = 20000
eval_interval = 500
eval_iters = 200
weight_decay = 1e-1

tokens per iteration will be: 491,520
defaulting to vocab_size of GPT-2 to 50304 (50257 rounded up for efficiency)
number of parameters: 123.59M
num decayed parameter tensors: 50, with 124,354,560 parameters
num non-decayed parameter tensors: 25, with 19,200 parameters
using fused AdamW: True
"""
_LAST, _RESUMED = 12_500, 7000


def loss_at(step: int) -> float:
    """A usual course: a power law, and what the falling learning rate has brought so far."""
    done = max(0, step - 700) / 19_300
    rate = 0.55 + 0.45 * math.cos(math.pi * done)
    return 2.72 + 8.1 / (1 + step / 95) ** 0.62 + 0.08 * rate * min(1.0, step / 3000)


def log() -> str:
    draw, lines = random.Random(4), [HEAD]
    for step in range(0, _LAST + 1, 10):
        if step == _RESUMED:
            lines.append(HEAD + "Resuming training from out-edu")
        if step % 500 == 0:
            train, val = (loss_at(step) + more + draw.gauss(0, 0.006) for more in (-0.01, 0.015))
            lines.append(f"step {step}: train loss {train:.4f}, val loss {val:.4f}")
        ms = 4950 + draw.gauss(0, 12) + 21_000 * (step % 500 == 0) + 32_000 * (step == 0)
        loss = loss_at(step) + draw.gauss(0, 0.035 if step else 0.005)
        mfu = -100.0 if step < 50 else 27.19 + draw.gauss(0, 0.05)
        lines.append(f"iter {step}: loss {loss:.4f}, time {ms:.2f}ms, mfu {mfu:.2f}%")
    return "\n".join(lines) + "\n"


def main() -> int:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None or len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "train.log").write_text(log(), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "onecard",
            "report",
            "train.log",
            "--gpu=RTX 4090",
            "--html=page.html",
        ]
        subprocess.run(command, cwd=work, check=True)
        for theme, kind in enumerate(("dark", "light")):
            flags = [
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--window-size=1100,1150",
            ]
            flags += [f"--blink-settings=preferredColorScheme={theme}", f"--user-data-dir={work / kind}"]
            picture = folder / f"report-{kind}.png"
            subprocess.run(
                [browser, *flags, f"--screenshot={picture}", (work / "page.html").as_uri()], check=True
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
