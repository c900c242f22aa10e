"""EriDiffusion's flat YAML, and EriTrainer's JSON, which has OneTrainer's names. Its jobs have ai-toolkit's layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final

from flame_train.config.foreign.read_rows import read_table
from flame_train.errors import ConfigError
from flame_train.families import named_by

from .table import Convert, Program, Reading, Source, Tree

_KINDS: Final = named_by("EriDiffusion")
_FLAT: Final = ("weights", "bf16_params", "grad_accum_steps", "steps", "lr", "batch_size", "optimizer")
_PARTS: Final = ("sdxl", "sd35", "sd3", "flux")


def _is_mine(tree: Tree) -> bool:
    """Returns the kind of model, and another of its settings at the top."""
    own = [name for name in tree if name in _FLAT or name.startswith(tuple(f"{part}_" for part in _PARTS))]
    return isinstance(tree.get("model_kind"), str) and bool(own)


def _read(reading: Reading) -> Source:
    kind = str(reading.tree["model_kind"]).lower()
    if kind not in _KINDS:
        raise ConfigError(
            f"{reading.place(('model_kind',))}: model_kind = {kind}: expected sdxl, sd3 or flux; others are not here"
        )
    return Source(_KINDS[kind], reading.flat(reading.tree))


def _precision(value: Any, source: Source) -> Any:
    return "bf16" if value else "fp32"


_OWN: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        "bf16_params": _precision,
        "(lr schedule)": lambda value, source: value,
    }
)

PROGRAM: Final = Program(
    "EriDiffusion", _is_mine, _read, cache(partial(read_table, "eridiffusion", "EriDiffusion", _OWN)), ""
)
