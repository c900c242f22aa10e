"""Wan 2.2's names: the transformer's two layouts, the components of its files, and how LoRA files call every module.

The native names are those of the single file, the original's and ComfyUI's. Its `norm3` is diffusers' `norm2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, lines, table
from flame_train.io.lora_names import LoraFamily, modules_by_table
from flame_train.io.resolve import resolve
from flame_train.models.wan.transformer import Wan, WanArch
from flame_train.networks.files.build_parts import built_by
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import JOINT, LoraMark, Mark, Marks, Ratio, Shapes, Width, dim
from flame_train.networks.transformer_files import component_of_table, lora_component
from flame_train.networks.vae.names import nested_vae_component
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.t5 import names as t5
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

# of its latents, channel by channel, as its config.json states them
_MEAN: Final = (
    *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557),
    *(-0.1382, 0.0542, 0.2813, 0.0891, 0.157, -0.0098, 0.0375, -0.1825),
    *(-0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
    *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123),
    *(-0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.052, 0.3748),
    *(0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
)
_STD: Final = (
    *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013),
    *(0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978),
    *(0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
    *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093),
    *(0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887),
    *(0.3971, 1.06, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
)
PUBLISHED_VAE: Final = VaeArch(
    channels=160,
    decoder_channels=256,
    latent_channels=48,
    scaling_factor=1.0,
    groups=0,
    latents_mean=_MEAN,
    latents_std=_STD,
    pixel_patch=2,
    frames=(1, 2, 2),
    taps=3,
)
"""A latent pixel stands for 16 x 16 pixels, and for four frames of a film but the first."""
TINY_VAE: Final = replace(PUBLISHED_VAE, channels=8, decoder_channels=16, num_res_blocks=1)
"""The same structure, small enough for a CPU."""

_ENDS: Final = lines("""
    patch_embedding.{p} -> patch_embedding.{p}
    text_embedding.0.{p} -> condition_embedder.text_embedder.linear_1.{p}
    text_embedding.2.{p} -> condition_embedder.text_embedder.linear_2.{p}
    time_embedding.0.{p} -> condition_embedder.time_embedder.linear_1.{p}
    time_embedding.2.{p} -> condition_embedder.time_embedder.linear_2.{p}
    time_projection.1.{p} -> condition_embedder.time_proj.{p}
    head.head.{p} -> proj_out.{p}
    head.modulation -> scale_shift_table
""")
_BLOCK: Final = lines("""
    self_attn.q.{p} -> attn1.to_q.{p}
    self_attn.k.{p} -> attn1.to_k.{p}
    self_attn.v.{p} -> attn1.to_v.{p}
    self_attn.o.{p} -> attn1.to_out.0.{p}
    self_attn.norm_q.weight -> attn1.norm_q.weight
    self_attn.norm_k.weight -> attn1.norm_k.weight
    cross_attn.q.{p} -> attn2.to_q.{p}
    cross_attn.k.{p} -> attn2.to_k.{p}
    cross_attn.v.{p} -> attn2.to_v.{p}
    cross_attn.o.{p} -> attn2.to_out.0.{p}
    cross_attn.norm_q.weight -> attn2.norm_q.weight
    cross_attn.norm_k.weight -> attn2.norm_k.weight
    norm3.{p} -> norm2.{p}
    ffn.0.{p} -> ffn.net.0.proj.{p}
    ffn.2.{p} -> ffn.net.2.{p}
    modulation -> scale_shift_table
""")


def transformer_to_diffusers() -> KeyMap:
    """Returns the table from native to diffusers names, for any depth; its `inverse` goes back."""
    return KeyMap(table(_ENDS, [("blocks.{i}.", "blocks.{i}.", "block")], {"block": _BLOCK}))


COMPONENTS: Final = (
    component_of_table(".self_attn.", ".attn1.", transformer_to_diffusers),
    nested_vae_component(films=True),
    t5.component("text_encoder", ("text_encoders.umt5xxl.transformer.", "text_encoder/")),
)


def base_modules(depth: int = 30) -> tuple[str, ...]:
    """Returns native paths of the transformer's linear layers: 306 in TI2V-5B."""
    return tuple(_linears(depth))


def _linears(depth: int) -> Iterator[str]:
    yield from ("text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2")
    yield from ("time_projection.1", "head.head")
    for i in range(depth):
        yield from (f"blocks.{i}.{attn}.{part}" for attn in ("self_attn", "cross_attn") for part in "qkvo")
        yield from (f"blocks.{i}.ffn.{n}" for n in (0, 2))


