"""The adapter that a run trains: its layers, and the finished one that it begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flame_train.adapters.formats import from_file
from flame_train.adapters.initial_lora import require_fit_for_start
from flame_train.adapters.kinds import ADAPTERS, Factors
from flame_train.adapters.targets import LayerSettings, apply_rules, layer_shapes, resolve
from flame_train.config.schema import LoraSection, TextEncodersSection
from flame_train.errors import ConfigError, ModelFileError
from flame_train.globs import choose
from flame_train.io.hub import placed
from flame_train.io.weights import open_weights
from flame_train.models.common.model import Model
from flame_train.networks.files.identify import identify, lora_could_be
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


def initial_lora(
    lora: LoraSection, model: Model, layers: Mapping[str, LayerSettings], trained: Sequence[str] = ()
) -> dict[str, Factors]:
    """The factors by layer of the file that `lora.from` names; none where it names none.

    Args:
        lora: the `[lora]` section.
        model: the opened model.
        layers: the adapted layers, and what each has of its own.
        trained: the text encoders that are trained.

    Returns:
        The factors, by the layers' names in `Model.networks`.

    Raises:
        ConfigError: a file of another family, of other layers or of another rank.
    """
    named: str = getattr(lora, "from")
    if not named:
        return {}
    path = placed(named)
    try:
        with open_weights(path) as weights:
            identity = identify(weights.shapes, weights.metadata)
        if identity.kind != "lora" or not lora_could_be(identity.family, model.name):
            raise ConfigError(f"lora.from: expected a LoRA for {model.title}, but {path} is: {identity.detail}")
        state = from_file(path, model.lora_names).state
    except ModelFileError as fault:
        raise ConfigError(f"lora.from: {fault}") from fault
    below = {encoder.part.component: f"{encoder.key}." for encoder in model.encoders(trained)}
    below[model.denoiser.component] = ""
    if others := sorted(state.keys() - below.keys()):
        raise ConfigError(
            f"lora.from: {path} adapts {others[0]} too, which is not trained here; name its encoder in "
            "text_encoders.train, or remove that part of the file"
        )
    found = {below[part] + name: factors for part, modules in state.items() for name, factors in modules.items()}
    chosen = ADAPTERS.chosen(lora)
    shapes = layer_shapes(model.networks(trained))
    ranks = {n: own.rank or chosen.sizes(shapes[n], lora.rank, lora.alpha)[0] for n, own in layers.items()}
    kind = "lora" if chosen.name == "locon" else chosen.name
    require_fit_for_start(found, kind, ranks, {n: shapes[n] for n in found if n in shapes}, lora.from_resize)
    return found
