"""LoRA files that a tool makes: how one is written, and what a report says of ranks and errors."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from flame_train.adapters.factors import LoraFactors, LoraState
from flame_train.adapters.folding import ALPHA_KEY
from flame_train.adapters.formats import LoraFile, from_file, to_diffusers, to_kohya
from flame_train.adapters.metadata import METADATA_KEY, model_spec, network_metadata, with_hashes
from flame_train.adapters.nearest import Truncated, Truncation
from flame_train.adapters.shared_alpha import for_kohya
from flame_train.disk.files import is_same_file, refuse_place
from flame_train.errors import ConfigError, NonFiniteError
from flame_train.io.lora_names import LoraFamily
from flame_train.io.safetensors import save_file
from flame_train.tools.families import lora_family, refuse_non_finite, require_lora

_ABOUT_SCALES: Final = (ALPHA_KEY, METADATA_KEY)  # true of the source's tensors only


def file_and_strength(text: str, usual: float = 1.0) -> tuple[Path, float]:
    """The path and the strength of `FILE` or `FILE:STRENGTH`; `usual` where none is written."""
    path, colon, number = text.rpartition(":")
    try:
        strength = float(number) if colon else usual
    except ValueError:  # a colon of the path
        path, strength = text, usual
    return Path(os.path.expanduser(path if colon else text)), strength


def wanted(rank: int | None, error: float | None) -> Truncation:
    """What --rank and --error ask for. Raises ConfigError unless exactly one is given, with a sensible value."""
    if (rank is None) == (error is None):
        raise ConfigError("expected one of --rank N and --error E, " + ("got both" if rank is not None else "got none"))
    if rank is not None:
        if rank < 1:
            raise ConfigError(f"--rank: expected at least 1, got {rank}")
        return Truncation(rank=rank)
    assert error is not None
    if not 1e-6 <= error < 1.0:
        raise ConfigError(f"--error: expected a share of each layer's update from 1e-6 to below 1, got {error:g}")
    return Truncation(error=error)


@dataclass(slots=True)
class Errors:
    """What singular values were left out, over all modules."""

    ranks: Counter[int] = field(default_factory=Counter)
    left_out: float = 0.0
    norm: float = 0.0
    worst: tuple[float, str] = (0.0, "")

    def add(self, module: str, cut: Truncated) -> LoraFactors:
        """Counts a module in and returns its LoRA. Raises NonFiniteError where its number format is too small."""
        for array in (cut.factors.down, cut.factors.up):
            if not np.isfinite(array.astype(np.float32)).all():
                raise NonFiniteError(f"{module}: the values are too large for {array.dtype}; nothing was written")
        self.ranks[cut.factors.rank] += 1
        self.left_out = math.hypot(self.left_out, cut.left_out)
        self.norm = math.hypot(self.norm, cut.norm)
        if cut.left_out:
            self.worst = max(self.worst, (cut.left_out / cut.norm, module))
        return cut.factors

    def as_dict(self) -> dict[str, object]:
        """For the report: errors are |update - written| / |update| before rounding to the file's number format."""
        return {
            "ranks": dict(sorted(self.ranks.items())),
            "error": self.left_out / self.norm if self.norm else 0.0,
            "largest_error": self.worst[0],
            "largest_error_in": self.worst[1] or None,
        }


def read_source(source: Path, target: Path, force: bool, skip_unknown: bool = False) -> tuple[LoraFamily, LoraFile]:
    """The LoRA `source`, from which a tool makes the file `target`, and its family.

    Raises ConfigError if both are one file, and OutputError if `target` exists without `force`. Raises ModelFileError
    for a file that is no LoRA of a supported family, and NonFiniteError for NaN.
    """
    if is_same_file(target, source):
        raise ConfigError(f"{target}: source and target are the same file; give another name for the target")
    refuse_place(target, ".safetensors", force)
    family = lora_family(source, require_lora(source))
    lora = from_file(source, family, skip_unknown)
    refuse_non_finite(source, lora.state)
    return family, lora


def same_naming(dialects: Iterable[str]) -> str:
    """The format in which a file of these dialects is written again: diffusers' if all of it is, else kohya's."""
    return "diffusers" if set(dialects) == {"peft"} else "kohya"


def write_lora(
    target: Path,
    state: LoraState,
    family: LoraFamily,
    form: str,
    kept: Mapping[str, str],
    same_network: bool = False,
) -> int:
    """Writes a LoRA's file with its metadata.

    Args:
        target: the file.
        state: the factors by component and module.
        family: how its files name modules.
        form: "kohya" or "diffusers".
        kept: metadata of the file that this one comes from.
        same_network: whether that file's words about kind, rank and alpha still hold.

    Returns:
        The number of its tensors.

    Raises:
        ModelFileError: diffusers does not read the kind.
        NonFiniteError: alpha / rank takes a value beyond what a file can hold.
    """
    network = network_metadata(state, family)
    described = network | model_spec(family, target.stem) | {"format": "pt"}
    written = described | {key: value for key, value in kept.items() if key not in _ABOUT_SCALES}
    if not same_network:
        written |= network
    with np.errstate(over="ignore", invalid="ignore"):  # reported below, with the tensor's name
        if form == "kohya":
            state, record = for_kohya(state, family)
            tensors = to_kohya(state, family)
        else:
            tensors, record = to_diffusers(state, family)
        for name, array in tensors.items():
            if not np.isfinite(array.astype(np.float32)).all():
                raise NonFiniteError(f"{name}: the values are too large for {array.dtype}; nothing was written")
    written |= record
    save_file(target, tensors, with_hashes(tensors, written))
    return len(tensors)
