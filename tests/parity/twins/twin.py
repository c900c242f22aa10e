"""A family's network beside its reference's class: one entry of the table of `tests/parity/models/test_families.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from flame_train.engine import Tensor, tensor
from flame_train.engine import functional as F

torch = pytest.importorskip("torch")
ALL = ("off", "mlp", "full")


@dataclass(frozen=True)
class Twin:
    """What a family has of its own; the tests are the same for all.

    Attributes:
        network: our class, made from an architecture.
        archs: small architectures by name.
        table: our names -> the reference's.
        reference: the reference's module of an architecture.
        patch: changes a module so that nothing but what is compared is rounded; most take our sinusoids, which both
            make in fp32, where a bit of a frequency is 1e-4 at t = 1000. They are tested with the UNet.
        inputs: the arrays of a batch, by architecture, dtype and variant; `weight` is that of the predictions' sum.
        ours, theirs: a prediction; theirs takes changed weights too. `latents` replaces those of the batch.
        variants: by name of the inputs: the number of layers that take a LoRA, None where architectures differ, and
            the ways of checkpointing.
        dtypes: fp32 alone where the reference computes parts in fp32, so that no smaller difference can be measured.
        exact: has the reference compute in fp64 what it does in fp32 whatever is given.
        layers: the layers that take a LoRA; None: all linear ones.
        padded: the array of `inputs` with rows of captions, and how many rows of padding are added to it.
    """

    network: Callable[[Any], Any]
    archs: Mapping[str, Any]
    table: Any
    reference: Callable[[Any], Any]
    patch: Callable[[Any, Any], None]
    inputs: Callable[[Any, str, str], dict[str, Any]]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    variants: Mapping[str, tuple[int | None, tuple[str, ...]]]
    dtypes: tuple[str, ...] = ("float32",)
    exact: Callable[[pytest.MonkeyPatch], None] = lambda monkeypatch: None
    layers: Callable[[Any, str], list[str] | None] = lambda model, variant: None
    padded: tuple[str, int] | None = None

    def pair(self, arch, dtype, fill, scrambled):
        """Our network with random weights, and the reference's with the same."""
        model = scrambled(self.network(arch), dtype)
        twin = fill(model, self.reference(arch), self.table)
        twin.requires_grad_(False)
        self.patch(twin, arch)
        return model, twin


def fp64(array):
    return torch.from_numpy(array.astype(np.float64))


def always_fp64(monkeypatch):
    """The reference normalises and turns in fp32 whatever is given, which would hide what is measured."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def sinusoids(dim, scale=1.0):
    """Our embedding of timesteps, for a function of the reference's that takes them alone."""
    return lambda t: fp64(F.timestep_embedding(tensor(t.float().numpy().astype(np.float32)) * scale, dim).numpy())


def merged_in_torch(twin, attached, to_twin):
    """torch leaves for every LoRA matrix, and the twin's weights with the updates they make."""
    leaves, weights, there = {}, {}, dict(twin.named_parameters())
    for name, adapter in attached.adapters.items():
        down, up = (fp64(p.numpy()).requires_grad_() for p in (adapter.down, adapter.up))
        leaves[name] = (down, up)
        update = (adapter.alpha / adapter.rank) * (up.flatten(1) @ down.flatten(1))
        rows = np.arange(len(update))
        for their_name, source in to_twin.pull([f"{name}.weight"]).sources.items():
            base = there[their_name]
            weights[their_name] = base + update[source.apply([rows])].reshape(base.shape)
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


def given(batch, latents, *names):
    """The latents, or those of the batch, and further arrays of it, as our tensors."""
    return tensor(batch["latents"]) if latents is None else latents, *(tensor(batch[name]) for name in names)
