"""The layers that a run adapts, the finished LoRA that it begins with, and the blocks that wait or are recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from flame_train.adapters.factors import LoraState
from flame_train.adapters.formats import from_file
from flame_train.adapters.initial_lora import require_fit_for_start
from flame_train.adapters.kinds import ADAPTERS, Factors
from flame_train.adapters.targets import LayerSettings, apply_rules, layer_shapes, resolve
from flame_train.config.schema import LoraSection, TextEncodersSection
from flame_train.engine import nn
from flame_train.errors import ConfigError, ModelFileError
from flame_train.globs import choose
from flame_train.io.hub import path_of_setting
from flame_train.io.weights import open_weights
from flame_train.models.common.model import Model
from flame_train.models.registry import FAMILIES
from flame_train.networks.block_network import BlockNetwork, Checkpointing, whole_blocks
from flame_train.networks.files.identify import identify, lora_could_be
from flame_train.text_encoders.encoder import TextEncoder


def adapted_layers(lora: LoraSection, text: TextEncodersSection, model: Model) -> dict[str, LayerSettings]:
    """Returns the layers by their names in `Model.networks`, the denoiser's first, and what each has of its own.

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
    """Finds the layers that `text_encoders.targets` mean. Raises ConfigError if an encoder is trained without."""
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
    """Returns the globs of all encoders by preset: each encoder's match its own layers alone."""
    names = dict.fromkeys(preset for encoder in encoders for preset in encoder.presets)
    return {
        name: tuple(f"{encoder.key}.{glob}" for encoder in encoders for glob in encoder.presets.get(name, ()))
        for name in names
    }


def _check_names(model: Model, layers: Sequence[str], trained: Sequence[str], key: str) -> None:
    """Refuses an adapted layer without a name in LoRA files, which are written long after it was chosen."""
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
    """Returns the factors, by layers in `Model.networks`, of the file that `lora.from` names; none where it names none.

    Args:
        layers: the adapted layers, and what each has of its own.
        trained: the text encoders that are trained.

    Raises:
        ConfigError: a file of another family, of other layers or of another rank.
    """
    named: str = getattr(lora, "from")
    if not named:
        return {}
    path = path_of_setting(named)
    try:
        with open_weights(path) as weights:
            identity = identify(weights.shapes, weights.metadata)
        if identity.kind != "lora" or not lora_could_be(identity.family, model.name):
            raise ConfigError(f"lora.from: expected a LoRA for {model.title}, but {path} is: {identity.detail}")
        state = read_lora(path, model)
    except ModelFileError as fault:
        raise ConfigError(f"lora.from: {fault}") from fault
    below = {encoder.part.component: f"{encoder.key}." for encoder in model.encoders(trained)}
    below[model.denoiser.component] = ""
    if others := sorted(state.keys() - below.keys()):
        raise ConfigError(
            f"lora.from: {path} adapts {others[0]} too, which is not trained here; name its encoder in "
            "text_encoders.train, or remove that part of the file"
        )
    factors_of = {below[part] + name: factors for part, modules in state.items() for name, factors in modules.items()}
    chosen = ADAPTERS.chosen(lora)
    shapes = layer_shapes(model.networks(trained))
    ranks = {n: settings.rank or chosen.sizes(shapes[n], lora.rank, lora.alpha)[0] for n, settings in layers.items()}
    kind = "lora" if chosen.name == "locon" else chosen.name
    require_fit_for_start(factors_of, kind, ranks, {n: shapes[n] for n in factors_of if n in shapes}, lora.from_resize)
    return factors_of


def read_lora(path: Path, model: Model, skip_unknown: bool = False) -> LoraState:
    """Returns a LoRA's factors by component, also those of layers that another model of the family alone has.

    So such a file is told by what does not fit. Raises ModelFileError for parts of no module.
    """
    try:
        return from_file(path, model.lora_names, skip_unknown).state
    except ModelFileError:
        with open_weights(path) as weights:
            names = FAMILIES[model.name].lora_names_in(weights.shapes)
        return from_file(path, names, skip_unknown).state


