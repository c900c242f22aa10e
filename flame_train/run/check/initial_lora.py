"""The finished adapter that a run begins with, read and checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flame_train.adapters.beginning import check_beginning
from flame_train.adapters.formats import from_file
from flame_train.adapters.kinds import ADAPTERS, Factors
from flame_train.adapters.rules import LayerSettings
from flame_train.adapters.targets import layer_shapes
from flame_train.config.schema import LoraSection
from flame_train.errors import ConfigError, ModelFileError
from flame_train.io.hub import placed
from flame_train.io.weights import open_weights
from flame_train.models.common.model import Model
from flame_train.networks.files.identify import identify, lora_could_be


def beginning(
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
    check_beginning(found, kind, ranks, {n: shapes[n] for n in found if n in shapes}, lora.from_resize)
    return found
