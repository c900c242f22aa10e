"""The memory that a run will take: the run itself, on shapes alone, for a GPU that is only described.

Encoding, training and sampling run the code that runs on the device (`engine/shape_run.py`). So the prediction
follows the program. A new family, adapter kind or optimizer needs no line here. Of the buckets the
largest is met: all captured steps share one memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flame_train.adapters.attach import Attached
from flame_train.data.order import FIRST
from flame_train.data.padding import collate
from flame_train.data.samples import EncoderInput, Sample, Samples
from flame_train.data.views import ViewedImage
from flame_train.distributed.group import simulated_group
from flame_train.engine import Tensor, capture, no_grad, tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.mode import deterministic
from flame_train.engine.shape_run import Gpu, KernelRequests, ShapeRun, shape_run
from flame_train.models.common.model import Denoiser, Example
from flame_train.networks.vae.autoencoder import LoadedVae
from flame_train.run.encode.encoders import load_encoders
from flame_train.run.plan.plan import Plan
from flame_train.run.sampling.draw import blank
from flame_train.run.sampling.requests import Request
from flame_train.run.train.sample_grids import grid_samplers
from flame_train.run.train.step_state import load_networks, make_validator, set_checkpointing
from flame_train.text_encoders.running import tokens_of
from flame_train.training.batch import BASE_IS_TARGET, LOSS_WEIGHT, Batch, HostBatch, sender
from flame_train.training.session import Session
from flame_train.training.step import State, micro, reduce, update
from flame_train.training.validation import HeldOut

from .step_time import StepWork

_LOG = logging.getLogger(__name__)
_DEVICE = "cuda"  # of the shape run
_DRAWN = 1  # step of a sampler: the others take what this one takes


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """Bytes on the device when they are most: while images and captions are encoded, and in training.

    `kernels` are those that the run will want compiled, `host` the bytes of weights that wait in host memory. `seconds`
    is the time of a step of the largest bucket.
    """

    encoding: int
    training: int
    kernels: KernelRequests
    seconds: float
    host: int = 0
    pools: int = 0
    """What the pools had to give, gaps between their blocks included; 0: they had no limit."""

    @property
    def peak(self) -> int:
        """Of the whole run. It does not check whether the cache is full: that needs the digests of all networks."""
        return max(self.encoding, self.training)


def predicted_memory(plan: Plan, gpu: Gpu, processes: int = 1, limit: int = 0, grows: bool = False) -> PredictedMemory:
    """Returns the memory that a run will take on a GPU, and the time of a step.

    Args:
        processes: how many train together, each on such a GPU; NCCL's own buffers do not count.
        limit: bytes that the pools give at most; 0: all there are.
        grows: whether the pools get more than `limit` where the run would end otherwise.

    Raises:
        EnvironmentFault: it cannot run there.
        MemoryError: the limit is too low.
    """
    with shape_run(gpu) as run:
        if grows:
            run.backend.begin_with_limit(limit)
        else:
            run.backend.limit_memory(limit)
        largest = _largest(plan.samples)
        host = encode_captions(plan)
        encode_images(plan)
        run.backend.empty_cache()
        encoding = run.peak_bytes
        run.backend.reset_peak()
        with deterministic(plan.config.train.deterministic):
            work, waiting = _train(plan, largest, processes, run)
        return PredictedMemory(
            encoding,
            run.peak_bytes,
            run.kernel_requests,
            work.seconds(gpu),
            max(host, waiting),
            run.backend.limit,
        )


@dataclass(frozen=True, slots=True)
class Alone:
    """One stage of a run by itself.

    Attributes:
        held: bytes that it holds from its beginning.
        peak: bytes at its peak, these included.
        seconds: of a step.
        copying: seconds of the copies between host and device that go on beside it.
        sampling: bytes that sampling works in with the network of a step, but for decoding.
    """

    held: int
    peak: int
    seconds: float = 0.0
    copying: float = 0.0
    sampling: int = 0

    @property
    def works(self) -> int:
        """Bytes at the peak beside what is held."""
        return self.peak - self.held

    def towards(self, other: Alone, of_held: float, of_copies: float) -> Alone:
        """Returns what lies between this stage and `other`: so much of the way in memory, and in copies and time."""

        def between(a: float, b: float, share: float) -> float:
            return a + (b - a) * share

        return Alone(
            int(between(self.held, other.held, of_held)),
            int(between(self.peak, other.peak, of_held)),
            between(self.seconds, other.seconds, of_copies),
            between(self.copying, other.copying, of_copies),
            other.sampling,
        )


def steps_alone(plans: Sequence[Plan], gpu: Gpu, processes: int = 1) -> list[Alone]:
    """Returns a step of each plan, run once, eagerly, and its sampling. The plans differ in checkpointing alone."""
    plan, stages = plans[0], list[Alone]()
    with shape_run(gpu) as run, deterministic(plan.config.train.deterministic):
        denoiser, attached, state = load_networks(plan, Session(_DEVICE, simulated_group(processes)))
        vae = _Undecoded(plan.checked.sample_model.vae.network, _DEVICE)
        samplers = _grid_samplers(plan, denoiser, attached, vae)
        held, host = run.live_bytes, _batch(plan, _largest(plan.samples))
        batch = Batch(host, get_backend(_DEVICE), state.dtype, telling=plan.config.log.images_every > 0)
        for each in plans:
            set_checkpointing(each, denoiser)
            run.backend.empty_cache()
            run.backend.reset_peak()
            work = _work_of(plan, run, lambda: micro(state, batch), lambda: update(state))
            stages.append(Alone(held, run.peak_bytes, *work.parts(gpu)))
        run.backend.empty_cache()
        run.backend.reset_peak()
        for sampler in samplers:
            _sample_grid(sampler, state)
        return [replace(alone, sampling=run.peak_bytes - held) for alone in stages]


def seconds_of_a_grid(plan: Plan, gpu: Gpu) -> float:
    """Returns the seconds of one sampler step of each image of a grid, decoding included."""
    with shape_run(gpu) as run, deterministic(True):
        denoiser, attached, _ = load_networks(plan, Session(_DEVICE))
        sampled, _ = _grid_samplers(plan, denoiser, attached)
        before = StepWork.of(run)
        if sampled is not None:
            sampled()
        return StepWork.of(run).since(before).seconds(gpu)


class _Undecoded(LoadedVae):
    """A decoder that takes nothing, and makes no image."""

    def decode(self, latents: Tensor) -> np.ndarray[Any, Any]:
        return np.zeros((1, 1, 1, 3), np.uint8)


def decoding_alone(plan: Plan, gpu: Gpu, processes: int = 1) -> Alone:
    """Runs decoding of the largest image of a grid; nothing where none is wanted."""
    if not plan.requests:
        return Alone(0, 0)
    c, model = plan.config.model, plan.checked.sample_model
    with shape_run(gpu) as run, deterministic(True), no_grad():
        vae = model.vae.load(c.vae_precision, _DEVICE, c.vae_tile)
        held = run.live_bytes
        largest = max(plan.requests, key=lambda each: math.prod(each.size) * each.frames)
        shape = model.vae.latent_shape(largest.size, largest.frames)
        vae.decode(tensor(np.zeros((1, *shape), np.float32), device=_DEVICE))
        return Alone(held, run.peak_bytes)


def encoding_alone(encode: Callable[[Plan], object], plan: Plan, gpu: Gpu, processes: int = 1) -> Alone:
    """Runs encoding of captions or images."""
    with shape_run(gpu) as run:
        encode(plan)
        return Alone(0, run.peak_bytes)


def _pixels(sample: Sample) -> tuple[int, tuple[int, ...]]:
    """Gives the key by which the sample with the largest batch is found, control images included."""
    placed = sample.placement
    each = placed.pixels + sum(control.pixels for control in sample.controls)
    return each * sample.set.batch_size, placed.shape


def _seen_pixels(reading: EncoderInput) -> int:
    return sum(image.view.placement.pixels for image in reading.images)


def _black(image: ViewedImage) -> np.ndarray[Any, Any]:
    return np.zeros((*image.view.placement.bucket, 3), np.uint8)


def encode_captions(plan: Plan) -> int:
    """Runs as `encode` does: two batches of captions, the first of which runs eagerly, and the second is captured.

    Returns the bytes of weights that wait in host memory.
    """
    encoding, backend = plan.encoding, get_backend(_DEVICE)
    if not encoding.text:
        return 0
    with no_grad():
        captions = load_encoders(encoding, _DEVICE)
        largest = max((*encoding.encoder_inputs(plan.everything), *plan.prompts), key=_seen_pixels)
        for _ in range(2):
            captions.start([captions.inputs(largest, _black)])()
    host = backend.host_bytes
    del captions
    backend.empty_cache()
    return host


def encode_images(plan: Plan) -> None:
    """Runs as `encode` does: two images or clips of the largest bucket, the first eagerly, the second captured."""
    encoding = plan.encoding
    with no_grad():
        vae = encoding.vae.load(encoding.vae_precision, _DEVICE, encoding.vae_tile)
        placed = (*plan.everything.encoded, *(image.view.placement for image in plan.shown))
        largest, encoder = max(placed, key=lambda p: (p.pixels, p.shape)), vae.encoder()
        black = np.zeros((*encoding.vae.frames_axis(largest.frames), *largest.bucket, 3), np.uint8)
        for _ in range(2):
            encoder.start([vae.inputs(black)])()


def _train(plan: Plan, largest: Sample, processes: int, run: ShapeRun) -> tuple[StepWork, int]:
    """Runs as `train_run`: a grid, two steps, a grid, a step. Returns a step's work and the bytes kept on the host."""
    denoiser, attached, state = load_networks(plan, Session(_DEVICE, simulated_group(processes)))
    host = _batch(plan, largest)
    backend = get_backend(_DEVICE)
    send = sender(backend, state.dtype)
    sent = [send(host), send(host)]  # one is trained on, one is ahead
    sampled, of_base = _grid_samplers(plan, denoiser, attached)
    for sampler in (of_base, sampled) if plan.config.sample.first else ():
        _sample_grid(sampler, state)
    batch = Batch(host, backend, state.dtype, telling=plan.config.log.images_every > 0)
    of_batch, *of_step = [
        capture(step, _DEVICE) for step in (lambda: micro(state, batch), lambda: reduce(state), lambda: update(state))
    ]
    for ahead in sent:
        batch.fill(ahead)
        work = _work_of(plan, run, of_batch, *of_step)
        backend.memory()  # as the log does at each step: it counts what graphs keep
    _validate(plan, state)
    _sample_grid(sampled, state)
    _work_of(plan, run, of_batch, *of_step)  # a grid that found no room made the graphs go
    return work, run.host_bytes


