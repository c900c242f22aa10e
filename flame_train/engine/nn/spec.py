"""What a module declares: weights, and the buffers that it writes itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np

from ..dtype import Array, DType, as_dtype, float32
from ..tensors.tensor import Frozen, Tensor

Init = Literal["fan_in", "ones", "zeros", "normal"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A declared weight: its shape in the checkpoint, and how `init` fills it for tests."""

    shape: tuple[int, ...]
    init: Init = "fan_in"
    dtype: DType | None = None
    """Of a buffer, which keeps it; a weight's is chosen when it is loaded."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_buffer(self) -> bool:
        """Whether it is written by the module itself and never trained, such as running statistics."""
        return self.dtype is not None

    def placed(self, array: Array) -> Tensor:
        """Returns the tensor that holds a loaded `array`."""
        return Tensor(array) if self.is_buffer else Frozen(array)


def param(*shape: int, init: Init = "fan_in") -> Any:
    """Declares a weight. The attribute becomes a Tensor when the module is loaded.

    `init` says how `Module.init` fills it. "fan_in" draws from a normal distribution of variance 1 / fan-in, "normal"
    from one of deviation 0.02. "ones" and "zeros" are what they say.

    Raises TypeError for a size that is no integer, ValueError for a negative one and for another `init`.
    """
    sizes: tuple[Any, ...] = shape
    for size in sizes:
        if not isinstance(size, Integral):
            raise TypeError(f"param: expected ints as sizes, as in param(3, 4), got {size!r}")
        if size < 0:
            raise ValueError(f"weight: expected sizes of at least 0, got {size}")
    if init not in get_args(Init):
        raise ValueError(f"param: expected init to be one of {', '.join(get_args(Init))}, got {init!r}")
    return ParamSpec(shape, init)


def kernel_order(x: Array, contiguous: Callable[[Array], Array] = np.ascontiguousarray) -> Array:
    """Returns convolution weights (out, in, kh, kw) in channels-last memory, which kernels need; others as they are.

    `contiguous` makes the copy, on the device of `x`.
    """
    if x.ndim != 4:
        return x
    return contiguous(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def buffer(*shape: int, init: Literal["zeros", "ones"] = "zeros", dtype: DType | str = float32) -> Any:
    """Declares what a module keeps beside its weights, in files too, and writes itself: running statistics.

    As torch.nn.Module.register_buffer. It keeps its dtype, whatever the weights' is, and is never trained.
    """
    return replace(param(*shape, init=init), dtype=as_dtype(dtype))
