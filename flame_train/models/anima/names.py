"""Anima's names: the transformer's two layouts, the components of its files, and how LoRA files call every module.

The native names are those of the published single file, where the adapter of the text stands below `llm_adapter.` of
the transformer. In a diffusers folder it is a part of its own, `text_conditioner`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

from flame_train.io.keymap import KeyMap, Rule, lines, scaled_fp8_rules, table
from flame_train.io.lora_names import LoraComponent, LoraFamily, modules_as_they_are, modules_by_table
from flame_train.io.resolve import Component, Layout, Resolved, resolve
from flame_train.models.anima.transformer import MODULATIONS, Anima, AnimaArch
from flame_train.networks.files.build_parts import built_by
from flame_train.networks.files.family_files import FamilyFiles
from flame_train.networks.files.marks import JOINT, LoraMark, Mark, Marks, Ratio, Width
from flame_train.networks.transformer_files import LORA_PREFIXES, component_of_table, lora_component
from flame_train.networks.vae.names import qwen_vae_component
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.anima.network import AdapterArch, LlmAdapter
from flame_train.text_encoders.qwen3 import names as qwen3
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch

_ENDS: Final = lines("""
    x_embedder.proj.1.weight -> patch_embed.proj.weight
    t_embedder.1.linear_1.weight -> time_embed.t_embedder.linear_1.weight
    t_embedder.1.linear_2.weight -> time_embed.t_embedder.linear_2.weight
    t_embedding_norm.weight -> time_embed.norm.weight
    final_layer.linear.weight -> proj_out.weight
    final_layer.adaln_modulation.1.weight -> norm_out.linear_1.weight
    final_layer.adaln_modulation.2.weight -> norm_out.linear_2.weight
""")
_BLOCK: Final = lines("""
    self_attn.q_proj.weight -> attn1.to_q.weight
    self_attn.k_proj.weight -> attn1.to_k.weight
    self_attn.v_proj.weight -> attn1.to_v.weight
    self_attn.output_proj.weight -> attn1.to_out.0.weight
    self_attn.q_norm.weight -> attn1.norm_q.weight
    self_attn.k_norm.weight -> attn1.norm_k.weight
    cross_attn.q_proj.weight -> attn2.to_q.weight
    cross_attn.k_proj.weight -> attn2.to_k.weight
    cross_attn.v_proj.weight -> attn2.to_v.weight
    cross_attn.output_proj.weight -> attn2.to_out.0.weight
    cross_attn.q_norm.weight -> attn2.norm_q.weight
    cross_attn.k_norm.weight -> attn2.norm_k.weight
    mlp.layer1.weight -> ff.net.0.proj.weight
    mlp.layer2.weight -> ff.net.2.weight
    adaln_modulation_self_attn.1.weight -> norm1.linear_1.weight
    adaln_modulation_self_attn.2.weight -> norm1.linear_2.weight
    adaln_modulation_cross_attn.1.weight -> norm2.linear_1.weight
    adaln_modulation_cross_attn.2.weight -> norm2.linear_2.weight
    adaln_modulation_mlp.1.weight -> norm3.linear_1.weight
    adaln_modulation_mlp.2.weight -> norm3.linear_2.weight
""")


def transformer_to_diffusers() -> KeyMap:
    """Returns the table from native to diffusers names, for any depth; its `inverse` goes back."""
    return KeyMap(table(_ENDS, [("blocks.{i}.", "transformer_blocks.{i}.", "block")], {"block": _BLOCK}))


def _adapter(names: Collection[str]) -> KeyMap:
    stored = (name for name in names if not name.endswith(".scale_weight"))
    return KeyMap(scaled_fp8_rules(names, (Rule((name,), (name,)) for name in stored)))


# what training counted, and positions that are computed anew
_COUNTED: Final = r"accum_\w+|pos_embedder\..*|.*_extra_state|.*rotary_emb\.inv_freq"
_TRANSFORMER: Final = component_of_table(".self_attn.", ".attn1.", transformer_to_diffusers, unused=_COUNTED)
_CONDITIONER: Final = Component(
    "text_conditioner",
    (
        *(f"{prefix}llm_adapter." for prefix in ("model.diffusion_model.", "diffusion_model.", "net.", "")),
        "text_conditioner/",
    ),
    (Layout("single-file", "blocks.0.cross_attn.", _adapter),),
    re.compile(rf"scaled_fp8|.*\.scale_input|{_COUNTED}"),
)
COMPONENTS: Final = (
    replace(_TRANSFORMER, prefixes=(*_TRANSFORMER.prefixes, "net.")),
    _CONDITIONER,
    qwen_vae_component(),
    qwen3.component(
        "text_encoder",
        ("text_encoders.qwen3_06b.transformer.model.", "text_encoder/model.", "text_encoder/", "model."),
    ),
)
_IN_TRANSFORMER: Final = re.compile(r"(model\.diffusion_model\.|diffusion_model\.|net\.)?llm_adapter\.")


def _sort(components: Sequence[Component], names: Iterable[str], only: str | None = None) -> Resolved:
    """Sorts the names of a file into components; the transformer's own may have the adapter in it."""
    transformer, conditioner, *others = components
    every = list(names)
    if only == "transformer":
        adapter = [name for name in every if _IN_TRANSFORMER.match(name)]
        if adapter:
            rest = resolve([transformer], sorted(set(every) - set(adapter)), only)
            return _together(rest, resolve([conditioner], adapter))
    return resolve([conditioner, transformer, *others], every, only)  # the narrower prefix first


