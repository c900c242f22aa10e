"""The public operations, as torch.nn.functional and torch. One line an op: the list to grep."""

from __future__ import annotations

from .ops.activations import elu, gelu, hardswish, leaky_relu, mish, quick_gelu, relu, silu, softplus, swiglu
from .ops.arithmetic import abs, add, div, lerp, mul, neg, pow, reciprocal, rsub, sign, square, sub
from .ops.arrange import flip, pad, pixel_shuffle, pixel_unshuffle, repeat, roll, tril, triu
from .ops.attention import scaled_dot_product_attention
from .ops.batch_norm import batch_norm, batch_norm_inference, batch_norm_train, instance_norm
from .ops.classification import binary_cross_entropy, binary_cross_entropy_with_logits, kl_div
from .ops.comparison import eq, ge, gt, isfinite, le, logical_and, logical_not, logical_or, logical_xor, lt, ne
from .ops.conv import conv2d
from .ops.conv_transpose import conv1d, conv_transpose2d
from .ops.convert import cast, clone
from .ops.cross_entropy import cross_entropy, nll_loss
from .ops.diffusion import gated_add, geglu, timestep_embedding
from .ops.dropout import dropout
from .ops.einsum import einsum
from .ops.extrema import amax, amin, argmax, argmin, max, max_dim, min, min_dim
from .ops.feed_forward import feed_forward
from .ops.fp8 import fp8_dequantize, fp8_linear, fp8_quantize
from .ops.fp8_feed_forward import fp8_feed_forward
from .ops.fp8_lora import fp8_lora_linears
from .ops.fused import cat_gelu, layer_norm_modulate, linear_activation
from .ops.gather import gather, scatter, scatter_add, take_along_dim
from .ops.getitem import getitem, narrow
from .ops.index import embedding, index_select, masked_fill, one_hot
from .ops.join import cat, chunk, split, stack
from .ops.joint import cat_rms_norm
from .ops.layer_norm import layer_norm
from .ops.lora import lora_conv2d, lora_linear, lora_linears
from .ops.loss import cosine_similarity, huber_loss, l1_loss, mse_loss, smooth_l1_loss
from .ops.matmul import bmm, linear, linear_add, matmul, outer
from .ops.norm import cat_group_norm_silu, group_norm, group_norm_silu
from .ops.pointwise import ceil, cos, erf, exp, expm1, floor, log, log1p, round, rsqrt, sigmoid, sin, sqrt, tanh, trunc
from .ops.pool import adaptive_avg_pool2d, avg_pool2d, max_pool2d, max_pool2d_with_indices
from .ops.reduce import cumsum, mean, norm, prod, std, sum, var
from .ops.resize import interpolate, upsample_nearest
from .ops.rms_norm import rms_norm, rms_norm_rope, rope
from .ops.select import clamp, maximum, minimum, where
from .ops.shape import expand, flatten, movedim, permute, reshape, squeeze, transpose, unsqueeze, view
from .ops.softmax import log_softmax, logsumexp, softmax, softmin
from .ops.unfold import fold, unfold

__all__ = [
    "abs", "adaptive_avg_pool2d", "add", "amax", "amin", "argmax", "argmin", "avg_pool2d", "batch_norm",
    "batch_norm_inference", "batch_norm_train", "binary_cross_entropy", "binary_cross_entropy_with_logits", "bmm",
    "cast", "cat", "cat_gelu", "cat_group_norm_silu", "cat_rms_norm", "ceil", "chunk", "clamp", "clone", "conv1d",
    "conv2d", "conv_transpose2d", "cos", "cosine_similarity", "cross_entropy", "cumsum", "div", "dropout", "einsum",
    "elu", "embedding", "eq", "erf", "exp", "expand", "expm1", "feed_forward", "flatten", "flip", "floor", "fold",
    "fp8_dequantize", "fp8_feed_forward", "fp8_linear", "fp8_lora_linears", "fp8_quantize", "gated_add", "gather",
    "ge", "geglu", "gelu", "getitem", "group_norm", "group_norm_silu", "gt", "hardswish", "huber_loss",
    "index_select", "instance_norm", "interpolate", "isfinite", "kl_div", "l1_loss", "layer_norm",
    "layer_norm_modulate", "le", "leaky_relu", "lerp", "linear", "linear_activation", "linear_add", "log", "log1p",
    "log_softmax", "logical_and", "logical_not", "logical_or", "logical_xor", "logsumexp", "lora_conv2d",
    "lora_linear", "lora_linears", "lt", "masked_fill", "matmul", "max", "max_dim", "max_pool2d",
    "max_pool2d_with_indices", "maximum", "mean", "min", "min_dim", "minimum", "mish", "movedim", "mse_loss", "mul",
    "narrow", "ne", "neg", "nll_loss", "norm", "one_hot", "outer", "pad", "permute", "pixel_shuffle",
    "pixel_unshuffle", "pow", "prod", "quick_gelu", "reciprocal", "relu", "repeat", "reshape", "rms_norm",
    "rms_norm_rope", "roll", "rope", "round", "rsqrt", "rsub", "scaled_dot_product_attention", "scatter",
    "scatter_add", "sigmoid", "sign", "silu", "sin", "smooth_l1_loss", "softmax", "softmin", "softplus", "split",
    "sqrt", "square", "squeeze", "stack", "std", "sub", "sum", "swiglu", "take_along_dim", "tanh",
    "timestep_embedding", "transpose", "tril", "triu", "trunc", "unfold", "unsqueeze", "upsample_nearest", "var",
    "view", "where",
]  # fmt: skip
