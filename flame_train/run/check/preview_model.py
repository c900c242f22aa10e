"""The model of `sample.model`, which samples images in place of the base: opened, and held to the base."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flame_train.config.schema import Config
from flame_train.errors import ConfigError
from flame_train.io.hub import resolve_checkpoint
from flame_train.models.common.model import Model
from flame_train.models.registry import Family, Opening, family_of

_SHOWN = 3  # tensors that a message names


def opened_for_samples(config: Config, family: Family, base: Model) -> Model:
    """The model that samples images: the base with the denoiser of `sample.model`, or the base itself.

    It has the base's autoencoder and text encoders, and what its own name and folder say of steps, guidance and shift.

    Raises:
        ConfigError: a checkpoint of another family, or of other shapes.
        ModelFileError: a file that cannot be read, or lacks the denoiser.
    """
    if not config.sample.model or not config.sample.repeats:
        return base
    place = resolve_checkpoint(config.sample.model)
    found = family_of(place)
    if found is not family:
        raise ConfigError(
            f"sample.model: expected a checkpoint of {family.title}, as model.checkpoint is, got one of {found.title}: "
            f"{place}"
        )
    part = family.files.parts(place, [family.denoiser])[family.denoiser]
    _check_alike(place, part.shapes, part.network, base)
    parts = {base.vae.part.component: base.vae.part, family.denoiser: part}
    parts |= {encoder.part.component: encoder.part for encoder in base.text}
    section = config.model.model_copy(update={"checkpoint": config.sample.model, "training_adapter": ""})
    return family.assemble(parts, Opening(place, section, config.text_encoders, config.data.max_tokens))


def _check_alike(place: Path, shapes: Mapping[str, tuple[int, ...]], network: Any, base: Model) -> None:
    """Raises ConfigError unless the denoisers have the same tensors and the same architecture.

    What a distilled one has beside them is left out.
    """
    theirs = base.denoiser.shapes
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith(base.distilled_parts)}
    other = [name for name in dict.fromkeys((*theirs, *shapes)) if theirs.get(name) != shapes.get(name)]
    if other:
        told = [f"{name} {shapes.get(name, 'missing')}, not {theirs.get(name, 'there')}" for name in other[:_SHOWN]]
        raise ConfigError(
            f"sample.model: expected the tensors of model.checkpoint in {place}, got {len(other)} others: "
            f"{'; '.join(told)}"
        )
    if network.arch != base.network.arch:
        raise ConfigError(
            f"sample.model: expected the architecture of model.checkpoint in {place}, got another: {network.arch}, "
            f"not {base.network.arch}"
        )
