"""Convolution run backwards, and convolution of one-dimensional signals."""

from __future__ import annotations

from ...errors import ShapeError
from ..backend.cuda.launcher import Launcher
from ..dtype import Array
from ..namespace import Namespace
from ..op import ErrorSample, composite, primitive, sample
from ..ops.common.channel_stats import channel_sums, no_planes_of_channels
from ..ops.common.conditions import AT_MOST_FP32, same
from ..ops.common.dims import Shape, sum_to_channels
from ..ops.conv import conv_launch
from ..ops.conv.conv import check_bias, conv2d, input_gradient, weight_gradient
from ..ops.conv.conv_launch import no_cudnn, no_cudnn_input_gradient
from ..ops.conv.geometry import Conv, Pair, image_size, pair, steps
from ..tensors.tensor import Tensor


@primitive(torch="nn.functional.conv_transpose2d")
def conv_transpose2d(
    xp: Namespace,
    input: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    output_padding: Pair = 0,
    groups: int = 1,
    dilation: Pair = 1,
    layout: str = "NCHW",
) -> Array:
    """conv2d's gradient with respect to its input, as an op; weight is (in, out / groups, kh, kw)

    Args:
        input, bias, stride, padding, groups, dilation, layout: as in `conv2d`.
        weight: (in, out / groups, kh, kw).
        output_padding: pixels added to the output at its ends.

    Returns:
        (B, out, oh, ow), or (B, oh, ow, out).
    """
    conv = Conv(stride, padding, dilation, groups, layout)
    shape = _out_shape(input, weight, output_padding, conv)
    check_bias("conv_transpose2d", bias, weight.shape[1] * groups)
    y = input_gradient(xp, input, shape, weight, conv)
    if bias is None:
        return y
    return y + (bias if layout == "NHWC" else bias.reshape(-1, 1, 1))


def _out_shape(input: Array, weight: Array, extra: Pair, conv: Conv) -> tuple[int, ...]:
    channel, groups = 1 if conv.layout == "NCHW" else 3, conv.groups
    fits = input.ndim == weight.ndim == 4 and input.shape[channel] == weight.shape[0]
    if not fits or groups < 1 or weight.shape[0] % groups:
        raise ShapeError(
            f"conv_transpose2d: input {tuple(input.shape)} ({conv.layout}) does not fit weight {tuple(weight.shape)} "
            f"(in, out / groups, kh, kw) with groups={groups}"
        )
    h, w = image_size(input.shape, conv.layout)
    s2, p2, d2 = steps(weight.shape, conv.stride, pair(conv.padding), conv.dilation, "conv_transpose2d")
    sizes = [
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, k, s, p, e, d in zip((h, w), weight.shape[2:], s2, p2, pair(extra), d2, strict=True)
    ]
    if min(sizes) < 1:
        raise ShapeError(f"conv_transpose2d: {h} x {w} pixels would become {sizes}; expected less padding")
    if any(e >= max(s, d) for e, s, d in zip(pair(extra), s2, d2, strict=True)):
        raise ShapeError(f"conv_transpose2d: output_padding {extra} must be below stride {conv.stride} or dilation")
    out = weight.shape[1] * groups
    return (input.shape[0], out, *sizes) if conv.layout == "NCHW" else (input.shape[0], *sizes, out)


@conv_transpose2d.vjp("input")
def _(xp: Namespace, g: Array, input_shape: Shape, weight: Array, conv: Conv) -> Array:
    dx = conv2d.fn(xp, g, weight, None, conv.stride, conv.padding, conv.dilation, conv.groups, conv.layout)
    return dx[tuple(slice(n) for n in input_shape)]  # a large output_padding leaves room for further kernels


@conv_transpose2d.vjp("weight")
def _(xp: Namespace, g: Array, input: Array, weight_shape: Shape, conv: Conv) -> Array:
    return weight_gradient(xp, input, g, weight_shape, conv)


conv_transpose2d.vjp("bias")(sum_to_channels)

conv_transpose2d.samples(
    sample((2, 3, 4, 3), (3, 2, 3, 3), (2,)),
    sample((1, 3, 3, 4), (3, 2, 3, 2), None, 2, 1, 1),
    sample((1, 4, 3, 3), (4, 2, 2, 3), (4,), (2, 1), (0, 1), (1, 0), 2, (1, 2)),
    sample((1, 3, 4, 4), (4, 3, 3, 3), (3,), 2, 1, 1, layout="NHWC"),
    sample((2, 3, 2, 3), (3, 2, 1, 1), (2,), 1, 0, 1, 1, 2),
)

