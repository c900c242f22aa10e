"""Which layers an adapter attaches to: presets and globs over module names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from flame_train.engine import nn
from flame_train.errors import ConfigError
from flame_train.globs import choose
from flame_train.settings import Section, field

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


class Rule(Section):
    """One `[[lora.rules]]`: what a layer that `match` names has instead of the keys of `[lora]` and `optimizer.lr`."""

    match: tuple[str, ...] = field((), "globs over module names, or presets")
    rank: int | None = field(None, "inner width", ge=1, le=4096)
    alpha: float | None = field(None, "the update is scaled by alpha / rank", gt=0, le=1_000_000)
    lr: float | None = field(None, "peak learning rate", gt=0, le=10)
    dropout: float | None = field(None, "share of the inner activations that a step leaves out", ge=0, lt=1)
    off: bool = field(False, "no adapter")


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """What a layer has of its own; None: what all have."""

    rank: int | None = None
    alpha: float | None = None
    lr: float | None = None
    dropout: float | None = None


def apply_rules(
    names: Sequence[str],
    rules: Sequence[Rule],
    presets: Presets,
    usual: Mapping[str, LayerSettings] = MappingProxyType({}),
) -> dict[str, LayerSettings]:
    """Returns the adapted layers, those of `names` that no rule turns off, and what each has of its own.

    Args:
        rules: the rules, of which the last that matches a layer holds for it.
        usual: what layers have of their own where their rule says nothing.

    Raises:
        ConfigError: a rule matches no layer, and what comes near; or no layer is left.
    """
    by_layer: dict[str, Rule] = {}
    for number, rule in enumerate(rules, 1):
        if not rule.match:
            raise ConfigError(
                f"lora.rules: expected match in rule {number}, the globs of the layers it is for, got none"
            )
        if len(rule.model_fields_set) < 2:
            raise ConfigError(f"lora.rules: expected rank, alpha, lr, dropout or off in rule {number}, got none")
        wrong = f"lora.rules: no layer that lora.targets chose is named by match in rule {number}:"
        advice = "Use a glob over layer names, or choose more layers by lora.targets."
        by_layer |= dict.fromkeys(choose(names, rule.match, presets, wrong, advice), rule)
    left = {name: by_layer.get(name) for name in names if not (name in by_layer and by_layer[name].off)}
    if not left:
        raise ConfigError("lora.rules: expected a layer to adapt, got off = true for all; remove a rule")
    return {n: _settings_of(usual.get(n, LayerSettings()), rule) for n, rule in left.items()}


def _settings_of(usual: LayerSettings, rule: Rule | None) -> LayerSettings:
    """Returns what a layer has of its own: what its rule says, and what is usual where that says nothing."""
    if rule is None:
        return usual
    stated = {name: getattr(rule, name) for name in ("rank", "alpha", "lr", "dropout")}
    return replace(usual, **{name: value for name, value in stated.items() if value is not None})


def rates(layers: Mapping[str, LayerSettings], lr: float) -> dict[str, float]:
    """Returns the factor on the learning rate `lr` of each layer that has a rate of its own."""
    return {name: layer.lr / lr for name, layer in layers.items() if layer.lr is not None}
