"""Counter-based random numbers: Philox4x32-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

A number is a function of (seed, stream, step, sample, position). There is no state to save or to synchronise. The
numbers are the same on CPU and GPU, alone or in a batch, on one device or many, before and after a resume.
`step` and `sample` may be device arrays, so a captured step draws new numbers at each replay.

CPU and GPU agree bit for bit because only integer arithmetic and exactly rounded operations (+, -, *, /, sqrt, frexp)
are used, each rounded separately: no library's `log`, no fused multiply-add. The GPU has two kernels for what takes
hundreds of array operations here (random.cuh).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..errors import kind_of
from .backend import backend_of
from .dtype import Array, float32
from .namespace import Namespace

GRADIENT_NOISE = 1
"""Stream of the optimizer's gradient noise. Streams below 16 are the engine's, the others its users'."""

DROPOUT = 2
"""Stream of dropout unless another is given."""

CREATION = 3
"""Stream of new tensors of random numbers."""

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Array, Array, Array, Array]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Returns the four output words for four counter words: uint64 arrays (or scalars) holding values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _HALF) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> _HALF) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def bits(xp: Namespace, seed: int, stream: int, step: Array | int, sample_index: Array, count: int) -> Array:
    """Returns `count` random words for each sample, uint32 (B, count).

    A sample's words do not depend on the other samples, and fewer of them are a prefix of more.

    Args:
        seed: 64 bits.
        stream: 32 bits: what the numbers are for.
        step: 32 bits.
        sample_index: whole numbers (B,).
        count: words of a sample.
    """
    block = xp.arange(-(-count // 4), dtype=np.uint64)
    return blocks_of_bits(xp, seed, stream, step, sample_index, block)[:, :count]


def blocks_of_bits(
    xp: Namespace, seed: int, stream: int, step: Array | int, sample_index: Array, block: Array
) -> Array:
    """Returns words 4 b to 4 b + 3 of what `bits` draws, for each b of `block`, uint32 (B, 4 n).

    Args:
        seed, stream, step, sample_index: as in `bits`.
        block: (n,), uint64 below 2^32.
    """
    kernels = backend_of(sample_index).kernels
    if kernels is not None:
        return _words_on_gpu(kernels, seed, stream, step, sample_index, block)
    samples = _word(sample_index).reshape(-1, 1)
    counter = (block[None, :], _word(step), samples, _word(stream))
    words = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    rows = xp.empty((samples.shape[0], block.shape[0], 4), np.uint32)
    for i, w in enumerate(words):
        rows[..., i] = w
    return rows.reshape(samples.shape[0], 4 * block.shape[0])


def _word(value: Array | int) -> Array:
    """Returns the low 32 bits as uint64. A Python number stays on the host, where it costs no copy to the device."""
    if isinstance(value, int):
        return np.uint64(value & 0xFFFFFFFF)
    return value.astype(np.uint64) & _MASK


@dataclass(frozen=True, slots=True)
class Rng:
    """The random numbers of one step's samples.

    `step` is a number or a 0-d array, `samples` (B,) global sample indices. `stream` keeps purposes apart:
    numbers of different streams are independent. Shapes are those of one sample. Raises TypeError for samples that are
    no array of whole numbers.
    """

    xp: Namespace
    seed: int
    step: Array | int
    samples: Array

    def __post_init__(self) -> None:
        is_array = isinstance(self.samples, self.xp.ndarray)
        if not is_array or self.samples.dtype.kind not in "iu":
            what = f"one of {self.samples.dtype}" if is_array else kind_of(self.samples)
            raise TypeError(f"Rng: expected samples as an array of whole numbers, got {what}")

    def bits(self, stream: int, shape: Sequence[int] = ()) -> Array:
        """Returns uint32 (B, *shape)."""
        words = bits(self.xp, self.seed, stream, self.step, self.samples, math.prod(shape))
        return words.reshape(words.shape[0], *shape)

    def uniform(self, stream: int, shape: Sequence[int] = ()) -> Array:
        """Returns fp32 (B, *shape) in the open interval (0, 1): odd multiples of 2^-24, so that none rounds to 1."""
        return uniform_of(self.bits(stream, shape))

    def normal(self, stream: int, shape: Sequence[int] = ()) -> Array:
        """Returns fp32 (B, *shape) of mean 0 and standard deviation 1."""
        return normal_of(self.xp, self.bits(stream, shape))

    def randint(self, stream: int, high: int, shape: Sequence[int] = ()) -> Array:
        """Returns int64 (B, *shape) in 0 .. high - 1, by multiply and shift; the bias is below high / 2^32."""
        return ((self.bits(stream, shape).astype(np.uint64) * np.uint64(high)) >> _HALF).astype(np.int64)


def check_rng(rng: Any, needed: str) -> Rng:
    """`rng`. Raises ValueError, saying what `needed` an Rng, for None, TypeError for another thing than an Rng."""
    if rng is None:
        raise ValueError(f"{needed} needs rng=engine.random.Rng(...), which says what to drop")
    if not isinstance(rng, Rng):
        raise TypeError(f"{needed} needs rng=engine.random.Rng(...), got {kind_of(rng)}")
    return rng


def uniform_of(words: Array) -> Array:
    """Returns uint32 words to fp32 in (0, 1): the upper 23 bits and a half."""
    odd = (words >> np.uint32(9)) * np.uint32(2) + np.uint32(1)
    return odd.astype(np.float32) * np.float32(2.0**-24)


def least_kept(p: float) -> int:
    """Returns the least word for which `uniform_of` is at least fp32 `p`; 2^32 if there is none."""
    return max(0, math.ceil((float(np.float32(p)) * 2.0**24 - 1.0) / 2.0)) << 9


def normal_of(xp: Namespace, words: Array) -> Array:
    """Returns uint32 words to fp32 standard normals, through the fp64 inverse of the distribution function."""
    kernels = backend_of(words).kernels
    if kernels is not None:
        return _normals_on_gpu(kernels, words)
    return normal_quantile(xp, (words.astype(np.float64) + 0.5) * 2.0**-32).astype(float32)


# Wichura, "Algorithm AS 241: the percentage points of the normal distribution" (1988), PPND16: numerators and
# denominators of three rational functions, highest power first; relative accuracy about 1e-16.
_CENTRE = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
_MIDDLE = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258e0,
        3.64784832476320460504e0,
        5.76949722146069140550e0,
        4.63033784615654529590e0,
        1.42343711074968357734e0,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940e0,
        2.05319162663775882187e0,
        1.0,
    ),
)
_TAIL = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        1.24266094738807843860e-3,
        2.65321895265761230930e-2,
        2.96560571828504891230e-1,
        1.78482653991729133580e0,
        5.46378491116411436990e0,
        6.65790464350110377720e0,
    ),
    (
        2.04426310338993978564e-15,
        1.42151175831644588870e-7,
        1.84631831751005468180e-5,
        7.86869131145613259100e-4,
        1.48753612908506148525e-2,
        1.36929880922735805310e-1,
        5.99832206555887937690e-1,
        1.0,
    ),
)


