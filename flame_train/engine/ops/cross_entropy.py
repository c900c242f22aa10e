"""The loss between predictions and classes, from logits or log-probabilities. `reduction` is as in `loss`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ShapeError
from ..dtype import Array, float32, int32, int64, is_float
from ..op import ErrorSample, Sample, primitive, sample
from ..sample import integers, positive
from .conditions import AT_MOST_FP32, same
from .dims import Shape
from .index import check_within
from .loss import check_pair, reduced


@primitive(torch="nn.functional.nll_loss", aux=("total",))
def nll_loss(
    xp: Any, input: Array, target: Array, weight: Array | None = None, *, ignore_index: int = -100,
    reduction: str = "mean",
) -> tuple[Array, Array]:  # fmt: skip
    """-weight[target] * input[target] along the class dim; the mean is over the weights, ignore_index counts nothing

    input holds log-probabilities, (C,) or (B, C, ...); target the classes, () or (B, ...).
    """
    w = _class_weights(xp, input, target, weight, ignore_index)
    dim = _class_dim(input.shape)
    ignored = target == ignore_index
    at = xp.expand_dims(xp.where(ignored, 0, target), dim)
    chosen = xp.squeeze(xp.take_along_axis(input, at, axis=dim), dim)
    loss, total = -w * xp.where(ignored, 0.0, chosen), xp.sum(w)
    return (xp.sum(loss) / total if reduction == "mean" else reduced(xp, loss, reduction)), total


def _class_dim(shape: Shape) -> int:
    return 0 if len(shape) == 1 else 1


def _class_weights(xp: Any, input: Array, target: Array, weight: Array | None, ignore_index: int) -> Array:
    """Each target's weight, zero where it is ignored. Raises where shapes do not fit or there is no such class."""
    dim = _class_dim(input.shape)
    if input.ndim == 0 or tuple(target.shape) != (*input.shape[:dim], *input.shape[dim + 1 :]):
        raise ShapeError(
            f"nll_loss: expected input (B, C, ...) and classes (B, ...), "
            f"got {tuple(input.shape)}, {tuple(target.shape)}"
        )
    if target.dtype.kind not in "iu":
        raise ShapeError(f"nll_loss: expected whole-number classes, got {target.dtype.name}")
    _check_weight(input, weight)
    ignored = target == ignore_index
    classes = xp.where(ignored, 0, target)
    check_within(xp, "nll_loss", classes[~ignored] if xp is np else classes, input.shape[dim])
    counted = (~ignored).astype(input.dtype)
    return counted if weight is None else counted * weight[classes]


def _check_weight(input: Array, weight: Array | None) -> None:
    """Raises ShapeError unless there is a weight for each class."""
    classes = input.shape[_class_dim(input.shape)]
    if weight is not None and weight.shape != (classes,):
        raise ShapeError(f"nll_loss: expected {classes} weights, one a class, got shape {tuple(weight.shape)}")


def _divisor(xp: Any, total: Array, target: Array, ignore_index: int) -> Array:
    """What a mean's gradients are divided by: where all targets are ignored they are zero, though the mean is not."""
    return xp.where(xp.all(target == ignore_index), 1.0, total)


nll_loss.nograd("target")
nll_loss.refuses_grad("weight")


@nll_loss.vjp("input")
def _(
    xp: Any, g: Array, input_shape: Shape, input: Array, target: Array, weight: Array | None, total: Array,
    ignore_index: int, reduction: str,
) -> Array:  # fmt: skip
    w = _class_weights(xp, input, target, weight, ignore_index)
    each = -g * (w / _divisor(xp, total, target, ignore_index) if reduction == "mean" else w)
    dim = _class_dim(input_shape)
    classes = xp.arange(input_shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(input_shape))])
    return xp.where(classes == xp.expand_dims(target, dim), xp.expand_dims(each, dim), 0.0)


@nll_loss.samples
def _() -> Iterator[Sample]:
    yield sample((4, 3), integers(3, 4))
    yield sample((2, 3, 4), integers(3, 2, 4), positive(3), reduction="sum")
    yield sample((4, 3), integers(3, 4), positive(3), ignore_index=1)
    yield sample((4, 3), integers(3, 4), ignore_index=1, reduction="none")
    yield sample((3,), integers(3))


