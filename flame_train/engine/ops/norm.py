"""Normalisation of groups of channels. Statistics are taken in fp32 or fp64, whatever the input's dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..backend.cuda.programs import Extent, Operands, Reduction
from ..dtype import Array, DType, float32
from ..graph import Plus, leading_sum
from ..op import ErrorSample, Sample, composite, primitive, sample
from ..tensor import Tensor
from . import conditions
from .activations import silu
from .dims import Shape


@primitive(torch="nn.functional.group_norm", aux=("mean", "rstd"))
def group_norm(
    xp: Any, input: Array, num_groups: int, weight: Array | None = None, bias: Array | None = None,
    eps: float = 1e-5, layout: str = "NCHW",
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Each group of channels normalised over itself and space, then scaled per channel (arXiv 1803.08494)"""
    grouped, axes = _grouped(input, num_groups, layout)
    mean = xp.mean(grouped, axis=axes, keepdims=True)
    centred = grouped - mean
    rstd = 1.0 / xp.sqrt(xp.mean(centred * centred, axis=axes, keepdims=True) + eps)
    y = (centred * rstd).reshape(input.shape)
    if weight is not None:
        y = y * per_channel(weight, input.shape, layout)
    return (y if bias is None else y + per_channel(bias, input.shape, layout)), mean, rstd


def _grouped(x: Array, groups: int, layout: str) -> tuple[Array, tuple[int, ...]]:
    """x with its channels split into groups, and the axes over which a group spreads."""
    if groups < 1:
        raise ShapeError(f"group_norm: expected at least one group, got {groups}")
    if layout == "NHWC":
        if x.shape[-1] % groups:
            raise ShapeError(f"group_norm: {x.shape[-1]} channels do not divide into {groups} groups")
        return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), groups, x.shape[-1] // groups), (1, 3)
    if x.shape[1] % groups:
        raise ShapeError(f"group_norm: {x.shape[1]} channels do not divide into {groups} groups")
    return x.reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups), (2,)


def per_channel(w: Array, shape: Shape, layout: str) -> Array:
    """(C,) shaped so that it meets an input of `shape`. Raises ShapeError unless it is one value a channel."""
    channels = shape[-1 if layout == "NHWC" else 1]
    if w.shape != (channels,):
        raise ShapeError(
            f"expected {channels} values, one a channel of {tuple(shape)} ({layout}), got {tuple(w.shape)}"
        )
    return w if layout == "NHWC" else w.reshape(1, -1, *([1] * (len(shape) - 2)))


@group_norm.vjp("input")
def _(
    xp: Any,
    g: Array,
    input: Array,
    num_groups: int,
    weight: Array | None,
    mean: Array,
    rstd: Array,
    layout: str,
) -> Array:
    gw = g if weight is None else g * per_channel(weight, input.shape, layout)
    grouped, axes = _grouped(input, num_groups, layout)
    gw, _ = _grouped(gw, num_groups, layout)
    xhat = (grouped - mean) * rstd
    slope = xp.mean(gw * xhat, axis=axes, keepdims=True)
    return (rstd * (gw - xp.mean(gw, axis=axes, keepdims=True) - xhat * slope)).reshape(input.shape)


@group_norm.vjp("weight")
def _(xp: Any, g: Array, input: Array, num_groups: int, mean: Array, rstd: Array, layout: str) -> Array:
    grouped, _ = _grouped(input, num_groups, layout)
    return _to_channels(xp, g * ((grouped - mean) * rstd).reshape(input.shape), layout)


@group_norm.vjp("bias")
def _(xp: Any, g: Array, layout: str) -> Array:
    return _to_channels(xp, g, layout)


def _to_channels(xp: Any, x: Array, layout: str) -> Array:
    """The sum over everything but the channels."""
    if layout == "NHWC":
        return leading_sum(x, x.ndim - 1, x.dtype)
    return xp.sum(x, axis=tuple(i for i in range(x.ndim) if i != 1))


@group_norm.samples
def _() -> Iterator[Sample]:
    yield sample((2, 6, 3, 2), 3, (6,), (6,))
    yield sample((2, 4, 5), 2)
    yield sample((2, 3, 2, 6), 2, (6,), (6,), 1e-3, layout="NHWC")
    yield sample((1, 5, 4), 4, (4,), None, layout="NHWC")


