"""SD3's and SD3.5's names: components, layouts, and how LoRA files call every module.

The native names are those of the single files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from flame_train.io.keymap import Shape
from flame_train.io.lora_names import LoraComponent, LoraFamily, modules_as_they_are, modules_by_table
from flame_train.io.resolve import Resolved
from flame_train.io.resolve import resolve as resolve_components
from flame_train.models.sd3.keys_mmdit import depth_of, mmdit_to_diffusers
from flame_train.models.sdxl import keys as sdxl
from flame_train.models.sdxl.keys_modules import base_modules
from flame_train.networks.transformer_files import lora_component, transformer_component, transformer_layouts
from flame_train.text_encoders.t5 import names as t5

_DEPTHS: Final = (24, 38)
_DUAL: Final = range(13)  # of SD3.5 medium
_ROWS_GOING_ON, _ROWS_AT_THE_END = 6, 2
# in names with every dot made an underscore
_IN_BLOCK: Final = re.compile(r".*?(?:joint|transformer)_blocks_(\d+)_(.*)")
_GOES_ON: Final = re.compile(r"context_block_(attn_proj|mlp_fc)|attn_to_add_out|ff_context")
_MODULATION: Final = re.compile(
    r"(?:context_block_adaLN_modulation_1|norm1_context_linear)_lora_(?:linear_layer_)?(down|up|A|B)_(?:default_)?weight"
)


_SDXL: Final = {component.name: component for component in sdxl.COMPONENTS}
_ELSEWHERE: Final = re.compile(r"text_encoders\.clip_[lg]\.(logit_scale|transformer\.logit_scale)|model_ema\..*")
COMPONENTS: Final = (
    transformer_component(
        *transformer_layouts("joint_blocks.", "transformer_blocks.", lambda names: mmdit_to_diffusers(depth_of(names))),
    ),
    _SDXL["vae"],
    replace(_SDXL["text_encoder"], prefixes=("text_encoders.clip_l.transformer.", "text_encoder/")),
    replace(_SDXL["text_encoder_2"], prefixes=("text_encoders.clip_g.transformer.", "text_encoder_2/")),
    t5.component("text_encoder_3", (t5.SINGLE_FILE_PREFIX, "text_encoder_3/")),
)


def resolve(names: Iterable[str], only: str | None = None) -> Resolved:
    """Which tensor of a file, or of a diffusers folder, is which native tensor of which component.

    `names` as `open_weights` gives them. `only` ("transformer", "vae", "text_encoder", "text_encoder_2",
    "text_encoder_3") says that the file holds that component alone. Text encoders' native names are those of
    transformers, the others' those of the single file.
    """
    all_names = set(names)
    idle = {name for name in all_names if _ELSEWHERE.fullmatch(name)}
    found = resolve_components(COMPONENTS, all_names - idle, only)
    return replace(found, ignored=(*found.ignored, *sorted(idle)))


@lru_cache(maxsize=4)
def lora_family(depth: int = 38, dual: Sequence[int] | None = None) -> LoraFamily:
    """How LoRA files of SD3 and SD3.5 name their modules, for a transformer of `depth` blocks: 24 or 38.

    `dual` are the blocks whose image attends to itself too. If they are unknown (None), the names hold for every
    model of that depth. The depth counts, because in the last block the diffusers name of the text's modulation means
    other rows than in the blocks before.
    """
    transformer = modules_by_table(_layers(depth, _DUAL if dual is None else dual), mmdit_to_diffusers(depth))
    text = base_modules()
    clip_l, clip_g, t5xxl = (f"text_encoders.{name}.transformer." for name in ("clip_l", "clip_g", "t5xxl"))
    encoders = (
        LoraComponent("text_encoder", "lora_te1", modules_as_they_are(text["text_encoder"]), (clip_l,)),
        LoraComponent("text_encoder_2", "lora_te2", modules_as_they_are(text["text_encoder_2"]), (clip_g,)),
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
    """The names of the model that a LoRA file with these tensors was made for, as far as they identify it.

    The text's modulation has two rows to each of its inputs in the last block, six in the others: that gives the depth.
    Without it the depth is that of the smallest published model with all the modules. Every name has the same meaning
    in the larger one.
    """
    flat = {name.replace(".", "_"): shape for name, shape in shapes.items()}
    found = [(int(match[1]), match[2], shape) for name, shape in flat.items() if (match := _IN_BLOCK.match(name))]
    ended, needed = [], 0
    ratio = _modulations(found)
    for block, rest, _ in found:
        goes_on = _GOES_ON.match(rest) is not None or ratio.get(block) == _ROWS_GOING_ON
        needed = max(needed, block + (2 if goes_on else 1))
        if ratio.get(block) == _ROWS_AT_THE_END:
            ended.append(block + 1)
    depth = max(ended) if ended else next((d for d in _DEPTHS if d >= needed), needed)
    dual = any("_x_block_attn2_" in name or "_attn2_to_" in name for name in flat)
    return lora_family(depth, _DUAL if dual else None)


def _modulations(found: Iterable[tuple[int, str, Shape]]) -> dict[int, float]:
    """Block -> rows to each input of the text's modulation."""
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
    """The model's name in sd-scripts' metadata; empty for an unknown one."""
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
