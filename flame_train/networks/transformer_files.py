"""A diffusion transformer as a part of a model's files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final

from flame_train.io.keymap import KeyMap, Rule, scaled_fp8_rules
from flame_train.io.lora_names import LoraComponent, Modules
from flame_train.io.resolve import Component, Layout

LORA_PREFIXES: Final = ("diffusion_model.", "model.diffusion_model.", "")
"""What stands before a transformer's native paths in LoRA files; some have none."""


def transformer_component(*layouts: Layout, unused: str = r"(?!)") -> Component:
    """The transformer in these layouts, below the prefixes of single files, diffusers folders and ComfyUI's files.

    What marks a scaled fp8 file, or serves products in fp8, plays no part, nor what the pattern `unused` fits.
    """
    prefixes = ("model.diffusion_model.", "transformer/", "diffusion_model.")
    return Component("transformer", prefixes, layouts, re.compile(rf"scaled_fp8|.*\.scale_input|{unused}"))


def transformer_layouts(
    single_file: str, diffusers: str, table: Callable[[Collection[str]], KeyMap]
) -> tuple[Layout, Layout]:
    """Returns the layouts of a single file, which may store a factor for each fp8 weight, and of a diffusers folder.

    Args:
        single_file: part of a name that only the single file's layout has.
        diffusers: part of a name that only diffusers' layout has.
        table: from a file's names to the table from the single file's names to diffusers'.
    """

    def native(names: Collection[str]) -> KeyMap:
        return KeyMap(scaled_fp8_rules(names, (Rule(rule.source, rule.source) for rule in table(names).rules)))

    def from_diffusers(names: Collection[str]) -> KeyMap:
        return table(names).inverse

    return Layout("single-file", single_file, native), Layout("diffusers", diffusers, from_diffusers)


def component_of_table(
    single_file: str, diffusers: str, table: Callable[[], KeyMap], unused: str = r"(?!)"
) -> Component:
    """Returns the transformer in both layouts, as `transformer_layouts`, for a table that serves any depth."""
    return transformer_component(*transformer_layouts(single_file, diffusers, lambda _: table()), unused=unused)


def lora_component(modules: Modules, *flat: str) -> LoraComponent:
    """Returns the transformer of LoRA files; `flat` are prefixes of flattened names but kohya's and LyCORIS's."""
    return LoraComponent("transformer", "lora_unet", modules, LORA_PREFIXES, (*flat, "lycoris"))
