"""Proof of gradients: finite differences in fp64 against every formula. Used by the tests and by `gradcheck`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dtype import float64, is_float
from .graph import grad
from .op import REGISTRY, Op, Sample
from .sample import materialise, tensor_arguments
from .tensor import Tensor, tensor

TOLERANCE = 1e-6
_STEP = 1e-6


@dataclass(frozen=True, slots=True)
class Verdict:
    """One argument of one sample of one op: the worst error of its gradient against finite differences.

    `error` is |analytic - numeric| / max(1, |numeric|), the largest over all elements.
    """

    op: str
    argument: str
    sample: int
    error: float

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE


def generator(op: str, sample: int) -> np.random.Generator:
    """The same random numbers for an op's sample in every process and order."""
    return np.random.default_rng(zlib.crc32(f"{op}/{sample}".encode()))


def gradcheck(op: Op, device: str = "cpu") -> Iterator[Verdict]:
    """Checks every differentiable argument of every sample of `op` in fp64."""
    for i, s in enumerate(op.iter_samples()):
        yield from _check_sample(op, s, i, device)


def gradcheck_all(names: list[str] | None = None, device: str = "cpu") -> Iterator[Verdict]:
    """Checks the named ops, or every registered op."""
    for name in names or sorted(REGISTRY):
        yield from gradcheck(REGISTRY[name], device)


def _check_sample(op: Op, s: Sample, index: int, device: str) -> Iterator[Verdict]:
    rng = generator(op.name, index)
    bound = materialise(op, s, rng, float64, device)
    found = [(a, i, t) for a, i, t in tensor_arguments(op, bound) if a in op.differentiable and is_float(t.dtype)]
    for _, _, t in found:
        t.requires_grad_()
    outputs = _outputs(op(**bound))
    floats = [o for o in outputs if is_float(o.dtype)]
    if not found or not floats:
        return
    weights = [rng.standard_normal(o.shape) for o in floats]
    cotangents = [tensor(w, device=device) for w in weights]
    analytic = grad(floats, [t for _, _, t in found], cotangents, allow_unused=True)

    def scalar() -> float:
        results = [o.numpy() for o in _outputs(op(**bound)) if is_float(o.dtype)]
        return float(sum((r * w).sum() for r, w in zip(results, weights, strict=True)))

    for (arg, item, t), g in zip(found, analytic, strict=True):
        label = arg if item is None else f"{arg}[{item}]"
        yield Verdict(op.name, label, index, _worst(t, g, scalar))


def _outputs(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _worst(t: Tensor, analytic: Tensor | None, scalar: Callable[[], float]) -> float:
    """The largest error over all elements of `t`, each moved both ways in turn."""
    expected = numeric_gradient(t, scalar)
    got = np.zeros(t.shape) if analytic is None else analytic.numpy()
    if expected.size == 0:
        return 0.0 if got.shape == expected.shape else np.inf
    return float(np.max(np.abs(got - expected) / np.maximum(1.0, np.abs(expected))))


def numeric_gradient(t: Tensor, scalar: Callable[[], float]) -> np.ndarray[Any, Any]:
    """d scalar / d t by central differences; `scalar` reads `t`, whose elements are moved in place and restored."""
    result = np.zeros(t.shape)
    for index in np.ndindex(*t.shape):
        held = float(t.backend.get(t.data[index]))
        t.data[index] = held + _STEP
        up = scalar()
        t.data[index] = held - _STEP
        down = scalar()
        t.data[index] = held
        result[index] = (up - down) / (2.0 * _STEP)
    return result
