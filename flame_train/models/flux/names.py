"""Flux.1's names: the transformer's two layouts, the components of its files, and how LoRA files call every module.

The native names are those of the single file. There queries, keys and values are one matrix, in a single-stream block
together with the MLP's first; diffusers has one for each. The last modulation's rows are shift then scale here, scale
then shift there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, Op, Rule, lines, table
from flame_train.io.lora_names import LoraComponent, LoraFamily, modules_as_they_are, modules_by_table
from flame_train.io.resolve import resolve
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.networks.files.build_parts import built_by
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import LoraMark, Mark, Marks, Ratio, Shapes, dim, joint_loras
from flame_train.networks.transformer_files import component_of_table, lora_component
from flame_train.networks.vae.names import VAE
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip import names as clip
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.t5 import names as t5
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

MLP_RATIO: Final = 4  # of the width, in every model of the family

_ENDS: Final = lines("""
    img_in.{p} -> x_embedder.{p}
    txt_in.{p} -> context_embedder.{p}
    time_in.in_layer.{p} -> time_text_embed.timestep_embedder.linear_1.{p}
    time_in.out_layer.{p} -> time_text_embed.timestep_embedder.linear_2.{p}
    vector_in.in_layer.{p} -> time_text_embed.text_embedder.linear_1.{p}
    vector_in.out_layer.{p} -> time_text_embed.text_embedder.linear_2.{p}
    guidance_in.in_layer.{p} -> time_text_embed.guidance_embedder.linear_1.{p}
    guidance_in.out_layer.{p} -> time_text_embed.guidance_embedder.linear_2.{p}
    final_layer.linear.{p} -> proj_out.{p}
    final_layer.adaLN_modulation.1.{p} -> norm_out.linear.{p} [swap]
""")
_MODULATION: Final = {
    "double": lines("img_mod.lin.{p} -> norm1.linear.{p}\n txt_mod.lin.{p} -> norm1_context.linear.{p}"),
    "single": lines("modulation.lin.{p} -> norm.linear.{p}"),
}
_DOUBLE: Final = lines("""
    img_attn.qkv.{p} -> attn.to_q.{p} attn.to_k.{p} attn.to_v.{p} [rows]
    img_attn.norm.query_norm.scale -> attn.norm_q.weight
    img_attn.norm.key_norm.scale -> attn.norm_k.weight
    img_attn.proj.{p} -> attn.to_out.0.{p}
    img_mlp.0.{p} -> ff.net.0.proj.{p}
    img_mlp.2.{p} -> ff.net.2.{p}
    txt_attn.qkv.{p} -> attn.add_q_proj.{p} attn.add_k_proj.{p} attn.add_v_proj.{p} [rows]
    txt_attn.norm.query_norm.scale -> attn.norm_added_q.weight
    txt_attn.norm.key_norm.scale -> attn.norm_added_k.weight
    txt_attn.proj.{p} -> attn.to_add_out.{p}
    txt_mlp.0.{p} -> ff_context.net.0.proj.{p}
    txt_mlp.2.{p} -> ff_context.net.2.{p}
""")
_SINGLE: Final = lines("""
    linear2.{p} -> proj_out.{p}
    norm.query_norm.scale -> attn.norm_q.weight
    norm.key_norm.scale -> attn.norm_k.weight
""")
_FUSED: Final = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")


def blocks_to_diffusers(modulated: bool) -> list[Rule]:
    """Returns the rules of both kinds of blocks, with their modulation or, for Chroma, without."""
    blocks = (
        ("double_blocks.{i}.", "transformer_blocks.{i}.", "double"),
        ("single_blocks.{i}.", "single_transformer_blocks.{i}.", "single"),
    )
    inner = {"double": _DOUBLE, "single": _SINGLE}
    if modulated:
        inner = {kind: (*rules, *_MODULATION[kind]) for kind, rules in inner.items()}
    fused = [
        Rule(
            (f"single_blocks.{{i}}.linear1.{kind}",),
            tuple(f"single_transformer_blocks.{{i}}.{part}.{kind}" for part in _FUSED),
            Op.ROWS,
            (1, 1, 1, MLP_RATIO),
        )
        for kind in ("weight", "bias")
    ]
    return [*table((), blocks, inner), *fused]


def transformer_to_diffusers() -> KeyMap:
    """Returns the table from native to diffusers names, for any depth; its `inverse` goes back."""
    return KeyMap((*table(_ENDS), *blocks_to_diffusers(modulated=True)))


_ELSEWHERE: Final = re.compile(r"text_encoders\.\w+\.(logit_scale|transformer\.text_projection\.weight)|model_ema\..*")
COMPONENTS: Final = (
    component_of_table("double_blocks.", "single_transformer_blocks.", transformer_to_diffusers),
    VAE,
    clip.clip_l("text_encoders.clip_l.transformer."),
    t5.component("text_encoder_2", (t5.SINGLE_FILE_PREFIX, "text_encoder_2/")),
)


def base_modules() -> dict[str, tuple[str, ...]]:
    """Returns component -> native paths of its linear layers: 314 in dev's transformer, 72 in CLIP-L, 168 in T5-XXL."""
    return {"transformer": tuple(_linears()), "text_encoder": clip.CLIP_L_MODULES, "text_encoder_2": t5.modules(24)}


