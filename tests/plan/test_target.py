"""Which card is planned for, and how much of it there is: this machine's, as its driver would tell."""

from __future__ import annotations

import json

import pytest

from onecard.cli import main
from onecard.config import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import find_card
from onecard.hardware.machine import LocalGpu
from onecard.knobs import load_config
from onecard.plan import machine
from onecard.plan.lines import GIB
from onecard.plan.machine import find_target

KNOWN = LocalGpu(
    0, "GPU-1", "NVIDIA GeForce RTX 4070", find_card("RTX 4070"), total_bytes=int(11.99 * GIB),
    free_bytes=int(10.5 * GIB), compute_capability=(8, 9),
)  # fmt: skip
UNKNOWN = LocalGpu(
    0, "GPU-2", "NVIDIA GeForce RTX 4071", None, total_bytes=10 * GIB, free_bytes=10 * GIB,
    compute_capability=(8, 9),
)  # fmt: skip


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "available_memory", lambda: 32 * GIB)


def with_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: LocalGpu) -> None:
    monkeypatch.setattr(machine, "local_gpus", lambda: list(gpus))


def test_what_a_desktop_has_taken_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, KNOWN)
    target = find_target(load_config(RunConfig, []), None)
    assert target.here and target.card.name == "RTX 4070" and target.host == 32 * GIB
    assert target.allowed == int(10.5 * GIB) and target.taken / GIB == pytest.approx(1.49, abs=0.01)
    less = find_target(load_config(RunConfig, ["--vram_reserve=2"]), None)
    assert less.allowed / GIB == pytest.approx(8.5, abs=0.01)
    capped = find_target(load_config(RunConfig, ["--vram_limit=4"]), None)
    assert capped.allowed == 4 * GIB
    generous = find_target(load_config(RunConfig, ["--vram_limit=40"]), None)
    assert generous.allowed == target.allowed


def test_a_card_that_is_named_is_another_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, KNOWN)
    target = find_target(load_config(RunConfig, []), "RTX 3090")
    assert not target.here and target.host is None and target.taken == 0
    assert 23 < target.capacity / GIB < 24


def test_a_card_without_figures_has_memory_and_no_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpus(monkeypatch, UNKNOWN)
    assert main(["plan", "--max_iters=10", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] and told["gpu"]["capacity_gib"] == 10
    assert told["speed"]["tokens_per_s"] is None and told["time"] is None
    assert main(["plan", "--max_iters=10", "--compare", "--stages"]) == 0
    assert "How fast it would be is not known" in capsys.readouterr().out


def test_no_card_and_a_silent_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)
    with pytest.raises(UserError, match="no card in this machine"):
        find_target(load_config(RunConfig, []), None)
    with_gpus(monkeypatch, LocalGpu(0, None, "Some GPU", None))
    with pytest.raises(UserError, match="does not tell how much memory"):
        find_target(load_config(RunConfig, []), None)
