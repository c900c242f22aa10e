"""The VAEs of SDXL, SD3, Flux.1 and FLUX.2, and those of Qwen-Image: diffusers names -> single-file names.

The native names are those of the single file without `first_stage_model.`. The decoder's stages are numbered
the other way round in diffusers, and its middle attention is linear there, a 1x1 convolution here.

Qwen-Image 1's VAE is called as Wan 2.1's, version 2.1's as Wan 2.2's. Their files have convolutions over time too. For
a single image only their last slice meets anything but zeros, and those that halve or double the number of frames do
nothing. So a file is read, and never written. Of Wan 2.2's all is read, for films.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Final

from flame_train.io.keymap import KeyMap, Line, Op, Rule, lines, table
from flame_train.io.resolve import Component, Layout

PREFIXES: Final = ("first_stage_model.", "vae/", "vae.")
"""What stands before an autoencoder's names in checkpoints, diffusers folders and other files."""
_TRAINED_WITH: Final = r"loss\..*"  # a discriminator and the weight of its loss

_RESNET: Final = (
    *((f"{name}.{{p}}", f"{name}.{{p}}", Op.COPY) for name in ("norm1", "conv1", "norm2", "conv2")),
    ("conv_shortcut.{p}", "nin_shortcut.{p}", Op.COPY),
)
_PROJECTIONS: Final = (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out"))
_OLD_PROJECTIONS: Final = (("query", "q"), ("key", "k"), ("value", "v"), ("proj_attn", "proj_out"))
STATISTICS: Final = ("bn.running_mean", "bn.running_var")  # of Flux.2's
_SAME: Final = ("quant_conv", "post_quant_conv", "encoder.conv_in", "encoder.conv_out", "decoder.conv_in")


def vae_from_diffusers(stages: int = 4) -> KeyMap:
    """Returns the table for a VAE of that many stages; its `inverse` goes from native to diffusers names."""
    direct = [(f"{name}.{{p}}", f"{name}.{{p}}", Op.COPY) for name in (*_SAME, "decoder.conv_out")]
    direct += [(name, name, Op.COPY) for name in STATISTICS]
    direct += [(f"{side}.conv_norm_out.{{p}}", f"{side}.norm_out.{{p}}", Op.COPY) for side in ("encoder", "decoder")]
    prefixes = []
    for stage in range(stages):
        up = stages - 1 - stage
        prefixes.append((f"encoder.down_blocks.{stage}.resnets.{{j}}.", f"encoder.down.{stage}.block.{{j}}.", "resnet"))
        prefixes.append((f"decoder.up_blocks.{stage}.resnets.{{j}}.", f"decoder.up.{up}.block.{{j}}.", "resnet"))
        if stage < stages - 1:
            down_conv = f"encoder.down_blocks.{stage}.downsamplers.0.conv.{{p}}"
            direct.append((down_conv, f"encoder.down.{stage}.downsample.conv.{{p}}", Op.COPY))
            up_conv = f"decoder.up_blocks.{stage}.upsamplers.0.conv.{{p}}"
            direct.append((up_conv, f"decoder.up.{up}.upsample.conv.{{p}}", Op.COPY))
    middle = []
    for side in ("encoder", "decoder"):
        prefixes.append((f"{side}.mid_block.resnets.0.", f"{side}.mid.block_1.", "resnet"))
        prefixes.append((f"{side}.mid_block.resnets.1.", f"{side}.mid.block_2.", "resnet"))
        middle.append((f"{side}.mid_block.attentions.0.", f"{side}.mid.attn_1.", "attention"))
    rules = table(direct, (*prefixes, *middle), {"resnet": _RESNET, "attention": _attention(_PROJECTIONS)})
    # the names that diffusers used before 2023, still found in published files
    old = table((), middle, {"attention": _attention(_OLD_PROJECTIONS)})
    return KeyMap(rules, tuple(rule for rule in old if "group_norm" not in rule.source[0]))


def _attention(projections: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str, Op], ...]:
    lines = [("group_norm.{p}", "norm.{p}", Op.COPY)]
    for there, here in projections:
        lines.append((f"{there}.weight", f"{here}.weight", Op.UNSQUEEZE))
        lines.append((f"{there}.bias", f"{here}.bias", Op.COPY))
    return tuple(lines)


def _diffusers_table(names: Collection[str]) -> KeyMap:
    """Returns the table for the names at hand: of as many stages as the decoder has."""
    matches = [re.match(r"decoder\.up_blocks\.(\d+)\.", name) for name in names]
    return vae_from_diffusers(1 + max(int(match[1]) for match in matches if match))


def _moved_quant(names: Collection[str]) -> KeyMap:
    """From a single file of FLUX.2's: in some the convolutions around the latents are parts of encoder and decoder."""
    return KeyMap(tuple(Rule((name,), (re.sub(r"^(en|de)coder\.(post_)?quant", r"\2quant", name),)) for name in names))


