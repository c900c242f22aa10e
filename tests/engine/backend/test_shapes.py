"""Arrays without memory: every op gives shapes and dtypes as on the CPU, views lie as NumPy's.

Peaks of whole steps are held to measured ones in tests/engine/test_shape_run.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import flame_train.engine as flame
from flame_train.engine.backend import backend_of
from flame_train.engine.backend.shapes.pool import Pool
from flame_train.engine.backend.shapes.shape_namespace import ShapeNamespace
from flame_train.engine.gradcheck import generator
from flame_train.engine.op import REGISTRY
from flame_train.engine.op_samples import materialise
from flame_train.engine.shape_run import H100, RTX_3090, shape_run
from tests.engine.backend.test_rehearsal import moved, run

DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]


# ---- ops ------------------------------------------------------------------------------------------------


def values_decide(name: str, bound: dict[str, Any]) -> bool:
    """Whether the result's shape follows from values: a mask's true elements, classes that are counted."""
    if name == "getitem":
        index = bound["index"]
        parts = index if isinstance(index, tuple) else (index,)
        return any(p is not Ellipsis and np.asarray(p).dtype == bool for p in parts)
    return name == "one_hot" and bound["num_classes"] < 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_op_has_the_shapes_and_dtypes_that_it_has_on_the_cpu(name: str, dtype: Any) -> None:
    op = REGISTRY[name]
    for i, s in enumerate(op.iter_samples()):
        host = materialise(op, s, generator(name, i), dtype)
        if values_decide(name, host):
            continue
        for wanted in ({*op.differentiable}, {a for f in op.kernel_formulas for a in f.args}):
            want = run(op, moved(op, host, "cpu"), wanted)
            for gpu in (H100, RTX_3090):
                with shape_run(gpu):
                    assert run(op, moved(op, host, "cuda"), wanted) == want, f"sample {i}, {gpu}"


def test_what_values_decide_is_refused() -> None:
    with shape_run():
        x = flame.tensor(np.ones(3, np.float32), device="cuda")
        with pytest.raises(TypeError, match="not known in a shape run"):
            x[flame.tensor(np.array([True, False, True]), device="cuda")]


# ---- arrays ---------------------------------------------------------------------------------------------


def both(shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], Any]:
    return np.zeros(shape, np.float32), ShapeNamespace(H100).empty(shape, np.float32)


def alike(real: np.ndarray[Any, Any], first: np.ndarray[Any, Any], shaped: Any, begin: Any) -> None:
    """Shape, and where there are elements strides and distance from the first array's begin."""
    assert shaped.shape == real.shape
    if real.size:
        steps = [(s, t) for n, s, t in zip(real.shape, real.strides, shaped.strides, strict=True) if n > 1]
        assert all(s == t for s, t in steps)
        assert shaped.flags.c_contiguous == real.flags.c_contiguous
        apart = real.ctypes.data - first.ctypes.data
        if np.may_share_memory(real, first):
            assert shaped.data.ptr - begin.data.ptr == apart
        assert begin.xp.may_share_memory(shaped, begin) == np.may_share_memory(real, first)


SHAPES = arrays.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=6)


@settings(max_examples=300)
@given(st.data(), SHAPES)
def test_views_of_views_lie_as_numpys(data: st.DataObject, shape: tuple[int, ...]) -> None:
    first, begin = both(shape)
    real, shaped = first, begin
    for _ in range(3):
        how = data.draw(st.sampled_from(["index", "transpose", "reshape", "broadcast"]))
        if how == "index":
            key = data.draw(arrays.basic_indices(real.shape, allow_newaxis=True))
            key = key if isinstance(key, tuple) else (key,)
            key = key if Ellipsis in key else (*key, ...)  # without it NumPy copies single elements
            real, shaped = real[key], shaped[key]
        elif how == "transpose":
            order = data.draw(st.permutations(range(real.ndim)))
            real, shaped = real.transpose(order), shaped.transpose(order)
        elif how == "broadcast":
            real, shaped = np.broadcast_to(real, (2, *real.shape)), shaped.xp.broadcast_to(shaped, (2, *real.shape))
        else:
            size = real.size
            cuts = [n for n in range(1, size + 1) if size % n == 0]
            n = data.draw(st.sampled_from(cuts)) if cuts else 0
            wanted = (n, -1) if n else real.shape
            real, shaped = real.reshape(wanted), shaped.reshape(wanted)
        real = np.asarray(real)
        alike(real, first, shaped, begin)


@given(SHAPES, st.data())
def test_copies_lie_as_numpys(shape: tuple[int, ...], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    real, shaped = (x.transpose(order) for x in both(shape))
    for how in ("C", "K"):
        want, got = real.copy(how), shaped.copy(how)
        steps = zip(want.shape, want.strides, got.strides, strict=True)
        assert all(s == t for n, s, t in steps if n > 1)
        assert not got.xp.may_share_memory(got, shaped)


def test_an_array_belongs_to_its_run() -> None:
    with shape_run() as run:
        x = flame.tensor(np.ones((2, 3), np.float32), device="cuda")
        assert x.device == "cuda"
        assert backend_of(x.data) is run.backend is x.backend
    assert x.backend is run.backend
    with shape_run() as other:
        assert flame.tensor([1.0], device="cuda").backend is other.backend


def test_what_is_not_known_is_named() -> None:
    with shape_run() as run, pytest.raises(AttributeError, match="a shape run has no function 'lexsort'"):
        run.backend.xp.lexsort(None)


# ---- the pool -------------------------------------------------------------------------------------------


def test_sizes_go_up_to_multiples_of_512() -> None:
    pool = Pool()
    some = [pool.malloc(n) for n in (1, 512, 513)]
    assert pool.used_bytes() == pool.total_bytes() == 512 + 512 + 1024
    assert all(p.ptr % 512 == 0 for p in some)
    some.clear()
    assert (pool.used_bytes(), pool.total_bytes()) == (0, 2048)


def test_the_smallest_gap_that_fits_is_cut_to_size() -> None:
    pool = Pool()
    large, small = pool.malloc(4096), pool.malloc(2048)
    places = large.ptr, small.ptr
    del large, small
    first, second = pool.malloc(1024), pool.malloc(1024)
    assert (first.ptr, second.ptr) == (places[1], places[1] + 1024)
    assert pool.malloc(4096).ptr == places[0]
    assert pool.total_bytes() == 4096 + 2048


def test_gaps_side_by_side_become_one() -> None:
    pool = Pool()
    pool.malloc(4096)
    parts = [pool.malloc(1024) for _ in range(4)]
    begin = parts[0].ptr
    del parts[2], parts[0]
    del parts[0]  # between the two
    assert pool.malloc(3072).ptr == begin
    assert pool.total_bytes() == 4096


def test_only_whole_allocations_go_back_to_the_device() -> None:
    pool = Pool()
    pool.malloc(4096)
    kept = pool.malloc(512)
    pool.free_all_blocks()
    assert pool.total_bytes() == 4096
    del kept
    pool.free_all_blocks()
    assert pool.total_bytes() == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20_000)), max_size=80))
def test_nothing_is_given_out_twice(asked: list[tuple[bool, int]]) -> None:
    pool, held = Pool(), dict[Any, int]()
    for take, n in asked:
        if take or not held:
            held[pool.malloc(n)] = n
        else:
            del held[list(held)[n % len(held)]]
        parts = sorted((p.ptr, p.ptr + n) for p, n in held.items())
        assert all(a[1] <= b[0] for a, b in pairwise(parts))
        assert sum(-(-n // 512) * 512 for n in held.values()) == pool.used_bytes() <= pool.total_bytes()
