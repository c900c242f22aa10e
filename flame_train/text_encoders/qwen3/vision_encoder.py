"""A Qwen-VL as a text encoder that reads control images too: Qwen-Image 2.1's, Krea 2's and Qwen-Image-Edit's.

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
from flame_train.errors import ConfigError, counted
from flame_train.networks.block_network import BlockNetwork
from flame_train.networks.files.part import Part
from flame_train.text_encoders.encoder import TextEncoder, TokenRow
from flame_train.text_encoders.qwen3.encoder import TOKENS, ClosedTemplate, Qwen3Encoder
from flame_train.text_encoders.qwen3.image_tokens import Grid, ImageTokens
from flame_train.text_encoders.qwen3.names import vision_part
from flame_train.text_encoders.qwen3.network import Qwen3
from flame_train.text_encoders.qwen3.tokenizer import QwenTokenizer
from flame_train.text_encoders.qwen3.vision import VisionTower
from flame_train.text_encoders.qwen3.vision_2_5 import VisionTower25

_A = TypeVar("_A")
_NEAR: Final = 32  # pixels, of which the sides of an image of some area are multiples
_LEAST: Final = 256**2  # pixels to which Qwen3-VL's processor enlarges a smaller image
_BEGIN, _PLACE, _END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


def of_area(size: Size, area: int) -> Size:
    """Returns the sides of an image that is scaled, up or down, to `area` pixels, as Qwen-Image's pipelines round them.

    A side of 0 says that it is too narrow.
    """
    height, width = size
    wide = math.sqrt(area * width / height)
    return round(wide * height / width / _NEAR) * _NEAR, round(wide / _NEAR) * _NEAR


@dataclass(frozen=True, slots=True)
class Marks:
    """How images stand in a message.

    Attributes:
        name: what stands before an image, with its number.
        between: what stands between one and the name of the next.
        kept: whether the denoiser sees the states in an image's places.
        most: pixels of an image, to which a larger one is scaled down; 0: it is read as the denoiser has it.
        area: pixels to which every image is scaled, before it is read in the nearest whole tokens; 0: see `most`.
        side: pixels of a token.
    """

    name: str
    between: str = ""
    kept: bool = False
    most: int = 0
    area: int = 0
    side: int = 32

    def size(self, own: Size) -> Size:
        """The height and width at which an image of this size is read, as the model's processor rounds them."""
        if self.area:
            tall, wide = self._scaled(own)
            return round(tall / self.side) * self.side, round(wide / self.side) * self.side
        if not self.most:
            return own
        scale = min(1.0, math.sqrt(self.most / math.prod(own)))
        near = [max(round(round(side * scale) / self.side) * self.side, self.side) for side in own]
        if math.prod(near) < _LEAST:
            enlarged = math.sqrt(_LEAST / math.prod(own))
            near = [math.ceil(side * enlarged / self.side) * self.side for side in own]
        return near[0], near[1]

    def grid(self, read: Sequence[int]) -> Grid:
        """Returns rows and columns of tokens of an image that is read at this height and width."""
        height, width = read
        return height // self.side, width // self.side

    def places(self, own: Size) -> int:
        """Returns the tokens of an image of this size."""
        return math.prod(self.grid(self.size(own)))

    def scaled(self, pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns uint8 (H, W, 3) at the size at which it is read; of an `area`, by way of that, as the pipeline."""
        last = self.size(pixels.shape[:2]), Image.Resampling.BICUBIC
        steps = [(self._scaled(pixels.shape[:2]), Image.Resampling.LANCZOS), last] if self.area else [last]
        for (height, width), how in steps:
            if (height, width) != pixels.shape[:2]:
                pixels = np.array(Image.fromarray(pixels).resize((width, height), how))
        return pixels

    def _scaled(self, own: Size) -> Size:
        tall, wide = (max(side, _NEAR) for side in of_area(own, self.area))
        return tall, wide


STATES_DROPPED: Final = Marks("<image{}>", " ")
"""Qwen-Image 2.1's: the denoiser has latents in an image's places, so the states there are dropped."""
STATES_KEPT: Final = Marks("Picture {}: ", kept=True, most=384**2)
"""Krea 2's, as ai-toolkit trains and ComfyUI's TextEncodeQwenImageEditPlus encodes: the states are part of the text."""

STATES_KEPT_2_5: Final = Marks("Picture {}: ", kept=True, area=384**2, side=28)
"""Qwen-Image-Edit's since 2509, as diffusers' pipeline has them."""


class QwenVL(BlockNetwork):
    """Both halves of a Qwen-VL, loaded."""

    def __init__(self, language: Qwen3, vision: VisionTower | VisionTower25) -> None:
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
                f"text_encoders.qwen3_tokens: expected more than {besides}, which "
                f"{counted(len(places), 'control image')} and the template take, got {length}"
            )
        ids = self.tokenizer.encode(self.template.before)
        whole = len(ids) + length + (0 if self.marks.kept else sum(places))
        for tokens, count in zip(begun, places, strict=True):
            ids += [*tokens, *[place] * count]
        return TokenRow.of([*ids, *own], whole, self.tokenizer.pad, end)


@dataclass(frozen=True, eq=False)
class Qwen3VLEncoder(Qwen3Encoder):
    """A Qwen that reads images where it has the `vision` half; the same encoder where it has not."""

    vision: Part | None = None
    marks: Marks = STATES_DROPPED

    @property
    def takes_images(self) -> bool:
        return self.vision is not None

    def with_images(self) -> TextEncoder:
        return self if self.vision else replace(self, vision=vision_part(self.part.path, self._network.arch))

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
        images = {f"image{i}": self.marks.scaled(pixels(image)) for i, image in enumerate(reading.images, 1)}
        return {"ids": own.ids, "mask": own.mask, **images}

    def _tokens(self, reading: EncoderInput) -> TokenRow:
        places = [self.marks.places(image.view.placement.bucket) for image in reading.images]
        return self._message.tokens(reading.text, self.length, places)

    def cuts(self, reading: EncoderInput) -> bool:
        return self._tokens(reading).truncated > 0 if reading.images else super().cuts(reading)

    def rows_of(self, reading: EncoderInput) -> int:
        if not reading.images:
            return super().rows_of(reading)
        own = np.count_nonzero(self._tokens(reading).mask[self._unseen :])
        dropped = 0 if self.marks.kept else sum(self.marks.places(i.view.placement.bucket) for i in reading.images)
        return int(own) - dropped

    def rows(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> int:
        dropped = 0 if self.marks.kept else sum(math.prod(self.marks.grid(a.shape[:2])) for a in _images(inputs))
        return super().rows(inputs) - dropped

    def load(self, *, device: str, dtype: DType | str, precision: str, streamed: Collection[str] = ()) -> BlockNetwork:
        language = super().load(device=device, dtype=dtype, precision=precision, streamed=streamed)
        if self.vision is None:
            return language
        assert isinstance(language, Qwen3)
        return QwenVL(language, self.vision.load(device=device, dtype=self.dtype(dtype, precision)))

    def components(self, network: nn.Module) -> dict[str, nn.Module]:
        return super().components(network.language if isinstance(network, QwenVL) else network)

    def encode(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not isinstance(network, QwenVL):
            return super().encode(network, inputs)
        images = _images(inputs)
        if not images:
            return super().encode(network.language, inputs)
        grids = tuple(self.marks.grid(x.shape[1:3]) for x in images)
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


def _images(inputs: Mapping[str, _A]) -> list[_A]:
    count = sum(name.startswith("image") for name in inputs)
    return [inputs[f"image{i}"] for i in range(1, count + 1)]


def _text_of(state_BTC: Tensor, unseen: int, images: ImageTokens) -> Tensor:
    """Returns the states of the text alone, from the first that is kept on."""
    edges = [unseen, *(edge for span in images.spans for edge in span), state_BTC.shape[1]]
    return F.cat([state_BTC[:, a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)], dim=1)
