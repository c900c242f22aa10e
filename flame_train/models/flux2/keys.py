"""FLUX.2's names: the transformer's two layouts, the components of its files, and how LoRA files call every module.

The native names are those of the single file. There queries, keys and values of the double blocks are one matrix;
diffusers has one for each. The last modulation's rows are shift then scale here, scale then shift there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, Rule, lines, table
from flame_train.io.lora_names import LoraFamily, modules_by_table
from flame_train.io.resolve import Component, Layout
from flame_train.io.resolve import resolve as resolve_components
from flame_train.models.sdxl import keys as sdxl
from flame_train.networks.transformer_files import component_of_table, lora_component
from flame_train.text_encoders.qwen3 import names as qwen3

_ENDS: Final = lines("""
    img_in.weight -> x_embedder.weight
    txt_in.weight -> context_embedder.weight
    time_in.in_layer.weight -> time_guidance_embed.timestep_embedder.linear_1.weight
    time_in.out_layer.weight -> time_guidance_embed.timestep_embedder.linear_2.weight
    guidance_in.in_layer.weight -> time_guidance_embed.guidance_embedder.linear_1.weight
    guidance_in.out_layer.weight -> time_guidance_embed.guidance_embedder.linear_2.weight
    double_stream_modulation_img.lin.weight -> double_stream_modulation_img.linear.weight
    double_stream_modulation_txt.lin.weight -> double_stream_modulation_txt.linear.weight
    single_stream_modulation.lin.weight -> single_stream_modulation.linear.weight
    final_layer.linear.weight -> proj_out.weight
    final_layer.adaLN_modulation.1.weight -> norm_out.linear.weight [swap]
""")
_DOUBLE: Final = lines("""
    img_attn.qkv.weight -> attn.to_q.weight attn.to_k.weight attn.to_v.weight [rows]
    img_attn.norm.query_norm.scale -> attn.norm_q.weight
    img_attn.norm.key_norm.scale -> attn.norm_k.weight
    img_attn.proj.weight -> attn.to_out.0.weight
    img_mlp.0.weight -> ff.linear_in.weight
    img_mlp.2.weight -> ff.linear_out.weight
    txt_attn.qkv.weight -> attn.add_q_proj.weight attn.add_k_proj.weight attn.add_v_proj.weight [rows]
    txt_attn.norm.query_norm.scale -> attn.norm_added_q.weight
    txt_attn.norm.key_norm.scale -> attn.norm_added_k.weight
    txt_attn.proj.weight -> attn.to_add_out.weight
    txt_mlp.0.weight -> ff_context.linear_in.weight
    txt_mlp.2.weight -> ff_context.linear_out.weight
""")
_SINGLE: Final = lines("""
    linear1.weight -> attn.to_qkv_mlp_proj.weight
    linear2.weight -> attn.to_out.weight
    norm.query_norm.scale -> attn.norm_q.weight
    norm.key_norm.scale -> attn.norm_k.weight
""")


def transformer_to_diffusers() -> KeyMap:
    """The table from native to diffusers names, for any depth; its `inverse` goes back."""
    blocks = (
        ("double_blocks.{i}.", "transformer_blocks.{i}.", "double"),
        ("single_blocks.{i}.", "single_transformer_blocks.{i}.", "single"),
    )
    return KeyMap(table(_ENDS, blocks, {"double": _DOUBLE, "single": _SINGLE}))


def _native_vae(names: Collection[str]) -> KeyMap:
    """From a single file, whose convolutions around the latents are parts of encoder and decoder in some."""
    return KeyMap(tuple(Rule((name,), (re.sub(r"^(en|de)coder\.(post_)?quant", r"\2quant", name),)) for name in names))


_SDXL: Final = {component.name: component for component in sdxl.COMPONENTS}
VAE: Final = Component(
    "vae",
    _SDXL["vae"].prefixes,
    (
        *(layout for layout in _SDXL["vae"].layouts if layout.keymap is not None),
        Layout("single-file", "decoder.up.", _native_vae),
    ),
    re.compile(rf"{_SDXL['vae'].ignored.pattern}|bn\.num_batches_tracked"),
)
"""FLUX.2's autoencoder as a part of a model's files; FLUX.3's too."""
COMPONENTS: Final = (
    component_of_table("double_blocks.", "single_transformer_blocks.", transformer_to_diffusers),
    VAE,
    qwen3.component(
        "text_encoder",
        (
            *(f"text_encoders.qwen3_{size}.transformer.model." for size in ("4b", "8b")),
            *("text_encoder/model.", "model."),
        ),
    ),
)


resolve: Final = partial(resolve_components, COMPONENTS)
"""Which tensor of a file, or of a diffusers folder, is which native tensor of which component; see `io.resolve`."""


def base_modules(depth: int, single_depth: int) -> tuple[str, ...]:
    """Native paths of the transformer's linear layers: 89 in klein 4B, 121 in klein 9B."""
    return tuple(_linears(depth, single_depth))


def _linears(depth: int, single_depth: int) -> Iterator[str]:
    yield from ("img_in", "txt_in", "time_in.in_layer", "time_in.out_layer", "final_layer.linear")
    yield from ("double_stream_modulation_img.lin", "double_stream_modulation_txt.lin", "single_stream_modulation.lin")
    yield "final_layer.adaLN_modulation.1"
    for i in range(depth):
        parts = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")
        yield from (f"double_blocks.{i}.{stream}_{part}" for stream in ("img", "txt") for part in parts)
    for i in range(single_depth):
        yield from (f"single_blocks.{i}.{part}" for part in ("linear1", "linear2"))


@lru_cache(maxsize=4)
def lora_family(depth: int = 8, single_depth: int = 24) -> LoraFamily:
    """How LoRA files of FLUX.2 klein name their modules; by default klein 9B's, of which 4B has a part."""
    modules = modules_by_table(base_modules(depth, single_depth), transformer_to_diffusers())
    return LoraFamily(
        name="flux2",
        components=(lora_component(modules, "lora_transformer"),),
        base_version="flux2",
        architecture="flux-2-klein/lora",
        implementation="https://github.com/black-forest-labs/flux2",
        network_module="networks.lora_flux_2",
    )
