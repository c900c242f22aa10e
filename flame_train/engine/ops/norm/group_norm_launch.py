"""How group_norm.cu is launched: how images are divided among blocks, and the kernels' arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...autograd.grad_target import ALLOCATE, GradTarget, GradTargets
from ...backend.cuda.codegen.kernel_ir import Extent, Operands, Reduction
from ...backend.cuda.launcher import Launcher
from ...dtype import Array, DType, float32
from ..common.dims import Shape

_FILE = "ops/norm/group_norm.cu"
_THREADS = 512  # as in group_norm.cu
_EACH = 256  # bytes of shared memory for a thread: 3072 channels, 8 to a thread, take 96 of the 99 KiB all GPUs have
_SUMS, _TURNS = 64, 64  # of these, bytes for sums and for the gradient that is added to
_LEAST = 4  # pixels to a thread
_PARTS = 1 << 14  # partial sums of an image, one for each group and block; every block reads them all


class Plan:
    """How group_norm.cu divides an array (B, ..., C): a block to a multiprocessor, each with some pixels of an image.

    A block keeps as much of the arrays that it reads as fits into its shared memory.

    Args:
        k: launches kernels.
        shape: the array's shape.
        itemsize: bytes of an element.
        groups: groups of channels.
        arrays: how many arrays of that shape a block reads.
        adds: whether a gradient is added to another.
    """

    def __init__(self, k: Launcher, shape: Shape, itemsize: int, groups: int, arrays: int, adds: bool = False) -> None:
        batch, channels = shape[0], shape[-1]
        pixels, vec = math.prod(shape[1:-1]), channels // 8
        rows = max(1, min(_THREADS, k.shared_bytes // _EACH) // vec)
        images = min(batch, k.multiprocessors)
        wanted = max(1, min(k.multiprocessors // images, _PARTS // groups, pixels // (_LEAST * rows)))
        each = -(-pixels // (wanted * rows))  # pixels to a thread
        self.threads, self.grid = vec * rows, (-(-pixels // (each * rows)), images)
        fixed, packets = _SUMS + _TURNS * adds, 8 * itemsize * arrays
        most = min(each, (k.shared_bytes // self.threads - fixed) // packets)
        self.shared = self.threads * (fixed + most * packets)
        self.workspace = (k.empty((batch, self.grid[0], groups, 2), float32), k.barriers)
        self.sizes = tuple(np.int32(n) for n in (batch, pixels, channels))
        self.cut = tuple(np.int32(n) for n in (groups, each * rows, most))

    def launch(
        self, k: Launcher, kernel: str, dtype: DType, args: Sequence[Any], split: int, *numbers: np.generic
    ) -> None:
        """Launches a kernel of group_norm.cu."""
        sizes = (*self.sizes, np.int32(split), *self.cut)
        args = (*args, *self.workspace, *sizes, *numbers)
        resident = self.grid[0] > 1
        k.launch(_FILE, kernel, dtype, self.grid, self.threads, args, self.shared, cooperative=resident)


@dataclass(frozen=True, slots=True)
class Given:
    """A group norm's operands: input (..., C1), and other (..., C2) behind its channels, plus shift (B, C1 + C2)."""

    input: Array
    other: Array | None = None
    shift: Array | None = None

    @property
    def shape(self) -> Shape:
        """The shape (..., C1 + C2) of input and other side by side."""
        added = 0 if self.other is None else self.other.shape[-1]
        return *self.input.shape[:-1], self.input.shape[-1] + added

    def arrays(self, k: Launcher) -> tuple[Any, ...]:
        """Returns all three as the kernels take them: dense, or null pointers."""
        return tuple(_NONE if a is None else k.contiguous(a) for a in (self.input, self.other, self.shift))


_NONE = np.intp(0)  # a null pointer


def forward(
    k: Launcher, given: Given, groups: int, weight: Array, bias: Array, eps: float, silu: bool
) -> tuple[Array, Array, Array]:
    """Returns the normalised array (B, ..., C), and its groups' mean and rstd, fp32 (B, 1, groups, 1).

    Args:
        given: the operands.
        groups: groups of channels.
        weight, bias: (C,).
        silu: whether SiLU follows.
    """
    shape, dtype = given.shape, given.input.dtype
    mean, rstd = (k.empty((shape[0], 1, groups, 1), float32) for _ in range(2))
    y = k.empty(shape, dtype)
    args = (*given.arrays(k), weight, bias, mean, rstd, y)
    plan = Plan(k, shape, dtype.itemsize, groups, 1)
    plan.launch(k, "group_norm", dtype, args, given.input.shape[-1], np.float32(eps), np.int32(silu))
    return y, mean, rstd


def _memory(k: Launcher, target: GradTarget, x: Array) -> tuple[Array, Array | np.intp]:
    """Returns memory for an input's gradient, and the gradient it is added to, or a null pointer."""
    buffer = target.buffer
    out = buffer if buffer is not None and buffer.flags.c_contiguous else k.empty(x.shape, x.dtype)
    return out, _NONE if target.addend is None else k.contiguous(target.addend)


@dataclass(frozen=True, slots=True)
class Saved:
    """What gradients are computed from; `silu` says whether the norm was followed by SiLU."""

    given: Given
    weight: Array
    bias: Array
    mean: Array
    rstd: Array
    silu: bool


def gradients(k: Launcher, g: Array, saved: Saved, targets: GradTargets) -> dict[str, Array]:
    """The gradients that are needed, by name. Those of weight and bias are by-products of the sums an input's needs."""
    given, groups = saved.given, saved.mean.shape[2]
    shape, dtype = given.shape, given.input.dtype
    plan = Plan(
        k,
        shape,
        dtype.itemsize,
        groups,
        2,
        any(targets.get(n, ALLOCATE).addend is not None for n in ("input", "other")),
    )
    sides = [n for n in ("bias", "weight") if n in targets]
    channels = k.empty((shape[0] * plan.grid[0], 2 * shape[-1]), float32) if sides else _NONE
    made, outs, addends = dict[str, Array](), list[Any](), list[Any]()
    for name, x in (("input", given.input), ("other", given.other)):
        wanted = x is not None and name in targets
        out, addend = _memory(k, targets[name], x) if wanted else (_NONE, _NONE)
        outs.append(out)
        addends.append(addend)
        made |= {name: out} if wanted else {}
    args = (*given.arrays(k), k.contiguous(g), saved.weight, saved.bias, saved.mean, saved.rstd, *addends, *outs)
    split = given.input.shape[-1]
    plan.launch(k, "group_norm_gradient", dtype, (*args, channels), split, np.int32(saved.silu))
    if sides:
        both = dict(zip(("bias", "weight"), _channel_sums(k, channels), strict=True))
        made |= {name: both[name] for name in sides}
    for name in sides:
        if targets[name].addend is not None:
            added = {"made": made[name], "addend": targets[name].addend}
            made[name] = k.elementwise(("made + addend",), added, (float32,))[0]
    return made


def _channel_sums(k: Launcher, channels: Array) -> tuple[Array, Array]:
    """Returns the blocks' sums for each channel, of which there are two, added up."""
    whole = k.columns([Reduction("sum", "each")], Operands({"each": channels}), Extent(1, *channels.shape), float32)
    first, second = whole[0].reshape(2, -1)
    return first, second
