"""New tensors, made on the device they are for, under PyTorch's names.

Random ones are functions of a seed, a counter and the place (`random.py`): the same numbers on CPU and GPU. The seed,
the default device and the default dtype are the mode's (`mode.py`), so a thread or a test has its own.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np

from ...errors import ShapeError, kind_of
from ..backend import Backend, get_backend
from ..dtype import Array, DType, as_dtype, bfloat16, float8_e4m3fn, float8_e5m2, float16, int64, is_float
from ..mode import mode
from ..random import CREATION
from .generator import Generator, next_rng
from .tensor import Tensor

DTypeLike: TypeAlias = "str | DType | type | None"
_BELOW_ONE = {float16: 2.0**-11, bfloat16: 2.0**-8, float8_e4m3fn: 2.0**-4, float8_e5m2: 2.0**-3}
"""How far the largest number below 1 is from it, of dtypes in which a draw could round to 1."""


_INSTEAD = "generator=flame.Generator(seed, device=...)"


def zeros(*size: Any, dtype: DTypeLike = None, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """Returns a tensor of zeros. `size` is ints, or one tuple of them.

    >>> zeros(2, 3).shape
    (2, 3)
    """
    return full(_size("zeros", size), 0, dtype=_float(dtype), device=device, requires_grad=requires_grad)


def ones(*size: Any, dtype: DTypeLike = None, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """Returns a tensor of ones. `size` is ints, or one tuple of them.

    >>> ones(3).tolist()
    [1.0, 1.0, 1.0]
    """
    return full(_size("ones", size), 1, dtype=_float(dtype), device=device, requires_grad=requires_grad)


def full(
    size: Any,
    fill_value: float,
    *,
    dtype: DTypeLike = None,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Returns a tensor of `size` that holds `fill_value`; its dtype, unless given, is that of the value, as torch.full.

    >>> full((2,), 7).tolist()
    [7, 7]

    Args:
        fill_value: the number.
        dtype: the elements' dtype; None: that of the number.
        requires_grad: whether it is a leaf that gets a gradient.

    Raises:
        TypeError: `fill_value` is no number.
    """
    if not isinstance(fill_value, (bool, int, float)):
        raise TypeError(f"full: expected a number as fill_value, got {kind_of(fill_value)}")
    made = empty(_size("full", (size,)), dtype=dtype or _of_number(fill_value), device=device)
    made.data.fill(fill_value)
    return _leaf(made.data, requires_grad)


