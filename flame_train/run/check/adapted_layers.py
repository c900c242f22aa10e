"""The layers that get an adapter, of the denoiser and of text encoders, and what each has of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flame_train.adapters.kinds import ADAPTERS
from flame_train.adapters.rules import LayerSettings, apply_rules
from flame_train.adapters.targets import layer_shapes, resolve
from flame_train.config.schema import LoraSection, TextEncodersSection
from flame_train.errors import ConfigError
from flame_train.globs import choose
from flame_train.models.common.model import Model
from flame_train.text_encoders.encoder import TextEncoder


def adapted_layers(lora: LoraSection, text: TextEncodersSection, model: Model) -> dict[str, LayerSettings]:
    """The layers by their names in `Model.networks`, the denoiser's first, and what each has of its own.

    Raises ConfigError for targets and rules that mean no layer, and for layers that the adapter's kind does not suit.
    """
    denoiser = resolve(model.network, lora.targets, model.presets)
    others = _text_layers(text, model)
    _check_names(model, denoiser, text.train, "lora.targets")
    _check_names(model, others, text.train, "text_encoders.targets")
    usual = dict.fromkeys(others, LayerSettings(text.rank or None, text.alpha or None, text.lr or None))
    layers = apply_rules([*denoiser, *others], lora.rules, model.presets, usual)
    shapes = layer_shapes(model.networks(text.train))
    if wrong := ADAPTERS.chosen(lora).shape_problem({name: shapes[name] for name in layers}):
        raise ConfigError(f"lora.{wrong[0]}: {wrong[1]}")
    return layers


def _text_layers(text: TextEncodersSection, model: Model) -> list[str]:
    """The layers of text encoders that `text_encoders.targets` mean. Raises ConfigError if one is trained without."""
    trained = model.encoders(text.train)
    if lacking := [key for key in text.train if key not in {encoder.key for encoder in trained}]:
        known = " or ".join(f'"{encoder.key}"' for encoder in model.text)
        raise ConfigError(f'text_encoders.train: expected {known} for {model.title}, got "{lacking[0]}"; remove it')
    named = {component.name for component in model.lora_names.components}
    if mute := [encoder.key for encoder in trained if encoder.part.component not in named]:
        raise ConfigError(f'text_encoders.train: no LoRA file of {model.title} speaks of "{mute[0]}"; remove it')
    if not trained:
        return []
    names = [f"{encoder.key}.{layer}" for encoder in trained for layer in encoder.adaptable()]
    wrong = "text_encoders.targets: no layer of the trained text encoders is named by"
    advice = f"Use a preset ({', '.join(trained[0].presets)}) or a glob over layer names such as {names[0]!r}."
    chosen = choose(names, text.targets, _presets(trained), wrong, advice)
    for encoder in trained:
        if not any(name.startswith(f"{encoder.key}.") for name in chosen):
            raise ConfigError(
                f'text_encoders.targets: they choose no layer of "{encoder.key}"; choose some, or remove it from '
                "text_encoders.train"
            )
    return chosen


def _presets(encoders: Sequence[TextEncoder]) -> Mapping[str, tuple[str, ...]]:
    """The globs of all encoders by preset: each encoder's match its own layers alone."""
    names = dict.fromkeys(preset for encoder in encoders for preset in encoder.presets)
    return {
        name: tuple(f"{encoder.key}.{glob}" for encoder in encoders for glob in encoder.presets.get(name, ()))
        for name in names
    }


def _check_names(model: Model, layers: Sequence[str], trained: Sequence[str], key: str) -> None:
    """Every adapted layer must have a name in LoRA files, which are written long after it was chosen."""
    named = {(component.name, module) for component in model.lora_names.components for module in component.modules}
    nameless = [layer for layer in layers if model.place(layer, trained) not in named]
    if nameless:
        raise ConfigError(
            f"{key}: {len(nameless)} of the chosen layers have no name in LoRA files of {model.lora_names.name}, such "
            f"as {nameless[0]}: no program could load them; choose other layers, or a model of the usual depth"
        )
