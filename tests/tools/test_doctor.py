"""doctor's judgement of machines it is told about, and that it can look at this one."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from flame_train.engine.backend.cuda.autotuner import AutotuneCache, default_folder
from flame_train.tools.doctor import Report, examine, render
from flame_train.tools.probe import Gpu, Machine, detect

H200 = Gpu("NVIDIA H200", 141 << 30, 140 << 30, (9, 0))
PACKAGES = dict.fromkeys(("flame-train", "numpy", "ml-dtypes", "pillow", "tokenizers", "nvidia-cudnn-frontend"), "1.0")
WHOLE = Machine(
    python="3.11.9",
    packages={**PACKAGES, "cupy-cuda13x": "14.2.0"},
    codecs={"PNG": True, "JPEG": True, "WebP": True, "AVIF": True},
    driver="580.1",
    driver_cuda=(13, 0),
    driver_error="",
    gpus=(H200,),
    libraries={"cudart": "13.0", "nvrtc": "13.0", "cublasLt": "13.0.1", "cudnn": "9.19.0"},
    visible=None,
    memory=64 << 30,
    disk=500 << 30,
    choices="/home/someone/.cache/flame-train/choices, 12 files",
)
NOTHING = Machine(
    python="3.11.9",
    packages={name: "1.0" for name in PACKAGES if name != "nvidia-cudnn-frontend"},
    codecs={"PNG": True, "JPEG": True, "WebP": True, "AVIF": True},
    driver=None,
    driver_cuda=None,
    driver_error="NVML Shared Library Not Found",
    gpus=(),
    libraries={},
    visible=None,
    memory=None,
    disk=None,
    choices="/home/someone/.cache/flame-train/choices",
)


def faults(report: Report) -> dict[str, tuple[str, str]]:
    return {line.name: (line.state, line.fix) for line in report.lines if line.state != "ok"}


def changed(**changes: object) -> Report:
    return examine("cuda", dataclasses.replace(WHOLE, **changes))


def test_a_whole_machine_can_train_on_both_devices() -> None:
    for device in ("cuda", "cpu"):
        assert examine(device, WHOLE).usable
        assert faults(examine(device, WHOLE)) == {}


def test_a_machine_with_nothing_can_train_on_the_cpu_only() -> None:
    assert examine("cpu", NOTHING).usable
    report = examine("cuda", NOTHING)
    assert not report.usable
    assert {name for name, _ in faults(report).items()} == {
        "driver",
        "GPU",
        "CuPy",
        "CUDA runtime",
        "NVRTC",
        "cuBLASLt",
        "cuDNN",
        "cuDNN frontend",
    }
    assert "--device cpu works without a GPU" in render(report)


@pytest.mark.parametrize(
    ("changes", "line", "state", "fix"),
    [
        (
            {"packages": {**WHOLE.packages, "cupy-cuda12x": "14.2.0"}},
            "CuPy",
            "bad",
            "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'flame-train[cuda13]'",
        ),
        ({"packages": PACKAGES}, "CuPy", "missing", "pip install 'flame-train[cuda13]'"),
        (
            {"packages": PACKAGES, "driver_cuda": (12, 4)},
            "CuPy",
            "missing",
            "pip install 'flame-train[cuda12]'",
        ),
        (
            {"driver_cuda": (12, 4)},
            "CuPy",
            "bad",
            "pip uninstall -y cupy-cuda13x && pip install 'flame-train[cuda12]'",
        ),
        ({"driver_cuda": (11, 8)}, "driver", "bad", "update NVIDIA's driver to 525 or newer"),
        ({"visible": ""}, "GPU", "bad", "unset CUDA_VISIBLE_DEVICES"),
        ({"visible": "-1"}, "GPU", "bad", "unset CUDA_VISIBLE_DEVICES"),
        ({"gpus": ()}, "GPU", "missing", "train with --device cpu"),
        (
            {"gpus": (dataclasses.replace(H200, capability=(7, 0)),)},
            "GPU 0",
            "bad",
            "use a GPU of compute capability 7.5 or newer (Turing), or --device cpu",
        ),
        (
            {"libraries": {**WHOLE.libraries, "cudnn": "9.10.2"}},
            "cuDNN",
            "bad",
            "pip install --upgrade 'flame-train[cuda13]'",
        ),
        (
            {"libraries": {"cudart": "13.0", "cublasLt": "13.0", "cudnn": "9.19.0"}},
            "NVRTC",
            "missing",
            "pip install 'flame-train[cuda13]'",
        ),
    ],
)
def test_one_fault_is_named_with_the_one_thing_that_mends_it(
    changes: dict[str, object], line: str, state: str, fix: str
) -> None:
    report = changed(**changes)
    assert not report.usable
    assert faults(report)[line] == (state, fix)
    assert examine("cpu", dataclasses.replace(WHOLE, **changes)).usable


def test_little_disk_and_a_missing_codec_are_told_but_stop_nothing() -> None:
    report = changed(disk=1 << 30, codecs={**WHOLE.codecs, "AVIF": False})
    assert report.usable
    assert set(faults(report)) == {"disk, this folder", "image formats"}


def test_the_report_is_also_json() -> None:
    table = json.loads(json.dumps(examine("cuda", NOTHING).as_dict()))
    assert table["usable"] is False
    assert {"name", "state", "found", "fix", "device"} == set(table["lines"][0])


def test_this_machine_can_be_looked_at_even_without_the_driver_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it now raises ImportError
    machine = detect()
    assert machine.driver is None
    assert machine.driver_error
    assert machine.packages["numpy"]
    assert machine.codecs["PNG"]
    assert examine("cpu", machine).usable
    assert not examine("cuda", machine).usable


def test_a_user_without_a_home_is_told_that_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    (line,) = [line for line in examine("cuda", detect()).lines if line.name == "kept choices"]
    assert "set XDG_CACHE_HOME" in line.found


def test_where_choices_are_kept_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> str:
        (line,) = [line for line in examine("cuda", detect()).lines if line.name == "kept choices"]
        return line.found

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert told() == str(tmp_path / "flame-train" / "choices")
    AutotuneCache(default_folder(), "a card").put("which?", b"this")
    assert told() == f"{tmp_path / 'flame-train' / 'choices'}, 1 files"


def test_compiled_kernels_of_another_nvrtc_are_said_not_to_be_used() -> None:
    def told(*versions: str) -> list[str]:
        return [line.found for line in changed(kernels=versions).lines if line.name == "compiled kernels"]

    assert told() == []
    assert told("12.9", "13.0") == ["of NVRTC 12.9, 13.0"]
    assert told("12.9") == ["of NVRTC 12.9; not used, for this is NVRTC 13.0"]
