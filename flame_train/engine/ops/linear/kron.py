"""A weight with a Kronecker product added (LoKr, arXiv 2212.10650); its gradients read the weight's once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ....errors import ShapeError
from ...autograd.grad_target import GradTarget, GradTargets
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, DType, float32
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ..common import conditions

_HEADER, _THREADS, _ROWS_A, _ROWS_B, _PACKET = "ops/linear/kron.cuh", 256, 8, 4, 8  # as in that header


@primitive()
def kron_add(xp: Namespace, input: Array, mat1: Array, mat2: Array, scale: float) -> Array:
    """input + scale * kron(mat1, mat2), the kernel of a convolution's input and mat2 flattened

    Args:
        input: (a b, c d, *kernel).
        mat1: (a, c).
        mat2: (b, d, *kernel).

    Returns:
        The sum, in input's shape.
    """
    shape = _Shape.of(input, mat1, mat2)
    first, second = mat1.reshape(shape.a, 1, shape.c, 1), mat2.reshape(1, shape.b, 1, shape.width)
    return (input.reshape(shape.whole) + scale * first * second).reshape(input.shape)


kron_add.vjp("input")(lambda xp, g: g)


@kron_add.vjp("mat1")
def _(xp: Namespace, g: Array, mat1: Array, mat2: Array, scale: float) -> Array:
    whole = g.reshape(_Shape.of(g, mat1, mat2).whole)
    return scale * xp.einsum("abcw,bw->ac", whole, mat2.reshape(len(mat2), -1))


@kron_add.vjp("mat2")
def _(xp: Namespace, g: Array, mat1: Array, mat2: Array, scale: float) -> Array:
    whole = g.reshape(_Shape.of(g, mat1, mat2).whole)
    return scale * xp.einsum("abcw,ac->bw", whole, mat1).reshape(mat2.shape)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A weight as (a, b, c, width): mat1 is (a, c), mat2 (b, width), the kernel in the width."""

    a: int
    b: int
    c: int
    width: int

    @classmethod
    def of(cls, input: Array, mat1: Array, mat2: Array) -> _Shape:
        """Raises ShapeError unless the product of the matrices has the input's shape."""
        if (
            mat1.ndim != 2
            or mat2.ndim < 2
            or tuple(input.shape)
            != (
                mat1.shape[0] * mat2.shape[0],
                mat1.shape[1] * mat2.shape[1],
                *mat2.shape[2:],
            )
        ):
            raise ShapeError(
                "kron_add: expected input (a b, c d, *kernel), mat1 (a, c) and mat2 (b, d, *kernel), got "
                f"{tuple(input.shape)}, {tuple(mat1.shape)} and {tuple(mat2.shape)}"
            )
        return cls(mat1.shape[0], mat2.shape[0], mat1.shape[1], math.prod(mat2.shape[1:]))

    @property
    def whole(self) -> tuple[int, int, int, int]:
        return self.a, self.b, self.c, self.width

    @property
    def packet(self) -> int:
        """Elements that are moved at once."""
        return _PACKET if self.width % _PACKET == 0 else 1


def _condition(input: Array, mat1: Array, mat2: Array) -> str:
    if 0 in (input.size, mat1.size, mat2.size):
        return "nothing to add"
    return conditions.same(conditions.AT_MOST_FP32, input, mat1, mat2)


@kron_add.cuda("packets", when=_condition)
def _(k: Launcher, input: Array, mat1: Array, mat2: Array, scale: float) -> Array:
    shape = _Shape.of(input, mat1, mat2)
    out = k.empty(input.shape, input.dtype)
    names = {"T": input.dtype, "FIRST": float32, "SECOND": float32, "N": shape.packet}
    arrays = (*(k.contiguous(x) for x in (input, mat1, mat2)), out)
    args = (*arrays, *map(np.int32, (shape.b, shape.c, shape.width)), np.float32(scale))
    k.launch_header(_HEADER, "kron_add", names, (shape.a * shape.b,), _THREADS, args)
    return out


