"""Layers and modules, named as torch.nn names them."""

from __future__ import annotations

from .attention import MultiheadAttention
from .batch_norm import BatchNorm1d, BatchNorm2d
from .fit import check_shapes
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
from .loading import WeightSource, allocate, load
from .module import Module, ModuleList, Sequential, compute_copy, operand
from .parts import Completion, Mover
from .quantized import FORMATS, Nf4Weight, QuantizedWeight, ScaledWeight, Storage
from .spec import ParamSpec, buffer, param

__all__ = [
    "FORMATS",
    "BatchNorm1d",
    "BatchNorm2d",
    "Completion",
    "Conv2d",
    "ConvTranspose2d",
    "Embedding",
    "GroupNorm",
    "LayerAdapter",
    "LayerNorm",
    "Linear",
    "Module",
    "ModuleList",
    "Mover",
    "MultiheadAttention",
    "Nf4Weight",
    "ParamSpec",
    "QuantizedWeight",
    "RMSNorm",
    "ScaledWeight",
    "Sequential",
    "Storage",
    "WeightSource",
    "allocate",
    "buffer",
    "check_shapes",
    "compute_copy",
    "grouped_linear",
    "load",
    "operand",
    "param",
]