@group_norm.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((1, 6, 2, 2), 4), ShapeError, "6 channels do not divide into 4 groups")
    yield ErrorSample(sample((1, 6, 2, 2), 0), ShapeError, "at least one group, got 0")
    yield ErrorSample(sample((1, 6, 2, 2), 2, (1,)), ShapeError, "expected 6 values, one a channel .*, got .1,")


@composite(aux=("mean", "rstd"))
def group_norm_silu(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    layout: str = "NCHW",
) -> Tensor:  # fmt: skip
    """silu(group_norm(input)): the opening of every residual block of a diffusion UNet"""
    return silu(group_norm(input, num_groups, weight, bias, eps, layout))


@group_norm_silu.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((1, 6, 2, 2), 4), ShapeError, "6 channels do not divide into 4 groups")


@group_norm_silu.samples
def _() -> Iterator[Sample]:
    yield sample((2, 6, 3, 2), 3, (6,), (6,))
    yield sample((2, 3, 2, 6), 2, (6,), (6,), 1e-3, layout="NHWC")


# ---- our kernels (norm.cu) -----------------------------------------------------------------------------


def _group_condition(input: Array, num_groups: int, weight: Array | None, bias: Array | None, layout: str) -> str:
    if layout != "NHWC" or weight is None or bias is None:
        return "only channels-last with weight and bias"
    if num_groups < 1 or input.shape[-1] % num_groups or input.size == 0:
        return "channels do not divide into groups, or there are none"
    if not weight.shape == bias.shape == input.shape[-1:]:
        return "weights that are refused"
    if int(input.device.compute_capability) < 80:
        return "asynchronous copies need compute capability 8.0"
    return conditions.same(conditions.AT_MOST_FP32, input, weight, bias) or conditions.packets(input.shape[-1], 3072)


_THREADS = 512  # as in norm.cu
_EACH = 256  # bytes of shared memory that each of them needs: of 99 KiB, the least there is, 3072 channels have as many
_SUMS, _TURNS = 64, 64  # of these for sums, and for what a gradient is added to
_LEAST = 4  # pixels to a thread
_PARTS = 1 << 14  # of groups over all of an image's blocks, each of which reads them all


