"""A card's clock, power and temperature, through NVML. Looks only: nothing here changes a setting."""

from __future__ import annotations

from typing import Any

from onecard.hardware.machine import _ask as ask
from onecard.hardware.measured import Load
from onecard.language import N_

# NVML's bits for why the clock is lower than it could be; those that only mean "nothing to do" are left out.
_HELD_BACK = {
    0x04: N_("its power limit"), 0x08: N_("its own protection"), 0x20: N_("heat"), 0x40: N_("heat"),
    0x80: N_("the power supply"),
}  # fmt: skip


class Sensors:
    """Sensors of one card. What the driver does not report is None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def _card(self, function: str, *arguments: Any) -> Any:
        return ask(self._nvml, function, self._handle, *arguments)

    def read(self) -> Load:
        milliwatts = self._card("nvmlDeviceGetPowerUsage")
        clock = self._card("nvmlDeviceGetClockInfo", 1)  # NVML_CLOCK_SM
        temperature = self._card("nvmlDeviceGetTemperature", 0)  # NVML_TEMPERATURE_GPU
        return Load(
            clock_mhz=float(clock) if clock else None,
            power_w=milliwatts / 1000 if milliwatts else None,
            temperature_c=float(temperature) if temperature is not None else None,
            power_limit_w=self.power_limit_w(),
        )

    def power_limit_w(self) -> float | None:
        """The limit that `nvidia-smi -pl` sets; where that is not reported, the one that is in force."""
        for function in ("nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetEnforcedPowerLimit"):
            if milliwatts := self._card(function):
                return float(milliwatts / 1000)
        return None

    def allowed_limits_w(self) -> tuple[float, float] | None:
        """The lowest and highest limit the card takes."""
        limits = self._card("nvmlDeviceGetPowerManagementLimitConstraints")
        return (limits[0] / 1000, limits[1] / 1000) if limits else None

    def held_back_by(self) -> tuple[str, ...]:
        """What keeps the clock down now; () also where the driver does not report it."""
        newer, older = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
        bits = self._card(newer)
        bits = int((self._card(older) if bits is None else bits) or 0)
        return tuple(dict.fromkeys(words for bit, words in _HELD_BACK.items() if bits & bit))

    def driver(self) -> str | None:
        answer = ask(self._nvml, "nvmlSystemGetDriverVersion")
        return str(answer) if answer else None

    def index(self) -> int | None:
        """The card's number for nvidia-smi; None where there is one card only and nothing to distinguish."""
        if (ask(self._nvml, "nvmlDeviceGetCount") or 1) < 2:
            return None
        answer = self._card("nvmlDeviceGetIndex")
        return int(answer) if answer is not None else None


def find_sensors(uuid: str | None) -> Sensors | None:
    """Sensors of the card that torch computes on. None without NVML, or where it is not clear which one."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # not installed, no driver, or one that does not answer
        return None
    handle = None
    if uuid:
        # torch and NVML may count cards in different orders, but both know this.
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        handle = ask(nvml, "nvmlDeviceGetHandleByUUID", name)
    if handle is None and ask(nvml, "nvmlDeviceGetCount") == 1:
        handle = ask(nvml, "nvmlDeviceGetHandleByIndex", 0)
    return Sensors(nvml, handle) if handle is not None else None
