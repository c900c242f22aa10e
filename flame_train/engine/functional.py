"""The public operations, as torch.nn.functional and torch. Those of the library (`lazy.OPS`) load when asked for.

Some arguments are the same in all.

- `input` is the tensor that an op is about, `layout` "NCHW" or "NHWC", `dtype` the result's.
- `eps` is added to a variance, or to a mean square. `interleaved` says whether pairs of a rotation are neighbours.
- Of linear layers `input` is (..., in), `weight` (out, in), `bias` (out,) or None. `residual` and `plus` are (..., out)
  or None. `down` is (rank, in), `up` (out, rank), `downs` and `ups` n of these. `scales` are uint32 (out,): a number
  for each row of a stored weight. `scale` is the factor of an update, or of the scores of attention.
- Of functions around kernels, `op` is the op that a message names and `out` memory for the result or None. `g` is
  the result's gradient. The wanted gradients go to `target` or `targets`. `lse` is the log-sum-exps of attention,
  fp32 (B, H, L, 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import lazy
from .counterparts import FUNCTIONAL, absent
from .ops.attention.attention import scaled_dot_product_attention
from .ops.common.convert import cast, clone
from .ops.conv.conv import conv2d, upsample_nearest
from .ops.fused.diffusion import cat_gelu, gated_add, geglu, layer_norm_modulate, timestep_embedding
from .ops.fused.feed_forward import feed_forward, scaled_feed_forward
from .ops.fused.qk_norm_rope import cat_rms_norm
from .ops.indexing.embedding import embedding, masked_fill, take_along_dim
from .ops.indexing.getitem import getitem, narrow
from .ops.linear.dora_gain import dora_gain
from .ops.linear.hadamard import hadamard_add
from .ops.linear.kron import kron_add
from .ops.linear.low_rank import lora_conv2d, lora_linear, lora_linears
from .ops.linear.matmul import linear, linear_add, matmul
from .ops.linear.nf4 import nf4_dequantize, nf4_quantize
from .ops.linear.scaled import scaled_linear
from .ops.linear.scaled_lora import scaled_lora_linears
from .ops.linear.scaled_storage import fp8_quantize, int8_quantize, scaled_dequantize
from .ops.loss.regression import l1_loss, mse_loss
from .ops.norm.group_norm import cat_group_norm_silu, group_norm, group_norm_silu
from .ops.norm.layer_norm import layer_norm
from .ops.norm.rms_norm import rms_norm, rms_norm_rope, rope
from .ops.pointwise.activations import gelu, quick_gelu, silu
from .ops.pointwise.arithmetic import abs, add, addcmul, div, lerp, mul, neg, pow, reciprocal, rsub, square, sub
from .ops.pointwise.comparison import (
    clamp,
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
    where,
)
from .ops.pointwise.dropout import dropout
from .ops.pointwise.unary import ceil, exp, log, sigmoid, sqrt, tanh
from .ops.reduction.reduce import mean, std, sum, var
from .ops.shape.concat import cat, chunk, pad, split, stack
from .ops.shape.reshape import expand, flatten, permute, reshape, squeeze, transpose, unsqueeze, view

__all__ = [
    "abs",
    "add",
    "addcmul",
    "cast",
    "cat",
    "cat_gelu",
    "cat_group_norm_silu",
    "cat_rms_norm",
    "ceil",
    "chunk",
    "clamp",
    "clone",
    "conv2d",
    "div",
    "dora_gain",
    "dropout",
    "embedding",
    "eq",
    "exp",
    "expand",
    "feed_forward",
    "flatten",
    "fp8_quantize",
    "gated_add",
    "ge",
    "geglu",
    "gelu",
    "getitem",
    "group_norm",
    "group_norm_silu",
    "gt",
    "hadamard_add",
    "int8_quantize",
    "isfinite",
    "kron_add",
    "l1_loss",
    "layer_norm",
    "layer_norm_modulate",
    "le",
    "lerp",
    "linear",
    "linear_add",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "lora_conv2d",
    "lora_linear",
    "lora_linears",
    "lt",
    "masked_fill",
    "matmul",
    "mean",
    "mse_loss",
    "mul",
    "narrow",
    "ne",
    "neg",
    "nf4_dequantize",
    "nf4_quantize",
    "pad",
    "permute",
    "pow",
    "quick_gelu",
    "reciprocal",
    "reshape",
    "rms_norm",
    "rms_norm_rope",
    "rope",
    "rsub",
    "scaled_dequantize",
    "scaled_dot_product_attention",
    "scaled_feed_forward",
    "scaled_linear",
    "scaled_lora_linears",
    "sigmoid",
    "silu",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "sub",
    "sum",
    "take_along_dim",
    "tanh",
    "timestep_embedding",
    "transpose",
    "unsqueeze",
    "upsample_nearest",
    "var",
    "view",
    "where",
]
__all__ += lazy.OPS

if TYPE_CHECKING:  # the library's, loaded when asked for
    _op = add
    adaptive_avg_pool2d = addcdiv = all = amax = amin = any = argmax = argmin = avg_pool2d = _op
    batch_norm = batch_norm_inference = batch_norm_train = binary_cross_entropy = _op
    binary_cross_entropy_with_logits = bmm = celu = conv1d = conv_transpose2d = cos = _op
    cosine_similarity = cross_entropy = cumsum = einsum = elu = erf = expm1 = flip = floor = fold = _op
    gather = glu = hardsigmoid = hardswish = hardtanh = huber_loss = index_select = instance_norm = _op
    interpolate = kl_div = leaky_relu = log1p = log_softmax = logsigmoid = logsumexp = max = _op
    max_dim = max_pool2d = max_pool2d_with_indices = maximum = min = min_dim = minimum = mish = _op
    movedim = nll_loss = norm = normalize = one_hot = outer = pixel_shuffle = pixel_unshuffle = _op
    prelu = prod = relu = relu6 = repeat = repeat_interleave = roll = round = rsqrt = scatter = _op
    scatter_add = selu = sign = sin = smooth_l1_loss = softmax = softmin = softplus = softsign = _op
    sort = swiglu = t = topk = tril = triu = trunc = unbind = unfold = _op
else:

    def __getattr__(name: str) -> Any:
        """Loads an op of the library; of any other name says what to write."""
        if name in lazy.OPS:
            return globals().setdefault(name, lazy.attribute(lazy.OPS, name))
        raise absent("functional", name, {f"{n}_": f"write F.{n}, or x.copy_(F.{n}(x))" for n in __all__} | FUNCTIONAL)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
