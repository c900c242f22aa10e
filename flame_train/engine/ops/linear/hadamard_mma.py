"""When and how hadamard_mma.cuh is launched: LoHa's update and its gradients by tensor cores, in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...autograd.grad_target import GradTarget
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32
from ..common import conditions

_HEADER, _THREADS, _WARPS, _ROWS, _COLUMNS = "ops/linear/hadamard_mma.cuh", 128, 4, 16, 64  # as in that header
_RANKS = 16  # of a product's operand
_LARGEST_RANK = 64  # above it the products cost more to make again than their gradients cost to store
_MOST_PARTS = 65_535
_NULL = np.uint64(0)


def fit(k: Launcher, x: Array) -> bool:
    """Tells whether these kernels take operands of x's dtype."""
    return k.compute_capability >= 80 and x.dtype in conditions.LOW


def fit_gradients(k: Launcher, g: Array, rank: int) -> bool:
    """Tells whether the factors' gradients are made without those of the two products in memory."""
    return fit(k, g) and rank <= _LARGEST_RANK


class Kernels:
    """The kernels for one call: a weight or its gradient and first_a, first_b, second_a, second_b."""

    def __init__(self, k: Launcher, arrays: Sequence[Array], scale: float) -> None:
        self.k, self.arrays, self.scale = k, [k.contiguous(x) for x in arrays], np.float32(scale)
        self.rows, self.rank = arrays[1].shape
        self.width = arrays[2].shape[1]
        in_packets = self.width % 8 == 0 and all(x.data.ptr % 16 == 0 for x in self.arrays)
        in_pairs = self.rank % 2 == 0 and all(x.data.ptr % 4 == 0 for x in self.arrays)
        self.chunks = -(-self.rank // _RANKS)
        self.names = {"T": arrays[0].dtype, "N": 8 if in_packets else 1, "EVEN": int(in_pairs), "CHUNKS": self.chunks}
        self.held = 3 if in_packets and self.chunks == 1 else 2  # blocks that a multiprocessor has room for
        self.across, self.down = -(-self.width // _COLUMNS), -(-self.rows // (_WARPS * _ROWS))

    def fill(self, kernel: str, out: Array) -> None:
        """Runs a kernel that leaves arrays of the weight's size in `out`."""
        numbers = *map(np.int32, (self.rows, self.width, self.rank)), self.scale
        self._launch(kernel, (self.across, self.down), (*self.arrays, out, *numbers))

    def gradients(self, targets: Sequence[GradTarget | None]) -> list[Array | None]:
        """Returns the gradients of first_a, second_a, first_b and second_b, fp32 where nothing has arrived.

        One is added in place where the one that has arrived is fp32 and may be written over.
        """
        self.k.launch_hooks.multiplied("LoHa gradients", 8 * self.rows * self.width * self.rank)
        of_a, count_a = self._parts("hadamard_of_a", self.down, self.across, (self.down * _WARPS * _ROWS, self._ranks))
        of_b, count_b = self._parts("hadamard_of_b", self.across, self.down, (self._ranks, self.across * _COLUMNS))
        lengths = of_a.shape[2], of_b.shape[3]
        held = [_held(t) for t in targets]
        shapes = [(self.rows, self.rank)] * 2 + [(self.rank, self.width)] * 2
        made = [
            None if t is None else self.k.empty(s, float32) if h is None else h
            for t, h, s in zip(targets, held, shapes, strict=True)
        ]
        adds = sum((h is not None) << i for i, h in enumerate(held))
        numbers = map(np.int32, (self.rows, self.width, self.rank, count_a, count_b, *lengths, adds))
        grid = -(-max(self.rows, self.width) * self.rank // _THREADS), len(made)
        self._launch("hadamard_totals", grid, (of_a, of_b, *(_NULL if x is None else x for x in made), *numbers))
        return [
            x if t is None or h is not None or x is None else t.total(x)
            for t, h, x in zip(targets, held, made, strict=True)
        ]

    @property
    def _ranks(self) -> int:
        return self.chunks * _RANKS

    def _parts(self, kernel: str, blocks: int, steps: int, shape: tuple[int, int]) -> tuple[Array, int]:
        """Sums over parts of the rows or the columns, (parts, 2, *shape), and as many as keep the card busy."""
        parts = max(1, self.held * self.k.multiprocessors // (blocks * self.chunks))
        each = -(-steps // min(parts, steps, _MOST_PARTS))
        parts = -(-steps // each)
        made = self.k.empty((parts, 2, *shape), float32)
        numbers = *map(np.int32, (self.rows, self.width, self.rank, each)), self.scale
        self._launch(kernel, (blocks, parts, self.chunks), (*self.arrays, made, *numbers))
        return made, parts

    def _launch(self, kernel: str, grid: Sequence[int], args: Sequence[object]) -> None:
        self.k.launch_header(_HEADER, kernel, self.names, grid, _THREADS, args)


def _held(target: GradTarget | None) -> Array | None:
    """Returns the gradient that has arrived, if the kernel may add to it where it is."""
    if target is None or not target.overwrites:
        return None
    held = target.addend
    return held if held is not None and held.dtype == float32 and held.flags.c_contiguous else None
