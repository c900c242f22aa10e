"""The memory that a run will take: the run itself, on shapes alone, for a GPU that is only described.

Encoding, training and sampling run the code that runs on the device (`engine/shape_run.py`). So the prediction
follows the program. A new family, adapter kind or optimizer needs no line here. Of the buckets the
largest is met: all captured steps share one memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flame_train.data.buckets import Size
from flame_train.data.choices import FIRST
from flame_train.data.padding import collate
from flame_train.data.samples import Sample, Samples
from flame_train.distributed.group import silent
from flame_train.engine import capture, no_grad
from flame_train.engine.backend import get_backend
from flame_train.engine.mode import deterministic
from flame_train.engine.shape_run import Gpu, KernelRequests, ShapeRun, shape_run
from flame_train.training.batch import LOSS_WEIGHT, TAUGHT, Batch, HostBatch, sender
from flame_train.training.model import Example
from flame_train.training.step import State, micro, reduce, update
from flame_train.training.stop import StopRequest
from flame_train.training.text_in_step import tokens_of
from flame_train.training.validate import HeldOut

from .grids import grid_drawer
from .plan import Plan
from .train import loaded, make_validator

_DEVICE = "cuda"  # of the shape run
_DRAWN = 1  # step of a sampler: the others take what this one takes


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """Bytes on the device when they are most: while images and captions are encoded, and in training.

    `kernels` are those that the run will want compiled, `host` the bytes of weights that wait in host memory.
    """

    encoding: int
    training: int
    kernels: KernelRequests
    host: int = 0

    @property
    def peak(self) -> int:
        """Of the whole run. It does not check whether the cache is full: that needs the digests of all networks."""
        return max(self.encoding, self.training)


def predicted_memory(plan: Plan, gpu: Gpu, processes: int = 1) -> PredictedMemory:
    """The memory that the plan's run needs on `gpu`, in each of so many processes but for NCCL's own buffers.

    Raises EnvironmentFault where it cannot run there.
    """
    with shape_run(gpu) as run:
        largest = _largest(plan.samples)
        host = _encode(plan, run)
        run.backend.empty_cache()
        encoding = run.peak_bytes
        run.backend.reset_peak()
        with deterministic(plan.config.train.deterministic):
            host = max(host, _train(plan, largest, processes, run))
        return PredictedMemory(encoding, run.peak_bytes, run.kernel_requests, host)


def _pixels(sample: Sample) -> tuple[int, Size]:
    """By which the sample with the largest batch is found."""
    bucket = sample.placement.bucket
    return math.prod(bucket) * sample.set.batch_size, bucket


def _encode(plan: Plan, run: ShapeRun) -> int:
    """As `encode` does: two batches of captions, then two of the bucket whose batches are largest.

    The first of each runs eagerly, the second is captured. Returns the bytes of weights that wait in host memory.
    """
    encoding, backend, host = plan.encoding, get_backend(_DEVICE), 0
    with no_grad():
        if encoding.text:
            captions = encoding.encoders(_DEVICE)
            for _ in range(2):
                captions.caption("")
            host = run.host_bytes
            del captions
            backend.empty_cache()
        vae, buckets = encoding.vae.load(encoding.vae_precision, _DEVICE), plan.everything.buckets
        largest, encoder = max(buckets, key=lambda b: (math.prod(b), b)), vae.encoder()
        for _ in range(2):
            encoder.start([vae.inputs(np.zeros((*largest, 3), np.uint8))])()
    return host


def _train(plan: Plan, largest: Sample, processes: int, run: ShapeRun) -> int:
    """As `train_run` does: a grid, two steps, the second of which is captured, and another grid.

    Returns the bytes of weights that wait in host memory.
    """
    denoiser, attached, state = loaded(plan, _DEVICE, group=silent(processes))
    host = _batch(plan, largest)
    backend = get_backend(_DEVICE)
    send = sender(backend, state.dtype)
    sent = [send(host), send(host)]  # one is trained on, one is ahead
    few = [replace(request, steps=min(_DRAWN, request.steps)) for request in plan.requests]
    drawn = grid_drawer(plan, few, lambda _: plan.encoding.caption_blank(), denoiser, attached, _DEVICE, StopRequest())
    _draw(drawn, state)
    batch = Batch(host, backend, state.dtype, telling=plan.config.log.images_every > 0)
    steps = [
        capture(step, _DEVICE) for step in (lambda: micro(state, batch), lambda: reduce(state), lambda: update(state))
    ]
    for ahead in sent:
        batch.fill(ahead)
        for step in steps:
            step()
        backend.memory()  # as the log does at each step: it counts what graphs keep
    _validate(plan, state)
    _draw(drawn, state)
    return run.host_bytes


def _validate(plan: Plan, state: State) -> None:
    """Two measurements of one image of the largest bucket that is held out, the second of them captured."""
    if not plan.held_out.rows or not plan.config.validation.repeats:
        return
    largest = _largest(plan.held_out)
    validator = make_validator(plan, state, HeldOut.of([_example(plan, largest)], plan.model.paddings), _DEVICE)
    for _ in range(2):
        with state.optimizer.averaged():
            validator.measure()


def _draw(drawn: Callable[[], object] | None, state: State) -> None:
    if drawn is not None:
        with state.optimizer.averaged():
            drawn()


def _batch(plan: Plan, largest: Sample) -> HostBatch:
    """A batch of the largest bucket and batch size, all zeros."""
    preserved, size = plan.preserved, largest.set.batch_size
    example = _example(plan, largest) | preserved.arrays(largest, FIRST, lambda _: _captions(plan))
    if TAUGHT in example:
        example[TAUGHT] = np.ones_like(example[TAUGHT])
    return HostBatch(collate([example] * size, preserved.paddings(plan.model.paddings)), 0, np.arange(size), ())


def _largest(samples: Samples) -> Sample:
    """The sample whose batch has the most pixels."""
    return max(samples.rows, key=_pixels)


def _example(plan: Plan, sample: Sample) -> Example:
    """The arrays of a sample, all zeros."""
    shape = plan.model.vae.latent_shape(sample.placement.bucket)
    latent = np.zeros(shape, np.float32)
    example = {"mean": latent, "logvar": latent} | _captions(plan) | plan.model.size_conditioning(sample.placement)
    weights = plan.everything.loss_weight_shape(shape)
    return example if weights is None else example | {LOSS_WEIGHT: np.zeros(weights, np.float32)}


def _captions(plan: Plan) -> Example:
    """The arrays of a caption in training."""
    return plan.encoding.caption_blank() | tokens_of(plan.encoding.running, "", frozenset())
