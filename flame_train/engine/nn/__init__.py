"""Layers and modules, named as torch.nn names them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..counterparts import NN, absent
from .activations import GELU, Dropout, Identity, ReLU, Sigmoid, SiLU, Tanh
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
    "GELU",
    "BatchNorm1d",
    "BatchNorm2d",
    "Completion",
    "Conv2d",
    "ConvTranspose2d",
    "Dropout",
    "Embedding",
    "GroupNorm",
    "Identity",
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
    "ReLU",
    "ScaledWeight",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Storage",
    "Tanh",
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

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Says what to write for a name that PyTorch has."""
        raise absent("nn", name, NN)
