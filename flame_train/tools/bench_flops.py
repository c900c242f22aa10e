"""The arithmetic of ops, and of a training step by a network's structure: what the time they took is held against.

The networks that embed times, sizes and prompts, of one row a picture, count by that row or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flame_train.adapters.kinds.lora import LoraAdapter
from flame_train.engine import nn
from flame_train.models.flux.transformer import Flux
from flame_train.models.sd3.mmdit import Mmdit
from flame_train.models.sdxl.transformer import SpatialTransformer
from flame_train.models.sdxl.unet import Downsample, UNet, Upsample

UNET_TEXT = 77  # positions of the text
_TOKEN = 16  # a transformer's token is so many pixels wide and high

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


@dataclass(frozen=True, slots=True)
class Work:
    """One picture's way through a network: each layer with the rows it works on, and attention's multiply-adds."""

    layers: tuple[tuple[nn.Linear | nn.Conv2d, int], ...]
    attention: int

    def forward(self) -> float:
        """FLOPs of the forward pass without adapters, two a multiply-add."""
        return 2.0 * (self._products(nn.Linear, nn.Conv2d) + self.attention)

    def step(self) -> dict[str, float]:
        """FLOPs forward, and backward to the inputs of frozen layers and to the adapters' factors, by kind of kernel.

        A frozen layer's product is made twice, an adapter's three times, attention three and a half times.
        """
        adapters = sum(
            rows * layer.adapter.rank * (layer.in_features + layer.out_features)
            for layer, rows in self.layers
            if isinstance(layer, nn.Linear) and isinstance(layer.adapter, LoraAdapter)
        )
        return {
            "matrix products": 4.0 * self._products(nn.Linear) + 4.0 * adapters,
            "LoRA factor gradients": 2.0 * adapters,
            "convolution": 4.0 * self._products(nn.Conv2d),
            "attention": 7.0 * self.attention,
        }

    def _products(self, *kinds: type[nn.Linear | nn.Conv2d]) -> int:
        return sum(rows * _weights(layer) for layer, rows in self.layers if isinstance(layer, kinds))


def _weights(layer: nn.Linear | nn.Conv2d) -> int:
    if isinstance(layer, nn.Linear):
        return layer.in_features * layer.out_features
    return math.prod(layer.kernel_size) * layer.in_channels * layer.out_channels


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
    return ((name, part) for name, part in module.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d)))


def unet_work(unet: UNet, resolution: int) -> Work:
    """SDXL's, without the two networks that embed time and size."""
    layers: list[tuple[nn.Linear | nn.Conv2d, int]] = []
    attention, side = 0, resolution // 8
    for stage in [*unet.input_blocks, unet.middle_block, *unet.output_blocks, unet.out]:
        for part in stage:
            side = side // 2 if isinstance(part, Downsample) else side * 2 if isinstance(part, Upsample) else side
            if part is None:
                continue
            layers += [(layer, _unet_rows(name, side * side)) for name, layer in _named(part)]
            if isinstance(part, SpatialTransformer):
                seen = side * side + UNET_TEXT
                attention += 2 * side * side * seen * part.proj_in.out_features * len(part.transformer_blocks)
    return Work(tuple(layers), attention)


def _unet_rows(name: str, pixels: int) -> int:
    if name.startswith("emb_layers"):
        return 1
    return UNET_TEXT if name.endswith(("attn2.to_k", "attn2.to_v")) else pixels


def flux_work(flux: Flux, resolution: int, text: int) -> Work:
    """Flux's with `text` tokens from T5."""
    image = (resolution // _TOKEN) ** 2
    both = image + text
    layers = [(layer, _flux_rows(name, image, text)) for name, layer in _named(flux)]
    blocks = flux.arch.depth + flux.arch.single_depth
    return Work(tuple(layers), 2 * both * both * flux.arch.width * blocks)


def _flux_rows(name: str, image: int, text: int) -> int:
    if "_in." in name or "mod" in name.lower():
        return 1
    if "txt_" in name:
        return text
    return image + text if name.startswith("single_blocks") else image


def mmdit_work(mmdit: Mmdit, resolution: int, text: int) -> Work:
    """SD3's with `text` tokens from the CLIPs and T5 together."""
    image = (resolution // _TOKEN) ** 2
    layers = [(layer, _mmdit_rows(name, image, text)) for name, layer in _named(mmdit)]
    seen = mmdit.arch.depth * (image + text) ** 2 + len(mmdit.arch.dual) * image**2
    return Work(tuple(layers), 2 * mmdit.arch.width * seen)


def _mmdit_rows(name: str, image: int, text: int) -> int:
    if "adaLN" in name or name.startswith(("t_embedder", "y_embedder")):
        return 1
    return text if "context_" in name else image
