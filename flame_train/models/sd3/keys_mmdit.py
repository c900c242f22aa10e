"""SD3's transformer: diffusers names -> the native ones, which are those of the published single files."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from flame_train.io.keymap import KeyMap, lines, table

_ENDS: Final = lines("""
    pos_embed.pos_embed -> pos_embed
    pos_embed.proj.{p} -> x_embedder.proj.{p}
    time_text_embed.timestep_embedder.linear_1.{p} -> t_embedder.mlp.0.{p}
    time_text_embed.timestep_embedder.linear_2.{p} -> t_embedder.mlp.2.{p}
    time_text_embed.text_embedder.linear_1.{p} -> y_embedder.mlp.0.{p}
    time_text_embed.text_embedder.linear_2.{p} -> y_embedder.mlp.2.{p}
    context_embedder.{p} -> context_embedder.{p}
    proj_out.{p} -> final_layer.linear.{p}
    norm_out.linear.{p} -> final_layer.adaLN_modulation.1.{p} [swap]
""")
_IMAGE: Final = lines("""
    norm1.linear.{p} -> x_block.adaLN_modulation.1.{p}
    ff.net.0.proj.{p} -> x_block.mlp.fc1.{p}
    ff.net.2.{p} -> x_block.mlp.fc2.{p}
    attn.norm_q.weight -> x_block.attn.ln_q.weight
    attn.norm_k.weight -> x_block.attn.ln_k.weight
    attn.to_out.0.{p} -> x_block.attn.proj.{p}
    attn2.norm_q.weight -> x_block.attn2.ln_q.weight
    attn2.norm_k.weight -> x_block.attn2.ln_k.weight
    attn2.to_out.0.{p} -> x_block.attn2.proj.{p}
""")
_TEXT: Final = lines("""
    attn.norm_added_q.weight -> context_block.attn.ln_q.weight
    attn.norm_added_k.weight -> context_block.attn.ln_k.weight
""")
_TEXT_GOES_ON: Final = lines("""
    norm1_context.linear.{p} -> context_block.adaLN_modulation.1.{p}
    attn.to_add_out.{p} -> context_block.attn.proj.{p}
    ff_context.net.0.proj.{p} -> context_block.mlp.fc1.{p}
    ff_context.net.2.{p} -> context_block.mlp.fc2.{p}
""")
_TEXT_ENDS: Final = lines("norm1_context.linear.{p} -> context_block.adaLN_modulation.1.{p} [swap]")
_SPLIT: Final = lines("""
    x_block.attn.qkv.{p} -> attn.to_q.{p} attn.to_k.{p} attn.to_v.{p} [rows]
    x_block.attn2.qkv.{p} -> attn2.to_q.{p} attn2.to_k.{p} attn2.to_v.{p} [rows]
    context_block.attn.qkv.{p} -> attn.add_q_proj.{p} attn.add_k_proj.{p} attn.add_v_proj.{p} [rows]
""")


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