@nll_loss.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((4, 3), integers(3, 3)), ShapeError, r"got \(4, 3\), \(3,\)")
    yield ErrorSample(sample((4, 3), integers(3, 4), positive(4)), ShapeError, r"expected 3 weights.*got shape \(4,\)")
    yield ErrorSample(sample((2, 3), np.array([3, 0])), IndexError, r"in \[0, 3\), got 0 to 3")
    yield ErrorSample(sample((2, 3), np.array([-1, -100])), IndexError, r"in \[0, 3\), got -1 to -1")
    yield ErrorSample(sample((4, 3), (4,)), ShapeError, "expected whole-number classes, got float64")


@primitive(torch="nn.functional.cross_entropy", aux=("peak", "rest", "mass", "total"), whole=("target",))
def cross_entropy(
    xp: Any, input: Array, target: Array, weight: Array | None = None, *, ignore_index: int = -100,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> tuple[Array, Array, Array, Array, Array]:  # fmt: skip
    """-sum(target * log_softmax(input)) over the classes, dim 1 of input (B, C, ...) or dim 0 of (C,)

    target holds classes, (B, ...), or probabilities in input's shape. label_smoothing mixes in the uniform
    distribution (arXiv 1512.00567). With classes the mean is over their weights, with probabilities over B and space.
    """
    dim = _class_dim(input.shape)
    peak = xp.max(input, axis=dim, keepdims=True) if input.size else input
    rest = xp.log(xp.sum(xp.exp(input - peak), axis=dim, keepdims=True))
    parts, total = _parts(xp, input, target, weight, ignore_index, label_smoothing)
    loss = -xp.sum(parts * xp.where(parts == 0, 0.0, input - peak - rest), axis=dim)
    result = xp.sum(loss) / total if reduction == "mean" else reduced(xp, loss, reduction)
    return result, peak, rest, xp.sum(parts, axis=dim, keepdims=True), total


def _parts(
    xp: Any, input: Array, target: Array, weight: Array | None, ignore_index: int, smoothing: float
) -> tuple[Array, Any]:
    """The factor of each class's log-probability, in input's shape, and what a mean divides by."""
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"cross_entropy: expected label_smoothing in [0, 1], got {smoothing}")
    dim = _class_dim(input.shape)
    along = [-1 if d == dim else 1 for d in range(input.ndim)]
    by_class = 1.0 if weight is None else weight.reshape(along)
    even = smoothing / input.shape[dim]
    if is_float(target.dtype):
        check_pair("cross_entropy", input, target)
        _check_weight(input, weight)
        return by_class * (target * (1.0 - smoothing) + even), xp.full((), _places(input), input.dtype)
    w = _class_weights(xp, input, target, weight, ignore_index)
    chosen = xp.arange(input.shape[dim]).reshape(along) == xp.expand_dims(target, dim)
    parts = xp.where(chosen, xp.expand_dims(w, dim), 0.0)
    if smoothing:
        counted = xp.expand_dims(target != ignore_index, dim)
        parts = parts * (1.0 - smoothing) + even * by_class * counted
    return parts, xp.sum(w)


def _places(input: Array) -> int:
    """How many losses there are."""
    return input.size // max(input.shape[_class_dim(input.shape)], 1)


def _each(xp: Any, g: Array, dim: int, total: Any, reduction: str) -> Array:
    """The gradient of each entry's loss, ready to be spread over the classes."""
    return g / total if reduction == "mean" else g if reduction == "sum" else xp.expand_dims(g, dim)


cross_entropy.refuses_grad("weight")


@cross_entropy.vjp("input")
def _(
    xp: Any, g: Array, input: Array, target: Array, weight: Array | None, peak: Array, rest: Array, mass: Array,
    total: Array, ignore_index: int, reduction: str, label_smoothing: float,
) -> Array:  # fmt: skip
    dim = _class_dim(input.shape)
    parts, _ = _parts(xp, input, target, weight, ignore_index, label_smoothing)
    slope = xp.exp(input - peak - rest) * mass - parts
    if not is_float(target.dtype):
        total = _divisor(xp, total, target, ignore_index)
    return _each(xp, g, dim, total, reduction) * slope


@cross_entropy.vjp("target")
def _(
    xp: Any, g: Array, input: Array, weight: Array | None, peak: Array, rest: Array, total: Array, reduction: str,
    label_smoothing: float,
) -> Array:  # fmt: skip
    dim = _class_dim(input.shape)
    by_class = 1.0 if weight is None else weight.reshape([-1 if d == dim else 1 for d in range(input.ndim)])
    return -_each(xp, g, dim, total, reduction) * (1.0 - label_smoothing) * by_class * (input - peak - rest)


