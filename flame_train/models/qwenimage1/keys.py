"""Qwen-Image 1's names, which are those of diffusers in every file: the components, and how LoRA files call modules."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, Line, lines, scaled_fp8_rules, table
from flame_train.io.lora_names import LoraFamily, modules_as_they_are
from flame_train.io.resolve import Layout
from flame_train.io.resolve import resolve as resolve_components
from flame_train.networks.transformer_files import lora_component, transformer_component
from flame_train.networks.vae.names_qwen import qwen_vae_component
from flame_train.text_encoders.qwen3 import names as qwen3

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
    """The table to native names, which are the same; `names` are a file's, of which those with a factor are scaled."""
    ends = _same([*(f"{name}.{{p}}" for name in _ENDS), "txt_norm.weight"])
    block = _same([*(f"{name}.{{p}}" for name in _LINEAR), *_NORMS])
    place = "transformer_blocks.{i}."
    return KeyMap(scaled_fp8_rules(names, table(ends, [(place, place, "block")], {"block": block})))


COMPONENTS: Final = (
    transformer_component(Layout("diffusers", ".attn.add_q_proj.", transformer_table)),
    qwen_vae_component(),
    qwen3.vl_component("qwen25_7b", "text_encoder/model."),
)


resolve: Final = partial(resolve_components, COMPONENTS)
"""Which tensor of a file, or of a diffusers folder, is which native tensor of which component; see `io.resolve`."""


def base_modules(depth: int = 60) -> tuple[str, ...]:
    """Native paths of the transformer's linear layers: 846 in Qwen-Image 1."""
    return *_ENDS, *(f"transformer_blocks.{i}.{part}" for i in range(depth) for part in _LINEAR)


@lru_cache(maxsize=1)
def lora_family() -> LoraFamily:
    """How LoRA files of Qwen-Image 1 name their modules."""
    modules = modules_as_they_are(base_modules())
    return LoraFamily(
        name="qwenimage1",
        components=(lora_component(modules),),
        base_version="qwen_image",
        architecture="Qwen-Image/lora",
        implementation="https://github.com/QwenLM/Qwen-Image",
        network_module="networks.lora_qwen_image",
    )
