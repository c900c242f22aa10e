"""Z-Image's names: the transformer's two layouts, the components of its files, and how LoRA files call every module.

The native names are those of the published single file. There queries, keys and values are one matrix, and diffusers
has one for each. diffusers names the embedder and the final layer after the size of a patch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, lines, table
from flame_train.io.lora_names import LoraFamily, modules_by_table
from flame_train.io.resolve import resolve as resolve_components
from flame_train.models.sdxl import keys as sdxl
from flame_train.networks.transformer_files import component_of_table, lora_component
from flame_train.text_encoders.qwen3 import names as qwen3

_ENDS: Final = lines("""
    x_embedder.{p} -> all_x_embedder.2-1.{p}
    x_pad_token -> x_pad_token
    cap_pad_token -> cap_pad_token
    cap_embedder.0.weight -> cap_embedder.0.weight
    cap_embedder.1.{p} -> cap_embedder.1.{p}
    t_embedder.mlp.0.{p} -> t_embedder.mlp.0.{p}
    t_embedder.mlp.2.{p} -> t_embedder.mlp.2.{p}
    final_layer.linear.{p} -> all_final_layer.2-1.linear.{p}
    final_layer.adaLN_modulation.1.{p} -> all_final_layer.2-1.adaLN_modulation.1.{p}
""")
_BLOCK: Final = lines("""
    attention.qkv.weight -> attention.to_q.weight attention.to_k.weight attention.to_v.weight [rows]
    attention.out.weight -> attention.to_out.0.weight
    attention.q_norm.weight -> attention.norm_q.weight
    attention.k_norm.weight -> attention.norm_k.weight
    feed_forward.w1.weight -> feed_forward.w1.weight
    feed_forward.w2.weight -> feed_forward.w2.weight
    feed_forward.w3.weight -> feed_forward.w3.weight
    attention_norm1.weight -> attention_norm1.weight
    attention_norm2.weight -> attention_norm2.weight
    ffn_norm1.weight -> ffn_norm1.weight
    ffn_norm2.weight -> ffn_norm2.weight
    adaLN_modulation.0.{p} -> adaLN_modulation.0.{p}
""")
_STACKS: Final = ("noise_refiner", "context_refiner", "layers")


def transformer_to_diffusers() -> KeyMap:
    """The table from native to diffusers names, for any depth; its `inverse` goes back."""
    blocks = [(f"{stack}.{{i}}.", f"{stack}.{{i}}.", "block") for stack in _STACKS]
    return KeyMap(table(_ENDS, blocks, {"block": _BLOCK}))


_SDXL: Final = {component.name: component for component in sdxl.COMPONENTS}
COMPONENTS: Final = (
    component_of_table(
        ".attention.qkv.",
        ".attention.to_q.",
        transformer_to_diffusers,
        unused=r"norm_final\.weight",  # of the code that Z-Image's began from
    ),
    _SDXL["vae"],
    qwen3.component("text_encoder", ("text_encoders.qwen3_4b.transformer.model.", "text_encoder/model.", "model.")),
)


resolve: Final = partial(resolve_components, COMPONENTS)
"""Which tensor of a file, or of a diffusers folder, is which native tensor of which component; see `io.resolve`."""


def base_modules() -> tuple[str, ...]:
    """Native paths of the transformer's linear layers: 209 in Z-Image."""
    return tuple(_linears())


def _linears(depth: int = 30, refiners: int = 2) -> Iterator[str]:
    yield from ("x_embedder", "cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2")
    yield from ("final_layer.linear", "final_layer.adaLN_modulation.1")
    for stack, blocks in zip(_STACKS, (refiners, refiners, depth), strict=True):
        for i in range(blocks):
            parts = ("attention.qkv", "attention.out", *(f"feed_forward.w{n}" for n in (1, 2, 3)))
            modulation = () if stack == "context_refiner" else ("adaLN_modulation.0",)
            yield from (f"{stack}.{i}.{part}" for part in (*parts, *modulation))


@lru_cache(maxsize=1)
def lora_family() -> LoraFamily:
    """How LoRA files of Z-Image name their modules.

    ComfyUI reads diffusers' paths below its own prefix too, as ai-toolkit writes them.
    """
    modules = modules_by_table(base_modules(), transformer_to_diffusers())
    return LoraFamily(
        name="zimage",
        components=(lora_component(modules),),
        base_version="zimage",
        architecture="Z-Image/lora",
        implementation="https://github.com/Tongyi-MAI/Z-Image",
        network_module="networks.lora_zimage",
    )
