"""Tools on the `.grad` of tensors, for loops written by hand. All stay on the device until something is read.

A tensor whose gradient is None is skipped. Norms are taken over all given gradients together. Arithmetic is in a
gradient's own dtype, or fp32 if that is narrower; results have the widest of these dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ..dtype import Array, DType, compute_dtype, float32
from ..namespace import Namespace
from ..tensors.tensor import Tensor
from .transform import check, global_norm

Tensors = Tensor | Iterable[Tensor]


def clip_grad_norm_(
    parameters: Tensors, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales the gradients down to a total norm of at most `max_norm`; returns the norm they had (0-d).

    As torch.nn.utils.clip_grad_norm_: the factor is max_norm / (norm + 1e-6), at most 1. `norm_type` may be any
    number, inf, or "inf"; type 0 counts non-zero entries, and of several gradients those that have any.
    `error_if_nonfinite` reads the norm, which waits for the device, and raises `RuntimeError` if it is not finite.
    """
    check("clip_grad_norm_", below=None, max_norm=max_norm)
    grads = _grads(parameters)
    norm = _total_norm(grads, _kind(norm_type))
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(f"clip_grad_norm_: the total norm of the gradients is {norm.item()}")
    with np.errstate(all="ignore"):
        for g in grads:
            _write(g, _raised(g) * g.backend.xp.minimum(max_norm / (norm.data + 1e-6), 1.0))
    return norm


def clip_grad_value_(parameters: Tensors, clip_value: float) -> None:
    """Limits every gradient entry to [-clip_value, clip_value], as torch.nn.utils.clip_grad_value_."""
    check("clip_grad_value_", below=None, clip_value=clip_value)
    for g in _grads(parameters):
        _write(g, g.backend.xp.clip(_raised(g), -clip_value, clip_value))


def _grads(parameters: Tensors) -> list[Tensor]:
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return [t.grad for t in tensors if t.grad is not None and t.size]


def _raised(g: Tensor) -> Array:
    return g.data.astype(compute_dtype(g.dtype))


def _widest(grads: list[Tensor]) -> DType:
    return max((compute_dtype(g.dtype) for g in grads), key=lambda d: d.itemsize)


def _write(g: Tensor, value: Array) -> None:
    """Writes a gradient in place, rounded once to its own dtype."""
    g.data[...] = value.astype(g.dtype)


def _kind(norm_type: float | str) -> float:
    """Returns which norm. Raises ValueError for a word other than "inf"."""
    if isinstance(norm_type, str) and norm_type != "inf":
        raise ValueError(f'norm_type: expected a number or "inf", got {norm_type!r}')
    return float(norm_type)


def _total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    if not grads:
        return Tensor(np.zeros((), float32))
    xp = grads[0].backend.xp
    with np.errstate(all="ignore"):
        parts = xp.empty(len(grads), _widest(grads))
        for i, g in enumerate(grads):
            parts[i] = _norm(xp, _raised(g), norm_type)
        return Tensor(xp.asarray(_norm(xp, parts, norm_type)))


def _norm(xp: Namespace, g: Array, norm_type: float) -> Array:
    if norm_type == 2.0:
        return global_norm(xp, g)
    if norm_type == 0.0:
        return xp.sum(g != 0).astype(g.dtype)
    size = xp.abs(g)
    if math.isinf(norm_type):
        return size.max() if norm_type > 0 else size.min()
    total = xp.sum(size**norm_type, dtype=np.float64)
    return (total ** (1.0 / norm_type)).astype(g.dtype)
