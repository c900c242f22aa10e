"""Layers and modules, named as torch.nn names them."""

from __future__ import annotations

from .attention import MultiheadAttention
from .batch_norm import BatchNorm1d, BatchNorm2d
from .fit import check_shapes
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
from .module import Module, ModuleList, Sequential, WeightSource, allocate, compute_copy, load
from .parts import Completion, Mover
from .spec import ParamSpec, buffer, param

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "Completion",
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
    "Mover",
    "MultiheadAttention",
    "ParamSpec",
    "RMSNorm",
    "Sequential",
    "WeightSource",
    "allocate",
    "buffer",
    "check_fp8",
    "check_shapes",
    "compute_copy",
    "grouped_linear",
    "load",
    "param",
]
