"""The public operations, as torch.nn.functional and torch. One line an op: the list to grep."""

from __future__ import annotations

from .ops.attention import scaled_dot_product_attention
from .ops.conv import conv2d, upsample_nearest
from .ops.diffusion import gated_add, geglu, timestep_embedding
from .ops.elementwise import (
    abs,
    add,
    cast,
    clamp,
    clone,
    cos,
    div,
    eq,
    erf,
    exp,
    ge,
    gelu,
    gt,
    isfinite,
    le,
    log,
    lt,
    maximum,
    minimum,
    mul,
    neg,
    pow,
    quick_gelu,
    reciprocal,
    relu,
    rsqrt,
    rsub,
    sigmoid,
    silu,
    sin,
    sqrt,
    square,
    sub,
    tanh,
    where,
)
from .ops.index import embedding, take_along_dim
from .ops.lora import lora_conv2d, lora_linear
from .ops.loss import mse_loss
from .ops.matmul import linear, matmul
from .ops.norm import group_norm, group_norm_silu, layer_norm
from .ops.reduce import amax, mean, sum, var
from .ops.shape import (
    cat,
    chunk,
    expand,
    flatten,
    flip,
    getitem,
    narrow,
    pad,
    permute,
    reshape,
    split,
    squeeze,
    stack,
    transpose,
    unsqueeze,
)
from .ops.softmax import log_softmax, softmax

__all__ = [
    "abs", "add", "amax", "cast", "cat", "chunk", "clamp", "clone", "conv2d", "cos", "div", "embedding", "eq", "erf",
    "exp", "expand", "flatten", "flip", "gated_add", "ge", "geglu", "gelu", "getitem", "group_norm", "group_norm_silu",
    "gt", "isfinite", "layer_norm", "le", "linear", "log", "log_softmax", "lora_conv2d", "lora_linear", "lt", "matmul",
    "maximum", "mean", "minimum", "mse_loss", "mul", "narrow", "neg", "pad", "permute", "pow", "quick_gelu",
    "reciprocal", "relu", "reshape", "rsqrt", "rsub", "scaled_dot_product_attention", "sigmoid", "silu", "sin",
    "softmax", "split", "sqrt", "square", "squeeze", "stack", "sub", "sum", "take_along_dim", "tanh",
    "timestep_embedding", "transpose", "unsqueeze", "upsample_nearest", "var", "where",
]  # fmt: skip
