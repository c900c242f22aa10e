"""How a family's LoRA files name the parts of its model: plain data, filled in by the family's key tables.

A module is known by its native path (`input_blocks.4.1.transformer_blocks.0.attn1.to_q`); each dialect has
its own spelling of it. Flattened spellings cannot be taken apart by looking at underscores, so every
dialect is resolved through a table made from these lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoraComponent:
    """One network of a model. `modules` maps each native module path to its path in diffusers."""

    name: str  # "unet"; also the prefix in diffusers files
    kohya: str  # "lora_unet"
    modules: Mapping[str, str]
    others: tuple[str, ...] = ()  # further dotted prefixes seen in files, before either path


@dataclass(frozen=True, slots=True)
class LoraFamily:
    """A model family as LoRA files speak of it; the last four go into a file's metadata."""

    name: str
    components: tuple[LoraComponent, ...]
    base_version: str
    architecture: str
    implementation: str
    resolution: str
