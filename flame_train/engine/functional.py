"""The public operations, as torch.nn.functional and torch. One line an op: the list to grep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .counterparts import FUNCTIONAL, absent
from .ops.attention.attention import scaled_dot_product_attention
from .ops.common.convert import cast, clone
from .ops.conv.adaptive_pool import adaptive_avg_pool2d
from .ops.conv.conv import conv2d
from .ops.conv.conv_transpose import conv1d, conv_transpose2d
from .ops.conv.pool import avg_pool2d, max_pool2d, max_pool2d_with_indices
from .ops.conv.resize import interpolate, upsample_nearest
from .ops.conv.unfold import fold, unfold
from .ops.fused.diffusion import gated_add, geglu, timestep_embedding
from .ops.fused.feed_forward import feed_forward
from .ops.fused.qk_norm_rope import cat_rms_norm
from .ops.fused.scaled_feed_forward import scaled_feed_forward
from .ops.fused.sequences import cat_gelu, layer_norm_modulate
from .ops.indexing.embedding import embedding, index_select, masked_fill, one_hot
from .ops.indexing.gather import gather, scatter, scatter_add, take_along_dim
from .ops.indexing.getitem import getitem, narrow
from .ops.indexing.order import sort, topk
from .ops.linear.dora import dora_gain
from .ops.linear.einsum import einsum
from .ops.linear.hadamard import hadamard_add
from .ops.linear.kron import kron_add
from .ops.linear.lora import lora_conv2d, lora_linear, lora_linears
from .ops.linear.matmul import bmm, linear, linear_add, matmul, outer
from .ops.linear.nf4 import nf4_dequantize, nf4_quantize
from .ops.linear.scaled import scaled_linear
from .ops.linear.scaled_lora import scaled_lora_linears
from .ops.linear.scaled_storage import fp8_quantize, int8_quantize, scaled_dequantize
from .ops.loss.classification import binary_cross_entropy, binary_cross_entropy_with_logits, kl_div
from .ops.loss.cross_entropy import cross_entropy, nll_loss
from .ops.loss.regression import cosine_similarity, huber_loss, l1_loss, mse_loss, smooth_l1_loss
from .ops.norm.batch_norm import batch_norm, batch_norm_inference, batch_norm_train
from .ops.norm.group_norm import cat_group_norm_silu, group_norm, group_norm_silu
from .ops.norm.instance_norm import instance_norm
from .ops.norm.layer_norm import layer_norm
from .ops.norm.rms_norm import rms_norm, rms_norm_rope, rope
from .ops.norm.softmax import log_softmax, logsumexp, softmax, softmin
from .ops.pointwise.activations import elu, gelu, hardswish, leaky_relu, mish, quick_gelu, relu, silu, softplus, swiglu
from .ops.pointwise.arithmetic import abs, add, div, lerp, mul, neg, pow, reciprocal, rsub, sign, square, sub
from .ops.pointwise.combined import addcdiv, addcmul, glu
from .ops.pointwise.comparison import (
    eq,
    ge,
    gt,
    isfinite,
    le,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    lt,
    ne,
)
from .ops.pointwise.dropout import dropout
from .ops.pointwise.rectifiers import celu, hardsigmoid, hardtanh, logsigmoid, prelu, relu6, selu, softsign
from .ops.pointwise.unary import (
    ceil,
    cos,
    erf,
    exp,
    expm1,
    floor,
    log,
    log1p,
    round,
    rsqrt,
    sigmoid,
    sin,
    sqrt,
    tanh,
    trunc,
)
from .ops.pointwise.where_clamp import clamp, maximum, minimum, where
from .ops.reduction.cumsum import cumsum
from .ops.reduction.min_max import amax, amin, argmax, argmin, max, max_dim, min, min_dim
from .ops.reduction.normalize import normalize
from .ops.reduction.prod import prod
from .ops.reduction.reduce import mean, norm, std, sum, var
from .ops.reduction.truth import all, any
from .ops.shape.concat import cat, chunk, split, stack, unbind
from .ops.shape.pixels import pixel_shuffle, pixel_unshuffle
from .ops.shape.rearrange import flip, pad, repeat, repeat_interleave, roll
from .ops.shape.reshape import expand, flatten, movedim, permute, reshape, squeeze, t, transpose, unsqueeze, view
from .ops.shape.triangle import tril, triu

__all__ = [
    "abs",
    "adaptive_avg_pool2d",
    "add",
    "addcdiv",
    "addcmul",
    "all",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "avg_pool2d",
    "batch_norm",
    "batch_norm_inference",
    "batch_norm_train",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "bmm",
    "cast",
    "cat",
    "cat_gelu",
    "cat_group_norm_silu",
    "cat_rms_norm",
    "ceil",
    "celu",
    "chunk",
    "clamp",
    "clone",
    "conv1d",
    "conv2d",
    "conv_transpose2d",
    "cos",
    "cosine_similarity",
    "cross_entropy",
    "cumsum",
    "div",
    "dora_gain",
    "dropout",
    "einsum",
    "elu",
    "embedding",
    "eq",
    "erf",
    "exp",
    "expand",
    "expm1",
    "feed_forward",
    "flatten",
    "flip",
    "floor",
    "fold",
    "fp8_quantize",
    "gated_add",
    "gather",
    "ge",
    "geglu",
    "gelu",
    "getitem",
    "glu",
    "group_norm",
    "group_norm_silu",
    "gt",
    "hadamard_add",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "huber_loss",
    "index_select",
    "instance_norm",
    "int8_quantize",
    "interpolate",
    "isfinite",
    "kl_div",
    "kron_add",
    "l1_loss",
    "layer_norm",
    "layer_norm_modulate",
    "le",
    "leaky_relu",
    "lerp",
    "linear",
    "linear_add",
    "log",
    "log1p",
    "log_softmax",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logsigmoid",
    "logsumexp",
    "lora_conv2d",
    "lora_linear",
    "lora_linears",
    "lt",
    "masked_fill",
    "matmul",
    "max",
    "max_dim",
    "max_pool2d",
    "max_pool2d_with_indices",
    "maximum",
    "mean",
    "min",
    "min_dim",
    "minimum",
    "mish",
    "movedim",
    "mse_loss",
    "mul",
    "narrow",
    "ne",
    "neg",
    "nf4_dequantize",
    "nf4_quantize",
    "nll_loss",
    "norm",
    "normalize",
    "one_hot",
    "outer",
    "pad",
    "permute",
    "pixel_shuffle",
    "pixel_unshuffle",
    "pow",
    "prelu",
    "prod",
    "quick_gelu",
    "reciprocal",
    "relu",
    "relu6",
    "repeat",
    "repeat_interleave",
    "reshape",
    "rms_norm",
    "rms_norm_rope",
    "roll",
    "rope",
    "round",
    "rsqrt",
    "rsub",
    "scaled_dequantize",
    "scaled_dot_product_attention",
    "scaled_feed_forward",
    "scaled_linear",
    "scaled_lora_linears",
    "scatter",
    "scatter_add",
    "selu",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "smooth_l1_loss",
    "softmax",
    "softmin",
    "softplus",
    "softsign",
    "sort",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "sub",
    "sum",
    "swiglu",
    "t",
    "take_along_dim",
    "tanh",
    "timestep_embedding",
    "topk",
    "transpose",
    "tril",
    "triu",
    "trunc",
    "unbind",
    "unfold",
    "unsqueeze",
    "upsample_nearest",
    "var",
    "view",
    "where",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Says what to write for a function that PyTorch has."""
        raise absent("functional", name, {f"{n}_": f"write F.{n}, or x.copy_(F.{n}(x))" for n in __all__} | FUNCTIONAL)
