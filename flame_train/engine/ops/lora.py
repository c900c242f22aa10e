"""Layers with a low-rank update: W x + scale * up (down x) (LoRA, arXiv 2106.09685).

The adapter's weights may be fp32 masters, cast to the activations' dtype where they are used, or working copies in that
dtype already. Their gradients are fp32 either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import ShapeError
from ..dtype import Array, compute_dtype
from ..op import ErrorSample, Sample, composite, sample
from ..tensor import Tensor
from .conv import Pair, conv2d
from .convert import cast
from .matmul import check_linear, linear, linear_condition


@composite(aux=("low",))
def lora_linear(input: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """linear(input, weight, bias) + (scale * input @ down^T) @ up^T"""
    low = linear(input, _like(down, input)) * scale
    return linear(input, weight, bias) + linear(low, _like(up, input))


@lora_linear.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 7), (6, 8), None, (2, 8), (6, 2), 0.5), ShapeError, "last dim 7 but weight is")


@lora_linear.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 8), (6, 8), (6,), (2, 8), (6, 2), 0.5)
    yield sample((4, 8), (6, 8), None, (1, 8), (6, 1), 2.0)


@lora_linear.cuda("cublaslt", when=linear_condition)
def _(
    k: Any, input: Array, weight: Array, bias: Array | None, down: Array, up: Array, scale: float
) -> tuple[Array, Array]:
    check_linear(input, weight)
    low = k.matmul(input, down.astype(input.dtype, copy=False).T, alpha=scale)
    y = k.matmul(input, weight.T, bias=bias)
    return k.matmul(low, up.astype(input.dtype, copy=False).T, out=y, accumulate=True), low


@lora_linear.cuda_vjp("cublaslt", "input", "down", "up", when=linear_condition)
def _(
    k: Any, g: Array, input: Array, weight: Array, down: Array, up: Array, low: Array, scale: float,
    needs: frozenset[str],
) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
    rows, x = g.reshape(-1, g.shape[-1]), input.reshape(-1, input.shape[-1])
    inner = k.matmul(rows, up.astype(g.dtype, copy=False), alpha=scale)
    dx = None
    if "input" in needs:
        dx = k.matmul(rows, weight)
        dx = k.matmul(inner, down.astype(g.dtype, copy=False), out=dx, accumulate=True).reshape(input.shape)
    d_down = k.matmul(inner.T, x, out_dtype=compute_dtype(g.dtype)) if "down" in needs else None
    d_up = k.matmul(rows.T, low.reshape(-1, low.shape[-1]), out_dtype=compute_dtype(g.dtype)) if "up" in needs else None
    return dx, d_down, d_up


@composite()
def lora_conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float, stride: Pair = 1,
    padding: Pair = 0, layout: str = "NCHW",
) -> Tensor:  # fmt: skip
    """conv2d(input, weight, bias) + conv1x1(scale * conv2d(input, down), up): down keeps the kernel, up is 1x1"""
    low = conv2d(input, _like(down, input), None, stride, padding, layout=layout) * scale
    update = conv2d(low, _like(up, input), layout=layout)
    return conv2d(input, weight, bias, stride, padding, layout=layout) + update


@lora_conv2d.errors
def _() -> Iterator[ErrorSample]:
    bad = sample((1, 4, 4, 4), (5, 3, 1, 1), None, (2, 3, 1, 1), (5, 2, 1, 1), 1.5)
    yield ErrorSample(bad, ShapeError, "has 4 channels but weight .* takes 3")


@lora_conv2d.samples
def _() -> Iterator[Sample]:
    yield sample((1, 4, 3, 3), (5, 3, 3, 3), (5,), (2, 3, 3, 3), (5, 2, 1, 1), 0.5, 1, 1, "NHWC")
    yield sample((1, 3, 4, 4), (5, 3, 1, 1), None, (2, 3, 1, 1), (5, 2, 1, 1), 1.5)


def _like(w: Tensor, x: Tensor) -> Tensor:
    return w if w.dtype == x.dtype else cast(w, x.dtype)


@lora_linear.large_samples
def _() -> Iterator[Sample]:
    yield sample((2, 77, 320), (640, 320), (640,), (16, 320), (640, 16), 0.5)
    yield sample((100, 96), (64, 96), None, (4, 96), (64, 4), 1.0)
