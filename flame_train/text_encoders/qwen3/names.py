"""The names of Qwen3 as a text encoder: those of transformers below `model.`, whatever a file puts before them.

And those of Qwen-VL's half for images: of transformers below `model.visual.`, of ComfyUI below `visual.`

Stand-alone files have `model.`, which Qwen3-VL calls `model.language_model.`. Full checkpoints have
`text_encoders.qwen3_4b.transformer.model.`, diffusers folders `text_encoder/model.`. What predicts the next token
from the last state, `lm_head`, plays no part. ComfyUI's scaled fp8 files store a factor for each fp8 matrix, by which
its values are multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from flame_train.engine import nn
from flame_train.errors import ModelFileError
from flame_train.io.keymap import KeyMap, Op, Shape, scaled_fp8_rules, table
from flame_train.io.resolve import Component, Layout
from flame_train.io.weights import open_weights
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.identify import identify, model_names
from flame_train.networks.files.part import Part
from flame_train.networks.files.stated import Stated
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from flame_train.text_encoders.qwen3.vision import VisionArch, VisionTower
from flame_train.text_encoders.qwen3.vision_2_5 import Vision25Arch, VisionTower25
from flame_train.text_encoders.text_network import TextNetwork

_SIGNS: Final = ("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.q_proj.bias")  # Qwen3's, and Qwen2.5's
_LAYER: Final = (
    *(f"self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")),
    *(f"{part}.weight" for part in ("input_layernorm", "post_attention_layernorm")),
)
_BIASES: Final = tuple(f"self_attn.{part}.bias" for part in ("q_proj", "k_proj", "v_proj"))  # of Qwen2.5 alone
_NAMES: Final = ("embed_tokens.weight", "norm.weight", *(f"layers.{{i}}.{name}" for name in (*_LAYER, *_BIASES)))
_VISION_SIGN: Final = "patch_embed.proj.weight"
_SIGN_2_5: Final = "merger.ln_q.weight"
_MERGER: Final = tuple(f"{part}.{{p}}" for part in ("norm", "linear_fc1", "linear_fc2"))
_VISION: Final = (
    *("patch_embed.proj.{p}", "pos_embed.weight"),
    *(f"blocks.{{i}}.{part}.{{p}}" for part in ("norm1", "norm2", "attn.qkv", "attn.proj")),
    *(f"blocks.{{i}}.mlp.{part}.{{p}}" for part in ("linear_fc1", "linear_fc2")),
    *(f"{merger}.{name}" for merger in ("merger", "deepstack_merger_list.{i}") for name in _MERGER),
)
_VISION_2_5: Final = (
    *("patch_embed.proj.weight", "merger.ln_q.weight", "merger.mlp.{i}.{p}"),
    *(f"blocks.{{i}}.{part}.weight" for part in ("norm1", "norm2")),
    *(f"blocks.{{i}}.{part}.{{p}}" for part in ("attn.qkv", "attn.proj")),
    *(f"blocks.{{i}}.mlp.{part}.{{p}}" for part in ("gate_proj", "up_proj", "down_proj")),
)
# what marks a scaled file or serves products in fp8, and the half for images where it lies below the text half's names
_EXTRAS: Final = re.compile(r"scaled_fp8|.*\.scale_input|visual\..*")


def qwen3_table(names: Collection[str] = ()) -> KeyMap:
    """Returns the table to native names, which are the same.

    `names` are a file's, of which those with a factor are scaled.
    """
    return KeyMap(scaled_fp8_rules(names, table([(name, name, Op.COPY) for name in _NAMES])))


def component(name: str, prefixes: tuple[str, ...]) -> Component:
    """Returns the encoder as a part of a model, below one of `prefixes`; ("",) if the file holds the encoder only."""
    return Component(name, prefixes, (Layout("transformers", "layers.0.", qwen3_table),), _EXTRAS)


def vl_component(single_file: str, *others: str) -> Component:
    """Returns the text half of a vision-language model, whose half for images lies beside it and plays no part.

    `single_file` is its name in ComfyUI's checkpoints; `others` are further prefixes.
    """
    folder = "text_encoder/language_model.", "text_encoder/model.language_model."
    return component("text_encoder", (f"text_encoders.{single_file}.transformer.model.", *folder, *others))


def vision_table(names: Collection[str] = ()) -> KeyMap:
    """Returns the same of the half for images."""
    return KeyMap(scaled_fp8_rules(names, table([(name, name, Op.COPY) for name in _VISION])))


def vision_2_5_table(names: Collection[str] = ()) -> KeyMap:
    """Returns the same of that of Qwen2.5-VL."""
    return KeyMap(scaled_fp8_rules(names, table([(name, name, Op.COPY) for name in _VISION_2_5])))


def vision_component(name: str, prefixes: tuple[str, ...]) -> Component:
    """Returns the half for images, below one of `prefixes`."""
    signs = {_SIGN_2_5: vision_2_5_table, "patch_embed.": vision_table}
    layouts = tuple(Layout("transformers", sign, keymap) for sign, keymap in signs.items())
    return Component(name, prefixes, layouts, _EXTRAS)


def vision_tower(native: Mapping[str, Shape], stated: Stated) -> VisionTower | VisionTower25:
    """Returns the network of the half for images, by its native names and shapes. Raises ModelFileError."""
    if _SIGN_2_5 in native:
        return VisionTower25(Vision25Arch.from_shapes(native, stated))
    return VisionTower(VisionArch.from_shapes(native, stated))


def vl_vision_component(single_file: str) -> Component:
    """Returns the half for images beside a text half of that name in ComfyUI's checkpoints.

    It stands before that half.
    """
    inside = f"text_encoders.{single_file}.transformer."
    places = (f"{inside}model.", inside, "text_encoder/model.", "text_encoder/")
    return vision_component("vision", tuple(f"{place}visual." for place in places))


def vision_prefix_of(names: Iterable[str]) -> str | None:
    """Says what stands before the names of the half for images in a file; None if the file holds none."""
    prefixes = (name.removesuffix(_VISION_SIGN) for name in names if name.endswith(f"visual.{_VISION_SIGN}"))
    return next(prefixes, None)


def prefix_of(names: Iterable[str]) -> str | None:
    """Says what stands before the encoder's names in a file, maybe ""; None if the file holds no such encoder."""
    prefixes = (
        name.removesuffix(sign) for name in names for sign in _SIGNS if name.endswith(f".{sign}") or name == sign
    )
    return next(prefixes, None)


