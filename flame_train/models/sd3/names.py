"""SD3's and SD3.5's names: components, layouts, and how LoRA files call every module.

The native names are those of the single files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, Shape, lines, table
from flame_train.io.lora_names import LoraComponent, LoraFamily, modules_as_they_are, modules_by_table
from flame_train.io.resolve import resolve
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.networks.files.build_parts import built_by
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import JOINT, LoraMark, Mark, Marks, Shapes, Width, dim, joint_loras
from flame_train.networks.transformer_files import lora_component, transformer_component, transformer_layouts
from flame_train.networks.vae.names import VAE
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip import names as clip
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.t5 import names as t5
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

_ENDS: Final = lines("""
    pos_embed.pos_embed -> pos_embed
    pos_embed.proj.{p} -> x_embedder.proj.{p}
    time_text_embed.timestep_embedder.linear_1.{p} -> t_embedder.mlp.0.{p}
    time_text_embed.timestep_embedder.linear_2.{p} -> t_embedder.mlp.2.{p}
    time_text_embed.text_embedder.linear_1.{p} -> y_embedder.mlp.0.{p}
    time_text_embed.text_embedder.linear_2.{p} -> y_embedder.mlp.2.{p}
    context_embedder.{p} -> context_embedder.{p}
    proj_out.{p} -> final_layer.linear.{p}
    norm_out.linear.{p} -> final_layer.adaLN_modulation.1.{p} [swap]
""")
_IMAGE: Final = lines("""
    norm1.linear.{p} -> x_block.adaLN_modulation.1.{p}
    ff.net.0.proj.{p} -> x_block.mlp.fc1.{p}
    ff.net.2.{p} -> x_block.mlp.fc2.{p}
    attn.norm_q.weight -> x_block.attn.ln_q.weight
    attn.norm_k.weight -> x_block.attn.ln_k.weight
    attn.to_out.0.{p} -> x_block.attn.proj.{p}
    attn2.norm_q.weight -> x_block.attn2.ln_q.weight
    attn2.norm_k.weight -> x_block.attn2.ln_k.weight
    attn2.to_out.0.{p} -> x_block.attn2.proj.{p}
""")
_TEXT: Final = lines("""
    attn.norm_added_q.weight -> context_block.attn.ln_q.weight
    attn.norm_added_k.weight -> context_block.attn.ln_k.weight
""")
_TEXT_GOES_ON: Final = lines("""
    norm1_context.linear.{p} -> context_block.adaLN_modulation.1.{p}
    attn.to_add_out.{p} -> context_block.attn.proj.{p}
    ff_context.net.0.proj.{p} -> context_block.mlp.fc1.{p}
    ff_context.net.2.{p} -> context_block.mlp.fc2.{p}
""")
_TEXT_ENDS: Final = lines("norm1_context.linear.{p} -> context_block.adaLN_modulation.1.{p} [swap]")
_SPLIT: Final = lines("""
    x_block.attn.qkv.{p} -> attn.to_q.{p} attn.to_k.{p} attn.to_v.{p} [rows]
    x_block.attn2.qkv.{p} -> attn2.to_q.{p} attn2.to_k.{p} attn2.to_v.{p} [rows]
    context_block.attn.qkv.{p} -> attn.add_q_proj.{p} attn.add_k_proj.{p} attn.add_v_proj.{p} [rows]