def blocks_named(
    network: BlockNetwork,
    checkpointing: Checkpointing,
    globs: Sequence[str],
    key: str = "gradient.checkpoint_blocks",
) -> frozenset[str]:
    """Returns the names of the blocks that `checkpointing` means where only those in `globs` are wanted; with no globs
    all are.

    Raises ConfigError naming `key` and every glob that means no block of which `checkpointing` recomputes something.
    """
    names = list(network.named_blocks(checkpointing))
    if not globs or checkpointing == "off":
        return frozenset(names)
    wrong = f'{key}: no block of the model that "{checkpointing}" recomputes is named by'
    firsts = {name.partition(".")[0]: name for name in reversed(names)}
    advice = f"Use a glob over block names such as {', '.join(repr(name) for name in reversed(firsts.values()))}."
    return frozenset(choose(names, globs, {}, wrong, advice))


_KEY = "model.offload"


def blocks_streamed(
    network: BlockNetwork, offload: str | float | Sequence[str], checkpointing: Checkpointing, recomputed: Set[str]
) -> frozenset[str]:
    """Returns the names of the blocks that `model.offload` means; none for "auto", which `resolve_offload` decides.

    Args:
        offload: the value of the key.
        checkpointing: what `gradient.checkpointing` recomputes.
        recomputed: the names of the blocks of which it does.

    Raises:
        ConfigError: a glob means no block, or a block is not recomputed.
    """
    if offload == "off":
        return frozenset()
    if not whole_blocks(checkpointing):
        raise ConfigError(
            f'{_KEY}: expected gradient.checkpointing = "full" or "offload" with it, got "{checkpointing}": '
            "a block's weights are gone when its gradient is wanted, unless the block is recomputed"
        )
    if isinstance(offload, str):
        return frozenset()
    sizes = block_sizes(network)
    names = blocks_of_share(sizes, offload) if isinstance(offload, float | int) else _named_blocks(list(sizes), offload)
    if stored := [name for name in names if name not in recomputed]:
        raise ConfigError(
            f"{_KEY}: expected blocks that are recomputed, got {len(stored)} that gradient.checkpoint_blocks leaves "
            f"out, such as {stored[0]}; name them there, or leave them out here"
        )
    return frozenset(names)


def block_sizes(network: BlockNetwork) -> dict[str, int]:
    """Returns the number of weights of each block that can wait on the host, in the order in which the blocks run."""
    outside = {id(layer) for layer in network.run_outside()}
    return {
        name: sum(spec.size for _, module, _, spec in block.named_specs() if id(module) not in outside)
        for name, block in network.named_blocks().items()
    }


def blocks_of_share(sizes: Mapping[str, int], share: float) -> list[str]:
    """Blocks with at least this share of all weights, spread evenly, so that copies have time to hide behind others."""
    chosen, taken, passed = [], 0, 0
    for name, size in sizes.items():
        passed += size
        if taken < share * passed:
            chosen.append(name)
            taken += size
    return chosen


def text_share(offload: str | float | Sequence[str]) -> float:
    """Gives the share of the text encoders' blocks that waits on the host during encoding; globs name none."""
    return float(offload) if isinstance(offload, float | int) else 0.0


def text_blocks(network: nn.Module, share: float) -> list[str]:
    """Returns the names of a text encoder's blocks that wait on the host."""
    assert isinstance(network, BlockNetwork)
    return blocks_of_share(block_sizes(network), share)


def _named_blocks(names: Sequence[str], globs: Sequence[str]) -> list[str]:
    wrong = f"{_KEY}: no block of the model is named by"
    firsts = {name.partition(".")[0]: name for name in reversed(names)}
    advice = f"Use a glob over block names such as {', '.join(repr(name) for name in reversed(firsts.values()))}."
    return choose(names, globs or [""], {}, wrong, advice)
