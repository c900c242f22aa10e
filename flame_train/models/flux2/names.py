"""FLUX.2's names: the transformer's two layouts, the components of its files, and how LoRA files call every module.

The native names are those of the single file. There queries, keys and values of the double blocks are one matrix;
diffusers has one for each. The last modulation's rows are shift then scale here, scale then shift there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, lines, table
from flame_train.io.lora_names import LoraFamily, modules_by_table
from flame_train.io.resolve import resolve
from flame_train.models.flux2.transformer import Flux2, Flux2Arch
from flame_train.networks.files.build_parts import built_by
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import LoraMark, Mark, Marks, Ratio, Shape, Width
from flame_train.networks.transformer_files import component_of_table, lora_component
from flame_train.networks.vae.names import FLUX2_VAE
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.mistral import names as mistral
from flame_train.text_encoders.mistral.network import Mistral, MistralArch
from flame_train.text_encoders.qwen3 import names as qwen3
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch

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
    """Returns the table from native to diffusers names, for any depth; its `inverse` goes back."""
    blocks = (
        ("double_blocks.{i}.", "transformer_blocks.{i}.", "double"),
        ("single_blocks.{i}.", "single_transformer_blocks.{i}.", "single"),
    )
    return KeyMap(table(_ENDS, blocks, {"double": _DOUBLE, "single": _SINGLE}))


COMPONENTS: Final = (
    component_of_table("double_blocks.", "single_transformer_blocks.", transformer_to_diffusers),
    FLUX2_VAE,
    mistral.in_checkpoints(),
    qwen3.component(
        "text_encoder",
        (
            *(f"text_encoders.qwen3_{size}.transformer.model." for size in ("4b", "8b")),
            *("text_encoder/model.", "model."),
        ),
    ),
)


def base_modules(depth: int, single_depth: int, guidance: bool) -> tuple[str, ...]:
    """Returns native paths of the transformer's linear layers: 89 in klein 4B, 121 in klein 9B, 171 in dev."""
    return tuple(_linears(depth, single_depth, guidance))


def _linears(depth: int, single_depth: int, guidance: bool) -> Iterator[str]:
    yield from ("img_in", "txt_in", "time_in.in_layer", "time_in.out_layer", "final_layer.linear")
    yield from ("guidance_in.in_layer", "guidance_in.out_layer") if guidance else ()
    yield from ("double_stream_modulation_img.lin", "double_stream_modulation_txt.lin", "single_stream_modulation.lin")
    yield "final_layer.adaLN_modulation.1"
    for i in range(depth):
        parts = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")
        yield from (f"double_blocks.{i}.{stream}_{part}" for stream in ("img", "txt") for part in parts)
    for i in range(single_depth):
        yield from (f"single_blocks.{i}.{part}" for part in ("linear1", "linear2"))


@lru_cache(maxsize=4)
def lora_family(depth: int = 8, single_depth: int = 48, guidance: bool = True) -> LoraFamily:
    """Returns how LoRA files of FLUX.2 name their modules; by default dev's, of which klein has a part."""
    modules = modules_by_table(base_modules(depth, single_depth, guidance), transformer_to_diffusers())
    return LoraFamily(
        name="flux2",
        components=(lora_component(modules, "lora_transformer"),),
        base_version="flux2",
        architecture="Flux.2-dev/lora" if guidance else "flux-2-klein/lora",
        implementation="https://github.com/black-forest-labs/flux2",
        network_module="networks.lora_flux_2",
    )


def lora_names_in(shapes: Mapping[str, Shape]) -> LoraFamily:
    """Returns the names of a LoRA file with these tensors: klein's, unless a layer is as wide or as deep as dev's."""
    flat = {name.replace(".", "_"): shape for name, shape in shapes.items()}
    dev = not flat or Width(_AS_WIDE, Flux2Arch.dev().width).fits(flat) or any(_DEEP.search(name) for name in flat)
    return lora_family() if dev else lora_family(8, 24, guidance=False)


_DEEP: Final = re.compile(r"single_(transformer_)?blocks_(2[4-9]|[34]\d)_")  # klein has 24

# layers that take the model's width
_AS_WIDE: Final = r"blocks_\d+_((img|txt)_(attn_qkv|mlp_0)|linear1|attn_(to_qkv_mlp_proj|to_[qkv]|add_[qkv]_proj))"

_NETWORKS: Final = built_by(
    transformer=(Flux2, Flux2Arch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.flux2())),
    text_encoder=(Qwen3, Qwen3Arch.from_shapes),
    text_encoder_mistral=(Mistral, MistralArch.from_shapes),
)
_ALONE: Final = {"qwen3-4b": "text_encoder", "qwen3-8b": "text_encoder", "mistral-small": mistral.COMPONENT}
_SORT: Final = partial(resolve, idle=mistral.ELSEWHERE)
FLUX2_FILES: Final = FamilyFiles("flux2", COMPONENTS, _ALONE, _NETWORKS, _SORT)

_SINGLE_FILE, _DIFFUSERS = (f"single_stream_modulation.{end}.weight" for end in ("lin", "linear"))
_GUIDED: Final = ("guidance_in.*", "time_guidance_embed.guidance_embedder.*")
MARKS: Final = Marks(
    names={"flux2": "FLUX.2"},
    groups={"flux2-flux3": ("flux2",)},
    networks=(
        Mark("flux2", "single-file", (_SINGLE_FILE, _GUIDED[0]), note=" dev"),
        Mark("flux2", "single-file", (_SINGLE_FILE,), lacks=_GUIDED[:1], note=" klein"),
        Mark("flux2", "diffusers", (_DIFFUSERS, _GUIDED[1]), note=" dev"),
        Mark("flux2", "diffusers", (_DIFFUSERS,), lacks=_GUIDED[1:], note=" klein"),
    ),
    loras=(
        LoraMark("flux2", "_attn_to_qkv_mlp_proj"),
        LoraMark("flux2", "_ff_linear_in", lacks=r"mode_blocks_|single_transformer_blocks_\d+_ff_"),
        # MLPs begin with 6 widths for gate and value, in single blocks beside 3 for the attention
        LoraMark("flux2", sizes=(Ratio(r"single_blocks_\d+_linear1", 9),)),
        LoraMark("flux2", sizes=(Ratio(r"double_blocks_\d+_(img|txt)_mlp_0", 6),)),
    ),
    written={"flux[.-]?2": "flux2"},
)
