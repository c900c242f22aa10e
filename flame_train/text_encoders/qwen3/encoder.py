"""Qwen3 (arXiv 2505.09388) as a text encoder: hidden states of a chat message, after chosen layers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np

from flame_train.data.padding import Padding, Paddings
from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, bfloat16, int32
from flame_train.errors import ModelFileError
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.part import Part
from flame_train.settings import field
from flame_train.text_encoders.encoder import EncoderKeys, Opening, TextEncoder, TokenRow, tokenizer_places
from flame_train.text_encoders.qwen3.names import qwen3_part
from flame_train.text_encoders.qwen3.network import Qwen3
from flame_train.text_encoders.qwen3.tokenizer import QwenTokenizer, find_tokenizer

TOKENS = 8192  # of all captions that are encoded at once
_UNIT = 32  # tokens, of which the longest caption of a batch has a multiple
_PADDING_PLACE = 1  # the position of padding that the denoiser sees, as transformers 4.57 has it for Qwen3-VL


class Qwen3Keys(EncoderKeys):
    name = "qwen3"

    qwen3: str = field("", "Qwen3, where the checkpoint holds none; empty: its own", place=True)
    qwen3_tokens: Literal[128, 256, 512, 1024] = field(
        512,
        "caption length that Qwen3 is given, with what the model sees of the chat template",
        unit="tokens",
    )
    qwen3_dropout: float = field(0.0, "probability that Qwen3 is dropped, apart from captions", ge=0, le=1)

    @classmethod
    def part(cls, path: Path, component: str, files: FamilyFiles) -> Part:
        """From a file, its folder, a whole diffusers folder, or a checkpoint that holds it."""
        return qwen3_part(path, component, files)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """What stands before and after a caption in the message that Qwen3 reads."""

    before: str
    after: str

    def around(self, text: str) -> str:
        """Returns the whole message."""
        return self.before + text + self.after

    def row(self, tokenizer: QwenTokenizer, text: str, length: int) -> TokenRow:
        """Returns the message in `length` ids, cut at its end."""
        return tokenizer.row(self.around(text), length)

    def unseen(self, tokenizer: QwenTokenizer) -> int:
        """Returns how many tokens at the message's beginning the denoiser does not see.

        They do not count as its length.
        """
        return 0


@dataclass(frozen=True, slots=True)
class ClosedTemplate(ChatTemplate):
    """One whose beginning is read and not kept, and whose end stands behind a caption that was cut, too.

    `opening` stands between that beginning and the caption, and is kept. `blank` stands for an empty caption.
    """

    opening: str = ""
    blank: str = ""

    def row(self, tokenizer: QwenTokenizer, text: str, length: int) -> TokenRow:
        """Returns the message in `length` ids besides those of its beginning."""
        ids = tokenizer.encode(self.before + self.opening + (text or self.blank))
        return TokenRow.of(ids, length + self.unseen(tokenizer), tokenizer.pad, tokenizer.encode(self.after))

    def unseen(self, tokenizer: QwenTokenizer) -> int:
        return len(tokenizer.encode(self.before))


THINKING: Final = ChatTemplate("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
"""A user's message that Qwen3 is to think about: Z-Image's. Qwen3-VL, which does not think, has it too: FLUX.3's."""
WITHOUT_THINKING: Final = ChatTemplate(THINKING.before, THINKING.after + "<think>\n\n</think>\n\n")
"""A user's message with its thinking left empty: FLUX.2 klein's."""
DESCRIBING: Final = ClosedTemplate(
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n",
    THINKING.after,
)
"""A user's message behind Qwen-Image's instruction: Krea 2's. It has 34 tokens before a caption and 5 after it."""
EDITING: Final = ClosedTemplate(
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n",
    THINKING.after,
    blank=" ",
)
"""A user's message behind another instruction, of 64 tokens: Qwen-Image-Edit's."""
COMPREHENDING: Final = ClosedTemplate(
    "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n",
    THINKING.after,
    opening=THINKING.before,
    blank=" ",
)
"""Another such message: Qwen-Image 2.1's. Of what stands before a caption the denoiser sees the last 3 tokens."""


