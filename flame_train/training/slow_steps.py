"""Watches the time of steps: one that suddenly takes twice its usual time, for 20 steps, and memory that spilled.

Each is said once, with what changed since the steps were as usual. It looks only; no trained bit depends on it.

The driver says clock, temperature, memory, and what holds the clock down. NVML may be missing, or refuse single values
in a container or a virtual machine. What it does not say is not known; nothing here raises.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from flame_train.engine.backend import get_backend

STREAK: Final = 20
"""Slow steps in a row, after which it is said."""

SLOW: Final = 2.0
"""A step is slow from so many times the usual time on."""

_WARM: Final = 5  # first steps of a process: they compile and capture
_USUAL: Final = 100  # steps whose median is the usual time
_READ_S: Final = 10.0  # seconds of steps between two encoder_inputs
_LESS_CLOCK: Final = 0.9
_GIB: Final = 2**30


class SlowSteps:
    """Takes the time of each step.

    Args:
        read: the state of the GPU.
        live: bytes that the run's tensors and captured steps have now. None where the driver cannot put some of them
            into the host's memory.
    """

    def __init__(self, read: Callable[[], Reading], live: Callable[[], int] | None = None) -> None:
        self._read, self._live = read, live
        self._seconds: deque[float] = deque(maxlen=_USUAL)
        self._waits: deque[float] = deque(maxlen=_USUAL)
        self._slow: list[tuple[float, float]] = []  # seconds, and of these the wait for data
        self._usual_reading: Reading | None = None
        self._steps, self._since, self._told, self._told_spill = 0, 0.0, False, False

    def add(self, seconds: float, wait: float) -> list[str]:
        """Takes a step's seconds, and those for which it waited for data. Returns what there is to say."""
        self._steps += 1
        self._since += seconds
        if self._steps <= _WARM:
            return []
        spilled = self._spilled()
        usual = statistics.median(self._seconds) if len(self._seconds) >= STREAK else None
        if usual is None or seconds < SLOW * usual:
            self._usual(seconds, wait)
        else:
            self._slow.append((seconds, wait))
            if len(self._slow) == STREAK and not self._told:
                self._told = True
                spilled.append(self._message(usual))
        return spilled

    def _usual(self, seconds: float, wait: float) -> None:
        """Counts a step as usual: the streak is over. Now and then the GPU is read, for a comparison later."""
        self._slow.clear()
        self._told = False
        self._seconds.append(seconds)
        self._waits.append(wait)
        if self._usual_reading is None or self._since >= _READ_S:
            self._since, self._usual_reading = 0.0, self._read()

    def _message(self, usual: float) -> str:
        now = statistics.median(seconds for seconds, _ in self._slow)
        changes = [*self._data(usual, now), *_changes(self._usual_reading or Reading(), self._read())]
        changed = ", ".join(changes) or "neither clock, temperature, memory nor waits for data, as far as is known"
        return (
            f"the last {STREAK} steps took {now:.3g} s each, {now / usual:.1f} times the usual {usual:.3g} s; what "
            f"changed: {changed}"
        )

    def _data(self, usual: float, now: float) -> list[str]:
        """Returns the wait for data, where it is half of the difference or more."""
        before, after = statistics.median(self._waits), statistics.median(wait for _, wait in self._slow)
        return [f"waits for data {before:.3g} to {after:.3g} s"] if after - before >= (now - usual) / 2 else []

    def _spilled(self) -> list[str]:
        """Says that the run has more than the processes have of the card: the rest is in the host's memory."""
        if self._live is None or self._told_spill or self._steps % STREAK:
            return []
        used, live = self._read().used, self._live()
        if used is None or used >= live:
            return []
        self._told_spill = True
        return [
            f"the driver put at least {(live - used) / _GIB:.1f} GiB of this run into the host's memory, which makes "
            'steps many times slower: set memory.budget = "auto", or turn off "CUDA sysmem fallback" in the driver'
        ]


def _changes(before: Reading, now: Reading) -> list[str]:
    changes = []
    if before.clock and now.clock and now.clock < _LESS_CLOCK * before.clock:
        held = f", held by {' and '.join(now.held_by)}" if now.held_by else ""
        changes.append(f"clock {before.clock} to {now.clock} MHz{held}")
    if before.temperature is not None and now.temperature is not None and now.temperature - before.temperature >= 5:
        changes.append(f"temperature {before.temperature} to {now.temperature} degrees Celsius")
    if before.used is not None and now.used is not None and now.used - before.used >= _GIB // 4:
        changes.append(f"memory of the card in use {before.used / _GIB:.1f} to {now.used / _GIB:.1f} GiB")
    return changes


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
    """Counts the bytes that a run has, where the driver moves some to the host: Windows and WSL. None elsewhere."""
    if sys.platform != "win32" and "microsoft" not in platform.release().lower():
        return None
    return lambda: get_backend(device).memory().live