""")


def depth_of(names: Collection[str]) -> int:
    """Returns the number of blocks among native or diffusers names."""
    return len({match[1] for name in names if (match := re.match(r"(?:joint|transformer)_blocks\.(\d+)\.", name))})


def mmdit_to_diffusers(depth: int) -> KeyMap:
    """Returns the table from native to diffusers names; its `inverse` reads a diffusers transformer.

    The last block drops the text, and the halves of its modulation are swapped, as in the final layer.
    """
    going_on = [(f"transformer_blocks.{i}.", f"joint_blocks.{i}.", "goes on") for i in range(depth - 1)]
    last = (f"transformer_blocks.{depth - 1}.", f"joint_blocks.{depth - 1}.", "ends")
    kinds = {"goes on": (*_IMAGE, *_TEXT, *_TEXT_GOES_ON), "ends": (*_IMAGE, *_TEXT, *_TEXT_ENDS)}
    whole = KeyMap(table(_ENDS, (*going_on, last), kinds)).inverse
    split = table((), [("joint_blocks.{i}.", "transformer_blocks.{i}.", "qkv")], {"qkv": _SPLIT})
    return KeyMap((*whole.rules, *split))


_DEPTHS: Final = (24, 38)
_DUAL: Final = range(13)  # of SD3.5 medium
_ROWS_GOING_ON, _ROWS_AT_THE_END = 6, 2
# in names with every dot made an underscore
_IN_BLOCK: Final = re.compile(r".*?(?:joint|transformer)_blocks_(\d+)_(.*)")
_GOES_ON: Final = re.compile(r"context_block_(attn_proj|mlp_fc)|attn_to_add_out|ff_context")
_MODULATION: Final = re.compile(
    r"(?:context_block_adaLN_modulation_1|norm1_context_linear)_lora_(?:linear_layer_)?(down|up|A|B)_(?:default_)?weight"
)


_ELSEWHERE: Final = re.compile(r"text_encoders\.clip_[lg]\.(logit_scale|transformer\.logit_scale)|model_ema\..*")
COMPONENTS: Final = (
    transformer_component(
        *transformer_layouts("joint_blocks.", "transformer_blocks.", lambda names: mmdit_to_diffusers(depth_of(names))),
    ),
    VAE,
    clip.clip_l("text_encoders.clip_l.transformer."),
    clip.clip_g("text_encoders.clip_g.transformer."),
    t5.component("text_encoder_3", (t5.SINGLE_FILE_PREFIX, "text_encoder_3/")),
)


@lru_cache(maxsize=4)
def lora_family(depth: int = 38, dual: Sequence[int] | None = None) -> LoraFamily:
    """Returns how LoRA files of SD3 and SD3.5 name their modules, for a transformer of `depth` blocks: 24 or 38.

    `dual` are the blocks whose image attends to itself too. If they are unknown (None), the names hold for every
    model of that depth. The depth counts, because in the last block the diffusers name of the text's modulation means
    other rows than in the blocks before.
    """
    transformer = modules_by_table(_layers(depth, _DUAL if dual is None else dual), mmdit_to_diffusers(depth))
    clip_l, clip_g, t5xxl = (f"text_encoders.{name}.transformer." for name in ("clip_l", "clip_g", "t5xxl"))
    encoders = (
        LoraComponent("text_encoder", "lora_te1", modules_as_they_are(clip.CLIP_L_MODULES), (clip_l,)),
        LoraComponent("text_encoder_2", "lora_te2", modules_as_they_are(clip.CLIP_G_MODULES), (clip_g,)),
        LoraComponent("text_encoder_3", "lora_te3", modules_as_they_are(t5.modules(24)), (t5xxl,)),
    )
    return LoraFamily(
        name="sd3",
        components=(
            lora_component(transformer, "lora_transformer"),
            *encoders,
        ),
        base_version="sd3",
        architecture=f"stable-diffusion-3{_model(depth, dual)}/lora",
        implementation="diffusers",
        network_module="networks.lora_sd3",
    )


def lora_family_of(shapes: Mapping[str, Shape]) -> LoraFamily:
    """Returns the names of the model that a LoRA file with these tensors was made for, as far as they identify it.

    The text's modulation has two rows to each of its inputs in the last block, six in the others: that gives the depth.
    Without it the depth is that of the smallest published model with all the modules. Every name has the same meaning
    in the larger one.
    """
    flat = {name.replace(".", "_"): shape for name, shape in shapes.items()}
    modulations = [(int(match[1]), match[2], shape) for name, shape in flat.items() if (match := _IN_BLOCK.match(name))]
    ended, needed = [], 0
    ratio = _modulations(modulations)
    for block, rest, _ in modulations:
        goes_on = _GOES_ON.match(rest) is not None or ratio.get(block) == _ROWS_GOING_ON
        needed = max(needed, block + (2 if goes_on else 1))
        if ratio.get(block) == _ROWS_AT_THE_END:
            ended.append(block + 1)
    depth = max(ended) if ended else next((d for d in _DEPTHS if d >= needed), needed)
    dual = any("_x_block_attn2_" in name or "_attn2_to_" in name for name in flat)
    return lora_family(depth, _DUAL if dual else None)


def _modulations(found: Iterable[tuple[int, str, Shape]]) -> dict[int, float]:
    """Returns block -> rows to each input of the text's modulation."""
    rows: dict[int, int] = {}
    columns: dict[int, int] = {}
    for block, rest, shape in found:
        end = _MODULATION.match(rest)
        if end and len(shape) > 1:
            if end[1] in ("up", "B"):
                rows[block] = shape[0]
            else:
                columns[block] = shape[1]
    return {block: rows[block] / columns[block] for block in rows if columns.get(block)}