def qwen3_part(path: str | Path, name: str = "", files: FamilyFiles | None = None) -> Part:
    """Returns the encoder in a file or folder, as the family of `files` builds it, which calls it `name`.

    Without a family it is Qwen3's own text model. Raises ModelFileError: there is none, it is not whole, or its tensors
    show that it is another Qwen3 than the family's.
    """

    def build(native: Mapping[str, Shape], stated: Stated) -> nn.Module:
        return Qwen3(Qwen3Arch.from_shapes(native, stated)) if files is None else files.build(name, native, stated)

    if files is not None:
        _refuse_others(path, files)
    return TextNetwork("Qwen3", "qwen_3_4b.safetensors", prefix_of, component, build).part(path, name)


def vision_part(path: str | Path, language: Qwen3Arch) -> Part:
    """Returns the vision tower beside this text half, in the same file or folder.

    Raises ModelFileError: there is none, it is not whole, or it is that of another Qwen-VL.
    """
    name = "Qwen2.5-VL" if language.biases else "Qwen3-VL"

    def build(native: Mapping[str, Shape], stated: Stated) -> nn.Module:
        tower = vision_tower(native, stated)
        if tower.arch.out_width != language.width or isinstance(tower, VisionTower25) != language.biases:
            raise ModelFileError(
                f"{path}: expected {name}'s vision tower, which makes {language.width} values, got one of "
                f"{tower.arch.out_width}; name a whole {name}"
            )
        return tower

    example = f"the whole {name}, which reads control images"
    tower = TextNetwork(name, example, vision_prefix_of, vision_component, build, "vision tower")
    return tower.part(path, "vision")


def _refuse_others(path: str | Path, files: FamilyFiles) -> None:
    """Raises ModelFileError for an encoder that is none of the family's. One of unknown width is a small one."""
    with open_weights(path) as weights:
        identity = identify(weights.shapes, weights.metadata)
    if identity.kind == "text_encoder" and identity.family.startswith("qwen") and identity.family not in files.alone:
        expected = " or ".join(model_names()[name] for name in files.alone)
        raise ModelFileError(
            f"{path}: expected {expected} for {model_names()[files.family]}, found {model_names()[identity.family]}, "
            "whose states it was not made for; name another file"
        )