@dataclass(frozen=True, eq=False)
class Qwen3Encoder(TextEncoder):
    """Qwen3. It makes the hidden states `qwen3` (T, C) after the layers of `taps`, side by side.

    With `masked` they are kept without padding, for a denoiser that does not look at it. A batch then has
    `qwen3_rows` (B,), the number of each caption's tokens. With `compact` the cache has them in bf16,
    whatever they were computed in. Without `normalised` the last layer's states are taken before the final norm.

    With a `window` above 0 the denoiser looks at padding up to a multiple of so many tokens, which `qwen3_rows` counts.
    Tokens do not see padding, and all padding of a caption has one state.
    """

    key = "qwen3"
    quantizable = True

    template: ChatTemplate
    taps: tuple[int, ...]
    length: int
    masked: bool
    places: tuple[Path, ...] = ()
    compact: bool = False
    normalised: bool = True
    window: int = 0

    @classmethod
    def opened(
        cls, part: Part, opening: Opening, template: ChatTemplate, taps: tuple[int, ...], masked: bool, **others: Any
    ) -> Self:
        """Returns Qwen3 with its settings.

        Args:
            template: the message around a caption.
            taps: after which layers its states are taken.
            masked: whether the denoiser does not look at padding.
            others: further fields that a family chooses.
        """
        own = Qwen3Keys.of(opening.text)
        places = tokenizer_places(part, opening.base)
        return cls(part, own.qwen3_dropout, template, taps, own.qwen3_tokens, masked, places, **others)

    @cached_property
    def tokenizer(self) -> QwenTokenizer:
        """The `tokenizer.json` beside the encoder or checkpoint, or the published one. Raises ModelFileError."""
        rows = self._network.arch.vocabulary
        tokenizer = QwenTokenizer(find_tokenizer(self.places, "text_encoders.qwen3", rows))
        if tokenizer.rows > rows:
            raise ModelFileError(
                f"{tokenizer.path}: has {tokenizer.rows} tokens, more than the {rows} rows of the encoder's embedding; "
                "it is of another model, fetch the encoder's own"
            )
        return tokenizer

    @property
    def _network(self) -> Qwen3:
        assert isinstance(self.part.network, Qwen3)
        return self.part.network

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        return {"qwen3": (self.length, len(self.taps) * self._network.arch.width)}

    @property
    def paddings(self) -> Paddings:
        return {"qwen3": Padding(self.length, self.window or _UNIT, "qwen3_rows")} if self.masked else {}

    @property
    def limit(self) -> tuple[str, int]:
        return "text_encoders.qwen3_tokens", self.length

    @property
    def at_once(self) -> int:
        return max(1, TOKENS // self.length)

    def inputs(self, text: str) -> dict[str, np.ndarray[Any, Any]]:
        row = self.template.row(self.tokenizer, text, self.length)
        return {"ids": row.ids, "mask": row.mask}

    def rows(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> int:
        own = int(np.count_nonzero(inputs["mask"][self._unseen :]))
        return self.paddings["qwen3"].length(own) if self.window else own

    @cached_property
    def _unseen(self) -> int:
        return self.template.unseen(self.tokenizer)

    def kept_dtype(self, dtype: DType | str, precision: str) -> DType:
        return bfloat16 if self.compact else super().kept_dtype(dtype, precision)

    def encode(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert isinstance(network, Qwen3)
        # tokens do not see the padding after them: a mask is for the states of the padding
        mask = inputs["mask"] if self.window or not self.masked else None
        place = _PADDING_PLACE if self.window else None
        states = network(inputs["ids"], mask, self.taps, self.normalised, place)
        outputs = {"qwen3": F.cat([state[:, self._unseen :] for state in states], dim=-1)}
        if not self.masked:
            return outputs
        own = inputs["mask"][:, self._unseen :]
        if not self.window:
            return outputs | {"qwen3_rows": own.to(int32).sum(dim=-1)}
        begun = own[:, :: self.window].to(int32).sum(dim=-1)  # a window whose first place has a token
        return outputs | {"qwen3_rows": F.clamp(begun * self.window, max=self.length)}

    def overlong(self, text: str) -> bool:
        return self.template.row(self.tokenizer, text, self.length).truncated > 0

    @property
    def vocabulary(self) -> str:
        kind = f"{self.tokenizer.fingerprint} {self.length} {self.template} {self.taps}"
        kind += f" {self.window}" if self.window else ""
        return hashlib.sha256(kind.encode()).hexdigest()
