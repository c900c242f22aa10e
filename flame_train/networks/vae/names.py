"""The VAEs of SDXL, SD3, Flux.1 and FLUX.2: diffusers names -> single-file names.

The native names are those of the single file without `first_stage_model.`. The decoder's stages are numbered
the other way round in diffusers, and its middle attention is linear there, a 1x1 convolution here.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from flame_train.io.keymap import KeyMap, Op, Rule, table
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
    return KeyMap(rules, _only_projections(table((), middle, {"attention": _attention(_OLD_PROJECTIONS)})))


def _attention(projections: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str, Op], ...]:
    lines = [("group_norm.{p}", "norm.{p}", Op.COPY)]
    for there, here in projections:
        lines.append((f"{there}.weight", f"{here}.weight", Op.UNSQUEEZE))
        lines.append((f"{there}.bias", f"{here}.bias", Op.COPY))
    return tuple(lines)


def _only_projections(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules if "group_norm" not in rule.source[0])


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
