"""CLIP's text encoders: CLIP-L (Radford et al. 2021), and OpenCLIP ViT-H and bigG, called CLIP-G.

Shape letters: B captions, N windows a caption, T token positions, E embedding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

import numpy as np

from flame_train.adapters.targets import layer_shapes
from flame_train.engine import Tensor, nn
from flame_train.engine import functional as F
from flame_train.settings import field
from flame_train.text_encoders.clip.network import ClipTextEncoder
from flame_train.text_encoders.clip.tokenizer import CHUNK, ClipTokenizer
from flame_train.text_encoders.encoder import EncoderKeys, TextEncoder

_ATTENTION: Final = ("*.self_attn.[qkv]_proj", "*.self_attn.out_proj")
_CAPTIONS = 32  # of one window, encoded at once: some 2500 tokens
_END: Final = 49407  # the end token

Ids = np.ndarray[Any, Any]


class ClipLKeys(EncoderKeys):
    name = "clip_l"

    clip_l: str = field("", "CLIP-L, where the checkpoint holds none; empty: its own", place=True)
    clip_l_dropout: float = field(0.0, "probability that CLIP-L is dropped, apart from captions", ge=0, le=1)


class ClipGKeys(EncoderKeys):
    name = "clip_g"

    clip_g: str = field("", "CLIP-G, where the checkpoint holds none; empty: its own", place=True)
    clip_g_dropout: float = field(0.0, "probability that CLIP-G is dropped, apart from captions", ge=0, le=1)


class ClipKeys(EncoderKeys):
    name = "clip"

    clip: str = field("", "the CLIP of SD 1.5 or 2.1, where the checkpoint holds none; empty: its own", place=True)
    clip_dropout: float = field(0.0, "probability that this CLIP is dropped, apart from captions", ge=0, le=1)
    clip_skip: int = field(
        1, "which layer's state of this CLIP is taken, from the end: models of anime are trained with 2", ge=1, le=12
    )


@dataclass(frozen=True, slots=True, eq=False)
class Clip(TextEncoder):
    """A CLIP. It makes the hidden states `states` and the pooled text `pooled`; an empty name: it does not.

    A caption is cut into `windows` of 75 tokens.
    """

    pad: ClassVar[int]
    presets = MappingProxyType(
        {
            "attention": _ATTENTION,
            "attention+mlp": (*_ATTENTION, "*.mlp.fc[12]"),
            "full": ("*.self_attn.*", "*.mlp.*", "*text_projection"),
        }
    )

    windows: int = 1
    states: str = ""
    pooled: str = ""
    base: Path | None = None

    @property
    def tokenizer(self) -> ClipTokenizer:
        """A diffusers folder's own vocabulary, else the published one."""
        folder = self.base / self.part.component.replace("text_encoder", "tokenizer") if self.base else None
        return ClipTokenizer(self.pad, folder if folder and (folder / "vocab.json").exists() else None)

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        network = self.part.network
        assert isinstance(network, ClipTextEncoder)
        arch = network.arch
        shapes = {self.states: (CHUNK * self.windows + 2, arch.width), self.pooled: (arch.projection or arch.width,)}
        return {name: shape for name, shape in shapes.items() if name}

    @property
    def limit(self) -> tuple[str, int]:
        return "data.max_tokens", self.windows * CHUNK

    @property
    def at_once(self) -> int:
        return max(1, _CAPTIONS // self.windows)

    def inputs(self, text: str) -> dict[str, np.ndarray[Any, Any]]:
        ids = np.ascontiguousarray(self.tokenizer.chunks(text, self.windows, self.windows).ids, np.int32)
        return {"ids": ids, "ends": end_positions(ids)}

    def encode(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert isinstance(network, ClipTextEncoder)
        states, pooled = encode_windows_on(network, inputs["ids"], inputs["ends"], unprojected=bool(self.pooled))
        outputs = {self.states: states}
        if self.pooled:
            assert pooled is not None
            outputs[self.pooled] = pooled
        return {name: outputs[name] for name in self.outputs}

    def adaptable(self) -> tuple[str, ...]:
        """Leaves out the last layer and the projection where they make the pooled text alone."""
        network = self.part.network
        assert isinstance(network, ClipTextEncoder)
        idle = () if self.pooled else (f"text_model.encoder.layers.{network.arch.layers - 1}.", "text_projection")
        return tuple(name for name in super(Clip, self).adaptable() if not name.startswith(idle))

    def overlong(self, text: str) -> bool:
        return self.tokenizer.chunks(text, self.windows, self.windows).truncated > 0

    @property
    def vocabulary(self) -> str:
        return hashlib.sha256(f"{self.tokenizer.fingerprint} {self.windows}".encode()).hexdigest()


class ClipL(Clip):
    key = "clip_l"
    pad = 49407


class ClipG(Clip):
    key = "clip_g"
    pad = 0


@dataclass(frozen=True, slots=True, eq=False)
class ClipAlone(Clip):
    """The CLIP of a model that has no other: it makes the state of its last layer but `skip` - 1, normalised."""

    key = "clip"
    pad = 49407

    skip: int = 1

    def encode(self, network: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert isinstance(network, ClipTextEncoder)
        B, N, T = inputs["ids"].shape
        return {self.states: _joined(network.normalised(inputs["ids"].reshape(B * N, T), self.skip - 1), N)}

    def adaptable(self) -> tuple[str, ...]:
        """Leaves out the layers that do not run."""
        network = self.part.network
        assert isinstance(network, ClipTextEncoder)
        count = network.arch.layers
        idle = tuple(f"text_model.encoder.layers.{layer}." for layer in range(count - self.skip + 1, count))
        return tuple(name for name in layer_shapes(network) if not name.startswith(idle))

    @property
    def vocabulary(self) -> str:
        return f"{super(ClipAlone, self).vocabulary} {self.skip}"


class ClipH(ClipAlone):
    pad = 0


def encode_windows_on(
    encoder: ClipTextEncoder, ids_BNT: Tensor, ends_BN: Tensor, unprojected: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns hidden states (B, 75 N + 2, E) and pooled text (B, E) of B captions in N windows each; device work alone.

    The hidden states are the last but one, not normalised. A caption of several windows keeps the first begin token and
    the last end token. Its pooled text is that of its first window, by the convention of sd-scripts, which most
    published LoRAs follow. An encoder without a text projection has no pooled text, or with `unprojected` its raw one.
    """
    B, N, T = ids_BNT.shape
    states, pooled = encoder(ids_BNT.reshape(B * N, T), ends_BN.reshape(B * N), unprojected)
    first = None if pooled is None else pooled.reshape(B, N, -1)[:, 0]
    return _joined(states, N), first


def end_positions(ids_BT: Ids) -> Ids:
    """Returns the position of each row's first end token: its words end there, and padding begins."""
    positions: Ids = np.argmax(ids_BT == _END, axis=-1).astype(np.int32)
    return positions


def _joined(states: Tensor, windows: int) -> Tensor:
    """Returns (B * N, T, E) -> (B, N (T - 2) + 2, E): windows in a row, no begin or end tokens between them."""
    T, E = states.shape[1:]
    if windows == 1:
        return states
    rows = states.reshape(-1, windows, T, E)
    B = rows.shape[0]
    words = rows[:, :, 1:-1].reshape(B, windows * (T - 2), E)
    return F.cat([rows[:, 0, :1], words, rows[:, -1, -1:]], dim=1)
