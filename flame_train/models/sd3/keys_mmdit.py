"""SD3's transformer: diffusers names -> the native ones, which are those of the published single files."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from flame_train.io.keymap import KeyMap, Op, table

_Line = tuple[str, str | tuple[str, ...], Op]

_ENDS: Final[tuple[_Line, ...]] = (
    ("pos_embed.pos_embed", "pos_embed", Op.COPY),
    ("pos_embed.proj.{p}", "x_embedder.proj.{p}", Op.COPY),
    ("time_text_embed.timestep_embedder.linear_1.{p}", "t_embedder.mlp.0.{p}", Op.COPY),
    ("time_text_embed.timestep_embedder.linear_2.{p}", "t_embedder.mlp.2.{p}", Op.COPY),
    ("time_text_embed.text_embedder.linear_1.{p}", "y_embedder.mlp.0.{p}", Op.COPY),
    ("time_text_embed.text_embedder.linear_2.{p}", "y_embedder.mlp.2.{p}", Op.COPY),
    ("context_embedder.{p}", "context_embedder.{p}", Op.COPY),
    ("proj_out.{p}", "final_layer.linear.{p}", Op.COPY),
    ("norm_out.linear.{p}", "final_layer.adaLN_modulation.1.{p}", Op.SWAP),
)
_IMAGE: Final[tuple[_Line, ...]] = (
    ("norm1.linear.{p}", "x_block.adaLN_modulation.1.{p}", Op.COPY),
    ("ff.net.0.proj.{p}", "x_block.mlp.fc1.{p}", Op.COPY),
    ("ff.net.2.{p}", "x_block.mlp.fc2.{p}", Op.COPY),
    *(
        (there, here, Op.COPY)
        for attn in ("attn", "attn2")
        for there, here in (
            (f"{attn}.norm_q.weight", f"x_block.{attn}.ln_q.weight"),
            (f"{attn}.norm_k.weight", f"x_block.{attn}.ln_k.weight"),
            (f"{attn}.to_out.0.{{p}}", f"x_block.{attn}.proj.{{p}}"),
        )
    ),
)
_TEXT: Final[tuple[_Line, ...]] = (
    ("attn.norm_added_q.weight", "context_block.attn.ln_q.weight", Op.COPY),
    ("attn.norm_added_k.weight", "context_block.attn.ln_k.weight", Op.COPY),
)
_TEXT_GOES_ON: Final[tuple[_Line, ...]] = (
    ("norm1_context.linear.{p}", "context_block.adaLN_modulation.1.{p}", Op.COPY),
    ("attn.to_add_out.{p}", "context_block.attn.proj.{p}", Op.COPY),
    ("ff_context.net.0.proj.{p}", "context_block.mlp.fc1.{p}", Op.COPY),
    ("ff_context.net.2.{p}", "context_block.mlp.fc2.{p}", Op.COPY),
)
_TEXT_ENDS: Final[tuple[_Line, ...]] = (("norm1_context.linear.{p}", "context_block.adaLN_modulation.1.{p}", Op.SWAP),)
_SPLIT: Final = (
    ("x_block.attn.qkv.{p}", ("attn.to_q.{p}", "attn.to_k.{p}", "attn.to_v.{p}"), Op.ROWS),
    ("x_block.attn2.qkv.{p}", ("attn2.to_q.{p}", "attn2.to_k.{p}", "attn2.to_v.{p}"), Op.ROWS),
    ("context_block.attn.qkv.{p}", ("attn.add_q_proj.{p}", "attn.add_k_proj.{p}", "attn.add_v_proj.{p}"), Op.ROWS),
)


def depth_of(names: Collection[str]) -> int:
    """The number of blocks among native or diffusers names."""
    return len({match[1] for name in names if (match := re.match(r"(?:joint|transformer)_blocks\.(\d+)\.", name))})


def mmdit_to_diffusers(depth: int) -> KeyMap:
    """The table from native to diffusers names; its `inverse` reads a diffusers transformer.

    The last block drops the text, and the halves of its modulation are swapped, as in the final layer.
    """
    going_on = [(f"transformer_blocks.{i}.", f"joint_blocks.{i}.", "goes on") for i in range(depth - 1)]
    last = (f"transformer_blocks.{depth - 1}.", f"joint_blocks.{depth - 1}.", "ends")
    kinds = {"goes on": (*_IMAGE, *_TEXT, *_TEXT_GOES_ON), "ends": (*_IMAGE, *_TEXT, *_TEXT_ENDS)}
    whole = KeyMap(table(_ENDS, (*going_on, last), kinds)).inverse
    split = table((), [("joint_blocks.{i}.", "transformer_blocks.{i}.", "qkv")], {"qkv": _SPLIT})
    return KeyMap((*whole.rules, *split))
