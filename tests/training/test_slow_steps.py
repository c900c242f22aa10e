"""Steps that suddenly take twice their time, and memory that spilled: told once, with what changed. Readings are made
up, and so are times.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from flame_train.training import slow_steps
from flame_train.training.log import Console
from flame_train.training.slow_steps import STREAK, Reading, SlowSteps, reader, spilling

GIB = 2**30
COOL = Reading(clock=1900, temperature=60, used=11 * GIB)


class Gpu:
    """A GPU whose state a test sets."""

    def __init__(self) -> None:
        self.state = COOL
        self.readings = 0

    def read(self) -> Reading:
        self.readings += 1
        return self.state


def fed(watch: SlowSteps, count: int, seconds: float, wait: float = 0.0) -> list[str]:
    return [line for _ in range(count) for line in watch.add(seconds, wait)]


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (
            Reading(clock=600, temperature=91, used=11 * GIB, held_by=("the temperature",)),
            "clock 1900 to 600 MHz, held by the temperature, temperature 60 to 91 degrees Celsius",
        ),
        (Reading(clock=1900, temperature=61, used=23 * GIB), "memory of the card in use 11.0 to 23.0 GiB"),
        (COOL, "neither clock, temperature, memory nor waits for data, as far as is known"),
        (Reading(), "neither clock, temperature, memory nor waits for data, as far as is known"),
    ],
)
def test_twenty_slow_steps_are_told_once_with_what_changed(gpu: Gpu, state: Reading, told: str) -> None:
    watch = SlowSteps(gpu.read)
    assert fed(watch, 60, 0.5) == []
    gpu.state = state
    assert fed(watch, STREAK - 1, 1.2) == []
    lines = fed(watch, 1, 1.2)
    assert lines == [f"the last 20 steps took 1.2 s each, 2.4 times the usual 0.5 s; what changed: {told}"]
    assert fed(watch, 200, 1.2) == []


def test_waits_for_data_are_told_where_they_are_the_cause(gpu: Gpu) -> None:
    watch = SlowSteps(gpu.read)
    fed(watch, 60, 0.5, wait=0.01)
    assert fed(watch, STREAK, 1.5, wait=1.0)[0].endswith("what changed: waits for data 0.01 to 1 s")
    watch = SlowSteps(gpu.read)
    fed(watch, 60, 0.5, wait=0.01)
    assert "waits for data 0" not in fed(watch, STREAK, 1.5, wait=0.2)[0]


def test_a_few_slow_steps_are_none_and_the_next_streak_is_told_again(gpu: Gpu) -> None:
    watch = SlowSteps(gpu.read)
    fed(watch, 60, 0.5)
    for _ in range(5):
        assert fed(watch, STREAK - 1, 2.0) == []
        assert fed(watch, 1, 0.5) == []
    assert len(fed(watch, 3 * STREAK, 2.0)) == 1
    assert fed(watch, 5, 0.5) == []
    assert len(fed(watch, STREAK, 2.0)) == 1


def test_first_steps_which_compile_are_no_measure(gpu: Gpu) -> None:
    watch = SlowSteps(gpu.read)
    assert fed(watch, 5, 30.0) == []
    assert fed(watch, 200, 0.5) == []
    slow_from_the_start = SlowSteps(gpu.read)
    assert fed(slow_from_the_start, 200, 3.0) == []


def test_the_gpu_is_read_now_and_then(gpu: Gpu) -> None:
    fed(SlowSteps(gpu.read), 1005, 0.1)
    assert 8 <= gpu.readings <= 12


def test_memory_beyond_what_the_card_has_in_use_has_spilled(gpu: Gpu) -> None:
    live = [10 * GIB]
    watch = SlowSteps(gpu.read, lambda: live[0])
    assert fed(watch, 40, 0.5) == []
    live[0] = 14 * GIB
    lines = fed(watch, 40, 0.5)
    assert len(lines) == 1
    assert lines[0].startswith("the driver put at least 3.0 GiB of this run into the host's memory")
    assert fed(SlowSteps(gpu.read), 80, 0.5) == []


@pytest.mark.parametrize(
    ("system", "release", "can"),
    [("linux", "6.8.0", False), ("linux", "5.15.90.1-microsoft-standard-WSL2", True), ("win32", "10", True)],
)
def test_windows_and_wsl_spill(monkeypatch: pytest.MonkeyPatch, system: str, release: str, can: bool) -> None:
    monkeypatch.setattr(slow_steps.sys, "platform", system)
    monkeypatch.setattr(slow_steps.platform, "release", lambda: release)
    found = spilling("cpu")
    assert (found is not None) is can
    assert found is None or found() > 0


def test_without_a_gpu_nothing_is_known() -> None:
    assert reader("cpu")() == Reading()
    assert reader("cuda:77")() == Reading()


class Nvml:
    """NVML that refuses a value, as in a virtual machine."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:  # noqa: N802
        return bus_id

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        return 1410

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:  # noqa: N802
        raise OSError("not supported")

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(used=3 * GIB)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        return 0x4 | 0x20 | 0x40


def test_what_the_driver_does_not_say_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", Nvml())
    monkeypatch.setattr(slow_steps, "get_backend", lambda device: SimpleNamespace(pci_bus_id="0000:01:00.0"))
    assert reader("cuda")() == Reading(1410, None, 3 * GIB, ("the power limit", "the temperature"))


def test_a_run_says_it_as_a_warning(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    record = {"loss": 1.0, "lr": 1e-4, "grad_norm": 1.0, "images_per_s": 1.0, "data_wait_ms": 0.0, "memory": None}
    console = Console(100, 0, silent=True, slow_steps=SlowSteps(gpu.read))
    for step in range(1, 100):
        console.show({"step": step, "epoch": 0.0, **record}, 0.5 if step < 60 else 2.0)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("step 79: the last 20 steps took 2 s each, 4.0 times the usual 0.5 s")
