"""Chroma's names: the transformer's two layouts, the components of its files, and how LoRA files call every module.

The native names are those of the published single file, which are Flux.1's but for the modulation.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, lines, table
from flame_train.io.lora_names import LoraComponent, LoraFamily, modules_as_they_are, modules_by_table
from flame_train.models.chroma.transformer import Chroma, ChromaArch
from flame_train.models.flux.names import blocks_to_diffusers
from flame_train.networks.files.build_parts import built_by
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import LoraMark, Mark, Marks
from flame_train.networks.transformer_files import component_of_table, lora_component
from flame_train.networks.vae.names import VAE
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.t5 import names as t5
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

_APPROXIMATOR: Final = "distilled_guidance_layer."
_ENDS: Final = lines("""
    img_in.{p} -> x_embedder.{p}
    txt_in.{p} -> context_embedder.{p}
    distilled_guidance_layer.in_proj.{p} -> distilled_guidance_layer.in_proj.{p}
    distilled_guidance_layer.out_proj.{p} -> distilled_guidance_layer.out_proj.{p}
    final_layer.linear.{p} -> proj_out.{p}
""")
_LAYERS: Final = lines("""
    layers.{i}.in_layer.{p} -> layers.{i}.linear_1.{p}
    layers.{i}.out_layer.{p} -> layers.{i}.linear_2.{p}
    norms.{i}.scale -> norms.{i}.weight
""")


def transformer_to_diffusers() -> KeyMap:
    """Returns the table from native to diffusers names, for any depth; its `inverse` goes back."""
    ends = table(_ENDS, [(_APPROXIMATOR, _APPROXIMATOR, "layer")], {"layer": _LAYERS})
    return KeyMap((*ends, *blocks_to_diffusers(modulated=False)))


COMPONENTS: Final = (
    component_of_table("double_blocks.", "single_transformer_blocks.", transformer_to_diffusers),
    VAE,
    t5.component("text_encoder", (t5.SINGLE_FILE_PREFIX, "text_encoder/")),
)


def base_modules() -> dict[str, tuple[str, ...]]:
    """Returns component -> native paths of its linear layers: 281 in the transformer, 168 in T5-XXL."""
    return {"transformer": tuple(_linears()), "text_encoder": t5.modules(24)}


def _linears(double: int = 19, single: int = 38, layers: int = 5) -> Iterator[str]:
    yield from ("img_in", "txt_in", "final_layer.linear")
    yield from (f"{_APPROXIMATOR}{part}_proj" for part in ("in", "out"))
    yield from (f"{_APPROXIMATOR}layers.{i}.{part}_layer" for i in range(layers) for part in ("in", "out"))
    for i in range(double):
        for stream in ("img", "txt"):
            yield from (f"double_blocks.{i}.{stream}_{part}" for part in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2"))
    for i in range(single):
        yield from (f"single_blocks.{i}.{part}" for part in ("linear1", "linear2"))


@lru_cache(maxsize=1)
def lora_family() -> LoraFamily:
    """Returns how LoRA files of Chroma name their modules: as Flux.1's do, and T5 as sd-scripts names it there."""
    modules = base_modules()
    transformer = modules_by_table(modules["transformer"], transformer_to_diffusers())
    text = modules_as_they_are(modules["text_encoder"])
    return LoraFamily(
        name="chroma",
        components=(
            lora_component(transformer, "lora_transformer"),
            LoraComponent("text_encoder", "lora_te3", text, (t5.SINGLE_FILE_PREFIX,), ("lora_te1",)),
        ),
        base_version="chroma",
        architecture="chroma/lora",
        implementation="https://github.com/lodestone-rock/flow",
        network_module="networks.lora_flux",
    )


_NETWORKS: Final = built_by(
    transformer=(Chroma, ChromaArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.flux())),
    text_encoder=(T5Encoder, T5Arch.from_shapes),
)
CHROMA_FILES: Final = FamilyFiles("chroma", COMPONENTS, {"t5-xxl": "text_encoder"}, _NETWORKS)

MARKS: Final = Marks(
    names={"chroma": "Chroma", "chroma-radiance": "Chroma1 Radiance, which works on pixels"},
    groups={"sd3-flux": ("chroma",)},  # whose VAE is Flux.1's
    also_reads={"chroma": ("flux",)},  # its blocks have Flux.1's names, so a LoRA may be either's
    networks=(
        Mark("chroma-radiance", "single-file", (f"{_APPROXIMATOR}*", "nerf_*")),
        Mark("chroma", "single-file", (f"{_APPROXIMATOR}*", "double_blocks.0.*"), lacks=("nerf_*",)),
        Mark("chroma", "diffusers", (f"{_APPROXIMATOR}*", "single_transformer_blocks.*"), lacks=("nerf_*",)),
    ),
    loras=(LoraMark("chroma", "distilled_guidance_layer_"),),
    written={"chroma": "chroma"},
    t5="text_encoder",
)
