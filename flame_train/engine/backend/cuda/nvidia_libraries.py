"""Finding and loading NVIDIA's libraries, by the full path of the installed wheel."""

from __future__ import annotations

import ctypes
from functools import cache

from ....errors import EnvironmentFault


@cache
def load(name: str) -> ctypes.CDLL:
    """The CUDA library called `name` ("cublasLt", "nvrtc", ...), loaded so that other libraries see its symbols.

    cuDNN finds the libraries it needs only if they are loaded already. Raises `EnvironmentFault` if it is not found.
    """
    from cuda import pathfinder

    try:
        found = pathfinder.load_nvidia_dynamic_lib(name)
    except Exception as e:
        raise EnvironmentFault(f"the CUDA library {name} was not found ({e}); run `flame-train doctor`") from e
    return ctypes.CDLL(found.abs_path, mode=ctypes.RTLD_GLOBAL)


@cache
def header_directory() -> str:
    """The folder that holds cuda_bf16.h and the other CUDA headers. Raises `EnvironmentFault` if it is not found."""
    from cuda import pathfinder

    found = pathfinder.find_nvidia_header_directory("cudart")
    if found is None:
        raise EnvironmentFault(
            "the CUDA headers were not found; pip install 'flame-train[cuda13]', or run `flame-train doctor`"
        )
    return str(found)


def driver_version() -> str:
    """The version of NVIDIA's driver, such as "570.86.15". Raises `EnvironmentFault` if NVML does not tell it."""
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as e:
        raise EnvironmentFault(f"NVIDIA's driver did not tell its version ({e}); run `flame-train doctor`") from e
