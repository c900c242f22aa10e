"""SD3's and SD3.5's names: components and layouts. The native ones are those of the single files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from flame_train.io.keymap import KeyMap
from flame_train.io.resolve import Component, Layout, Resolved
from flame_train.io.resolve import resolve as resolve_components
from flame_train.models.keys import sdxl, t5
from flame_train.models.keys.sd3_mmdit import depth_of_diffusers, mmdit_to_diffusers


def _from_diffusers(names: Collection[str]) -> KeyMap:
    return mmdit_to_diffusers(depth_of_diffusers(names)).inverse


_SDXL: Final = {component.name: component for component in sdxl.COMPONENTS}
_ELSEWHERE: Final = re.compile(r"text_encoders\.clip_[lg]\.(logit_scale|transformer\.logit_scale)|model_ema\..*")
COMPONENTS: Final = (
    Component(
        "transformer",
        ("model.diffusion_model.", "transformer/", "diffusion_model."),
        (Layout("single-file", "joint_blocks."), Layout("diffusers", "transformer_blocks.", _from_diffusers)),
        re.compile(r"(?!)"),
    ),
    _SDXL["vae"],
    replace(_SDXL["text_encoder"], prefixes=("text_encoders.clip_l.transformer.", "text_encoder/")),
    replace(_SDXL["text_encoder_2"], prefixes=("text_encoders.clip_g.transformer.", "text_encoder_2/")),
    t5.component("text_encoder_3", (t5.SINGLE_FILE_PREFIX, "text_encoder_3/")),
)


def resolve(names: Iterable[str], only: str | None = None) -> Resolved:
    """Which tensor of a file, or of a diffusers folder, is which native tensor of which component.

    `names` as `open_weights` gives them. `only` ("transformer", "vae", "text_encoder", "text_encoder_2",
    "text_encoder_3") says that the file holds that component alone. Text encoders' native names are those of
    transformers, the others' those of the single file.
    """
    all_names = set(names)
    idle = {name for name in all_names if _ELSEWHERE.fullmatch(name)}
    found = resolve_components(COMPONENTS, all_names - idle, only)
    return replace(found, ignored=(*found.ignored, *sorted(idle)))
