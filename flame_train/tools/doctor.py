"""`flame-train doctor`: what this machine has, what is missing, and the command that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from flame_train.disk.preflight import size
from flame_train.engine.backend.capability import OLDEST, OLDEST_WITH_BF16
from flame_train.tools.probe import CUPY_DISTRIBUTIONS, Machine, detect

_OLDEST_CUDNN = (9, 18)
_LOW_DISK = 10 << 30

State = Literal["ok", "missing", "bad", "low"]


@dataclass(frozen=True, slots=True)
class Line:
    """One check. `fix` is the command (or act) that puts it right, empty where nothing is wrong.

    `device` is the device that cannot be used while the line is not ok: cpu, cuda, or none.
    """

    name: str
    state: State
    found: str
    fix: str = ""
    device: Literal["cpu", "cuda", "none"] = "none"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of all checks. `usable` says whether the wanted device can train."""

    device: str
    lines: tuple[Line, ...]

    @property
    def usable(self) -> bool:
        """The GPU needs all that the CPU needs, and its own."""
        needed = ("cpu",) if self.device == "cpu" else ("cpu", "cuda")
        return all(line.state == "ok" for line in self.lines if line.device in needed)

    def as_dict(self) -> dict[str, Any]:
        """Gives the report for `--json`."""
        return {"device": self.device, "usable": self.usable, "lines": [asdict(line) for line in self.lines]}


def examine(device: str, machine: Machine | None = None) -> Report:
    """Judges `machine` (default: this one) for training on `device`, cuda or cpu."""
    machine = machine or detect()
    return Report(device, (*_base(machine), *_gpu(machine), *_room(machine)))


def render(report: Report) -> str:
    """Returns the report for a reader, a line for each check, each fault followed by its remedy."""
    rows = []
    for line in report.lines:
        rows.append(f"{line.state:<8}{line.name:<20}{line.found}")
        if line.fix:
            rows.append(f"{'':<8}{'':<20}fix: {line.fix}")
    verdict = "can train here" if report.usable else "cannot train here"
    hint = "" if report.usable or report.device == "cpu" else "; --device cpu works without a GPU"
    return "\n".join([f"{report.device}: {verdict}{hint}", "", *rows])


def _base(machine: Machine) -> Iterator[Line]:
    yield Line("python", "ok", machine.python)
    for name in ("flame-train", "numpy", "ml-dtypes", "pillow", "tokenizers"):
        version = machine.packages.get(name)
        fix = "" if version else "pip install --force-reinstall flame-train"
        yield Line(name, "ok" if version else "missing", version or "not installed", fix, "cpu")
    readable = [name for name, there in machine.codecs.items() if there]
    lacking = [name for name, there in machine.codecs.items() if not there]
    fix = "pip install --force-reinstall --only-binary :all: pillow" if lacking else ""
    text = f"reads {', '.join(readable)}" + (f", not {', '.join(lacking)}" if lacking else "")
    yield Line("image formats", "missing" if lacking else "ok", text, fix)


def _gpu(machine: Machine) -> Iterator[Line]:
    extra = _extra(machine)
    yield _driver(machine)
    yield from _cards(machine)
    yield _cupy(machine, extra)
    for name, label in (("cudart", "CUDA runtime"), ("nvrtc", "NVRTC"), ("cublasLt", "cuBLASLt")):
        version = machine.libraries.get(name)
        fix = "" if version else _install(extra)
        yield Line(label, "ok" if version else "missing", version or "not found", fix, "cuda")
    yield _cudnn(machine, extra)
    frontend = machine.packages.get("nvidia-cudnn-frontend")
    yield Line(
        "cuDNN frontend",
        "ok" if frontend else "missing",
        frontend or "not installed",
        "" if frontend else _install(extra),
        "cuda",
    )
    yield Line("kept choices", "ok", machine.choices)
    if machine.kernels:
        nvrtc = machine.libraries.get("nvrtc")
        unused = "" if nvrtc in machine.kernels else f"; not used, for this is NVRTC {nvrtc}"
        yield Line("compiled kernels", "ok", f"of NVRTC {', '.join(machine.kernels)}{unused}")