@kron_add.cuda_vjp("one pass", "mat1", "mat2", when=_condition)
def _(
    k: Launcher, g: Array, mat1: Array, mat2: Array, scale: float, targets: GradTargets
) -> tuple[Array | None, Array | None]:
    shape = _Shape.of(g, mat1, mat2)
    cut = _Cut.of(shape, k.multiprocessors)
    firsts, seconds = (k.empty(s, float32) for s in (cut.firsts(shape), cut.seconds(shape)))
    places = [_Place.at(k, targets.get(n), m) for n, m in (("mat1", mat1), ("mat2", mat2))]
    names: dict[str, DType | int] = {"T": g.dtype, "N": shape.packet}
    names |= {"FIRST": places[0].array.dtype, "SECOND": places[1].array.dtype}
    arrays = (*(k.contiguous(x) for x in (g, mat1, mat2)), firsts, seconds)
    args = (*arrays, *map(np.int32, (*shape.whole, cut.rows_a, cut.lanes, cut.packs)))
    k.launch_header(_HEADER, "kron_gradients", names, cut.grid(shape), cut.lanes * cut.packs, args)
    sizes = mat1.size, mat2.size, len(firsts), len(seconds), *(p.adds for p in places)
    args = (firsts, seconds, *(p.array for p in places), *map(np.int32, sizes), np.float32(scale))
    k.launch_header(_HEADER, "kron_sums", names, (-(-(mat1.size + mat2.size) // _THREADS),), _THREADS, args)
    found = [p.result for p in places]
    return found[0], found[1]


@dataclass(frozen=True, slots=True)
class _Cut:
    """How blocks share the weight's gradient: threads along c and packets of the width, rows of a."""

    lanes: int
    packs: int
    rows_a: int

    @classmethod
    def of(cls, shape: _Shape, multiprocessors: int) -> _Cut:
        """Returns as many rows as leave two blocks for each multiprocessor."""
        packs = min(shape.width // shape.packet, _THREADS)
        lanes = min(shape.c, _THREADS // packs)
        for rows in (_ROWS_A, _ROWS_A // 2, _ROWS_A // 4):
            cut = cls(lanes, packs, rows)
            if math.prod(cut.grid(shape)) >= 2 * multiprocessors:
                return cut
        return cls(lanes, packs, 1)

    def grid(self, shape: _Shape) -> tuple[int, int, int]:
        return -(-shape.b // _ROWS_B), -(-shape.a // self.rows_a), self._of_c(shape) * self._of_width(shape)

    def _of_c(self, shape: _Shape) -> int:
        return -(-shape.c // self.lanes)

    def _of_width(self, shape: _Shape) -> int:
        return -(-shape.width // (shape.packet * self.packs))

    def firsts(self, shape: _Shape) -> tuple[int, int, int]:
        """Returns the shape of the parts of mat1's gradient."""
        return self.grid(shape)[0] * self._of_width(shape), shape.a, shape.c

    def seconds(self, shape: _Shape) -> tuple[int, int, int]:
        """Returns the shape of the parts of mat2's gradient."""
        return self.grid(shape)[1] * self._of_c(shape), shape.b, shape.width


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a gradient is written, whether it is added to what is there, and what is added to it afterwards."""

    array: Array
    adds: bool
    result_of: GradTarget | None

    @classmethod
    def at(cls, k: Launcher, target: GradTarget | None, like: Array) -> _Place:
        held = None if target is None else target.addend
        if target is not None and held is not None and target.overwrites and held.flags.c_contiguous:
            return cls(held, True, target)
        return cls(k.empty(like.shape, like.dtype if held is None else held.dtype), False, target)

    @property
    def result(self) -> Array | None:
        """The gradient, or None if nobody wants it."""
        if self.result_of is None:
            return None
        held = self.result_of.addend
        return self.array if self.adds or held is None else held + self.array


kron_add.samples(
    sample((6, 8), (2, 4), (3, 2), 0.5),
    sample((6, 8, 3, 3), (3, 2), (2, 4, 3, 3), 0.25),
    sample((20, 48), (4, 3), (5, 16), -1.5),
    sample((6, 4), (1, 1), (6, 4), 1.0),
    sample((0, 4), (0, 2), (3, 2), 1.0),
)
kron_add.perf_samples(sample((160, 160), (10, 10), (16, 16), 0.5), sample((90, 200), (9, 10), (10, 20), 0.5))
kron_add.errors(
    ErrorSample(sample((6, 8), (2, 4), (3, 3), 0.5), ShapeError, r"mat2 \(b, d, \*kernel\), got \(6, 8\), "),
    ErrorSample(sample((6, 8), (2,), (3, 8), 0.5), ShapeError, r"expected input \(a b, c d, \*kernel\)"),
)
