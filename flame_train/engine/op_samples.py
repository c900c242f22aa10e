"""Sample inputs: from a declared `Sample` to Tensors, for tests, gradcheck and benchmarks alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ShapeError
from .dtype import DType, float64
from .op import ErrorSample, Op, Sample, sample
from .tensors.tensor import Tensor, tensor


@dataclass(frozen=True, slots=True)
class Values:
    """A tensor's shape and the range of its values. `gap` keeps |x| away from zero, where kinks live."""

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0
    gap: float = 0.0
    kind: str = "float"

    def draw(self, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        """fp64, int64 or bool values in the range; or numbers of 8 bits, scales or bytes, as quantized weights have."""
        if self.kind == "int":
            return rng.integers(int(self.low), int(self.high), self.shape)
        if self.kind == "bool":
            return rng.random(self.shape) < 0.6
        if self.kind == "e4m3":
            return rng.integers(0, 0x7F, self.shape, np.uint8)
        if self.kind == "int8":
            return rng.integers(-127, 128, self.shape, np.int8)
        if self.kind == "bytes":
            return rng.integers(0, 256, self.shape, np.uint8)
        if self.kind == "scales":
            return rng.uniform(0.5, 1.0, self.shape).astype(np.float32).view(np.uint32)
        x = rng.uniform(self.low, self.high, self.shape)
        return np.where(np.abs(x) < self.gap, np.copysign(self.gap, x) + x, x) if self.gap else x


def positive(*shape: int) -> Values:
    """Values in [0.3, 2.5]."""
    return Values(shape, 0.3, 2.5)


def apart(*shape: int) -> Values:
    """Values no nearer to zero than 0.1."""
    return Values(shape, gap=0.1)


def integers(high: int, *shape: int) -> Values:
    """Returns whole numbers in [0, high)."""
    return Values(shape, 0, high, kind="int")


def booleans(*shape: int) -> Values:
    """Returns True six times in ten."""
    return Values(shape, kind="bool")


def stored(*shape: int, kind: str = "e4m3") -> tuple[Values, Values]:
    """Returns a matrix in 8 bits, "e4m3" with no value negative or NaN, or "int8", and its rows' scales."""
    return Values(shape, kind=kind), Values(shape[:-1], kind="scales")


def stored_in_4_bits(count: int) -> tuple[Values, ...]:
    """Returns a tensor of this many elements in NF4."""
    blocks = -(-count // 64)
    magnitudes = Values((blocks,), kind="bytes"), Values((-(-blocks // 256),), kind="scales")
    return Values((-(-count // 2),), kind="bytes"), *magnitudes, Values((1,), kind="scales")


def of_one(make: Callable[..., Any] = lambda *shape: shape) -> list[Sample]:
    """Samples for a function of one tensor with several elements, one and none; `make` gives it its values."""
    return [sample(make(3, 5)), sample(make(1)), sample(make(0, 2))]


OF_TWO = [sample((2, 3), apart(2, 3)), sample((4, 1, 3), apart(5, 1)), sample((3,), 1.7), sample((0, 3), apart(0, 3))]
"""Samples for a function of two tensors or a tensor and a number; the second stays away from zero."""

NOT_BROADCAST = ErrorSample(
    sample((2, 3), (4,)), ShapeError, r"the shapes of .* \(2, 3\), .* \(4,\) do not broadcast together"
)
"""Two tensors whose shapes do not broadcast together."""


def no_such_dim(*rest: Any) -> ErrorSample:
    """Returns a dim that a matrix does not have; `rest` are further arguments."""
    return ErrorSample(sample((2, 3), 2, *rest), ShapeError, "dim 2 is outside a tensor of 2 dims")


def materialise(
    op: Op, s: Sample, rng: np.random.Generator, dtype: DType = float64, device: str = "cpu"
) -> dict[str, Any]:
    """Returns the sample's arguments by name with Tensors drawn for the tensor ones; floats get `dtype`.

    Args:
        s: the sample.
        rng: draws the values.
    """
    bound = op.bind(s.args, s.kwargs)
    for name in op.tensor_names:
        value = bound[name]
        if name in op.list_names:
            bound[name] = [_draw(v, rng, dtype, device) for v in value]
        else:
            bound[name] = _draw(value, rng, dtype, device)
    return bound


def _draw(value: Any, rng: np.random.Generator, dtype: DType, device: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, Tensor)):
        return value
    if isinstance(value, np.ndarray):
        host = value
    else:
        host = (value if isinstance(value, Values) else Values(tuple(value))).draw(rng)
    return tensor(host, dtype if host.dtype == np.float64 else None, device)


def tensor_arguments(op: Op, bound: dict[str, Any]) -> Sequence[tuple[str, int | None, Tensor]]:
    """Returns every Tensor among the bound arguments as (argument, position in its list or None, tensor)."""
    found: list[tuple[str, int | None, Tensor]] = []
    for name in op.tensor_names:
        value = bound[name]
        if isinstance(value, Tensor):
            found.append((name, None, value))
        elif isinstance(value, list):
            found.extend((name, i, t) for i, t in enumerate(value))
    return found
