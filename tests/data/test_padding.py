"""Examples of different lengths become a batch: nothing of them is lost, and what is filled up is zero."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.data.cache import DiskCache, UpTo
from flame_train.data.padding import Padding, collate


def text(rows: int) -> np.ndarray:
    return np.arange(1, rows * 3 + 1, dtype=np.float16).reshape(rows, 3)


@pytest.mark.parametrize(
    ("lengths", "padding", "rows"),
    [
        ((2, 5), Padding(8, 8), 8),
        ((2, 5), Padding(512, 4), 8),
        ((4, 1), Padding(512, 4), 4),
        ((3, 3), Padding(512, 1), 3),
        ((7, 1), Padding(7, 4), 7),
    ],
)
def test_a_batch_has_each_text_and_zeros_behind_it(lengths, padding, rows) -> None:
    examples = [{"t": text(n), "mean": np.full((2,), n)} for n in lengths]
    batch = collate(examples, {"t": padding})
    assert list(batch) == ["t", "mean"]
    assert batch["t"].shape == (len(lengths), rows, 3)
    assert batch["t"].dtype == np.float16
    for found, n in zip(batch["t"], lengths, strict=True):
        np.testing.assert_array_equal(found[:n], text(n))
        assert not found[n:].any()
    assert batch["mean"].tolist() == [[n, n] for n in lengths]


def test_a_batch_says_how_many_rows_are_a_texts_own() -> None:
    batch = collate([{"t": text(2)}, {"t": text(5)}], {"t": Padding(512, 4, rows="t_rows")})
    assert batch["t_rows"].tolist() == [2, 5]
    assert batch["t_rows"].dtype == np.int32


def test_arrays_of_one_shape_are_only_stacked() -> None:
    with pytest.raises(ValueError, match="same shape"):
        collate([{"t": text(2)}, {"t": text(5)}])


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((UpTo(5), 3), True),
        ((UpTo(4), 3), True),
        ((UpTo(3), 3), False),
        ((UpTo(5), 4), False),
        ((UpTo(5),), False),
        ((4, 3), True),
        ((3, 3), False),
    ],
)
def test_an_entry_may_be_shorter_and_no_longer_than_expected(tmp_path, shape, found) -> None:
    cache = DiskCache(tmp_path)
    cache.put("ab" * 32, {"t": text(4)})
    assert cache.has("ab" * 32, {"t": shape}) == found
    got = cache.get("ab" * 32, {"t": shape})
    assert (got is not None) == found
    if got is not None:
        np.testing.assert_array_equal(got["t"], text(4))
