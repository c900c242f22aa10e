"""Loaded text encoders, and the batches in which inputs go through a device: read and kept by threads meanwhile."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Final, Generic, TypeVar

import numpy as np

from flame_train.data.buckets import Size
from flame_train.data.samples import EncoderInput
from flame_train.data.views import ViewedImage
from flame_train.engine import nn
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import DType
from flame_train.models.common.model import Example
from flame_train.networks.fixed_batch import FixedBatches, HostArrays
from flame_train.run.check.adapted_layers import text_blocks
from flame_train.run.plan.encoding import Encoding
from flame_train.text_encoders.encoder import TextEncoder

_T = TypeVar("_T")


def load_encoders(encoding: Encoding, device: str) -> CaptionEncoders:
    """Loads the text encoders whose arrays are cached."""
    how = {"device": device, "dtype": encoding.precision, "precision": encoding.text_precision}
    networks = {
        encoder.part.component: encoder.load(**how, streamed=text_blocks(encoder.part.network, encoding.streamed))
        for encoder in encoding.text
    }
    dtypes = {encoder.key: encoder.dtype(encoding.precision, encoding.text_precision) for encoder in encoding.text}
    return CaptionEncoders(encoding.text, networks, dtypes, device)


class CaptionEncoders:
    """Loaded text encoders; `networks` are they or their parts, by the names that LoRA files have for them."""

    def __init__(
        self,
        encoders: Sequence[TextEncoder],
        networks: Mapping[str, nn.Module],
        dtypes: Mapping[str, DType],
        device: str,
    ) -> None:
        parts = [encoder.components(networks[encoder.part.component]) for encoder in encoders]
        self.networks = {name: network for components in parts for name, network in components.items()}
        self._encoders = tuple(encoders)
        self._batches = {e.key: _batches(e, networks[e.part.component], dtypes[e.key], device) for e in self._encoders}
        self._single = not get_backend(device).asynchronous
        self._at_once = max((encoder.at_once for encoder in encoders), default=1)

    def batches(self, captions: Mapping[_T, EncoderInput]) -> list[Sequence[_T]]:
        """Cuts the keys of captions into parts that are worth starting on together; images of one have equal sizes."""
        by_sizes = dict[tuple[Size, ...], list[_T]]()
        for key, caption in captions.items():
            by_sizes.setdefault(tuple(image.view.placement.bucket for image in caption.images), []).append(key)
        size = 1 if self._single else self._at_once
        return [part for keys in by_sizes.values() for part in cut(keys, size)]

    def inputs(
        self, reading: EncoderInput, pixels: Callable[[ViewedImage], np.ndarray[Any, Any]] = ViewedImage.pixels
    ) -> dict[str, HostArrays]:
        """Returns what `start` takes of a caption and its images: the inputs of each encoder, by its key."""
        return {encoder.key: encoder.read(reading, pixels) for encoder in self._encoders}

    def start(self, captions: Sequence[Mapping[str, HostArrays]]) -> Callable[[], list[Example]]:
        """Starts on captions; calling the result waits for the arrays of each, without padding that is not kept."""
        waits: list[list[Callable[[], list[Example]]]] = []
        for encoder in self._encoders:
            inputs, batches = [caption[encoder.key] for caption in captions], self._batches[encoder.key]
            waits.append([batches.start(part) for part in self._alike(encoder, inputs)])

        def wait() -> list[Example]:
            examples: list[Example] = [{} for _ in captions]
            for encoder, parts in zip(self._encoders, waits, strict=True):
                outputs = [example for part in parts for example in part()]
                for example, caption, arrays in zip(examples, captions, outputs, strict=True):
                    example |= encoder.without_padding(caption[encoder.key], arrays)
            return examples

        return wait

    def _alike(self, encoder: TextEncoder, inputs: Sequence[HostArrays]) -> Iterator[Sequence[HostArrays]]:
        """Cuts inputs into batches of equal shapes that the encoder takes at once."""
        for _, same in groupby(inputs, lambda arrays: [array.shape for array in arrays.values()]):
            run = list(same)
            yield from cut(run, 1 if self._single else encoder.batch_size(run[0]))

    def captions(self, read: Sequence[EncoderInput]) -> list[Example]:
        """Returns the conditioning arrays of captions."""
        return self.start([self.inputs(reading) for reading in read])()


def _batches(encoder: TextEncoder, network: nn.Module, dtype: DType, device: str) -> FixedBatches:
    results = {name: (shape, dtype) for name, shape in encoder.outputs.items()}
    return FixedBatches(
        partial(encoder.encode, network), lambda _: results, encoder.batch_size, device, not encoder.in_turn
    )


def cut(keys: Sequence[_T], size: int) -> list[Sequence[_T]]:
    """Cuts a sequence into parts of `size`, the last of which may be shorter."""
    return [keys[i : i + size] for i in range(0, len(keys), size)]


_Item = TypeVar("_Item")
_Ready = TypeVar("_Ready")
READERS: Final = min(8, os.cpu_count() or 1)
"""Threads that read, or write, at most."""
_AHEAD = 32  # captions or images, of at most 12 MiB each
_AHEAD_PIXELS = 1 << 26
_UNKEPT = 64  # results that wait to be written


def pixels_ahead(largest: int) -> int:
    """Returns how many images or clips are made ready before their turn, of which the largest has so many pixels."""
    return max(1, min(_AHEAD, _AHEAD_PIXELS // largest))


@dataclass(frozen=True, slots=True)
class _Started(Generic[_Item]):
    """A batch that the device works on."""

    items: Sequence[_Item]
    wait: Callable[[], list[Example]]


class Pipeline(Generic[_Item, _Ready]):
    """What is done with each item: made ready, computed in a batch, kept.

    Attributes:
        ready: reads an item, on a thread.
        start: starts a batch of such on the device; calling the result waits for the arrays of each.
        keep: writes an item's arrays: on a thread where the device works by itself, else in the order of the items.
        overlapped: whether the device does.
    """

    def __init__(
        self,
        ready: Callable[[_Item], _Ready],
        start: Callable[[Sequence[_Ready]], Callable[[], list[Example]]],
        keep: Callable[[_Item, Example], None],
        overlapped: bool,
    ) -> None:
        self._ready, self._start, self._keep, self._overlapped = ready, start, keep, overlapped
        self._unkept = deque[Future[None]]()

    def run(self, batches: Sequence[Sequence[_Item]], after: Callable[[int], None], ahead: int = _AHEAD) -> None:
        """Runs all batches in their order. After each, `after` gets the number of finished items. It may raise.

        So many items are made ready `ahead` of their turn, beside those of a batch.

        Whatever ends it, what the device has given by then is kept. Raises what one of the functions does.
        """
        with _threads() as readers, _threads() as self._writers:
            coming = self._read(batches, readers, ahead + max(map(len, batches), default=0))
            started: _Started[_Item] = _Started((), list)
            done = 0
            try:
                for batch in batches:
                    ready = self._taken(coming, len(batch), started)
                    following = _Started(batch, self._start(ready))
                    if self._overlapped:
                        started, following = following, started
                    done += self._finish(following)
                    after(done)
                after(done + self._finish(started))
            finally:
                while self._unkept:
                    self._unkept.popleft().result()

    def _taken(self, coming: Iterator[Future[_Ready]], count: int, started: _Started[_Item]) -> list[_Ready]:
        """Returns the next items, read. If one cannot be, what was started before is still kept."""
        try:
            return [next(coming).result() for _ in range(count)]
        except BaseException:
            self._finish(started)
            raise

    def _read(
        self, batches: Sequence[Sequence[_Item]], readers: ThreadPoolExecutor, ahead: int
    ) -> Iterator[Future[_Ready]]:
        """Yields the items of all batches as they are read, always so many ahead."""
        waiting = deque[Future[_Ready]]()
        for item in (item for batch in batches for item in batch):
            waiting.append(readers.submit(self._ready, item))
            if len(waiting) > ahead:
                yield waiting.popleft()
        yield from waiting

    def _finish(self, started: _Started[_Item]) -> int:
        """Keeps what a batch gave, once it has; how many items that were."""
        for item, example in zip(started.items, started.wait(), strict=True):
            if not self._overlapped:
                self._keep(item, example)
                continue
            if len(self._unkept) == _UNKEPT:
                self._unkept.popleft().result()
            self._unkept.append(self._writers.submit(self._keep, item, example))
        return len(started.items)


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Starts threads that end with the block; what they have not begun by then is left."""
    pool = ThreadPoolExecutor(READERS)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
