"""The names of Mistral Small as a text encoder: those of transformers, whatever a file puts before them.

Stand-alone files of ComfyUI have `model.` and 30 layers, its checkpoints `text_encoders.mistral3_24b.transformer.`.
Folders have `language_model.model.` or `model.language_model.` and all 40. What stands behind the layers that are used
plays no part, nor what sees images. What ComfyUI's files have as vocabulary is read by `tekken_file.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from flame_train.engine import nn
from flame_train.io.keymap import KeyMap, Op, Shape, scaled_fp8_rules, table
from flame_train.io.resolve import Component, Layout
from flame_train.networks.files.part import Part
from flame_train.networks.files.stated import Stated
from flame_train.text_encoders.mistral.network import TAPS, Mistral, MistralArch
from flame_train.text_encoders.text_network import TextNetwork

COMPONENT: Final = "text_encoder_mistral"
_SIGN: Final = "layers.0.self_attn.q_proj.weight"
_LAYER: Final = (
    *(f"self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")),
    *(f"{part}.weight" for part in ("input_layernorm", "post_attention_layernorm")),
)
_NAMES: Final = ("embed_tokens.weight", *(f"layers.{{i}}.{name}" for name in _LAYER))
_LAYERS_BEHIND: Final = "|".join(f"{number}" for number in range(TAPS[-1], 100))
_EXTRAS: Final = re.compile(rf"scaled_fp8|norm\.weight|.*\.scale_input|layers\.({_LAYERS_BEHIND})\..*")
ELSEWHERE: Final = re.compile(
    r"text_encoder/(model\.)?(vision_tower|multi_modal_projector)\..*|text_encoder/(language_model\.)?lm_head\.weight"
    r"|text_encoders\.mistral3_24b\.(?!transformer\.model\.).*|text_encoders\.tekken_model"
)
"""What lies beside it in a checkpoint or folder, and plays no part."""


def mistral_table(names: Collection[str] = ()) -> KeyMap:
    """Returns the table to native names, which are the same; those of a file's `names` with a factor are scaled."""
    return KeyMap(scaled_fp8_rules(names, table([(name, name, Op.COPY) for name in _NAMES])))


def component(name: str, prefixes: tuple[str, ...]) -> Component:
    """Returns the encoder as a part of a model, below one of `prefixes`; ("",) if the file holds the encoder only."""
    return Component(name, prefixes, (Layout("transformers", "layers.0.", mistral_table),), _EXTRAS)


def in_checkpoints() -> Component:
    """Returns the encoder as a part of a checkpoint or of a diffusers folder."""
    folder = "text_encoder/language_model.model.", "text_encoder/model.language_model."
    return component(COMPONENT, ("text_encoders.mistral3_24b.transformer.model.", *folder))


def prefix_of(names: Iterable[str]) -> str | None:
    """Says what stands before the encoder's names in a file, maybe ""; None if the file holds no such encoder."""
    found = tuple(names)
    if any(name.endswith(("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.q_proj.bias")) for name in found):
        return None
    return next((n.removesuffix(_SIGN) for n in found if n.endswith(f".{_SIGN}") or n == _SIGN), None)


def mistral_part(path: str | Path, name: str = "") -> Part:
    """Returns the encoder in a file or folder. Raises ModelFileError: there is none, or it is not whole."""

    def build(native: Mapping[str, Shape], stated: Stated) -> nn.Module:
        return Mistral(MistralArch.from_shapes(native, stated))

    example = "mistral_3_small_flux2_bf16.safetensors"
    return TextNetwork("Mistral Small", example, prefix_of, component, build).part(path, name)
