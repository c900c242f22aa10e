"""What the comparison with PyTorch needs of a network of diffusers, and the loss that its training scripts compute."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Loss = Callable[[Any, Any], Any]
"""(torch, network) -> the loss of one batch, with new random inputs."""


@dataclass(frozen=True, slots=True)
class TorchBaseline:
    """diffusers' class with its arguments, the layers PEFT adapts, the blocks compiled one by one, and a step's loss.

    `loss` is (torch, size, pixels a side, tensor options) -> `Loss`. `channels_last` is how convolutions are fastest.
    Without `cudnn_attention` PyTorch takes the next of its attention kernels. `tables` gives values to what the network
    keeps beside parameters and buffers, since it is made on the meta device.
    """

    network: str
    arguments: Mapping[str, Any]
    targets: list[str] | str
    blocks: tuple[str, ...]
    loss: Callable[[Any, int, int, dict[str, Any]], Loss]
    channels_last: bool = False
    cudnn_attention: bool = True
    tables: Callable[[Any], None] | None = None

    def build(self) -> Any:
        """The network, in PyTorch's default dtype and device."""
        return getattr(importlib.import_module("diffusers"), self.network)(**self.arguments)


def flow_loss(torch: Any, latents: Any, predict: Callable[[Any, Any], Any]) -> Any:
    """Of a velocity; `predict` is (noised latents, noise levels) -> prediction."""
    noise = torch.randn_like(latents)
    level = torch.sigmoid(torch.randn(latents.shape[0], device=latents.device)).to(latents.dtype)
    out = predict(torch.lerp(latents, noise, level.view(-1, *[1] * (latents.dim() - 1))), level)
    return torch.nn.functional.mse_loss(out.float(), (noise - latents).float())
