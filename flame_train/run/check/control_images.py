"""Control images of prompts: their files, how each is placed, and their arrays where no cache has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flame_train.config.schema import DataSection
from flame_train.data.control_files import Control
from flame_train.data.images import probe
from flame_train.data.sets import image_sets
from flame_train.data.views import View, ViewedImage
from flame_train.engine import no_grad
from flame_train.errors import ConfigError, DataError, shown
from flame_train.io.kept import local_place
from flame_train.models.common.control import by_name
from flame_train.models.common.model import Autoencoder, Example, LoadedVae, Model
from flame_train.run.sampling import Request


def check_control_sets(data: DataSection, model: Model) -> None:
    """Raises ConfigError for control images beside the training images that the model does not take."""
    for number, own in enumerate(image_sets(data), 1):
        if said := model.controls.problem(len(own.control)):
            raise ConfigError(f"data.sets: control of table {number}: {said}" if data.sets else f"data.control: {said}")


def control_files(wanted: Iterable[Request], model: Model, resolution: int) -> dict[str, Control]:
    """The control images that requests name, by path. Each is decoded.

    Raises ConfigError for all that cannot be used.
    """
    found: dict[str, Control] = {}
    wrong: dict[str, None] = {}
    for request in wanted:
        own = request.prompt.control is not None
        key = f"sample.prompts: control of prompt {request.number}" if own else "sample.control"
        for path in request.control:
            try:
                info = probe(local_place(path))
                model.controls.placed(info.size, resolution)
            except DataError as error:
                wrong[f"{key}: {error if shown(path) in str(error) else f'{shown(path)}: {error}'}"] = None
            else:
                found[path] = Control(local_place(path), info.sha256, info.size)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return found


def shown_to(request: Request, files: Mapping[str, Control], model: Model, resolution: int) -> tuple[ViewedImage, ...]:
    """The control images of a request, scaled and cropped as the model has it for this resolution."""
    return tuple(
        ViewedImage(file.path, file.sha256, View(model.controls.placed(file.size, resolution)))
        for file in (files[path] for path in request.control)
    )


def encoded(images: Sequence[ViewedImage], own: Autoencoder, vae: LoadedVae) -> Example:
    """The arrays of control images, which are encoded now."""
    encoder = vae.encoder()
    with no_grad():
        made = [encoder.start([vae.inputs(image.pixels())])()[0] for image in images]
    return by_name(own.seen(arrays["mean"]) for arrays in made)


def blank(images: Iterable[ViewedImage], own: Autoencoder) -> Example:
    """The arrays of control images, all zeros."""
    return by_name(np.zeros(own.latent_shape(image.view.placement.bucket), np.float32) for image in images)
