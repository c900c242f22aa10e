"""Losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import ShapeError
from ..dtype import Array
from ..op import ErrorSample, Sample, primitive, sample


@primitive(torch="nn.functional.mse_loss")
def mse_loss(xp: Any, input: Array, target: Array, reduction: str = "mean") -> Array:
    """(input - target)^2, averaged ("mean"), summed ("sum") or as it is ("none")"""
    if input.shape != target.shape:
        raise ShapeError(f"mse_loss: input {tuple(input.shape)} and target {tuple(target.shape)} must have one shape")
    d = (input - target) ** 2
    if reduction == "none":
        return d
    return xp.mean(d) if reduction == "mean" else xp.sum(d)


@mse_loss.vjp("input")
def _(xp: Any, g: Array, input: Array, target: Array, reduction: str) -> Array:
    scale = 2.0 / input.size if reduction == "mean" else 2.0
    return g * scale * (input - target)


@mse_loss.vjp("target")
def _(xp: Any, g: Array, input: Array, target: Array, reduction: str) -> Array:
    scale = 2.0 / input.size if reduction == "mean" else 2.0
    return g * scale * (target - input)


@mse_loss.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3), (2, 3))
    yield sample((2, 3), (2, 3), "sum")
    yield sample((2, 3), (2, 3), "none")


@mse_loss.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 3), (2, 1)), ShapeError, "must have one shape")
