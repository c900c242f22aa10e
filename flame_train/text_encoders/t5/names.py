"""The T5 encoder's names: those of transformers, below whatever prefix a file puts before them.

Stand-alone files have none, full checkpoints `text_encoders.t5xxl.transformer.`, diffusers folders `text_encoder_3/`
(SD3) or `text_encoder_2/` (Flux). Many files hold the embedding twice, some under its second name alone. ComfyUI's
scaled fp8 files store a factor for each fp8 matrix, by which its values are multiplied. GGUF files have
llama.cpp's names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

from flame_train.io.keymap import KeyMap, Op, Rule, lines, scaled_fp8_rules, table
from flame_train.io.resolve import Component, Layout
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder
from flame_train.text_encoders.text_network import TextNetwork

SINGLE_FILE_PREFIX: Final = "text_encoders.t5xxl.transformer."

_FIRST: Final = "encoder.block.0.layer.0.SelfAttention.q.weight"
_EMBEDDING: Final = "shared.weight"
_EMBEDDING_AGAIN: Final = "encoder.embed_tokens.weight"
_BLOCK: Final = (
    *(f"layer.0.SelfAttention.{part}.weight" for part in ("q", "k", "v", "o")),
    *(f"layer.1.DenseReluDense.{part}.weight" for part in ("wi_0", "wi_1", "wo")),
    *(f"layer.{part}.layer_norm.weight" for part in (0, 1)),
)
_NAMES: Final = (
    _EMBEDDING,
    "encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight",
    *(f"encoder.block.{{i}}.{name}" for name in _BLOCK),
    "encoder.final_layer_norm.weight",
)
_FIRST_IN_GGUF: Final = "enc.blk.0.attn_q.weight"
_LLAMA_CPP: Final = """
    token_embd.weight -> shared.weight
    enc.blk.{i}.attn_rel_b.weight -> encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight
    enc.blk.{i}.attn_q.weight -> encoder.block.{i}.layer.0.SelfAttention.q.weight
    enc.blk.{i}.attn_k.weight -> encoder.block.{i}.layer.0.SelfAttention.k.weight
    enc.blk.{i}.attn_v.weight -> encoder.block.{i}.layer.0.SelfAttention.v.weight
    enc.blk.{i}.attn_o.weight -> encoder.block.{i}.layer.0.SelfAttention.o.weight
    enc.blk.{i}.attn_norm.weight -> encoder.block.{i}.layer.0.layer_norm.weight
    enc.blk.{i}.ffn_gate.weight -> encoder.block.{i}.layer.1.DenseReluDense.wi_0.weight
    enc.blk.{i}.ffn_up.weight -> encoder.block.{i}.layer.1.DenseReluDense.wi_1.weight
    enc.blk.{i}.ffn_down.weight -> encoder.block.{i}.layer.1.DenseReluDense.wo.weight
    enc.blk.{i}.ffn_norm.weight -> encoder.block.{i}.layer.1.layer_norm.weight
    enc.output_norm.weight -> encoder.final_layer_norm.weight
"""
# a whole T5's other half; what marks a scaled file, or serves products in fp8; and the vocabulary in ComfyUI's files
_EXTRAS: Final = re.compile(r"decoder\..*|lm_head\.weight|scaled_fp8|.*\.scale_input|spiece_model")
ELSEWHERE: Final = re.compile(r"text_encoders\.(umt5xxl\.)?(?!transformer\.)\w+")
"""What lies beside UMT5 in a checkpoint, and plays no part in its network: its vocabulary."""


def t5_table(names: Collection[str] = ()) -> KeyMap:
    """Returns the table to native names, which are the same.

    `names` are a file's, of which those with a factor are scaled.
    """
    plain = table([(name, name, Op.COPY) for name in _NAMES])
    return KeyMap(scaled_fp8_rules(names, plain), (Rule((_EMBEDDING_AGAIN,), (_EMBEDDING,)),))


def llama_cpp_table(_: Collection[str]) -> KeyMap:
    """Returns the table from llama.cpp's names in GGUF files, which no file changes."""
    return KeyMap(table(lines(_LLAMA_CPP)))


def modules(layers: int) -> tuple[str, ...]:
    """Returns the linear layers of an encoder of that many blocks."""
    linear = [name.removesuffix(".weight") for name in _BLOCK if not name.endswith("layer_norm.weight")]
    return tuple(f"encoder.block.{i}.{name}" for i in range(layers) for name in linear)


def component(name: str, prefixes: tuple[str, ...]) -> Component:
    """Returns the encoder as a part of a model, below one of `prefixes`; ("",) if the file holds the encoder only."""
    layouts = (Layout("transformers", ".SelfAttention.", t5_table), Layout("llama.cpp", "enc.blk.", llama_cpp_table))
    return Component(name, prefixes, layouts, _EXTRAS, duplicates={_EMBEDDING_AGAIN: _EMBEDDING})


def prefix_of(names: Iterable[str]) -> str | None:
    """Returns the prefix of the encoder's names in a file, maybe ""; None if the file holds no such encoder."""
    prefixes = (
        name.removesuffix(first) for name in names for first in (_FIRST, _FIRST_IN_GGUF) if name.endswith(first)
    )
    return next(prefixes, None)


t5_part: Final = TextNetwork(
    "T5",
    "t5xxl_fp16.safetensors",
    prefix_of,
    component,
    lambda native, stated: T5Encoder(T5Arch.from_shapes(native, stated)),
).part
"""The encoder in a file or folder."""
