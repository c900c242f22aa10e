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
from flame_train.models.qwenimage import vae
from flame_train.models.qwenimage.arch import QwenImageArch
from flame_train.models.qwenimage.transformer import QwenImage
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import JOINT, LoraMark, Mark, Marks, Width
from flame_train.networks.files.parts import built_by
from flame_train.networks.transformer_files import component_of_table, lora_component
from flame_train.networks.vae.names_qwen import nested_vae_component
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3 import names as qwen3
from flame_train.text_encoders.qwen3.network import VL_THETA, Qwen3, Qwen3Arch
from flame_train.text_encoders.qwen3.vision import VisionArch, VisionTower

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


_NETWORKS: Final = built_by(
    transformer=(QwenImage, QwenImageArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=vae.PUBLISHED)),
    vision=(VisionTower, VisionArch.from_shapes),
    text_encoder=(Qwen3, partial(Qwen3Arch.from_shapes, theta=VL_THETA)),
)
_ALONE: Final = {"qwen3-vl-8b": "text_encoder"}
QWENIMAGE_FILES: Final = FamilyFiles("qwenimage", COMPONENTS, resolve, _ALONE, _NETWORKS)

_WIDTH: Final = 4096
_FUSED: Final = "transformer_blocks.0.img_mlp.gate_up.weight"
# what no other model's layers are called, their paths' dots made underscores, behind any trainer's prefix
_OWN: Final = r"^(.*_)?(transformer_blocks_\d+_img_mlp_(gate_up|gate_layer|proj|out)|txt_in_(in|out)_layer)_[^_]"
MARKS: Final = Marks(
    names={"qwenimage": "Qwen-Image 2.1"},
    networks=(
        Mark("qwenimage", "single-file", ("txt_in.text_norm.weight", _FUSED)),
        Mark("qwenimage", "diffusers", ("txt_in.text_norm.weight",), lacks=(_FUSED,)),
    ),
    loras=(
        LoraMark("qwenimage", _OWN),
        # attention alone is of this width; there is no second stream, and no other kind of block or MLP
        LoraMark(
            "qwenimage",
            lacks=rf"^{JOINT}(.*_)?(add|attn2)_|(double|single|single_transformer)_blocks_|_ff_",
            sizes=(Width(r"_transformer_blocks_\d+_attn_to_([qkv]|out_0)", _WIDTH),),
        ),
    ),
    written={r"qwen_image_2|qwen-image-2\.1": "qwenimage"},
)