@cross_entropy.samples
def _() -> Iterator[Sample]:
    yield sample((4, 3), integers(3, 4))
    yield sample((2, 3, 4), integers(3, 2, 4), positive(3), reduction="sum")
    yield sample((4, 3), integers(3, 4), positive(3), ignore_index=1, label_smoothing=0.1)
    yield sample((4, 3), integers(3, 4), ignore_index=1, reduction="none", label_smoothing=0.2)
    yield sample((4, 3), positive(4, 3), positive(3), label_smoothing=0.1)
    yield sample((2, 3, 2), positive(2, 3, 2), reduction="none")
    yield sample((3,), integers(3))


@cross_entropy.errors
def _() -> Iterator[ErrorSample]:
    yield ErrorSample(sample((4, 3), integers(3, 3)), ShapeError, r"got \(4, 3\), \(3,\)")
    yield ErrorSample(sample((4, 3), integers(3, 4), positive(4)), ShapeError, r"expected 3 weights.*got shape \(4,\)")
    yield ErrorSample(sample((2, 3), np.array([3, 0])), IndexError, r"in \[0, 3\), got 0 to 3")
    yield ErrorSample(sample((2, 3), np.array([-1, -100])), IndexError, r"in \[0, 3\), got -1 to -1")
    yield ErrorSample(sample((4, 3), (4, 2)), ShapeError, "cross_entropy: .* must have one shape")
    yield ErrorSample(sample((4, 3), positive(4, 3), positive(1)), ShapeError, "expected 3 weights")
    yield ErrorSample(sample((4, 3), integers(3, 4), label_smoothing=2.0), ValueError, r"in \[0, 1\], got 2.0")
    yield ErrorSample(sample((4, 3), integers(3, 4), reduction="max"), ValueError, "got 'max'")


# ---- kernels ------------------------------------------------------------------------------------------------------

_HEADER, _THREADS, _EXACT = "cross_entropy.cuh", 256, 1 << 24  # its BLOCK; whole numbers that fp32 has


def _no_losses(input: Array, target: Array, weight: Array | None, ignore_index: int, reduction: str) -> str:
    """Why the kernels cannot take these arguments; those that are refused are left to the reference to refuse."""
    if reason := same(AT_MOST_FP32, input, weight):
        return reason
    if not 0 < input.size < 2**31:
        return "nothing to compute with, or too much"
    dim = _class_dim(input.shape)
    fits = target.shape == (*input.shape[:dim], *input.shape[dim + 1 :]) and reduction in ("mean", "sum", "none")
    if not fits or (weight is not None and weight.shape != (input.shape[dim],)):
        return "shapes or a reduction that are refused"
    if target.dtype not in (int32, int64):
        return f"no kernel for classes in {target.dtype.name}"
    return "" if max(abs(ignore_index), input.shape[dim]) <= _EXACT else "more classes than fp32 counts"


def _no_entropy(
    input: Array, target: Array, weight: Array | None, ignore_index: int, reduction: str, label_smoothing: float
) -> str:
    if not 0.0 <= label_smoothing <= 1.0:
        return "a smoothing that is refused"
    if not is_float(target.dtype):
        return _no_losses(input, target, weight, ignore_index, reduction)
    fits = target.shape == input.shape != () and reduction in ("mean", "sum", "none")
    if not fits or (weight is not None and weight.shape != (input.shape[_class_dim(input.shape)],)):
        return "shapes or a reduction that are refused"
    return same(AT_MOST_FP32, input, target, weight) or ("" if 0 < input.size < 2**31 else "nothing, or too much")


@dataclass(frozen=True, slots=True)
class _Logits:
    """The input as (outer, classes, inner), and how everything else meets it."""

    x: Array
    shape: Shape

    @classmethod
    def of(cls, k: Any, input: Array) -> _Logits:
        dim = _class_dim(input.shape)
        outer, inner = math.prod(input.shape[:dim]), math.prod(input.shape[dim + 1 :])
        return cls(k.rows_first(input).reshape(outer, input.shape[dim], inner), input.shape)

    @property
    def places(self) -> int:
        return self.x.size // self.x.shape[1]

    def kept(self) -> Shape:
        """The input's shape with one class."""
        dim = _class_dim(self.shape)
        return (*self.shape[:dim], 1, *self.shape[dim + 1 :])

    def spread(self, a: Array) -> Array:
        """Something of each place, or one number for all, ready to meet `x`."""
        return a.reshape(self.x.shape[0], 1, -1) if a.size > 1 else a.reshape(1, 1, 1)

    def by_class(self, weight: Array | None) -> Any:
        return 1.0 if weight is None else weight.reshape(1, -1, 1)


