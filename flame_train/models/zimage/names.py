"""Z-Image's names: the transformer's two layouts, the components of its files, and how LoRA files call every module.

The native names are those of the published single file. There queries, keys and values are one matrix, and diffusers
has one for each. diffusers names the embedder and the final layer after the size of a patch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, lines, table
from flame_train.io.lora_names import LoraFamily, modules_by_table
from flame_train.models.zimage.transformer import ZImage, ZImageArch
from flame_train.networks.files.build_parts import built_by
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import LoraMark, Mark, Marks, Width
from flame_train.networks.transformer_files import component_of_table, lora_component
from flame_train.networks.vae.names import VAE
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.qwen3 import names as qwen3
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch

_ENDS: Final = lines("""
    x_embedder.{p} -> all_x_embedder.2-1.{p}
    x_pad_token -> x_pad_token
    cap_pad_token -> cap_pad_token
    cap_embedder.0.weight -> cap_embedder.0.weight
    cap_embedder.1.{p} -> cap_embedder.1.{p}
    t_embedder.mlp.0.{p} -> t_embedder.mlp.0.{p}
    t_embedder.mlp.2.{p} -> t_embedder.mlp.2.{p}
    final_layer.linear.{p} -> all_final_layer.2-1.linear.{p}
    final_layer.adaLN_modulation.1.{p} -> all_final_layer.2-1.adaLN_modulation.1.{p}
""")
_BLOCK: Final = lines("""
    attention.qkv.weight -> attention.to_q.weight attention.to_k.weight attention.to_v.weight [rows]
    attention.out.weight -> attention.to_out.0.weight
    attention.q_norm.weight -> attention.norm_q.weight
    attention.k_norm.weight -> attention.norm_k.weight
    feed_forward.w1.weight -> feed_forward.w1.weight
    feed_forward.w2.weight -> feed_forward.w2.weight
    feed_forward.w3.weight -> feed_forward.w3.weight
    attention_norm1.weight -> attention_norm1.weight
    attention_norm2.weight -> attention_norm2.weight
    ffn_norm1.weight -> ffn_norm1.weight
    ffn_norm2.weight -> ffn_norm2.weight
    adaLN_modulation.0.{p} -> adaLN_modulation.0.{p}
""")
_STACKS: Final = ("noise_refiner", "context_refiner", "layers")


def transformer_to_diffusers() -> KeyMap:
    """Returns the table from native to diffusers names, for any depth; its `inverse` goes back."""
    blocks = [(f"{stack}.{{i}}.", f"{stack}.{{i}}.", "block") for stack in _STACKS]
    return KeyMap(table(_ENDS, blocks, {"block": _BLOCK}))


COMPONENTS: Final = (
    component_of_table(
        ".attention.qkv.",
        ".attention.to_q.",
        transformer_to_diffusers,
        unused=r"norm_final\.weight",  # of the code that Z-Image's began from
    ),
    VAE,
    qwen3.component("text_encoder", ("text_encoders.qwen3_4b.transformer.model.", "text_encoder/model.", "model.")),
)


def base_modules() -> tuple[str, ...]:
    """Returns native paths of the transformer's linear layers: 209 in Z-Image."""
    return tuple(_linears())


def _linears(depth: int = 30, refiners: int = 2) -> Iterator[str]:
    yield from ("x_embedder", "cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2")
    yield from ("final_layer.linear", "final_layer.adaLN_modulation.1")
    for stack, blocks in zip(_STACKS, (refiners, refiners, depth), strict=True):
        for i in range(blocks):
            parts = ("attention.qkv", "attention.out", *(f"feed_forward.w{n}" for n in (1, 2, 3)))
            modulation = () if stack == "context_refiner" else ("adaLN_modulation.0",)
            yield from (f"{stack}.{i}.{part}" for part in (*parts, *modulation))


@lru_cache(maxsize=1)
def lora_family() -> LoraFamily:
    """Returns how LoRA files of Z-Image name modules; ComfyUI reads diffusers' paths below its prefix too."""
    modules = modules_by_table(base_modules(), transformer_to_diffusers())
    return LoraFamily(
        name="zimage",
        components=(lora_component(modules),),
        base_version="zimage",
        architecture="Z-Image/lora",
        implementation="https://github.com/Tongyi-MAI/Z-Image",
        network_module="networks.lora_zimage",
    )


_NETWORKS: Final = built_by(
    transformer=(ZImage, ZImageArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.flux())),
    text_encoder=(Qwen3, Qwen3Arch.from_shapes),
)
ZIMAGE_FILES: Final = FamilyFiles("zimage", COMPONENTS, {"qwen3-4b": "text_encoder"}, _NETWORKS)

# a layer of a block, its path's dots made underscores, behind any trainer's prefix
_IN_BLOCK: Final = r"^(.*_)?(layers|noise_refiner|context_refiner)_\d+_(attention|feed_forward|adaLN)_"
_SINGLE_FILE: Final = "noise_refiner.0.attention.qkv.weight"
MARKS: Final = Marks(
    names={"zimage": "Z-Image", "lumina2": "Lumina 2"},
    groups={"sd3-flux": ("zimage",)},  # whose VAE is Flux.1's
    networks=(
        Mark("zimage", "single-file", (_SINGLE_FILE, "cap_pad_token")),
        Mark("lumina2", "single-file", (_SINGLE_FILE,), lacks=("cap_pad_token",)),
        Mark("zimage", "diffusers", ("noise_refiner.0.attention.to_q.weight", "all_x_embedder.2-1.weight")),
    ),
    loras=(
        LoraMark("lumina2", _IN_BLOCK, sizes=(Width("_feed_forward_w[13]", 2304),)),
        LoraMark("zimage", _IN_BLOCK),
    ),
    written={"z-image|zimage": "zimage", "lumina": "lumina2"},
)