def _extra(machine: Machine) -> str:
    """Returns the extra whose CUDA the driver can run; the newest where there is no driver to ask."""
    return "cuda12" if machine.driver_cuda is not None and machine.driver_cuda < (13, 0) else "cuda13"


def _install(extra: str) -> str:
    return f"pip install 'flame-train[{extra}]'"


def _driver(machine: Machine) -> Line:
    if machine.driver is None or machine.driver_cuda is None:
        fix = "install NVIDIA's driver (https://www.nvidia.com/drivers), or train with --device cpu"
        return Line("driver", "missing", machine.driver_error, fix, "cuda")
    major, minor = machine.driver_cuda
    text = f"{machine.driver}, runs CUDA up to {major}.{minor}"
    if machine.driver_cuda < (12, 0):
        return Line("driver", "bad", text, "update NVIDIA's driver to 525 or newer", "cuda")
    return Line("driver", "ok", text, "", "cuda")


def _cards(machine: Machine) -> Iterator[Line]:
    if machine.visible is not None and machine.visible.strip() in ("", "-1"):
        text = f'CUDA_VISIBLE_DEVICES="{machine.visible}" hides every GPU'
        yield Line("GPU", "bad", text, "unset CUDA_VISIBLE_DEVICES", "cuda")
        return
    if not machine.gpus:
        yield Line("GPU", "missing", "none found", "train with --device cpu", "cuda")
    for index, gpu in enumerate(machine.gpus):
        major, minor = gpu.capability
        text = f"{gpu.name}, {size(gpu.free)} free of {size(gpu.memory)}, compute capability {major}.{minor}"
        old = gpu.capability < OLDEST
        if not old and gpu.capability < OLDEST_WITH_BF16:
            text += '; no bf16: set train.precision = "fp16"'
        fix = "use a GPU of compute capability 7.5 or newer (Turing), or --device cpu" if old else ""
        yield Line(f"GPU {index}", "bad" if old else "ok", text, fix, "cuda")


def _cupy(machine: Machine, extra: str) -> Line:
    installed = [name for name in CUPY_DISTRIBUTIONS if name in machine.packages]
    text = ", ".join(f"{name} {machine.packages[name]}" for name in installed) or "not installed"
    remove = f"pip uninstall -y {' '.join(installed)} && {_install(extra)}"
    if not installed:
        return Line("CuPy", "missing", text, _install(extra), "cuda")
    if len(installed) > 1:
        return Line("CuPy", "bad", f"{text}: they overwrite each other's files", remove, "cuda")
    if installed == ["cupy-cuda13x"] and extra == "cuda12":
        return Line("CuPy", "bad", f"{text}: the driver cannot run CUDA 13", remove, "cuda")
    return Line("CuPy", "ok", text, "", "cuda")


def _cudnn(machine: Machine, extra: str) -> Line:
    version = machine.libraries.get("cudnn")
    if version is None:
        return Line("cuDNN", "missing", "not found", _install(extra), "cuda")
    if tuple(int(part) for part in version.split("."))[:2] < _OLDEST_CUDNN:
        oldest = ".".join(map(str, _OLDEST_CUDNN))
        fix = f"pip install --upgrade 'flame-train[{extra}]'"
        return Line("cuDNN", "bad", f"{version}, expected {oldest} or newer", fix, "cuda")
    return Line("cuDNN", "ok", version, "", "cuda")


def _room(machine: Machine) -> Iterator[Line]:
    if machine.memory is not None:
        yield Line("memory", "ok", size(machine.memory))
    if machine.disk is not None:
        low = machine.disk < _LOW_DISK
        fix = "free some space, or work on another disk" if low else ""
        yield Line("disk, this folder", "low" if low else "ok", f"{size(machine.disk)} free", fix)
