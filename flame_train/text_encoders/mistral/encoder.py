"""Mistral Small 3 as a text encoder: hidden states of a message, after three of its layers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np

from flame_train.data.padding import Padding, Paddings
from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, int32
from flame_train.networks.block_network import BlockNetwork
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.part import Part
from flame_train.settings import field
from flame_train.text_encoders.encoder import EncoderKeys, Opening, TextEncoder, TokenRow, tokenizer_places
from flame_train.text_encoders.mistral.names import mistral_part
from flame_train.text_encoders.mistral.network import TAPS, Mistral
from flame_train.text_encoders.mistral.tekken_file import find_tekken
from flame_train.text_encoders.mistral.tokenizer import TekkenTokenizer

_AT_ONCE: Final = 32768  # tokens of all captions for which the layers are read once
_UNIT: Final = 32  # rows, of which the longest caption of a batch has a multiple
_BEFORE: Final = (
    "<s>[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured responses focusing on "
    "object relationships, object\nattribution and actions without speculation.[/SYSTEM_PROMPT][INST]"
)
_AFTER: Final = "[/INST]"


class MistralKeys(EncoderKeys):
    name = "mistral"

    mistral: str = field("", "Mistral Small 3, where the checkpoint holds none; empty: its own", place=True)
    mistral_tokens: Literal[128, 256, 512, 1024] = field(
        512, "caption length that Mistral is given, with 33 of the message around it", unit="tokens"
    )
    mistral_dropout: float = field(0.0, "probability that Mistral is dropped, apart from captions", ge=0, le=1)

    @classmethod
    def part(cls, path: Path, component: str, files: FamilyFiles) -> Part:
        """From a file, its folder, a whole diffusers folder, or a checkpoint that holds it."""
        return mistral_part(path, component)


@dataclass(frozen=True, eq=False)
class MistralEncoder(TextEncoder):
    """Mistral Small. It makes the hidden states `mistral` (1 + T, C) of a caption and, behind them, of padding.

    The denoiser looks at `length` rows, of which padding comes first, so padding's state is kept with each caption. A
    batch has `mistral_rows` (B,), the number of each caption's tokens with that one.
    """

    key = "mistral"
    in_turn = True

    length: int
    places: tuple[Path, ...] = ()

    @classmethod
    def opened(cls, part: Part, opening: Opening) -> Self:
        """Returns Mistral with its settings."""
        own = MistralKeys.of(opening.text)
        return cls(part, own.mistral_dropout, own.mistral_tokens, tokenizer_places(part, opening.base))

    @cached_property
    def tokenizer(self) -> TekkenTokenizer:
        """The one that comes with the encoder, or the published one. Raises ModelFileError."""
        return find_tekken(self.part.path, self.places, self._network.arch.vocabulary)

    @property
    def _network(self) -> Mistral:
        assert isinstance(self.part.network, Mistral)
        return self.part.network

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        return {"mistral": (self.length + 1, len(TAPS) * self._network.arch.width)}

    @property
    def paddings(self) -> Paddings:
        return {"mistral": Padding(self.length + 1, _UNIT, "mistral_rows")}

    @property
    def limit(self) -> tuple[str, int]:
        return "text_encoders.mistral_tokens", self.length

    @property
    def at_once(self) -> int:
        return max(1, _AT_ONCE // self.length)

    def _row(self, text: str) -> TokenRow:
        message = _BEFORE + text.replace("[IMG]", "") + _AFTER
        return TokenRow.of(self.tokenizer.encode(message), self.length, self.tokenizer.pad)

    def inputs(self, text: str) -> dict[str, np.ndarray[Any, Any]]:
        """Returns ids and mask of the caption's tokens, and behind them of at least one token of padding."""
        row = self._row(text)
        return {"ids": np.append(row.ids, row.ids.dtype.type(self.tokenizer.pad)), "mask": np.append(row.mask, False)}

    def rows(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> int:
        return int(np.count_nonzero(inputs["mask"])) + 1

    def load(self, *, device: str, dtype: DType | str, precision: str, streamed: Collection[str] = ()) -> BlockNetwork:
        """Returns the network, whose layers are read from the file one by one whenever captions go through them."""
        network: BlockNetwork = self.part.load_in_turn(device=device, dtype=self.dtype(dtype, precision))
        return network

    def encode(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert isinstance(network, Mistral)
        own = inputs["mask"].to(int32).sum(dim=-1)
        return {"mistral": network(inputs["ids"], inputs["mask"]), "mistral_rows": own + 1}

    def overlong(self, text: str) -> bool:
        return self._row(text).truncated > 0

    @property
    def vocabulary(self) -> str:
        kind = f"{self.tokenizer.fingerprint} {self.length} {_BEFORE} {_AFTER} {TAPS}"
        return hashlib.sha256(kind.encode()).hexdigest()


def behind_padding(states_BTC: Tensor, rows_B: Tensor, length: int) -> Tensor:
    """Returns states (B, length, C) as FLUX.2 dev sees them: the caption's at the end, those of padding before them.

    Args:
        states_BTC: of a caption's tokens, and the next row of padding, as a batch has them.
        rows_B: how many these are.
    """
    B, T, C = states_BTC.shape
    xp = states_BTC.backend.xp
    places_1L, firsts_B1 = (
        Tensor(xp.arange(length, dtype=np.int32)[None]),
        Tensor(xp.arange(B, dtype=np.int32)[:, None]),
    )
    own_B1 = rows_B.reshape(B, 1) - 1
    before_BL = places_1L - (length - own_B1)  # below 0 for padding
    taken_BL = F.where(before_BL < 0, own_B1, before_BL)
    return F.embedding(firsts_B1 * T + taken_BL, states_BTC.reshape(B * T, C))
