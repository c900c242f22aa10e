"""What the comparison with PyTorch needs of a network of diffusers, and the loss that its training scripts compute."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flame_train.errors import ConfigError
from flame_train.models.common.model import Model
from flame_train.networks.arch import TransformerArch

Loss = Callable[[Any, Any], Any]
"""(torch, network) -> the loss of one batch, with new random inputs."""

Prepare = Callable[[Any, int, int, dict[str, Any]], Loss]
"""(torch, size, pixels a side, tensor options) -> `Loss`."""
Predict = Callable[[Any, Any, Any], Any]
"""(network, noised latents, noise levels) -> velocity."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch's inputs are made of: PyTorch, the number of images, their pixels a side, and tensor options."""

    torch: Any
    size: int
    resolution: int
    like: Mapping[str, Any]

    @property
    def side(self) -> int:
        """Tokens of 16 pixels a side."""
        return self.resolution // 16

    def randn(self, *shape: int) -> Any:
        """Random values (size, *shape)."""
        return self.torch.randn(self.size, *shape, **self.like)

    def tokens(self, features: int) -> Any:
        """Returns the latents as tokens (size, L, features)."""
        return self.randn(self.side * self.side, features)

    def seen(self, tokens: int) -> Any:
        """Returns a mask (size, tokens) that lets all be seen."""
        return self.torch.ones(self.size, tokens, dtype=self.torch.bool, device=self.like["device"])

    def image_ids(self) -> Any:
        """(0, row, column) of each token."""
        rows = self.torch.arange(self.side)
        return self.torch.cartesian_prod(self.torch.arange(1), rows, rows)


Lengths = Mapping[str, int]
"""The tokens of a caption, by the array of the text encoder."""
Inputs = Callable[[Batch], tuple[Any, Predict]]
"""-> latents, and how the network is called."""


@dataclass(frozen=True, slots=True)
class TorchBaseline:
    """diffusers' class with its arguments, the layers PEFT adapts, the blocks compiled one by one, and a step's loss.

    `channels_last` is how convolutions are fastest. Without `cudnn_attention` PyTorch takes the next of its attention
    kernels. `tables` gives values to what the network keeps beside parameters and buffers, since it is made on the meta
    device.
    """

    network: str
    arguments: Mapping[str, Any]
    targets: list[str] | str
    blocks: tuple[str, ...]
    loss: Prepare
    channels_last: bool = False
    cudnn_attention: bool = True
    tables: Callable[[Any], None] | None = None
    with_controls: Callable[[int], TorchBaseline] | None = None
    """The same with so many control images of the image's size beside each image."""
    with_frames: Callable[[int, int | None], TorchBaseline] | None = None
    """The same for clips of so many frames, and of this height where they are no squares."""

    def build(self) -> Any:
        """Returns the network, in PyTorch's default dtype and device."""
        return getattr(importlib.import_module("diffusers"), self.network)(**self.arguments)


def flow_loss(torch: Any, latents: Any, predict: Callable[[Any, Any], Any]) -> Any:
    """Of a velocity; `predict` is (noised latents, noise levels) -> prediction."""
    noise = torch.randn_like(latents)
    level = torch.sigmoid(torch.randn(latents.shape[0], device=latents.device)).to(latents.dtype)
    out = predict(torch.lerp(latents, noise, level.view(-1, *[1] * (latents.dim() - 1))), level)
    return torch.nn.functional.mse_loss(out.float(), (noise - latents).float())


def velocity(**given: Any) -> Predict:
    """Returns the usual call of diffusers' transformers, with these further arguments."""
    return lambda network, x, t: network(hidden_states=x, timestep=t, **given, return_dict=False)[0]


def flow_step(inputs: Inputs) -> Prepare:
    """Returns the loss of a flow model whose batch `inputs` makes."""

    def prepare(torch: Any, size: int, resolution: int, like: dict[str, Any]) -> Loss:
        latents, predict = inputs(Batch(torch, size, resolution, like))
        return lambda torch, network: flow_loss(torch, latents, lambda x, t: predict(network, x, t))

    return prepare


def sizes_of(arch: TransformerArch) -> dict[str, Any]:
    """Returns the arguments that diffusers' transformers share."""
    return {
        "num_layers": arch.depth,
        "attention_head_dim": arch.head_dim,
        "num_attention_heads": arch.width // arch.head_dim,
    }


def torch_baseline(model: Model) -> TorchBaseline:
    """The counterpart of a model's denoiser, which needs no weights. Raises ConfigError for a model without one.

    The `BASELINES` of the files `torch_*.py` beside this one have a family's each.
    """
    found: dict[str, Callable[[Any, Lengths], TorchBaseline]] = {}
    for file in sorted(Path(__file__).parent.glob("torch_*.py")):
        found |= getattr(importlib.import_module(f"{__package__}.{file.stem}"), "BASELINES", {})
    if model.name not in found:
        raise ConfigError(f"bench: {model.title} is not compared with PyTorch yet; leave --against out")
    network: Any = model.network
    return found[model.name](network.arch, {name: shape[0] for name, shape in model.caption_shapes().items()})
