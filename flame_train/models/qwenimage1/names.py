"""Qwen-Image 1's names, which are those of diffusers in every file: the components, and how LoRA files call modules."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, Line, lines, scaled_fp8_rules, table
from flame_train.io.lora_names import LoraFamily, modules_as_they_are
from flame_train.io.resolve import Layout
from flame_train.models.qwenimage1.transformer import QwenImage1, QwenImage1Arch
from flame_train.networks.files.build_parts import built_by
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import LoraMark, Mark, Marks
from flame_train.networks.transformer_files import lora_component, transformer_component
from flame_train.networks.vae.names import qwen_vae_component
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3 import names as qwen3
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from flame_train.text_encoders.qwen3.vision_2_5 import Vision25Arch, VisionTower25

_ENDS: Final = (
    *("img_in", "txt_in", "norm_out.linear", "proj_out"),
    *(f"time_text_embed.timestep_embedder.linear_{n}" for n in (1, 2)),
)
_LINEAR: Final = (
    *("img_mod.1", "txt_mod.1", "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "to_add_out")),
    *(f"attn.add_{name}_proj" for name in "qkv"),
)
_NORMS: Final = tuple(f"attn.norm_{name}.weight" for name in ("q", "k", "added_q", "added_k"))


def _same(names: Collection[str]) -> tuple[Line, ...]:
    return lines("\n".join(f"{name} -> {name}" for name in names))


def transformer_table(names: Collection[str] = ()) -> KeyMap:
    """Returns the table to native names, which are the same.

    `names` are a file's, of which those with a factor are scaled.
    """
    ends = _same([*(f"{name}.{{p}}" for name in _ENDS), "txt_norm.weight"])
    block = _same([*(f"{name}.{{p}}" for name in _LINEAR), *_NORMS])
    place = "transformer_blocks.{i}."
    return KeyMap(scaled_fp8_rules(names, table(ends, [(place, place, "block")], {"block": block})))


ZERO_COND: Final = "__index_timestep_zero__"
"""A tensor by which ComfyUI's files say that they are Qwen-Image-Edit 2511. It has nothing to compute with."""
COMPONENTS: Final = (
    transformer_component(Layout("diffusers", ".attn.add_q_proj.", transformer_table), unused=re.escape(ZERO_COND)),
    qwen_vae_component(),
    qwen3.vl_vision_component("qwen25_7b"),
    qwen3.vl_component("qwen25_7b", "text_encoder/model."),
)


def base_modules(depth: int = 60) -> tuple[str, ...]:
    """Returns native paths of the transformer's linear layers: 846 in Qwen-Image 1."""
    return *_ENDS, *(f"transformer_blocks.{i}.{part}" for i in range(depth) for part in _LINEAR)


@lru_cache(maxsize=3)
def lora_family(architecture: str = "Qwen-Image") -> LoraFamily:
    """Returns how LoRA files of Qwen-Image 1, or of a Qwen-Image-Edit that is called so, name their modules."""
    modules = modules_as_they_are(base_modules())
    return LoraFamily(
        name="qwenimage1",
        components=(lora_component(modules),),
        base_version="qwen_image",
        architecture=f"{architecture}/lora",
        implementation="https://github.com/QwenLM/Qwen-Image",
        network_module="networks.lora_qwen_image",
    )


_NETWORKS: Final = built_by(
    transformer=(QwenImage1, QwenImage1Arch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.qwen_image())),
    vision=(VisionTower25, Vision25Arch.from_shapes),
    text_encoder=(Qwen3, Qwen3Arch.from_shapes),
)
_ALONE: Final = {"qwen2.5-vl-7b": "text_encoder"}
QWENIMAGE1_FILES: Final = FamilyFiles("qwenimage1", COMPONENTS, _ALONE, _NETWORKS)

_SIGNS: Final = "txt_norm.weight", "transformer_blocks.0.img_mod.1.weight"
MARKS: Final = Marks(
    names={"qwenimage1": "Qwen-Image 1"},
    groups={"qwen-wan": ("qwenimage1",)},
    # a LoRA of attention alone has the names and the width of one of Flux.1's, in diffusers' layout
    also_reads={"qwenimage1": ("flux",)},
    networks=(
        Mark("qwenimage1", "diffusers", _SIGNS, lacks=(ZERO_COND,)),
        Mark("qwenimage1", "diffusers", (*_SIGNS, ZERO_COND), note=" (Edit 2511)"),
    ),
    # what no other model's layers are called, their paths' dots made underscores, behind any trainer's prefix
    loras=(LoraMark("qwenimage1", r"^(.*_)?transformer_blocks_\d+_((img|txt)_mlp_net|(img|txt)_mod)_[^_]"),),
    written={"qwen[_-]image": "qwenimage1"},
    unwritten=r"qwen_image_2|qwen-image-2\.1",
)
