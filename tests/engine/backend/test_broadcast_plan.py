"""The elementwise planner: walking an operand by its layout meets the same elements as NumPy's broadcasting."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from flame_train.engine.backend.cuda.codegen.broadcast_plan import Operand, plan

Host = np.ndarray[Any, Any]


def operand(base: Host, view: Host) -> tuple[Operand, int]:
    """A view as the planner sees it, and where in `base`, counted in elements, it begins."""
    start = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // base.itemsize
    strides = tuple(s // base.itemsize for s in view.strides)
    return Operand(view.shape, strides, base.itemsize, start * base.itemsize % 16), start


def walked(memory: Host, start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[float]:
    flat = memory.ravel(order="K")
    steps = (sum(i * s for i, s in zip(at, strides, strict=True)) for at in itertools.product(*map(range, sizes)))
    return [float(flat[start + step]) for step in steps]


def cases() -> list[tuple[Host, ...]]:
    a, b = np.arange(4 * 6 * 16, dtype=np.float32).reshape(4, 6, 16), np.arange(16, dtype=np.float32)
    return [
        (a, a + 1),
        (a, b),
        (a, np.arange(24, dtype=np.float32).reshape(4, 6, 1)),
        (a.transpose(0, 2, 1), a.transpose(0, 2, 1) + 1),
        (a[:, ::2, 8:], b[:8]),
        (np.flip(a, 1), np.float32(2).reshape(())),
        (np.broadcast_to(b, (4, 6, 16)), a),
        (a[:1, :1, :1], a[1:2, :1, 3:4]),
        (a.reshape(-1)[1:], a.reshape(-1)[:-1]),
        (a[..., :7].copy(), b[:7], np.arange(24, dtype=np.float32).reshape(4, 6, 1)),
    ]


@pytest.mark.parametrize("case", range(len(cases())))
def test_every_operand_is_walked_as_numpy_broadcasts_it(case: int) -> None:
    views = cases()[case]
    shape = np.broadcast_shapes(*(v.shape for v in views))
    seen = [operand(v.base if v.base is not None else v, v) for v in views]
    layout = plan(shape, [o for o, _ in seen], 1, 4)
    for view, (_, start), strides in zip(views, seen, layout.strides, strict=False):
        memory = view.base if view.base is not None else view
        expected = np.broadcast_to(view, shape).transpose(layout.order).reshape(-1).tolist()
        assert walked(memory, start, layout.sizes, strides) == expected


def test_the_new_output_is_dense_and_lies_as_the_first_whole_operand() -> None:
    x = Operand((2, 3, 4), (12, 1, 3), 4)  # channels last
    layout = plan((2, 3, 4), [Operand((3, 1), (1, 1), 4), x], 1, 4)
    assert layout.order == (0, 2, 1)
    assert layout.strides[-1] == (3, 1)


def test_packets_are_as_wide_as_sizes_strides_and_addresses_allow() -> None:
    def width(*operands: Operand, shape: tuple[int, ...]) -> int:
        return plan(shape, operands, 1, operands[0].itemsize).width

    assert width(Operand((7, 5), (5, 1), 2), shape=(7, 5)) == 8  # one dim: a remainder is no matter
    assert width(Operand((7, 5), (5, 1), 4), shape=(7, 5)) == 4
    assert width(Operand((7, 5), (5, 1), 2, offset=4), shape=(7, 5)) == 2
    assert width(Operand((7, 12), (24, 1), 2), shape=(7, 12)) == 4
    assert width(Operand((7, 12), (1, 7), 2), Operand((7, 12), (12, 1), 2), shape=(7, 12)) == 1


def test_packets_go_on_from_row_to_row_where_what_is_broadcast_is_small() -> None:
    def width(row: Operand, *, itemsize: int = 2, offset: int = 0, shape: tuple[int, ...] = (7, 49)) -> int:
        layout = plan(shape, [Operand(shape, (shape[1], 1), itemsize, offset), row], 1, itemsize)
        assert layout.across == (layout.width > 1)
        return layout.width

    assert width(Operand((7, 1), (1, 1), 2)) == 8
    assert width(Operand((49,), (1,), 2)) == 8
    assert width(Operand((7, 1), (1, 1), 4), itemsize=4) == 4
    assert width(Operand((7, 1), (1, 1), 2), offset=2) == 1  # the dense one cannot be read by packets
    assert width(Operand((3, 49), (98, 1), 2), shape=(3, 49)) == 1  # rows apart: as many elements as the result
    assert width(Operand((1, 49), (49, 1), 2), shape=(3, 49)) == 1  # met three times
    n = 2**16
    assert width(Operand((n + 1,), (1,), 2), shape=(n, n + 1)) == 1  # indices of 64 bits


def test_more_elements_than_32_bits_count_are_noticed() -> None:
    n = 2**31
    assert plan((n,), [Operand((n,), (1,), 2)], 1, 2).wide
    assert not plan((n // 2,), [Operand((n // 2,), (1,), 2)], 1, 2).wide
    assert plan((2, 8), [Operand((2, 8), (n, 1), 2)], 1, 2).wide


@pytest.mark.parametrize("case", range(3))
def test_a_result_that_exists_is_written_in_packets_where_its_source_lies_otherwise(case: int) -> None:
    x = np.arange(4 * 6 * 16, dtype=np.float32).reshape(4, 6, 16)
    view = [x[..., ::-1], x.transpose(2, 0, 1), x.reshape(4, 2, 3, 4, 4).transpose(0, 1, 3, 2, 4)[..., ::2]][case]
    out = np.arange(view.size, dtype=np.float32).reshape(view.shape)
    (source, start), (target, _) = operand(x, view), operand(out, out)
    layout = plan(view.shape, [source, target], 0, 4, given=1)
    assert layout.across
    assert layout.width == 4
    assert walked(x, start, layout.sizes, layout.strides[0]) == view.reshape(-1).tolist()
    assert walked(out, 0, layout.sizes, layout.strides[1]) == out.reshape(-1).tolist()


def test_a_result_with_gaps_is_written_element_by_element() -> None:
    x, out = Operand((4, 6), (1, 4), 4), Operand((4, 6), (7, 1), 4)
    layout = plan((4, 6), [x, out], 0, 4, given=1)
    assert not layout.across
    assert layout.width == 1


def test_truth_values_alone_come_in_packets_of_sixteen() -> None:
    one, row = Operand((5, 64), (64, 1), 1), Operand((64,), (1,), 1)
    assert plan((5, 64), [one, row], 1, 1).width == 16
    assert plan((5, 64), [one, Operand((5, 64), (64, 1), 4)], 1, 1).width == 4
