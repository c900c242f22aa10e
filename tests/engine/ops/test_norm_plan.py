"""How group norms are cut into blocks that wait for each other: what norm.cu relies on, at any size and on any card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame_train.engine import ops
from flame_train.engine.ops.norm import _best_cut, _Card, _Work

KIB = 1 << 10
TEXT = (Path(ops.__file__).parent / "norm.cu").read_text(encoding="utf-8")
CONSTANTS = {name: int(value) for name, value in re.findall(r"constexpr int ([A-Z]+) = (\d+)", TEXT)}

H200 = _Card(132, 227 * KIB)


@given(
    batch=st.integers(1, 300), pixels=st.integers(1, 1 << 16), vectors=st.integers(1, 384), per=st.integers(1, 64),
    element=st.sampled_from([2, 4]), multiprocessors=st.integers(1, 200), shared=st.sampled_from([99, 163, 227]),
    arrays=st.sampled_from([1, 2]),
)  # fmt: skip
def test_what_the_kernels_rely_on(
    batch: int, pixels: int, vectors: int, per: int, element: int, multiprocessors: int, shared: int, arrays: int
) -> None:
    channels = 8 * vectors
    groups = channels // per if channels % per == 0 else channels
    card = _Card(multiprocessors, shared * KIB)
    cut = _best_cut(card, _Work(batch, pixels, channels, groups, element * arrays))
    blocks, at_once = cut.grid
    width, items = channels // cut.splits, batch * cut.splits
    rows, packet = cut.threads * 8 // width, 8 * element * arrays
    assert width * cut.splits == channels
    assert width % 8 == 0
    assert groups % cut.splits == 0
    assert 1 <= cut.threads <= CONSTANTS["THREADS"]
    assert cut.threads * 8 == rows * width
    assert (blocks - 1) * cut.span < pixels <= blocks * cut.span, "each pixel has a block, and each block a pixel"
    assert blocks == 1 or blocks * at_once <= multiprocessors, "blocks that wait are there at once"
    assert blocks == 1 or 2 * at_once <= multiprocessors, "and there are two barriers for each item at once"
    assert at_once <= items
    assert (cut.turns - 1) * at_once < items <= cut.turns * at_once
    assert cut.shared <= card.shared_bytes
    beside = cut.shared - cut.threads * cut.most * packet
    assert beside >= 4 * (2 * groups // cut.splits + 2 * rows * width), "sums of groups, and of threads a channel"
    each = -(-cut.span // rows)
    assert 1 <= cut.most <= each * cut.turns
    assert cut.room_for < 2 or cut.most >= each * min(cut.turns, 2)
    assert cut.room_for < 1 or cut.most >= each


@pytest.mark.parametrize(
    ("batch", "side", "channels", "arrays", "splits", "turns"),
    [
        (4, 128, 320, 1, 1, 4), (4, 128, 320, 2, 2, 8), (4, 128, 960, 1, 4, 16), (4, 128, 960, 2, 8, 32),
        (4, 64, 640, 1, 1, 2), (4, 32, 1280, 1, 1, 1), (1, 128, 320, 1, 1, 1), (1, 128, 320, 2, 2, 2),
        (1, 32, 1280, 2, 1, 1),
    ],
)  # fmt: skip
def test_what_is_taken_in_turns(
    batch: int, side: int, channels: int, arrays: int, splits: int, turns: int
) -> None:  # fmt: skip
    """Large arrays are taken in turns of items of which two have room; what is small all at once."""
    cut = _best_cut(H200, _Work(batch, side * side, channels, 32, 2 * arrays))
    assert (cut.splits, cut.turns, cut.room_for) == (splits, turns, 2)
    assert cut.grid[0] * cut.grid[1] > 0.55 * H200.multiprocessors


def test_what_no_cut_makes_room_for() -> None:
    cut = _best_cut(H200, _Work(1, 1 << 20, 128, 32, 2))
    assert (cut.grid, cut.room_for) == ((132, 1), 0)
