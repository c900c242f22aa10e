"""Model families, each a value; and the commands that run one from a config."""

from __future__ import annotations

from typing import Any

from flame_train.errors import ModelFileError
from flame_train.io.hub import resolve_checkpoint
from flame_train.io.weights import open_weights
from flame_train.models.identify import FAMILY_NAMES, could_be, identify
from flame_train.training.family import Family

from .flux import FLUX
from .sd3 import SD3
from .sdxl import SdxlFamily

RECIPES: dict[str, Family] = {"sdxl": SdxlFamily(), "sd3": SD3, "flux": FLUX}
"""Every family by name. Adding one is a line here."""


def train(family: str, config: str, overrides: list[str], device: str, dry_run: bool) -> dict[str, Any]:
    """Trains as a config file says, or continues; with `dry_run` only checks and plans. Returns what happened."""
    from .pipeline import run

    return run(RECIPES[family], config, overrides, device, dry_run)


def cache(config: str, overrides: list[str], device: str, dry_run: bool) -> dict[str, Any]:
    """Encodes the pictures and captions of a config ahead of training. Returns counts."""
    from flame_train.config.load import load_located

    from .pipeline import fill_cache

    loaded = load_located(config, overrides)
    return fill_cache(family_of(loaded.config.model.checkpoint), loaded, device, dry_run)


def family_of(checkpoint: str) -> Family:
    """The family of a base model, told from its headers. Raises ModelFileError for one that is not supported."""
    path = resolve_checkpoint(checkpoint)
    with open_weights(path) as weights:
        found = identify(weights.shapes, weights.metadata)
    for name, family in RECIPES.items():
        if found.kind != "lora" and found.family != "unknown" and could_be(found.family, name):
            return family
    known = ", ".join(FAMILY_NAMES[name] for name in RECIPES)
    raise ModelFileError(f"{path}: expected a base model of {known}, but this is: {found.detail}")
