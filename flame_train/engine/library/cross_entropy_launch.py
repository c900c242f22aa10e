"""How cross_entropy.cuh is launched: the logits as its kernels see them, how they are cut, and the losses summed up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arguments import Arguments
from ..backend.cuda.launcher import Launcher
from ..dtype import Array, float32, int64, is_float
from ..ops.common.dims import Shape, class_dim

_HEADER, _THREADS = "library/cross_entropy.cuh", 256  # its BLOCK

_PLAIN = {"WIDTH": 1, "THREADS": 32, "SPREAD": 0, "PROBS": 0}
"""The header's constants for kernels that do not use them."""


@dataclass(frozen=True, slots=True)
class Classes(Arguments):
    """What predictions are compared with: classes, or probabilities in their shape, and what each class weighs."""

    target: Array
    weight: Array | None
    ignore_index: int


@dataclass(frozen=True, slots=True)
class Softmax(Arguments):
    """The softmax of each place's logits: x - max_logit - log_sum is the logarithm of a class's probability."""

    max_logit: Array
    log_sum: Array

    def operands(self, x: Logits) -> dict[str, Array]:
        """Returns the operands of expressions over these logarithms."""
        return {"input": x.x, "max_logit": x.spread(self.max_logit), "log_sum": x.spread(self.log_sum)}


@dataclass(frozen=True, slots=True)
class Logits:
    """The logits as `x` (outer, classes, inner), and how everything else broadcasts to that.

    `shape` is the input's own. There is a loss for each of the `places`, outer * inner.
    """

    x: Array
    shape: Shape

    @classmethod
    def of(cls, k: Launcher, input: Array) -> Logits:
        dim = class_dim(input.shape)
        outer, inner = math.prod(input.shape[:dim]), math.prod(input.shape[dim + 1 :])
        return cls(k.contiguous(input).reshape(outer, input.shape[dim], inner), input.shape)

    @property
    def places(self) -> int:
        return self.x.size // self.x.shape[1]

    def reduced_shape(self) -> Shape:
        """Returns the input's shape with the class dim reduced to 1."""
        dim = class_dim(self.shape)
        return (*self.shape[:dim], 1, *self.shape[dim + 1 :])

    def spread(self, a: Array) -> Array:
        """Returns an array with an element for each place, or one for all, shaped to broadcast over `x`."""
        return a.reshape(self.x.shape[0], 1, -1) if a.size > 1 else a.reshape(1, 1, 1)

    def by_class(self, weight: Array | None) -> Any:
        """Returns a weight (classes,) shaped to broadcast over `x`; 1 without one."""
        return 1.0 if weight is None else weight.reshape(1, -1, 1)


def _dense(k: Launcher, a: Array | None) -> Array:
    """Returns an optional array as a kernel takes it: dense, or a null pointer."""
    return np.int64(0) if a is None else k.contiguous(a)


