"""Layers with a low-rank update: W x + scale * up (down x) (LoRA, arXiv 2106.09685).

The adapter's weights are fp32 masters and are cast to the activations' dtype where they are used.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..op import Sample, composite, sample
from ..tensor import Tensor
from .conv import Pair, conv2d
from .elementwise import cast
from .matmul import linear


@composite()
def lora_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """linear(input, weight, bias) + scale * (input @ down^T) @ up^T"""
    low = linear(input, _like(down, input))
    return linear(input, weight, bias) + linear(low, _like(up, input)) * scale  # type: ignore[no-any-return]


@lora_linear.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 8), (6, 8), (6,), (2, 8), (6, 2), 0.5)
    yield sample((4, 8), (6, 8), None, (1, 8), (6, 1), 2.0)


@composite()
def lora_conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float, stride: Pair = 1,
    padding: Pair = 0, layout: str = "NCHW",
) -> Tensor:  # fmt: skip
    """conv2d(input, weight, bias) + scale * conv1x1(conv2d(input, down), up): down keeps the kernel, up is 1x1"""
    low = conv2d(input, _like(down, input), None, stride, padding, layout=layout)
    update = conv2d(low, _like(up, input), layout=layout) * scale
    return conv2d(input, weight, bias, stride, padding, layout=layout) + update  # type: ignore[no-any-return]


@lora_conv2d.samples
def _() -> Iterator[Sample]:
    yield sample((1, 4, 3, 3), (5, 3, 3, 3), (5,), (2, 3, 3, 3), (5, 2, 1, 1), 0.5, 1, 1, "NHWC")
    yield sample((1, 3, 4, 4), (5, 3, 1, 1), None, (2, 3, 1, 1), (5, 2, 1, 1), 1.5)


def _like(w: Tensor, x: Tensor) -> Tensor:
    return w if w.dtype == x.dtype else cast(w, x.dtype)
