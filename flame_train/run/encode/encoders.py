"""Loaded text encoders: captions and control images to the arrays that are cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from flame_train.data.samples import EncoderInput
from flame_train.data.views import ViewedImage
from flame_train.engine import nn
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import DType
from flame_train.models.common.model import Example
from flame_train.networks.fixed_batch import FixedBatches, HostArrays
from flame_train.run.check.blocks import text_blocks
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
        self.networks = {name: network for found in parts for name, network in found.items()}
        self._encoders = tuple(encoders)
        self._batches = {e.key: _batches(e, networks[e.part.component], dtypes[e.key], device) for e in self._encoders}
        self._at_once = {e.key: e.at_once if get_backend(device).asynchronous else 1 for e in self._encoders}

    @property
    def at_once(self) -> int:
        """How many captions are worth starting on together."""
        return max(self._at_once.values(), default=1)

    def inputs(
        self, reading: EncoderInput, pixels: Callable[[ViewedImage], np.ndarray[Any, Any]] = ViewedImage.pixels
    ) -> dict[str, HostArrays]:
        """What `start` takes of a caption and its images: the inputs of each encoder, by its key."""
        return {encoder.key: encoder.read(reading, pixels) for encoder in self._encoders}

    def start(self, captions: Sequence[Mapping[str, HostArrays]]) -> Callable[[], list[Example]]:
        """Starts on captions; calling the result waits for the arrays of each, without padding that is
        not kept, in the encoders' dtype.
        """
        waits: list[list[Callable[[], list[Example]]]] = []
        for encoder in self._encoders:
            given = [caption[encoder.key] for caption in captions]
            batches, size = self._batches[encoder.key], self._at_once[encoder.key]
            waits.append([batches.start(part) for part in cut(given, size)])

        def wait() -> list[Example]:
            kept: list[Example] = [{} for _ in captions]
            for encoder, parts in zip(self._encoders, waits, strict=True):
                made = [example for part in parts for example in part()]
                for example, caption, arrays in zip(kept, captions, made, strict=True):
                    example |= encoder.without_padding(caption[encoder.key], arrays)
            return kept

        return wait

    def captions(self, read: Sequence[EncoderInput]) -> list[Example]:
        """The conditioning arrays of captions."""
        return self.start([self.inputs(reading) for reading in read])()


def _batches(encoder: TextEncoder, network: nn.Module, dtype: DType, device: str) -> FixedBatches:
    results = {name: (shape, dtype) for name, shape in encoder.outputs.items()}
    return FixedBatches(partial(encoder.encode, network), lambda _: results, lambda _: encoder.at_once, device)


def cut(keys: Sequence[_T], size: int) -> list[Sequence[_T]]:
    """Cuts a sequence into parts of `size`, the last of which may be shorter."""
    return [keys[i : i + size] for i in range(0, len(keys), size)]
