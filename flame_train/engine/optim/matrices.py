"""Parameters as matrices, for rules that keep means over rows and columns: one buffer for all rows, one for columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..backend import Backend
from ..dtype import Array, float32
from ..namespace import Namespace

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """A shape as `batches` matrices of `rows` by `cols`, each place of which holds `inner` values next to another."""

    batches: int
    rows: int
    cols: int
    inner: int = 1

    def sizes(self) -> dict[str, int]:
        """Returns the means over each row, over each column, and the matrices."""
        return {"row": self.batches * self.rows * self.inner, "col": self.batches * self.cols * self.inner}


def last_two(shape: Shape) -> MatrixShape | None:
    """Rows and columns are the last two dims, as Adafactor has them; a vector is no matrix."""
    return None if len(shape) < 2 else MatrixShape(math.prod(shape[:-2]), *shape[-2:])


AsMatrices = Callable[[Shape], MatrixShape | None]


class Matrices:
    """Where each parameter's rows and columns lie in the buffers `row` and `col`; `whole` has those that are not cut.

    The parameters of a shape lie together, in the order of the arena's stacks. Buffers are (1, n) fp32: they are saved
    whole.
    """

    def __init__(self, segments: Sequence[tuple[Shape, int]], backend: Backend, cut: AsMatrices = last_two) -> None:
        groups: dict[Shape, list[int]] = {}
        for shape, start in segments:
            groups.setdefault(shape, []).append(start)
        self._backend = backend
        self.totals = {"row": 0, "col": 0, "whole": 0}
        self.count = len(segments)
        self._parts: list[dict[str, tuple[int, int, int]]] = []
        rows: list[tuple[int, ...]] = []
        for shape, starts in groups.items():
            found, size = cut(shape), math.prod(shape)
            sizes = {"whole": size} if found is None else found.sizes()
            for i, start in enumerate(starts):
                at = {kind: self.totals[kind] + i * n for kind, n in sizes.items()}
                dims = (1, 1, size, 1) if found is None else (found.batches, found.rows, found.cols, found.inner)
                rows.append((start, *dims, at.get("row", 0), at.get("col", 0), at.get("whole", -1), len(rows), size))
            self._parts.append({kind: (self.totals[kind], len(starts), n) for kind, n in sizes.items()})
            for kind, n in sizes.items():
                self.totals[kind] += n * len(starts)
        self._rows = rows

    def table(self, extra: Mapping[int, int] | None = None) -> Array:
        """Says what `Matrix` in matrices.cuh reads: ten int64 a parameter, the last out of `extra`. Largest first."""
        ordered = sorted(self._rows, key=lambda row: -row[-1])
        given = [(*row[:-1], (extra or {}).get(row[-2], 0)) for row in ordered]
        return self._backend.to_device(np.array(given, np.int64))

    def spans(self) -> list[tuple[int, int]]:
        """Returns where each parameter begins in the flat buffers, and its size, by its number."""
        return [(row[0], row[-1]) for row in self._rows]

    def slices(self, every: int) -> dict[int, int]:
        """Returns where each parameter begins in a buffer of every so many'th value of all, by its number."""
        ends = np.cumsum([-(-size // every) for _, size in self.spans()])
        return dict(enumerate([0, *ends[:-1].tolist()]))

    def zeros(self, name: str) -> dict[str, Array]:
        """Returns the moments `name`_row, `name`_col and `name`_whole; those that no parameter has are left out."""
        xp = self._backend.xp
        return {f"{name}_{kind}": xp.zeros((1, n), float32) for kind, n in self.totals.items() if n}

    def part(self, buffer: Array, kind: str, stack: int) -> Array:
        """Returns what a buffer has of a stack of parameters, (n, size); writes go through."""
        at, n, size = self._parts[stack][kind]
        return buffer[0, at : at + n * size].reshape(n, size)

    def is_cut(self, stack: int) -> bool:
        """Tells whether the parameters of a stack are seen as matrices."""
        return "row" in self._parts[stack]

    @staticmethod
    def joined(xp: Namespace, parts: list[Array]) -> Array:
        """Returns a buffer of the stacks' parts, in order."""
        return xp.concatenate([part.reshape(1, -1) for part in parts], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """All parameters of a shape. `places` (n, 1), on the device, says where each begins in the flat buffers."""

    shape: tuple[int, ...]
    places: Array

    def gather(self, xp: Namespace, flat: Array) -> Array:
        """Returns their part of a flat buffer, (n, *shape); a copy."""
        return flat[self._elements(xp)].reshape(-1, *self.shape)

    def scatter(self, xp: Namespace, flat: Array, values: Array) -> None:
        """Writes (n, *shape) to their places in a flat buffer."""
        flat[self._elements(xp)] = values.reshape(values.shape[0], -1)

    def _elements(self, xp: Namespace) -> Array:
        return self.places + xp.arange(math.prod(self.shape), dtype=np.int64)


def stacks_of(segments: Sequence[tuple[tuple[int, ...], int]], backend: Backend) -> tuple[Stack, ...]:
    """The stacks of parameters, each given by its shape and its start, in the order in which shapes come first."""
    starts: dict[tuple[int, ...], list[int]] = {}
    for shape, start in segments:
        starts.setdefault(shape, []).append(start)
    return tuple(
        Stack(shape, backend.to_device(np.array(found, np.int64).reshape(-1, 1))) for shape, found in starts.items()
    )