def normal_quantile(xp: Namespace, p: Array) -> Array:
    """Returns the z for which a standard normal is below z with probability p, for fp64 p in (0, 1)."""
    q = p - 0.5
    centre = q * _ratio(_CENTRE, 0.180625 - q * q)
    r = xp.sqrt(-exact_log(xp, xp.minimum(p, 1.0 - p)))
    outer = xp.where(r <= 5.0, _ratio(_MIDDLE, r - 1.6), _ratio(_TAIL, r - 5.0))
    return xp.where(xp.abs(q) <= 0.425, centre, xp.where(q < 0.0, -outer, outer))


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Array) -> Array:
    numerator, denominator = (_horner(c, x) for c in coefficients)
    return numerator / denominator


def _horner(coefficients: Sequence[float], x: Array) -> Array:
    total = coefficients[0] * x + coefficients[1]
    for c in coefficients[2:]:
        total = total * x + c
    return total


_ATANH = tuple(1.0 / (2 * k + 1) for k in reversed(range(12)))
"""atanh(s) / s as a polynomial in s^2; for s^2 < 0.0295 the remainder is below 1e-18."""


def exact_log(xp: Namespace, x: Array) -> Array:
    """Returns the natural logarithm of fp64 x > 0 to about 1 ulp, from exact operations only.

    log(m 2^e) = 2 atanh((m - 1) / (m + 1)) + e log 2, with m in [sqrt(1/2), sqrt 2).
    """
    m, e = xp.frexp(x)
    small = m < math.sqrt(0.5)
    m = xp.where(small, m * 2.0, m)
    e = xp.where(small, e - 1, e).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    return 2.0 * s * _horner(_ATANH, s * s) + e * math.log(2.0)


