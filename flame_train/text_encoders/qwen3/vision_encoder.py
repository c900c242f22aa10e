"""Qwen3-VL as a text encoder that reads control images too: Qwen-Image 2.1's and Krea 2's.

The images stand before the caption in the message, each between tokens of its own. `Marks` says how a family has them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, TypeVar

import numpy as np
from PIL import Image

from flame_train.data.buckets import Size
from flame_train.data.samples import EncoderInput
from flame_train.data.views import ViewedImage
from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, int32
from flame_train.errors import ConfigError
from flame_train.networks.block_network import BlockNetwork
from flame_train.networks.files.part import Part
from flame_train.text_encoders.encoder import TextEncoder, TokenRow
from flame_train.text_encoders.qwen3.encoder import TOKENS, ClosedTemplate, Qwen3Encoder
from flame_train.text_encoders.qwen3.image_tokens import Grid, ImageTokens
from flame_train.text_encoders.qwen3.names import vision_part
from flame_train.text_encoders.qwen3.network import Qwen3
from flame_train.text_encoders.qwen3.tokenizer import QwenTokenizer
from flame_train.text_encoders.qwen3.vision import VisionTower

_A = TypeVar("_A")
_SIDE: Final = 32  # pixels of a token
_LEAST: Final = 256**2  # pixels to which Qwen3-VL's processor enlarges a smaller image
_BEGIN, _PLACE, _END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


@dataclass(frozen=True, slots=True)
class Marks:
    """How images stand in a message.

    Attributes:
        name: what stands before an image, with its number.
        between: what stands between one and the name of the next.
        kept: whether the denoiser sees the states in an image's places.
        most: pixels of an image, to which a larger one is scaled down; 0: it is read as the denoiser has it.
    """

    name: str
    between: str = ""
    kept: bool = False
    most: int = 0

    def size(self, own: Size) -> Size:
        """The height and width at which an image of this size is read, as the processor of Qwen3-VL rounds them."""
        if not self.most:
            return own
        scale = min(1.0, math.sqrt(self.most / math.prod(own)))
        near = [max(round(round(side * scale) / _SIDE) * _SIDE, _SIDE) for side in own]
        if math.prod(near) < _LEAST:
            enlarged = math.sqrt(_LEAST / math.prod(own))
            near = [math.ceil(side * enlarged / _SIDE) * _SIDE for side in own]
        return near[0], near[1]

    def places(self, own: Size) -> int:
        """Returns the tokens of an image of this size."""
        return math.prod(_grid(self.size(own)))


STATES_DROPPED: Final = Marks("<image{}>", " ")
"""Qwen-Image 2.1's: the denoiser has latents in an image's places, so the states there are dropped."""
STATES_KEPT: Final = Marks("Picture {}: ", kept=True, most=384**2)
"""Krea 2's, as ai-toolkit trains and ComfyUI's TextEncodeQwenImageEditPlus encodes: the states are part of the text."""


class Qwen3VL(BlockNetwork):
    """Both halves of Qwen3-VL, loaded."""

    def __init__(self, language: Qwen3, vision: VisionTower) -> None:
        self.language, self.vision = language, vision


@dataclass(frozen=True, slots=True)
class MessageWithImages:
    """The message of a family whose text encoder reads images."""

    template: ClosedTemplate
    marks: Marks
    tokenizer: QwenTokenizer

    def before(self, count: int) -> list[list[int]]:
        """Returns the tokens before each of so many images, behind the image before it."""
        names = [self.marks.name.format(i) + _BEGIN for i in range(1, count + 1)]
        texts = [f"{_END}{self.marks.between}{name}" for name in names]
        texts[:1] = [self.template.opening + name for name in names[:1]]
        return [self.tokenizer.encode(text) for text in texts]

    def tokens(self, text: str, length: int, places: Sequence[int]) -> TokenRow:
        """Returns the tokens of a caption behind images: one a place of an image, and the caption cut.

        Args:
            length: of what the denoiser sees of the message, to which it is cut or filled up.
            places: how many tokens stand for each image.

        Raises:
            ConfigError: the images leave no room for a caption.
        """
        (place,), end = self.tokenizer.encode(_PLACE), self.tokenizer.encode(self.template.after)
        begun = self.before(len(places))
        own = self.tokenizer.encode(_END + (text or self.template.blank))
        besides = len(end) + sum(map(len, begun)) + (sum(places) if self.marks.kept else 0)
        if length <= besides:
            raise ConfigError(
                f"text_encoders.qwen3_tokens: expected more than {besides}, which {len(places)} control images and the "
                f"template take, got {length}"
            )
        ids = self.tokenizer.encode(self.template.before)
        whole = len(ids) + length + (0 if self.marks.kept else sum(places))
        for tokens, count in zip(begun, places, strict=True):
            ids += [*tokens, *[place] * count]
        return TokenRow.of([*ids, *own], whole, self.tokenizer.pad, end)


@dataclass(frozen=True, eq=False)
class Qwen3VLEncoder(Qwen3Encoder):
    """Qwen3 that reads images where it has the `vision` half; the same encoder where it has not."""

    vision: Part | None = None
    marks: Marks = STATES_DROPPED

    @property
    def takes_images(self) -> bool:
        return self.vision is not None

    def with_images(self) -> TextEncoder:
        width = self._network.arch.width
        return self if self.vision else replace(self, vision=vision_part(self.part.path, width))

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.part, self.vision) if self.vision else (self.part,)

    def batch_size(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> int:
        """As without images: an image's tokens are among the ids."""
        return max(1, TOKENS // len(inputs["ids"]))

    @property
    def vocabulary(self) -> str:
        if not self.takes_images:
            return super().vocabulary
        batches = f"batches of {TOKENS} tokens"  # whose size decides the last bits
        return hashlib.sha256(f"{super().vocabulary} {self.marks} {batches}".encode()).hexdigest()

    def starts(self, count: int) -> tuple[int, ...]:
        """Gives how many tokens of a caption's message, its beginning left out, stand before each of so many images."""
        return tuple(accumulate(map(len, self._message.before(count))))

    @cached_property
    def _message(self) -> MessageWithImages:
        assert isinstance(self.template, ClosedTemplate)
        return MessageWithImages(self.template, self.marks, self.tokenizer)

    def read(
        self, reading: EncoderInput, pixels: Callable[[ViewedImage], np.ndarray[Any, Any]] = ViewedImage.pixels
    ) -> dict[str, np.ndarray[Any, Any]]:
        if not reading.images:
            return super().read(reading, pixels)
        own = self._tokens(reading)
        images = {f"image{i}": self._scaled(pixels(image)) for i, image in enumerate(reading.images, 1)}
        return {"ids": own.ids, "mask": own.mask, **images}

    def _tokens(self, reading: EncoderInput) -> TokenRow:
        places = [self.marks.places(image.view.placement.bucket) for image in reading.images]
        return self._message.tokens(reading.text, self.length, places)

    def _scaled(self, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns uint8 (H, W, 3) at the size at which it is read."""
        height, width = self.marks.size(pixels.shape[:2])
        if (height, width) == pixels.shape[:2]:
            return pixels
        return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))

    def cuts(self, reading: EncoderInput) -> bool:
        return self._tokens(reading).truncated > 0 if reading.images else super().cuts(reading)

    def rows_of(self, reading: EncoderInput) -> int:
        if not reading.images:
            return super().rows_of(reading)
        own = np.count_nonzero(self._tokens(reading).mask[self._unseen :])
        dropped = 0 if self.marks.kept else sum(self.marks.places(i.view.placement.bucket) for i in reading.images)
        return int(own) - dropped

    def rows(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> int:
        dropped = 0 if self.marks.kept else sum(math.prod(_grid(a.shape[:2])) for a in _images(inputs))
        return super().rows(inputs) - dropped

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
        images = _images(inputs)
        if not images:
            return super().encode(network.language, inputs)
        grids = tuple(_grid(x.shape[1:3]) for x in images)
        sizes = [rows * columns for rows, columns in grids]
        ahead = accumulate(sizes[:-1], initial=self._unseen)
        starts = [start + before for start, before in zip(self.starts(len(sizes)), ahead, strict=True)]
        tokens = ImageTokens(tuple(starts), grids, tuple(network.vision(x) for x in images))
        found = network.language(inputs["ids"], None, self.taps, self.normalised, None, tokens)
        rows = inputs["mask"][:, self._unseen :].to(int32).sum(dim=-1)
        if self.marks.kept:
            return {"qwen3": F.cat([state[:, self._unseen :] for state in found], dim=-1), "qwen3_rows": rows}
        states = F.cat([_text_of(state, self._unseen, tokens) for state in found], dim=-1)
        return {"qwen3": states, "qwen3_rows": rows - sum(sizes)}


def _grid(size: Sequence[int]) -> Grid:
    """Returns rows and columns of tokens of an image that is read at this height and width."""
    height, width = size
    return height // _SIDE, width // _SIDE


def _images(inputs: Mapping[str, _A]) -> list[_A]:
    count = sum(name.startswith("image") for name in inputs)
    return [inputs[f"image{i}"] for i in range(1, count + 1)]


def _text_of(state_BTC: Tensor, unseen: int, images: ImageTokens) -> Tensor:
    """Returns the states of the text alone, from the first that is kept on."""
    edges = [unseen, *(edge for span in images.spans for edge in span), state_BTC.shape[1]]
    return F.cat([state_BTC[:, a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)], dim=1)
