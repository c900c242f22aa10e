"""Flux.1's names: the transformer's two layouts, the components of its files, and how LoRA files call every module.

The native names are those of the single file. There queries, keys and values are one matrix, in a single-stream block
together with the MLP's first; diffusers has one for each. The last modulation's rows are shift then scale here, scale
then shift there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from flame_train.io.keymap import KeyMap, Op, Rule, table
from flame_train.io.resolve import Component, Layout, Resolved
from flame_train.io.resolve import resolve as resolve_components
from flame_train.models.keys import sdxl, t5

MLP_RATIO: Final = 4  # of the width, in every model of the family

_ENDS: Final = (
    ("img_in.{p}", "x_embedder.{p}", Op.COPY),
    ("txt_in.{p}", "context_embedder.{p}", Op.COPY),
    *(
        (f"{here}_in.{first}_layer.{{p}}", f"time_text_embed.{there}_embedder.linear_{n}.{{p}}", Op.COPY)
        for here, there in (("time", "timestep"), ("vector", "text"), ("guidance", "guidance"))
        for n, first in ((1, "in"), (2, "out"))
    ),
    ("final_layer.linear.{p}", "proj_out.{p}", Op.COPY),
    ("final_layer.adaLN_modulation.1.{p}", "norm_out.linear.{p}", Op.SWAP),
)
_DOUBLE: Final = (
    ("img_mod.lin.{p}", "norm1.linear.{p}", Op.COPY),
    ("img_attn.qkv.{p}", ("attn.to_q.{p}", "attn.to_k.{p}", "attn.to_v.{p}"), Op.ROWS),
    ("img_attn.norm.query_norm.scale", "attn.norm_q.weight", Op.COPY),
    ("img_attn.norm.key_norm.scale", "attn.norm_k.weight", Op.COPY),
    ("img_attn.proj.{p}", "attn.to_out.0.{p}", Op.COPY),
    ("img_mlp.0.{p}", "ff.net.0.proj.{p}", Op.COPY),
    ("img_mlp.2.{p}", "ff.net.2.{p}", Op.COPY),
    ("txt_mod.lin.{p}", "norm1_context.linear.{p}", Op.COPY),
    ("txt_attn.qkv.{p}", ("attn.add_q_proj.{p}", "attn.add_k_proj.{p}", "attn.add_v_proj.{p}"), Op.ROWS),
    ("txt_attn.norm.query_norm.scale", "attn.norm_added_q.weight", Op.COPY),
    ("txt_attn.norm.key_norm.scale", "attn.norm_added_k.weight", Op.COPY),
    ("txt_attn.proj.{p}", "attn.to_add_out.{p}", Op.COPY),
    ("txt_mlp.0.{p}", "ff_context.net.0.proj.{p}", Op.COPY),
    ("txt_mlp.2.{p}", "ff_context.net.2.{p}", Op.COPY),
)
_SINGLE: Final = (
    ("modulation.lin.{p}", "norm.linear.{p}", Op.COPY),
    ("linear2.{p}", "proj_out.{p}", Op.COPY),
    ("norm.query_norm.scale", "attn.norm_q.weight", Op.COPY),
    ("norm.key_norm.scale", "attn.norm_k.weight", Op.COPY),
)
_FUSED: Final = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")


def transformer_to_diffusers() -> KeyMap:
    """The table from native to diffusers names, for any depth; its `inverse` goes back."""
    blocks = (
        ("double_blocks.{i}.", "transformer_blocks.{i}.", "double"),
        ("single_blocks.{i}.", "single_transformer_blocks.{i}.", "single"),
    )
    fused = [
        Rule(
            (f"single_blocks.{{i}}.linear1.{kind}",),
            tuple(f"single_transformer_blocks.{{i}}.{part}.{kind}" for part in _FUSED),
            Op.ROWS,
            (1, 1, 1, MLP_RATIO),
        )
        for kind in ("weight", "bias")
    ]
    return KeyMap((*table(_ENDS, blocks, {"double": _DOUBLE, "single": _SINGLE}), *fused))


def _from_diffusers(_: Collection[str]) -> KeyMap:
    return transformer_to_diffusers().inverse


_SDXL: Final = {component.name: component for component in sdxl.COMPONENTS}
_ELSEWHERE: Final = re.compile(r"text_encoders\.\w+\.(logit_scale|transformer\.text_projection\.weight)|model_ema\..*")
COMPONENTS: Final = (
    Component(
        "transformer",
        ("model.diffusion_model.", "transformer/", "diffusion_model."),
        (
            Layout("single-file", "double_blocks."),
            Layout("diffusers", "single_transformer_blocks.", _from_diffusers),
        ),
        re.compile(r"(?!)"),
    ),
    _SDXL["vae"],
    replace(_SDXL["text_encoder"], prefixes=("text_encoders.clip_l.transformer.", "text_encoder/")),
    t5.component("text_encoder_2", (t5.SINGLE_FILE_PREFIX, "text_encoder_2/")),
)


def resolve(names: Iterable[str], only: str | None = None) -> Resolved:
    """Which tensor of a file, or of a diffusers folder, is which native tensor of which component.

    `names` as `open_weights` gives them. `only` ("transformer", "vae", "text_encoder", "text_encoder_2") says that the
    file holds that component alone. Text encoders' native names are those of transformers, the others' those of the
    single file.
    """
    all_names = set(names)
    idle = {name for name in all_names if _ELSEWHERE.fullmatch(name)}
    found = resolve_components(COMPONENTS, all_names - idle, only)
    return replace(found, ignored=(*found.ignored, *sorted(idle)))
