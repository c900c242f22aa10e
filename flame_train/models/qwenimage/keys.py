"""Qwen-Image 2.1's names: the transformer's two layouts, the components of its files, and how LoRA files call modules.

The native names are those of the single file that ComfyUI reads. There one matrix makes gate and value of the gated
network, and diffusers has one for each. All other names are the same.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, lines, table
from flame_train.io.lora_names import LoraFamily, modules_by_table
from flame_train.io.resolve import resolve as resolve_components
from flame_train.networks.transformer_files import component_of_table, lora_component
from flame_train.networks.vae.names_qwen import nested_vae_component
from flame_train.text_encoders.qwen3 import names as qwen3

_ENDS: Final = (
    *("img_in", "txt_in.in_layer", "txt_in.out_layer", "modulation.1", "norm_out.linear", "proj_out"),
    *("time_text_embed.timestep_embedder.linear_1", "time_text_embed.timestep_embedder.linear_2"),
)
_BLOCK: Final = lines("""
    attn.to_q.weight -> attn.to_q.weight
    attn.to_k.weight -> attn.to_k.weight
    attn.to_v.weight -> attn.to_v.weight
    attn.to_out.0.weight -> attn.to_out.0.weight
    attn.norm_q.weight -> attn.norm_q.weight
    attn.norm_k.weight -> attn.norm_k.weight
    img_mlp.gate_up.weight -> img_mlp.gate_layer.weight img_mlp.proj.weight [rows]
    img_mlp.out.weight -> img_mlp.out.weight
""")
_LINEAR: Final = (*(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")), "img_mlp.gate_up", "img_mlp.out")


def transformer_to_diffusers() -> KeyMap:
    """The table from native to diffusers names, for any depth; its `inverse` goes back."""
    ends = [f"{name}.weight -> {name}.weight" for name in (*_ENDS, "txt_in.text_norm")]
    blocks = [("transformer_blocks.{i}.", "transformer_blocks.{i}.", "block")]
    return KeyMap(table(lines("\n".join(ends)), blocks, {"block": _BLOCK}))


COMPONENTS: Final = (
    component_of_table(".img_mlp.gate_up.", ".img_mlp.gate_layer.", transformer_to_diffusers),
    nested_vae_component(),
    qwen3.vl_vision_component("qwen3vl_8b"),
    qwen3.vl_component("qwen3vl_8b"),
)


resolve: Final = partial(resolve_components, COMPONENTS)
"""Which tensor of a file, or of a diffusers folder, is which native tensor of which component; see `io.resolve`."""


def base_modules() -> tuple[str, ...]:
    """Native paths of the transformer's linear layers: 200 in Qwen-Image 2.1."""
    return *_ENDS, *(f"transformer_blocks.{i}.{part}" for i in range(32) for part in _LINEAR)


@lru_cache(maxsize=1)
def lora_family() -> LoraFamily:
    """How LoRA files of Qwen-Image 2.1 name their modules.

    ComfyUI reads gate and value apart below `transformer.`, and as one below its own prefix and kohya's.
    """
    modules = modules_by_table(base_modules(), transformer_to_diffusers())
    return LoraFamily(
        name="qwenimage",
        components=(lora_component(modules),),
        base_version="qwen_image_2.1",
        architecture="Qwen-Image-2.1/lora",
        implementation="https://github.com/QwenLM/Qwen-Image",
        network_module="networks.lora_qwen_image",
    )
