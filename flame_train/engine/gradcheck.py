"""Gradient checks: every formula against finite differences in fp64. Used by the tests and by `gradcheck`.

In fp32 the formula (or its kernel) is run in fp32 and compared with the same differences in fp64.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import lazy
from .dtype import DType, float64, is_float
from .grad import grad
from .op import REGISTRY, Op, Sample
from .op_samples import materialise, tensor_arguments
from .tensors.tensor import Tensor, tensor

TOLERANCE = 1e-6
TOLERANCE_FP32 = 2e-5
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
    tolerance: float = TOLERANCE

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


def generator(op: str, sample: int) -> np.random.Generator:
    """Returns a generator that gives an op's sample the same numbers in every process and in any order of tests."""
    return np.random.default_rng(zlib.crc32(f"{op}/{sample}".encode()))


def gradcheck(
    op: Op, device: str = "cpu", dtype: DType = float64, samples: Iterable[Sample] | None = None
) -> Iterator[Verdict]:
    """Checks every differentiable argument of `samples`, or of those of `op`, its formulas run in fp64 or fp32."""
    for i, s in enumerate(op.iter_samples() if samples is None else samples):
        yield from _check_sample(op, s, i, device, dtype)


def gradcheck_all(names: list[str] | None = None, device: str = "cpu", dtype: DType = float64) -> Iterator[Verdict]:
    """Checks the named ops, or every registered op. Raises KeyError for an unknown name."""
    if not names:
        lazy.load_ops()
    for name in names or sorted(REGISTRY):
        yield from gradcheck(REGISTRY[name], device, dtype)


def _check_sample(op: Op, s: Sample, index: int, device: str, dtype: DType) -> Iterator[Verdict]:
    exact = materialise(op, s, generator(op.name, index), float64, device)
    floats = [o for o in _outputs(op(**exact)) if is_float(o.dtype)]
    rng = np.random.default_rng(index)
    weights = [rng.standard_normal(o.shape) for o in floats]
    bound = exact if dtype == float64 else materialise(op, s, generator(op.name, index), dtype, device)
    analytic = _analytic(op, bound, weights)

    def scalar() -> float:
        results = [o.numpy() for o in _outputs(op(**exact)) if is_float(o.dtype)]
        return float(sum((r * w).sum() for r, w in zip(results, weights, strict=True)))

    for (arg, item, t), g in zip(_differentiated(op, exact), analytic, strict=True):
        label = arg if item is None else f"{arg}[{item}]"
        yield Verdict(op.name, label, index, _worst(t, g, scalar), TOLERANCE if dtype == float64 else TOLERANCE_FP32)


def _differentiated(op: Op, bound: dict[str, Any]) -> list[tuple[str, int | None, Tensor]]:
    """Returns the arguments that have a gradient, as `tensor_arguments` lists them."""
    return [a for a in tensor_arguments(op, bound) if a[0] in op.differentiable and is_float(a[2].dtype)]


def _analytic(op: Op, bound: dict[str, Any], weights: list[np.ndarray[Any, Any]]) -> tuple[Tensor | None, ...]:
    """Returns the formulas' gradients of the outputs' weighted sum; None for each without a float output."""
    inputs = [t for _, _, t in _differentiated(op, bound)]
    for t in inputs:
        t.requires_grad_()
    floats = [o for o in _outputs(op(**bound)) if is_float(o.dtype)]
    if not inputs or not floats:
        return (None,) * len(inputs)
    cotangents = [tensor(w.astype(o.dtype), device=o.device) for w, o in zip(weights, floats, strict=True)]
    found = grad(floats, inputs, cotangents, allow_unused=True)
    for t in inputs:
        t.requires_grad_(False)
    return found


def _outputs(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _worst(t: Tensor, analytic: Tensor | None, scalar: Callable[[], float]) -> float:
    """Returns the largest error over `t`, relative where the gradient is above 1; no gradient counts as 0."""
    expected = numeric_gradient(t, scalar)
    got = np.zeros(t.shape) if analytic is None else analytic.numpy()
    if expected.size == 0:
        return 0.0 if got.shape == expected.shape else np.inf
    return float(np.max(np.abs(got - expected) / np.maximum(1.0, np.abs(expected))))


def numeric_gradient(t: Tensor, scalar: Callable[[], float]) -> np.ndarray[Any, Any]:
    """d scalar / d t by central differences; `scalar` reads `t`, whose elements are moved in place and restored."""
    result = np.zeros(t.shape)
    for index in np.ndindex(*t.shape):
        held = float(t.backend.to_host(t.data[index]))
        t.data[index] = held + _STEP
        up = scalar()
        t.data[index] = held - _STEP
        down = scalar()
        t.data[index] = held
        result[index] = (up - down) / (2.0 * _STEP)
    return result
