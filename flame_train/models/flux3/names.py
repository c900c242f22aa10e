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
from flame_train.models.flux3.transformer import Flux3, Flux3Arch
from flame_train.networks.files.build_parts import built_by
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import LoraMark, Mark, Marks
from flame_train.networks.transformer_files import component_of_table, lora_component
from flame_train.networks.vae.names import FLUX2_VAE
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3 import names as qwen3
from flame_train.text_encoders.qwen3.network import VL_THETA, Qwen3, Qwen3Arch

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
    """Returns the table from native to diffusers names, for any depth; its `inverse` goes back."""
    blocks = [(f"{here}.{{i}}.", f"{there}.{{i}}.", "block") for here, there in _STACKS.items()]
    return KeyMap(table(_ENDS, blocks, {"block": _BLOCK}))


COMPONENTS: Final = (
    component_of_table(
        "content_mode_blocks.",
        "single_transformer_blocks.",
        transformer_to_diffusers,
        unused=r"repa_projectors\..*",  # of training alone
    ),
    FLUX2_VAE,
    qwen3.vl_component("qwen3vl_4b"),
)


def base_modules(depth: int = 5, single_depth: int = 28) -> tuple[str, ...]:
    """Returns native paths of the transformer's linear layers: 271 in klein base."""
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
    """Returns how LoRA files of FLUX.3 klein name their modules."""
    modules = modules_by_table(base_modules(depth, single_depth), transformer_to_diffusers())
    return LoraFamily(
        name="flux3",
        components=(lora_component(modules, "lora_transformer"),),
        base_version="flux3",
        architecture="flux-3-image-klein/lora",
        implementation="https://github.com/black-forest-labs/flux-3-image-klein",
        network_module="networks.lora_flux_3",
    )


_NETWORKS: Final = built_by(
    transformer=(Flux3, Flux3Arch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.flux2())),
    text_encoder=(Qwen3, partial(Qwen3Arch.from_shapes, theta=VL_THETA)),
)
FLUX3_FILES: Final = FamilyFiles("flux3", COMPONENTS, {"qwen3-vl-4b": "text_encoder"}, _NETWORKS)

# layers that no other model has, their paths' dots made underscores, behind any trainer's prefix
_OWN: Final = (
    r"^(.*_)?((content_)?mode_blocks_image(_cond)?_\d+|txt_mode_blocks_\d+"
    r"|single_blocks_\d+_([qkv]_proj|attn_out|mlp_(in|out))"
    r"|single_transformer_blocks_\d+_(attn_to_out_0|ff_linear_(in|out))"
    r"|(early|single)_stream_modulations_(image|image_cond|txt))_"
)
_DISTILLED: Final = ", distilled to few steps"
_SINGLE_FILE, _DIFFUSERS = (f"early_stream_modulations.image.{end}.weight" for end in ("lin", "linear"))
_TOLD: Final = ("ref_time_in.in_layer.weight", "target_timestep_embedder.linear_1.weight")
MARKS: Final = Marks(
    names={"flux3": "FLUX.3 klein"},
    groups={"flux2-flux3": ("flux3",)},  # whose VAE is FLUX.2's
    # a LoRA of the joint blocks' queries, keys and values alone has Flux.1's width, and its names in diffusers' layout
    also_reads={"flux3": ("flux",)},
    networks=(
        Mark("flux3", "single-file", (_SINGLE_FILE, _TOLD[0]), note=_DISTILLED),
        Mark("flux3", "single-file", (_SINGLE_FILE,), lacks=_TOLD[:1]),
        Mark("flux3", "diffusers", (_DIFFUSERS, _TOLD[1]), note=_DISTILLED),
        Mark("flux3", "diffusers", (_DIFFUSERS,), lacks=_TOLD[1:]),
    ),
    loras=(LoraMark("flux3", _OWN),),
    written={"flux[.-]?3": "flux3"},
)
