"""What `onecard gpus` prints, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from onecard.errors import UserError
from onecard.hardware import show
from onecard.hardware.cards import all_cards, find_card
from onecard.hardware.cpu import LocalCpu
from onecard.hardware.machine import GIB, GpuProcess, LocalGpu

Machine = Callable[..., None]
CPU = LocalCpu("Made-up 9000", 8, 32 * GIB)
GPU = LocalGpu(
    index=0,
    uuid="GPU-1",
    name="NVIDIA GeForce RTX 4070",
    card=find_card("RTX 4070"),
    total_bytes=12 * GIB,
    free_bytes=3 * GIB,
    driver="550.54.14",
    cuda_driver=(12, 4),
    compute_capability=(8, 9),
    processes=[
        GpuProcess(4321, "python train.py", 8 * GIB, mine=True),
        GpuProcess(99, "[bold]Xorg", 300 * 2**20),
        GpuProcess(7, None, None),
    ],
    power_limit_w=200.0,
    display_active=True,
)


@pytest.fixture
def machine_with(monkeypatch: pytest.MonkeyPatch) -> Machine:
    def install(*gpus: LocalGpu, trouble: str = "", cpu: LocalCpu = CPU) -> None:
        monkeypatch.setattr(show, "survey_gpus", lambda: (list(gpus), trouble))
        monkeypatch.setattr(show, "local_cpu", lambda: cpu)

    return install


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_table_shows_every_card_whole_and_without_colour(
    machine_with: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    machine_with()
    assert show.gpus_command(None, everything=True, as_json=False) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    rows = [line.strip() for line in out.splitlines()]
    for card in all_cards():
        assert any(row.startswith(f"{card.name}  ") for row in rows), card.name


def test_a_row_holds_the_figures_and_its_marks(
    machine_with: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_with(GPU)
    show.gpus_command(None, everything=True, as_json=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["RTX", "3070", "8", "448", "40.6", "220", "8.6", "derived"] in rows
    assert [
        ">",
        "RTX",
        "4070",
        "12",
        "504",
        "58.3",
        "200",
        "8.9",
        "derived",
    ] in rows  # the one in this machine
    assert ["T4", "16", "320", "65.0*", "70", "7.5", "datasheet", "+"] in rows
    assert ["RX", "7900", "XTX", "24", "960", "122.8", "355", "-", "unverified", "+"] in rows


def test_the_machine_comes_first_with_who_uses_it(
    machine_with: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_with(GPU)
    show.gpus_command(None, everything=True, as_json=False)
    out = capsys.readouterr().out
    head, _, _ = out.partition("Known card")
    for expected in (
        "GPU 0: NVIDIA GeForce RTX 4070 (known as RTX 4070)",
        "12.00 GiB, 3.00 GiB free",
        "550.54.14 (up to CUDA 12.4)",
        "compute capability 8.9, power limit 200 W, drives a display",
        "used by   python train.py (pid 4321), 8.00 GiB - this process",
        "[bold]Xorg (pid 99), 300 MiB",
        "a process without a readable name (pid 7)",
        "CPU: Made-up 9000, 8 cores, 32.00 GiB memory",
    ):
        assert expected in head


def test_what_the_driver_does_not_report_is_said(
    machine_with: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_with(
        LocalGpu(index=0, uuid=None, name="Odd card", card=None),
        LocalGpu(index=1, uuid=None, name="WSL card", card=None, total_bytes=12 * GIB, free_bytes=4 * GIB),
        LocalGpu(index=2, uuid=None, name="Idle card", card=None, total_bytes=12 * GIB, free_bytes=12 * GIB),
        cpu=LocalCpu("Made-up 9000", 1, None),
    )
    show.gpus_command(None, everything=True, as_json=False)
    out = capsys.readouterr().out
    assert "GPU 0: Odd card (not among the known cards)" in out
    assert "memory    not reported, not reported free" in out
    assert "used by   the driver does not report it" in out
    assert "used by   a process the driver does not name, 8.00 GiB" in out
    assert "used by   no process" in out
    assert "1 core," in out


def test_a_broken_driver_is_shown_instead_of_no_card(
    machine_with: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_with()
    show.gpus_command(None, everything=True, as_json=False)
    assert "no NVIDIA card seen" in capsys.readouterr().out
    machine_with(trouble="the driver's library does not start: version mismatch")
    show.gpus_command(None, everything=True, as_json=False)
    out = capsys.readouterr().out
    assert "version mismatch" in out
    assert "no NVIDIA card seen" not in out


def test_one_card_in_full(machine_with: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine_with(GPU)
    assert show.gpus_command("4070", everything=False, as_json=False) == 0
    out = capsys.readouterr().out
    assert out.startswith("RTX 4070\n")
    for expected in (
        "12 GB",
        "504 GB/s",
        "36 MB",
        "200 W",
        "8.9",
        "2475 MHz",
        "58.3",
        "116.6",
        "29.1",
        "233",
    ):
        assert expected in out
    assert "in this machine as GPU 0, 3.00 GiB of 12.00 GiB free" in out
    show.gpus_command("4070 laptop", everything=False, as_json=False)
    out = capsys.readouterr().out
    assert "boost clock 1695-2175 MHz and 35-115 W by design" in out
    assert "real clocks often run 5-10% higher" in out
    assert "in this machine" not in out


def test_an_unknown_card_is_the_persons_error(machine_with: Machine) -> None:
    machine_with()
    with pytest.raises(UserError, match="RTX 4700"):
        show.gpus_command("RTX 4700", everything=False, as_json=False)


def test_json_of_everything(machine_with: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine_with(GPU)
    assert show.gpus_command(None, everything=True, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"machine", "cards"}
    assert set(answer["machine"]) == {"gpus", "driver_trouble", "cpu"}
    (gpu,) = answer["machine"]["gpus"]
    assert gpu["card"] == "RTX 4070"
    assert gpu["cuda_driver"] == "12.4"
    assert gpu["compute_capability"] == "8.9"
    assert gpu["processes"][0] == {
        "pid": 4321,
        "name": "python train.py",
        "memory_bytes": 8 * GIB,
        "mine": True,
        "draws": False,
    }
    assert answer["machine"]["cpu"] == {"name": "Made-up 9000", "cores": 8, "memory_bytes": 32 * GIB}
    assert [card["name"] for card in answer["cards"]] == [card.name for card in all_cards()]


def test_json_of_one_card(machine_with: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine_with()
    assert show.gpus_command("t4", everything=False, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    (card,) = answer["cards"]
    assert card["name"] == "T4"
    assert card["compute_capability"] == "7.5"
    assert card["bf16"] is None
    assert card["fp16acc"] == 65


def test_the_list_of_all_cards_comes_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    show.gpus_command(None, everything=False, as_json=False)
    out = capsys.readouterr().out
    assert "RTX 4070" not in out and "onecard gpus --all" in out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("es", ("en uso por", "3,00 GiB libres", "58,3", "Tarjeta conocida", "8 núcleos", "cómputo 8.9")),
        ("de", ("benutzt von", "3,00 GiB frei", "58,3", "Bekannte Karte", "8 Kerne", "Capability 8.9")),
    ],
)  # fmt: skip
def test_people_read_it_in_their_language_and_whole(
    name: str, words: tuple[str, ...], machine_with: Machine, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("ONECARD_LANG", name)
    machine_with(GPU)
    show.gpus_command(None, everything=True, as_json=False)
    out = capsys.readouterr().out
    assert all(word in out for word in words)
    assert "…" not in out
    users = [
        line.index(who)
        for line in out.splitlines()
        for who in ("python train.py", "[bold]Xorg")
        if who in line
    ]
    assert len(users) == 2 and users[0] == users[1]
    show.gpus_command("RTX 4070", everything=False, as_json=False)
    figures = [line[:35] for line in capsys.readouterr().out.splitlines() if line.endswith((" GB", " 58,3"))]
    assert len(figures) == 2 and all(figure.endswith("  ") for figure in figures)
