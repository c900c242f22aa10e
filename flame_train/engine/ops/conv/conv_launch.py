"""Convolutions and their gradients by cuDNN, whose fast kernels take images in NHWC and weights alike."""

from __future__ import annotations

import math

from ...backend.cuda.launcher import Launcher
from ...backend.cuda.libraries.cudnn_plan import Size
from ...dtype import Array
from ...mode import mode
from ..common import conditions
from ..common.dims import Shape
from .geometry import Conv, nhwc_shape, to_nhwc

_SHORT_CHAIN = 320
"""Terms of an element that cuDNN may add one after the other in fp32."""


def no_cudnn(input: Array, weight: Array, groups: int) -> str:
    """Says why cuDNN is not used; "" if it is."""
    if groups != 1:
        return "grouped convolutions take the reference"
    if 0 in input.shape:
        return "there is nothing to convolve"
    return conditions.same(conditions.AT_MOST_FP32, input, weight)


def no_cudnn_input_gradient(input: Array, weight: Array, groups: int) -> str:
    """As `no_cudnn`, but not in fp32 without TF32 where many terms meet: cuDNN adds all taps and output channels in one
    chain, which rounds more. A LoRA's thin convolution has few.
    """
    terms = math.prod(weight.shape[:1] + weight.shape[2:])
    few = mode().float32_precision == "high" or terms <= _SHORT_CHAIN
    return no_cudnn(input, weight, groups) or ("" if few else conditions.same(conditions.LOW, input))


def _padded(k: Launcher, x: Array, *axes: int) -> Array:
    """Pads x to a multiple of 8 along the axes if it has 16 bits, as tensor cores need."""
    shape = tuple(-(-n // 8) * 8 if i in axes and x.itemsize == 2 else n for i, n in enumerate(x.shape))
    return x if shape == x.shape else k.framed(x, shape, [slice(0, n) for n in x.shape])


def _kernel_memory(k: Launcher, w: Array) -> Array:
    """Returns the weight in memory of the order (out, kh, kw, in), which cuDNN's fast kernels need."""
    return k.contiguous(w.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def _image(k: Launcher, x: Array, layout: str) -> Array:
    """Images as cuDNN takes them: in NHWC, with whole packets of channels."""
    return _padded(k, k.contiguous(to_nhwc(x, layout)), 3)


def _made(k: Launcher, y: Array, channels: int, layout: str) -> Array:
    """Returns the first `channels` of images in NHWC, dense in `layout`."""
    y = y[..., :channels]
    return k.contiguous(y.transpose(0, 3, 1, 2) if layout == "NCHW" else y)


def forward(k: Launcher, input: Array, weight: Array, bias: Array | None, conv: Conv, out: Size) -> Array:
    """Returns the convolution, of `out` pixels.

    Args:
        input, weight, bias: as in `conv2d`.
        conv: its other arguments.
        out: the rows and columns of the result.
    """
    x, w = _image(k, input, conv.layout), _kernel_memory(k, _padded(k, weight, 0, 1))
    y = k.empty((len(x), *out, w.shape[0]), x.dtype)
    shift = None if bias is None else _padded(k, bias.astype(x.dtype, copy=False), 0)
    k.cudnn.conv_forward(x, w, shift, y, conv.steps(weight.shape))
    return _made(k, y, weight.shape[0], conv.layout)


def input_gradient(k: Launcher, g: Array, input_shape: Shape, weight: Array, conv: Conv) -> Array:
    """Returns the gradient of an input."""
    g, w = _image(k, g, conv.layout), _kernel_memory(k, _padded(k, weight, 0, 1))
    dx = k.empty((*nhwc_shape(input_shape, conv.layout)[:3], w.shape[1]), g.dtype)
    k.cudnn.conv_input_gradient(g, w, dx, conv.steps(weight.shape))
    return _made(k, dx, weight.shape[1], conv.layout)


def weight_gradient(k: Launcher, g: Array, input: Array, weight_shape: Shape, conv: Conv) -> Array:
    """Returns the gradient of a weight."""
    out_ch, in_ch, kh, kw = weight_shape
    g, x = _image(k, g, conv.layout), _image(k, input, conv.layout)
    dw = k.empty((g.shape[3], kh, kw, x.shape[3]), g.dtype).transpose(0, 3, 1, 2)
    k.cudnn.conv_weight_gradient(x, g, dw, conv.steps(weight_shape))
    return dw[:out_ch, :in_ch]
