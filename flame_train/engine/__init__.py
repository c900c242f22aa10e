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
from .dispatch import explain, explain_gradients
from .memory_report import memory_report
from .mode import enable_grad, no_grad
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
    "explain_gradients",
    "functional",
    "grad",
    "memory_report",
    "nn",
    "no_grad",
    "optim",
    "rematerialize",
    "tensor",
]

# NaN and infinity are values like any other here, as in PyTorch: what makes one need not say so each time. Ops and
# backward passes run under an errstate, because NumPy's sums warn in the name of a module of NumPy's. A cast or a write
# elsewhere warns in the name of one of ours.
warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"flame_train\.engine\.")
