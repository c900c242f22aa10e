"""Qwen-Image 2.1's names: the transformer's two layouts, the components of its files, and how LoRA files call modules.

The native names are those of the single file that ComfyUI reads. There one matrix makes gate and value of the gated
network, and diffusers has one for each. All other names are the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, lines, table
from flame_train.io.lora_names import LoraFamily, modules_by_table
from flame_train.models.qwenimage.arch import QwenImageArch
from flame_train.models.qwenimage.transformer import QwenImage
from flame_train.networks.files.build_parts import built_by
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import JOINT, LoraMark, Mark, Marks, Width
from flame_train.networks.transformer_files import component_of_table, lora_component
from flame_train.networks.vae.names import nested_vae_component
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3 import names as qwen3
from flame_train.text_encoders.qwen3.network import VL_THETA, Qwen3, Qwen3Arch
from flame_train.text_encoders.qwen3.vision import VisionArch, VisionTower

# of its latents, channel by channel, as its config.json states them
_MEAN: Final = (
    *(0.5126, 0.7721, -0.0631, 1.3506, -0.7855, -2.1025, -0.3458, 1.3722),
    *(1.8873, -1.7177, -0.651, 0.2732, 0.7562, -0.6163, -1.0277, 3.8363),
    *(2.021, 0.0472, 0.932, 2.0087, 2.4954, -0.1391, -1.4249, 1.8464),
    *(-0.5236, 1.2826, 3.7046, -1.3035, 2.7286, -1.4518, -1.9036, -1.9955),
    *(-0.0342, -1.0265, -0.7636, 3.0555, 0.0746, -3.0751, -0.1076, 1.7376),
    *(-1.0914, -1.9435, -0.2784, -1.368, 0.4809, -0.4433, 0.3764, 0.5729),
    *(-2.0595, 1.096, -1.326, -2.0211, -5.0179, 0.5275, 4.0162, 1.8505),
    *(0.3026, 1.9373, 1.4937, 0.2632, 0.5547, -1.7121, -0.1562, 0.0304),
)
_STD: Final = (
    *(3.2001, 3.2936, 3.4321, 3.0091, 3.1061, 4.0379, 4.0705, 3.791),
    *(3.0785, 3.65, 3.9308, 3.0904, 2.8778, 3.7675, 3.732, 5.0756),
    *(3.2864, 4.0397, 3.1317, 4.0443, 2.9249, 3.9454, 3.0988, 4.2489),
    *(3.4896, 3.8513, 3.9323, 3.4719, 3.7498, 4.283, 3.5694, 4.2467),
    *(3.9037, 3.2947, 5.077, 3.5075, 3.27, 3.4767, 2.8063, 5.1125),
    *(3.5327, 4.7833, 3.1286, 4.1819, 3.8527, 3.8312, 3.5605, 4.3875),
    *(3.9624, 4.0168, 3.5643, 4.055, 5.5614, 4.2963, 4.408, 3.4959),
    *(3.8747, 3.7608, 3.5735, 3.149, 3.7662, 3.6746, 3.4563, 3.8161),
)

PUBLISHED_VAE: Final = VaeArch(
    channels=96,
    decoder_channels=144,
    channel_mult=(1, 2, 4, 8, 8),
    latent_channels=64,
    pixel_channels=4,
    scaling_factor=1.0,
    groups=0,
    latents_mean=_MEAN,
    latents_std=_STD,
    frames=(1, 2, 2, 2),
)
"""A latent pixel stands for 16 x 16 pixels."""
TINY_VAE: Final = replace(PUBLISHED_VAE, channels=8, decoder_channels=12, num_res_blocks=1)
"""The same structure, small enough for a CPU."""


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
    """Returns the table from native to diffusers names, for any depth; its `inverse` goes back."""
    ends = [f"{name}.weight -> {name}.weight" for name in (*_ENDS, "txt_in.text_norm")]
    blocks = [("transformer_blocks.{i}.", "transformer_blocks.{i}.", "block")]
    return KeyMap(table(lines("\n".join(ends)), blocks, {"block": _BLOCK}))


COMPONENTS: Final = (
    component_of_table(".img_mlp.gate_up.", ".img_mlp.gate_layer.", transformer_to_diffusers),
    nested_vae_component(),
    qwen3.vl_vision_component("qwen3vl_8b"),
    qwen3.vl_component("qwen3vl_8b"),
)


def base_modules() -> tuple[str, ...]:
    """Returns native paths of the transformer's linear layers: 200 in Qwen-Image 2.1."""
    return *_ENDS, *(f"transformer_blocks.{i}.{part}" for i in range(32) for part in _LINEAR)


@lru_cache(maxsize=1)
def lora_family() -> LoraFamily:
    """Returns how LoRA files of Qwen-Image 2.1 name their modules.

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
    vae=(Vae, partial(VaeArch.from_shapes, published=PUBLISHED_VAE)),
    vision=(VisionTower, VisionArch.from_shapes),
    text_encoder=(Qwen3, partial(Qwen3Arch.from_shapes, theta=VL_THETA)),
)
_ALONE: Final = {"qwen3-vl-8b": "text_encoder"}
QWENIMAGE_FILES: Final = FamilyFiles("qwenimage", COMPONENTS, _ALONE, _NETWORKS)

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