class _Plan:
    """How norm.cu cuts a (B, P, C) array: a block a multiprocessor, which keeps what it can of `arrays` such."""

    def __init__(self, k: Any, x: Array, groups: int, arrays: int, adds: bool = False) -> None:
        batch, channels = x.shape[0], x.shape[-1]
        pixels, vec = x.size // (batch * channels), channels // 8
        rows = max(1, min(_THREADS, k.shared_bytes // _EACH) // vec)
        images = min(batch, k.multiprocessors)
        wanted = max(1, min(k.multiprocessors // images, _PARTS // groups, pixels // (_LEAST * rows)))
        each = -(-pixels // (wanted * rows))  # pixels to a thread
        self.threads, self.grid = vec * rows, (-(-pixels // (each * rows)), images)
        beside, packets = _SUMS + _TURNS * adds, 8 * x.itemsize * arrays
        most = min(each, (k.shared_bytes // self.threads - beside) // packets)
        self.shared = self.threads * (beside + most * packets)
        self.room = (k.empty((batch, self.grid[0], groups, 2), float32), k.barriers)
        self.sizes = tuple(np.int32(n) for n in (batch, pixels, channels, groups, each * rows, most))

    def launch(self, k: Any, kernel: str, dtype: DType, args: Sequence[Any], *numbers: np.generic) -> None:
        k.launch("norm.cu", kernel, dtype, self.grid, self.threads, (*args, *self.room, *self.sizes, *numbers),
                 self.shared, resident=self.grid[0] > 1)  # fmt: skip


def _group_forward(
    k: Any, input: Array, groups: int, weight: Array, bias: Array, eps: float, silu: bool
) -> tuple[Array, Array, Array]:
    x = k.rows_first(input)
    mean, rstd = (k.empty((x.shape[0], 1, groups, 1), float32) for _ in range(2))
    y = k.empty(x.shape, x.dtype)
    args = (x, weight, bias, mean, rstd, y)
    _Plan(k, x, groups, 1).launch(k, "group_norm", x.dtype, args, np.float32(eps), np.int32(silu))
    return y, mean, rstd


def _sum_of(k: Any, plus: Plus, x: Array) -> tuple[Array, Array | np.intp]:
    """Where the input's gradient goes, and the one it is added to, or a null pointer."""
    held = plus.get("input")
    if held is None:
        return k.empty(x.shape, x.dtype), np.intp(0)
    array = k.rows_first(held.array)
    return array if held.owned and array is held.array else k.empty(x.shape, x.dtype), array


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a gradient is computed from; `silu` says whether one came after the norm."""

    input: Array
    weight: Array
    bias: Array
    mean: Array
    rstd: Array
    silu: bool


def _group_gradients(
    k: Any, g: Array, saved: _Saved, needs: frozenset[str], plus: Plus
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients of input, weight and bias, those of the latter two out of the sums that the input's needs."""
    x, g, groups = k.rows_first(saved.input), k.rows_first(g), saved.mean.shape[2]
    plan, sides = _Plan(k, x, groups, 2, "input" in plus), [n for n in ("bias", "weight") if n in needs]
    channels = k.empty((x.shape[0] * plan.grid[0], 2 * x.shape[-1]), float32) if sides else np.intp(0)
    dx, held = _sum_of(k, plus, x) if "input" in needs else (None, np.intp(0))
    args = (x, g, saved.weight, saved.bias, saved.mean, saved.rstd, held, np.intp(0) if dx is None else dx, channels)
    plan.launch(k, "group_norm_gradient", x.dtype, args, np.int32(saved.silu))
    made = dict(zip(("bias", "weight"), _channel_sums(k, channels), strict=True)) if sides else {}
    for name in plus.keys() & made.keys():
        added = {"made": made[name], "held": plus[name].array}
        made[name] = k.elementwise(("made + held",), added, (float32,))[0]
    return dx, made.get("weight"), made.get("bias")


def _channel_sums(k: Any, channels: Array) -> tuple[Array, Array]:
    """What every block found of the channels, two values each, added up."""
    whole = k.columns([Reduction("sum", "each")], Operands({"each": channels}), Extent(1, *channels.shape), float32)
    first, second = whole[0].reshape(2, -1)
    return first, second


@group_norm.cuda("norm.cu", when=_group_condition)
def _(
    k: Any, input: Array, num_groups: int, weight: Array, bias: Array, eps: float, layout: str
) -> tuple[Array, Array, Array]:
    return _group_forward(k, input, num_groups, weight, bias, eps, False)


@group_norm.cuda_vjp("norm.cu", "input", "weight", "bias", when=_group_condition)
def _(
    k: Any, g: Array, input: Array, weight: Array, bias: Array, mean: Array, rstd: Array, needs: frozenset[str],
    plus: Plus,
) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
    return _group_gradients(k, g, _Saved(input, weight, bias, mean, rstd, False), needs, plus)


@group_norm_silu.cuda("norm.cu", when=_group_condition)
def _(
    k: Any, input: Array, num_groups: int, weight: Array, bias: Array, eps: float, layout: str
) -> tuple[Array, Array, Array]:
    return _group_forward(k, input, num_groups, weight, bias, eps, True)


@group_norm_silu.cuda_vjp("norm.cu", "input", "weight", "bias", when=_group_condition)
def _(
    k: Any, g: Array, input: Array, weight: Array, bias: Array, mean: Array, rstd: Array, needs: frozenset[str],
    plus: Plus,
) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
    return _group_gradients(k, g, _Saved(input, weight, bias, mean, rstd, True), needs, plus)


for _norm in (group_norm, group_norm_silu):

    @_norm.large_samples
    def _() -> Iterator[Sample]:
        yield sample((2, 32, 32, 320), 32, (320,), (320,), layout="NHWC")
        yield sample((1, 17, 9, 1920), 32, (1920,), (1920,), 1e-6, layout="NHWC")
        yield sample((3, 5, 7, 2560), 32, (2560,), (2560,), layout="NHWC")
