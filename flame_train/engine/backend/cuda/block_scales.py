"""Products of e4m3 whose scales stand for blocks of 32 numbers (MXFP8), on compute capability 12.

There tensor cores multiply plain e4m3 at half the rate of products that are scaled by blocks. A block's scale is a
power of two in 8 bits, UE8M0, and so is a row's factor (`ops/linear/e4m3.py`): it is the scale of all blocks of its
row, exactly. No product has run on such a card yet. So one is compared with a plain one before the first is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ....errors import DeviceFault, EnvironmentFault
from ...dtype import Array, bfloat16, float32, uint8
from .dual_gemm import Operands
from .nvrtc import begin

SINCE: Final = 120
"""The compute capability of the first cards whose products are so."""
BLOCK: Final = 32
_ROWS, _BLOCKS, _THREADS = 128, 4, 256  # of a tile of scales; of a launch
_KERNEL = begin(False) + '#include "backend/cuda/block_scales.cuh"\n'


class BlockScales:
    """Makes the scales that cuBLASLt reads."""

    def __init__(self, cupy: Any, modules: Any) -> None:
        self._xp, self._modules = cupy, modules

    def __call__(self, factors: Array, columns: int) -> Array:
        """Returns the scales of rows of so many columns, in tiles as block_scales.cuh says, uint8.

        Args:
            factors: powers of two, the bits of float32 (R,).
            columns: a multiple of `BLOCK`.
        """
        down, across = -(-len(factors) // _ROWS), -(-columns // (_BLOCKS * BLOCK))
        made = self._xp.empty((down, across, _ROWS * _BLOCKS), uint8)
        words = made.size // 4
        arguments = factors, made.view(np.uint32), np.int32(len(factors)), np.int32(across), np.int32(words)
        self._modules.generated(_KERNEL, "spread")((-(-words // _THREADS),), (_THREADS,), arguments)
        return made


def lacking(xp: Any, by_blocks: Callable[[Operands], None], plain: Callable[[Operands], None]) -> str:
    """Says why products by blocks cannot be used; "" if one is equal to a plain product.

    Its numbers are -1, 0 and 1, its factors powers of two: both are exact in any order of sums. Its sizes fill no tile
    of scales, and several.

    Args:
        xp: CuPy.
        by_blocks, plain: the ways.
    """
    rng, (m, n, k) = np.random.default_rng(0), (272, 144, 8 * BLOCK)
    a, b = (xp.asarray(rng.choice(np.array([0, 0x38, 0xB8], np.uint8), (rows, k))) for rows in (m, n))
    factors = [xp.asarray(np.ldexp(np.float32(1), rng.integers(-8, 8, rows)).astype(float32)) for rows in (m, n)]
    made = []
    for way in (by_blocks, plain):
        out = xp.empty((m, n), bfloat16)
        try:
            way(Operands(a, b.T, None, None, out, factors=(factors[0], factors[1])))
        except (DeviceFault, EnvironmentFault) as e:
            return str(e)
        made.append(out.view(np.uint16))
    return "" if bool((made[0] == made[1]).all()) else "a product scaled by blocks differs from a plain one"
