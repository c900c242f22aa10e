"""The tensor library: tensors, gradients, layers, optimizers. It knows nothing of diffusion.

import flame_train.engine as flame
x = flame.tensor([1.0, 2.0], requires_grad=True)
(x * x).sum().backward()
x.grad.numpy()
"""

from __future__ import annotations

import warnings

from . import functional, nn, optim
from .autograd import grad
from .backprop import backward
from .capture import capture
from .checkpoint import checkpoint
from .dispatch import explain
from .memory_report import memory_report
from .mode import enable_grad, get_float32_matmul_precision, no_grad, set_float32_matmul_precision
from .rematerialize import rematerialize
from .tensor import Frozen, Parameter, Tensor, tensor

__all__ = [
    "Frozen",
    "Parameter",
    "Tensor",
    "backward",
    "capture",
    "checkpoint",
    "enable_grad",
    "explain",
    "functional",
    "get_float32_matmul_precision",
    "grad",
    "memory_report",
    "nn",
    "no_grad",
    "optim",
    "rematerialize",
    "set_float32_matmul_precision",
    "tensor",
]

# NaN and infinity are values like any other here, as in PyTorch: what makes one need not say so each time. Ops and
# backward passes run under an errstate, because NumPy's sums warn in the name of a module of NumPy's. A cast or a write
# elsewhere warns in the name of one of ours.
warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"flame_train\.engine\.")
