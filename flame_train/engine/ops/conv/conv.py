"""Convolution in NCHW or NHWC, whose weights are always (out, in, kh, kw), and upsampling to the nearest."""

from __future__ import annotations

from collections.abc import Iterator

from ....errors import ShapeError
from ...backend.cuda.launcher import Launcher
from ...backend.cuda.libraries.cudnn_plan import Size, Steps
from ...dtype import Array, compute_dtype
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ..common import conditions
from ..common.channel_stats import channel_sums, no_planes_of_channels
from ..common.dims import Shape, sum_to_channels
from . import conv_launch
from .conv_launch import no_cudnn, no_cudnn_input_gradient
from .geometry import Conv, Padding, Pair, from_nhwc, nhwc_shape, out_size, steps, to_nhwc, under


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


_PATCH_BYTES = 1 << 26  # the unfolded patches of one block of rows stay below this


def _framed(xp: Namespace, x: Array, p: Size) -> Array:
    """Surrounds x (B, H, W, C) with zeros, where NumPy's own pad takes as long as a small convolution."""
    b, h, w, channels = x.shape
    made = xp.zeros((b, h + 2 * p[0], w + 2 * p[1], channels), x.dtype)
    made[:, p[0] : p[0] + h, p[1] : p[1] + w] = x
    return made