conv_transpose2d.batched_dims = 4

conv_transpose2d.errors(
    ErrorSample(sample((1, 3, 4, 4), (2, 3, 3, 3)), ShapeError, "does not fit weight"),
    ErrorSample(sample((1, 3, 4, 4), (3, 2, 3, 3), None, 2, 0, 2), ShapeError, "must be below stride"),
    ErrorSample(sample((1, 3, 1, 4), (3, 2, 1, 3), None, 1, 1), ShapeError, r"would become \[-1, 4\]"),
    ErrorSample(sample((1, 3, 4, 4), (3, 2, 3, 3), None, 0), ShapeError, "stride and dilation of at least 1"),
    ErrorSample(sample((1, 3, 4, 4), (3, 2, 3, 3), None, 1, -1), ShapeError, "padding of at least 0, got .-1, -1."),
    ErrorSample(
        sample((1, 3, 4, 4), (3, 2, 3, 3), None, 1, "same"), ShapeError, "a whole number, or two .* got 'same'"
    ),
    ErrorSample(sample((1, 3, 4, 4), (3, 2, 3, 3), (1,)), ShapeError, r"a bias of shape \(2,\), got \(1,\)"),
)


def _overlapping(
    input: Array, weight: Array, stride: Pair, padding: Pair, output_padding: Pair, groups: int, dilation: Pair
) -> str:
    """Says why the result is not one matrix product, each of its pixels coming from one of the input's."""
    if weight.ndim != 4 or weight.shape[2:] != pair(stride) or groups != 1:
        return "kernels that overlap or leave gaps, or groups"
    if any((*pair(padding), *pair(output_padding))) or pair(dilation) != (1, 1):
        return "padded or dilated"
    return "nothing to convolve" if 0 in (*input.shape, *weight.shape) else same(AT_MOST_FP32, input, weight)


def _channels_last(layout: str) -> str:
    return "" if layout == "NCHW" else "channels last"


def _extended(output_padding: Pair, stride: Pair) -> str:
    """Says why cuDNN cannot take the sizes: a convolution of the result must have the input's size."""
    extends = any(e >= s for e, s in zip(pair(output_padding), pair(stride), strict=True))
    return "an output padding of a stride or more" if extends else ""


def _tiles(shape: Shape, weight_shape: Shape) -> Shape:
    """(B, h, w, out, kh, kw): the result's sizes, of an input of `shape` in NCHW."""
    return shape[0], *shape[2:], *weight_shape[1:]


def _pixels(k: Launcher, x: Array) -> Array:
    """Images (B, C, h, w) as (C, B * h * w)."""
    return k.contiguous(x.transpose(1, 0, 2, 3)).reshape(x.shape[1], -1)


@conv_transpose2d.cuda("product", when=(_overlapping, _channels_last))
def _(k: Launcher, input: Array, weight: Array, bias: Array | None, output_padding: Pair, conv: Conv) -> Array:
    shape = _out_shape(input, weight, output_padding, conv)
    check_bias("conv_transpose2d", bias, weight.shape[1])
    b, h, w, out, kh, kw = _tiles(input.shape, weight.shape)
    y = k.matmul(k.contiguous(weight).reshape(len(weight), -1).T, _pixels(k, input))
    made = k.empty((b, out, h, kh, w, kw), y.dtype)
    seen = y.reshape(out, kh, kw, b, h, w).transpose(3, 0, 4, 1, 5, 2)
    shift = 0.0 if bias is None else bias.reshape(1, -1, 1, 1, 1, 1)
    k.elementwise(("y + bias",), {"y": seen, "bias": shift}, (y.dtype,), out=(made,))
    return made.reshape(shape)


@conv_transpose2d.cuda_vjp("product", "input", "weight", when=(_overlapping, _channels_last))
def _(k: Launcher, g: Array, input: Array, weight: Array, needs: frozenset[str]) -> tuple[Array | None, Array | None]:
    b, h, w, out, kh, kw = _tiles(input.shape, weight.shape)
    tiles = k.contiguous(g.reshape(b, out, h, kh, w, kw).transpose(1, 3, 5, 0, 2, 4)).reshape(out * kh * kw, -1)
    dx = dw = None
    if "input" in needs:
        pixels = k.matmul(k.contiguous(weight).reshape(len(weight), -1), tiles)
        dx = k.contiguous(pixels.reshape(-1, b, h, w).transpose(1, 0, 2, 3))
    if "weight" in needs:
        dw = k.matmul(_pixels(k, input), tiles.T).reshape(weight.shape)
    return dx, dw


