"""Our random weights put into the reference implementations' classes, and the one measure of agreement.

The reference always computes in fp64: what is measured is our error, in fp32 or fp64, not the sum of two.
"""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.engine import Parameter, nn
from tests import keymaps


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture
def bound(dtype):
    """The largest relative error allowed in each precision."""
    return {"float32": 1e-5, "float64": 1e-9}[dtype]


@pytest.fixture
def fill():
    """Copies a network's weights into a torch module in fp64, through the table native -> the module's names."""
    return lambda model, twin, to_twin=None: keymaps.fill(twin.double(), model, to_twin, "float64")


@pytest.fixture
def scrambled():
    """Fills a network with random weights, none of them at its neutral value: biases and norms count too."""

    def init(model, dtype, seed=0):
        rng = np.random.default_rng(seed)
        model.init(rng, dtype)
        for _, t in model.weights():
            if t.ndim == 1:
                t.data[...] += 0.2 * rng.standard_normal(t.shape)
        return model

    return init


@pytest.fixture
def with_lora(dtype):
    """Puts a LoRA whose up is not zero, in the precision of the test, on the named layers; on every linear one."""

    def attached_to(model, names=None):
        linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
        attached = attach(
            model,
            names or linear,
            rank=3,
            alpha=2.0,
            seed=5,
            make_parameter=lambda name, values, device: Parameter(values.astype(dtype), name),
        )
        rng = np.random.default_rng(6)
        for adapter in attached.adapters.values():
            adapter.up.data[...] = 0.06 * rng.standard_normal(adapter.up.shape)
        return attached

    return attached_to
