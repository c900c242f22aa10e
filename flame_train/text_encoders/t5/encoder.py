"""T5-XXL's encoder (arXiv 1910.10683), version 1.1."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, Self

import numpy as np

from flame_train.data.padding import Padding, Paddings
from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.engine.dtype import int32
from flame_train.errors import ModelFileError
from flame_train.io.hub import path_of_setting
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.identify import model_names
from flame_train.networks.files.part import Part
from flame_train.settings import field
from flame_train.text_encoders.encoder import EncoderKeys, Opening, TextEncoder, TokenRow, tokenizer_places
from flame_train.text_encoders.t5.names import t5_part
from flame_train.text_encoders.t5.network import T5Encoder
from flame_train.text_encoders.t5.tokenizer import T5Tokenizer, cleaned, find_vocabulary, named_vocabulary

_ATTENTION: Final = ("*.SelfAttention.[qkvo]",)
_MLP: Final = ("*.DenseReluDense.wi_[01]", "*.DenseReluDense.wo")
_TOKENS = 4096  # of all captions that are encoded at once
_UNIT = 32  # tokens, of which the longest caption of a batch has a multiple, where a model is told how many are seen


class T5Keys(EncoderKeys):
    name = "t5"

    t5: str = field(
        "", "T5-XXL (Wan: UMT5-XXL), where the checkpoint holds none; empty: its own", place=True, aka=("t5xxl",)
    )
    t5_vocabulary: str = field(
        "",
        "T5's spiece.model or tokenizer.json, or its folder; empty: one with the model, else T5 v1.1's own",
        place=True,
    )
    t5_tokens: Literal[0, 77, 154, 256, 512] = field(
        0,
        "caption length that T5 is given; 0: the family's own",
        unit="tokens",
        aka=("t5xxl_max_token_length", "max_sequence_length"),
    )
    t5_padding: Literal["seen", "zeros", "masked"] = field(
        "seen",
        "what the model sees of T5 behind a caption's end; seen: states of the padding, as published; zeros: zeros, so "
        "that the cache keeps a caption's own tokens alone; masked: zeros, and T5 does not attend to padding either",
    )
    t5_dropout: float = field(0.0, "probability that T5 is dropped, apart from captions", ge=0, le=1)

    @classmethod
    def part(cls, path: Path, component: str, files: FamilyFiles) -> Part:
        """From a file, its folder, a whole diffusers folder, or a checkpoint that holds it.

        Raises ModelFileError too for T5's in place of UMT5's, or the reverse.
        """
        part = t5_part(path, component)
        assert isinstance(part.network, T5Encoder)
        found, taken = part.network.arch.own_biases, "umt5-xxl" in files.alone
        if found != taken:
            names = {False: "T5 v1.1", True: "UMT5"}
            raise ModelFileError(
                f"{path}: expected the encoder of {names[taken]} for {model_names()[files.family]}, found that of "
                f"{names[found]}; name the other file in text_encoders.t5"
            )
        return part


@dataclass(frozen=True, eq=False)
class T5(TextEncoder):
    """T5. It makes the hidden states `t5` (T, C) of `length` tokens, padding included.

    With `padding` "seen" the denoiser attends to the states of the padding, which differ from caption to caption. With
    "zeros" and "masked" these are zeros, and the cache has none of them. With `behind` > 0 the denoiser looks at that
    many tokens of the padding. A batch then has `t5_rows` (B,), the number of each caption's tokens with these.
    """

    key = "t5"
    quantizable = True
    presets = MappingProxyType(
        {"attention": _ATTENTION, "attention+mlp": (*_ATTENTION, *_MLP), "full": (*_ATTENTION, *_MLP)}
    )

    length: int = 512
    places: tuple[Path, ...] = ()
    vocabulary_file: str = ""
    padding: str = "seen"
    behind: int = 0
    cleans: bool = False

    @classmethod
    def opened(
        cls, part: Part, opening: Opening, usual_length: int, behind: int = 0, padding: str = "", cleans: bool = False
    ) -> Self:
        """Returns T5 with its settings.

        Args:
            usual_length: a caption's tokens, where the settings say nothing.
            behind: how many tokens of padding the denoiser looks at; above 0 it is told, and T5 looks at none.
            padding: what else the denoiser sees of it, whatever the settings say; empty: what they say.
            cleans: whether captions are cleaned first.
        """
        own = T5Keys.of(opening.text)
        return cls(
            part,
            own.t5_dropout,
            own.t5_tokens or usual_length,
            tokenizer_places(part, opening.base),
            own.t5_vocabulary,
            "masked" if behind else padding or own.t5_padding,
            behind,
            cleans,
        )

    @cached_property
    def tokenizer(self) -> T5Tokenizer:
        """The config's vocabulary, or one beside the encoder or checkpoint, or T5 v1.1's. Raises ModelFileError."""
        option = "text_encoders.t5_vocabulary of a config, --t5-vocabulary of sample"
        network = self.part.network
        assert isinstance(network, T5Encoder)
        rows = network.arch.vocabulary
        if self.vocabulary_file:
            return T5Tokenizer(named_vocabulary(path_of_setting(self.vocabulary_file), option, rows))
        return T5Tokenizer(find_vocabulary(self.places, option, rows))

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        network = self.part.network
        assert isinstance(network, T5Encoder)
        return {"t5": (self.length, network.arch.width)}

    @property
    def paddings(self) -> Paddings:
        if self.behind:
            return {"t5": Padding(self.length, _UNIT, "t5_rows")}
        return {} if self.padding == "seen" else {"t5": Padding(self.length, self.length)}

    @property
    def limit(self) -> tuple[str, int]:
        return "text_encoders.t5_tokens", self.length

    @property
    def at_once(self) -> int:
        return max(1, _TOKENS // self.length)

    def inputs(self, text: str) -> dict[str, np.ndarray[Any, Any]]:
        row = self._row(text)
        ids = np.ascontiguousarray(row.ids, np.int32)
        return {"ids": ids} if self.padding == "seen" else {"ids": ids, "mask": row.mask}

    def rows(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> int:
        return min(self.length, int(np.count_nonzero(inputs["mask"])) + self.behind)

    def encode(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert isinstance(network, T5Encoder)
        if self.padding == "seen":
            return {"t5": network(inputs["ids"])}
        states = network(inputs["ids"], inputs["mask"] if self.padding == "masked" else None)
        mask = inputs["mask"]
        if self.behind:
            mask = F.pad(mask[:, : self.length - self.behind], (self.behind, 0), value=True)
        outputs = {"t5": states.masked_fill(F.logical_not(mask).unsqueeze(-1), 0.0)}
        return outputs | ({"t5_rows": mask.to(int32).sum(dim=-1)} if self.behind else {})

    def overlong(self, text: str) -> bool:
        return self._row(text).truncated > 0

    def _row(self, text: str) -> TokenRow:
        return self.tokenizer.row(cleaned(text) if self.cleans else text, self.length)

    @property
    def vocabulary(self) -> str:
        padding = "" if self.padding == "seen" else f" {self.padding}" + (f" {self.behind}" if self.behind else "")
        padding += " cleaned" if self.cleans else ""
        return hashlib.sha256(f"{self.tokenizer.fingerprint} {self.length}{padding}".encode()).hexdigest()
