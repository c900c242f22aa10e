"""An autoencoder of diffusers with random weights, and ours with the same."""

from __future__ import annotations

import numpy as np
import torch

from flame_train.io.resolve import resolve
from flame_train.networks.vae.vae import Vae
from tests.keymaps import Arrays


def pair_of(component, arch, twin, dtype="float32"):
    """Ours, and `twin` in fp64, every weight of it away from its neutral value."""
    torch.manual_seed(0)
    twin = twin().double().eval()
    with torch.no_grad():
        for weight in twin.parameters():
            weight += 0.05 * torch.randn_like(weight)
    return ours_of(component, arch, {name: t.numpy() for name, t in twin.state_dict().items()}, dtype), twin


def ours_of(component, arch, stored, dtype="float32"):
    """Ours with the arrays of such a component, each of which has its place."""
    found = resolve((component,), stored, only="vae")
    assert found.unknown == ()
    model = Vae(arch)
    model.init(np.random.default_rng(0), dtype)
    for name, weight in model.weights():
        weight.data[...] = found.sources["vae"][name].read(Arrays(stored))
    return model