def _cut(k: Launcher, x: Logits) -> tuple[str, dict[str, int], tuple[int, ...]]:
    """Returns the name of the kernel for these logits, its WIDTH of packets and THREADS to a place, and its grid."""
    outer, classes, inner = x.x.shape
    limit = 1 if x.x.data.ptr % 16 else 16 // x.x.itemsize
    if inner == 1:
        threads = 32 if classes <= 1024 else _THREADS
        cut = {"WIDTH": math.gcd(classes, limit), "THREADS": threads}
        return "entropy_rows", cut, (-(-outer // (_THREADS // threads)),)
    width = math.gcd(inner, limit)
    threads = _THREADS if x.places // width > 1024 * k.multiprocessors and inner >= _THREADS * width else 32
    return "entropy_columns", {"WIDTH": width, "THREADS": threads}, (outer * -(-inner // (threads * width)),)


def picked(k: Launcher, x: Logits, classes: Classes) -> tuple[Array, Array]:
    """Returns each place's loss and weight, fp32 (places,), for log-probabilities `x`."""
    loss, loss_weight = (k.empty((x.places,), float32) for _ in range(2))
    types, grid = {"T": x.x.dtype, "G": classes.target.dtype, **_PLAIN}, (-(-x.places // _THREADS),)
    arrays = x.x, k.xp.ascontiguousarray(classes.target), _dense(k, classes.weight), loss, loss_weight
    sizes = np.int32(x.places), np.int32(x.x.shape[1]), np.int32(x.x.shape[2]), np.int64(classes.ignore_index)
    k.launch_header(_HEADER, "picked", types, grid, _THREADS, (*arrays, *sizes))
    return loss, loss_weight


def entropy(k: Launcher, x: Logits, classes: Classes, label_smoothing: float) -> list[Array]:
    """Returns each place's max_logit, log_sum, weight_sum (see `cross_entropy`), loss and weight, fp32 (places,)."""
    probabilities, nothing = is_float(classes.target.dtype), np.int64(0)
    kernel, cut, grid = _cut(k, x)
    types = {"T": x.x.dtype, "G": int64 if probabilities else classes.target.dtype}
    spread = {"SPREAD": int(probabilities or label_smoothing > 0), "PROBS": int(probabilities)}
    made = [k.empty((x.places,), float32) for _ in range(5)]
    outer, count, inner = x.x.shape
    target = k.xp.ascontiguousarray(classes.target)
    targets = (nothing, target) if probabilities else (target, nothing)
    numbers = np.int32(outer if inner == 1 else inner), np.int32(count), np.float32(label_smoothing)
    args = (x.x, *targets, _dense(k, classes.weight), *made, *numbers, np.int64(classes.ignore_index))
    k.launch_header(_HEADER, kernel, types | cut | spread, grid, _THREADS, args)
    return made


def totals(k: Launcher, x: Logits, loss: Array, loss_weight: Array, reduction: str) -> tuple[Array, Array]:
    """Returns the losses reduced as `reduction` says, in the logits' dtype, and the sum of their weights.

    Blocks sum up stretches, and further launches the blocks' sums, until one is left.
    """
    if reduction == "none":
        shape = [n for i, n in enumerate(x.shape) if i != class_dim(x.shape)]
        return k.elementwise(("loss",), {"loss": loss}, (x.x.dtype,))[0].reshape(shape), loss_weight
    result = k.empty((), x.x.dtype)
    mean = np.int32(reduction == "mean")
    while True:
        span = max(16384, -(-loss.size // 512))
        blocks = -(-loss.size // span)
        a, b = (k.empty((blocks,), float32) for _ in range(2))
        k.launch_header(
            _HEADER,
            "totals",
            {"T": x.x.dtype, "G": int64, **_PLAIN},
            (blocks,),
            512,
            (loss, loss_weight, a, b, result, np.int32(loss.size), np.int32(span), mean),
        )
        if blocks == 1:
            return result, b.reshape(())
        loss, loss_weight = a, b


def grad_operands(k: Launcher, x: Logits, g: Array, classes: Classes, total: Array, reduction: str) -> dict[str, Any]:
    """Returns the operands of the gradients' expressions.

    Args:
        x: the logits, or log-probabilities.
        g: the gradient of the reduced loss, or of each place's.
        classes: what they are compared with.
        total: what a mean divides by.
        reduction: as in `loss`.

    Returns:
        The operands by name. `index` is each element's class, `g / total` the gradient of a place's loss.
    """
    target, probabilities = classes.target, is_float(classes.target.dtype)
    return {
        "target": target.reshape(x.x.shape) if probabilities else x.spread(target),
        "index": 0.0 if probabilities else k.xp.arange(x.x.shape[1], dtype=float32).reshape(1, -1, 1),
        "weight": x.by_class(classes.weight),
        "g": x.spread(g),
        "ignored": float(classes.ignore_index),
        "total": x.spread(total) if reduction == "mean" else 1.0,
    }
