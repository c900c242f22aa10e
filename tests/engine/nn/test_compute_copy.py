"""Layers and networks compute with a parameter's working copy, where an arena keeps one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.engine import Frozen, Tensor, nn, tensor
from flame_train.engine.dtype import bfloat16
from flame_train.engine.optim import FlatParameters
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

RNG = np.random.default_rng(0)


class Attended(nn.MultiheadAttention):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, y, y)[0]


class Coded(Vae):
    def forward(self, pixels: Tensor) -> Tensor:
        return self.decode(self.encode_moments(pixels.to(self.dtype))[0])


class Read(ClipTextEncoder):
    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, tensor(np.array([4, 4])))[0]


class Adapted(nn.Module):
    """Layers under a LoRA, whose own weights are trained with it."""

    def __init__(self) -> None:
        self.conv, self.linear = nn.Conv2d(4, 6, 3), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.conv.adapter is None:
            attach(self, ["conv", "linear"], rank=2, alpha=2.0, seed=0)
        return self.linear(self.conv(x))


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [tensor(RNG.standard_normal(s).astype(bfloat16)) for s in shapes]


IDS = tensor(RNG.integers(0, 10, (2, 5)))
STEPS = tensor(np.array([3, 700]))


def denoised(channels: int, context: int, pooled: int) -> list[Tensor]:
    """Latents, timesteps, a text's vectors and the vector of the whole."""
    return [*drawn((2, 8, 8, channels)), STEPS, *drawn((2, 7, context), (2, pooled))]


CASES: dict[str, tuple[Callable[[], Any], list[Tensor]]] = {
    "linear": (lambda: nn.Linear(4, 6), drawn((3, 4))),
    "conv": (lambda: nn.Conv2d(4, 6, 3), drawn((2, 5, 5, 4))),
    "layer_norm": (lambda: nn.LayerNorm(4), drawn((3, 4))),
    "rms_norm": (lambda: nn.RMSNorm(4), drawn((3, 4))),
    "group_norm": (lambda: nn.GroupNorm(2, 4, silu=True), drawn((2, 3, 3, 4))),
    "embedding": (lambda: nn.Embedding(10, 4), [IDS]),
    "attention": (lambda: Attended(8, 2), drawn((3, 2, 8), (5, 2, 8))),
    "other widths": (lambda: Attended(8, 2, kdim=6, vdim=6, bias=False), drawn((3, 2, 8), (5, 2, 6))),
    "adapted": (Adapted, drawn((2, 5, 5, 4))),
    "unet": (
        lambda: UNet(UNetArch.tiny()),
        denoised(4, UNetArch.tiny().context_dim, UNetArch.tiny().adm_in_channels),
    ),
    "mmdit": (
        lambda: MMDiT(MMDiTArch.tiny(dual=(0, 1))),
        denoised(16, MMDiTArch.tiny().context_dim, MMDiTArch.tiny().pooled_dim),
    ),
    "flux": (
        lambda: Flux(FluxArch.tiny()),
        denoised(16, FluxArch.tiny().context_dim, FluxArch.tiny().pooled_dim) + drawn((2,)),
    ),
    "vae": (lambda: Coded(VaeArch.tiny()), [tensor(RNG.standard_normal((1, 16, 16, 3)))]),
    "clip": (lambda: Read(ClipArch.tiny("gelu", 16)), [IDS]),
    "t5": (lambda: T5Encoder(T5Arch.tiny()), [IDS]),
}


def made(name: str) -> Any:
    network = CASES[name][0]()
    network.init(np.random.default_rng(1))
    return network


def slots(network: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    return ((module, attr, getattr(module, attr)) for _, module, attr, _ in network.named_specs())


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_the_working_copies(name: str) -> None:
    """Against weights of that dtype, and the copies themselves in the weights' places."""
    given = CASES[name][1]
    trained, frozen, copies = (made(name) for _ in range(3))
    for module, attr, w in slots(frozen):
        setattr(module, attr, Frozen(w.data.astype(bfloat16)))
    mine, other = ([*network.requires_grad_().parameters()] for network in (trained, copies))
    for parameters in (mine, other):
        FlatParameters(parameters, compute_dtype=bfloat16)
    for module, attr, w in slots(copies):
        setattr(module, attr, w.compute_copy)
    y, expected, again = trained(*given), frozen(*given), copies(*given)
    assert y.dtype == expected.dtype
    np.testing.assert_array_equal(y.numpy(), expected.numpy())
    for out in (y, again):
        out.float().square().sum().backward()
    assert any(p.grad.numpy().any() for p in mine)
    for p, q in zip(mine, other, strict=True):
        assert p.grad.dtype == np.float32
        np.testing.assert_array_equal(p.grad.numpy(), q.grad.numpy(), err_msg=p.name)
