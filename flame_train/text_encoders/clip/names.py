"""CLIP-L, OpenCLIP ViT-H and bigG: OpenCLIP names -> the native ones, which are those of transformers.

OpenCLIP stores q, k and v as one matrix. Its `text_projection` is a bare matrix that multiplies from the right: a
linear layer's weight is its transpose. It is square, so no shape check would catch a mistake.
"""

from __future__ import annotations

import re
from typing import Final

from flame_train.io.keymap import KeyMap, Op, Rule, as_stored, lines, table
from flame_train.io.resolve import Component, Layout

_LAYER: Final = lines("""
    ln_1.{p} -> layer_norm1.{p}
    ln_2.{p} -> layer_norm2.{p}
    attn.in_proj_weight -> self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight [rows]
    attn.in_proj_bias -> self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias [rows]
    attn.out_proj.{p} -> self_attn.out_proj.{p}
    mlp.c_fc.{p} -> mlp.fc1.{p}
    mlp.c_proj.{p} -> mlp.fc2.{p}
""")
_ENDS: Final = lines("""
    token_embedding.weight -> text_model.embeddings.token_embedding.weight
    positional_embedding -> text_model.embeddings.position_embedding.weight
    ln_final.{p} -> text_model.final_layer_norm.{p}
    text_projection -> text_projection.weight [transpose]
""")
_NATIVE_PARTS: Final = (
    *(f"encoder.layers.{{i}}.self_attn.{part}.{{p}}" for part in ("q_proj", "k_proj", "v_proj", "out_proj")),
    *(f"encoder.layers.{{i}}.{part}.{{p}}" for part in ("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2")),
    "embeddings.token_embedding.weight",
    "embeddings.position_embedding.weight",
    "final_layer_norm.{p}",
)


def clip_from_openclip() -> KeyMap:
    """Returns the table for an OpenCLIP text tower of any depth; its `inverse` goes from native to OpenCLIP names.

    `logit_scale` has no native counterpart: it plays no part in encoding a text.
    """
    rules = table(_ENDS, [("transformer.resblocks.{i}.", "text_model.encoder.layers.{i}.", "layer")], {"layer": _LAYER})
    # some third-party files hold the projection as a linear weight among OpenCLIP names
    return KeyMap(rules, (Rule(("text_projection.weight",), ("text_projection.weight",)),))


def clip_from_bare_transformers() -> KeyMap:
    """For files saved by newer software, which drops the leading `text_model.`."""
    lines = [(name, f"text_model.{name}", Op.COPY) for name in _NATIVE_PARTS]
    return KeyMap(table([*lines, ("text_projection.weight", "text_projection.weight", Op.COPY)]))


_LAYOUTS: Final = (
    Layout("transformers", "text_model.encoder.", as_stored),
    Layout("openclip", "transformer.resblocks.", lambda names: clip_from_openclip()),
    Layout("transformers, short", "encoder.layers.", lambda names: clip_from_bare_transformers()),
)
# what marks a scaled fp8 file or serves products in fp8, what is computed anew, and the other half of a whole CLIP
_EXTRAS: Final = (
    r"scaled_fp8|.*\.scale_input|(text_model\.)?embeddings\.position_ids|logit_scale|visual_projection\..*"
    r"|vision_model\..*"
)
_PROJECTION: Final = r"|text_projection(\.weight)?"  # of CLIP-L and ViT-H, which no model here uses
_LAST_OF_VIT_H: Final = r"|(transformer\.resblocks|(text_model\.)?encoder\.layers)\.23\..*"


def clip_l(prefix: str) -> Component:
    """Returns CLIP-L as a model's first text encoder, below `prefix` in a single file."""
    return Component("text_encoder", (prefix, "text_encoder/"), _LAYOUTS, re.compile(_EXTRAS + _PROJECTION))


def clip_g(prefix: str) -> Component:
    """Returns OpenCLIP bigG as a model's second text encoder, likewise."""
    return Component("text_encoder_2", (prefix, "text_encoder_2/"), _LAYOUTS, re.compile(_EXTRAS))


def clip_alone() -> Component:
    """Returns the one text encoder of Stable Diffusion: CLIP-L of 1, ViT-H of 2, whose last layer does not run."""
    prefixes = ("cond_stage_model.transformer.", "cond_stage_model.model.", "text_encoder/")
    ignored = re.compile(_EXTRAS + _PROJECTION + _LAST_OF_VIT_H)
    return Component("text_encoder", prefixes, _LAYOUTS, ignored)


_LINEAR: Final = (*(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2")
_BLOCKS: Final = "text_model.encoder.layers"
CLIP_L_MODULES: Final = tuple(f"{_BLOCKS}.{layer}.{part}" for layer in range(12) for part in _LINEAR)
"""The 72 linear layers of CLIP-L's blocks."""
CLIP_H_MODULES: Final = tuple(f"{_BLOCKS}.{layer}.{part}" for layer in range(23) for part in _LINEAR)
"""The 138 of ViT-H's blocks that run."""
CLIP_G_MODULES: Final = (
    *(f"{_BLOCKS}.{layer}.{part}" for layer in range(32) for part in _LINEAR),
    "text_projection",
)
"""The 193 of bigG, with its projection."""
