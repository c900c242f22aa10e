"""The interface of a text encoder: a caption becomes token ids of a fixed length, and these become the conditioning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from flame_train.adapters.targets import Presets, layer_shapes
from flame_train.data.cache import Shapes, UpTo
from flame_train.data.padding import Paddings
from flame_train.data.samples import EncoderInput
from flame_train.data.views import ViewedImage
from flame_train.engine import Tensor, nn
from flame_train.engine.dtype import DType, as_dtype
from flame_train.errors import ModelFileError
from flame_train.networks.block_network import BlockNetwork
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.part import Part
from flame_train.settings import Entry, Section


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A text as an encoder's input."""

    ids: np.ndarray[Any, Any]  # int32 (length,): tokens, then padding
    mask: np.ndarray[Any, Any]  # bool (length,): True where there is a token
    truncated: int  # how many tokens did not fit

    @classmethod
    def of(cls, ids: Sequence[int], length: int, pad: int, end: Sequence[int] = ()) -> Self:
        """Cuts `ids` so that `end` fits behind them, and pads. Raises ValueError for a length without room."""
        least = max(1, len(end))
        if length < least:
            raise ValueError(f"expected a length of at least {least}, got {length}")
        fitting = [*ids[: length - len(end)], *end]
        row = np.full(length, pad, np.int32)
        row[: len(fitting)] = fitting
        return cls(row, np.arange(length) < len(fitting), len(ids) + len(end) - len(fitting))


class EncoderKeys(Entry):
    """The keys that a text encoder adds to `[text_encoders]`. The key of its `name` names its file."""

    @classmethod
    def part(cls, path: Path, component: str, files: FamilyFiles) -> Part:
        """Returns the network in a separate file, for a family whose `files` call it `component`.

        Raises ModelFileError.
        """
        return files.parts(path, [component])[component]


class Opening(Protocol):
    """The settings with which a text encoder is opened."""

    @property
    def base(self) -> Path:
        """The checkpoint."""

    @property
    def text(self) -> Section:
        """The section of the text encoders."""


