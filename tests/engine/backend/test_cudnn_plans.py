"""Making a plan of cuDNN's keeps nothing of what it was made for."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flame_train.engine.backend.cuda.autotuner import AutotuneCache
from flame_train.engine.backend.cuda.launch_hooks import LaunchHooks
from flame_train.engine.backend.cuda.libraries import cudnn
from flame_train.engine.backend.cuda.workspace import Workspace
from flame_train.engine.mode import set_float32_matmul_precision


class NotSupported(Exception):
    """What the frontend raises where cuDNN declines."""


class Described:
    """A tensor or a graph of the frontend's: takes whatever it is told."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def get_uid(self) -> int:
        return 0


class Plan(Described):
    """A graph of which cuDNN's second heuristic knows nothing, which the frontend notes as it does in earnest."""

    def create_execution_plans(self, modes: list[str]) -> None:
        failure = None
        for mode in modes:
            try:
                if mode != "A":
                    raise NotSupported(mode)
            except NotSupported as e:
                failure = e  # in a cycle with this frame, which holds those of all callers
        assert failure is not None

    def get_workspace_size(self) -> int:
        return 0

    def serialize(self) -> bytes:
        return b""


@pytest.fixture
def library(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> cudnn.CuDnn:
    """cuDNN over a stand-in for its frontend."""
    frontend = SimpleNamespace(
        backend_version=lambda: 1,
        __version__="1",
        create_handle=object,
        set_stream=lambda **_: None,
        data_type=SimpleNamespace(FLOAT="f", HALF="h", BFLOAT16="b", INT32="i"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="B"),
        numerical_note=SimpleNamespace(TENSOR_CORE=0, DOWN_CONVERT_INPUTS=1, WINOGRAD=2, NONDETERMINISTIC=3),
        pygraph=lambda **_: Plan(),
        cudnnGraphNotSupportedError=NotSupported,
    )
    monkeypatch.setitem(sys.modules, "cudnn", frontend)
    monkeypatch.setattr(cudnn, "load", lambda _: None)
    return cudnn.CuDnn(gpu.xp, gpu.stream, AutotuneCache(None, "here"), LaunchHooks(), Workspace(gpu.xp))


@pytest.fixture(params=[True, False], ids=["on", "off"])
def collector(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the garbage collector is on; it collects nothing by itself either way."""
    threshold = gc.get_threshold()
    gc.set_threshold(0)
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()
    gc.set_threshold(*threshold)


def test_a_plan_made_keeps_no_array_alive(library: cudnn.CuDnn, gpu: Any, collector: bool) -> None:
    """A first step would else keep all that its plans were made for until the collector comes by."""

    def once() -> weakref.ref[Any]:
        x, w, out = (gpu.empty((1, 4, 4, 8), np.dtype(np.float32)) for _ in range(3))
        library.conv_forward(x, w, None, out, cudnn.Steps((1, 1), (0, 0), (1, 1)))
        return weakref.ref(x)

    assert once()() is None
    assert gc.isenabled() is collector


def test_a_convolution_works_in_no_more_than_a_few_times_its_operands(
    library: cudnn.CuDnn, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast the plan is that asks for more."""
    limits = list[int]()
    monkeypatch.setattr(Plan, "deselect_workspace_greater_than", lambda _, most: limits.append(most), raising=False)
    small, large = ([gpu.empty((1, n, n, 128), np.dtype(np.float32)) for _ in range(3)] for n in (4, 1024))
    for x, w, out in (small, large):
        library.conv_forward(x, w, None, out, cudnn.Steps((1, 1), (0, 0), (1, 1)))
    assert limits == [1 << 30, 4 * 3 * 4 * 1024 * 1024 * 128]


@pytest.mark.parametrize(
    ("dtype", "precision", "barred"),
    [
        ("float32", "highest", {"TENSOR_CORE", "DOWN_CONVERT_INPUTS", "WINOGRAD", "NONDETERMINISTIC"}),
        ("float32", "high", {"DOWN_CONVERT_INPUTS", "WINOGRAD", "NONDETERMINISTIC"}),
        ("float16", "high", {"NONDETERMINISTIC"}),
    ],
)
def test_tensor_cores_take_fp32_only_where_that_was_chosen(
    library: cudnn.CuDnn, gpu: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, precision: Any, barred: set[str]
) -> None:
    found = list[int]()
    monkeypatch.setattr(Plan, "deselect_numeric_notes", lambda self, notes: found.extend(notes), raising=False)
    x, w, out = (gpu.empty((1, 4, 4, 8), np.dtype(dtype)) for _ in range(3))
    with set_float32_matmul_precision(precision):
        library.conv_forward(x, w, None, out, cudnn.Steps((1, 1), (0, 0), (1, 1)))
    assert set(found) == {getattr(library._cudnn.numerical_note, name) for name in barred}


def test_plans_of_either_precision_are_told_apart(library: cudnn.CuDnn, gpu: Any) -> None:
    x, w, out = (gpu.empty((1, 4, 4, 8), np.dtype(np.float32)) for _ in range(3))
    for precision in ("highest", "high", "highest"):
        with set_float32_matmul_precision(precision):
            library.conv_forward(x, w, None, out, cudnn.Steps((1, 1), (0, 0), (1, 1)))
    assert len(library._plans) == 2


def test_a_kept_plan_that_works_in_too_much_is_made_anew(
    library: cudnn.CuDnn, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sizes = list[int](), [165 << 30, 0, 0, 0]
    monkeypatch.setattr(library._cache, "get", lambda question: b'{"x": 1, "w": 2, "y": 3}\nplan')
    monkeypatch.setattr(Plan, "get_workspace_size", lambda _: sizes.pop(0))
    monkeypatch.setattr(Plan, "build_plans", lambda _: made.append(1), raising=False)
    for images in (4, 5):  # the second's kept plan is small, and taken
        x, w, out = (gpu.empty((1, images, 4, 8), np.dtype(np.float32)) for _ in range(3))
        library.conv_forward(x, w, None, out, cudnn.Steps((1, 1), (0, 0), (1, 1)))
    assert len(made) == 1
