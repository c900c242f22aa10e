"""Numbers of 8 bits in wider dtypes: the bits that ml_dtypes' own conversion gives."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flame_train.io.dtypes import DTYPE_OF_TAG, FLOAT_TAGS, widened

EIGHT_BITS = sorted(tag for tag in FLOAT_TAGS if tag.startswith("F8"))
ALL = np.tile(np.arange(1 << 16, dtype=np.uint16).view(np.uint8), 2)
"""Every pair of bytes, twice: more than are looked up at once."""


@pytest.mark.parametrize("target", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("tag", EIGHT_BITS)
def test_every_pair_of_bytes(tag, target):
    stored = ALL.view(DTYPE_OF_TAG[tag])
    with np.errstate(all="ignore"):
        for x in (stored, stored[:-1], stored[1:], stored[:3], stored[:0], stored[5], stored.reshape(2, -1, 8).T):
            made, expected = widened(x, target), x.astype(target)
            assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_array_equal(made.tobytes(), expected.tobytes())
    np.testing.assert_array_equal(widened(np.arange(3, dtype=np.int8), target), np.arange(3))
