"""How a tensor's values are printed."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Backend
from ..dtype import Array, float32, is_float
from ..mode import mode

_WHOLE = 1000
"""Of tensors with more elements only the edges are shown, and copied from the device."""
_EDGE = 3


def values_shown(array: Array, backend: Backend, indent: int) -> str:
    """Returns the values in nested brackets, continued after `indent` blanks.

    Of a large tensor three at each edge and the shape. The shape alone where there are no values to look at: in a
    captured step, and on a GPU that is only described.
    """
    shape = tuple(int(n) for n in array.shape)
    if mode().capturing or backend.described:
        return f"shape={shape}"
    if 0 in shape:
        return f"[], shape={shape}"
    large = array.size > _WHOLE
    host = _printable(backend.to_host(_edges(array, backend.xp) if large else array))
    text = np.array2string(
        host, precision=4, separator=", ", threshold=0 if large else _WHOLE, edgeitems=_EDGE, prefix=" " * indent
    )
    return f"{text}, shape={shape}" if large else text


def _edges(array: Array, xp: Any) -> Array:
    """Returns the elements within `_EDGE` of an edge, and one more along each long dim, for which dots are printed."""
    for dim, n in enumerate(array.shape):
        if n > 2 * _EDGE + 1:
            before: tuple[Any, ...] = (slice(None),) * dim
            parts = [array[(*before, slice(None, _EDGE + 1))], array[(*before, slice(n - _EDGE, None))]]
            array = xp.concatenate(parts, axis=dim)
    return array


def _printable(host: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Narrow floats as fp32, which NumPy can format."""
    return host.astype(float32) if is_float(host.dtype) and host.dtype.itemsize < 4 else host