@dataclass(frozen=True, slots=True, eq=False)
class TextEncoder(ABC):
    """An opened text encoder.

    Attributes:
        part: its network, and where its weights are.
        dropout: the probability that it is dropped for a sample: its arrays are then zeros.
    """

    key: ClassVar[str]
    """The key under `[text_encoders]` that names its file."""
    quantizable: ClassVar[bool] = False
    """Whether `text_encoders.precision` may store its weights in 8 bits, as "fp8" or "int8"."""
    in_turn: ClassVar[bool] = False
    """Whether its blocks are read from the file whenever they run: then it runs in no step."""
    presets: ClassVar[Presets] = MappingProxyType({})
    """The globs that `text_encoders.targets` means by a preset; none for one that no LoRA file speaks of."""

    part: Part
    dropout: float

    @property
    @abstractmethod
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        """The arrays that it makes of a caption: their names and shapes, padding included."""

    def require_width(self, width: int) -> None:
        """Raises ModelFileError unless its first array has the width that the denoiser takes."""
        own = next(iter(self.outputs.values()))[-1]
        if own != width:
            raise ModelFileError(
                f"text_encoders.{self.key}: {self.part.path} makes states of {own} values, and the base model takes "
                f"{width}: it is the text encoder of another model; name this model's own"
            )

    @property
    def paddings(self) -> Paddings:
        """Of those of its arrays that are kept without padding: how they are filled up in a batch."""
        return {}

    @property
    def kept(self) -> Shapes:
        """The arrays of `outputs` as the cache keeps them."""
        return {
            name: (UpTo(shape[0]), *shape[1:]) if name in self.paddings else shape
            for name, shape in self.outputs.items()
        }

    def rows(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> int:
        """Returns how many rows of the arrays in `paddings` are the caption's own. `inputs` are of one caption."""
        raise NotImplementedError(f"{type(self).__name__} keeps the padding of all its arrays")

    def without_padding(
        self, inputs: Mapping[str, np.ndarray[Any, Any]], made: Mapping[str, np.ndarray[Any, Any]]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Says what is kept of the arrays `made` of a caption with these `inputs`."""
        if not self.paddings:
            return dict(made)
        rows = self.rows(inputs)
        return {name: array[:rows] if name in self.paddings else array for name, array in made.items()}

    @property
    @abstractmethod
    def limit(self) -> tuple[str, int]:
        """The config key that says how many tokens of a caption are kept, and how many that is."""

    @property
    @abstractmethod
    def at_once(self) -> int:
        """How many captions without images a GPU encodes at once: a few thousand tokens keep it busy."""

    def batch_size(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> int:
        """Returns how many captions with inputs of these shapes a GPU encodes at once."""
        return self.at_once

    @property
    def parts(self) -> tuple[Part, ...]:
        """All networks on which its arrays depend."""
        return (self.part,)

    @property
    def takes_images(self) -> bool:
        """Whether it reads control images beside a text."""
        return False

    def with_images(self) -> TextEncoder:
        """Returns the encoder that reads control images too, if there is one.

        Raises ModelFileError if its weights lack.
        """
        return self

    def read(
        self, reading: EncoderInput, pixels: Callable[[ViewedImage], np.ndarray[Any, Any]] = ViewedImage.pixels
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Says what `encode` takes of a text and its images, of which `pixels` gives uint8 (H, W, 3)."""
        return self.inputs(reading.text)

    def rows_of(self, reading: EncoderInput) -> int:
        """Returns `rows` of what is read, whose images are not opened."""
        return self.rows(self.inputs(reading.text))

    @abstractmethod
    def inputs(self, text: str) -> dict[str, np.ndarray[Any, Any]]:
        """Says what `encode` takes of a caption: its token ids, and what follows from them."""

    @abstractmethod
    def encode(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The arrays of `outputs` for a batch of captions: inputs (B, ...) to tensors (B, ...) in the network's dtype.

        It is device work alone, so that it can be captured. No caption's arrays depend on the others.
        """

    @abstractmethod
    def overlong(self, text: str) -> bool:
        """Says whether a caption has more tokens than are kept."""

    def cuts(self, reading: EncoderInput) -> bool:
        """Returns `overlong` of a text beside its images, which may take some of the room."""
        return self.overlong(reading.text)

    @property
    @abstractmethod
    def vocabulary(self) -> str:
        """A hash of the tokenizer and the length, on which the ids depend besides the caption."""

    def adaptable(self) -> tuple[str, ...]:
        """Returns the names of the layers that an adapter may sit on: all that its outputs depend on."""
        return tuple(layer_shapes(self.part.network))

    def components(self, network: nn.Module) -> dict[str, nn.Module]:
        """Returns its loaded network, or the parts of it, by the names that LoRA files have for them."""
        return {self.part.component: network}

    def tokens(self, text: str) -> dict[str, np.ndarray[Any, Any]]:
        """`inputs` of a caption by the names that they have in a batch, for an encoder that runs in the step."""
        return {f"{self.key}.{name}": array for name, array in self.inputs(text).items()}

    def load(self, *, device: str, dtype: DType | str, precision: str, streamed: Collection[str] = ()) -> BlockNetwork:
        """Returns the network with its weights; the blocks named in `streamed` wait in host memory.

        `precision` is `text_encoders.precision`, `dtype` that of training.
        """
        network: BlockNetwork = self.part.load(
            device=device, dtype=self.dtype(dtype, precision), storage=self._storage(precision), streamed=streamed
        )
        return network

    def dtype(self, dtype: DType | str, precision: str) -> DType:
        """Of its arrays, where training's is `dtype` and `text_encoders.precision` is `precision`."""
        return as_dtype(dtype if precision in ("auto", *nn.FORMATS) else precision)

    def kept_dtype(self, dtype: DType | str, precision: str) -> DType:
        """Of its arrays in the cache, where `dtype` would have them otherwise."""
        return self.dtype(dtype, precision)

    def _storage(self, precision: str) -> nn.Storage | None:
        if self.quantizable and precision in nn.FORMATS:
            return nn.Storage(precision)
        return None


def tokenizer_places(part: Part, base: Path) -> tuple[Path, Path]:
    """Says where an encoder's tokenizer is looked for: beside its own file, then beside the checkpoint."""
    return part.path if part.path != Path(part.component) else base, base


def too_long(encoders: Sequence[TextEncoder], read: Sequence[EncoderInput]) -> tuple[int, TextEncoder | None]:
    """Returns how many texts are longer than the encoder with the longest limit keeps, and that encoder."""
    if not encoders:
        return 0, None
    longest = max(encoders, key=lambda encoder: encoder.limit[1])
    most = longest.limit[1]
    return sum(not _surely_fits(reading, most) and longest.cuts(reading) for reading in read), longest


def _surely_fits(reading: EncoderInput, tokens: int) -> bool:
    """Says whether a text is so short that no tokenizer need be asked: ASCII makes at most a token a character."""
    return not reading.images and len(reading.text) < tokens and reading.text.isascii()
