"""Sample grids of a run: its processes share the images, and the leading one writes the grid."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from flame_train.adapters.attach import Attached
from flame_train.data.views import ViewedImage
from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.engine.backend import get_backend
from flame_train.engine.mode import deterministic
from flame_train.engine.nn import Module
from flame_train.errors import is_device_failure
from flame_train.io.runfolder import RunFolder
from flame_train.models.common.model import Denoiser, Example, LoadedVae
from flame_train.run.encode.encode import Encoded
from flame_train.run.plan.plan import Plan
from flame_train.run.sampling import Request, generate_image, sampler_spec
from flame_train.run.train.preview_network import load_second, sampling_with
from flame_train.training.image_sampling import Pixels, SamplerSpec, grid, png
from flame_train.training.stop import StopRequest


def grid_writer(
    plan: Plan,
    encoded: Encoded,
    denoiser: Denoiser,
    attached: Attached,
    folder: RunFolder,
    device: str,
    stop: StopRequest,
    group: ProcessGroup,
) -> Callable[[int], None]:
    """Writes the grid of a step, sampled with the network's weights at the time of the call.

    Args:
        plan: the plan of the run.
        encoded: the encoded dataset, which has the prompts' arrays.
        denoiser: the network.
        attached: its adapters.
        folder: the run folder.
        device: "cuda" or "cpu".
        stop: raises Interrupted after a signal.
        group: the processes that share the images, all of which call the function.

    Returns:
        A function of the step; it does nothing if the config wants no grids.
    """
    sampled = grid_sampler(plan, plan.requests, encoded.caption, encoded.shown, denoiser, attached, device, stop, group)

    def write(step: int) -> None:
        pixels = None if sampled is None else sampled()
        if pixels is not None and group.leads:
            folder.write_sample(step, png(pixels))

    return write


def grid_sampler(
    plan: Plan,
    wanted: Sequence[Request],
    captions: Callable[[str, Sequence[ViewedImage]], Example],
    controls: Callable[[Sequence[ViewedImage]], Example],
    denoiser: Denoiser,
    attached: Attached,
    device: str,
    stop: StopRequest,
    group: ProcessGroup = ALONE,
    vae: LoadedVae | None = None,
) -> Callable[[], Pixels] | None:
    """A function that samples a grid with the network's weights at the time of the call.

    Args:
        plan: the plan of the run.
        wanted: the images.
        captions: the arrays of a prompt that is shown with these control images.
        controls: the arrays of control images.
        denoiser: the network.
        attached: its adapters.
        device: "cuda" or "cpu".
        stop: raises Interrupted after a signal.
        group: the processes that share the images.
        vae: the loaded decoder; None: it is loaded here.

    Returns:
        The function; None if no image is wanted.
    """
    if not wanted:
        return None
    c, model = plan.config, plan.checked.sample_model
    how = [sampler_spec(each, c.model, c.loss, model, device=device, dtype=c.train.precision) for each in wanted]
    second = None if model is plan.model else load_second(model, c, denoiser, device)
    denoiser, acting = sampling_with(attached, denoiser, second, c.text_encoders.train)
    vae = vae or model.vae.load(c.model.vae_precision, device, c.model.vae_tile)
    specs = list(zip(wanted, how, strict=True))
    images = {request.number: plan.shown_to(request) for request in wanted}
    shown = {number: controls(own) for number, own in images.items()}
    read = {number: partial(_read, captions, own) for number, own in images.items()}
    return grid_of(specs, read, shown, denoiser, vae, acting, stop, group)


def _read(
    captions: Callable[[str, Sequence[ViewedImage]], Example], images: Sequence[ViewedImage], text: str
) -> Example:
    return captions(text, images)


def grid_of(
    wanted: Sequence[tuple[Request, SamplerSpec]],
    captions: Mapping[int, Callable[[str], Example]],
    shown: Mapping[int, Example],
    denoiser: Denoiser,
    vae: LoadedVae,
    at_strength: Callable[[float], AbstractContextManager[Module]],
    stop: StopRequest,
    group: ProcessGroup = ALONE,
) -> Callable[[], Pixels]:
    """A function that samples the grid with the network's weights at the time of the call.

    Args:
        wanted: the images, with the settings of the sampler.
        captions: the arrays of a prompt or negative prompt of each image, by its number.
        shown: the arrays of the control images of each image.
        denoiser: the network.
        vae: the loaded decoder.
        at_strength: a context in which the adapters act so strongly.
        stop: raises Interrupted after a signal; checked between steps.
        group: the processes that share the images; each gets the whole grid.

    Returns:
        The function.
    """

    def one(request: Request, how: SamplerSpec) -> Pixels:
        with at_strength(request.strength):
            number = request.number
            return generate_image(request, how, captions[number], denoiser, vae, stop, shown[number])

    mine: dict[int, Pixels] = {}

    def sampled(i: int) -> None:
        mine[i] = one(*wanted[i])

    def sampled_grid() -> Pixels:
        mine.clear()
        # Choices are measured for what recurs thousands of times, and what training may vary in must not show here.
        with group.barrier(alone=is_device_failure), deterministic(True):
            for i in group.share(len(wanted)):
                get_backend(wanted[i][1].device).run_once(partial(sampled, i))
        return grid(_of_all(mine, len(wanted), group))

    return sampled_grid


def _of_all(mine: Mapping[int, Pixels], count: int, group: ProcessGroup) -> list[Pixels]:
    """The images 0 to `count`, each sampled by one process of the group."""
    told = json.dumps({i: [*image.shape, base64.b64encode(image.tobytes()).decode()] for i, image in mine.items()})
    found = {i: image for text in group.all_gather(told) for i, image in json.loads(text).items()}
    images = (found[str(i)] for i in range(count))
    return [np.frombuffer(base64.b64decode(raw), np.uint8).reshape(shape) for *shape, raw in images]
