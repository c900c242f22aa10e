"""Which kernels add up by index: what they are told; what they compute is for tests/gpu."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import ops
from flame_train.engine.ops.indexing import index_rows
from flame_train.engine.ops.indexing import index_rows as index_elements


def launched(gpu: Any, call: Any) -> set[str]:
    """The kernels that a call launch_hooks, by name."""
    functions = gpu.kernels._modules._generated
    before = {key: f._function.calls for key, f in functions.items()}
    call()
    return {name for (text, name), f in functions.items() if f._function.calls > before.get((text, name), 0)}


def device(array: Any) -> Any:
    return flame.tensor(np.asarray(array), device="cuda")


@pytest.mark.parametrize(
    ("rows", "count", "kernel"), [(640, 64, "leader_sums"), (64, 64, "leader_sums"), (63, 64, "element_sums")]
)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_fewer_search(gpu: Any, rows: int, count: int, kernel: str, dim: int) -> None:
    x, index, values = np.zeros((5, rows), np.float32), np.zeros((5, count), np.int64), np.ones((5, count), np.float32)
    if dim == 0:
        x, index, values = x.T, index.T, values.T
    found = launched(gpu, lambda: F.scatter_add(device(x), dim, device(index), device(values)))
    assert kernel in found
    assert not found & {"leader_sums", "element_sums"} - {kernel}


@pytest.mark.parametrize(("count", "kernel"), [(1024, "few_sums"), (1025, "sums")])
def test_few_places_are_compared_and_many_are_sorted(gpu: Any, count: int, kernel: str) -> None:
    table = device(np.zeros((50, 8), np.float32)).requires_grad_()
    y = F.embedding(device(np.zeros(count, np.int64)), table)
    found = launched(gpu, lambda: flame.grad([y], [table], [device(np.ones((count, 8), np.float32))]))
    assert kernel in found
    assert ("sort_tiles" in found) == (kernel == "sums")


@pytest.mark.parametrize("inner", [1, 3, 640])
@pytest.mark.parametrize("count", [1, 4, 5, 64, 77, 256, 257, 5000])
def test_a_span_fills_blocks_of_packets(count: int, inner: int) -> None:
    span = index_elements._span(count, inner)
    assert span % 4 == 0
    assert index_elements._THREADS % span == 0
    assert span >= count or span == (256 if inner == 1 else 16)


def test_launchers_and_kernels_agree_on_sizes() -> None:
    text = (Path(ops.__file__).parents[1] / index_rows._HEADER).read_text(encoding="utf-8")
    there = dict(re.findall(r"\b([A-Z_]+) = (\d+)[,;]", text))
    for name in ("FEW", "TILE", "GROUP", "ACROSS", "LANES", "AHEAD"):
        assert int(there[name]) == getattr(index_rows, f"_{name}")
