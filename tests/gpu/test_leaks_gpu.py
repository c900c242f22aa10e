"""Every op, run many times forward and backward, leaves the GPU's memory where it was."""

from __future__ import annotations

import gc

import pytest

from flame_train.engine.backend import get_backend
from flame_train.engine.op import REGISTRY
from tests.engine.test_leaks import TIMES, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_an_op_leaves_nothing(name: str) -> None:
    backend = get_backend("cuda")
    run(REGISTRY[name], "cuda", 20)
    gc.collect()
    backend.synchronize()
    before = backend.memory().live
    run(REGISTRY[name], "cuda", TIMES)
    gc.collect()
    backend.synchronize()
    assert backend.memory().live == before
