"""A de-distillation adapter: a LoRA that is added to the base's weights as they are loaded, for training alone.

A distilled model that is trained on its own loses what makes few steps suffice. A de-distillation adapter undoes the
distillation while a LoRA learns, and is left out when the LoRA is used. The published ones stand in `family.toml`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.adapters.formats import from_file
from flame_train.adapters.kinds import Factors
from flame_train.engine.dtype import is_float
from flame_train.errors import ModelFileError
from flame_train.io.digests import Digests
from flame_train.io.lora_names import LoraFamily
from flame_train.io.weight_files import StoredNf4, Weights
from flame_train.io.weights import open_weights
from flame_train.networks.files.build_parts import Native
from flame_train.networks.files.part import Part, Unchanged


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class AdaptedPart(Part):
    """A network whose weights are those of its file plus the updates of an adapter.

    Attributes:
        adapter: the adapter's file.
        factors: its updates by module.
        strength: how strongly it acts; 1: as it was trained.
    """

    adapter: Path = Path()
    factors: Mapping[str, Factors] = field(default_factory=dict)
    strength: float = 1.0

    def source(self, weights: Weights, advance: Callable[[float], None]) -> Native:
        return _Updated(weights, self, advance)

    def digest(self, digests: Digests | None = None) -> str:
        own = Part.digest(self, digests)
        with open_weights(self.adapter) as weights:
            summed = hashlib.sha256(own.encode())
            for name in sorted(weights.names):
                summed.update(name.encode())
                summed.update(np.ascontiguousarray(weights.read(name)).reshape(-1).view(np.uint8).data)
        return summed.hexdigest()


class _Updated(Unchanged):
    """Reads a weight and adds its update, in fp32, rounded once to the dtype of the file if that is of 16 bits."""

    def __init__(self, weights: Weights, part: AdaptedPart, advance: Callable[[float], None]) -> None:
        super().__init__(weights, part.sources, part.shapes, advance)
        self._factors, self._strength = part.factors, part.strength

    def nf4(self, name: str) -> StoredNf4 | None:
        """Returns None for a weight with an update: the sum is in no file."""
        return None if name.removesuffix(".weight") in self._factors else super().nf4(name)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        stored = super().read(name)
        factors = self._factors.get(name.removesuffix(".weight"))
        if factors is None or not name.endswith(".weight"):
            return stored
        total = stored.astype(np.float32) + factors.delta(stored.astype(np.float32), self._strength)
        keeps_dtype = stored.dtype.itemsize >= 2 and is_float(stored.dtype)
        return total.astype(stored.dtype) if keeps_dtype else total


def with_adapter(part: Part, file: Path, names: LoraFamily, strength: float = 1.0) -> AdaptedPart:
    """Returns the network with an adapter of this family added. ModelFileError if they do not belong together."""
    state = from_file(file, names).state
    modules = state.get(part.component, {})
    misfits = [m for m, f in modules.items() if not f.fits(part.shapes.get(f"{m}.weight", ()))]
    if not modules or misfits:
        reason = f"{misfits[0]} has another shape" if misfits else f"it has no layer of the {part.component}"
        raise ModelFileError(f"{file}: is no adapter for {part.path}: {reason}; name the one that was made for it")
    return AdaptedPart(
        **{f.name: getattr(part, f.name) for f in fields(Part)}, adapter=file, factors=modules, strength=strength
    )
