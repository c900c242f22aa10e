"""Qwen-Image's VAE: diffusers' names, and those of Wan 2.1's single file, which ComfyUI uses -> the VAE's names here.

Both files have convolutions over time too. For a single image only their last slice meets anything but zeros, and those
that halve or double the number of frames do nothing. So the file is read, and never written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Final

from flame_train.io.keymap import KeyMap, Line, Op, lines, table
from flame_train.io.resolve import Component, Layout

_BETWEEN_FRAMES: Final = re.compile(r".*\.time_conv\.(weight|bias)")
_RESNET: Final = lines("""
    norm1.gamma -> norm1.weight [flat]
    norm2.gamma -> norm2.weight [flat]
    conv1.weight -> conv1.weight [last]
    conv2.weight -> conv2.weight [last]
    conv_shortcut.weight -> nin_shortcut.weight [last]
    conv1.bias -> conv1.bias
    conv2.bias -> conv2.bias
    conv_shortcut.bias -> nin_shortcut.bias
""")
_ATTENTION: Final = lines("""
    norm.gamma -> norm.weight [flat]
    to_qkv.{p} -> q.{p} k.{p} v.{p} [rows]
    proj.{p} -> proj_out.{p}
""")
_RESAMPLING: Final = lines("resample.1.{p} -> conv.{p}")
# a residual block is a list in Wan's file
_IN_WAN: Final = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}


def _of_whole(ends: tuple[str, str, str], quant_convs: tuple[str, str]) -> Iterator[Line]:
    """The lines of what stands once, by a layout's names: of both sides' ends, and of the convolutions between."""
    first, last, norm = ends
    convs = list(zip(quant_convs, ("quant_conv", "post_quant_conv"), strict=True))
    for side in ("encoder", "decoder"):
        convs += [(f"{side}.{first}", f"{side}.conv_in"), (f"{side}.{last}", f"{side}.conv_out")]
        yield f"{side}.{norm}", f"{side}.norm_out.weight", Op.FLAT
    for name, native in convs:
        yield f"{name}.weight", f"{native}.weight", Op.LAST
        yield f"{name}.bias", f"{native}.bias", Op.COPY


def qwen_vae_from_diffusers(levels: int = 4, blocks: int = 2) -> KeyMap:
    """The table for a VAE of that many resolutions, with that many residual blocks each on the way down."""
    places = [*_down(levels, blocks, "encoder.down_blocks")]
    for up in range(levels):
        native = f"decoder.up.{levels - 1 - up}"
        places += [(f"decoder.up_blocks.{up}.resnets.{{j}}.", f"{native}.block.{{j}}.", "resnet")]
        places += [(f"decoder.up_blocks.{up}.upsamplers.0.", f"{native}.upsample.", "resampling")] * (up < levels - 1)
    for side in ("encoder", "decoder"):
        places += [(f"{side}.mid_block.resnets.{i}.", f"{side}.mid.block_{i + 1}.", "resnet") for i in (0, 1)]
        places += [(f"{side}.mid_block.attentions.0.", f"{side}.mid.attn_1.", "attention")]
    kinds = {"resnet": _RESNET, "attention": _ATTENTION, "resampling": _RESAMPLING}
    return KeyMap(
        table(_of_whole(("conv_in", "conv_out", "norm_out.gamma"), ("quant_conv", "post_quant_conv")), places, kinds)
    )


def qwen_vae_from_wan(levels: int = 4, blocks: int = 2) -> KeyMap:
    """The same for the names of Wan 2.1's file, where the blocks of all resolutions stand in one list."""
    places = [*_down(levels, blocks, "encoder.downsamples")]
    for up in range(levels):
        native, begin = f"decoder.up.{levels - 1 - up}", up * (blocks + 2)
        for j in range(blocks + 1):
            places += [(f"decoder.upsamples.{begin + j}.", f"{native}.block.{j}.", "resnet")]
        places += [(f"decoder.upsamples.{begin + blocks + 1}.", f"{native}.upsample.", "resampling")] * (
            up < levels - 1
        )
    for side in ("encoder", "decoder"):
        places += [(f"{side}.middle.{2 * i}.", f"{side}.mid.block_{i + 1}.", "resnet") for i in (0, 1)]
        places += [(f"{side}.middle.1.", f"{side}.mid.attn_1.", "attention")]
    resnet = [(_in_wan(name), native, op) for name, native, op in _RESNET]
    kinds = {"resnet": resnet, "attention": _ATTENTION, "resampling": _RESAMPLING}
    return KeyMap(table(_of_whole(("conv1", "head.2", "head.0.gamma"), ("conv1", "conv2")), places, kinds))


def _in_wan(name: str) -> str:
    part, _, end = name.partition(".")
    return f"{_IN_WAN[part]}.{end}"


def _down(levels: int, blocks: int, stack: str) -> Iterator[tuple[str, str, str]]:
    """The encoder's list, in which the blocks of all resolutions stand, each with its halving behind them."""
    for level in range(levels):
        begin = level * (blocks + 1)
        for j in range(blocks):
            yield f"{stack}.{begin + j}.", f"encoder.down.{level}.block.{j}.", "resnet"
        if level < levels - 1:
            yield f"{stack}.{begin + blocks}.", f"encoder.down.{level}.downsample.", "resampling"


def _for(table_of: Callable[[int, int], KeyMap]) -> Callable[[Collection[str]], KeyMap]:
    """The table for the names at hand: of as many resolutions and blocks as its encoder has."""

    def keymap(names: Collection[str]) -> KeyMap:
        found = (re.match(r"encoder\.down(?:_blocks|samples)\.(\d+)\.resample\.", name) for name in names)
        halvings = sorted({int(match[1]) for match in found if match})
        return table_of(len(halvings) + 1, halvings[0] if halvings else 1)

    return keymap


def qwen_vae_component(prefixes: tuple[str, ...] = ("first_stage_model.", "vae/", "vae.")) -> Component:
    """Where a family's files have it."""
    return Component(
        "vae",
        prefixes,
        (
            Layout("diffusers", ".mid_block.", _for(qwen_vae_from_diffusers)),
            Layout("single-file", ".middle.1.to_qkv.", _for(qwen_vae_from_wan)),
            Layout("native", "decoder.up.0."),
        ),
        _BETWEEN_FRAMES,
    )
