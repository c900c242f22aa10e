"""Qwen3-VL as a text encoder that reads control images too: Qwen-Image 2.1's.

The images stand before the caption in the message, each between tokens of its own. The denoiser has latents in their
places, so the states there are dropped, and those of the text are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import numpy as np

from flame_train.data.reading import Reading
from flame_train.data.tokenizers.qwen import QwenTokenizer
from flame_train.data.views import ViewedImage
from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, int32
from flame_train.models.common.blocks import BlockNetwork
from flame_train.models.common.files.part import Part
from flame_train.models.common.text.loading_qwen3 import vision_part
from flame_train.models.common.text.qwen3 import Qwen3
from flame_train.models.common.text.qwen3_vision import VisionTower
from flame_train.models.common.text.seen import Seen

from .encoder import TextEncoder
from .qwen3 import ClosedTemplate, Qwen3Encoder

_SIDE: Final = 32  # pixels of a token
_BEGIN, _PLACE, _END = "<image{}><|vision_start|>", "<|image_pad|>", "<|vision_end|>"


class Qwen3VL(BlockNetwork):
    """Both halves of Qwen3-VL, loaded."""

    def __init__(self, language: Qwen3, vision: VisionTower) -> None:
        self.language, self.vision = language, vision


@dataclass(frozen=True, slots=True)
class Message:
    """The tokens of a message with images.

    Attributes:
        ids: all of them, int32; one a place of an image.
        mask: where there is a token, bool.
        truncated: how many of the caption's did not fit.
    """

    ids: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any]
    truncated: int


def before_images(template: ClosedTemplate, tokenizer: QwenTokenizer, count: int) -> list[list[int]]:
    """The tokens before each of some images, behind the image before it."""
    texts = [template.opening + _BEGIN.format(1), *(f"{_END} {_BEGIN.format(i)}" for i in range(2, count + 1))]
    return [tokenizer.encode(text) for text in texts[:count]]


def message(
    template: ClosedTemplate, tokenizer: QwenTokenizer, text: str, length: int, places: Sequence[int]
) -> Message:
    """A caption behind images.

    Args:
        template: the message.
        tokenizer: Qwen's.
        text: the caption.
        length: of its tokens and the template's that the denoiser sees, to which they are cut or filled up.
        places: how many tokens stand for each image.

    Returns:
        The message's tokens.
    """
    (place,), end = tokenizer.encode(_PLACE), tokenizer.encode(template.after)
    begun = before_images(template, tokenizer, len(places))
    own = tokenizer.encode(_END + (text or template.blank))
    room = max(length - len(end) - sum(map(len, begun)), 0)
    ids = tokenizer.encode(template.before)
    whole = len(ids) + length + sum(places)
    for tokens, count in zip(begun, places, strict=True):
        ids += [*tokens, *[place] * count]
    ids += [*own[:room], *end]
    filled = np.full(whole, tokenizer.pad, np.int32)
    filled[: len(ids)] = ids
    return Message(filled, np.arange(whole) < len(ids), max(len(own) - room, 0))


@dataclass(frozen=True, eq=False)
class Qwen3VLEncoder(Qwen3Encoder):
    """Qwen3 that reads images where it has the `vision` half; the same encoder where it has not."""

    vision: Part | None = None

    @property
    def looking(self) -> bool:
        return self.vision is not None

    def with_images(self) -> TextEncoder:
        width = self._network.arch.width
        return self if self.vision else replace(self, vision=vision_part(self.part.path, width))

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.part, self.vision) if self.vision else (self.part,)

    @property
    def at_once(self) -> int:
        return 1 if self.looking else super().at_once

    @property
    def vocabulary(self) -> str:
        of_texts = super().vocabulary
        return hashlib.sha256(f"{of_texts} images".encode()).hexdigest() if self.looking else of_texts

    def starts(self, count: int) -> tuple[int, ...]:
        """How many of a caption's states stand before each of so many images."""
        return tuple(accumulate(map(len, before_images(self._closed, self.tokenizer, count))))

    @property
    def _closed(self) -> ClosedTemplate:
        assert isinstance(self.template, ClosedTemplate)
        return self.template

    def read(
        self, reading: Reading, pixels: Callable[[ViewedImage], np.ndarray[Any, Any]] = ViewedImage.pixels
    ) -> dict[str, np.ndarray[Any, Any]]:
        if not reading.images:
            return super().read(reading, pixels)
        images = {f"image{i}": pixels(image) for i, image in enumerate(reading.images, 1)}
        places = [image.shape[0] // _SIDE * (image.shape[1] // _SIDE) for image in images.values()]
        own = message(self._closed, self.tokenizer, reading.text, self.length, places)
        return {"ids": own.ids, "mask": own.mask, **images}

    def rows_of(self, reading: Reading) -> int:
        if not reading.images:
            return super().rows_of(reading)
        own = message(self._closed, self.tokenizer, reading.text, self.length, [0] * len(reading.images))
        return int(np.count_nonzero(own.mask[self._unseen :]))

    def rows(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> int:
        places = sum(a.shape[0] // _SIDE * (a.shape[1] // _SIDE) for n, a in inputs.items() if n.startswith("image"))
        return super().rows(inputs) - places

    def load(self, *, device: str, dtype: DType | str, precision: str, streamed: Collection[str] = ()) -> BlockNetwork:
        language = super().load(device=device, dtype=dtype, precision=precision, streamed=streamed)
        if self.vision is None:
            return language
        assert isinstance(language, Qwen3)
        return Qwen3VL(language, self.vision.load(device=device, dtype=self.dtype(dtype, precision)))

    def components(self, network: nn.Module) -> dict[str, nn.Module]:
        return super().components(network.language if isinstance(network, Qwen3VL) else network)

    def encode(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not isinstance(network, Qwen3VL):
            return super().encode(network, inputs)
        images = [inputs[name] for name in sorted(n for n in inputs if n.startswith("image"))]
        if not images:
            return super().encode(network.language, inputs)
        grids = tuple((x.shape[1] // _SIDE, x.shape[2] // _SIDE) for x in images)
        sizes = [rows * columns for rows, columns in grids]
        ahead = [sum(sizes[:i]) for i in range(len(sizes))]
        starts = [self._unseen + s + n for s, n in zip(self.starts(len(sizes)), ahead, strict=True)]
        seen = Seen(tuple(starts), grids, tuple(network.vision(x) for x in images))
        found = network.language(inputs["ids"], None, self.taps, self.normalised, None, seen)
        states = F.cat([_text_of(state, self._unseen, seen) for state in found], dim=-1)
        rows = inputs["mask"][:, self._unseen :].to(int32).sum(dim=-1) - sum(sizes)
        return {"qwen3": states, "qwen3_rows": rows}


def _text_of(state_BTC: Tensor, unseen: int, seen: Seen) -> Tensor:
    """The states of the text alone, from the first that is kept on."""
    edges = [unseen, *(edge for span in seen.spans for edge in span), state_BTC.shape[1]]
    return F.cat([state_BTC[:, a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)], dim=1)
