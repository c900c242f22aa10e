"""Sequences that networks are made of, by name. Each equals its body; a kernel may take one as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ...errors import ShapeError
from ..backend.cuda.programs import Extent, Operands, Program, Reduction
from ..dtype import Array, float32, promote
from ..op import ErrorSample, Sample, composite, sample
from ..tensor import Tensor
from .activations import gelu, quick_gelu, relu, silu
from .along import no_rows, rows_of, shared, table
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


@composite(aux=("mean", "rstd"))
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


def _modulated(input: Array, scale: Array, shift: Array) -> str:
    for x in (scale, shift):
        found = shared(x, input.shape) if input.ndim else None
        if found is None or found[0] * found[1] * input.shape[-1] != input.size:
            return "scale or shift broadcast in another way than one row for each run of rows"
    return no_rows(input, 1, scale, shift)


@layer_norm_modulate.cuda("rows", when=_modulated)
def _(k: Any, input: Array, scale: Array, shift: Array, eps: float) -> tuple[Array, Array, Array]:
    program = Program(
        (
            "sum s = input",
            "let mean = s / n",
            "row c = input - mean",
            "sum q = c * c",
            "let rstd = rsqrtf(q / n + eps)",
        ),
        ("c * rstd * (1.f + scale) + shift",),
        ("mean", "rstd"),
    )
    tables = {"scale": table(k, scale, input.shape), "shift": table(k, shift, input.shape)}
    dtype = promote([a.dtype for a in (input, scale, shift)])
    operands = Operands({"input": rows_of(k, input)}, tables, {}, {"eps": eps})
    y, mean, rstd = k.rows(program, operands, (dtype, float32, float32))
    kept = (*input.shape[:-1], 1)
    return y.reshape(input.shape), mean.reshape(kept), rstd.reshape(kept)


@layer_norm_modulate.cuda_vjp("rows", "input", when=_modulated)
def _(k: Any, g: Array, input: Array, scale: Array, mean: Array, rstd: Array) -> Array:
    program = Program(
        (
            "sum a = g * (1.f + scale)",
            "sum b = g * (1.f + scale) * (input - mean)",
            "let t = b * rstd * rstd / n",
            "let m = a / n",
        ),
        ("rstd * (g * (1.f + scale) - m - (input - mean) * t)",),
    )
    rows = {"g": rows_of(k, g), "input": rows_of(k, input)}
    columns = {"mean": mean.reshape(-1), "rstd": rstd.reshape(-1)}
    operands = Operands(rows, {"scale": table(k, scale, input.shape)}, columns)
    return k.rows(program, operands, (input.dtype,))[0].reshape(input.shape)


@layer_norm_modulate.cuda_vjp("rows", "scale", when=_modulated)
def _(k: Any, g: Array, input: Array, scale: Array, mean: Array, rstd: Array) -> Array:
    rows = {"g": rows_of(k, g), "input": rows_of(k, input)}
    columns = {"mean": mean.reshape(-1), "rstd": rstd.reshape(-1)}
    return _to_shared(k, "g * (input - mean) * rstd", Operands(rows, {}, columns), scale, input.shape)


@layer_norm_modulate.cuda_vjp("rows", "shift", when=_modulated)
def _(k: Any, g: Array, shift: Array) -> Array:
    return _to_shared(k, "g", Operands({"g": rows_of(k, g)}), shift, g.shape)


def _to_shared(k: Any, each: str, operands: Operands, x: Array, shape: tuple[int, ...]) -> Array:
    """The gradient of shared rows: `each` summed over the run of rows that share one."""
    found = shared(x, shape)
    assert found is not None
    run, count = found
    return k.columns([Reduction("sum", each)], operands, Extent(count, run, shape[-1]), x.dtype)[0].reshape(x.shape)


@layer_norm_modulate.large_samples
def _() -> Iterator[Sample]:
    yield sample((2, 77, 640), (2, 1, 640), (2, 1, 640))
    yield sample((300, 3072), (3072,), (3072,))
