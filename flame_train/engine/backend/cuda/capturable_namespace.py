"""CuPy as references of ops get it on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...dtype import Array
from .launcher import Launcher
from .libraries.cublaslt import SUPPORTED


class CapturableNamespace:
    """CuPy for references, with replacements for functions that cannot be captured in a graph.

    CuPy's matrix products cannot, so cuBLASLt makes them. To join more than eight small arrays CuPy copies their
    addresses from the host, so they are joined eight at a time.
    """

    _AT_ONCE = 8

    def __init__(self, kernels: Launcher) -> None:
        self._xp, self._kernels = kernels.xp, kernels

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._xp, name)
        setattr(self, name, found)
        return found

    def matmul(self, a: Array, b: Array) -> Array:
        """a @ b as numpy.matmul; vectors and integers are left to CuPy."""
        if min(a.ndim, b.ndim) < 2 or a.dtype != b.dtype or a.dtype not in SUPPORTED:
            return self._xp.matmul(a, b)
        return self._kernels.matmul(a, b)

    def concatenate(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        """The arrays one after another along an axis."""
        n = self._AT_ONCE
        while len(arrays) > n:
            arrays = [self._xp.concatenate(arrays[i : i + n], axis=axis) for i in range(0, len(arrays), n)]
        return self._xp.concatenate(arrays, axis=axis)

    def stack(self, arrays: Sequence[Array], axis: int = 0) -> Array:
        """The arrays side by side along a new axis."""
        return self.concatenate([self._xp.expand_dims(a, axis) for a in arrays], axis)
