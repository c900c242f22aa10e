"""The two places a tensor can live, looked up by name or by array."""

from __future__ import annotations

import numpy as np

from ...errors import EnvironmentFault
from ..dtype import Array
from .base import Backend, Memory, Parcel, extent, owner, same_place
from .cpu import CpuBackend
from .cuda import cuda_backend

__all__ = [
    "Backend", "Memory", "Parcel", "backend_of", "compute_capability", "extent", "get_backend", "owner", "same_place",
]  # fmt: skip

_CPU = CpuBackend()


def get_backend(name: str) -> Backend:
    """The backend called `name`. "cuda" raises `EnvironmentFault` where no usable GPU is found."""
    if name == "cpu":
        return _CPU
    if name == "cuda":
        return cuda_backend()
    number = "; of several GPUs CUDA_VISIBLE_DEVICES says which is seen" if str(name).startswith("cuda:") else ""
    raise ValueError(f"device: expected 'cpu' or 'cuda', got {name!r}{number}")


def compute_capability() -> int | None:
    """The GPU's, 90 for 9.0; None where there is no usable one."""
    try:
        return int(get_backend("cuda").kernels.compute_capability)
    except EnvironmentFault:
        return None


def backend_of(array: Array) -> Backend:
    """The backend an array lives on."""
    if isinstance(array, (np.ndarray, np.generic)):
        return _CPU
    if not hasattr(type(array), "__cuda_array_interface__"):
        raise TypeError(f"a tensor's data is an array, this is a {type(array).__name__}; engine.tensor() makes tensors")
    return get_backend("cuda")