@lru_cache(maxsize=1)
def lora_family() -> LoraFamily:
    """Returns how LoRA files of Wan 2.2 TI2V-5B name their modules."""
    return LoraFamily(
        name="wan",
        components=(lora_component(modules_by_table(base_modules(), transformer_to_diffusers())),),
        base_version="wan2.2_ti2v_5b",
        architecture="wan2.2-ti2v-5b/lora",
        implementation="https://github.com/Wan-Video/Wan2.2",
        network_module="networks.lora_wan",
    )


_NETWORKS: Final = built_by(
    transformer=(Wan, WanArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=PUBLISHED_VAE)),
    text_encoder=(T5Encoder, T5Arch.from_shapes),
)
_SORT: Final = partial(resolve, idle=t5.ELSEWHERE)
WAN_FILES: Final = FamilyFiles("wan", COMPONENTS, {"umt5-xxl": "text_encoder"}, _NETWORKS, _SORT)

_WIDTH: Final = 3072
_CHANNELS: Final = 48  # of TI2V-5B's latents, in and out
_INPUTS: Final = ("img_emb.*", "condition_embedder.image_embedder.*", "vace_*", "face_adapter.*", "motion_encoder.*")


def _variant(model: str, shapes: Shapes) -> tuple[str, str]:
    """Returns which Wan a transformer is: all have the same blocks."""
    if any(name.startswith(part.removesuffix("*")) for part in _INPUTS for name in shapes):
        return "wan-inputs", ""
    return {_CHANNELS: model, 16: "wan-a14b"}.get(dim(shapes, "patch_embedding.weight", 1) or 0, "wan-inputs"), ""


# how a layer of a block is called in native names and in diffusers', every dot an underscore; others go on otherwise
_NATIVE_LAYER, _DIFFUSERS_LAYER = r"(self|cross)_attn_[qkvo]|ffn_[02]", r"attn[12]_to_([qkv]|out_0)|ffn_net_(0_proj|2)"
_IN_BLOCK: Final = rf"^(.*_)?(?<!transformer_)blocks_\d+_({_NATIVE_LAYER}|{_DIFFUSERS_LAYER})_(lora|hada|lokr)_"
_MLP: Final = rf"^{JOINT}ffn_net_(0_proj|2)_(lora|hada|lokr)_"
_ATTENTION: Final = rf"^{JOINT}attn[12]_to_([qkv]|out_0)_(lora|hada|lokr)_"
_AS_WIDE: Final = r"blocks_\d+_((self|cross)_attn_[qkvo]|attn1_to_([qkv]|out_0)|ffn_0|ffn_net_0_proj)"
_TO_TEXT: Final = r"blocks_\d+_attn2_to_([qkv]|out_0)"  # SD3.5 medium's are called so too, in diffusers
_HIDDEN: Final = r"blocks_\d+_(ffn_2|ffn_net_2)"
_ANY: Final = f"{_IN_BLOCK}|{_MLP}|{_ATTENTION}"
MARKS: Final = Marks(
    names={
        "wan": "Wan 2.2 TI2V-5B",
        "wan-a14b": "Wan 2.1 or Wan 2.2 A14B",
        "wan-inputs": "Wan with further inputs (I2V, VACE or Animate)",
    },
    networks=(
        Mark("wan", "single-file", ("head.modulation", "patch_embedding.weight")),
        Mark("wan", "diffusers", ("condition_embedder.time_proj.weight", "blocks.0.scale_shift_table")),
    ),
    variant=_variant,
    loras=(
        *(LoraMark("wan-a14b", _ANY, sizes=(Width(_AS_WIDE, width),)) for width in (5120, 1536)),
        *(LoraMark("wan-a14b", _ANY, sizes=(Width(_HIDDEN, width),)) for width in (13824, 8960)),
        LoraMark("wan", f"{_IN_BLOCK}|{_MLP}"),
        LoraMark("wan", rf"^{JOINT}attn1_", sizes=(Ratio("_attn2_to_k", 1),)),  # which is 2 in Anima
        *(LoraMark("wan", _ATTENTION, sizes=(Width(layer, _WIDTH),)) for layer in (_AS_WIDE, _TO_TEXT)),
    ),
    written={r"wan-?2[._]2[-_]ti2v|wan22[-_]5b": "wan", r"wan-?2[._][12]|wan2[12]": "wan-a14b"},
    t5="text_encoder",
)