def _work_of(plan: Plan, run: ShapeRun, of_batch: Callable[[], None], *of_step: Callable[[], None]) -> StepWork:
    """Runs a step with one of its micro-batches; the work of one with all of them."""
    before = StepWork.of(run)
    of_batch()
    one = StepWork.of(run).since(before)
    for work in of_step:
        work()
    return StepWork.of(run).since(before).plus(one, plan.config.gradient.accumulation - 1)


def _grid_samplers(
    plan: Plan, denoiser: Denoiser, attached: Attached, vae: LoadedVae | None = None
) -> tuple[Callable[[], object] | None, Callable[[], object] | None]:
    """Makes what samples the grids of a run, in few steps; see `grid_samplers`."""

    def few(images: Sequence[Request]) -> tuple[Request, ...]:
        return tuple(replace(request, steps=min(_DRAWN, request.steps)) for request in images)

    drawn = replace(plan, requests=few(plan.requests), base_requests=few(plan.base_requests))
    own_vae = plan.model.vae

    def controls(images: Sequence[ViewedImage]) -> Example:
        return blank(images, own_vae)

    def captions(text: str, images: Sequence[ViewedImage]) -> Example:
        return plan.encoding.caption_blank(plan.text_rows)

    return grid_samplers(drawn, captions, controls, denoiser, attached, Session(_DEVICE), vae=vae)