def _row_blocks(batch: int, oh: int, ow: int, width: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Ranges of output rows whose patches fit the block size."""
    row = max(1, batch * ow * width * itemsize)
    step = max(1, _PATCH_BYTES // row)
    return ((r, min(r + step, oh)) for r in range(0, oh, step))


def _patches(xp: Namespace, padded: Array, r0: int, r1: int, ow: int, kernel: Size, by: Steps) -> Array:
    """Returns the patches under output rows [r0, r1) as (B, rows, ow, kh, kw, C), copied."""
    rows = [under(r0, r1, i, by.stride[0], by.dilation[0]) for i in range(kernel[0])]
    columns = [under(0, ow, j, by.stride[1], by.dilation[1]) for j in range(kernel[1])]
    return xp.stack([padded[:, r, c] for r in rows for c in columns], axis=3)


def _plain(weight_shape: Shape, by: Steps, groups: int) -> bool:
    """Returns True if the convolution is a product of each pixel with one matrix."""
    return weight_shape[2:] == (1, 1) and by.stride == (1, 1) and by.padding == (0, 0) and groups == 1


@primitive(torch="nn.functional.conv2d")
def conv2d(
    xp: Namespace,
    input: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Pair = 1,
    padding: Padding = 0,
    dilation: Pair = 1,
    groups: int = 1,
    layout: str = "NCHW",
) -> Array:
    """Cross-correlation of input with weight (out, in / groups, kh, kw), plus bias

    Args:
        input: (B, in, H, W), or (B, H, W, in) in NHWC; without B the result has none.
        weight: (out, in / groups, kh, kw).
        stride, padding, dilation: pixels, one number or (h, w); padding may be "same" or "valid".
        groups: groups of channels that do not mix.

    Returns:
        (B, out, oh, ow), or (B, oh, ow, out).
    """
    check_conv2d(input, weight, groups, layout)
    check_bias("conv2d", bias, weight.shape[0])
    x = to_nhwc(input, layout)
    by = steps(weight.shape, stride, padding, dilation)
    out_ch, in_ch, kh, kw = weight.shape
    b, oh, ow = x.shape[0], *output_size(x.shape, (kh, kw), by)
    if _plain(weight.shape, by, groups):
        y = xp.matmul(x.reshape(-1, in_ch), weight.reshape(out_ch, in_ch).T).reshape(b, oh, ow, out_ch)
        return from_nhwc(xp, y if bias is None else y + bias, layout)
    padded = _framed(xp, x, by.padding) if any(by.padding) else x
    y = xp.empty((b, oh, ow, out_ch), x.dtype)
    for r0, r1 in _row_blocks(b, oh, ow, kh * kw * x.shape[3], x.itemsize):
        cols = _patches(xp, padded, r0, r1, ow, (kh, kw), by).reshape(-1, kh * kw, x.shape[3])
        for ci, co in _groups(in_ch, out_ch, groups):
            flat = cols[:, :, ci].reshape(-1, kh * kw * in_ch)
            kernel = weight[co].transpose(2, 3, 1, 0).reshape(kh * kw * in_ch, out_ch // groups)
            y[:, r0:r1, :, co] = xp.matmul(flat, kernel).reshape(b, r1 - r0, ow, out_ch // groups)
    return from_nhwc(xp, y if bias is None else y + bias, layout)


def output_size(nhwc: Shape, kernel: Size, by: Steps) -> Size:
    """Returns the output's rows and columns. Raises ShapeError where there would be none."""
    s, p, d = by
    oh, ow = (out_size(nhwc[1 + i], kernel[i], s[i], p[i], d[i]) for i in (0, 1))
    if min(oh, ow) < 1:
        (kh, kw), (h, w) = kernel, nhwc[1:3]
        raise ShapeError(f"conv2d: a kernel of {kh} x {kw} does not fit into {h} x {w} pixels padded by {p}")
    return oh, ow


def _groups(in_ch: int, out_ch: int, groups: int) -> list[tuple[slice, slice]]:
    """Returns each group's (input channels, output channels)."""
    o = out_ch // groups
    return [(slice(g * in_ch, (g + 1) * in_ch), slice(g * o, (g + 1) * o)) for g in range(groups)]


def check_conv2d(input: Array, weight: Array, groups: int, layout: str) -> None:
    """Raises ShapeError unless both are 4-D and the input has the channels that the weight takes."""
    if input.ndim != 4 or weight.ndim != 4:
        raise ShapeError(f"conv2d: expected 4-D input and weight, got {tuple(input.shape)} and {tuple(weight.shape)}")
    if groups < 1:
        raise ShapeError(f"conv2d: expected at least one group, got {groups}")
    channels = input.shape[1 if layout == "NCHW" else 3]
    if channels != weight.shape[1] * groups or weight.shape[0] % groups:
        raise ShapeError(
            f"conv2d: input {tuple(input.shape)} ({layout}) has {channels} channels but weight {tuple(weight.shape)} "
            f"with groups={groups} takes {weight.shape[1] * groups}"
        )


def check_bias(op: str, bias: Array | None, channels: int) -> None:
    """Raises ShapeError unless there is a value for each of the result's channels."""
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ShapeError(f"{op}: expected a bias of shape ({channels},), got {tuple(bias.shape)}")


def input_gradient(xp: Namespace, g: Array, input_shape: Shape, weight: Array, conv: Conv) -> Array:
    """Returns the gradient of conv2d with respect to its input, of `input_shape`; conv_transpose2d computes it too.

    Args:
        g: (B, out, oh, ow), or (B, oh, ow, out) in NHWC.
        input_shape: the input's shape.
        weight: (out, in / groups, kh, kw).
        conv: the convolution's other arguments.
    """
    g = to_nhwc(g, conv.layout)
    by = s, p, d = conv.steps(weight.shape)
    out_ch, in_ch, kh, kw = weight.shape
    b, h, w, channels = nhwc_shape(input_shape, conv.layout)
    oh, ow = g.shape[1:3]
    if _plain(weight.shape, by, conv.groups) and (oh, ow) == (h, w):
        dx = xp.matmul(g.reshape(-1, out_ch), weight.reshape(out_ch, in_ch))
        return from_nhwc(xp, dx.reshape(b, h, w, channels), conv.layout)
    dx = xp.zeros((b, h + 2 * p[0], w + 2 * p[1], channels), g.dtype)
    for r0, r1 in _row_blocks(b, oh, ow, kh * kw * channels, g.itemsize):
        flat = g[:, r0:r1].reshape(-1, out_ch)
        for ci, co in _groups(in_ch, out_ch, conv.groups):
            kernel = weight[co].transpose(0, 2, 3, 1).reshape(-1, kh * kw * in_ch)
            taps = xp.matmul(flat[:, co], kernel).reshape(b, r1 - r0, ow, kh, kw, in_ch)
            for i, j in ((i, j) for i in range(kh) for j in range(kw)):
                rows, columns = under(r0, r1, i, s[0], d[0]), under(0, ow, j, s[1], d[1])
                dx[:, rows, columns, ci] += taps[:, :, :, i, j]
    return from_nhwc(xp, dx[:, p[0] : p[0] + h, p[1] : p[1] + w], conv.layout)


def weight_gradient(xp: Namespace, g: Array, input: Array, weight_shape: Shape, conv: Conv) -> Array:
    """Returns the gradient of conv2d with respect to its weight, of `weight_shape`.

    Args:
        g: (B, out, oh, ow), or (B, oh, ow, out) in NHWC.
        input: (B, in, H, W), or (B, H, W, in).
        weight_shape: (out, in / groups, kh, kw).
        conv: the convolution's other arguments.
    """
    g, x = to_nhwc(g, conv.layout), to_nhwc(input, conv.layout)
    by = conv.steps(weight_shape)
    out_ch, in_ch, kh, kw = weight_shape
    b, oh, ow = g.shape[:3]
    padded = _framed(xp, x, by.padding)
    dw = xp.zeros((out_ch, kh * kw, in_ch), g.dtype)
    for r0, r1 in _row_blocks(b, oh, ow, kh * kw * x.shape[3], x.itemsize):
        cols = _patches(xp, padded, r0, r1, ow, (kh, kw), by).reshape(-1, kh * kw, x.shape[3])
        rows = g[:, r0:r1].reshape(-1, out_ch)
        for ci, co in _groups(in_ch, out_ch, conv.groups):
            dw[co] += xp.matmul(rows[:, co].T, cols[:, :, ci].reshape(-1, kh * kw * in_ch)).reshape(-1, kh * kw, in_ch)
    return dw.reshape(out_ch, kh, kw, in_ch).transpose(0, 3, 1, 2)


conv2d.vjp("input")(input_gradient)
conv2d.vjp("weight")(weight_gradient)
conv2d.vjp("bias")(sum_to_channels)


conv2d.samples(
    sample((2, 3, 5, 4), (4, 3, 3, 3), (4,), padding=1),
    sample((1, 3, 6, 5), (2, 3, 3, 3), None, 2, 1),
    sample((1, 4, 5, 5), (6, 2, 3, 2), (6,), (1, 2), (1, 0), (2, 1), 2),
    sample((2, 5, 4, 3), (4, 3, 1, 1), (4,), layout="NHWC"),
    sample((1, 2, 5, 6), (3, 2, 3, 1), None, padding="same", dilation=(2, 1)),
    sample((1, 2, 5, 6), (3, 2, 2, 3), (3,), 2, "valid"),
    sample((1, 5, 4, 3), (4, 3, 3, 3), (4,), 2, 1, layout="NHWC"),
)
conv2d.batched_dims = 4
conv2d.errors(
    ErrorSample(sample((1, 3, 4, 4), (2, 4, 3, 3)), ShapeError, "has 3 channels but weight .* takes 4"),
    ErrorSample(sample((4, 4), (2, 3, 3, 3)), ShapeError, "expected 4-D input and weight"),
    ErrorSample(sample((1, 3, 4, 4), (2, 3, 3, 3), (1,)), ShapeError, r"a bias of shape \(2,\), got \(1,\)"),
    ErrorSample(sample((1, 3, 4, 4), (2, 3, 3, 3), stride=0), ShapeError, "at least 1, got 0 and 1"),
    ErrorSample(sample((1, 3, 4, 4), (2, 3, 3, 3), groups=0), ShapeError, "at least one group, got 0"),
    ErrorSample(sample((1, 3, 2, 4), (2, 3, 3, 3)), ShapeError, "kernel of 3 x 3 does not fit"),
    ErrorSample(sample((1, 3, 4, 4), (2, 3, 2, 2), None, 1, "same"), ShapeError, "a kernel that has a middle"),
    ErrorSample(sample((1, 3, 4, 4), (2, 3, 2, 2), None, 1.5), ShapeError, "a whole number, or two .* got 1.5"),
    ErrorSample(sample((1, 3, 4, 4), (2, 3, 2, 2), None, (1, 2, 3)), ShapeError, r"got \(1, 2, 3\)"),
    ErrorSample(sample((1, 3, 4, 4), (2, 3, 2, 2), None, ()), ShapeError, r"got \(\)"),
)


# ---- kernels -------------------------------------------------------------------------------------------


@conv2d.cuda("cudnn", when=no_cudnn)
def _(k: Launcher, input: Array, weight: Array, bias: Array | None, conv: Conv) -> Array:
    check_conv2d(input, weight, conv.groups, conv.layout)
    check_bias("conv2d", bias, weight.shape[0])
    sizes = output_size(nhwc_shape(input.shape, conv.layout), weight.shape[2:], conv.steps(weight.shape))
    return conv_launch.forward(k, input, weight, bias, conv, sizes)


conv2d.cuda_vjp("cudnn", "input", when=no_cudnn_input_gradient)(conv_launch.input_gradient)
conv2d.cuda_vjp("cudnn", "weight", when=no_cudnn)(conv_launch.weight_gradient)
conv2d.cuda_vjp("generated", "bias", when=no_planes_of_channels)(channel_sums)


conv2d.perf_samples(
    sample((2, 16, 16, 64), (96, 64, 3, 3), (96,), 1, 1, layout="NHWC"),
    sample((1, 32, 24, 4), (64, 4, 3, 3), (64,), 1, 1, layout="NHWC"),
    sample((1, 32, 24, 64), (4, 64, 3, 3), (4,), 1, 1, layout="NHWC"),
    sample((2, 17, 16, 64), (64, 64, 3, 3), (64,), 2, 1, layout="NHWC"),
    sample((2, 64, 9, 8), (32, 64, 1, 1), None),
    sample((2, 32, 17, 16), (48, 32, 3, 3), (48,), 1, 1),
)