_FROM_DIFFUSERS: Final = Layout("diffusers", "decoder.up_blocks.", _diffusers_table)
VAE: Final = Component(
    "vae", PREFIXES, (_FROM_DIFFUSERS, Layout("single-file", "decoder.up.")), re.compile(_TRAINED_WITH)
)
"""The autoencoder of SDXL, SD3 or Flux.1 as a part of a model's files."""
FLUX2_VAE: Final = Component(
    "vae",
    PREFIXES,
    (_FROM_DIFFUSERS, Layout("single-file", "decoder.up.", _moved_quant)),
    re.compile(rf"{_TRAINED_WITH}|bn\.num_batches_tracked"),
)
"""That of FLUX.2 and FLUX.3."""


_BETWEEN_FRAMES: Final = re.compile(r".*\.time_conv\.(weight|bias)")
_QWEN_RESNET: Final = lines("""
    norm1.gamma -> norm1.weight [flat]
    norm2.gamma -> norm2.weight [flat]
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
_OVER_TIME: Final = lines("""
    time_conv.weight -> time_conv.weight [taps]
    time_conv.bias -> time_conv.bias
""")
# a residual block is a list in Wan's file
_IN_WAN: Final = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}


def _of_whole(ends: tuple[str, str, str], quant_convs: tuple[str, str], films: bool) -> Iterator[Line]:
    """Returns the lines of what stands once: of both sides' ends, and of the convolutions between."""
    first, last, norm = ends
    convs = [(*pair, Op.LAST) for pair in zip(quant_convs, ("quant_conv", "post_quant_conv"), strict=True)]
    for side in ("encoder", "decoder"):
        convs += [
            (f"{side}.{own}", f"{side}.{end}", _op(films)) for own, end in ((first, "conv_in"), (last, "conv_out"))
        ]
        yield f"{side}.{norm}", f"{side}.norm_out.weight", Op.FLAT
    for name, native, op in convs:
        yield f"{name}.weight", f"{native}.weight", op
        yield f"{name}.bias", f"{native}.bias", Op.COPY


def _op(films: bool) -> Op:
    """Returns what is read of a kernel over time: all of it for films, its last slice for stills."""
    return Op.TAPS if films else Op.LAST


def _kinds(films: bool) -> dict[str, list[Line]]:
    """Returns the lines of each kind of part, in diffusers' names."""
    convs: list[Line] = [(f"conv{n}.weight", f"conv{n}.weight", _op(films)) for n in (1, 2)]
    resampling = [*_RESAMPLING, *(_OVER_TIME if films else ())]
    return {"resnet": [*_QWEN_RESNET, *convs], "attention": [*_ATTENTION], "resampling": resampling}


_Places = list[tuple[str, str, str]]


def qwen_vae_from_diffusers(levels: int = 4, blocks: int = 2) -> KeyMap:
    """Returns the table for a VAE of that many resolutions, with that many residual blocks each on the way down."""
    places = [*_down(levels, blocks, "encoder.down_blocks")]
    for up in range(levels):
        native = f"decoder.up.{levels - 1 - up}"
        places += [(f"decoder.up_blocks.{up}.resnets.{{j}}.", f"{native}.block.{{j}}.", "resnet")]
        places += [(f"decoder.up_blocks.{up}.upsamplers.0.", f"{native}.upsample.", "resampling")] * (up < levels - 1)
    return _diffusers(places)


def qwen_vae_from_wan(levels: int = 4, blocks: int = 2) -> KeyMap:
    """Returns the same for the names of Wan 2.1's file, where the blocks of all resolutions stand in one list."""
    places = [*_down(levels, blocks, "encoder.downsamples")]
    for up in range(levels):
        native, begin = f"decoder.up.{levels - 1 - up}", up * (blocks + 2)
        for j in range(blocks + 1):
            places += [(f"decoder.upsamples.{begin + j}.", f"{native}.block.{j}.", "resnet")]
        places += [(f"decoder.upsamples.{begin + blocks + 1}.", f"{native}.upsample.", "resampling")] * (
            up < levels - 1
        )
    return _wan(places)


def nested_vae_from_diffusers(levels: int = 5, blocks: int = 2, films: bool = False) -> KeyMap:
    """Returns the table for Qwen-Image 2.1's VAE, each resolution a block of its own, without need of `blocks`.

    `films` says whether kernels over time are read whole, as for Wan 2.2.
    """
    places = []
    for level in range(levels):
        down, up = f"encoder.down_blocks.{level}", f"decoder.up_blocks.{levels - 1 - level}"
        places += [(f"{down}.resnets.{{j}}.", f"encoder.down.{level}.block.{{j}}.", "resnet")]
        places += [(f"{up}.resnets.{{j}}.", f"decoder.up.{level}.block.{{j}}.", "resnet")]
        places += [(f"{down}.downsampler.", f"encoder.down.{level}.downsample.", "resampling")] * (level < levels - 1)
        places += [(f"{up}.upsampler.", f"decoder.up.{level}.upsample.", "resampling")] * (level > 0)
    return _diffusers(places, films)


def nested_vae_from_wan(levels: int = 5, blocks: int = 2, films: bool = False) -> KeyMap:
    """The same for the names of Wan 2.2's file, which ComfyUI uses: lists of residual blocks with a resampling last."""
    places = []
    for level in range(levels):
        up = levels - 1 - level
        down, up_list = f"encoder.downsamples.{level}.downsamples", f"decoder.upsamples.{up}.upsamples"
        places += [(f"{down}.{j}.", f"encoder.down.{level}.block.{j}.", "resnet") for j in range(blocks)]
        places += [(f"{up_list}.{j}.", f"decoder.up.{level}.block.{j}.", "resnet") for j in range(blocks + 1)]
        places += [(f"{down}.{blocks}.", f"encoder.down.{level}.downsample.", "resampling")] * (level < levels - 1)
        places += [(f"{up_list}.{blocks + 1}.", f"decoder.up.{level}.upsample.", "resampling")] * (level > 0)
    return _wan(places, films)


def _diffusers(places: _Places, films: bool = False) -> KeyMap:
    """Returns the table of these places, with what stands once, in diffusers' names."""
    for side in ("encoder", "decoder"):
        places += [(f"{side}.mid_block.resnets.{i}.", f"{side}.mid.block_{i + 1}.", "resnet") for i in (0, 1)]
        places += [(f"{side}.mid_block.attentions.0.", f"{side}.mid.attn_1.", "attention")]
    once = _of_whole(("conv_in", "conv_out", "norm_out.gamma"), ("quant_conv", "post_quant_conv"), films)
    return KeyMap(table(once, places, _kinds(films)))


def _wan(places: _Places, films: bool = False) -> KeyMap:
    """Returns the same in the names of Wan's files."""
    for side in ("encoder", "decoder"):
        places += [(f"{side}.middle.{2 * i}.", f"{side}.mid.block_{i + 1}.", "resnet") for i in (0, 1)]
        places += [(f"{side}.middle.1.", f"{side}.mid.attn_1.", "attention")]
    kinds = _kinds(films)
    kinds["resnet"] = [(_in_wan(name), native, op) for name, native, op in kinds["resnet"]]
    return KeyMap(table(_of_whole(("conv1", "head.2", "head.0.gamma"), ("conv1", "conv2"), films), places, kinds))


def _in_wan(name: str) -> str:
    part, _, end = name.partition(".")
    return f"{_IN_WAN[part]}.{end}"


def _down(levels: int, blocks: int, stack: str) -> Iterator[tuple[str, str, str]]:
    """Yields the encoder's list, in which the blocks of all resolutions stand, each with its halving behind them."""
    for level in range(levels):
        begin = level * (blocks + 1)
        for j in range(blocks):
            yield f"{stack}.{begin + j}.", f"encoder.down.{level}.block.{j}.", "resnet"
        if level < levels - 1:
            yield f"{stack}.{begin + blocks}.", f"encoder.down.{level}.downsample.", "resampling"


def _for(table_of: Callable[[int, int], KeyMap], halving: str) -> Callable[[Collection[str]], KeyMap]:
    """Returns the table of as many resolutions and blocks as the encoder has; `halving` is before a block's number."""

    def keymap(names: Collection[str]) -> KeyMap:
        stages = {int(match[1]) for name in names if (match := re.match(halving, name))}
        return table_of(len(_halvings(names)) + 1, min(stages, default=1))

    return keymap


def _halvings(names: Collection[str]) -> set[str]:
    """Returns the encoder's layers that halve an image, by their places."""
    matches = (re.match(r"encoder\.down(.*)resample\.", name) for name in names)
    return {match[1] for match in matches if match}


def qwen_vae_component() -> Component:
    """Says where a family's files have Qwen-Image's, which Wan 2.1 has too."""
    halving = r"encoder\.down(?:_blocks|samples)\.(\d+)\.resample\."
    return _component(_for(qwen_vae_from_diffusers, halving), _for(qwen_vae_from_wan, halving))


def nested_vae_component(films: bool = False) -> Component:
    """Says where Qwen-Image 2.1's files have theirs, or Wan 2.2's, which is for `films`."""
    halving = r"encoder\.downsamples\.\d+\.downsamples\.(\d+)\.resample\."
    diffusers, wan = (partial(of, films=films) for of in (nested_vae_from_diffusers, nested_vae_from_wan))
    unused = re.compile(r"(?!)") if films else _BETWEEN_FRAMES
    return _component(_for(diffusers, halving), _for(wan, halving), unused)


def _component(
    diffusers: Callable[[Collection[str]], KeyMap],
    wan: Callable[[Collection[str]], KeyMap],
    unused: re.Pattern[str] = _BETWEEN_FRAMES,
) -> Component:
    layouts = Layout("diffusers", ".mid_block.", diffusers), Layout("single-file", ".middle.1.to_qkv.", wan)
    return Component("vae", PREFIXES, (*layouts, Layout("native", "decoder.up.0.")), unused)
