"""Model families, each a value; and the commands that run one from a config."""

from __future__ import annotations

from typing import Any

from flame_train.training.family import Family

from .sdxl import SdxlFamily

RECIPES: dict[str, Family] = {"sdxl": SdxlFamily()}
"""Every family by name. Adding one is a line here."""


def train(family: str, config: str, overrides: list[str], device: str, dry_run: bool) -> dict[str, Any]:
    """Trains as a config file says, or continues; with `dry_run` only checks and plans. Returns what happened."""
    from .pipeline import run

    return run(RECIPES[family], config, overrides, device, dry_run)


def cache(family: str, config: str, overrides: list[str], device: str, dry_run: bool) -> dict[str, Any]:
    """Encodes the pictures and captions of a config ahead of training. Returns counts."""
    from .pipeline import fill_cache

    return fill_cache(RECIPES[family], config, overrides, device, dry_run)
