"""Adapters that compute with one weight, W + scale * update: what is common to kinds whose update is a product.

The merged weight has the activations' dtype. Of layers large enough it is not kept for the backward pass, which makes
it again from the factors: kept, it would be the base model once more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from flame_train.engine import Tensor, nn, rematerialize
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, float32
from flame_train.engine.mode import no_grad

from .dropping import Drop
from .factors import Array

KEPT_BELOW: Final = 8 << 20
"""Bytes of a merged weight below which it is kept: made again, a small one costs launches and saves little."""

_Product = tuple[Tensor, Tensor, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class MatrixFactors:
    """One module's matrices by their names in files, and the alpha of the update that they make."""

    arrays: Mapping[str, Array]
    alpha: float

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight; a matrix where files do not tell the kernel."""
        raise NotImplementedError

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Says whether the update is that of a weight of this shape, its kernel flattened or not."""
        mine = self.weight_shape
        return mine[0] == shape[0] and math.prod(mine[1:]) == math.prod(shape[1:])


class MergedAdapter:
    """A layer's adapter whose update is the product of two tensors, broadcast to one shape of the weight's size."""

    scale: float

    def product(self, dtype: DType, weight_shape: tuple[int, ...]) -> _Product:
        """Returns two tensors of `dtype`, and the shape in which their product is the update without its scale."""
        raise NotImplementedError

    def __call__(self, layer: nn.Linear | nn.Conv2d, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns the layer's output with the merged weight; the layer's own stays as it is."""
        return plain(layer, x, self.merged(layer.weight, x.dtype), residual)

    def merged(self, weight: Any, dtype: DType) -> Tensor:
        """Returns the weight with the update, of `dtype`."""
        return _rematerialized(weight, self.product(dtype, tuple(weight.shape)), self.scale, dtype)

    def dropped(self, layer: nn.Linear | nn.Conv2d, x: Tensor, drop: Drop) -> Tensor:
        """Returns the same without rows of the update, or without all of it."""
        first, second, shape = self.product(x.dtype, tuple(layer.weight.shape))
        rows, kept = drop.rows(layer.weight.shape[0]), drop.module()
        if rows is not None:
            split = next(shape[:n] for n in range(1, len(shape)) if math.prod(shape[:n]) == rows.shape[0])
            first = first * rows.reshape(*split, *(1 for _ in shape[len(split) :])).to(x.dtype)
        first = first if kept is None else first * kept.to(x.dtype)
        return plain(layer, x, _rematerialized(layer.weight, (first, second, shape), self.scale, x.dtype), None)

    def on(self, layer: nn.Linear | nn.Conv2d) -> Self:
        """Returns itself, which reads the weight of the layer that it is called for."""
        return self

    def apply_grouped(self, layers: Sequence[nn.Linear], x: Tensor) -> tuple[Tensor, ...] | None:
        """Returns None, since each layer has a weight of its own."""
        return None

    def update(self, weight_shape: tuple[int, ...]) -> Tensor:
        """Returns the update of the weight, fp32, in its shape."""
        with no_grad():
            first, second, shape = self.product(float32, weight_shape)
            return (first * second * self.scale).expand(*shape).reshape(weight_shape)


def plain(layer: nn.Linear | nn.Conv2d, x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    """Returns what the layer computes, with another weight."""
    bias = nn.compute_copy(layer.bias)
    if isinstance(layer, nn.Conv2d):
        y: Tensor = F.conv2d(x, weight, bias, layer.stride, layer.padding, layout="NHWC")
        return y
    return F.linear(x, weight, bias) if residual is None else F.linear_add(x, weight, bias, residual)


def dense(weight: Any, dtype: DType) -> Tensor:
    """Returns a layer's frozen weight as numbers of `dtype`, whatever it is stored in."""
    update: Tensor = weight.dequantize(dtype) if isinstance(weight, nn.QuantizedWeight) else weight.to(dtype)
    return update


def product_of(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b, made again in the backward pass where it is large."""
    return rematerialize(F.matmul, a, b, min_bytes=KEPT_BELOW)


def _rematerialized(weight: Any, product: _Product, scale: float, dtype: DType) -> Tensor:
    first, second, shape = product
    return rematerialize(_merged, weight, first, second, scale, shape, dtype, min_bytes=KEPT_BELOW)


def _merged(weight: Any, first: Tensor, second: Tensor, scale: float, shape: tuple[int, ...], dtype: DType) -> Tensor:
    out: Tensor = F.addcmul(dense(weight, dtype).reshape(shape), first, second, value=scale)
    return out.reshape(tuple(weight.shape))


def as_matrix(x: Array) -> Array:
    """Returns (rows, everything else)."""
    return x.reshape(len(x), -1)