# ---- on the GPU ------------------------------------------------------------------------------------------

_THREADS = 256


@cache
def tables() -> str:
    """This file's constants in C, which random.cuh needs before it."""
    rationals = (("CENTRE", _CENTRE), ("MIDDLE", _MIDDLE), ("TAIL", _TAIL))
    rows = {f"{name}_{i}": part for name, parts in rationals for i, part in enumerate(parts)} | {"ATANH": _ATANH}
    numbers = {
        "ROOT_HALF": f"{math.sqrt(0.5)!r}",
        "LOG_2": f"{math.log(2.0)!r}",
    }
    lines = [f"#define {name} {value}" for name, value in numbers.items()]
    lines += [f"__constant__ double {n}[] = {{{', '.join(map(repr, t))}}};" for n, t in rows.items()]
    return "\n".join([*lines, ""])


def _source() -> str:
    return tables() + '#include "random.cuh"\n'


def signed(seed: int) -> np.int64:
    """Returns a seed's low 64 bits as the int64 that kernels take."""
    return np.int64((seed & 0xFFFFFFFFFFFFFFFF) - (seed >> 63 & 1) * (1 << 64))


def round_keys(seed: int) -> np.ndarray[Any, Any]:
    """Returns a seed's keys of all rounds, as philox.cuh takes them by value."""
    words = [[(seed >> 32 * i) + n * _WEYL[i] & 0xFFFFFFFF for n in range(_ROUNDS)] for i in range(2)]
    return np.array([tuple(words)], np.dtype([("even", "u4", _ROUNDS), ("odd", "u4", _ROUNDS)]))


def kernel_step(step: Array | int) -> tuple[Any, np.int64]:
    """Returns a step as kernels take it: its place on the device, or a null pointer and the number."""
    if isinstance(step, int) or backend_of(step).kernels is None:
        return np.int64(0), np.int64(int(step) & 0xFFFFFFFF)
    return step.astype(np.int64, copy=False), np.int64(0)


def _words_on_gpu(k: Any, seed: int, stream: int, step: Array | int, sample_index: Array, block: Array) -> Array:
    samples = k.contiguous(sample_index.reshape(-1).astype(np.int64, copy=False))
    words = k.empty((samples.size, 4 * block.size), np.dtype(np.uint32))
    numbers = (stream, signed(seed), block.size, words.size // 4)
    args = (words, samples, k.contiguous(block.view(np.int64)), *kernel_step(step), *map(np.int64, numbers))
    k.launch_source(_source(), "philox_words", words.size // 4, _THREADS, args)
    return words


def _normals_on_gpu(k: Any, words: Array) -> Array:
    z = k.empty(words.shape, float32)
    k.launch_source(_source(), "normals", z.size, _THREADS, (k.contiguous(words), z, np.int64(z.size)))
    return z
