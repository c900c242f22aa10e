"""Layers and modules, named as torch.nn names them."""

from __future__ import annotations

from .attention import MultiheadAttention
from .fp8 import Fp8, Fp8Weight, check_fp8
from .layers import (
    Conv2d,
    ConvTranspose2d,
    Embedding,
    GroupNorm,
    LayerAdapter,
    LayerNorm,
    Linear,
    RMSNorm,
    grouped_linear,
)
from .module import Module, ModuleList, ParamSpec, WeightSource, allocate, check_shapes, compute_copy, load, param

__all__ = [
    "Conv2d",
    "ConvTranspose2d",
    "Embedding",
    "Fp8",
    "Fp8Weight",
    "GroupNorm",
    "LayerAdapter",
    "LayerNorm",
    "Linear",
    "Module",
    "ModuleList",
    "MultiheadAttention",
    "ParamSpec",
    "RMSNorm",
    "WeightSource",
    "allocate",
    "check_fp8",
    "check_shapes",
    "compute_copy",
    "grouped_linear",
    "load",
    "param",
]
