"""Sequences that networks are made of, by name. Each equals its body; a kernel may take one as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ...errors import ShapeError
from ..op import ErrorSample, Sample, composite, sample
from ..tensor import Tensor
from .activations import gelu, quick_gelu, relu, silu
from .matmul import linear
from .norm import layer_norm
from .pointwise import sigmoid, tanh

_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": relu,
    "sigmoid": sigmoid,
    "silu": silu,
    "tanh": tanh,
}


@composite()
def linear_activation(input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "gelu") -> Tensor:
    """activation(linear(input, weight, bias)), "gelu", "gelu_tanh", "quick_gelu", "relu", "sigmoid", "silu", "tanh" """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"linear_activation: expected one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
    return _ACTIVATIONS[activation](linear(input, weight, bias))


@linear_activation.samples
def _() -> Iterator[Sample]:
    yield sample((3, 4), (5, 4), (5,))
    yield sample((2, 3, 4), (5, 4), None, "silu")
    yield sample((3, 4), (5, 4), (5,), "gelu_tanh")


@linear_activation.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((3, 4), (5, 4), None, "swish"), ValueError, "expected one of gelu, .* got 'swish'")


@composite()
def layer_norm_modulate(input: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
    """layer_norm(input) * (1 + scale) + shift over the last dim: a DiT block's conditioning (arXiv 2212.09748)

    scale and shift broadcast to input: (B, 1, D) for one value an image.
    """
    normed: Tensor = layer_norm(input, (input.shape[-1],), eps=eps)
    return normed * (scale + 1.0) + shift


@layer_norm_modulate.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((2, 4), (3,), (4,)), ShapeError, r"\(2, 4\), other \(3,\) do not broadcast together")


@layer_norm_modulate.samples
def _() -> Iterator[Sample]:
    yield sample((2, 3, 4), (2, 1, 4), (2, 1, 4))
    yield sample((3, 5), (5,), (3, 5), 1e-3)
