"""What `eta` answers to logs of every program, whole and as terminals and shells leave them.

logs/ was written once by the writers of tests/report, and does not change with them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from doors import onecard, with_configs, without_paths
from recorder import HERE, frozen

LOGS = {path.name: path for path in sorted((HERE / "logs").iterdir())}
SIZES = ("--batch-size=16", "--block-size=1024", "--gradient-accumulation-steps=32")
# Each log is asked about as it is, and in these ways.
WAYS: dict[str, tuple[str, ...]] = {
    "as it is": ("--gpu=RTX 4070",),
    "6000 steps": ("--gpu=RTX 4070", "--max-iters=6000"),
    "3.2B tokens by its sizes": ("--gpu=RTX 4090", "--tokens=3.2B", *SIZES),
    "by its config": ("--gpu=4070", "--config=config/train_fineweb.py"),
}
CLOCK = ("finish",)
_DONE = re.compile(r"^(  done +).*?(?=, if)", re.MULTILINE)


@pytest.mark.parametrize("way", WAYS)
def test_eta_answers_programs_as_recorded(way: str, tmp_path: Path) -> None:
    with_configs(tmp_path)
    found: dict[str, Any] = {}
    for name, path in LOGS.items():
        code, out, err = onecard("eta", "-", *WAYS[way], "--json", folder=tmp_path, pasted=path.read_bytes())
        answer = json.loads(out) if out else None
        if answer is not None:
            answer |= {key: "..." for key in CLOCK if answer[key]}
        found[name] = {"exit code": code, "error": err.splitlines(), "answer": answer}
    assert len(found) >= 20
    frozen(f"eta/{way.replace(' ', '-')}.json", found)


def test_eta_answers_people_as_recorded(tmp_path: Path) -> None:
    """But for the clock: when it would be done."""
    blocks = []
    for name, path in LOGS.items():
        words = ("eta", "-", *WAYS["6000 steps"])
        code, out, err = onecard(*words, folder=tmp_path, pasted=path.read_bytes(), COLUMNS="1000")
        shown = without_paths(_DONE.sub(r"\1...", err + out), tmp_path)
        blocks.append(f"===== {name}\nexit code {code}\n{shown}")
    frozen("eta/texts.txt", "\n".join(blocks))
