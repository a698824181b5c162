"""The walk through power limits: it asks, waits and measures, and sets nothing."""

from __future__ import annotations

import pytest

from onecard.errors import UserError
from onecard.hardware.bench_show import show_sweep, sweep_json
from onecard.hardware.measured import Load
from onecard.hardware.power import PowerSweep, limit_command, parse_limits, sweep
from onecard.hardware.sensors import Sensors

# TFLOPS at a limit of so many watts; the most work for a joule at 140 W.
RATES = {200.0: 56.0, 170.0: 54.0, 140.0: 47.0, 120.0: 38.0}


class StandInNvml:
    """NVML as far as it looks. Anything that sets is not there, and asking for it fails the test."""

    def __init__(self, limit_w: float = 200.0, cards: int = 1) -> None:
        self.limit_w = limit_w
        self.cards = cards
        self.power_known = True
        self.asked: list[str] = []

    def __getattribute__(self, name: str) -> object:
        if name.startswith("nvml"):
            assert "Set" not in name and "Reset" not in name
            object.__getattribute__(self, "asked").append(name)
        return object.__getattribute__(self, name)

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:  # noqa: N802
        if not self.power_known:
            raise RuntimeError("not supported")
        return round(1000 * (self.limit_w - 3))

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:  # noqa: N802
        assert kind == 1
        return 2500

    def nvmlDeviceGetTemperature(self, handle: object, kind: int) -> int:  # noqa: N802
        assert kind == 0
        return 66

    def nvmlDeviceGetPowerManagementLimit(self, handle: object) -> int:  # noqa: N802
        return round(1000 * self.limit_w)

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: object) -> list[int]:  # noqa: N802
        return [100_000, 215_000]

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.cards

    def nvmlDeviceGetIndex(self, handle: object) -> int:  # noqa: N802
        return 1


class User:
    """Reads what is said and does it, some looks later; a clock that only waiting moves."""

    def __init__(self, nvml: StandInNvml, *, obeys: int = 99) -> None:
        self.nvml = nvml
        self.obeys = obeys
        self.said: list[str] = []
        self.now = 0.0
        self._wanted: float | None = None

    def hear(self, text: str) -> None:
        self.said.append(text)
        if "nvidia-smi" in text and self.obeys > 0:
            self.obeys -= 1
            self._wanted = float(text.split()[-1])

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self._wanted is not None and self.now % 3 < seconds:
            # Drivers report what they made of it, not always what was asked for.
            self.nvml.limit_w, self._wanted = self._wanted + 0.05, None

    def clock(self) -> float:
        return self.now

    def measure(self, seconds: float) -> tuple[float, Load]:
        (limit,) = (watts for watts in RATES if abs(watts - self.nvml.limit_w) < 1)
        return RATES[limit], Sensors(self.nvml, "card").read()


def walk(user: User, limits: list[float]) -> PowerSweep:
    return sweep(
        limits,
        Sensors(user.nvml, "card"),
        user.measure,
        say=user.hear,
        sleep=user.sleep,
        clock=user.clock,
        patience=60.0,
    )


def test_the_walk_measures_each_limit_and_finds_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    nvml = StandInNvml()
    user = User(nvml)
    result = walk(user, list(RATES))
    assert [(point.limit_w, point.tflops) for point in result.points] == list(RATES.items())
    assert result.points[1].power_w == pytest.approx(167.05)
    assert result.points[1].clock_mhz == 2500
    assert result.best is not None
    assert result.best.limit_w == 140
    assert result.ended == "done"
    assert [line.split("  ")[-1].strip() for line in user.said if "nvidia-smi" in line] == [
        "sudo nvidia-smi -pl 170",  # 200 W was set already
        "sudo nvidia-smi -pl 140",
        "sudo nvidia-smi -pl 120",
    ]
    assert not any("Set" in name for name in nvml.asked)
    show_sweep(result)
    out = capsys.readouterr().out
    assert ["140", "47", "84%", "137", "0.3429", "2500", "66"] in [line.split() for line in out.splitlines()]
    assert "most work for a joule: at 140 W" in out
    assert out.rstrip().endswith("sudo nvidia-smi -pl 200")
    answer = sweep_json(result)
    assert (answer["best_limit_w"], answer["restore_command"]) == (140, "sudo nvidia-smi -pl 200")
    assert answer["points"][0]["tflops_per_watt"] == pytest.approx(56 / 197)


def test_nothing_is_to_be_put_back_where_the_last_limit_is_the_first() -> None:
    result = walk(User(StandInNvml()), [170.0, 200.0])
    assert len(result.points) == 2
    assert not result.to_restore
    assert sweep_json(result)["restore_command"] is None


def test_a_user_who_does_not_come_back_ends_it_with_what_there_is() -> None:
    user = User(StandInNvml(), obeys=1)
    result = walk(user, list(RATES))
    assert [point.limit_w for point in result.points] == [200, 170]
    assert result.ended == "timed out"
    assert result.to_restore
    assert user.now < 2 * 60 + 5
    assert sum("nvidia-smi" in line for line in user.said) == 2  # asked once for each limit


def test_ctrl_c_while_waiting_or_measuring_keeps_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    user = User(StandInNvml())
    measured = user.measure

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    def measure(seconds: float) -> tuple[float, Load]:
        if user.nvml.limit_w < 180:
            raise KeyboardInterrupt
        return measured(seconds)

    for hook in ({"sleep": sleep}, {"measure": measure}):
        for name, function in hook.items():
            setattr(user, name, function)
        result = walk(user, list(RATES))
        assert (result.ended, len(result.points)) == ("interrupted", 1)
        user = User(StandInNvml())
        measured = user.measure
    show_sweep(result)
    assert "interrupted after 1 limit\n" in capsys.readouterr().out


def test_without_sensors_there_is_a_reason() -> None:
    user = User(StandInNvml())
    with pytest.raises(UserError, match="cannot be compared") as error:
        sweep([200.0], None, user.measure, say=user.hear)
    assert "NVML" in str(error.value)
    assert error.value.exit_code == 1
    user.nvml.power_known = False
    with pytest.raises(UserError, match="cannot be compared"):
        walk(user, [200.0])
    assert user.said == []


def test_a_limit_the_card_does_not_take_is_refused_before_the_walk() -> None:
    user = User(StandInNvml())
    with pytest.raises(UserError, match="90 W") as error:
        walk(user, [200.0, 90.0])
    assert "100 to 215 W" in str(error.value)
    assert user.said == []


def test_the_command_names_the_card_where_there_are_several() -> None:
    assert Sensors(StandInNvml(cards=1), "card").index() is None
    assert Sensors(StandInNvml(cards=2), "card").index() == 1
    assert limit_command(170.0, 1, "linux") == "sudo nvidia-smi -i 1 -pl 170"
    assert limit_command(170.5, None, "win32") == "nvidia-smi -pl 170.5"


@pytest.mark.parametrize("text", ["", ",", "fast", "200,-1", "200;170", "nan", "inf", "0"])
def test_what_is_no_list_of_watts_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a list of power limits") as error:
        parse_limits(text)
    assert error.value.exit_code == 2


def test_a_list_of_watts_keeps_its_order_and_says_each_once() -> None:
    assert parse_limits("200, 140W,170,200.0") == [200.0, 140.0, 170.0]