def _together(one: Resolved, other: Resolved) -> Resolved:
    return Resolved(
        one.sources | other.sources,
        one.layouts | other.layouts,
        (*one.ignored, *other.ignored),
        (*one.unknown, *other.unknown),
    )


def base_modules(depth: int = 40) -> tuple[str, ...]:
    """Returns native paths of the transformer's linear layers: 454 in Anima, 646 in Anima-2.9B."""
    return tuple(_linears(depth))


def _linears(depth: int) -> Iterator[str]:
    yield from ("x_embedder.proj.1", "t_embedder.1.linear_1", "t_embedder.1.linear_2")
    yield from ("final_layer.linear", "final_layer.adaln_modulation.1", "final_layer.adaln_modulation.2")
    projections = ("q_proj", "k_proj", "v_proj", "output_proj")
    for i in range(depth):
        yield from (f"blocks.{i}.{attn}.{part}" for attn in ("self_attn", "cross_attn") for part in projections)
        yield from (f"blocks.{i}.{part}.{n}" for part in MODULATIONS for n in (1, 2))
        yield from (f"blocks.{i}.mlp.layer{n}" for n in (1, 2))


def adapter_modules(layers: int = 6) -> tuple[str, ...]:
    """Paths of the adapter's linear layers, in both layouts."""
    parts = [f"{attn}.{part}_proj" for attn in ("self_attn", "cross_attn") for part in "qkvo"]
    return (*(f"blocks.{i}.{part}" for i in range(layers) for part in (*parts, "mlp.0", "mlp.2")), "out_proj")


@lru_cache(maxsize=1)
def lora_family() -> LoraFamily:
    """Returns how LoRA files of Anima name their modules: those of Anima-2.9B, of which Anima has a part."""
    modules = modules_by_table(base_modules(), transformer_to_diffusers())
    adapter = LoraComponent(
        "text_conditioner",
        "lora_unet_llm_adapter",
        modules_as_they_are(adapter_modules()),
        tuple(f"{prefix}llm_adapter." for prefix in LORA_PREFIXES),
    )
    return LoraFamily(
        name="anima",
        components=(lora_component(modules), adapter),
        base_version="anima",
        architecture="anima/lora",
        implementation="https://github.com/circlestone-labs/anima",
        network_module="networks.lora_anima",
    )


_NETWORKS: Final = built_by(
    transformer=(Anima, AnimaArch.from_shapes),
    text_conditioner=(LlmAdapter, AdapterArch.from_shapes),
    vae=(Vae, partial(VaeArch.from_shapes, published=VaeArch.qwen_image())),
    text_encoder=(Qwen3, Qwen3Arch.from_shapes),
)
ANIMA_FILES: Final = FamilyFiles("anima", COMPONENTS, {"qwen3-0.6b": "text_encoder"}, _NETWORKS, _sort)

# a layer of a block or of the adapter, its path's dots made underscores, behind any trainer's prefix
_IN_BLOCK: Final = (
    r"^(.*_)?(?<!transformer_)blocks_\d+_"
    r"((self|cross)_attn_(q|k|v|output)_proj|adaln_modulation_\w+_[12]|mlp_layer[12])_"
)
_IN_ADAPTER: Final = r"^(.*_)?(llm_adapter|text_conditioner)_(blocks_\d+|out_proj)_"
_WAN: Final = Width("_attn1_to_[qkv]", 3072), Ratio("_attn2_to_k", 1)  # whose text has the image's width
_SINGLE_FILE, _ADAPTER_END = "blocks.0.adaln_modulation_self_attn.1.weight", "llm_adapter.out_proj.weight"
MARKS: Final = Marks(
    names={"anima": "Anima", "cosmos2": "Cosmos-Predict2"},
    groups={"qwen-wan": ("anima",)},  # whose VAE is Qwen-Image's
    networks=(
        Mark("anima", "single-file", (_SINGLE_FILE, _ADAPTER_END)),
        Mark("cosmos2", "single-file", (_SINGLE_FILE,), lacks=(_ADAPTER_END,)),
        Mark("anima", "diffusers", ("transformer_blocks.0.norm1.linear_1.weight", "time_embed.norm.weight")),
    ),
    loras=(
        LoraMark("anima", f"{_IN_BLOCK}|{_IN_ADAPTER}"),
        # Wan's blocks are called so too, where `transformer.` stands before them
        LoraMark("anima", rf"^{JOINT}(attn1_|norm3_linear_)", rf"^{JOINT}ffn_", unless=_WAN),
        LoraMark("anima", rf"^{JOINT}", sizes=(Width("_attn2_to_[kv]", 1024),)),
    ),
    written={"anima": "anima"},
)