def _model(depth: int, dual: Collection[int] | None) -> str:
    """Returns the model's name in sd-scripts' metadata; empty for an unknown one."""
    if depth == _DEPTHS[1]:
        return "-5-large"
    if depth != _DEPTHS[0] or dual is None:
        return ""
    return "-5-medium" if dual else "-medium"


def _layers(depth: int, dual: Collection[int]) -> Iterator[str]:
    yield from ("x_embedder.proj", "context_embedder", "final_layer.linear", "final_layer.adaLN_modulation.1")
    yield from (f"{part}_embedder.mlp.{layer}" for part in "ty" for layer in (0, 2))
    always, going_on = ("attn.qkv", "adaLN_modulation.1"), ("attn.proj", "mlp.fc1", "mlp.fc2")
    for i in range(depth):
        text = always if i + 1 == depth else (*always, *going_on)
        image = (*always, *going_on, *(("attn2.qkv", "attn2.proj") if i in dual else ()))
        for stream, parts in (("context_block", text), ("x_block", image)):
            yield from (f"joint_blocks.{i}.{stream}.{part}" for part in parts)


_NETWORKS: Final = built_by(
    transformer=(MMDiT, MMDiTArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.sd3())),
    text_encoder=(ClipTextEncoder, partial(ClipArch.from_shapes, activation="quick_gelu")),
    text_encoder_2=(ClipTextEncoder, partial(ClipArch.from_shapes, activation="gelu")),
    text_encoder_3=(T5Encoder, T5Arch.from_shapes),
)
_ALONE: Final = {"clip-l": "text_encoder", "clip-bigg": "text_encoder_2", "t5-xxl": "text_encoder_3"}
SD3_FILES: Final = FamilyFiles("sd3", COMPONENTS, _ALONE, _NETWORKS, partial(resolve, idle=_ELSEWHERE))

_SIZES: Final = ("sd3-medium", "sd35-medium", "sd35-large")
_LARGE: Final = 2432


def _mmdit(model: str, shapes: Shapes) -> tuple[str, str] | None:
    """Returns which size it is: SD3 medium does not norm queries and keys, the others differ in width."""
    if not {"joint_blocks.0.x_block.attn.ln_q.weight", "transformer_blocks.0.attn.norm_q.weight"} & shapes.keys():
        return "sd3-medium", ""
    width = dim(shapes, "joint_blocks.0.x_block.attn.qkv.weight", 1) or dim(shapes, "pos_embed.proj.weight", 0)
    return {_LARGE: "sd35-large", 1536: "sd35-medium"}.get(width or 0, "sd3"), ""


MARKS: Final = Marks(
    names={
        "sd3-medium": "SD3 medium",
        "sd35-medium": "SD3.5 medium",
        "sd35-large": "SD3.5 large",
        "sd3": "SD3 or SD3.5",
    },
    groups={"sd3": _SIZES, "sdxl-sd3": ("sd3", *_SIZES), "sd3-flux": ("sd3", *_SIZES)},
    networks=(
        Mark("sd3", "single-file", ("joint_blocks.0.x_block.attn.qkv.weight",)),
        Mark("sd3", "diffusers", ("pos_embed.proj.weight", "transformer_blocks.0.attn.add_q_proj.weight")),
    ),
    variant=_mmdit,
    loras=(
        LoraMark("sd35-medium", "joint_blocks_.*_x_block_attn2_"),
        LoraMark("sd35-large", "joint_blocks_", sizes=(Width("_x_block_attn_qkv", _LARGE),)),
        LoraMark(
            "sd35-medium",
            rf"^{JOINT}attn2_",
            lacks=rf"^{JOINT}(attn1_|norm3_linear_)",
            unless=(  # of no SD3
                *(Width("_attn2_to_[kv]", 1024), Width("_attn2_to_(q|out_0)", 2048)),
                Width("_attn2_to_([qkv]|out_0)", 3072),
            ),
        ),
        *joint_loras("sd35-large", _LARGE),
    ),
    written={
        "3[.-]5-large": "sd35-large",
        "3[.-]5-medium": "sd35-medium",
        "stable-diffusion-3-medium": "sd3-medium",
        "stable-diffusion-3|sd3": "sd3",
    },
)
