"""The places a tensor can live, "cpu" and the GPUs "cuda", "cuda:1", ..., looked up by name or by array."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..dtype import Array, DType
from ..mode import gpu_number
from .base import Backend, Memory, Upload, extent, owner, same_place
from .capability import refuse_formats
from .cpu import CpuBackend
from .cuda import backend_of_array, cuda_backend, current_gpu, gpu_count, several_gpus
from .shapes.array import ShapeArray

__all__ = [
    "Backend",
    "Memory",
    "Upload",
    "backend_of",
    "check_formats",
    "current_gpu",
    "extent",
    "get_backend",
    "gpu_count",
    "owner",
    "same_place",
    "several_gpus",
]

_CPU = CpuBackend()


def get_backend(name: str) -> Backend:
    """The backend called `name`: "cpu", "cuda", which is "cuda:0", or another GPU by its number, as in "cuda:1".

    Raises `ValueError` for another name, `EnvironmentFault` if that GPU cannot be used, naming those that are there.
    """
    number = gpu_number(name)
    return _CPU if number is None else cuda_backend(number)


def check_formats(device: str, formats: Mapping[str, DType | str]) -> None:
    """Raises `EnvironmentFault` if `device` lacks a number format of `formats`, which has them by key or option."""
    backend = get_backend(device)
    if backend.kernels is not None:
        refuse_formats(backend.card, divmod(backend.kernels.compute_capability, 10), formats)


def backend_of(array: Array) -> Backend:
    """Returns the backend an array lives on. Raises `TypeError` for anything but a NumPy or CuPy array."""
    if isinstance(array, (np.ndarray, np.generic)):
        return _CPU
    if isinstance(array, ShapeArray):
        found: Backend = array.xp.backend
        return found
    if not hasattr(type(array), "__cuda_array_interface__"):
        raise TypeError(f"a tensor's data is an array, this is a {type(array).__name__}; engine.tensor() makes tensors")
    return backend_of_array(array)
