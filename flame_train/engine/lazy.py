"""The names of the library: what PyTorch has and nothing in the trainer uses. Each is loaded when it is asked for.

The modules of `library/` declare ops and layers like any others. No other module imports them, so that a run loads
none. `functional`, `nn`, `optim` and the registry of ops come here for a name that they lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Final


def _places(rows: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the module of each name, from the names of each module."""
    return {name: module for module, names in rows.items() for name in names.split()}


OPS: Final = _places(
    {
        "arrangement": "flip movedim pixel_shuffle pixel_unshuffle repeat repeat_interleave roll t tril triu unbind",
        "batch_norm": "batch_norm batch_norm_inference batch_norm_train",
        "by_index": "gather index_select one_hot scatter scatter_add",
        "classification": "binary_cross_entropy binary_cross_entropy_with_logits kl_div",
        "conv_transpose": "conv1d conv_transpose2d",
        "cross_entropy": "cross_entropy nll_loss",
        "einsum": "bmm einsum outer",
        "interpolate": "interpolate",
        "min_max": "amax amin argmax argmin max max_dim min min_dim",
        "normalize": "instance_norm normalize",
        "sorting": "sort topk",
        "pair_losses": "cosine_similarity huber_loss smooth_l1_loss",
        "pointwise": "addcdiv cos erf expm1 floor glu log1p maximum minimum round rsqrt sign sin trunc",
        "pooling": "adaptive_avg_pool2d avg_pool2d max_pool2d max_pool2d_with_indices",
        "rectifiers": "celu elu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish "
        "prelu relu relu6 selu softplus softsign swiglu",
        "reductions": "all any cumsum norm prod",
        "softmax": "log_softmax logsumexp softmax softmin",
        "unfold": "fold unfold",
    }
)
"""The module of each op."""
LAYERS: Final = _places(
    {
        "multihead_attention": "MultiheadAttention",
        "torch_layers": "BatchNorm1d BatchNorm2d ConvTranspose2d Dropout GELU Identity ReLU SiLU Sigmoid Tanh",
    }
)
"""The module of each layer of `nn`."""
OPTIMIZERS: Final = _places({"torch_optimizers": "Adam AdamW SGD"})
"""The module of each optimizer of `optim`."""


def module(name: str) -> ModuleType:
    """Imports a module of the library."""
    return import_module(f"{__package__}.library.{name}")


def attribute(names: Mapping[str, str], name: str) -> Any:
    """Returns the class or op called `name`, from its module."""
    return getattr(module(names[name]), name)


def load_ops() -> None:
    """Loads every op of the library, for those who list the registry."""
    for name in dict.fromkeys(OPS.values()):
        module(name)
