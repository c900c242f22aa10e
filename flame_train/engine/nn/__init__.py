"""Layers and modules, named as torch.nn names them."""

from __future__ import annotations

from .attention import MultiheadAttention
from .fp8 import Fp8, Fp8Weight, check_fp8
from .layers import Conv2d, ConvTranspose2d, Embedding, GroupNorm, LayerAdapter, LayerNorm, Linear, RMSNorm, linears
from .module import Module, ModuleList, Slot, WeightSource, check_shapes, load, weight, working

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
    "RMSNorm",
    "Slot",
    "WeightSource",
    "check_fp8",
    "check_shapes",
    "linears",
    "load",
    "weight",
    "working",
]