def _dense(k: Any, a: Array | None) -> Array:
    """For a kernel: dense, or a null pointer."""
    return np.int64(0) if a is None else k.rows_first(a)


def _total(k: Any, x: _Logits, loss: Array, weigh: Array, reduction: str) -> tuple[Array, Array]:
    """The losses as `reduction` says, in the logits' dtype, and the sum of their weights."""
    if reduction == "none":
        shape = [n for i, n in enumerate(x.shape) if i != _class_dim(x.shape)]
        return k.elementwise(("loss",), {"loss": loss}, (x.x.dtype,))[0].reshape(shape), weigh
    result = k.empty((), x.x.dtype)
    mean = np.int32(reduction == "mean")
    while True:
        span = max(16384, -(-loss.size // 512))
        blocks = -(-loss.size // span)
        a, b = (k.empty((blocks,), float32) for _ in range(2))
        k.launch_typed(_HEADER, "totals", {"T": x.x.dtype, "G": int64, **_PLAIN}, (blocks,), 512,
                       (loss, weigh, a, b, result, np.int32(loss.size), np.int32(span), mean))  # fmt: skip
        if blocks == 1:
            return result, b.reshape(())
        loss, weigh = a, b


_PLAIN = {"WIDTH": 1, "THREADS": 32, "SPREAD": 0, "CHANCES": 0}


@nll_loss.cuda("flame", when=_no_losses)
def _(
    k: Any, input: Array, target: Array, weight: Array | None, ignore_index: int, reduction: str
) -> tuple[Array, Array]:
    x = _Logits.of(k, input)
    loss, weigh = (k.empty((x.places,), float32) for _ in range(2))
    k.launch_typed(
        _HEADER, "chosen", {"T": input.dtype, "G": target.dtype, **_PLAIN}, (-(-x.places // _THREADS),), _THREADS,
        (x.x, k.xp.ascontiguousarray(target), _dense(k, weight), loss, weigh,
         np.int32(x.places), np.int32(x.x.shape[1]), np.int32(x.x.shape[2]), np.int64(ignore_index)),
    )  # fmt: skip
    return _total(k, x, loss, weigh, reduction)


@nll_loss.cuda_vjp("flame", "input", when=_no_losses)
def _(
    k: Any, g: Array, input: Array, target: Array, weight: Array | None, total: Array, ignore_index: int,
    reduction: str,
) -> Array:  # fmt: skip
    x = _Logits.of(k, input)
    operands = _slope_operands(k, x, g, target, weight, total, ignore_index, reduction)
    value = "target == at && target != ignored ? -weight * (g / total) : 0.f"
    return k.elementwise((value,), operands, (input.dtype,), x.x.shape)[0].reshape(x.shape)


def _slope_operands(
    k: Any, x: _Logits, g: Array, target: Array, weight: Array | None, total: Array, ignored: int, reduction: str
) -> dict[str, Any]:
    """What the gradients' expressions name: `at` is each element's class, `g / total` what a place's loss has got."""
    chances = is_float(target.dtype)
    return {
        "target": target.reshape(x.x.shape) if chances else x.spread(target),
        "at": 0.0 if chances else k.xp.arange(x.x.shape[1], dtype=float32).reshape(1, -1, 1),
        "weight": x.by_class(weight), "g": x.spread(g), "ignored": float(ignored),
        "total": x.spread(total) if reduction == "mean" else 1.0,
    }  # fmt: skip


def _cut(k: Any, x: _Logits) -> tuple[str, dict[str, int], tuple[int, ...]]:
    """The kernel for the logits, with how it is cut into packets and threads, and its grid."""
    outer, classes, inner = x.x.shape
    limit = 1 if x.x.data.ptr % 16 else 16 // x.x.itemsize
    if inner == 1:
        threads = 32 if classes <= 1024 else _THREADS
        cut = {"WIDTH": math.gcd(classes, limit), "THREADS": threads}
        return "entropy_rows", cut, (-(-outer // (_THREADS // threads)),)
    width = math.gcd(inner, limit)
    threads = _THREADS if x.places // width > 1024 * k.multiprocessors and inner >= _THREADS * width else 32
    return "entropy_columns", {"WIDTH": width, "THREADS": threads}, (outer * -(-inner // (threads * width)),)


@cross_entropy.cuda("flame", when=_no_entropy)
def _(
    k: Any, input: Array, target: Array, weight: Array | None, ignore_index: int, reduction: str,
    label_smoothing: float,
) -> tuple[Array, Array, Array, Array, Array]:  # fmt: skip
    x, chances, nothing = _Logits.of(k, input), is_float(target.dtype), np.int64(0)
    kernel, cut, grid = _cut(k, x)
    types = {"T": input.dtype, "G": int64 if chances else target.dtype}
    spread = {"SPREAD": int(chances or label_smoothing > 0), "CHANCES": int(chances)}
    made = [k.empty((x.places,), float32) for _ in range(5)]
    outer, classes, inner = x.x.shape
    target = k.xp.ascontiguousarray(target)
    k.launch_typed(
        _HEADER, kernel, types | cut | spread, grid, _THREADS,
        (x.x, nothing if chances else target, target if chances else nothing, _dense(k, weight), *made,
         np.int32(outer if inner == 1 else inner), np.int32(classes), np.float32(label_smoothing),
         np.int64(ignore_index)),
    )  # fmt: skip
    peak, rest, mass = (a.reshape(x.kept()) for a in made[:3])
    result, total = _total(k, x, made[3], made[4], reduction)
    return result, peak, rest, mass, total


@cross_entropy.cuda_vjp("flame", "input", when=_no_entropy)
def _(
    k: Any, g: Array, input: Array, target: Array, weight: Array | None, peak: Array, rest: Array, mass: Array,
    total: Array, ignore_index: int, reduction: str, label_smoothing: float,
) -> Array:  # fmt: skip
    x = _Logits.of(k, input)
    operands = _slope_operands(k, x, g, target, weight, total, ignore_index, reduction)
    operands |= {"peak": x.spread(peak), "rest": x.spread(rest), "mass": x.spread(mass)}
    operands |= {"input": x.x, "share": 1.0 - label_smoothing, "even": label_smoothing / x.x.shape[1]}
    part = "(target == at ? share : 0.f)" if not is_float(target.dtype) else "target * share"
    counts = "target != ignored" if not is_float(target.dtype) else "true"
    factor = f"float factor = {counts} ? weight * ({part} + even) : 0.f"
    value = f"{factor}; {counts} ? (e_to(input - peak - rest) * mass - factor) * (g / total) : 0.f"
    return k.elementwise((value,), operands, (input.dtype,), x.x.shape)[0].reshape(x.shape)


@cross_entropy.cuda_vjp("flame", "target", when=_no_entropy)
def _(
    k: Any, g: Array, input: Array, target: Array, weight: Array | None, peak: Array, rest: Array, total: Array,
    ignore_index: int, reduction: str, label_smoothing: float,
) -> Array:  # fmt: skip
    x = _Logits.of(k, input)
    operands = _slope_operands(k, x, g, target, weight, total, ignore_index, reduction)
    operands |= {"input": x.x, "peak": x.spread(peak), "rest": x.spread(rest), "share": 1.0 - label_smoothing}
    value = "-share * weight * (input - peak - rest) * (g / total)"
    return k.elementwise((value,), operands, (target.dtype,), x.x.shape)[0].reshape(x.shape)


@cross_entropy.large_samples
def _() -> Iterator[Sample]:
    yield sample((11, 3001), integers(3001, 11), ignore_index=7, label_smoothing=0.1)
    yield sample((5, 4096), integers(4096, 5), positive(4096), reduction="none")
    yield sample((2, 21, 24, 32), integers(21, 2, 24, 32), ignore_index=20)
    yield sample((3, 9, 7), positive(3, 9, 7), positive(9))
    yield sample((1, 2, 17000), integers(2, 1, 17000), positive(2))


@nll_loss.large_samples
def _() -> Iterator[Sample]:
    yield sample((2, 21, 24, 32), integers(21, 2, 24, 32), positive(21), ignore_index=20)
    yield sample((1, 2, 17000), integers(2, 1, 17000))
