"""The published names and shapes, and small networks with random weights."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.models.sdxl.unet import UNet, UNetArch, vector_conditioning
from tests.golden_keys import golden


@pytest.fixture(scope="session")
def published():
    """name of a list, prefix -> {name without the prefix: shape}"""

    def read(name, prefix=""):
        return {key[len(prefix) :]: tuple(shape) for key, shape in golden(name).items() if key.startswith(prefix)}

    return read


@pytest.fixture
def unet():
    model = UNet(UNetArch.tiny(model_channels=16, context_dim=24, pooled_dim=8))
    model.init(np.random.default_rng(0))
    return model


@pytest.fixture
def predict():
    """A prediction for one fixed batch, in the dtype of the model's weights."""
    rng = np.random.default_rng(1)
    latents, context, pooled = (rng.standard_normal(s) for s in ((2, 8, 8, 4), (2, 7, 24), (2, 8)))
    time_ids = rng.integers(0, 1024, (2, 6)).astype(np.float32)

    def call(model):
        dtype = model.time_embed[0].weight.dtype
        x, c, p = (tensor(array.astype(dtype)) for array in (latents, context, pooled))
        return model(x, tensor(np.array([7.0, 640.0], np.float32)), c, vector_conditioning(p, tensor(time_ids)))

    return call
