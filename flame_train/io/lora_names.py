"""How a family's LoRA files name the parts of its model: plain data, filled in by the family's key tables.

A module is known by its native path (`input_blocks.4.1.transformer_blocks.0.attn1.to_q`); each dialect has
its own spelling of it. Flattened spellings cannot be taken apart by looking at underscores, so every
dialect is resolved through a table made from these lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flame_train.io.keymap import KeyMap, Source

Modules = Mapping[str, Mapping[str, Source]]
"""Native module path -> the paths it has in diffusers, each with how its rows are taken from the native weight's.

One path as a rule; several where diffusers cuts the weight up, such as into queries, keys and values.
"""


@dataclass(frozen=True, slots=True)
class LoraComponent:
    """One network of a model, and what its modules are called."""

    name: str  # "unet"; also the prefix in diffusers files
    kohya: str  # "lora_unet"
    modules: Modules
    others: tuple[str, ...] = ()  # further dotted prefixes seen in files, before either path
    flat: tuple[str, ...] = ()  # further flattened prefixes, before the path in diffusers
    absent: re.Pattern[str] | None = None  # modules of some files that this network does not have
    alpha_lost: re.Pattern[str] | None = None  # modules whose alpha diffusers loses in kohya's naming


@dataclass(frozen=True, slots=True, eq=False)
class LoraFamily:
    """A model family as LoRA files speak of it; all but the components goes into a file's metadata.

    Equal only to itself, so that it can be the key of values computed from its long lists.
    """

    name: str
    components: tuple[LoraComponent, ...]
    base_version: str
    architecture: str
    implementation: str
    resolution: str = "1024x1024"
    network_module: str = "networks.lora"
    several_predictions: bool = False  # the noise or v: a file then says which

    def is_absent(self, module: str) -> bool:
        """Tells whether `module`, as spelled in a file, is known to be of no layer of this family."""
        return any(c.absent is not None and c.absent.fullmatch(module) is not None for c in self.components)


def modules_by_table(native: Iterable[str], to_diffusers: KeyMap) -> Modules:
    """Returns the modules of a network whose weights the table knows. ValueError for one that it does not."""
    pulled = to_diffusers.pull(f"{module}.weight" for module in native)
    if pulled.unknown:
        raise ValueError(f"not modules of this network: {pulled.unknown[:5]}")
    modules: dict[str, dict[str, Source]] = {}
    for there, source in pulled.sources.items():
        (here,) = source.names
        modules.setdefault(here.removesuffix(".weight"), {})[there.removesuffix(".weight")] = source
    return modules


def modules_as_they_are(native: Iterable[str]) -> Modules:
    """Returns the modules of a network that diffusers names as we do."""
    return {module: {module: Source((module,))} for module in native}
