"""The two places a tensor can live, "cpu" and "cuda", looked up by name or by array."""

from __future__ import annotations

import numpy as np

from ..dtype import Array
from .base import Backend, Memory, Upload, extent, owner, same_place
from .cpu import CpuBackend
from .cuda import cuda_backend
from .shapes.array import ShapeArray

__all__ = ["Backend", "Memory", "Upload", "backend_of", "extent", "get_backend", "owner", "same_place"]

_CPU = CpuBackend()


def get_backend(name: str) -> Backend:
    """The backend called `name`. Raises `ValueError` for another name, `EnvironmentFault` if no GPU can be used."""
    if name == "cpu":
        return _CPU
    if name == "cuda":
        return cuda_backend()
    choice = "; set CUDA_VISIBLE_DEVICES to choose among several GPUs" if str(name).startswith("cuda:") else ""
    raise ValueError(f"device: expected 'cpu' or 'cuda', got {name!r}{choice}")


def backend_of(array: Array) -> Backend:
    """The backend an array lives on. Raises `TypeError` for anything but a NumPy or CuPy array."""
    if isinstance(array, (np.ndarray, np.generic)):
        return _CPU
    if isinstance(array, ShapeArray):
        found: Backend = array.xp.backend
        return found
    if not hasattr(type(array), "__cuda_array_interface__"):
        raise TypeError(f"a tensor's data is an array, this is a {type(array).__name__}; engine.tensor() makes tensors")
    return get_backend("cuda")
