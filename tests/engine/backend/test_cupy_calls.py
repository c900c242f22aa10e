"""Calls of CuPy made ahead: tiny operands lie in memory as the real ones do, and no call of a step is left out."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flame_train.engine.backend.cuda.codegen.broadcast_plan import merged
from flame_train.engine.backend.cupy_calls import CupyCall, CupyCalls, Pattern
from flame_train.engine.shape_run import H100, shape_run
from tests.engine.backend.stand_in import OnDevice, Products
from tests.engine.backend.test_kernel_requests import step


class Lying:
    """An array that lies as `x` does, and has no values: what a run on shapes has."""

    def __init__(self, x: np.ndarray) -> None:
        self.dtype, self.shape, self.strides, self.size = x.dtype, x.shape, x.strides, x.size


def pattern(x: np.ndarray) -> Pattern:
    calls = CupyCalls()
    calls.note("copy", (Lying(x),))
    found = next(iter(calls)).operands[0]
    assert isinstance(found, Pattern)
    return found


def views() -> list[np.ndarray]:
    x = np.zeros((3, 4, 5, 6), np.float32)
    return [
        x,
        x[:, 1:],
        x[..., 2:5],
        x[:, :, 2],
        x[::2],
        x[..., ::2],
        x.transpose(0, 2, 3, 1),
        x.transpose(3, 2, 1, 0),
        x.transpose(0, 2, 1, 3),
        x[:, :1],
        x[:1, :, :1],
        np.broadcast_to(x[:, :1], (3, 7, 5, 6)),
        np.broadcast_to(x[0, 0, 0], (9, 6)),
        x[0, 0, 0, :1],
        x[1, 2, 3, 4:5].reshape(()),
    ]


def layout(x: np.ndarray) -> tuple[int, bool, bool]:
    """What CuPy compiles for: the dims that are left when neighbours are merged, and whether memory is dense."""
    strides = [s // x.itemsize for s in x.strides]
    return len(merged(x.shape, [strides])[0]), x.flags.c_contiguous, x.flags.f_contiguous


@pytest.mark.parametrize("case", range(len(views())))
def test_a_tiny_array_lies_as_the_real_one(case: int) -> None:
    x = views()[case]
    tiny = pattern(x).tiny(np)
    assert layout(tiny) == layout(x)
    assert [n == 1 for n in tiny.shape] == [n == 1 for n in x.shape]
    assert [s == 0 for n, s in zip(tiny.shape, tiny.strides, strict=True) if n > 1] == [
        s == 0 for n, s in zip(x.shape, x.strides, strict=True) if n > 1
    ]
    assert tiny.size <= 16


def test_sizes_and_values_make_no_further_call() -> None:
    calls = CupyCalls()
    for n, factor in ((7, 2.0), (9, 3.5)):
        calls.note("multiply", (Lying(np.zeros((n, n + 1), np.float32)), factor))
    calls.note("multiply", (Lying(np.zeros((7, 8), ml_dtypes.bfloat16)), 2.0))
    calls.note("multiply", (Lying(np.zeros((0, 8), np.float32)), 2.0))
    calls.note("multiply", (np.zeros(3), 2.0))
    assert len(calls) == 2


def test_each_call_can_be_made_on_tiny_operands() -> None:
    x, whole = Lying(np.zeros((5, 6), np.float32)), np.dtype(np.int64)
    calls = CupyCalls()
    calls.note("add", (x, x, x))
    calls.note("where", (Lying(np.zeros((5, 1), bool)), 0.0, x))
    calls.note("assign", (Lying(np.zeros((6, 5), np.float32).T), x))
    calls.note("assign", (x, 0.0))
    calls.note("concatenate", (x, x))
    for name, operands in (("astype", (x,)), ("full", (2,)), ("arange", ())):
        calls.note(name, operands, whole)
    assert len(calls) == 8
    for call in calls:
        call.make(np)


def test_every_call_of_a_step_was_foreseen(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Products, "product", lambda *_, **__: None)
    monkeypatch.setattr(OnDevice, "set", lambda *_, **__: None)
    with shape_run(H100) as run:
        step()
    foreseen = {call.name for call in run.kernel_requests.calls}
    OnDevice.operations.clear()
    step()
    same = {"assignment": "assign", "ones": "full", "zeros": "full", "true_divide": "divide"}
    assert {same.get(name, name) for name in OnDevice.operations} <= foreseen


def test_calls_are_made_on_threads_with_memory_of_their_own(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[CupyCall]()
    monkeypatch.setattr(CupyCall, "make", lambda call, xp: made.append(call))
    with shape_run(H100) as run:
        step()
    requests = run.kernel_requests
    asked = list[Any]()
    monkeypatch.setattr(
        "flame_train.engine.backend.cuda.kernel_requests.started", lambda calls, *_: asked.extend(calls)
    )
    gpu.kernels.compile_ahead(requests)
    for call in asked[-len(requests.calls) :]:
        call()
    assert made == [*requests.calls]
