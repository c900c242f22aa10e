"""The tensor library: tensors, gradients, layers, optimizers. It knows nothing of diffusion.

import flame_train.engine as flame
x = flame.tensor([1.0, 2.0], requires_grad=True)
(x * x).sum().backward()
x.grad.numpy()
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from . import check, counterparts, functional, nn, optim
from .autograd.backprop import backward
from .checkpoint import checkpoint, rematerialize
from .cuda_kernel import cuda_kernel
from .debugging import detect_anomaly, trace
from .dispatch import explain, explain_gradients
from .dtype import Array, as_dtype
from .elementwise_op import elementwise
from .grad import grad
from .memory_report import memory_report
from .mode import (
    enable_grad,
    get_float32_matmul_precision,
    no_grad,
    set_default_device,
    set_default_dtype,
    set_float32_matmul_precision,
)
from .op import ErrorSample, primitive, sample
from .op_docs import install
from .step_capture import capture
from .tensors.creation import (
    arange,
    empty,
    empty_like,
    eye,
    full,
    full_like,
    linspace,
    ones,
    ones_like,
    rand,
    rand_like,
    randint,
    randn,
    randn_like,
    zeros,
    zeros_like,
)
from .tensors.generator import Generator, manual_seed
from .tensors.saving import load, save
from .tensors.tensor import Frozen, Parameter, Tensor, tensor

__all__ = [
    "Array",
    "ErrorSample",
    "Frozen",
    "Generator",
    "Parameter",
    "Tensor",
    "arange",
    "backward",
    "capture",
    "check",
    "checkpoint",
    "cuda_kernel",
    "detect_anomaly",
    "elementwise",
    "empty",
    "empty_like",
    "enable_grad",
    "explain",
    "explain_gradients",
    "eye",
    "full",
    "full_like",
    "functional",
    "get_float32_matmul_precision",
    "grad",
    "linspace",
    "load",
    "manual_seed",
    "memory_report",
    "nn",
    "no_grad",
    "ones",
    "ones_like",
    "optim",
    "primitive",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "rematerialize",
    "sample",
    "save",
    "set_default_device",
    "set_default_dtype",
    "set_float32_matmul_precision",
    "tensor",
    "trace",
    "zeros",
    "zeros_like",
]

if not TYPE_CHECKING:  # a checker of types knows the names above alone

    def __getattr__(name: str) -> Any:
        """PyTorch's other names: functions, which are those of `functional`, and dtypes. Else says what to write."""
        if name in functional.__all__:
            return getattr(functional, name)
        if name in counterparts.DTYPES:
            return as_dtype(counterparts.DTYPES[name])
        raise counterparts.absent("flame_train.engine", name, counterparts.FLAME)


install()

# NaN and infinity are values like any other here, as in PyTorch: what makes one need not say so each time. Ops and
# backward passes run under an errstate, because NumPy's sums warn in the name of a module of NumPy's. A cast or a write
# elsewhere warns in the name of one of ours.
warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"flame_train\.engine\.")
