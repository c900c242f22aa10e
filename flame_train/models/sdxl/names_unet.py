"""The UNet of SDXL and Stable Diffusion: diffusers names -> single-file names, for any depth of the construction.

The native names are those of the single file without `model.diffusion_model.`. All tensors keep their shape.
What a folder states of a UNet beside its weights, and shapes do not tell, is read here too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flame_train.errors import ModelFileError
from flame_train.io.keymap import KeyMap, Line, Op, Rule, as_stored, lines, table
from flame_train.io.resolve import Component, Layout
from flame_train.io.weights import open_weights
from flame_train.networks.files.stated import Stated

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


def _unet_table(names: Collection[str]) -> KeyMap:
    return unet_from_diffusers(UNetLevels.of_diffusers(names))


UNET_COMPONENT: Final = Component(
    "unet",
    ("model.diffusion_model.", "unet/", "diffusion_model."),
    (Layout("single-file", "input_blocks.", as_stored), Layout("diffusers", "down_blocks.", _unet_table)),
    re.compile(r"scaled_fp8|.*\.scale_input"),  # what marks a scaled fp8 file, or serves products in fp8
)
IN_UNET: Final = "(in|out)put_blocks_|middle_block_|(down|up)_blocks_|mid_block_"
"""A pattern of what names of LoRAs of a UNet have in them, every dot an underscore."""
ALPHA_LOST: Final = re.compile(r".*\.(attn[12]\.to_(q|k|v|out\.0)|self_attn\.(q|k|v|out)_proj)")
"""A pattern of the modules whose alpha diffusers loses in kohya's naming."""
SDXL_LEVELS: Final = UNetLevels(resnets=2, attention=(False, True, True))
SD_LEVELS: Final = UNetLevels(resnets=2, attention=(True, True, True, False))


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
    """Names the way up: one resnet a level more, and the upsampler last in its block, after any attention."""
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
_RESNET_LAYERS: Final = ("in_layers.2", "emb_layers.1", "out_layers.3")
_BLOCK_LAYERS: Final = (
    *(f"attn{n}.{part}" for n in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0")),
    "ff.net.0.proj",
    "ff.net.2",
)


def _modules(depths: Sequence[int], middle: int, vector: bool) -> Iterator[str]:
    """Yields the layers of a UNet with so many transformer blocks at each level, and in the middle."""
    yield from ("time_embed.0", "time_embed.2", "input_blocks.0.0")
    if vector:
        yield from ("label_emb.0.0", "label_emb.0.2")
    yield from _modules_down(depths)
    yield from _resnet_modules("middle_block.0", skip=False)
    yield from _attention_modules("middle_block.1", middle)
    yield from _resnet_modules("middle_block.2", skip=False)
    yield from _modules_up(depths)
    yield "out.2"


def _modules_down(depths: Sequence[int]) -> Iterator[str]:
    block = 1
    for level, depth in enumerate(depths):
        for number in range(_RESNETS):
            # the second and third level change the channel count in their first resnet
            yield from _resnet_modules(f"input_blocks.{block}.0", skip=level in (1, 2) and number == 0)
            yield from _attention_modules(f"input_blocks.{block}.1", depth)
            block += 1
        if level + 1 < len(depths):
            yield f"input_blocks.{block}.0.op"
            block += 1


def _modules_up(depths: Sequence[int]) -> Iterator[str]:
    block = 0
    for level, depth in reversed(list(enumerate(depths))):
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


UNET_MODULES: Final = tuple(_modules((0, 2, 10), 10, vector=True))
"""Native paths of the 794 linear layers and convolutions of SDXL base's UNet."""
SD_MODULES: Final = tuple(_modules((1, 1, 1, 0), 1, vector=False))
"""Those of the 282 of Stable Diffusion 1's and 2's."""


_V_MARKERS: Final = frozenset({"v_pred", "ztsnr"})  # empty tensors in single files of such models, as NoobAI's
_EDM: Final = ("edm_mean", "edm_std", "edm_vpred.")  # as in Playground v2.5's and CosXL's single files
_NOT_EDM: Final = (
    "is an EDM model ({}), such as Playground v2.5 and CosXL: its noise levels and targets are others than SDXL's, "
    "and are not trained here; name a model made from SDXL base"
)
_SCHEDULE: Final = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
_PREDICTIONS: Final = {"v": "v", "v_prediction": "v", "epsilon": "epsilon", "flow": "flow"}
_MAX_CONFIG_BYTES: Final = 1_000_000
AS_SD: Final[dict[str, object]] = {
    **{"act_fn": "silu", "downsample_padding": 1, "conv_in_kernel": 3, "conv_out_kernel": 3},
    **{"center_input_sample": False, "flip_sin_to_cos": True, "freq_shift": 0},
    **{"time_embedding_type": "positional", "time_embedding_act_fn": None, "timestep_post_act": None},
    **{"resnet_time_scale_shift": "default", "resnet_skip_time_act": False, "resnet_out_scale_factor": 1.0},
    **{"mid_block_scale_factor": 1, "only_cross_attention": False, "dual_cross_attention": False},
    **{"attention_type": "default", "cross_attention_norm": None, "encoder_hid_dim_type": None},
    **{"class_embed_type": None, "addition_embed_type": None},
}
"""What diffusers' UNet may state and shapes do not tell; what else it states is read, or follows from shapes."""
AS_SDXL: Final = AS_SD | {"addition_embed_type": "text_time", "addition_time_embed_dim": 256}


def stated_heads(stated: Stated, widths: Sequence[int], depths: Sequence[int]) -> tuple[int, int] | None:
    """Returns the width of a head, and 0; or 0, and the number of heads; None if the folder states neither.

    One of the two is the same in all levels with transformers, and in the middle, which is as wide as the last level.
    diffusers calls the number of heads of each level `attention_head_dim`. Raises ModelFileError for anything else.
    """
    heads = stated.values.get("num_attention_heads") or stated.values.get("attention_head_dim")
    if heads is None:
        return None
    each = heads if isinstance(heads, list) else [heads] * len(widths)
    levels = list(zip(widths, each, (*depths[:-1], 1), strict=False))
    found = {n for _, n, depth in levels if depth and isinstance(n, int) and n > 0}
    head_dims = {width // n for width, n, depth in levels if depth and n in found}
    if len(head_dims) == 1:
        return head_dims.pop(), 0
    if len(found) == 1:
        return 0, found.pop()
    raise ModelFileError(
        f"{stated.path}: attention_head_dim: expected the numbers of heads of one width, or one number, found "
        f"{heads!r}: such a UNet is not supported here"
    )


def stated_prediction(path: str | Path) -> str:
    """Returns "epsilon", "v" or "flow", if the file or folder says what its UNet predicts, else empty.

    A single file is believed when it says v: epsilon is what most say, those that were made from a v model too.
    """
    with open_weights(path) as weights:
        if edm := next((name for name in weights.names if name.startswith(_EDM)), ""):
            raise ModelFileError(f"{path}: {_NOT_EDM.format(edm)}")
        if not _V_MARKERS.isdisjoint(weights.names) or weights.metadata.get("modelspec.prediction_type") == "v":
            return "v"
        if weights.metadata.get("modelspec.prediction_type") == "flow":
            return "flow"
    scheduler = Path(path) / "scheduler" / "scheduler_config.json"
    return _prediction(scheduler) if scheduler.is_file() else ""


def _prediction(scheduler: Path) -> str:
    """Returns what a scheduler's file says, or "". Raises ModelFileError for what is not trained here."""
    try:
        with scheduler.open("rb") as file:
            content: Any = json.loads(file.read(_MAX_CONFIG_BYTES))
        name, stated = str(content.get("_class_name", "")), str(content.get("prediction_type", ""))
        other = [f"{key} {content[key]!r}" for key, usual in _SCHEDULE.items() if content.get(key, usual) != usual]
    except OSError as error:
        raise ModelFileError(f"{scheduler}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError, AttributeError):
        raise ModelFileError(
            f"{scheduler}: expected JSON that describes a scheduler; download the folder again"
        ) from None
    if name.startswith("EDM"):
        raise ModelFileError(f"{scheduler}: {_NOT_EDM.format(name)}")
    if name.startswith("FlowMatch"):
        return "flow"
    if stated and stated not in _PREDICTIONS:
        raise ModelFileError(f"{scheduler}: predicts {stated!r}; expected one of {', '.join(_PREDICTIONS)}")
    if other:
        raise ModelFileError(f"{scheduler}: {', '.join(other)}: expected SDXL's noise schedule, {_SCHEDULE}")
    return _PREDICTIONS.get(stated, "")