def empty(*size: Any, dtype: DTypeLike = None, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """Returns a tensor whose values are whatever the memory held. `size` is ints, or one tuple of them.

    >>> empty(2, 0).shape
    (2, 0)
    """
    backend = _backend(device)
    return _leaf(backend.empty(_size("empty", size), _float(dtype)), requires_grad)


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    dtype: DTypeLike = None,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Returns start, start + step, ... up to, and without, `end`; of one number, from 0 up to it. As torch.arange.

    Whole numbers give int64, others the default dtype.

    >>> arange(5).tolist(), arange(1, 2, 0.5).tolist()
    ([0, 1, 2, 3, 4], [1.0, 1.5])

    Args:
        start, end: the first number, and the one before which the numbers end; of one number, the end.
        step: the distance of two numbers.
        dtype: the elements' dtype; None: int64 for whole numbers, else the default dtype.
        requires_grad: whether it is a leaf that gets a gradient.

    Raises:
        ValueError: the step is 0 or leads away from `end`, or a number is not finite.
    """
    if end is None:
        start, end = 0, start
    if not all(math.isfinite(v) for v in (start, end, step)):
        raise ValueError(f"arange: expected finite numbers, got {start}, {end} and step {step}")
    whole = all(isinstance(v, Integral) for v in (start, end, step))
    if step == 0 or (end - start) / step < 0:
        raise ValueError(f"arange: expected a step from {start} towards {end}, got {step}")
    count = -((start - end) // step) if whole else math.ceil((end - start) / step)
    work = np.dtype(int64 if whole else np.float64)
    places = _backend(device).xp.arange(int(count), dtype=work)
    wanted = as_dtype(dtype) if dtype is not None else int64 if whole else mode().dtype
    return _leaf((start + places * step).astype(wanted, copy=False), requires_grad)


def linspace(
    start: float,
    end: float,
    steps: int,
    *,
    dtype: DTypeLike = None,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Returns `steps` numbers at equal distances from `start` to `end`, both included. As torch.linspace.

    >>> linspace(0, 1, 5).tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]

    Args:
        start, end: the first and the last number.
        dtype: the elements' dtype; None: the default dtype.
        requires_grad: whether it is a leaf that gets a gradient.
    """
    (count,) = _size("linspace", (steps,))
    xp = _backend(device).xp
    i = xp.arange(count, dtype=np.float64)
    step = (end - start) / max(1, count - 1)
    made = xp.where(i < count // 2, start + i * step, end - (count - 1 - i) * step)  # as near to both ends
    if count == 1:
        made = xp.full((1,), start, np.float64)
    return _leaf(made.astype(_float(dtype)), requires_grad)


def eye(
    n: int,
    m: int | None = None,
    *,
    dtype: DTypeLike = None,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Returns an n x m matrix (n x n) of ones on the diagonal and zeros elsewhere.

    >>> eye(2).tolist()
    [[1.0, 0.0], [0.0, 1.0]]

    Args:
        n, m: rows and columns; without `m` as many columns as rows.
        dtype: the elements' dtype; None: the default dtype.
        requires_grad: whether it is a leaf that gets a gradient.
    """
    rows, columns = _size("eye", (n, n if m is None else m))
    xp = _backend(device).xp
    made = xp.arange(rows)[:, None] == xp.arange(columns)[None, :]
    return _leaf(made.astype(_float(dtype)), requires_grad)


def randn(
    *size: Any,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Numbers of the normal distribution of mean 0 and standard deviation 1; drawn in fp32, then rounded to `dtype`.

    `generator` says with which seed, by default that of `manual_seed`. Raises RuntimeError in a captured step, which
    would draw the same at each replay, unless the generator has its counter on the device.

    >>> manual_seed(0)
    >>> randn(1000).std().item() > 0.9
    True
    """
    return _drawn("randn", size, generator, _float(dtype), device, requires_grad)


def rand(
    *size: Any,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: str | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Numbers evenly from the interval (0, 1); drawn in fp32, then rounded to `dtype`. Seeds are as for `randn`.

    >>> x = rand(100)
    >>> 0 < x.amin().item() < x.amax().item() < 1
    True
    """
    return _drawn("rand", size, generator, _float(dtype), device, requires_grad)


def randint(
    low: int,
    high: Any,
    size: Any = None,
    *,
    generator: Generator | None = None,
    dtype: DTypeLike = None,
    device: str | None = None,
) -> Tensor:
    """Whole numbers from `low` to `high` - 1, each as likely: `randint(high, size)` or `randint(low, high, size)`.

    int64 unless `dtype` is given.
    Seeds are as for `randn`.

    >>> x = randint(3, (100,))
    >>> sorted(set(x.tolist()))
    [0, 1, 2]

    Args:
        low, high: the least number, and the one above the largest; of one number, the latter.
        generator: the random numbers' source; None: that of `manual_seed`.
        dtype: the elements' dtype; None: int64.

    Returns:
        A tensor of shape `size`.

    Raises:
        TypeError: a bound is no whole number.
        ValueError: `high` is not above `low`, or the range is beyond 2^32.
    """
    if size is None:
        low, high, size = 0, low, high
    for name, value in (("low", low), ("high", high)):
        if not isinstance(value, Integral):
            raise TypeError(f"randint: expected an int {name}, got {value!r}")
    if not 0 < high - low <= 1 << 32:
        raise ValueError(f"randint: expected high above low, by 2^32 at most, got {low} and {high}")
    backend = _backend(device)
    rng = next_rng(backend, 1, generator, instead=_INSTEAD)
    drawn = rng.randint(CREATION, int(high - low), _size("randint", (size,)))[0] + int(low)
    return Tensor(drawn.astype(as_dtype(dtype) if dtype is not None else int64, copy=False))


def zeros_like(input: Tensor, *, dtype: DTypeLike = None, device: str | None = None) -> Tensor:
    """Zeros of the shape, and unless given the dtype and device, of `input`.

    >>> zeros_like(ones(2)).tolist()
    [0.0, 0.0]
    """
    return full_like(input, 0, dtype=dtype, device=device)


def ones_like(input: Tensor, *, dtype: DTypeLike = None, device: str | None = None) -> Tensor:
    """Ones of the shape, and unless given the dtype and device, of `input`.

    >>> ones_like(arange(2)).tolist()
    [1, 1]
    """
    return full_like(input, 1, dtype=dtype, device=device)


def full_like(input: Tensor, fill_value: float, *, dtype: DTypeLike = None, device: str | None = None) -> Tensor:
    """Returns `fill_value` in the shape, and unless given the dtype and device, of `input`.

    >>> full_like(ones(2), 0.5).tolist()
    [0.5, 0.5]
    """
    return full(input.shape, fill_value, dtype=dtype or input.dtype, device=device or input.device)


def empty_like(input: Tensor, *, dtype: DTypeLike = None, device: str | None = None) -> Tensor:
    """Returns a tensor of the shape, and unless given the dtype and device, of `input`, with whatever the memory held.

    >>> empty_like(ones(2, 3)).shape
    (2, 3)
    """
    return empty(input.shape, dtype=dtype or input.dtype, device=device or input.device)


def randn_like(
    input: Tensor, *, generator: Generator | None = None, dtype: DTypeLike = None, device: str | None = None
) -> Tensor:
    """Returns `randn` in the shape, and unless given the dtype and device, of `input`.

    >>> randn_like(ones(2, 3)).shape
    (2, 3)
    """
    return randn(input.shape, generator=generator, dtype=dtype or input.dtype, device=device or input.device)


def rand_like(
    input: Tensor, *, generator: Generator | None = None, dtype: DTypeLike = None, device: str | None = None
) -> Tensor:
    """Returns `rand` in the shape, and unless given the dtype and device, of `input`.

    >>> rand_like(ones(2, 3)).shape
    (2, 3)
    """
    return rand(input.shape, generator=generator, dtype=dtype or input.dtype, device=device or input.device)


def _drawn(
    op: str, size: tuple[Any, ...], generator: Generator | None, dtype: DType, device: str | None, requires_grad: bool
) -> Tensor:
    if not is_float(dtype):
        raise TypeError(f"{op}: expected a floating dtype, got {dtype.name}; randint draws whole numbers")
    shape = _size(op, size)
    rng = next_rng(_backend(device), 1, generator, instead=_INSTEAD)
    numbers = rng.normal(CREATION, shape)[0] if op == "randn" else rng.uniform(CREATION, shape)[0]
    if op == "rand" and dtype in _BELOW_ONE:
        numbers = rng.xp.minimum(numbers, np.float32(1.0 - _BELOW_ONE[dtype]))
    return _leaf(numbers.astype(dtype, copy=False), requires_grad)


def _size(op: str, size: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns a size given as `f(2, 3)` or `f((2, 3))`. Raises TypeError or ShapeError for what is none."""
    given = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    for n in given:
        if not isinstance(n, Integral):
            raise TypeError(f"{op}: expected ints as sizes, got {n!r}")
        if n < 0:
            raise ShapeError(f"{op}: expected sizes of at least 0, got {int(n)}")
    return tuple(int(n) for n in given)


def _float(dtype: DTypeLike) -> DType:
    return mode().dtype if dtype is None else as_dtype(dtype)


def _of_number(value: float) -> DType:
    return np.dtype(np.bool_) if isinstance(value, bool) else int64 if isinstance(value, int) else mode().dtype


def _backend(device: str | None) -> Backend:
    return get_backend(device or mode().device)


def _leaf(data: Array, requires_grad: bool) -> Tensor:
    return Tensor(data, requires_grad=requires_grad)
