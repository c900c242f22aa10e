"""Philox against its published answers and a second implementation, and the distributions built on it."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame_train.engine.random import Rng, bits, exact_log, normal_quantile, philox

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""The known answers of the authors' Random123 distribution for philox4x32-10."""

word = st.integers(0, 2**32 - 1)


def plain_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 in Python integers, written from the paper."""
    c, k = list(counter), list(key)
    for r in range(10):
        if r:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        hi0, lo0 = divmod(0xD2511F53 * c[0], 2**32)
        hi1, lo1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [hi1 ^ c[1] ^ k[0], lo1, hi0 ^ c[3] ^ k[1], lo0]
    return tuple(c)


def rng(samples: object = (0,), seed: int = 7, step: object = 0) -> Rng:
    return Rng(np, seed, step, np.asarray(samples, np.int64))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    got = philox(tuple(np.uint64(c) for c in counter), key)
    assert tuple(int(w) for w in got) == expected


@settings(max_examples=50)
@given(seed=st.integers(0, 2**64 - 1), stream=word, step=word, sample=word, count=st.integers(1, 11))
def test_words_are_philox_of_their_place(seed: int, stream: int, step: int, sample: int, count: int) -> None:
    got = bits(np, seed, stream, step, np.array([sample]), count)
    expected: list[int] = []
    for block in range(3):
        expected += plain_philox((block, step, sample, stream), (seed % 2**32, seed >> 32))
    assert got.dtype == np.uint32
    assert got.tolist() == [expected[:count]]


def test_a_sample_is_the_same_alone_and_in_any_batch() -> None:
    batch = rng([5, 0, 9, 2]).normal(16, (3, 4))
    for row, index in enumerate([5, 0, 9, 2]):
        np.testing.assert_array_equal(batch[row], rng([index]).normal(16, (3, 4))[0])
    np.testing.assert_array_equal(rng([3]).bits(16, (5,)), rng([3]).bits(16, (9,))[:, :5])


def test_step_may_be_an_array_and_every_coordinate_matters() -> None:
    first = rng().bits(16, (8,))
    np.testing.assert_array_equal(first, rng(step=np.zeros((), np.int64)).bits(16, (8,)))
    others = [
        rng(step=1).bits(16, (8,)),
        rng(step=np.int64(1) + np.zeros((), np.int64)).bits(16, (8,)),
        rng(samples=[1]).bits(16, (8,)),
        rng().bits(17, (8,)),
        rng(seed=8).bits(16, (8,)),
        rng(seed=7 + 2**32).bits(16, (8,)),
    ]
    np.testing.assert_array_equal(others[0], others[1])
    for other in others:
        assert not (first == other).any()


def test_uniform_stays_inside_the_open_interval_even_for_extreme_words() -> None:
    from flame_train.engine.random import uniform_of

    ends = uniform_of(np.array([0, 0xFFFFFFFF], np.uint32))
    assert ends.dtype == np.float32
    assert ends.tolist() == [2.0**-24, 1 - 2.0**-24]


def test_uniform_passes_a_kolmogorov_smirnov_test() -> None:
    u = np.sort(rng(range(20)).uniform(16, (5000,)).ravel().astype(np.float64))
    assert kolmogorov(u) < 1.95 / math.sqrt(u.size)  # 1.95: one in a thousand


def test_normal_passes_a_kolmogorov_smirnov_test_and_has_its_moments() -> None:
    z = np.sort(rng(range(20)).normal(16, (5000,)).ravel().astype(np.float64))
    cdf = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in z])
    assert kolmogorov(cdf) < 1.95 / math.sqrt(z.size)
    sigma = 1 / math.sqrt(z.size)
    assert abs(z.mean()) < 4 * sigma
    assert abs((z**2).mean() - 1) < 4 * math.sqrt(2) * sigma
    assert abs((z**3).mean()) < 4 * math.sqrt(15) * sigma
    assert abs((z**4).mean() - 3) < 4 * math.sqrt(96) * sigma


def kolmogorov(sorted_cdf: np.ndarray) -> float:
    """The largest distance between an empirical distribution and the uniform one."""
    n = sorted_cdf.size
    upper = np.arange(1, n + 1) / n - sorted_cdf
    lower = sorted_cdf - np.arange(n) / n
    return float(max(upper.max(), lower.max()))


def test_normals_of_neighbours_are_uncorrelated() -> None:
    z = rng(range(8)).normal(16, (4096,)).astype(np.float64)
    correlation = np.corrcoef(z) - np.eye(8)
    assert np.abs(correlation).max() < 5 / math.sqrt(4096)
    assert abs(np.mean(z[:, 1:] * z[:, :-1])) < 5 / math.sqrt(8 * 4095)


def test_normal_quantile_is_the_inverse_of_the_distribution() -> None:
    p = np.concatenate([np.logspace(-300, -1, 400), np.linspace(0.01, 0.99, 999), 1 - np.logspace(-15, -1, 100)])
    z = normal_quantile(np, p)
    expected = [statistics.NormalDist().inv_cdf(v) for v in p]
    np.testing.assert_allclose(z, expected, rtol=1e-13, atol=1e-15)
    back = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in z])
    np.testing.assert_allclose(back, p, rtol=1e-12)


def test_exact_log_is_the_logarithm() -> None:
    x = np.concatenate([np.logspace(-307, 307, 5001), 1 + np.linspace(-0.4, 0.6, 5001)])
    np.testing.assert_allclose(exact_log(np, x), [math.log(v) for v in x], rtol=1e-14, atol=1e-17)


def test_randint_covers_its_range_evenly() -> None:
    drawn = rng(range(10)).randint(16, 1000, (10_000,))
    assert drawn.dtype == np.int64
    counts = np.bincount(drawn.ravel(), minlength=1000)
    assert counts.size == 1000
    chi2 = float(((counts - 100.0) ** 2 / 100.0).sum())
    assert abs(chi2 - 999) < 4 * math.sqrt(2 * 999)
