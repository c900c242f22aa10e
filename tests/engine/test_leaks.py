"""Every op, run many times forward and backward, leaves memory where it was."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine.dtype import float32, is_float
from flame_train.engine.gradcheck import generator
from flame_train.engine.op import REGISTRY, Op
from flame_train.engine.op_samples import materialise, tensor_arguments

TIMES = 200
ALLOWED = 16384
"""Bytes: Python keeps freed tuples for later, which count as taken. A tensor lost in every run is over 40,000."""


def run(op: Op, device: str, times: int) -> None:
    """Runs an op forward and backward, its samples in turn."""
    drawn = [materialise(op, s, generator(op.name, i), float32, device) for i, s in enumerate(op.iter_samples())]
    for n in range(times):
        bound = drawn[n % len(drawn)]
        leaves = [t for a, _, t in tensor_arguments(op, bound) if a in op.differentiable and is_float(t.dtype)]
        for t in leaves:
            t.requires_grad_()
        result = op(**bound)
        roots = [o for o in (result if isinstance(result, tuple) else [result]) if o.requires_grad]
        if roots:
            flame.backward(roots, [flame.ones_like(o) for o in roots])
        for t in leaves:
            t.requires_grad_(False)
            t.grad = None


@pytest.mark.proof
@pytest.mark.slow  # together
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_on_the_cpu(name: str) -> None:
    op = REGISTRY[name]
    tracemalloc.start()
    try:
        run(op, "cpu", 20)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        run(op, "cpu", TIMES)
        gc.collect()
        more = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert more <= ALLOWED


def test_a_leak_would_be_found() -> None:
    kept = []
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(TIMES):
        kept.append(flame.tensor(np.zeros(1, np.float32)).exp())
    more = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert more > ALLOWED
