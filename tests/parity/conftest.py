"""What the comparisons with PyTorch's libraries share: one measure of agreement, and LoRAs on both sides."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.targets import resolve


@pytest.fixture
def off():
    """Largest error over the largest value of the expected array."""

    def measure(found, expected):
        found, expected = (x.numpy() if hasattr(x, "numpy") else x for x in (found, expected))
        assert found.shape == expected.shape
        assert np.abs(expected).max() > 0
        return float(np.abs(found - expected).max() / np.abs(expected).max())

    return measure


@pytest.fixture
def adapted():
    """Puts the engine's own adapters into a model, up no longer zero; returns them and their factors."""

    def put(model, targets, presets):
        attached = attach(model, resolve(model, targets, presets), rank=4, alpha=3.0, seed=2)
        for i, adapter in enumerate(attached.adapters.values()):
            adapter.up.data[...] = 0.05 * np.random.default_rng(i).standard_normal(adapter.up.shape)
        return attached, {n: LoraFactors(a.down.numpy(), a.up.numpy(), a.alpha) for n, a in attached.adapters.items()}

    return put


@pytest.fixture
def loaded(caplog):
    """Loads a LoRA file into a diffusers pipeline, which may say nothing of it but what was foreseen.

    Returns into how many layers of the denoiser it went.
    """
    diffusers = pytest.importorskip("diffusers")

    def load(pipeline, file, denoiser, absent):
        """`absent` begins the message that no LoRA of the text encoders is there; none was trained."""
        diffusers.utils.logging.enable_propagation()
        try:
            with caplog.at_level(logging.INFO, logger="diffusers"):
                pipeline.load_lora_weights(file)
        finally:
            diffusers.utils.logging.disable_propagation()
        told = {r.getMessage() for r in caplog.records if r.name.startswith(("diffusers", "peft"))}
        told -= {f"Loading {denoiser}.", "Non-diffusers checkpoint detected."}
        assert all(t.startswith(f"No LoRA keys associated to {absent}") for t in told), told
        return sum(hasattr(module, "lora_A") for module in getattr(pipeline, denoiser).modules())

    return load
