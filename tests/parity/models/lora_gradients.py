"""Gradients of LoRAs and of latents: ours beside those of a reference network in fp64."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import Tensor, tensor

torch = pytest.importorskip("torch")


def fp64(array):
    return torch.from_numpy(array.astype(np.float64))


def merged_in_torch(twin, attached, to_twin):
    """torch leaves for every LoRA matrix, and the twin's weights with the updates they make."""
    leaves, weights, there = {}, {}, dict(twin.named_parameters())
    for name, adapter in attached.adapters.items():
        down, up = (fp64(p.numpy()).requires_grad_() for p in (adapter.down, adapter.up))
        leaves[name] = (down, up)
        update = (adapter.alpha / adapter.rank) * (up @ down)
        for their_name, source in to_twin.pull([f"{name}.weight"]).sources.items():
            rows = np.arange(len(update))
            weights[their_name] = there[their_name] + update[source.apply([rows])]
    return leaves, weights


def lora_gradient_errors(attached, leaves, out, expected, weight, off):
    """The error of each LoRA matrix's gradient, by name, for the sum of the predictions times `weight`."""
    (out * tensor(weight)).sum().backward()
    (expected * fp64(weight)).sum().backward()
    errors = {}
    for name, (down, up) in leaves.items():
        errors[f"{name} down"] = off(attached.adapters[name].down.grad, down.grad)
        errors[f"{name} up"] = off(attached.adapters[name].up.grad, up.grad)
    assert len(errors) == 2 * len(attached.adapters)
    return errors


def latents_gradient_error(pair, batch, ours, theirs, off):
    """The error of the latents' gradient; `ours(model, batch, latents)` and `theirs(twin, batch, latents=...)`."""
    model, twin = pair
    here, there = Tensor(batch["latents"], requires_grad=True), fp64(batch["latents"]).requires_grad_()
    (ours(model, batch, here) * tensor(batch["weight"])).sum().backward()
    (theirs(twin, batch, latents=there) * fp64(batch["weight"])).sum().backward()
    return off(here.grad, there.grad)
