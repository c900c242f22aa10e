"""Latents of a wrong size are refused in the words of the network, not in those of a layer inside."""

from __future__ import annotations

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.errors import ShapeError
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.networks.latents import check_latents


def unet() -> tuple[UNet, UNetArch]:
    arch = UNetArch.tiny(model_channels=32, context_dim=24, pooled_dim=8)
    network = UNet(arch)
    network.init(np.random.default_rng(0), device="cpu")
    return network, arch


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 18, 10, 4), "UNet: expected latents whose height and width are multiples of 4, got 18 x 10"),
        ((1, 16, 16, 16), r"UNet: expected latents \(B, H, W, 4\), got \(1, 16, 16, 16\)"),
        ((16, 16, 4), r"UNet: expected latents \(B, H, W, 4\), got \(16, 16, 4\)"),
    ],
)
def test_a_unet(shape: tuple[int, ...], message: str) -> None:
    network, arch = unet()
    context, vector = flame.zeros(1, 3, arch.context_dim), flame.zeros(1, arch.adm_in_channels)
    with pytest.raises(ShapeError, match=message), flame.no_grad():
        network(flame.zeros(shape), flame.zeros(1), context, vector)
    with flame.no_grad():
        assert network(flame.zeros(1, 16, 12, 4), flame.zeros(1), context, vector).shape == (1, 16, 12, 4)


@pytest.mark.parametrize("network", ["MMDiT", "Flux's transformer"])
def test_odd_sides_of_a_transformer(network: str) -> None:
    with pytest.raises(ShapeError, match=f"{network}: expected latents .* multiples of 2, got 9 x 8"):
        check_latents(network, flame.zeros(1, 9, 8, 16), 16, 2)
    check_latents(network, flame.zeros(1, 10, 8, 16), 16, 2)
