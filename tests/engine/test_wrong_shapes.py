"""Tensors of dims that an op is not for: it computes with them, or says in its own words what it expected."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import flame_train
import flame_train.engine as flame
from flame_train.engine import Tensor
from flame_train.engine.op import REGISTRY
from flame_train.engine.sample import materialise, tensor_arguments

OURS = str(Path(flame_train.__file__).parent)
SHAPES = [(), (3,), (2, 1, 3, 2, 2), (0,)]
BY_INDEX = {"getitem"}
"""Brackets: NumPy's own words for an index that is not there, which PyTorch's resemble."""


def others(t: Tensor) -> Iterator[Tensor]:
    shape = t.shape
    grown = [(*shape[:-1], shape[-1] + 1), (shape[0] + 1, *shape[1:])] if shape else []
    for other in (*SHAPES, *grown):
        yield flame.tensor(np.ones(other, t.dtype))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", sorted(REGISTRY.keys() - BY_INDEX))
def test_another_shape_is_computed_with_or_told(name: str) -> None:
    op, rng = REGISTRY[name], np.random.default_rng(zlib.crc32(name.encode()))
    bound = materialise(op, next(iter(op.iter_samples())), rng)
    for argument, place, t in tensor_arguments(op, bound):
        for other in others(t):
            given = dict(bound)
            if place is None:
                given[argument] = other
            else:
                given[argument] = [*bound[argument][:place], other, *bound[argument][place + 1 :]]
            try:
                op(**given)
            except (ValueError, TypeError, IndexError) as e:
                where = traceback.extract_tb(e.__traceback__)[-1].filename
                assert where.startswith(OURS), f"{argument} {other.shape}: {e}"
                assert not isinstance(e, IndexError) or "expected" in str(e), f"{argument} {other.shape}: {e}"
