"""Who else is on the card, from made-up lists of processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecard.hardware.machine import GIB, GpuProcess, LocalGpu
from onecard.hardware.measured import Load
from onecard.hardware.sensors import Sensors
from onecard.plan.bill import CONTEXT
from onecard.train import other_processes
from onecard.train.other_processes import (
    Look,
    careful_bytes,
    computes,
    look_at,
    process_notes,
    spilling_note,
    spilling_platform,
    without_this_process,
)

MIB = 2**20
ME = GpuProcess(1, "python train.py", 7 * GIB, mine=True)
TRAINER = GpuProcess(4711, "python", int(5.2 * GIB))
XORG = GpuProcess(900, "Xorg", 300 * MIB, draws=True)
FIREFOX = GpuProcess(901, "firefox", 600 * MIB, draws=True)


# --- what is reported ----------------------------------------------------------------------------------


def test_another_trainer_is_named_with_what_it_holds() -> None:
    (reported,) = process_notes(Look(others=(TRAINER,)))
    assert reported.startswith(
        "another program computes on this card: python (pid 4711), it holds 5.20 GiB; "
    )


def test_what_draws_is_one_line_with_the_sum() -> None:
    (reported,) = process_notes(Look(others=(FIREFOX, XORG)))
    assert reported == "a desktop's programs (windows, browser) hold 0.88 GiB of the card"


def test_a_small_desktop_is_not_worth_a_line() -> None:
    assert process_notes(Look(others=(GpuProcess(900, "Xorg", 60 * MIB, draws=True),))) == []


def test_where_the_driver_reports_no_memory_there_is_no_figure() -> None:
    silent = (GpuProcess(7, None, None), GpuProcess(8, "dwm.exe", None, draws=True))
    trainer, desktop = process_notes(Look(others=silent))
    assert "a program without a readable name (pid 7)" in trainer
    assert "does not report" in desktop
    assert "GiB" not in trainer + desktop


def test_a_sum_of_which_a_part_is_not_reported_is_at_least_that() -> None:
    (reported,) = process_notes(Look(others=(FIREFOX, GpuProcess(8, "kwin_x11", None, draws=True))))
    assert "at least 0.59 GiB" in reported


def test_memory_of_programs_that_are_not_listed_is_reported_if_it_is_more_than_the_drivers_own() -> None:
    assert process_notes(Look(unnamed_bytes=500 * MIB)) == []
    (reported,) = process_notes(Look(unnamed_bytes=5 * GIB))
    assert "does not name hold 5.00 GiB" in reported


def test_alone_on_the_card_there_is_nothing_to_tell() -> None:
    assert process_notes(Look(free_bytes=11 * GIB, total_bytes=12 * GIB, unnamed_bytes=0)) == []


@pytest.mark.parametrize(
    ("process", "answer"),
    [
        (TRAINER, True),
        (XORG, False),
        (GpuProcess(1, "explorer.exe", None), False),  # Windows lists its desktop as computing
        (GpuProcess(1, "Chrome.exe", None), False),
        (GpuProcess(1, "blender", None, draws=True), False),
        (GpuProcess(1, "python3 explorer.py", None), True),
        (GpuProcess(1, None, None), True),
    ],
)
def test_who_computes_and_who_draws(process: GpuProcess, answer: bool) -> None:
    assert computes(process) is answer


# --- which of them are we ---------------------------------------------------------------------------


def test_the_own_process_is_no_other_process() -> None:
    nameless = GpuProcess(5, None, 7 * GIB)
    assert without_this_process([ME, TRAINER, nameless], 7 * GIB) == [TRAINER, nameless]


def test_in_a_container_the_nameless_one_of_our_size_is_taken_for_us() -> None:
    """The driver lists pids as the host counts them: a run must not warn of itself."""
    ours, theirs = GpuProcess(88_001, None, 7 * GIB), GpuProcess(88_002, None, 3 * GIB)
    assert without_this_process([ours], 6 * GIB) == []
    assert without_this_process([theirs, ours], 6 * GIB) == [theirs]
    assert without_this_process([GpuProcess(88_001, None, None)], 6 * GIB) == []
    assert without_this_process([TRAINER, XORG], 6 * GIB) == [TRAINER, XORG]


# --- looking at the card ----------------------------------------------------------------------------


def use_card(
    monkeypatch: pytest.MonkeyPatch, *gpus: LocalGpu, free: int = 2 * GIB, sensors: Any = None
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 12 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="bbbb"))
    monkeypatch.setattr(other_processes, "local_gpus", lambda: list(gpus))
    monkeypatch.setattr(other_processes, "find_sensors", lambda uuid: sensors)


def card(uuid: str | None, *processes: GpuProcess, free: int | None = GIB) -> LocalGpu:
    return LocalGpu(0, uuid, "a card", None, 12 * GIB, free, processes=list(processes))


def test_the_card_is_found_by_its_uuid_and_not_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    use_card(monkeypatch, card("GPU-aaaa", XORG), card("GPU-bbbb", ME, TRAINER))
    assert look_at("cuda:0").others == (TRAINER,)


def test_among_several_cards_without_a_match_nobody_is_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    use_card(monkeypatch, card("GPU-aaaa", TRAINER), card(None, TRAINER))
    assert look_at("cuda") == Look(2 * GIB, 12 * GIB)


def test_a_single_card_needs_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    use_card(monkeypatch, card(None, ME, TRAINER))
    assert look_at("cuda").others == (TRAINER,)


def test_the_smaller_of_two_opinions_on_free_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    use_card(monkeypatch, card("GPU-bbbb", ME), free=2 * GIB)
    assert look_at("cuda").free_bytes == GIB
    use_card(monkeypatch, card("GPU-bbbb", ME, free=None), free=2 * GIB)
    assert look_at("cuda").free_bytes == 2 * GIB


def test_memory_that_nobody_on_the_list_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    use_card(monkeypatch, card("GPU-bbbb", ME))
    assert look_at("cuda").unnamed_bytes == 4 * GIB  # of 11 in use, 7 are ours
    use_card(monkeypatch, card("GPU-bbbb"))
    assert look_at("cuda").unnamed_bytes == 5 * GIB - CONTEXT  # what we hold is known from torch
    use_card(monkeypatch, card("GPU-bbbb", ME, GpuProcess(9, "dwm.exe", None)))
    assert look_at("cuda").unnamed_bytes is None


def test_the_sensors_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_new_name(handle: str) -> int:
        raise AttributeError

    nvml = SimpleNamespace(
        nvmlDeviceGetClockInfo=lambda handle, kind: 900,
        nvmlDeviceGetTemperature=lambda handle, kind: 87,
        nvmlDeviceGetCurrentClocksEventReasons=no_new_name,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x01 | 0x20 | 0x40,
    )
    use_card(monkeypatch, card("GPU-bbbb", ME), sensors=Sensors(nvml, "handle"))
    look = look_at("cuda")
    assert (look.load, look.held_back_by) == (Load(clock_mhz=900, temperature_c=87), ("heat",))


def test_a_cpu_has_no_other_processes() -> None:
    assert look_at("cpu") == Look()


# --- drivers that spill -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "kernel", "answer"),
    [
        ("win32", None, "Windows"),
        ("linux", "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@x)", "WSL2"),
        ("linux", "Linux version 4.4.0-19041-Microsoft", "WSL2"),
        ("linux", "Linux version 6.8.0-45-generic (buildd@lcy02)", None),
        ("linux", "", None),
        ("darwin", None, None),
    ],
)
def test_where_the_driver_spills(platform: str, kernel: str | None, answer: str | None) -> None:
    assert spilling_platform(platform, kernel) == answer


@given(total=st.integers(2 * GIB, 200 * GIB), part=st.floats(0, 1))
def test_what_is_kept_free_does_not_count_as_full(total: int, part: float) -> None:
    """Or a card that we fill ourselves would be taken for one that spills."""
    free = int(part * total)
    assert careful_bytes(free, total, spills=False) == 0
    kept = careful_bytes(free, total, spills=True)
    assert 0 <= kept <= free
    if free >= 0.4 * GIB and free >= 0.03 * total:
        assert not Look(kept, total).full


def test_full_is_little_memory_or_a_small_share() -> None:
    assert Look(299 * MIB, 8 * GIB).full
    assert not Look(301 * MIB, 8 * GIB).full
    assert Look(900 * MIB, 80 * GIB).full
    assert not Look().full


def test_the_start_says_how_much_is_kept_and_how_to_change_it() -> None:
    reported = spilling_note("WSL2", careful_bytes(10 * GIB, 24 * GIB, spills=True))
    assert "on WSL2" in reported
    assert "0.72 GiB" in reported
    assert "--vram_reserve" in reported
