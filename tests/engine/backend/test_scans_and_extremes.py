"""Kernels that run along a dim, without a GPU: running sums, extremes with their places, products, truth, order.

They are compiled as C++, as in test_generated.py, whose rule holds: at most twice the error of the reference in the
tested dtype plus one ulp from the fp64 reference. Places and truth values are the reference's own.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.dtype import is_float
from flame_train.engine.gradcheck import generator
from flame_train.engine.namespace import NUMPY
from flame_train.engine.op import REGISTRY, Op, Sample, sample
from flame_train.engine.op_samples import Values, integers, materialise, tensor_arguments
from flame_train.engine.random import Rng
from tests.engine.backend.test_generated import CI_AND_PROOF, DTYPES, distance, on

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiler")]


def rare(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """One in a hundred is true."""
    return np.random.default_rng(sum(shape)).random(shape) < 0.01


_PLACES = [((33, 77), 1), ((3, 640), -1, True), ((40_001,),), ((5, 9000), 1), ((3000, 13), 0), ((2, 70, 24), 1)]
_TRUTHS = [
    *(sample(rare(shape), *rest) for shape, *rest in _PLACES),
    *(sample((~rare(shape)), *rest) for shape, *rest in _PLACES),
    sample((3, 700), 1),
    sample(integers(2, 900, 7), 0),
]
_AMONG = [
    *(sample((3, n), -1) for n in (1, 2, 7, 77, 1025, 2056)),
    sample((70, 640), -1),
    sample(Values((6, 900), 0, 3, kind="int"), -1),
    sample((2, 33_000), -1),
    sample((2, 1300, 40), 1),
    sample((3000, 7), 0, True),
    sample((1, 130, 24), 1),
    sample((2, 3, 1), 1),
]
LENGTHS: dict[str, list[Sample]] = {
    **dict.fromkeys(("argmax", "max_dim", "min_dim"), _AMONG),
    "argmin": [*_AMONG, sample((7, 4800))],
    **dict.fromkeys(("any", "all"), _TRUTHS),
    "cosine_similarity": [
        *(sample((5, n), (5, n), -1) for n in (2, 77, 640, 1280, 3073)),
        sample((2, 3, 40), (2, 3, 40), 2, 6.0),
        sample(np.zeros((2, 9)), (2, 9), 1, 0.5),
    ],
    "cumsum": [
        *(sample((3, n), -1) for n in (1, 77, 1025, 1280, 16_400)),
        sample((40, 640), -1),
        sample((2, 300, 5), 1),
        sample((1, 130, 24), 1),
        sample((9, 3, 7, 2), 0),
        sample((20_001,), 0),
    ],
    "sort": [sample((3, 777)), sample((2, 70, 5), 1, True)],
    "topk": [
        *(sample((3, n), n, -1) for n in (1, 2, 77, 256)),
        sample((5, 640), 9, -1, False),
        sample((2, 9001), 20),
        sample((2, 12_000), 33, -1, False),
        sample((2, 30, 8), 3, 1),
    ],
    "prod": [
        *(
            sample(Values(s, 0.9, 1.1), d)
            for s, d in (((70, 640), -1), ((2, 700, 24), 1), ((3, 9001), -1), ((5, 131), 0))
        ),
        sample(Values((3, 77), -1, 1), 1),
        *(sample(zeros) for zeros in (np.eye(9), np.eye(2), np.arange(12.0), np.zeros(700))),
        sample(np.where(rare((7, 1025)), 0.0, np.linspace(0.9, 1.1, 1025)), -1, True),
        sample(Values((9, 8200), 0.99, 1.01), 1),
    ],
    "dropout": [
        sample(s, 0.3, rng=Rng(NUMPY, 5, 1, np.arange(s[0]))) for s in ((3, 71), (5, 7, 24), (2, 9001), (3, 514))
    ],
}
"""Rows of a warp, of a block and of several blocks, of odd lengths; lines side by side, few and many."""


def outcome(op: Op, bound: dict[str, Any], weights: list[Any]) -> list[np.ndarray[Any, Any]]:
    """The outputs, and the gradients of the first: once, and added to an equal one."""
    leaves = [
        t.requires_grad_() for a, _, t in tensor_arguments(op, bound) if a in op.differentiable and is_float(t.dtype)
    ]
    made = [op(**bound) for _ in range(2)]
    firsts = [m[0] if isinstance(m, tuple) else m for m in made]
    values = [t.numpy() for t in (made[0] if isinstance(made[0], tuple) else made[:1])]
    if not weights:
        weights.append(generator(op.name, 99).standard_normal(firsts[0].shape).astype(DTYPES[1]))
    if leaves:
        g = flame.tensor(weights[0].astype(np.float64), firsts[0].dtype, firsts[0].device)
        for roots, given in ((firsts[:1], [g]), (firsts, [g, g])):
            values += [t.numpy() for t in flame.grad(roots, leaves, given, retain_graph=True)]
    return values


def cases(name: str, dtype: Any) -> list[tuple[Op, dict[str, Any]]]:
    op, found = REGISTRY[name], []
    for i, s in enumerate([*op.iter_samples(), *LENGTHS[name]]):
        found.append((op, materialise(op, s, generator(name, i), dtype)))
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the first run computes with what memory holds
@pytest.mark.parametrize("dtype", CI_AND_PROOF, ids=lambda d: d.name)
def test_values_and_gradients(gpu: Any, dtype: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    drawn = [case for name in LENGTHS for case in cases(name, dtype)]
    weights: list[list[Any]] = [[] for _ in drawn]
    exact = [
        outcome(op, on(bound, op, "cpu", np.dtype(np.float64)), w)
        for (op, bound), w in zip(drawn, weights, strict=True)
    ]
    for (op, bound), w in zip(drawn, weights, strict=True):
        outcome(op, on(bound, op, "cuda", dtype), w)
    compiled.build()
    for (op, bound), w, truth in zip(drawn, weights, exact, strict=True):
        plain, got = (outcome(op, on(bound, op, device, dtype), w) for device in ("cpu", "cuda"))
        for g, p, t in zip(got, plain, truth, strict=True):
            assert g.dtype == p.dtype
            if is_float(g.dtype):
                g, p, t = (a.astype(np.float64) for a in (g, p, t))
                assert distance(g, t) <= 2.0 * distance(p, t) + float(ml_dtypes.finfo(dtype).eps), op.name
            else:
                np.testing.assert_array_equal(g, p, op.name)


_TIES = [((3, 77), -1), ((2, 5000), 1), ((2, 9001), 1), ((70, 6), 0), ((2, 900, 8), 1)]


def _extremes(shape: tuple[int, ...], dtype: Any) -> list[np.ndarray[Any, Any]]:
    """Ties, zeros of both signs, some NaN, nothing else, infinities alone and with one number at the end."""
    rng = generator("extremes", 0)
    ties = rng.integers(0, 3, shape).astype(dtype)
    zeros = np.copysign(np.zeros(shape), rng.standard_normal(shape)).astype(dtype)
    some = np.where(rng.random(shape) < 0.01, np.nan, rng.standard_normal(shape)).astype(dtype)
    late = np.full(shape, -np.inf, dtype)
    late[(-1,) * len(shape)] = 1.0
    return [ties, zeros, some, *(np.full(shape, x, dtype) for x in (np.nan, np.inf, -np.inf)), late, -late]


@pytest.mark.parametrize("dtype", CI_AND_PROOF, ids=lambda d: d.name)
def test_of_equal_ones_the_first_is_found_and_nan_before_all(
    gpu: Any, dtype: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    cases = [(drawn, dim) for shape, dim in _TIES for drawn in _extremes(shape, dtype)]

    def found(drawn: np.ndarray[Any, Any], dim: int, device: str) -> list[np.ndarray[Any, Any]]:
        x = flame.tensor(drawn, device=device)
        made = [t for pick in (F.argmax, F.argmin) for t in (pick(x, dim).numpy(), pick(x).numpy())]
        firsts = [F.topk(x, 6, dim, largest) for largest in (True, False)]
        pairs = (F.max(x, dim), F.min(x, dim, keepdim=True), *firsts)
        return made + [np.asarray(t.numpy(), np.float64) for pair in pairs for t in pair]

    for case in cases:
        found(*case, "cuda")
    compiled.build()
    for case in cases:
        for got, want in zip(found(*case, "cuda"), found(*case, "cpu"), strict=True):
            np.testing.assert_array_equal(got, want)
    assert not gpu.kernels.columns.counters.any(), "all who came have gone"
