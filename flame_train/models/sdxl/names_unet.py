"""SDXL's UNet: diffusers names -> single-file names, for any depth of the same construction.

The native names are those of the single file without `model.diffusion_model.`. All tensors keep their shape.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from flame_train.io.keymap import KeyMap, Line, Op, Rule, lines, table

_RESNET: Final = lines("""
    norm1.{p} -> in_layers.0.{p}
    conv1.{p} -> in_layers.2.{p}
    time_emb_proj.{p} -> emb_layers.1.{p}
    norm2.{p} -> out_layers.0.{p}
    conv2.{p} -> out_layers.3.{p}
    conv_shortcut.{p} -> skip_connection.{p}
""")
_BLOCK: Final = (
    *(f"norm{n}.{{p}}" for n in (1, 2, 3)),
    *(f"attn{n}.to_{part}.weight" for n in (1, 2) for part in "qkv"),
    *(f"attn{n}.to_out.0.{{p}}" for n in (1, 2)),
    "ff.net.0.proj.{p}",
    "ff.net.2.{p}",
)
_ATTENTION: Final = tuple(
    (name, name, Op.COPY)
    for name in ("norm.{p}", "proj_in.{p}", "proj_out.{p}", *(f"transformer_blocks.{{k}}.{n}" for n in _BLOCK))
)
_ENDS: Final = lines("""
    time_embedding.linear_1.{p} -> time_embed.0.{p}
    time_embedding.linear_2.{p} -> time_embed.2.{p}
    add_embedding.linear_1.{p} -> label_emb.0.0.{p}
    add_embedding.linear_2.{p} -> label_emb.0.2.{p}
    conv_in.{p} -> input_blocks.0.0.{p}
    conv_norm_out.{p} -> out.0.{p}
    conv_out.{p} -> out.2.{p}
""")
_MIDDLE: Final = (
    ("mid_block.resnets.0.", "middle_block.0.", "resnet"),
    ("mid_block.attentions.0.", "middle_block.1.", "attention"),
    ("mid_block.resnets.1.", "middle_block.2.", "resnet"),
)


@dataclass(frozen=True, slots=True)
class UNetLevels:
    """The numbering depends on the resnets per level on the way down, and on the levels with attention."""

    resnets: int
    attention: tuple[bool, ...]

    @classmethod
    def of_diffusers(cls, names: Collection[str]) -> UNetLevels:
        """Read off the names of a diffusers UNet."""
        matches = [re.match(r"down_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.", name) for name in names]
        parts = {(int(match[1]), match[2], int(match[3])) for match in matches if match}
        levels = 1 + max((level for level, _, _ in parts), default=0)
        resnets = 1 + max((number for _, kind, number in parts if kind == "resnets"), default=0)
        return cls(resnets, tuple((level, "attentions", 0) in parts for level in range(levels)))


SDXL_LEVELS: Final = UNetLevels(resnets=2, attention=(False, True, True))


def unet_from_diffusers(levels: UNetLevels = SDXL_LEVELS) -> KeyMap:
    """Returns the table for a UNet of these levels; its `inverse` goes from native to diffusers names."""
    samplers, prefixes = _down(levels)
    up_samplers, up_prefixes = _up(levels)
    direct = (*_ENDS, *samplers, *up_samplers)
    rules: tuple[Rule, ...] = table(
        direct, (*prefixes, *_MIDDLE, *up_prefixes), {"resnet": _RESNET, "attention": _ATTENTION}
    )
    return KeyMap(rules)


_Direct = list[Line]
_Prefixes = list[tuple[str, str, str]]


def _blocks(there: str, here: str, resnets: int, first: int, attention: bool) -> _Prefixes:
    """Returns a level's blocks: diffusers' below `there` are the single file's `here` from number `first` on."""
    blocks = []
    for number in range(resnets):
        blocks.append((f"{there}.resnets.{number}.", f"{here}.{first + number}.0.", "resnet"))
        if attention:
            blocks.append((f"{there}.attentions.{number}.", f"{here}.{first + number}.1.", "attention"))
    return blocks


