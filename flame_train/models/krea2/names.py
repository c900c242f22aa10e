"""Krea 2's names: the transformer's two layouts, the components of its files, and how LoRA files call every module.

The native names are those of the published single file. There what a block adds to the modulation is one vector, in
diffusers a matrix of six rows.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, lines, table
from flame_train.io.lora_names import LoraFamily, modules_by_table
from flame_train.models.krea2.arch import Krea2Arch
from flame_train.models.krea2.transformer import Krea2
from flame_train.networks.files.build_parts import built_by
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import LoraMark, Mark, Marks, Ratio
from flame_train.networks.transformer_files import component_of_table, lora_component
from flame_train.networks.vae.names import qwen_vae_component
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3 import names as qwen3
from flame_train.text_encoders.qwen3.network import VL_THETA, Qwen3, Qwen3Arch
from flame_train.text_encoders.qwen3.vision import VisionArch, VisionTower

_ENDS: Final = lines("""
    first.{p} -> img_in.{p}
    tmlp.0.{p} -> time_embed.linear_1.{p}
    tmlp.2.{p} -> time_embed.linear_2.{p}
    tproj.1.{p} -> time_mod_proj.{p}
    txtmlp.0.scale -> txt_in.norm.weight
    txtmlp.1.{p} -> txt_in.linear_1.{p}
    txtmlp.3.{p} -> txt_in.linear_2.{p}
    txtfusion.projector.weight -> text_fusion.projector.weight
    last.linear.{p} -> final_layer.linear.{p}
    last.norm.scale -> final_layer.norm.weight
    last.modulation.lin -> final_layer.scale_shift_table
""")
_TEXT_BLOCK: Final = lines("""
    attn.wq.weight -> attn.to_q.weight
    attn.wk.weight -> attn.to_k.weight
    attn.wv.weight -> attn.to_v.weight
    attn.gate.weight -> attn.to_gate.weight
    attn.wo.weight -> attn.to_out.0.weight
    attn.qknorm.qnorm.scale -> attn.norm_q.weight
    attn.qknorm.knorm.scale -> attn.norm_k.weight
    mlp.gate.weight -> ff.gate.weight
    mlp.up.weight -> ff.up.weight
    mlp.down.weight -> ff.down.weight
    prenorm.scale -> norm1.weight
    postnorm.scale -> norm2.weight
""")
_BLOCK: Final = (*_TEXT_BLOCK, *lines("mod.lin -> scale_shift_table [six_rows]"))
_TEXT_STACKS: Final = ("layerwise_blocks", "refiner_blocks")


def transformer_to_diffusers() -> KeyMap:
    """Returns the table from native to diffusers names, for any depth; its `inverse` goes back."""
    text = [(f"txtfusion.{stack}.{{i}}.", f"text_fusion.{stack}.{{i}}.", "text") for stack in _TEXT_STACKS]
    blocks = [*text, ("blocks.{i}.", "transformer_blocks.{i}.", "block")]
    return KeyMap(table(_ENDS, blocks, {"text": _TEXT_BLOCK, "block": _BLOCK}))


COMPONENTS: Final = (
    component_of_table("txtfusion.projector.", "text_fusion.projector.", transformer_to_diffusers),
    qwen_vae_component(),
    qwen3.vl_vision_component("qwen3vl_4b"),
    qwen3.vl_component("qwen3vl_4b"),
)


def base_modules() -> tuple[str, ...]:
    """Returns native paths of the transformer's linear layers: 264 in Krea 2."""
    ends = ("first", "tmlp.0", "tmlp.2", "tproj.1", "txtmlp.1", "txtmlp.3", "txtfusion.projector", "last.linear")
    blocks = {"txtfusion.layerwise_blocks": 2, "txtfusion.refiner_blocks": 2, "blocks": 28}
    parts = (*(f"attn.{name}" for name in ("wq", "wk", "wv", "gate", "wo")), "mlp.gate", "mlp.up", "mlp.down")
    return *ends, *(f"{stack}.{i}.{part}" for stack, count in blocks.items() for i in range(count) for part in parts)


@lru_cache(maxsize=1)
def lora_family() -> LoraFamily:
    """Returns how LoRA files of Krea 2 name modules; ai-toolkit's first have native paths below `base_model.model.`."""
    modules = modules_by_table(base_modules(), transformer_to_diffusers())
    return LoraFamily(
        name="krea2",
        components=(lora_component(modules),),
        base_version="krea2",
        architecture="Krea-2/lora",
        implementation="https://github.com/krea-ai/krea-2",
        network_module="networks.lora_krea2",
    )


_NETWORKS: Final = built_by(
    transformer=(Krea2, Krea2Arch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.qwen_image())),
    vision=(VisionTower, VisionArch.from_shapes),
    text_encoder=(Qwen3, partial(Qwen3Arch.from_shapes, theta=VL_THETA)),
)
KREA2_FILES: Final = FamilyFiles("krea2", COMPONENTS, {"qwen3-vl-4b": "text_encoder"}, _NETWORKS)

# layers that no other model has, their paths' dots made underscores, behind any trainer's prefix
_OWN: Final = (
    r"^(.*_)?((transformer_)?blocks_\d+_(attn_(w[qkvo]|gate|to_gate)|(mlp|ff)_(gate|up|down))|txtfusion_.*"
    r"|text_fusion_.*|tmlp_[02]|tproj_1|txtmlp_[13]|time_mod_proj)_[^_]"
)
MARKS: Final = Marks(
    names={"krea2": "Krea 2"},
    groups={"qwen-wan": ("krea2",)},
    networks=(
        Mark("krea2", "single-file", ("txtfusion.projector.weight",)),
        Mark("krea2", "diffusers", ("text_fusion.projector.weight",)),
    ),
    loras=(
        LoraMark("krea2", _OWN),
        # four heads of queries share one of keys and values
        LoraMark("krea2", sizes=(Ratio(r"_transformer_blocks_\d+_attn_to_[kv]", 1 / 4),)),
    ),
    written={"krea[- ]?2": "krea2"},
)
