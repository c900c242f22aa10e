"""Which layers an adapter attaches to: presets and globs over module names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from flame_train.engine import nn
from flame_train.errors import ConfigError
from flame_train.globs import choose

Presets = Mapping[str, tuple[str, ...]]


def presets(attention: tuple[str, ...], mlp: tuple[str, ...], full: tuple[str, ...]) -> Presets:
    """Returns the groups of layers that a config may name, from globs over layer names."""
    return MappingProxyType({"attention": attention, "attention+mlp": (*attention, *mlp), "full": full})


UNET_PRESETS: Final = presets(
    attention=("*.attn[12].to_[qkv]", "*.attn[12].to_out.0"),
    mlp=("*.ff.net.0.proj", "*.ff.net.2"),
    full=("input_blocks.[1-9]*", "middle_block.*", "output_blocks.*"),
)
"""For UNets with the names of the original checkpoints. In SDXL's these are 560, 700 and 788 layers; `full` is
every linear layer and convolution inside the numbered blocks, as sd-scripts' convolution option has it."""


def resolve(model: nn.Module, targets: Sequence[str], presets: Presets) -> list[str]:
    """Returns the names of the layers that `targets` mean, each once, in the model's order.

    A target is the name of a preset or a glob over the names of the model's linear layers and convolutions;
    `*` crosses dots. Raises ConfigError naming every target that means no layer, with what comes near.
    """
    names = [name for name, part in model.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))]
    known = ", ".join(presets)
    if not targets:
        raise ConfigError(f"lora.targets: expected at least one target, got none; presets are {known}")
    wrong = "lora.targets: no linear layer or convolution of the model is named by"
    advice = f"Use a preset ({known}) or a glob over layer names such as {names[0]!r}."
    return choose(names, targets, presets, wrong, advice)


def layer_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns the weight shapes of the layers that an adapter may attach to, by name."""
    parts = [(n, p) for n, p in model.named_modules() if isinstance(p, (nn.Linear, nn.Conv2d))]
    return {name: part.shapes()["weight"] for name, part in parts}