def _down(levels: UNetLevels) -> tuple[_Direct, _Prefixes]:
    direct: _Direct = []
    prefixes: _Prefixes = []
    block = 1
    for level, attention in enumerate(levels.attention):
        prefixes += _blocks(f"down_blocks.{level}", "input_blocks", levels.resnets, block, attention)
        block += levels.resnets + 1  # the last is the downsampler
        if level + 1 < len(levels.attention):
            there = f"down_blocks.{level}.downsamplers.0.conv.{{p}}"
            direct.append((there, f"input_blocks.{block - 1}.0.op.{{p}}", Op.COPY))
    return direct, prefixes


def _up(levels: UNetLevels) -> tuple[_Direct, _Prefixes]:
    """The way up has one resnet a level more; the upsampler comes last in its block, after any attention."""
    direct: _Direct = []
    prefixes: _Prefixes = []
    block = 0
    for level, attention in enumerate(reversed(levels.attention)):
        prefixes += _blocks(f"up_blocks.{level}", "output_blocks", levels.resnets + 1, block, attention)
        block += levels.resnets + 1
        if level + 1 < len(levels.attention):
            here = f"output_blocks.{block - 1}.{1 + attention}.conv.{{p}}"
            direct.append((f"up_blocks.{level}.upsamplers.0.conv.{{p}}", here, Op.COPY))
    return direct, prefixes


_RESNETS: Final = 2
_DEPTHS: Final = (0, 2, 10)  # transformer blocks at each level; the middle has as many as the last
_RESNET_LAYERS: Final = ("in_layers.2", "emb_layers.1", "out_layers.3")
_BLOCK_LAYERS: Final = (
    *(f"attn{n}.{part}" for n in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0")),
    "ff.net.0.proj",
    "ff.net.2",
)


def _modules() -> Iterator[str]:
    yield from ("time_embed.0", "time_embed.2", "label_emb.0.0", "label_emb.0.2", "input_blocks.0.0")
    yield from _modules_down()
    yield from _resnet_modules("middle_block.0", skip=False)
    yield from _attention_modules("middle_block.1", _DEPTHS[-1])
    yield from _resnet_modules("middle_block.2", skip=False)
    yield from _modules_up()
    yield "out.2"


def _modules_down() -> Iterator[str]:
    block = 1
    for level, depth in enumerate(_DEPTHS):
        for number in range(_RESNETS):
            # the first level keeps the channel count; each later one changes it in its first resnet
            yield from _resnet_modules(f"input_blocks.{block}.0", skip=level > 0 and number == 0)
            yield from _attention_modules(f"input_blocks.{block}.1", depth)
            block += 1
        if level + 1 < len(_DEPTHS):
            yield f"input_blocks.{block}.0.op"
            block += 1


def _modules_up() -> Iterator[str]:
    block = 0
    for level, depth in reversed(list(enumerate(_DEPTHS))):
        for _ in range(_RESNETS + 1):
            yield from _resnet_modules(f"output_blocks.{block}.0", skip=True)  # its input is joined with the way down's
            yield from _attention_modules(f"output_blocks.{block}.1", depth)
            block += 1
        if level > 0:
            yield f"output_blocks.{block - 1}.{2 if depth else 1}.conv"


def _resnet_modules(prefix: str, *, skip: bool) -> Iterator[str]:
    yield from (f"{prefix}.{part}" for part in _RESNET_LAYERS)
    if skip:
        yield f"{prefix}.skip_connection"


def _attention_modules(prefix: str, depth: int) -> Iterator[str]:
    if depth:
        yield from (f"{prefix}.proj_in", f"{prefix}.proj_out")
    for block in range(depth):
        yield from (f"{prefix}.transformer_blocks.{block}.{part}" for part in _BLOCK_LAYERS)


UNET_MODULES: Final = tuple(_modules())
"""Native paths of the 794 linear layers and convolutions of SDXL base's UNet."""
