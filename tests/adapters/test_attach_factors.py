"""A finished LoRA on a model: the layer computes with W + strength * delta, and what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.attach import attach_factors
from flame_train.adapters.factors import LoraFactors
from flame_train.engine import nn, tensor
from flame_train.errors import ModelFileError


class Pair(nn.Module):
    """A linear layer and two convolutions."""

    def __init__(self):
        self.linear = nn.Linear(6, 4)
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.point = nn.Conv2d(3, 5, 1)


@pytest.fixture
def model():
    made = Pair()
    made.init(np.random.default_rng(0))
    return made


def factors(out, *into, rank=2, alpha=3.0, dtype=np.float32):
    rng = np.random.default_rng(out)
    up = rng.standard_normal((out, rank, *([1] * (len(into) - 1))))
    return LoraFactors(rng.standard_normal((rank, *into)).astype(dtype), up.astype(dtype), alpha)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0, -2.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_linear_is_the_sum_of_weights(model, strength, dtype):
    x = np.random.default_rng(1).standard_normal((3, 6)).astype(np.float32)
    f = factors(4, 6, dtype=dtype)
    whole = model.linear.weight.numpy() + strength * 3.0 / 2.0 * f.up.astype(np.float64) @ f.down.astype(np.float64)
    attach_factors(model, {"linear": f}, strength)
    np.testing.assert_allclose(
        model.linear(tensor(x)).numpy(), x @ whole.T + model.linear.bias.numpy(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("name", "kernel"), [("conv", 3), ("point", 1)])
def test_convolution_is_the_sum_of_kernels(model, name, kernel):
    x = np.random.default_rng(1).standard_normal((1, 5, 5, 3)).astype(np.float32)
    f = factors(5, 3, kernel, kernel)
    layer = getattr(model, name)
    merged = Pair()
    merged.init(np.random.default_rng(0))
    update = 1.5 * np.einsum("or,rikl->oikl", f.up[:, :, 0, 0], f.down)
    object.__setattr__(getattr(merged, name), "weight", tensor(layer.weight.numpy() + update.astype(np.float32)))
    attach_factors(model, {name: f})
    np.testing.assert_allclose(layer(tensor(x)).numpy(), getattr(merged, name)(tensor(x)).numpy(), rtol=1e-4, atol=1e-4)


def test_a_point_convolution_and_a_linear_layer_are_the_same_matrix(model):
    flat, standing = factors(5, 3), factors(4, 6, 1, 1)
    attach_factors(model, {"point": flat, "linear": standing})
    assert model.point.adapter.down.shape == (2, 3, 1, 1)
    assert model.linear.adapter.up.shape == (4, 2)


def test_detaching_gives_the_base_back(model):
    x = tensor(np.ones((2, 6), np.float32))
    before = model.linear(x).numpy()
    attached = attach_factors(model, {"linear": factors(4, 6)})
    assert not np.array_equal(model.linear(x).numpy(), before)
    attached.detach()
    np.testing.assert_array_equal(model.linear(x).numpy(), before)


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_attached(model):
    given = {"linear": factors(4, 6), "conv": factors(5, 3, 5, 5), "elsewhere": factors(4, 6)}
    with pytest.raises(ModelFileError, match=r"2 of its 3 modules.*elsewhere, conv.*another base model"):
        attach_factors(model, given)
    assert model.linear.adapter is None


def test_one_adapter_a_layer(model):
    attach_factors(model, {"linear": factors(4, 6)})
    with pytest.raises(ValueError, match="has an adapter already"):
        attach_factors(model, {"linear": factors(4, 6)})
