"""How the axes of an image are resized: which of its pixels each pixel of the result reads, as PyTorch has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import ShapeError
from ...arguments import Arguments
from ...dtype import Array
from ...namespace import Namespace
from ..common.dims import Shape

Sizes = int | Sequence[int]
Factors = float | Sequence[float]


@dataclass(frozen=True, slots=True)
class Axis:
    """How one axis is resized, from `before` to `after` pixels, with `scale` input pixels to an output pixel.

    `axis` is its dim, `align` is align_corners, `image` says that the input is 4-D.
    """

    axis: int
    before: int
    after: int
    scale: float
    mode: str
    align: bool
    image: bool

    def sources(self, xp: Namespace) -> tuple[Array, Array, Array | None]:
        """For each output pixel the two input pixels around it, and its position from 0 to 1; None for nearest."""
        place = xp.arange(self.after, dtype=np.float64)
        last = self.before - 1
        if not self.mode.endswith("linear"):
            at = self._nearest(xp, place).astype(np.int64)
            return xp.minimum(at, last), at, None
        x = place * self.scale if self.align else xp.maximum((place + 0.5) * self.scale - 0.5, 0.0)
        low = xp.minimum(xp.floor(x), last)
        return low.astype(np.int64), xp.minimum(low + 1, last).astype(np.int64), xp.clip(x - low, 0.0, 1.0)

    def _nearest(self, xp: Namespace, place: Array) -> Array:
        """The nearest pixel, in fp32 as PyTorch computes it: in images of equal or double size by the exact ratio."""
        scale, place = np.float32(self.factor), place.astype(np.float32)
        if self.mode == "nearest-exact":
            place = place + np.float32(0.5)
        return xp.floor(place * scale)

    @property
    def factor(self) -> float:
        """What a pixel's place is multiplied by."""
        if self.mode == "nearest" and self.image and self.after in (self.before, 2 * self.before):
            return self.before / self.after
        return self.scale

    def matrix(self, xp: Namespace, dtype: Any) -> Array:
        """The resizing as a matrix (after, before)."""
        low, high, part = self.sources(xp)
        pixel = xp.arange(self.before)
        if part is None:
            return (pixel == low[:, None]).astype(dtype)
        weight = part[:, None]
        return ((pixel == low[:, None]) * (1.0 - weight) + (pixel == high[:, None]) * weight).astype(dtype)


_LINEAR = {"linear": 3, "bilinear": 4, "trilinear": 5}


@dataclass(frozen=True, slots=True)
class Resizing(Arguments):
    """The arguments of interpolate but for its input."""

    size: Sizes | None
    scale_factor: Factors | None
    mode: str
    align_corners: bool | None
    recompute_scale_factor: bool | None
    layout: str

    def axes(self, shape: Shape) -> list[Axis]:
        """How each spatial axis of an input of `shape` is resized.

        Raises ValueError or ShapeError for arguments that do not fit together.
        """
        size, factor, mode, align = self.size, self.scale_factor, self.mode, self.align_corners
        if mode not in ("nearest", "nearest-exact", *_LINEAR) or _LINEAR.get(mode, len(shape)) != len(shape):
            raise ValueError(f"interpolate: mode {mode!r} is not known for an input of {len(shape)} dims")
        if (size is None) == (factor is None):
            raise ValueError("interpolate: expected one of size and scale_factor, got both or neither")
        if align is not None and mode not in _LINEAR:
            raise ValueError(f"interpolate: align_corners is for {', '.join(_LINEAR)}, got mode {mode!r}")
        axes = range(2, len(shape)) if self.layout == "NCHW" else range(1, len(shape) - 1)
        given: Any = size if size is not None else factor
        each = list(given) if isinstance(given, Sequence) else [given] * len(axes)
        if len(each) != len(axes):
            raise ShapeError(f"interpolate: expected {len(axes)} numbers for {tuple(shape)}, got {given}")
        if size is not None and not all(isinstance(n, (int, np.integer)) for n in each):
            raise ShapeError(f"interpolate: expected whole numbers for size, got {size!r}")
        plan = []
        for axis, wanted in zip(axes, each, strict=True):
            before = shape[axis]
            if not 0 < wanted < math.inf:
                raise ShapeError(f"interpolate: expected sizes and factors above 0, got {given!r}")
            after = wanted if size is not None else math.floor(before * wanted)
            if min(before, after) < 1:
                raise ShapeError(f"interpolate: expected sizes of at least 1, got {before} to {after} along dim {axis}")
            if align:
                scale = (before - 1) / (after - 1) if after > 1 else 0.0
            else:
                scale = before / after if size is not None or self.recompute_scale_factor else 1.0 / wanted
            plan.append(Axis(axis, before, after, scale, mode, bool(align), len(shape) == 4))
        return plan
