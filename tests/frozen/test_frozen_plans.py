"""What `plan` answers to eight configs, and the bills and times of the accuracy grid on five cards."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doors import ROOT, onecard, with_configs, without_paths
from recorder import frozen

WHERE = ("--gpu", "RTX 4070", "--host-ram", "32")
XL = ("--n_layer=48", "--n_head=25", "--n_embd=1600", "--vocab_size=50304", "--batch_size=4",
      "--gradient_accumulation_steps=128", "--max_iters=20000")  # fmt: skip
SHAKESPEARE = ("config/train_shakespeare_char.py", "--vocab_size=65")
# The configs that are shipped, GPT-2 XL by flags, and one of each way to leave the usual path.
CASES: dict[str, tuple[str, ...]] = {
    "gpt2-124m": ("config/train_gpt2.py", *WHERE),
    "fineweb-41m": ("config/train_fineweb.py", *WHERE),
    "fineweb-124m": ("config/train_fineweb_124m.py", *WHERE),
    "demo": ("config/demo.py", *WHERE, "--vocab_size=256"),
    "d12": ("config/train_d12.py", *WHERE, "--compare"),  # --json tells of all ways and stages, asked or not
    "d20": ("config/train_d20.py", *WHERE, "--stages"),
    "d32": ("config/train_d32_12gb.py", *WHERE, "--formulas"),
    "shakespeare": (*SHAKESPEARE, *WHERE),
    "xl": (*XL, *WHERE),
    "d20-of-2025": ("config/train_d20.py", *WHERE, "--generation=2025", "--tokens=3B"),
    "muon": ("config/train_fineweb_124m.py", *WHERE, "--optimizer=muon", "--optim_states=bf16"),
    "eager": ("config/train_fineweb_124m.py", *WHERE, "--no-compile", "--dropout=0.1", "--bias=True"),
    "graphs": ("config/train_fineweb_124m.py", *WHERE, "--cuda_graphs=True", "--batch_size=5"),
    "as-it-is": ("config/train_d20.py", *WHERE, "--offload=none", "--auto_fit=False"),
    "fp16-card": ("config/train_fineweb.py", "--gpu", "RTX 2080 Ti", "--host-ram", "16"),
    "figures": ("config/train_fineweb.py", "--gpu", "Odd Card 12GB", "--tflops", "30", "--bandwidth", "400",
                "--watts", "150", "--price", "0.5", "--currency", "USD", "--idle-watts", "40"),
    "limit": ("config/train_fineweb_124m.py", *WHERE, "--vram_limit=3", "--vram_reserve=0.5"),
    "no-host": ("config/train_d12.py", "--gpu", "RTX 3060 12GB"),
    "largest-gpt2": ("config/train_fineweb_124m.py", *WHERE, "--largest"),
    "largest-nanochat": ("config/train_d12.py", "--gpu", "RTX 3060 12GB", "--by", "12h"),
    "nanogpt-124m": ("config/train_fineweb_124m.py", *WHERE, "--as", "nanogpt"),
    "nanogpt-shakespeare": (*SHAKESPEARE, *WHERE, "--as", "nanogpt"),
}  # fmt: skip
# By the clock: when a run would be done.
CLOCK = ("finish",)
TEXTS: dict[str, tuple[str, ...]] = {
    "plain": ("config/train_fineweb.py", *WHERE),
    "formulas": ("config/train_d20.py", *WHERE, "--formulas"),
    "compare": ("config/train_d12.py", *WHERE, "--compare"),
    "stages": ("config/train_gpt2.py", *WHERE, "--stages"),
    "largest": ("config/train_fineweb.py", *WHERE, "--largest"),
    "nanogpt": ("config/train_fineweb_124m.py", *WHERE, "--as", "nanogpt"),
    "does-not-fit": ("config/train_d32_12gb.py", *WHERE, "--vram_limit=6", "--offload=none"),
    "demo": ("config/demo.py", *WHERE),
}
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}( \d{2}:\d{2})?")
CARDS = ("RTX 4070", "RTX 4090", "RTX 3060 12GB", "A100 80GB SXM", "H200 SXM")
GRID = ROOT / "benchmarks" / "results" / "plan_accuracy_nvidia-h200.json"


def without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: "..." if key in CLOCK and item else without_clock(item) for key, item in value.items()}
    return [without_clock(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", CASES)
def test_plan_answers_programs_as_recorded(case: str, tmp_path: Path) -> None:
    code, out, err = onecard("plan", *CASES[case], "--json", folder=with_configs(tmp_path))
    answer = without_clock(json.loads(out)) if out else None
    frozen(f"plan/{case}.json", {"exit code": code, "notes": err.splitlines(), "answer": answer})


@pytest.mark.parametrize("language", ["en", "de", "es"])
def test_plan_answers_people_as_recorded(language: str, tmp_path: Path) -> None:
    with_configs(tmp_path)
    blocks = []
    for case, words in TEXTS.items():
        code, out, err = onecard("plan", *words, folder=tmp_path, ONECARD_LANG=language)
        # Padded: a date more or less wide would fold its line elsewhere.
        text = _DATE.sub(lambda date: "9999-99-99 99:99"[: len(date[0])], f"{err}{out}")
        blocks.append(f"===== {case}: {' '.join(words)}\nexit code {code}\n{without_paths(text, tmp_path)}")
    frozen(f"plan/texts-{language}.txt", "\n".join(blocks))


@pytest.fixture(scope="module")
def grid() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import accuracy_grid

    yield accuracy_grid
    sys.path[:] = before


def test_bills_and_times_of_the_grid_are_the_recorded_ones(grid: Any) -> None:
    """Bytes of every line of each bill on each of five cards, and the seconds of a step by their parts."""
    from onecard.hardware.cards import find_card
    from onecard.plan.rates import rates_of

    cards = {name: find_card(name) for name in CARDS}
    rows = {}
    for row in json.loads(GRID.read_text())["rows"]:
        case = grid.case_of(row["config"])
        assert case.name == row["name"]
        rows[case.name] = {
            card: _priced(case, facts.compute_capability, rates_of(facts, case.dtype))
            for card, facts in cards.items()
        }
    assert len(rows) == 106
    frozen("grid.json.gz", rows)


def _priced(case: Any, capability: Any, rates: Any) -> dict[str, Any]:
    bill, step = case.bill(capability), case.step_time(rates)
    return {
        "lines": [[line.name, line.bytes] for line in bill.all_lines()],
        "host": [[line.name, line.bytes] for line in bill.resident.host],
        "worst": bill.worst.name,
        "moments": [[moment.name, moment.bytes] for moment in bill.moments],
        "bytes": {name: getattr(bill, name) for name in
                  ("allocated", "steady", "reserved", "need", "process", "host")},
        "seconds": {**vars(step), "all": step.seconds},
    }  # fmt: skip


def test_every_known_card_is_as_recorded(tmp_path: Path) -> None:
    code, out, err = onecard("gpus", "--json", folder=tmp_path)
    answer = json.loads(out)
    assert (code, err, set(answer)) == (0, "", {"machine", "cards"})
    frozen("cards.json", answer["cards"])  # `machine` is this one
