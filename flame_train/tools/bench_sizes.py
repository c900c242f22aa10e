"""The sizes at which `bench ops` times each op: those of SDXL, and of Flux where it differs."""

from __future__ import annotations

from collections.abc import Mapping

from flame_train.engine.op import Sample, sample
from flame_train.engine.op_samples import booleans, integers, positive


def _attention(batch: int, heads: int, queries: int, width: int, keys: int | None = None) -> Sample:
    key = (batch, heads, keys or queries, width)
    return sample((batch, heads, queries, width), key, key)


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
_TWO = [sample((4, 4096, 640), (4, 4096, 640)), sample((4608, 3072), (3072,))]
_REDUCED = [sample((4, 4096, 640), -1), sample((4608, 3072), -1), sample((16384, 640), 0), sample((4608, 3072))]
_ROWS = [sample((16384, 640), -1), sample((4096, 1280), -1), sample((4608, 3072), -1), sample((163840, 77), -1)]

MORE: Mapping[str, list[Sample]] = {
    **dict.fromkeys(("relu", "sigmoid", "tanh", "exp", "mish", "quick_gelu", "neg", "square"), _ONE),
    **dict.fromkeys(("mul", "sub", "maximum"), _TWO),
    **dict.fromkeys(("sum", "mean", "var", "amax"), _REDUCED),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), _ROWS),
    "embedding": [sample(integers(49408, 8, 77), (49408, 768)), sample(integers(32000, 4, 4096), (32000, 4096))],
    "index_select": [sample((4096, 4096), 0, integers(4096, 4096))],
    "masked_fill": [sample((4, 4096, 640), booleans(4, 4096, 640), 0.0)],
    "gather": [sample((4096, 32000), 1, integers(32000, 4096, 1)), sample((4096, 640), 1, integers(640, 4096, 64))],
    "scatter_add": [sample((4096, 640), 1, integers(640, 4096, 64), (4096, 64))],
    "max_pool2d": [sample((32, 64, 112, 112), 3, 2, 1), sample((32, 112, 112, 64), 3, 2, 1, layout="NHWC")],
    "avg_pool2d": [sample((32, 64, 112, 112), 2), sample((32, 112, 112, 64), 2, layout="NHWC")],
    "adaptive_avg_pool2d": [sample((256, 2048, 7, 7), 1), sample((32, 56, 56, 256), 7, layout="NHWC")],
    "batch_norm": [
        sample((32, 256, 56, 56), (256,), positive(256), (256,), (256,), True),
        sample((32, 56, 56, 256), (256,), positive(256), (256,), (256,), True, layout="NHWC"),
    ],
    "cross_entropy": [
        sample((4096, 32000), integers(32000, 4096)),
        sample((8, 21, 512, 512), integers(21, 8, 512, 512)),
    ],
    "nll_loss": [sample((4096, 32000), integers(32000, 4096))],
    "div": [sample((4, 4096, 640), positive(4, 4096, 640))],
    "sqrt": [sample(positive(4, 4096, 640))],
    "gelu": [*_ONE, sample((4608, 12288), approximate="tanh")],
    "clamp": [sample((4, 4096, 640), -1.0, 1.0)],
    "where": [sample(booleans(4, 4096, 640), (4, 4096, 640), 0.0)],
    "lerp": [sample((4, 4096, 640), (4, 4096, 640), 0.3)],
    "norm": [sample((4, 4096, 640), 2, -1), sample((4608, 3072))],
    "rms_norm": [sample((24 * 4608, 128), (128,), (128,)), sample((4608, 3072), (3072,), (3072,))],
    "rope": [sample((1, 24, 4608, 128), (4608, 128), (4608, 128))],
    "rms_norm_rope": [sample((1, 24, 4608, 128), (128,), (4608, 128), (4608, 128))],
    "layer_norm_modulate": [sample((1, 4608, 3072), (1, 1, 3072), (1, 1, 3072))],
    "gated_add": [sample((1, 4608, 3072), (1, 1, 3072), (1, 4608, 3072))],
    "swiglu": [sample((4, 1024, 10240))],
    "silu": [sample((4, 128, 128, 320)), sample((4608, 3072))],
    "add": [*_TWO],
    "scaled_dot_product_attention": [
        *STEP["scaled_dot_product_attention"],
        _attention(1, 10, 4096, 64),
        _attention(1, 20, 1024, 64),
        _attention(1, 10, 4096, 64, keys=77),
        _attention(1, 20, 1024, 64, keys=77),
        _attention(1, 24, 4608, 128),
    ],
}
"""More of SDXL's and Flux's sizes: timed when named, and all of them by the name "all"."""
