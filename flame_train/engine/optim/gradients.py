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
from ..random import GRADIENT_NOISE, bits, normal_of
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


def clip_each_grad_norm_(parameters: Tensors, max_norm: float, norm_type: float | str = 2.0) -> Tensor:
    """Scales each gradient separately to a norm of at most `max_norm`; returns the norms they had (n,)."""
    check("clip_each_grad_norm_", below=None, max_norm=max_norm)
    grads, kind = _grads(parameters), _kind(norm_type)
    if not grads:
        return Tensor(np.zeros(0, float32))
    xp = grads[0].backend.xp
    with np.errstate(all="ignore"):
        norms = xp.empty(len(grads), _widest(grads))
        for i, g in enumerate(grads):
            norms[i] = _norm(xp, _raised(g), kind)
            _write(g, _raised(g) * xp.minimum(max_norm / (norms[i] + 1e-6), 1.0))
    return Tensor(norms)


def clip_grad_value_(parameters: Tensors, clip_value: float) -> None:
    """Limits every gradient entry to [-clip_value, clip_value], as torch.nn.utils.clip_grad_value_."""
    check("clip_grad_value_", below=None, clip_value=clip_value)
    for g in _grads(parameters):
        _write(g, g.backend.xp.clip(_raised(g), -clip_value, clip_value))


def normalize(parameters: Tensors, norm: float = 1.0, eps: float = 1e-12) -> Tensor:
    """Scales the gradients to a total 2-norm of `norm`, up or down; returns the norm they had (0-d).

    Gradients whose norm is below `eps` are divided by `eps`, so that zeros stay zeros.
    """
    check("normalize", norm=norm, eps=eps)
    grads = _grads(parameters)
    total = _total_norm(grads, 2.0)
    for g in grads:
        _write(g, _raised(g) * (norm / g.backend.xp.maximum(total.data, eps)))
    return total


def add_noise_(parameters: Tensors, std: float, *, seed: int, step: int = 0, decay: float = 0.0) -> None:
    """Adds N(0, std^2 / (1 + step)^decay) to every gradient entry (arXiv 1511.06807 anneals with decay 0.55).

    The noise is a function of (seed, step, index of the gradient, position in it).

    Args:
        parameters: tensors with gradients.
        std: the standard deviation at step 0.
        step: how many steps were done.
        decay: the exponent with which the variance falls.
    """
    check("add_noise_", std=std, decay=decay)
    size = std * (1.0 + step) ** (-0.5 * decay)
    for i, g in enumerate(_grads(parameters)):
        xp = g.backend.xp
        words = bits(xp, seed, GRADIENT_NOISE, step, xp.full((1,), i, np.int64), g.size)
        noise = normal_of(xp, words).reshape(g.shape)
        _write(g, _raised(g) + size * noise)


class GradientStatistics:
    """What `statistics` found. The first read of any of it waits for the device.

    `norm` and `largest` are of the finite entries, `zeros` and `non_finite` fractions of all. `histogram[i]` counts
    the finite entries other than zero with 10^edges[i] <= |g| < 10^edges[i + 1]; the outer bins hold what lies beyond.
    """

    edges = tuple(range(-12, 5))

    def __init__(self, count: int, found: Tensor) -> None:
        self.count = count
        self._found = found
        self._host: list[float] | None = None

    def _read(self) -> list[float]:
        if self._host is None:
            self._host = self._found.numpy().tolist()
        return self._host

    @property
    def norm(self) -> float:
        return math.sqrt(self._read()[0])

    @property
    def largest(self) -> float:
        return self._read()[1]

    @property
    def zeros(self) -> float:
        return self._read()[2] / max(self.count, 1)

    @property
    def non_finite(self) -> float:
        return self._read()[3] / max(self.count, 1)

    @property
    def histogram(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self._read()[4:])


def statistics(parameters: Tensors) -> GradientStatistics:
    """Norm, largest magnitude, fractions zero and not finite, and a histogram by powers of ten from 1e-12 to 1e4."""
    grads, edges = _grads(parameters), GradientStatistics.edges
    xp = grads[0].backend.xp if grads else np
    found = xp.zeros(4 + len(edges) - 1, np.float64)
    limits = 10.0 ** xp.arange(edges[0], edges[-1] + 1, dtype=np.float64)
    for g in grads:
        size = xp.abs(_raised(g)).ravel().astype(np.float64)
        finite = xp.isfinite(size)
        size = xp.where(finite, size, 0.0)
        found[0] += xp.sum(size * size)
        found[1] = xp.maximum(found[1], xp.max(size))
        found[2] += xp.sum(finite & (size == 0))
        found[3] += xp.sum(~finite)
        bins = xp.clip(xp.searchsorted(limits, size, side="right") - 1, 0, len(edges) - 2)
        xp.add.at(found, bins + 4, (size > 0).astype(np.float64))
    return GradientStatistics(sum(g.size for g in grads), Tensor(found))


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
