"""FLUX.3's names: the transformer's two layouts, the components of its files, and how LoRA files call every module.

The native names are those of the single file. The last modulation's rows are shift then scale there, scale then shift
in diffusers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, lines, table
from flame_train.io.lora_names import LoraFamily, modules_by_table
from flame_train.io.resolve import resolve as resolve_components
from flame_train.models.flux2.keys import VAE
from flame_train.networks.transformer_files import component_of_table, lora_component
from flame_train.text_encoders.qwen3 import names as qwen3

_ENDS: Final = lines("""
    emb_in.image.weight -> x_embedders.image.weight
    emb_in.image_cond.weight -> x_embedders.image_cond.weight
    txt_in.weight -> context_embedder.weight
    time_in.in_layer.weight -> timestep_embedder.linear_1.weight
    time_in.out_layer.weight -> timestep_embedder.linear_2.weight
    ref_time_in.in_layer.weight -> target_timestep_embedder.linear_1.weight
    ref_time_in.out_layer.weight -> target_timestep_embedder.linear_2.weight
    early_stream_modulations.image.lin.weight -> early_stream_modulations.image.linear.weight
    early_stream_modulations.image_cond.lin.weight -> early_stream_modulations.image_cond.linear.weight
    early_stream_modulations.txt.lin.weight -> early_stream_modulations.txt.linear.weight
    single_stream_modulations.image.lin.weight -> single_stream_modulations.image.linear.weight
    single_stream_modulations.image_cond.lin.weight -> single_stream_modulations.image_cond.linear.weight
    single_stream_modulations.txt.lin.weight -> single_stream_modulations.txt.linear.weight
    final_layer.image.linear.weight -> proj_out.weight
    final_layer.image.adaLN_modulation.1.weight -> norm_out.linear.weight [swap]
""")
_BLOCK: Final = lines("""
    q_proj.weight -> attn.to_q.weight
    k_proj.weight -> attn.to_k.weight
    v_proj.weight -> attn.to_v.weight
    attn_out.weight -> attn.to_out.0.weight
    norm.query_norm.scale -> attn.norm_q.weight
    norm.key_norm.scale -> attn.norm_k.weight
    mlp_in.weight -> ff.linear_in.weight
    mlp_out.weight -> ff.linear_out.weight
""")
_STACKS: Final = {
    "content_mode_blocks.image": "mode_blocks.image",
    "content_mode_blocks.image_cond": "mode_blocks.image_cond",
    "txt_mode_blocks": "txt_mode_blocks",
    "single_blocks": "single_transformer_blocks",
}
DISTILLED: Final = ("ref_time_in.", "target_timestep_embedder.")
"""What the names of the tensors begin with, in either layout, that only the distilled checkpoint has."""


def transformer_to_diffusers() -> KeyMap:
    """The table from native to diffusers names, for any depth; its `inverse` goes back."""
    blocks = [(f"{here}.{{i}}.", f"{there}.{{i}}.", "block") for here, there in _STACKS.items()]
    return KeyMap(table(_ENDS, blocks, {"block": _BLOCK}))


COMPONENTS: Final = (
    component_of_table(
        "content_mode_blocks.",
        "single_transformer_blocks.",
        transformer_to_diffusers,
        unused=r"repa_projectors\..*",  # of training alone
    ),
    VAE,
    qwen3.vl_component("qwen3vl_4b"),
)


resolve: Final = partial(resolve_components, COMPONENTS)
"""Which tensor of a file, or of a diffusers folder, is which native tensor of which component; see `io.resolve`."""


def base_modules(depth: int = 5, single_depth: int = 28) -> tuple[str, ...]:
    """Native paths of the transformer's linear layers: 271 in klein base."""
    return tuple(_linears(depth, single_depth))


def _linears(depth: int, single_depth: int) -> Iterator[str]:
    for source, _, _ in _ENDS:
        if not source.startswith(DISTILLED):
            yield source.removesuffix(".weight")
    parts = [source.removesuffix(".weight") for source, _, _ in _BLOCK if source.endswith(".weight")]
    for stack in _STACKS:
        blocks = single_depth if stack == "single_blocks" else depth
        yield from (f"{stack}.{i}.{part}" for i in range(blocks) for part in parts)


@lru_cache(maxsize=4)
def lora_family(depth: int = 5, single_depth: int = 28) -> LoraFamily:
    """How LoRA files of FLUX.3 klein name their modules."""
    modules = modules_by_table(base_modules(depth, single_depth), transformer_to_diffusers())
    return LoraFamily(
        name="flux3",
        components=(lora_component(modules, "lora_transformer"),),
        base_version="flux3",
        architecture="flux-3-image-klein/lora",
        implementation="https://github.com/black-forest-labs/flux-3-image-klein",
        network_module="networks.lora_flux_3",
    )