def _validate(plan: Plan, state: State) -> None:
    """Runs two measurements of one image of the largest bucket that is held out, the second of them captured."""
    if not plan.held_out.rows or not plan.config.validation.repeats:
        return
    largest = _largest(plan.held_out)
    example = _example(plan, largest) | plan.preserved.unprompted(lambda _: _captions(plan))
    images = HeldOut.of([example], plan.preserved.paddings(plan.model.paddings))
    validator = make_validator(plan, state, images, Session(_DEVICE))
    for _ in range(2):
        with state.optimizer.averaged():
            validator.measure()


def _sample_grid(sampled: Callable[[], object] | None, state: State) -> None:
    if sampled is not None:
        with state.optimizer.averaged():
            sampled()


def _batch(plan: Plan, largest: Sample) -> HostBatch:
    """Makes a batch of the largest bucket and batch size, all zeros."""
    preserved, size = plan.preserved, largest.set.batch_size
    example = _example(plan, largest) | preserved.arrays(largest, FIRST, lambda _: _captions(plan))
    if BASE_IS_TARGET in example:
        example[BASE_IS_TARGET] = np.ones_like(example[BASE_IS_TARGET])
    return HostBatch(collate([example] * size, preserved.paddings(plan.model.paddings)), 0, np.arange(size), ())


def _largest(samples: Samples) -> Sample:
    """Finds the sample whose batch has the most pixels."""
    return max(samples.rows, key=_pixels)


def _example(plan: Plan, sample: Sample) -> Example:
    """Makes the arrays of a sample, all zeros."""
    shape = plan.model.vae.latent_shape(sample.placement.bucket, sample.placement.frames)
    latent = np.zeros(shape, np.float32)
    example = {"mean": latent, "logvar": latent} | _captions(plan) | plan.model.size_conditioning(sample.placement)
    example |= blank(sample.controls_beside(0), plan.model.vae)
    weights = plan.everything.loss_weight_shape(shape)
    return example if weights is None else example | {LOSS_WEIGHT: np.zeros(weights, np.float32)}


def _captions(plan: Plan) -> Example:
    return plan.encoding.caption_blank(plan.text_rows) | tokens_of(plan.encoding.running, "", frozenset())


def notice_memory(predicted: Callable[[], PredictedMemory], total: int) -> None:
    """Says so where more is predicted than there is: it may go well, for a prediction errs by some per cent.

    A prediction that fails is reported too, and does not stop the run.
    """
    try:
        peak = predicted().peak
    except Exception as e:
        _LOG.warning("the memory of this run could not be predicted: %s: %s", type(e).__name__, e)
        return
    if peak > total:
        _LOG.warning(
            "%.1f GiB are predicted and the GPU has %.1f: if memory runs out, try data.batch_size=1, "
            "gradient.checkpointing=full, model.quantize=fp8 or a lower data.resolution",
            peak / 2**30,
            total / 2**30,
        )
