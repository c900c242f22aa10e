"""Qwen3 as Anima's text encoder: its last states, to which T5's token ids attend in a network of Anima's own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from flame_train.data.padding import Padding, Paddings
from flame_train.engine import Tensor, nn
from flame_train.text_encoders.anima.network import AnimaText
from flame_train.text_encoders.qwen3.encoder import ChatTemplate, Qwen3Encoder
from flame_train.text_encoders.qwen3.network import Qwen3
from flame_train.text_encoders.t5.tokenizer import T5Tokenizer, find_vocabulary

PLAIN: Final = ChatTemplate("", "")
"""A caption as it is."""
_T5_FOLDER: Final = "t5_tokenizer"


@dataclass(frozen=True, eq=False)
class AnimaEncoder(Qwen3Encoder):
    """It makes the text `anima` (T, C). Zeros stand behind a caption's own tokens; the cache has none of them."""

    @cached_property
    def t5(self) -> T5Tokenizer:
        """T5's tokenizer, from the folder of the checkpoint that has one, else the published. Raises ModelFileError."""
        beside = [(place if place.is_dir() else place.parent) / _T5_FOLDER for place in self.places]
        folders = [folder for folder in beside if folder.is_dir()]
        option = f"the folder {_T5_FOLDER} beside the checkpoint's transformer"
        return T5Tokenizer(find_vocabulary(folders, option, self._both.llm_adapter.arch.vocabulary))

    @property
    def _both(self) -> AnimaText:
        assert isinstance(self.part.network, AnimaText)
        return self.part.network

    @property
    def _network(self) -> Qwen3:
        return self._both.qwen3

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        return {"anima": (self._rows, self._both.llm_adapter.arch.target_dim)}

    @property
    def _rows(self) -> int:
        return max(self.length, self._both.llm_adapter.arch.least)

    @property
    def paddings(self) -> Paddings:
        return {"anima": Padding(self._rows, self._rows)}  # the denoiser attends to the zeros, so there are always all

    def inputs(self, text: str) -> dict[str, np.ndarray[Any, Any]]:
        t5 = self.t5.row(text, self.length)
        return {**super().inputs(text), "t5_ids": t5.ids, "t5_mask": t5.mask}

    def rows(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> int:
        return int(np.count_nonzero(inputs["t5_mask"]))

    def encode(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert isinstance(network, AnimaText)
        return {"anima": network(*(inputs[name] for name in ("ids", "mask", "t5_ids", "t5_mask")))}

    def components(self, network: nn.Module) -> dict[str, nn.Module]:
        assert isinstance(network, AnimaText)
        return {self.part.component: network.qwen3, "text_conditioner": network.llm_adapter}

    def overlong(self, text: str) -> bool:
        return super().overlong(text) or self.t5.row(text, self.length).truncated > 0

    @property
    def vocabulary(self) -> str:
        return hashlib.sha256(f"{super().vocabulary} {self.t5.fingerprint}".encode()).hexdigest()
