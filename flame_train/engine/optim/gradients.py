"""Tools on the `.grad` of tensors, for loops written by hand. All but `statistics` stay on the device.

A tensor whose gradient is None is passed over. Norms are taken over all given gradients together, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dtype import Array, float32
from ..random import GRADIENT_NOISE, bits, normal_of
from ..tensor import Tensor
from .transform import global_norm

Tensors = Tensor | Iterable[Tensor]


def clip_grad_norm_(
    parameters: Tensors, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales the gradients down to a total norm of at most `max_norm`; returns the norm they had (0-d fp32).

    As torch.nn.utils.clip_grad_norm_: the factor is max_norm / (norm + 1e-6), at most 1. `norm_type` may be
    any positive number or inf. `error_if_nonfinite` reads the norm and raises `RuntimeError`.
    """
    grads = _grads(parameters)
    norm = _total_norm(grads, norm_type)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(f"clip_grad_norm_: the total norm of the gradients is {norm.item()}")
    with np.errstate(all="ignore"):
        for g in grads:
            factor = g.backend.xp.minimum(max_norm / (norm.data + np.float32(1e-6)), np.float32(1.0))
            _write(g, _raised(g) * factor)
    return norm


def clip_grad_value_(parameters: Tensors, clip_value: float) -> None:
    """Limits every gradient entry to [-clip_value, clip_value], as torch.nn.utils.clip_grad_value_."""
    for g in _grads(parameters):
        _write(g, g.backend.xp.clip(_raised(g), -clip_value, clip_value))


def normalize(parameters: Tensors, norm: float = 1.0, eps: float = 1e-12) -> Tensor:
    """Scales the gradients to a total 2-norm of `norm`, up or down; returns the norm they had (0-d fp32).

    Gradients whose norm is below `eps` are divided by `eps`, so that zeros stay zeros.
    """
    grads = _grads(parameters)
    total = _total_norm(grads, 2.0)
    for g in grads:
        _write(g, _raised(g) * (np.float32(norm) / g.backend.xp.maximum(total.data, np.float32(eps))))
    return total


def add_noise_(parameters: Tensors, std: float, *, seed: int, step: int = 0) -> None:
    """Adds N(0, std^2) to every gradient entry. It is a function of (seed, step, which gradient, place)."""
    for i, g in enumerate(_grads(parameters)):
        xp = g.backend.xp
        words = bits(xp, seed, GRADIENT_NOISE, step, xp.full((1,), i, np.int64), g.size)
        noise = normal_of(xp, words).reshape(g.shape)
        _write(g, _raised(g) + np.float32(std) * noise)


@dataclass(frozen=True, slots=True)
class GradientStatistics:
    """What `statistics` found. `histogram[i]` counts entries with 10^edges[i] <= |g| < 10^edges[i + 1]."""

    count: int
    norm: float
    largest: float
    zeros: float
    non_finite: float
    histogram: tuple[int, ...]
    edges: tuple[int, ...]


def statistics(parameters: Tensors) -> GradientStatistics:
    """Norm and largest magnitude of the finite entries, fractions zero and not finite, and a histogram.

    The histogram is of magnitudes by power of ten from 1e-12 to 1e4; the outer bins hold what lies beyond.
    Reads the gradients back to the host.
    """
    edges = tuple(range(-12, 5))
    flat = [g.numpy().astype(np.float64).ravel() for g in _grads(parameters)]
    g = np.abs(np.concatenate(flat)) if flat else np.zeros(0)
    finite = g[np.isfinite(g)]
    nonzero = finite[finite > 0]
    bins = np.clip(np.searchsorted(10.0 ** np.array(edges), nonzero, side="right") - 1, 0, len(edges) - 2)
    return GradientStatistics(
        count=g.size,
        norm=float(np.sqrt(np.sum(finite**2))),
        largest=float(finite.max(initial=0.0)),
        zeros=float(np.mean(g == 0)) if g.size else 0.0,
        non_finite=1.0 - finite.size / g.size if g.size else 0.0,
        histogram=tuple(int(n) for n in np.bincount(bins, minlength=len(edges) - 1)),
        edges=edges,
    )


def _grads(parameters: Tensors) -> list[Tensor]:
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return [t.grad for t in tensors if t.grad is not None and t.size]


def _raised(g: Tensor) -> Array:
    return g.data.astype(float32)


def _write(g: Tensor, value: Array) -> None:
    """In place, rounded once to the gradient's own dtype."""
    g.data[...] = value.astype(g.dtype)


def _total_norm(grads: list[Tensor], norm_type: float) -> Tensor:
    if not grads:
        return Tensor(np.zeros((), float32))
    xp = grads[0].backend.xp
    with np.errstate(all="ignore"):
        parts = xp.empty(len(grads), float32)
        for i, g in enumerate(grads):
            parts[i] = _norm(xp, _raised(g), norm_type)
        return Tensor(xp.asarray(_norm(xp, parts, norm_type)))


def _norm(xp: Any, g: Array, norm_type: float) -> Array:
    if norm_type == 2.0:
        return global_norm(xp, g)
    if math.isinf(norm_type):
        return xp.abs(g).max()
    total = xp.sum(xp.abs(g) ** norm_type, dtype=np.float64)
    return (total ** (1.0 / norm_type)).astype(float32)
