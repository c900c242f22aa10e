"""SDXL's true names with shrunk shapes: a base and a LoRA over it."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from flame_train.io.safetensors import save_file
from tests.golden_keys import golden

BF16 = ml_dtypes.bfloat16
TE1 = "conditioner.embedders.0.transformer."
TE2 = "conditioner.embedders.1.model."


def small(shape):
    return tuple(size if size < 10 else max(1, size // 320) for size in shape)


def base_tensors(dtype=np.float16):
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(small(shape)).astype(dtype) for name, shape in golden("sdxl_base_single_file").items()
    }


def lora_tensors(rank=2, alpha=3.0, dtype=np.float16, keep=lambda module: True):
    rng = np.random.default_rng(1)
    tensors = {}
    for module, base in golden("lora_kohya_sdxl_conv").items():
        if keep(module):
            out, into, *kernel = small(base["shape"])
            tensors[f"{module}.lora_down.weight"] = rng.standard_normal((rank, into, *kernel)).astype(dtype)
            tensors[f"{module}.lora_up.weight"] = rng.standard_normal((out, rank, *[1] * len(kernel))).astype(dtype)
            tensors[f"{module}.alpha"] = np.array(alpha, dtype)
    return tensors


def write(path, tensors, metadata=None):
    save_file(path, tensors, metadata)
    return path
