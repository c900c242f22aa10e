"""Detects drivers, libraries and GPUs; it works on machines without them. `doctor` judges the answers.

Every probe returns None (or an error's text) instead of raising: a broken driver must not break the program
that is there to say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flame_train.engine.backend.cuda.autotuner import default_folder
from flame_train.engine.backend.cuda.prebuilt import package_folder
from flame_train.version import __version__

CUPY_DISTRIBUTIONS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver describes it. Memory in bytes; `capability` as (major, minor)."""

    name: str
    memory: int
    free: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that `doctor` checks.

    `driver` and `driver_cuda` are versions, None without a driver (`driver_error` then says why).
    `packages` has installed distributions by name, `libraries` the version of each CUDA library that loads. `codecs`
    has the image formats that Pillow can read. `visible` is CUDA_VISIBLE_DEVICES if set. `choices` is the folder of
    the autotune cache with its size. `kernels` has the versions of NVRTC whose compiled kernels an installed package
    brings.
    """

    python: str
    packages: dict[str, str]
    codecs: dict[str, bool]
    driver: str | None
    driver_cuda: tuple[int, int] | None
    driver_error: str
    gpus: tuple[Gpu, ...]
    libraries: dict[str, str]
    visible: str | None
    memory: int | None
    disk: int | None
    choices: str
    kernels: tuple[str, ...] = ()


def detect() -> Machine:
    """Probes this machine. Never raises."""
    driver, driver_cuda, gpus, driver_error = _driver()
    return Machine(
        python=platform.python_version(),
        packages=_packages(),
        codecs=_codecs(),
        driver=driver,
        driver_cuda=driver_cuda,
        driver_error=driver_error,
        gpus=gpus,
        libraries=_libraries(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        memory=_memory(),
        disk=_disk(),
        choices=_choices(),
        kernels=_kernels(),
    )


def _packages() -> dict[str, str]:
    names = (
        "flame-train",
        "numpy",
        "ml-dtypes",
        "pillow",
        "tokenizers",
        "tensorboardX",
        "wandb",
        "nvidia-cudnn-frontend",
    )
    versions = {"flame-train": __version__}
    for name in (*names, *CUPY_DISTRIBUTIONS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _codecs() -> dict[str, bool]:
    try:
        from PIL import features
    except ImportError:
        return {}
    return {
        label: bool(features.check(name))
        for label, name in (("PNG", "zlib"), ("JPEG", "jpg"), ("WebP", "webp"), ("AVIF", "avif"))
    }


def _driver() -> tuple[str | None, tuple[int, int] | None, tuple[Gpu, ...], str]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        return None, None, (), str(error)
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        gpus = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        return str(version), (cuda // 1000, cuda % 1000 // 10), gpus, ""
    except pynvml.NVMLError as error:
        return None, None, (), str(error)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    capability = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory=int(memory.total),
        free=int(memory.free),
        capability=(int(capability[0]), int(capability[1])),
    )


def _libraries() -> dict[str, str]:
    calls = {
        "cudart": _runtime_version,
        "nvrtc": _nvrtc_version,
        "cublasLt": _cublaslt_version,
        "cudnn": _cudnn_version,
    }
    versions = {}
    for name, version in calls.items():
        with contextlib.suppress(Exception):  # missing, of another system, without the symbol: all the same here
            versions[name] = version(_load(name))
    return versions


def _load(name: str) -> ctypes.CDLL:
    """Loads the library from NVIDIA's wheels or, failing that, from the system."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:
        path = ctypes.util.find_library(name)
        if path is None:
            raise FileNotFoundError(name) from None
        return ctypes.CDLL(path)
    return ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)


def _runtime_version(library: ctypes.CDLL) -> str:
    version = ctypes.c_int()
    library.cudaRuntimeGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _nvrtc_version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _cublaslt_version(library: ctypes.CDLL) -> str:
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return _packed(library.cublasLtGetVersion())


def _cudnn_version(library: ctypes.CDLL) -> str:
    library.cudnnGetVersion.restype = ctypes.c_size_t
    return _packed(library.cudnnGetVersion())


def _packed(number: int) -> str:
    """Reads `91900` as 9.19.0: so cuDNN 9 and cuBLASLt 12 and later number themselves."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _memory() -> int | None:
    try:
        if hasattr(os, "sysconf"):
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(psutil.virtual_memory().total)
    except (ValueError, OSError, AttributeError):
        return None


def _disk() -> int | None:
    try:
        return shutil.disk_usage(Path.cwd()).free
    except OSError:
        return None


def _kernels() -> tuple[str, ...]:
    folder = package_folder()
    return tuple(sorted(each.name for each in folder.iterdir() if each.name[0].isdigit())) if folder else ()


def _choices() -> str:
    folder = default_folder()
    if folder is None:
        return "nowhere: this user has no home folder; set XDG_CACHE_HOME to keep them between runs"
    try:
        count = sum(1 for _ in folder.iterdir())
    except OSError as error:
        return f"{folder}" if isinstance(error, FileNotFoundError) else f"{folder}: {error.strerror}"
    return f"{folder}, {count} files"
