"""Gradients held to finite differences: of any function of tensors, and of an op on its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import kind_of
from .dtype import float64
from .grad import grad
from .gradcheck import TOLERANCE, numeric_gradient
from .gradcheck import gradcheck as _of_samples
from .mode import no_grad
from .op import Op
from .tensors.tensor import Tensor, tensor


class GradientError(AssertionError):
    """A gradient is not what finite differences say."""


def gradcheck(fn: Callable[..., Any], inputs: Tensor | Sequence[Tensor], *, tolerance: float = TOLERANCE) -> float:
    """Returns the worst error of fn's gradients against central differences, relative where these are above 1.

    `fn` takes `inputs`, fp64 tensors that require grad where they are to be checked, and returns a tensor or several.
    As torch.autograd.gradcheck. Raises `GradientError` beyond `tolerance`, TypeError for inputs narrower than fp64.

    >>> import flame_train.engine as flame
    >>> x = flame.randn(3, 2, dtype="float64", requires_grad=True)
    >>> gradcheck(lambda t: (t * t).sin(), x) < 1e-6
    True
    """
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    for t in given:
        if not isinstance(t, Tensor):
            raise TypeError(f"gradcheck: expected Tensors as inputs, got {kind_of(t)}")
    wanted = [t for t in given if t.requires_grad]
    if not wanted or any(t.dtype != float64 for t in wanted):
        raise TypeError("gradcheck: expected fp64 inputs, one of which requires grad: differences of fp32 say little")
    outs = _listed(fn(*given))
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(o.shape) for o in outs]
    cotangents = [tensor(w, device=o.device) for w, o in zip(weights, outs, strict=True)]
    found = grad(outs, wanted, cotangents, allow_unused=True)

    def scalar() -> float:
        with no_grad():
            return float(sum((o.numpy() * w).sum() for o, w in zip(_listed(fn(*given)), weights, strict=True)))

    worst = 0.0
    for place, (t, g) in enumerate(zip(wanted, found, strict=True)):
        expected = numeric_gradient(t, scalar)
        got = np.zeros(t.shape) if g is None else g.numpy()
        error = float(np.max(np.abs(got - expected) / np.maximum(1.0, np.abs(expected)), initial=0.0))
        if not error <= tolerance:
            raise GradientError(f"gradcheck: input {place} of shape {t.shape}: an error of {error:.3g}")
        worst = max(worst, error)
    return worst


def op(declared: Op, device: str = "cpu") -> float:
    """Returns the worst error of an op's gradients on its samples, in fp64. Raises `GradientError` naming the argument.

    >>> from flame_train.engine import functional as F
    >>> op(F.silu) < 1e-6
    True
    """
    verdicts = list(_of_samples(declared, device))
    for v in verdicts:
        if not v.passed:
            raise GradientError(f"{v.op}: the gradient of {v.argument}, sample {v.sample}: an error of {v.error:.3g}")
    return max([v.error for v in verdicts], default=0.0)


def _listed(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]
