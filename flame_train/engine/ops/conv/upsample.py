"""Images twice their size or more, each pixel repeated."""

from __future__ import annotations

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, compute_dtype
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ..common import conditions


@primitive(torch=None, data_movement=True)
def upsample_nearest(xp: Namespace, input: Array, scale_factor: int = 2, layout: str = "NCHW") -> Array:
    """Each pixel repeated scale_factor times in both directions (torch's interpolate, mode="nearest")"""
    if input.ndim != 4:
        raise ShapeError(f"upsample_nearest: expected a 4-D input, got {tuple(input.shape)}")
    h, w = (2, 3) if layout == "NCHW" else (1, 2)
    return xp.repeat(xp.repeat(input, scale_factor, axis=h), scale_factor, axis=w)


@upsample_nearest.vjp("input")
def _(xp: Namespace, g: Array, scale_factor: int, layout: str) -> Array:
    n = scale_factor
    if layout == "NCHW":
        b, c, h, w = g.shape
        return xp.sum(g.reshape(b, c, h // n, n, w // n, n), axis=(3, 5), dtype=compute_dtype(g.dtype))
    b, h, w, c = g.shape
    return xp.sum(g.reshape(b, h // n, n, w // n, n, c), axis=(2, 4), dtype=compute_dtype(g.dtype))


def _doubled(input: Array, scale_factor: int, layout: str) -> str:
    """Says why our own kernel is not used; "" if it is."""
    if layout != "NHWC" or scale_factor != 2 or input.ndim != 4 or input.size == 0:
        return "only channels-last, twice the size"
    return conditions.same(conditions.AT_MOST_FP32, input)


@upsample_nearest.cuda("copies", when=_doubled)
def _(k: Launcher, input: Array) -> Array:
    b, h, w, c = input.shape
    made = k.empty((b, h, 2, w, 2, c), input.dtype)
    k.copy([made], [input[:, :, None, :, None]])
    return made.reshape(b, 2 * h, 2 * w, c)


@upsample_nearest.cuda_vjp("generated", "input", when=_doubled)
def _(k: Launcher, g: Array) -> Array:
    four = {f"g{i}{j}": g[:, i::2, j::2] for i in range(2) for j in range(2)}
    return k.elementwise((" + ".join(four),), four, (g.dtype,))[0]


upsample_nearest.errors(ErrorSample(sample((2, 3, 4)), ShapeError, "upsample_nearest: expected a 4-D input"))

upsample_nearest.samples(
    sample((2, 3, 2, 3)), sample((1, 2, 3, 4), 3, layout="NHWC"), sample((2, 3, 2, 5), layout="NHWC")
)

upsample_nearest.perf_samples(sample((2, 9, 7, 64), layout="NHWC"))
