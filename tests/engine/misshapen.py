"""Arguments of an op, one of them of another shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flame_train.engine import tensor
from flame_train.engine.op import Op
from flame_train.engine.op_samples import tensor_arguments

_SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 1, 3, 2, 2), (0,))


def misshapen(op: Op, bound: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the bound arguments with one tensor, of ones, of another shape, and which: "input (3,)"."""
    for name, place, t in tensor_arguments(op, bound):
        grown = [(*t.shape[:-1], t.shape[-1] + 1), (t.shape[0] + 1, *t.shape[1:])] if t.shape else []
        for shape in (*_SHAPES, *grown):
            other = tensor(np.ones(shape, t.dtype))
            value = other if place is None else [*bound[name][:place], other, *bound[name][place + 1 :]]
            yield f"{name} {shape}", {**bound, name: value}
