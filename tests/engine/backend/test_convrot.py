"""Kernels that rotate rows by groups of columns, run as C++ (machine.cpp), against explicit Hadamard matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.dtype import bfloat16, int8, int32
from flame_train.engine.ops.linear.scaled_storage import encode
from tests.engine.ops.test_convrot import rotation

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiler")]

ROWS = [
    (3, 16, 16),
    (5, 48, 16),
    (2, 64, 64),
    (2, 320, 64),
    (3, 640, 64),
    (3, 256, 256),
    (2, 768, 256),
    (1, 3072, 256),
    (2, 1280, 256),
]


def test_rows_are_rotated_before_they_are_rounded(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one packet a thread and of several, that share a block or not, and a part of their last packets.

    As they are stored, in 16 bits, and as they are computed from that.
    """
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    rng, k = np.random.default_rng(0), gpu.kernels

    def once() -> list[tuple[Any, ...]]:
        made = []
        for n, width, group in ROWS:
            x, w = (rng.standard_normal((n, width)).astype(np.float32) for _ in range(2))
            on = flame.tensor(x, bfloat16, "cuda")
            plain, twice = (encode(k, on.data, int8, None, value, None, group) for value in ("x", "2.f * x"))
            stored = F.int8_quantize(flame.tensor(w), group)
            held = [flame.tensor(s.numpy(), device="cuda") for s in stored]
            back = [F.scaled_dequantize(*held, dtype, group).numpy() for dtype in ("float32", "bfloat16")]
            codes = [[each.get() for each in pair] for pair in (plain, twice)]
            made.append((on.numpy().astype(np.float64), codes, stored, back, group))
        return made

    once()
    compiled.build()
    for x, codes, stored, (back, short), group in once():
        turn = rotation(x.shape[1], group)
        for by, (data, scales) in enumerate(codes, 1):
            step = scales.view(np.float32)[:, None].astype(np.float64)
            assert np.abs(data * step - by * x @ turn).max() <= 0.501 * step.max()
        numbers = stored[0].numpy() * stored[1].numpy().view(np.float32)[:, None].astype(np.float64)
        np.testing.assert_allclose(back, numbers @ turn, rtol=0, atol=2e-6 * np.abs(numbers).max())
        np.testing.assert_allclose(short.astype(np.float64), numbers @ turn, rtol=2**-8, atol=1e-5 * numbers.max())


@pytest.mark.parametrize("adds", [False, True])
def test_a_gradient_is_rotated_back_from_whole_sums(
    gpu: Any, compiled: Any, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The addend is no part of the rotation, and may be the result's own memory."""
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    rng, k, (m, inner, n) = np.random.default_rng(1), gpu.kernels, (5, 32, 512)
    a, b = (rng.integers(-127, 128, (r, inner)).astype(np.int8) for r in (m, n))
    by, across = (rng.uniform(1e-3, 1e-2, r).astype(np.float32) for r in (m, n))
    plus = rng.standard_normal((m, n)).astype(bfloat16)
    on = [flame.tensor(x, device="cuda").data for x in (a, by.view(np.uint32), b, across.view(np.uint32))]
    for again in range(2):
        out = flame.tensor(plus, device="cuda").data
        k.scaled_product(tuple(on[:2]), tuple(on[2:]), out=out, plus=out if adds else None, rotated=256)
        if not again:
            compiled.build()
    exact = (a.astype(int32) @ b.astype(int32).T) * by[:, None].astype(np.float64) * across
    want = exact @ rotation(n, 256) + (plus.astype(np.float64) if adds else 0)
    got = out.get().astype(np.float64)
    assert np.abs(got - want).max() <= 2**-8 * np.abs(want).max()
    assert np.linalg.norm(got - want) < 3e-3 * np.linalg.norm(want)