def _linears(double: int = 19, single: int = 38) -> Iterator[str]:
    yield from ("img_in", "txt_in", "final_layer.linear", "final_layer.adaLN_modulation.1")
    yield from (f"{part}_in.{layer}_layer" for part in ("time", "vector", "guidance") for layer in ("in", "out"))
    for i in range(double):
        for stream in ("img", "txt"):
            parts = ("mod.lin", "attn.qkv", "attn.proj", "mlp.0", "mlp.2")
            yield from (f"double_blocks.{i}.{stream}_{part}" for part in parts)
    for i in range(single):
        yield from (f"single_blocks.{i}.{part}" for part in ("linear1", "linear2", "modulation.lin"))


@lru_cache(maxsize=2)
def lora_family(dev: bool = True) -> LoraFamily:
    """Returns how LoRA files of Flux.1 dev, or else schnell, name their modules.

    kohya's name for T5 is `lora_te3`, OneTrainer's `lora_te2`.
    """
    modules = base_modules()
    transformer = modules_by_table(modules["transformer"], transformer_to_diffusers())
    text = {name: modules_as_they_are(modules[name]) for name in ("text_encoder", "text_encoder_2")}
    clip_l, t5xxl = ("text_encoders.clip_l.transformer.",), (t5.SINGLE_FILE_PREFIX,)
    return LoraFamily(
        name="flux",
        components=(
            lora_component(transformer, "lora_transformer"),
            LoraComponent("text_encoder", "lora_te1", text["text_encoder"], clip_l),
            LoraComponent("text_encoder_2", "lora_te3", text["text_encoder_2"], t5xxl, ("lora_te2",)),
        ),
        base_version="flux1",
        architecture=f"flux-1-{'dev' if dev else 'schnell'}/lora",
        implementation="https://github.com/black-forest-labs/flux",
        network_module="networks.lora_flux",
    )


_NETWORKS: Final = built_by(
    transformer=(Flux, FluxArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.flux())),
    text_encoder=(ClipTextEncoder, partial(ClipArch.from_shapes, activation="quick_gelu")),
    text_encoder_2=(T5Encoder, T5Arch.from_shapes),
)
_ALONE: Final = {"clip-l": "text_encoder", "t5-xxl": "text_encoder_2"}
FLUX_FILES: Final = FamilyFiles("flux", COMPONENTS, _ALONE, _NETWORKS, partial(resolve, idle=_ELSEWHERE))

# what no layer of Flux.1 is called; the rows of its single blocks and of its MLPs are fewer, too
_NO_FLUX: Final = (
    "distilled_guidance_layer_|_attn_to_qkv_mlp_proj|_ff_linear_in|mode_blocks_|_stream_modulations_"
    r"|single_blocks_\d+_([qkv]_proj|attn_out|mlp_)|single_transformer_blocks_\d+_(attn_to_out_0|ff_)"
    r"|transformer_blocks_\d+_(img|txt)_(mlp_net|mod)_"
)
_GATED: Final = (Ratio(r"single_blocks_\d+_linear1", 9), Ratio(r"double_blocks_\d+_(img|txt)_mlp_0", 6))


def _variant(model: str, shapes: Shapes) -> tuple[str, str] | None:
    """Returns which Flux.1 it is: by its input, and by whether it is told a guidance."""
    inputs = dim(shapes, "img_in.weight" if "img_in.weight" in shapes else "x_embedder.weight", 1)
    if inputs in (128, 384):
        return {128: "flux-control", 384: "flux-fill"}[inputs], ""
    guided = any(name.startswith(("guidance_in.", "time_text_embed.guidance_embedder.")) for name in shapes)
    return "flux-dev" if guided else "flux-schnell", ""


MARKS: Final = Marks(
    names={
        "flux-dev": "Flux.1 dev",
        "flux-schnell": "Flux.1 schnell",
        "flux-fill": "Flux.1 Fill",
        "flux-control": "Flux.1 Canny or Depth",
        "flux": "Flux.1",
    },
    groups={"flux": ("flux-dev", "flux-schnell", "flux-fill", "flux-control"), "sd3-flux": ("flux",)},
    networks=(
        Mark(
            "flux",
            "single-file",
            ("double_blocks.0.img_attn.norm.key_norm.scale",),
            lacks=("distilled_guidance_layer.*", "single_stream_modulation.lin.weight"),
        ),
        Mark(
            "flux",
            "diffusers",
            ("single_transformer_blocks.0.attn.to_q.weight",),
            lacks=("distilled_guidance_layer.*", "early_stream_modulations.*"),
        ),
    ),
    variant=_variant,
    loras=(
        LoraMark("flux", "(double|single|single_transformer)_blocks_", lacks=_NO_FLUX, unless=_GATED),
        *joint_loras("flux", 3072, lacks=rf"{_NO_FLUX}|_attn2_"),
    ),
    written={"flux": "flux"},
    unwritten="chroma|flux[.-]?[23]",
    t5="text_encoder_2",
)