@conv_transpose2d.cuda("cudnn", when=(no_cudnn_input_gradient, _extended))
def _(k: Launcher, input: Array, weight: Array, bias: Array | None, output_padding: Pair, conv: Conv) -> Array:
    shape = _out_shape(input, weight, output_padding, conv)
    check_bias("conv_transpose2d", bias, weight.shape[1])
    y = conv_launch.input_gradient(k, input, shape, weight, conv)
    if bias is None:
        return y
    shift = bias if conv.layout == "NHWC" else bias.reshape(-1, 1, 1)
    return k.elementwise(("y + bias",), {"y": y, "bias": shift}, (y.dtype,), out=(y,))[0]


@conv_transpose2d.cuda_vjp("cudnn", "input", when=(no_cudnn, _extended))
def _(k: Launcher, g: Array, input_shape: Shape, weight: Array, conv: Conv) -> Array:
    return conv_launch.forward(k, g, weight, None, conv, image_size(input_shape, conv.layout))


@conv_transpose2d.cuda_vjp("cudnn", "weight", when=(no_cudnn, _extended))
def _(k: Launcher, g: Array, input: Array, weight_shape: Shape, conv: Conv) -> Array:
    return conv_launch.weight_gradient(k, input, g, weight_shape, conv)


conv_transpose2d.cuda_vjp("generated", "bias", when=no_planes_of_channels)(channel_sums)

conv_transpose2d.perf_samples(
    sample((2, 24, 17, 16), (24, 32, 2, 2), (32,), 2),
    sample((2, 24, 9, 8), (24, 19, 3, 2), None, (3, 2)),
    sample((2, 24, 17, 16), (24, 32, 3, 3), (32,), 2, 1, 1),
    sample((2, 17, 16, 24), (24, 32, 4, 4), (32,), 2, 1, layout="NHWC"),
)


@composite(torch="nn.functional.conv1d")
def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int] = 1,
    padding: int | tuple[int] | str = 0,
    dilation: int | tuple[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Cross-correlation of input (B, in, L) with weight (out, in / groups, k), plus bias

    Args:
        input: (B, in, L); without B the result has none.
        weight: (out, in / groups, k).
        bias: (out,), or None.
        stride, padding, dilation: elements; padding may be "same" or "valid".
        groups: groups of channels that do not mix.

    Returns:
        (B, out, length).

    Raises:
        ShapeError: an input or a weight that is not 3-D, or numbers out of range.
    """
    if input.ndim != 3 or weight.ndim != 3:
        raise ShapeError(
            f"conv1d: expected input (B, in, L) and weight (out, in, k), got {input.shape}, {weight.shape}"
        )
    s, d = _along("stride", stride), _along("dilation", dilation)
    around = padding if isinstance(padding, str) else (0, _along("padding", padding))
    kernel = weight.unsqueeze(2)
    steps(kernel.shape, (1, s), around, (1, d), "conv1d")
    y: Tensor = conv2d(input.unsqueeze(2), kernel, bias, (1, s), around, (1, d), groups)
    return y.squeeze(2)


def _along(name: str, value: int | tuple[int]) -> int:
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(given) != 1 or not isinstance(given[0], int):
        raise ShapeError(f"conv1d: expected a whole number for {name}, got {value!r}")
    return given[0]


conv1d.samples(
    sample((2, 3, 6), (4, 3, 3), (4,), padding=1),
    sample((1, 4, 7), (6, 2, 2), None, 2, 1, 2, 2),
    sample((1, 2, 5), (3, 2, 3), (3,), padding="same"),
)

conv1d.batched_dims = 3

conv1d.errors(
    ErrorSample(sample((6,), (4, 3, 3)), ShapeError, r"expected input \(B, in, L\)"),
    ErrorSample(sample((1, 3, 6), (4, 2, 3)), ShapeError, "has 3 channels but weight .* takes 2"),
    ErrorSample(sample((1, 3, 6), (4, 3, 3), None, (1, 2)), ShapeError, r"number for stride, got \(1, 2\)"),
    ErrorSample(sample((1, 3, 6), (4, 3, 3), None, 1, -1), ShapeError, "conv1d: expected padding of at least 0"),
)
