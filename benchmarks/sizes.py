"""The sizes at which `bench ops` times each op: those of networks that are trained today, at 1024 x 1024.

- SDXL at batch 4: 4096 x 640 and 1024 x 1280 tokens.
- SD3.5 medium: 4429 x 1536. Flux: 4608 x 3072.
- Their autoencoder.
- A decoder like Qwen3: 4 x 512 tokens of 4096, 32 heads that share 8, 151936 words.

Ops that occur in none of these have the size of an activation of SDXL.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flame_train.engine.dtype import bfloat16, float32
from flame_train.engine.namespace import NUMPY
from flame_train.engine.op import Sample, sample
from flame_train.engine.op_samples import Values, booleans, integers, positive, stored, stored_in_4_bits
from flame_train.engine.random import Rng


def _attention(batch: int, heads: int, queries: int, width: int, keys: int | None = None) -> Sample:
    key = (batch, heads, keys or queries, width)
    return sample((batch, heads, queries, width), key, key)


_WAYS = (("e4m3", False), ("e4m3", True), ("int8", True))
"""Formats of 8 bits, and whether products are of them too."""


def _lists(count: int, *shape: int, kind: str) -> tuple[list[Values], list[Values]]:
    """As many matrices in 8 bits, and their scales."""
    data, scales = stored(*shape, kind=kind)
    return [data] * count, [scales] * count


STEP: Mapping[str, list[Sample]] = {
    "add": [sample((4, 4096, 640), (4, 4096, 640))],
    "silu": [sample((4, 128, 128, 320))],
    "linear": [sample((4096, 1280), (1280, 1280), (1280,)), sample((4096, 1280), (10240, 1280), (10240,))],
    "matmul": [sample((4096, 4096), (4096, 4096)), sample((8, 1024, 64), (8, 64, 1024))],
    "conv2d": [
        sample((4, 64, 64, 640), (640, 640, 3, 3), (640,), 1, 1, layout="NHWC"),
        sample((4, 128, 128, 320), (320, 320, 3, 3), (320,), 1, 1, layout="NHWC"),
    ],
    "group_norm": [sample((4, 128, 128, 320), 32, (320,), (320,), layout="NHWC")],
    "group_norm_silu": [sample((4, 128, 128, 320), 32, (320,), (320,), layout="NHWC")],
    "layer_norm": [sample((4, 1024, 1280), (1280,), (1280,), (1280,)), sample((4, 4096, 640), (640,), (640,), (640,))],
    "geglu": [sample((4, 1024, 10240))],
    "lora_linear": [sample((4, 1024, 1280), (1280, 1280), (1280,), (16, 1280), (1280, 16), 1.0)],
    "scaled_dot_product_attention": [
        _attention(4, 10, 4096, 64),
        _attention(4, 20, 1024, 64, keys=77),
    ],
}
"""The ops of an SDXL step at batch 4 and 1024 x 1024, which are timed by default."""

_ONE = [sample((4, 4096, 640))]
_ABOVE_0 = [sample(positive(4, 4096, 640))]
_TWO = [sample((4, 4096, 640), (4, 4096, 640)), sample((4608, 3072), (3072,))]
_TRUTHS = [sample(booleans(4, 4096, 640), booleans(4, 4096, 640)), sample(booleans(4, 1, 512, 512), booleans(512, 512))]
_LOGITS = [sample((64, 151936), -1), sample((4, 4096, 640), 1)]
_ERRORS = [sample((4, 128, 128, 16), (4, 128, 128, 16)), sample((4, 1024, 1024, 3), (4, 1024, 1024, 3))]
_POOLED = [sample((32, 64, 112, 112), 3, 2, 1), sample((32, 112, 112, 64), 3, 2, 1, layout="NHWC")]
_REDUCED = [sample((4, 4096, 640), -1), sample((4608, 3072), -1), sample((16384, 640), 0), sample((4608, 3072))]
_ROWS = [sample((16384, 640), -1), sample((4096, 1280), -1), sample((4608, 3072), -1), sample((163840, 77), -1)]

MORE: Mapping[str, list[Sample]] = {
    **dict.fromkeys(("relu", "sigmoid", "tanh", "exp", "mish", "quick_gelu", "neg", "square", "abs", "sign"), _ONE),
    **dict.fromkeys(("ceil", "floor", "round", "trunc", "cos", "sin", "erf", "expm1", "isfinite", "clone"), _ONE),
    **dict.fromkeys(("elu", "celu", "selu", "relu6", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid"), _ONE),
    **dict.fromkeys(("logsigmoid", "softplus", "softsign"), _ONE),
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log1p", "reciprocal"), _ABOVE_0),
    **dict.fromkeys(("mul", "sub", "maximum", "minimum", "rsub", "eq", "ne", "lt", "le", "gt", "ge"), _TWO),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), _TRUTHS),
    **{key: [sample(booleans(4, 4096, 640))] for key in ("any", "all", "logical_not")},
    **dict.fromkeys(("sum", "mean", "var", "std", "amax", "amin"), _REDUCED),
    **{key: [sample((4, 4096, 640), -1)] for key in ("max", "min", "max_dim", "min_dim", "prod", "cumsum")},
    **dict.fromkeys(("argmax", "argmin"), _LOGITS),
    **dict.fromkeys(("softmax", "softmin", "log_softmax", "logsumexp"), _ROWS),
    **dict.fromkeys(("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss"), _ERRORS),
    **{key: [sample((4, 1, 4096, 640), 1)] for key in ("squeeze", "unsqueeze")},
    **{key: [sample((4, 4096, 640), (-1, 640))] for key in ("reshape", "view")},
    **{key: [sample((4608, 4608))] for key in ("tril", "triu")},
    **{key: [sample((4, 1024, 10240)), sample((2048, 24576))] for key in ("glu", "swiglu", "geglu")},
    **dict.fromkeys(("max_pool2d", "max_pool2d_with_indices"), _POOLED),
    "embedding": [sample(integers(49408, 8, 77), (49408, 768)), sample(integers(32000, 4, 4096), (32000, 4096))],
    "index_select": [sample((4096, 4096), 0, integers(4096, 4096))],
    "masked_fill": [sample((4, 4096, 640), booleans(4, 4096, 640), 0.0)],
    "gather": [sample((4096, 32000), 1, integers(32000, 4096, 1)), sample((4096, 640), 1, integers(640, 4096, 64))],
    "take_along_dim": [sample((4096, 640), integers(640, 4096, 64), 1)],
    "scatter": [sample((4096, 32000), 1, integers(32000, 4096, 1), (4096, 1))],
    "scatter_add": [sample((4096, 640), 1, integers(640, 4096, 64), (4096, 64))],
    "one_hot": [sample(integers(21, 8, 512, 512), 21)],
    "sort": [sample((64, 151936))],
    "topk": [sample((64, 151936), 20)],
    "avg_pool2d": [sample((32, 64, 112, 112), 2), sample((32, 112, 112, 64), 2, layout="NHWC")],
    "adaptive_avg_pool2d": [sample((256, 2048, 7, 7), 1), sample((32, 56, 56, 256), 7, layout="NHWC")],
    "batch_norm": [
        sample((32, 256, 56, 56), (256,), positive(256), (256,), (256,), True),
        sample((32, 56, 56, 256), (256,), positive(256), (256,), (256,), True, layout="NHWC"),
    ],
    "batch_norm_train": [sample((32, 56, 56, 256), (256,), (256,), layout="NHWC")],
    "batch_norm_inference": [sample((32, 56, 56, 256), (256,), positive(256), (256,), (256,), layout="NHWC")],
    "instance_norm": [sample((4, 64, 256, 256), None, None, (64,), (64,))],
    "cross_entropy": [
        sample((4096, 32000), integers(32000, 4096)),
        sample((8, 21, 512, 512), integers(21, 8, 512, 512)),
        sample((512, 151936), integers(151936, 512)),
    ],
    "nll_loss": [sample((4096, 32000), integers(32000, 4096))],
    "kl_div": [sample((4096, 32000), positive(4096, 32000), reduction="batchmean")],
    "binary_cross_entropy": [sample(Values((32, 1, 512, 512), 0.1, 0.9), Values((32, 1, 512, 512), 0.0, 1.0))],
    "binary_cross_entropy_with_logits": [sample((32, 1, 512, 512), Values((32, 1, 512, 512), 0.0, 1.0))],
    "cosine_similarity": [sample((16384, 1280), (16384, 1280), -1)],
    "normalize": [sample((16384, 1280), dim=-1)],
    "div": [sample((4, 4096, 640), positive(4, 4096, 640))],
    "pow": [sample(positive(4, 4096, 640), 1.5), sample((4, 4096, 640), 2)],
    "addcmul": [sample((4, 4096, 640), (4, 1, 640), (4, 4096, 640))],
    "addcdiv": [sample((4, 4096, 640), (4, 4096, 640), positive(4, 4096, 640))],
    "gelu": [*_ONE, sample((4608, 12288), approximate="tanh")],
    "prelu": [sample((32, 64, 112, 112), (64,))],
    "dropout": [sample((4, 4096, 640), 0.1, rng=Rng(NUMPY, 7, 3, np.arange(4)))],
    "clamp": [sample((4, 4096, 640), -1.0, 1.0)],
    "where": [sample(booleans(4, 4096, 640), (4, 4096, 640), 0.0)],
    "lerp": [sample((4, 4096, 640), (4, 4096, 640), 0.3)],
    "cast": [sample((4, 4096, 640), float32), sample((4, 4096, 640), bfloat16)],
    "norm": [sample((4, 4096, 640), 2, -1), sample((4608, 3072))],
    "rms_norm": [
        sample((24 * 4608, 128), (128,), (128,)),
        sample((4608, 3072), (3072,), (3072,)),
        sample((2048, 4096), (4096,), (4096,)),
    ],
    "rope": [sample((1, 24, 4608, 128), (4608, 128), (4608, 128)), sample((4, 32, 512, 128), (512, 128), (512, 128))],
    "rms_norm_rope": [
        sample((1, 24, 4608, 128), (128,), (4608, 128), (4608, 128)),
        sample((4, 32, 512, 128), (128,), (512, 128), (512, 128)),
    ],
    "cat_rms_norm": [
        sample(
            [(1, 512, 24, 128), (1, 4096, 24, 128)], [(128,), (128,)], Values((4608, 1, 128)), Values((4608, 1, 128))
        )
    ],
    "cat_gelu": [sample((1, 4608, 3072), (1, 4608, 12288), approximate="tanh")],
    "cat_group_norm_silu": [sample((4, 128, 128, 320), (4, 128, 128, 320), 32, (640,), (640,), (4, 640))],
    "layer_norm_modulate": [
        sample((1, 4608, 3072), (1, 1, 3072), (1, 1, 3072)),
        sample((4, 4429, 1536), (4, 1, 1536), (4, 1, 1536)),
    ],
    "gated_add": [
        sample((1, 4608, 3072), (1, 1, 3072), (1, 4608, 3072)),
        sample((4, 4429, 1536), (4, 1, 1536), (4, 4429, 1536)),
    ],
    "timestep_embedding": [sample(Values((4,), 0, 999), 320)],
    "silu": [sample((4, 128, 128, 320)), sample((4608, 3072))],
    "add": [*_TWO],
    "linear": [*STEP["linear"], sample((2048, 4096), (12288, 4096))],
    "linear_add": [sample((4, 1024, 1280), (1280, 1280), (1280,), (4, 1024, 1280))],
    "feed_forward": [sample((1, 4608, 3072), (12288, 3072), (12288,), (3072, 12288), (3072,))],
    "lora_linears": [sample((4, 4096, 640), [(640, 640)] * 3, [(16, 640)] * 3, [(640, 16)] * 3, 1.0)],
    "dora_gain": [
        sample(positive(3072), Values((3072,), 50.0, 60.0), (3072, 16), (3072, 16), (3072, 16), 0.1, 0),
        sample(positive(3072), Values((3072,), 50.0, 60.0), (16, 3072), (16, 3072), (16, 3072), 0.1, 1),
    ],
    "kron_add": [sample((3072, 3072), (16, 16), (192, 192), 1.0)],
    "hadamard_add": [sample((3072, 3072), (3072, 16), (16, 3072), (3072, 16), (16, 3072), 1.0)],
    "lora_conv2d": [
        sample((4, 64, 64, 640), (640, 640, 3, 3), (640,), (16, 640, 3, 3), (640, 16, 1, 1), 1.0, 1, 1, "NHWC")
    ],
    **{key: [sample((4608, 3072))] for key in ("fp8_quantize", "int8_quantize", "nf4_quantize")},
    "nf4_dequantize": [sample(*stored_in_4_bits(12288 * 3072), (12288, 3072), bfloat16)],
    "scaled_dequantize": [sample(*stored(12288, 3072), float32), sample(*stored(12288, 3072), bfloat16)],
    "scaled_linear": [
        sample((4608, 3072), *stored(3072, 3072, kind=kind), (3072,), dynamic=way) for kind, way in _WAYS
    ],
    "scaled_lora_linears": [
        sample((4608, 3072), *_lists(3, 3072, 3072, kind=kind), [(16, 3072)] * 3, [(3072, 16)] * 3, 1.0, dynamic=way)
        for kind, way in _WAYS
    ],
    "scaled_feed_forward": [
        sample(
            (4608, 3072),
            *stored(12288, 3072, kind=kind),
            (12288,),
            *stored(3072, 12288, kind=kind),
            (3072,),
            dynamic=way,
        )
        for kind, way in _WAYS
    ],
    "bmm": [sample((40, 1024, 64), (40, 64, 1024))],
    "outer": [sample((4608,), (3072,))],
    "einsum": [sample("bhqd,bhkd->bhqk", [(4, 10, 1024, 64), (4, 10, 1024, 64)])],
    "conv1d": [sample((8, 768, 4096), (768, 768, 3), (768,), padding=1)],
    "conv_transpose2d": [sample((4, 320, 64, 64), (320, 320, 2, 2), (320,), 2)],
    "unfold": [sample((4, 320, 64, 64), 3, padding=1)],
    "fold": [sample((4, 2880, 4096), output_size=(64, 64), kernel_size=3, padding=1)],
    "pixel_shuffle": [sample((4, 256, 128, 128), 2)],
    "pixel_unshuffle": [sample((4, 64, 256, 256), 2)],
    "upsample_nearest": [sample((4, 64, 64, 640), 2, "NHWC")],
    "interpolate": [
        sample((4, 640, 64, 64), scale_factor=2.0),
        sample((8, 3, 512, 512), scale_factor=2.0, mode="bilinear"),
    ],
    "pad": [sample((4, 320, 128, 128), (0, 1, 0, 1))],
    "flip": [sample((8, 3, 1024, 1024), (3,))],
    "roll": [sample((8, 128, 128, 192), 4, 1)],
    "cat": [sample([(1, 512, 3072), (1, 4096, 3072)], 1), sample([(4, 128, 128, 320), (4, 128, 128, 320)], -1)],
    "stack": [sample([(4, 4096, 640), (4, 4096, 640)], 0)],
    "split": [sample((1, 4608, 9216), 3072, -1)],
    "chunk": [sample((4, 1024, 10240), 2, -1)],
    "unbind": [sample((3, 4608, 3072), 0)],
    "expand": [sample((4, 1, 640), (4, 4096, 640))],
    "repeat": [sample((4, 77, 1280), (2, 1, 1))],
    "repeat_interleave": [sample((8, 8, 512, 128), 4, 1)],
    "narrow": [sample((1, 4608, 9216), 2, 3072, 3072)],
    "getitem": [sample((1, 4608, 3072), (slice(None), slice(512, None)))],
    "flatten": [sample((4, 4096, 640), 0, 1)],
    "permute": [sample((4, 4096, 10, 64), dims=(0, 2, 1, 3))],
    "transpose": [sample((4, 4096, 640), 1, 2)],
    "movedim": [sample((4, 320, 128, 128), 1, 3)],
    "t": [sample((10240, 1280))],
    "scaled_dot_product_attention": [
        *STEP["scaled_dot_product_attention"],
        _attention(1, 10, 4096, 64),
        _attention(1, 20, 1024, 64),
        _attention(1, 10, 4096, 64, keys=77),
        _attention(1, 20, 1024, 64, keys=77),
        _attention(1, 24, 4608, 128),
    ],
}
"""Sizes of all ops: timed when named, and all of them by the name "all"."""
