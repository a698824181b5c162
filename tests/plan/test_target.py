"""Which card is planned for, and how much of it there is: this machine's, as its driver would tell."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onecard.cli import main
from onecard.config.knobs import load_config
from onecard.config.run import RunConfig
from onecard.errors import UserError
from onecard.hardware.cards import find_card
from onecard.hardware.machine import LocalGpu
from onecard.plan import machine
from onecard.plan.lines import GIB
from onecard.plan.machine import HOST_RESERVE, Figures, find_target

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
    assert not target.here and target.host == 30 * GIB and target.host_assumed and target.taken == 0
    assert 23 < target.capacity / GIB < 24


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1e6))
def test_of_the_pcs_memory_some_is_left_to_its_system(gib: float) -> None:
    """What a PC has is not what is available on it, which is what the trainer counts by."""
    target = find_target(load_config(RunConfig, []), "RTX 3090", gib)
    assert target.host is not None and target.host >= 0
    assert target.host + target.host_kept == int(gib * GIB)
    assert target.host_kept == min(HOST_RESERVE, int(gib * GIB))


def test_what_is_available_here_has_no_system_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, KNOWN)
    target = find_target(load_config(RunConfig, []), None)
    assert target.host == 32 * GIB and target.host_kept == 0


OFFLOADED = ["--gpu=RTX 4070", "--n_layer=24", "--n_head=16", "--n_embd=2048", "--max_iters=10",
             "--warmup_iters=1", "--master_weights=fp32", "--optim_states=fp32"]  # fmt: skip


def test_a_pc_cannot_give_all_of_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    needed = told(capsys, *OFFLOADED, "--offload=optimizer", "--host-ram=512")["memory"]["host_gib"]
    words = [*OFFLOADED, "--offload=optimizer"]
    assert main(["plan", *words, f"--host-ram={needed + 1:.3f}", "--json"]) == 1
    capsys.readouterr()
    enough = told(capsys, *words, f"--host-ram={needed + 2.1:.3f}")
    assert enough["host"]["kept_for_system_gib"] == 2
    assert enough["host"]["allowed_gib"] == pytest.approx(needed + 0.1, abs=0.01)
    for more in (1.0, 2.1):
        main(["plan", *words, f"--host-ram={needed + more:.3f}"])
        said = " ".join(capsys.readouterr().out.split())
        assert f"{needed:.1f} of {needed + more:.0f} GiB of RAM, 2 of them for the system" in said


def test_one_rule_for_the_ram_of_a_pc_that_nobody_described(capsys: pytest.CaptureFixture[str]) -> None:
    """32 GiB are assumed and said to be, for this run as for the largest one; flags win."""
    assert main(["plan", *OFFLOADED, "--offload=optimizer"]) == 1
    assert "of 32 GiB of RAM, which are assumed (--host-ram N)" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", *OFFLOADED, "--offload=optimizer", "--host-ram=64"]) == 0
    assert "assumed" not in capsys.readouterr().out
    assert main(["plan", "--gpu=RTX 4070", "--max_iters=10"]) == 0
    assert "assumed" not in capsys.readouterr().out, "nothing is offloaded"
    for question in ("--compare", "--largest"):
        assert main(["plan", "--gpu=RTX 4070", "--max_iters=10", question]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "32 GiB of RAM are assumed, 2 of them for the system; --host-ram N says otherwise" in said
    assert main(["plan", "--gpu=RTX 4070", "--largest", "--host-ram=16"]) == 0
    assert "14 GiB of RAM, besides 2 that are left to the system" in capsys.readouterr().out


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
    with pytest.raises(UserError, match="does not report how much memory"):
        find_target(load_config(RunConfig, []), None)


@pytest.mark.parametrize("cards", [[], [UNKNOWN]])
def test_a_run_on_the_cpu_is_not_planned_for_a_card_unless_one_is_named(
    cards: list[LocalGpu], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpus(monkeypatch, *cards)
    assert main(["plan", "--device=cpu", "--max_iters=10"]) == 2
    told = capsys.readouterr().err
    assert "runs on a CPU cannot be planned" in told and "--gpu NAME" in told
    assert main(["plan", "--device=cpu", "--max_iters=10", "--gpu=RTX 4070"]) == 0


# --- figures of one's own -----------------------------------------------------------------------

OWN = ["--gpu", "My card", "--tflops", "30", "--bandwidth=500", "--vram_limit=12", "--max_iters=1000"]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_card_that_is_not_listed_by_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, *OWN)
    assert found["gpu"]["name"] == "My card" and found["gpu"]["capacity_gib"] == pytest.approx(12, abs=0.01)
    assert 0 < found["speed"]["mfu"] < 1 and found["speed"]["calibrated"] is False
    assert found["energy"] == {"kwh": None, "card_kwh": None}
    assert found["cost"] == {"amount": None, "currency": "EUR"}
    assert all(row["kwh"] is None and row["amount"] is None for row in found["alternatives"])
    assert all(row["days"] > 0 for row in found["alternatives"] if row["fits"])
    faster = told(capsys, *OWN, "--tflops=60", "--bandwidth=1000")
    assert faster["speed"]["tokens_per_s"] > 1.8 * found["speed"]["tokens_per_s"]


def test_power_is_asked_for_where_it_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *OWN, "--compare"]) == 0
    assert "--watts" in capsys.readouterr().out
    found = told(capsys, *OWN, "--watts=150")
    hours = found["time"]["seconds"] / 3600
    assert found["energy"]["card_kwh"] == pytest.approx(0.93 * 0.150 * hours, rel=1e-3)
    assert found["cost"]["amount"] > 0
    assert main(["plan", *OWN, "--watts=150"]) == 0
    said = capsys.readouterr()
    assert "--watts" not in said.out and "energy and money alone" in said.err


def test_the_name_may_say_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu=My card 16GB", "--tflops=30", "--bandwidth=500", "--max_iters=1000"]
    assert 15.7 < told(capsys, *words)["gpu"]["capacity_gib"] < 16
    limited = told(capsys, *words, "--vram_limit=12")["gpu"]
    assert limited["allowed_gib"] == 12 and limited["capacity_gib"] > 15.7


def test_figures_of_a_known_card_replace_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    table = told(capsys, "--gpu=4070", "--max_iters=1000")
    same = told(capsys, "--gpu=4070", "--max_iters=1000", "--tflops=58.3", "--bandwidth=504", "--watts=200")
    assert same["speed"]["tokens_per_s"] == table["speed"]["tokens_per_s"]
    assert (table["speed"]["calibrated"], same["speed"]["calibrated"]) == (True, False)
    assert same["energy"] == table["energy"]
    # A T4 has no bf16, and no figure gives it one.
    assert Figures(tflops=70.0).of(find_card("T4")).peak_tflops("bfloat16") is None
    assert Figures(tflops=70.0).of(find_card("T4")).peak_tflops("float16") == 70
    assert Figures(tflops=70.0).of(find_card("RTX 2070")).peak_tflops("float16") == 70


def test_an_unknown_card_without_figures_is_told_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu=My card"]) == 2
    error = capsys.readouterr().err
    assert "no known card is called 'My card'" in error and "--tflops" in error and "onecard gpus" in error
    assert main(["plan", "--gpu=My card", "--tflops=30"]) == 2
    assert "missing: --bandwidth, --vram_limit" in capsys.readouterr().err
    assert main(["plan", "--gpu=A100"]) == 2  # two cards: figures would not say which
    assert "--tflops" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tflops", "bandwidth", "watts"])
@pytest.mark.parametrize("value", ["0", "-3", "nan", "inf", "many", "", "1e99"])
def test_wrong_figures_are_refused(capsys: pytest.CaptureFixture[str], name: str, value: str) -> None:
    assert main(["plan", *OWN, f"--{name}={value}"]) == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert answer.err.startswith((f"error: --{name} takes a number, not", f"error: --{name} cannot be "))
    assert "onecard plan --help" in answer.err
