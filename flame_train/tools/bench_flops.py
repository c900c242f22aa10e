"""The arithmetic of ops, and of a training step by a UNet's structure: what the time they took is held against."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from flame_train.adapters.lora import LoraAdapter
from flame_train.engine import nn
from flame_train.models.transformer import SpatialTransformer
from flame_train.models.unet_sdxl import Downsample, UNet, Upsample

_TEXT = 77  # positions of the text

FROZEN: Mapping[str, tuple[str, ...]] = {
    "linear": ("weight", "bias"),
    "conv2d": ("weight", "bias"),
    "lora_linear": ("weight", "bias"),
}
"""The base weights, which a LoRA step does not differentiate, by op."""


def op_flops(name: str, bound: Mapping[str, Any]) -> tuple[float, float]:
    """Of an op that arithmetic bounds, forward and backward to all but what is frozen; zeros for the others.

    A product's gradient is a product of the same size for each factor; attention, two products, makes five.
    """
    if name in ("linear", "lora_linear"):
        out, width = bound["weight"].shape
        rows = bound["input"].size / width
        base, rank = 2.0 * rows * width * out, bound["down"].shape[0] if name == "lora_linear" else 0
        update = 2.0 * rows * rank * (width + out)
        return base + update, base + 2.0 * update
    if name == "matmul":
        product = 2.0 * bound["input"].size * bound["other"].shape[-1]
        return product, 2.0 * product
    if name == "conv2d":
        image = bound["input"].size / bound["input"].shape[-1 if bound["layout"] == "NHWC" else 1]
        product = 2.0 * image * bound["weight"].size / math.prod(np.broadcast_to(bound["stride"], 2).tolist())
        return product, product
    if name == "scaled_dot_product_attention":
        products = (
            2.0 * bound["query"].size * bound["key"].shape[-2],
            2.0 * bound["value"].size * bound["query"].shape[-2],
        )
        return sum(products), 3.0 * products[0] + 2.0 * products[1]
    return 0.0, 0.0


def forward_flops(unet: UNet, resolution: int) -> tuple[float, float]:
    """Of one picture's forward pass, two a multiply-add: (matrix products and convolutions, attention).

    The two networks that embed time and size, of one row a picture, are left out.
    """
    products = attention = 0.0
    for part, pixels in _parts(unet, resolution):
        for name, layer in part.named_modules():
            if isinstance(layer, nn.Linear):
                products += 2.0 * _rows(name, pixels) * layer.in_features * layer.out_features
            elif isinstance(layer, nn.Conv2d):
                products += 2.0 * pixels * layer.kernel_size**2 * layer.in_channels * layer.out_channels
        if isinstance(part, SpatialTransformer):
            attention += 4.0 * pixels * (pixels + _TEXT) * part.proj_in.out_features * len(part.transformer_blocks)
    return products, attention


def step_flops(unet: UNet, resolution: int, batch: int) -> float:
    """Of a whole step, forward, and backward to the inputs of frozen layers and to the adapters' factors.

    A frozen layer's product is made twice, an adapter's three times, attention three and a half times.
    """
    products, attention = forward_flops(unet, resolution)
    return batch * (2.0 * products + 3.5 * attention + 3.0 * _adapters(unet, resolution))


def _parts(unet: UNet, resolution: int) -> Iterator[tuple[nn.Module, int]]:
    """Every part that works on the picture, and the pixels of what it makes."""
    side = resolution // 8
    for stage in [*unet.input_blocks, unet.middle_block, *unet.output_blocks, unet.out]:
        for part in stage:
            side = side // 2 if isinstance(part, Downsample) else side * 2 if isinstance(part, Upsample) else side
            if part is not None:
                yield part, side * side


def _adapters(unet: UNet, resolution: int) -> float:
    return sum(
        2.0 * _rows(name, pixels) * layer.adapter.rank * (layer.in_features + layer.out_features)
        for part, pixels in _parts(unet, resolution)
        for name, layer in part.named_modules()
        if isinstance(layer, nn.Linear) and isinstance(layer.adapter, LoraAdapter)
    )


def _rows(name: str, pixels: int) -> int:
    if name.startswith("emb_layers"):
        return 1
    return _TEXT if name.endswith(("attn2.to_k", "attn2.to_v")) else pixels
