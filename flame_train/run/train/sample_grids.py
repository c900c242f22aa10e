"""Sample grids of a run: its processes share the images, and the leading one writes the grid."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from flame_train.adapters.attach import Attached, at_strength, shared
from flame_train.config.schema import Config
from flame_train.data.clip_files import sample_bytes
from flame_train.data.grid import Pixels, grid
from flame_train.data.views import ViewedImage
from flame_train.distributed.group import ProcessGroup
from flame_train.distributed.local_memory import keeping_once
from flame_train.engine import nn
from flame_train.engine.backend import get_backend
from flame_train.engine.mode import deterministic
from flame_train.errors import Interrupted, OtherRankFailed, is_device_failure
from flame_train.io.runfolder import RunFolder
from flame_train.models.common.model import Denoiser, Example, Model
from flame_train.networks.block_offload import StreamedWeights, SwappedWeights
from flame_train.networks.vae.autoencoder import LoadedVae
from flame_train.run.check.check_run import storage_of
from flame_train.run.encode.encode import Encoded
from flame_train.run.plan.plan import Plan
from flame_train.run.sampling.draw import generate_image, sampler_spec
from flame_train.run.sampling.requests import Request
from flame_train.training.session import Session

_LOG = logging.getLogger(__name__)


def grid_writer(
    plan: Plan, encoded: Encoded, denoiser: Denoiser, attached: Attached, folder: RunFolder, session: Session
) -> Callable[[int], None]:
    """Returns a function that writes a step's grid with the network's weights of then; it does nothing without prompts.

    Args:
        encoded: the encoded dataset, which has the prompts' arrays.
        session: its processes share the images, and all of them call the function.
    """
    sampled, of_base = grid_samplers(plan, encoded.caption, encoded.shown, denoiser, attached, session)
    fps = plan.config.sample.fps

    def write(step: int) -> None:
        for sampler in (of_base if step == 0 else None, sampled):
            pixels = None if sampler is None else sampler()
            if pixels is not None and session.group.leads:
                folder.write_sample(step, sample_bytes(pixels, fps), of_base=sampler is of_base)

    return write


def grid_samplers(
    plan: Plan,
    captions: Callable[[str, Sequence[ViewedImage]], Example],
    controls: Callable[[Sequence[ViewedImage]], Example],
    denoiser: Denoiser,
    attached: Attached,
    session: Session,
    vae: LoadedVae | None = None,
) -> tuple[Callable[[], Pixels] | None, Callable[[], Pixels] | None]:
    """Makes what samples the grids of a run, and the one of the base itself that step 0 has beside another model's.

    Args:
        captions, controls, denoiser, attached, session, vae: as in `grid_sampler`.

    Returns:
        Both as `grid_sampler` makes them, over one decoder.
    """
    c, model = plan.config.model, plan.checked.sample_model
    if vae is None and plan.requests:
        vae = model.vae.load(c.vae_precision, session.device, c.vae_tile)
    shared = captions, controls, denoiser, attached, session
    return (
        grid_sampler(plan, plan.requests, *shared, vae, model),
        grid_sampler(plan, plan.base_requests, *shared, vae),
    )


def grid_sampler(
    plan: Plan,
    images: Sequence[Request],
    captions: Callable[[str, Sequence[ViewedImage]], Example],
    controls: Callable[[Sequence[ViewedImage]], Example],
    denoiser: Denoiser,
    attached: Attached,
    session: Session,
    vae: LoadedVae | None = None,
    model: Model | None = None,
) -> Callable[[], Pixels] | None:
    """Returns a function that samples a grid with the network's weights of then; None if no image is wanted.

    Args:
        captions: the arrays of a prompt that is shown with these control images.
        controls: the arrays of control images.
        session: its processes share the images; each gets the whole grid.
        vae: the loaded decoder; None: it is loaded here.
        model: the model that samples; None: the base.
    """
    if not images:
        return None
    c, model, device, group = plan.config, model or plan.model, session.device, session.group
    specs = [sampler_spec(each, c.model, c.loss, model, device=device, dtype=c.train.precision) for each in images]
    with keeping_once(group, model is not plan.model):
        preview = None if model is plan.model else load_preview(model, c, denoiser, device)
    denoiser, acting = sampling_with(attached, denoiser, preview, c.text_encoders.train)
    vae = vae or model.vae.load(c.model.vae_precision, device, c.model.vae_tile)
    beside = [controls(request.images) for request in images]
    mine: dict[int, Pixels] = {}

    def sample(i: int) -> None:
        with acting(images[i].strength):
            read = partial(_read, captions, images[i].images)
            mine[i] = generate_image(images[i], specs[i], read, denoiser, vae, session.stop, beside[i])

    def sample_grid() -> Pixels:
        mine.clear()
        # Choices are measured for what recurs thousands of times, and what training may vary in must not show here.
        with group.barrier(alone=is_device_failure), deterministic(True):
            for i in group.share(len(images)):
                get_backend(device).run_once(partial(sample, i))
        return grid(_of_all(mine, len(images), group))

    return sample_grid


def _read(
    captions: Callable[[str, Sequence[ViewedImage]], Example], images: Sequence[ViewedImage], text: str
) -> Example:
    return captions(text, images)


def _of_all(mine: Mapping[int, Pixels], count: int, group: ProcessGroup) -> list[Pixels]:
    """Returns the images 0 to `count`, each sampled by one process of the group."""
    sent = json.dumps({i: [*image.shape, base64.b64encode(image.tobytes()).decode()] for i, image in mine.items()})
    received = {i: image for text in group.all_gather(sent) for i, image in json.loads(text).items()}
    images = (received[str(i)] for i in range(count))
    return [np.frombuffer(base64.b64decode(raw), np.uint8).reshape(shape) for *shape, raw in images]


def best_effort(sample_images: Callable[[int], None]) -> Callable[[int], None]:
    """Returns the function, whose failure costs the image, never the run. A signal ends it; the loop handles that."""

    def attempt(step: int) -> None:
        try:
            sample_images(step)
        except Interrupted:
            return
        except OtherRankFailed as e:
            if not e.by_signal:
                _LOG.warning("no sample grid at step %d: %s", step, e)
        except Exception as e:  # a decoder may run out of memory, a disk out of room: training goes on
            if is_device_failure(e):
                raise
            _LOG.warning("no sample grid at step %d: %s: %s", step, type(e).__name__, e)

    return attempt


def load_preview(model: Model, config: Config, denoiser: Denoiser, device: str) -> tuple[Denoiser, SwappedWeights]:
    """Returns the loaded denoiser of `model`, which waits in host memory, and what lends it the place of the base's.

    Args:
        denoiser: the loaded base, and the text encoders that run.
    """
    preview = model.load_denoiser(
        device=device,
        dtype=config.train.precision,
        storage=storage_of(config.model.quantize, config.model.arithmetic),
        guidance_scale=config.loss.guidance_scale,
        streamed=model.network.named_blocks(),
    )
    return replace(preview, text=denoiser.text), SwappedWeights(
        preview.network, denoiser.network, _on_host(preview.network)
    )


def _on_host(network: Any) -> frozenset[int]:
    """Returns the ids of the tensors that wait in host memory."""
    policy = next(iter(network.named_blocks().values())).weight_policy
    assert isinstance(policy, StreamedWeights)
    return policy.tensors


def sampling_with(
    attached: Attached, denoiser: Denoiser, preview: tuple[Denoiser, SwappedWeights] | None, trained: Collection[str]
) -> tuple[Denoiser, Callable[[float], AbstractContextManager[nn.Module]]]:
    """Returns the denoiser that samples, and a function from a strength to a context with its adapters so strong.

    Args:
        attached: the adapters of the base.
        denoiser: the base.
        preview: what `load_preview` made; None: the base samples.
        trained: the keys of the text encoders that are trained.
    """
    if preview is None:
        return denoiser, lambda strength: at_strength(attached, strength)
    other, borrowed = preview
    adapters = shared(attached, other.networks(trained))

    @contextmanager
    def acting(strength: float) -> Iterator[nn.Module]:
        with borrowed.in_place(), at_strength(adapters, strength) as model:
            yield model

    return other, acting
