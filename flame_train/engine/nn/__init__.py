"""Layers and modules, named as torch.nn names them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import lazy
from ..counterparts import NN, absent
from .layers import Conv2d, Embedding, GroupNorm, LayerAdapter, LayerNorm, Linear, RMSNorm, grouped_linear
from .loading import LoadedParts, OffloadOnLoad, WeightSource, allocate, load
from .module import Module, ModuleList, Sequential, compute_copy, operand
from .quantized import FORMATS, Nf4Weight, QuantizedWeight, ScaledWeight, Storage
from .spec import ParamSpec, buffer, param
from .state_dict import check_shapes

__all__ = [
    "FORMATS",
    "GELU",
    "BatchNorm1d",
    "BatchNorm2d",
    "Conv2d",
    "ConvTranspose2d",
    "Dropout",
    "Embedding",
    "GroupNorm",
    "Identity",
    "LayerAdapter",
    "LayerNorm",
    "Linear",
    "LoadedParts",
    "Module",
    "ModuleList",
    "MultiheadAttention",
    "Nf4Weight",
    "OffloadOnLoad",
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

if TYPE_CHECKING:  # the library's, loaded when asked for
    from ..library.multihead_attention import MultiheadAttention
    from ..library.torch_layers import (
        GELU,
        BatchNorm1d,
        BatchNorm2d,
        ConvTranspose2d,
        Dropout,
        Identity,
        ReLU,
        Sigmoid,
        SiLU,
        Tanh,
    )
else:

    def __getattr__(name: str) -> Any:
        """Loads a layer of the library; of any other name says what to write."""
        if name in lazy.LAYERS:
            return globals().setdefault(name, lazy.attribute(lazy.LAYERS, name))
        raise absent("nn", name, NN)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
