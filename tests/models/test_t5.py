"""The T5 encoder's behaviour without a reference at hand. Its numbers are in tests/parity."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import no_grad, tensor
from flame_train.errors import ModelFileError
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder, position_buckets

ARCH = T5Arch.tiny(vocabulary=60, width=24)


@pytest.fixture(scope="module")
def encoder():
    model = T5Encoder(ARCH)
    model.init(np.random.default_rng(0), "float64")
    return model


def rows(length):
    ids = np.zeros((2, length), np.int32)
    ids[0, :4], ids[1, :3] = [7, 9, 11, 1], [7, 9, 1]
    return ids


def encoded(encoder, ids, mask=None):
    with no_grad():
        return encoder(tensor(ids), None if mask is None else tensor(mask)).numpy()


def test_padding_is_looked_at_unless_masked(encoder):
    short, long = rows(6), rows(9)
    a, b = encoded(encoder, short), encoded(encoder, long)
    assert a.shape == (2, 6, 24)
    assert np.abs(a[:, :3] - b[:, :3]).max() > 1e-3
    a, b = (encoded(encoder, ids, ids > 0) for ids in (short, long))
    np.testing.assert_allclose(a[0, :4], b[0, :4], rtol=1e-12)
    np.testing.assert_allclose(a[1, :3], b[1, :3], rtol=1e-12)


def test_a_caption_does_not_depend_on_its_batch(encoder):
    ids = rows(6)
    np.testing.assert_allclose(encoded(encoder, ids)[1:], encoded(encoder, ids[1:]), rtol=1e-12)


def test_only_distance_and_direction_count_for_the_position_bias(encoder):
    bias = encoder.encoder.bias(encoder.encoder.tables[0], 9).numpy()
    assert bias.shape == (1, ARCH.heads, 9, 9)
    for offset in range(-8, 9):
        on_diagonal = np.diagonal(bias[0], offset, axis1=-2, axis2=-1)
        np.testing.assert_array_equal(on_diagonal, on_diagonal[:, :1].repeat(9 - abs(offset), 1))
    assert not np.array_equal(bias[0, :, 0, 1], bias[0, :, 1, 0])


def test_buckets_by_hand():
    """32 buckets: 16 a direction, 8 of one distance each, 8 that double in width every second one, up to 128."""
    first = position_buckets(200, 32)[0]
    np.testing.assert_array_equal(first[1:8], 16 + np.arange(1, 8))
    edges = {8: 24, 11: 24, 12: 25, 15: 25, 16: 26, 22: 26, 23: 27, 31: 27, 32: 28, 63: 29, 64: 30, 127: 31, 199: 31}
    assert {distance: int(first[distance]) for distance in edges} == edges
    np.testing.assert_array_equal(position_buckets(200, 32)[:, 0][1:], first[1:] - 16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_embedding_has_the_weights_precision(dtype):
    model = T5Encoder(ARCH)
    model.init(np.random.default_rng(0), dtype)
    assert model(tensor(rows(5))).dtype.name == dtype


def test_an_encoder_without_gates_is_not_v1_1():
    shapes = T5Encoder(ARCH).shapes()
    old = {name.replace("wi_0", "wi"): shape for name, shape in shapes.items() if "wi_1" not in name}
    with pytest.raises(
        ModelFileError, match=r"wi_0\.weight of 2 dimensions, found none.*not the encoder of a T5 v1\.1"
    ):
        T5Arch.from_shapes(old)
