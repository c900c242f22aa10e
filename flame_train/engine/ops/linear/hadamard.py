"""A weight with the elementwise product of two low-rank products added (LoHa, arXiv 2108.06098), and its gradients."""

from __future__ import annotations

import math

import numpy as np

from ....errors import ShapeError
from ...autograd.grad_target import GradTarget, GradTargets
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, float32
from ...namespace import Namespace
from ...op import ErrorSample, primitive, sample
from ..common import conditions
from . import hadamard_mma

_HEADER, _THREADS, _ROWS, _COLUMNS, _PACKET = "ops/linear/hadamard.cuh", 256, 64, 128, 4  # as in that header


@primitive()
def hadamard_add(
    xp: Namespace, input: Array, first_a: Array, first_b: Array, second_a: Array, second_b: Array, scale: float
) -> Array:
    """input + scale * (first_a @ first_b) * (second_a @ second_b), the kernel of a convolution's input flattened

    Args:
        input: (n, m, *kernel).
        first_a: (n, rank).
        first_b: (rank, m * kernel).
        second_a: (n, rank).
        second_b: (rank, m * kernel).

    Returns:
        The sum, in input's shape.
    """
    rows, width, _ = _check(input, first_a, first_b, second_a, second_b)
    update = xp.matmul(first_a, first_b) * xp.matmul(second_a, second_b)
    return (input.reshape(rows, width) + scale * update).reshape(input.shape)


hadamard_add.vjp("input")(lambda xp, g: g)


@hadamard_add.vjp("first_a")
def _(xp: Namespace, g: Array, first_b: Array, second_a: Array, second_b: Array, scale: float) -> Array:
    return xp.matmul(_of_product(xp, g, (second_a, second_b), scale), first_b.T)


@hadamard_add.vjp("first_b")
def _(xp: Namespace, g: Array, first_a: Array, second_a: Array, second_b: Array, scale: float) -> Array:
    return xp.matmul(first_a.T, _of_product(xp, g, (second_a, second_b), scale))


@hadamard_add.vjp("second_a")
def _(xp: Namespace, g: Array, second_b: Array, first_a: Array, first_b: Array, scale: float) -> Array:
    return xp.matmul(_of_product(xp, g, (first_a, first_b), scale), second_b.T)


@hadamard_add.vjp("second_b")
def _(xp: Namespace, g: Array, second_a: Array, first_a: Array, first_b: Array, scale: float) -> Array:
    return xp.matmul(second_a.T, _of_product(xp, g, (first_a, first_b), scale))


def _of_product(xp: Namespace, g: Array, others: tuple[Array, Array], scale: float) -> Array:
    """Returns the gradient of one product, (n, m * kernel), given the factors of the other."""
    return scale * g.reshape(len(g), others[1].shape[1]) * xp.matmul(*others)


def _check(input: Array, *factors: Array) -> tuple[int, int, int]:
    """Rows, width and rank. Raises ShapeError unless both products of `factors` have the input's shape as a matrix."""
    rows, width = (input.shape[0], math.prod(input.shape[1:])) if input.ndim > 1 else (-1, -1)
    rank = factors[0].shape[-1] if factors[0].ndim else -1
    shapes = [tuple(x.shape) for x in factors]
    if shapes != [(rows, rank), (rank, width)] * 2:
        raise ShapeError(
            "hadamard_add: expected input (n, m, *kernel) and twice (n, rank) and (rank, m * kernel), got "
            f"{tuple(input.shape)}, {', '.join(map(str, shapes))}"
        )
    return rows, width, rank


def _condition(input: Array, first_a: Array, first_b: Array, second_a: Array, second_b: Array) -> str:
    if 0 in (input.size, first_a.size):
        return "nothing to add"
    if any(rows > 65_535 * _ROWS for rows in input.shape[:1]):
        return "more rows than a launch has blocks for"
    return conditions.same(conditions.AT_MOST_FP32, input, first_a, first_b, second_a, second_b)


@hadamard_add.cuda("tiles", when=_condition)
def _(
    k: Launcher, input: Array, first_a: Array, first_b: Array, second_a: Array, second_b: Array, scale: float
) -> Array:
    out = k.empty(input.shape, input.dtype)
    _launch(k, "hadamard_add", (input, first_a, first_b, second_a, second_b), out, scale)
    return out


