"""Group norms are cut into blocks that wait for each other as group_norm.cu needs it, for any size and card."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flame_train.engine import ops
from flame_train.engine.ops.norm.group_norm_launch import Plan

KIB = 1 << 10
TEXT = (Path(ops.__file__).parents[1] / "ops/norm/group_norm.cu").read_text(encoding="utf-8")
CONSTANTS = {name: int(value) for name, value in re.findall(r"constexpr int ([A-Z]+) = (\d+)", TEXT)}
"""Threads at most, and the bytes on their way to a thread, of which gradients share half each between two arrays."""


@given(
    batch=st.integers(1, 300),
    pixels=st.integers(1, 1 << 16),
    vectors=st.integers(1, 384),
    per=st.integers(1, 64),
    dtype=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    multiprocessors=st.integers(1, 200),
    shared=st.sampled_from([99, 163, 227]),
    arrays=st.sampled_from([1, 2]),
    adds=st.booleans(),
)
def test_what_the_kernels_rely_on(
    batch: int,
    pixels: int,
    vectors: int,
    per: int,
    dtype: type,
    multiprocessors: int,
    shared: int,
    arrays: int,
    adds: bool,
) -> None:
    channels = 8 * vectors
    groups = channels // per if channels % per == 0 else channels
    itemsize = np.dtype(dtype).itemsize
    k = SimpleNamespace(
        multiprocessors=multiprocessors, shared_bytes=shared * KIB, empty=lambda shape, kind: shape, barriers=None
    )
    adds = adds and arrays == 2
    plan = Plan(k, (batch, pixels, channels), itemsize, groups, arrays, adds)
    *_, span, most = map(int, plan.cut)
    blocks, images = plan.grid
    rows, packet = plan.threads // vectors, 8 * itemsize
    assert 32 <= plan.threads <= CONSTANTS["THREADS"]
    assert plan.threads == rows * vectors
    assert span % rows == 0
    assert (blocks - 1) * span < pixels <= blocks * span, "each pixel has a block, and each block a pixel"
    assert blocks == 1 or blocks * images <= multiprocessors, "blocks that wait are there at once"
    assert blocks == 1 or images == batch, "and no image comes after another"
    assert plan.shared <= k.shared_bytes
    ahead = CONSTANTS["AHEAD"] // packet // arrays
    assert most == span // rows or most >= ahead, "room for all, or for those on their way"
    beside = plan.shared - plan.threads * most * packet * arrays
    assert beside >= 2 * rows * channels * 4 + adds * plan.threads * ahead * packet
    assert beside >= 4 * (2 * groups if groups > plan.threads // 2 else 2 * groups + 2 * plan.threads)
    assert plan.workspace[0] == (batch, blocks, groups, 2)
