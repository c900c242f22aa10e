"""What the driver says of a GPU while it works: clock, temperature, memory, and what holds the clock down.

NVML may be missing, or refuse single values in a container or a virtual machine. What it does not say is not known;
nothing here raises.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from flame_train.engine.backend import get_backend

_HOLDING: Final = {
    0x4: "the power limit",
    0x8: "a slowdown of the hardware",
    0x20: "the temperature",
    0x40: "the temperature",
    0x80: "the power supply",
}
"""NVML's reasons for a clock below the highest, by their bits."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of a GPU; None for what the driver does not say.

    Attributes:
        clock: of the multiprocessors, MHz.
        temperature: degrees Celsius.
        used: bytes of the card that all processes have.
        held_by: what keeps the clock below the highest.
    """

    clock: int | None = None
    temperature: int | None = None
    used: int | None = None
    held_by: tuple[str, ...] = ()


def reader(device: str) -> Callable[[], Reading]:
    """Reads the GPU of `device` each time it is called; of the CPU, or without NVML, it knows nothing."""
    handle: Any = None
    with contextlib.suppress(Exception):  # no driver, no NVML, no rights: a run does without
        bus_id = get_backend(device).pci_bus_id
        if bus_id:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
    return Reading if handle is None else lambda: _read(pynvml, handle)


def _read(nvml: Any, handle: Any) -> Reading:
    reasons = _asked(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    return Reading(
        _asked(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        _asked(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        _asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
        tuple(dict.fromkeys(name for bit, name in _HOLDING.items() if reasons & bit)),
    )


def _asked(question: Callable[[], Any]) -> int | None:
    with contextlib.suppress(Exception):
        return int(question())
    return None


def spilling(device: str) -> Callable[[], int] | None:
    """The bytes that a run has now, on systems whose driver moves some into the host's memory where the card is full.

    Those are Windows and WSL; None elsewhere.
    """
    if sys.platform != "win32" and "microsoft" not in platform.release().lower():
        return None
    return lambda: get_backend(device).memory().live