@hadamard_add.cuda_vjp("tiles", "first_a", "first_b", "second_a", "second_b", when=_condition)
def _(
    k: Launcher,
    g: Array,
    first_a: Array,
    first_b: Array,
    second_a: Array,
    second_b: Array,
    scale: float,
    targets: GradTargets,
) -> tuple[Array | None, Array | None, Array | None, Array | None]:
    rows, width, rank = _check(g, first_a, first_b, second_a, second_b)
    if hadamard_mma.fit_gradients(k, g, rank):
        wanted = [targets.get(name) for name in ("first_a", "second_a", "first_b", "second_b")]
        kernels = hadamard_mma.Kernels(k, (g, first_a, first_b, second_a, second_b), scale)
        of_first_a, of_second_a, of_first_b, of_second_b = kernels.gradients(wanted)
        return of_first_a, of_first_b, of_second_a, of_second_b
    of_products = k.empty((2, rows, width), g.dtype)
    _launch(k, "hadamard_gradients", (g, first_a, first_b, second_a, second_b), of_products, scale)
    left, right = k.stacked([first_a, second_a]), k.stacked([first_b, second_b])
    of_left = _products(k, of_products, right.transpose(0, 2, 1), (targets.get("first_a"), targets.get("second_a")))
    of_right = _products(k, left.transpose(0, 2, 1), of_products, (targets.get("first_b"), targets.get("second_b")))
    return of_left[0], of_right[0], of_left[1], of_right[1]


def _launch(k: Launcher, kernel: str, arrays: tuple[Array, ...], out: Array, scale: float) -> None:
    """Launches a kernel of hadamard.cuh, or hadamard_mma.cuh's of that name."""
    rows, width, rank = _check(*arrays)
    if hadamard_mma.fit(k, out):
        return hadamard_mma.Kernels(k, arrays, scale).fill(kernel, out)
    names = {"T": arrays[0].dtype, "N": _PACKET if width % _PACKET == 0 else 1}
    numbers = (*map(np.int32, (rows, width, rank)), np.float32(scale))
    grid = -(-width // _COLUMNS), -(-rows // _ROWS)
    k.launch_header(_HEADER, kernel, names, grid, _THREADS, (*map(k.contiguous, arrays), out, *numbers))


def _products(k: Launcher, a: Array, b: Array, targets: tuple[GradTarget | None, ...]) -> list[Array | None]:
    """Computes two products of one shape at once, fp32, added in place where both gradients lie alike."""
    held = [None if t is None or not t.overwrites else t.addend for t in targets]
    if all(x is not None and x.dtype == float32 and x.flags.c_contiguous for x in held):
        block = k.as_stacked_view(held)
        if block is not None:
            k.matmul(a, b, out=block, plus=block)
            return held
    made = k.matmul(a, b, out_dtype=float32)
    return [_sum(target, each) for target, each in zip(targets, made, strict=True)]


def _sum(target: GradTarget | None, made: Array) -> Array | None:
    if target is None:
        return None
    return target.total(made)


hadamard_add.samples(
    sample((6, 8), (6, 2), (2, 8), (6, 2), (2, 8), 0.5),
    sample((3, 4, 3, 3), (3, 2), (2, 36), (3, 2), (2, 36), 0.25),
    sample((5, 7), (5, 3), (3, 7), (5, 3), (3, 7), -1.5),
    sample((0, 4), (0, 2), (2, 4), (0, 2), (2, 4), 1.0),
    sample((3, 4), (3, 0), (0, 4), (3, 0), (0, 4), 1.0),
)
hadamard_add.perf_samples(
    *(
        sample((m, *n), (m, r), (r, math.prod(n)), (m, r), (r, math.prod(n)), 0.5)
        for m, n, r in ((160, (160,), 8), (131, (9, 3, 3), 16), (75, (136,), 24), (35, (150,), 7), (40, (72,), 80))
    )
)
hadamard_add.errors(
    ErrorSample(sample((6, 8), (6, 2), (2, 8), (6, 2), (3, 8), 0.5), ShapeError, r"twice \(n, rank\)"),
    ErrorSample(sample((6, 8), (5, 2), (2, 8), (5, 2), (2, 8), 0.5), ShapeError, r"expected input \(n, m, \*kernel\)"),
)
