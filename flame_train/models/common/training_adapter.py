"""A de-distillation adapter: a LoRA that is added to the base's weights as they are loaded, for training alone.

A distilled model that is trained on its own loses what makes few steps suffice. A de-distillation adapter undoes the
distillation while a LoRA learns, and is left out when the LoRA is used. The published ones stand in `family.toml`.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.adapters.formats import from_file
from flame_train.adapters.kinds import Factors
from flame_train.adapters.metadata import MERGED_KEY
from flame_train.engine.dtype import is_float
from flame_train.errors import ModelFileError
from flame_train.io.dtypes import widened
from flame_train.io.lora_names import LoraFamily
from flame_train.io.weight_files import Kept, Weights
from flame_train.io.weights import open_weights
from flame_train.networks.files.build_parts import Native
from flame_train.networks.files.part import Part, Unchanged

_LOG = logging.getLogger(__name__)
_MOST_THREADS = 8


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
        for module, factors in self.factors.items():  # or the sum would be taken for damage of the base
            if not all(np.isfinite(array).all() for array in factors.arrays.values()):
                raise ModelFileError(
                    f"{self.adapter}: NaN or infinity in {module}; the file is damaged or was saved from a broken run: "
                    "get another copy"
                )
        return _Updated(weights, self, advance)

    def adapter_digest(self) -> str:
        """Returns SHA-256, in hex, over the updates, however they are named and stored: a run depends on them."""
        summed = hashlib.sha256()
        for module, factors in sorted(self.factors.items()):
            summed.update(f"{module} {factors.kind} {factors.alpha}".encode())
            for name, array in sorted(factors.arrays.items()):
                summed.update(f"{name} {array.dtype} {array.shape}".encode())
                summed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return summed.hexdigest()


class _Updated(Unchanged):
    """Reads a weight and adds its update, in fp32, rounded once to the dtype of the file if that is of 16 bits.

    Threads make the sums that the network asks for next: a network of six billion weights takes a core a minute.
    """

    def __init__(self, weights: Weights, part: AdaptedPart, advance: Callable[[float], None]) -> None:
        super().__init__(weights, part.sources, part.shapes, advance)
        self._strength = part.strength
        self._factors = {f"{module}.weight": factors for module, factors in part.factors.items()}
        self._next = deque(name for name, *_ in part.network.named_specs() if name in self._factors)
        self._sums: dict[str, Future[np.ndarray[Any, Any]]] = {}
        self._pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "adapter")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def as_kept(self, name: str) -> Kept | None:
        """Returns None for a weight with an update: the sum is in no file."""
        return None if name in self._factors else super().as_kept(name)

    def read(self, name: str) -> np.ndarray[Any, Any]:
        if name not in self._factors:
            return super().read(name)
        while self._next and (name not in self._sums or len(self._sums) < _MOST_THREADS):
            ahead = self._next.popleft()
            self._sums[ahead] = self._pool.submit(self._sum, ahead, super().read(ahead))
        return self._sums.pop(name).result()

    def _sum(self, name: str, stored: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        wide = widened(stored, np.float32)
        total = wide + self._factors[name].delta(wide, self._strength)
        keeps_dtype = stored.dtype.itemsize >= 2 and is_float(stored.dtype)
        return total.astype(stored.dtype) if keeps_dtype else total


def with_adapter(part: Part, file: Path, names: LoraFamily, strength: float = 1.0) -> AdaptedPart:
    """Returns the network with an adapter of this family added. ModelFileError if they do not belong together."""
    state = from_file(file, names).state
    modules = state.get(part.component, {})
    misfits = [m for m, f in modules.items() if not f.fits(part.shapes.get(f"{m}.weight", ()))]
    others = sorted(state.keys() - {part.component})
    if modules and others:
        raise ModelFileError(
            f"{file}: has layers of the {', '.join(others)} beside those of the {part.component}, to which alone a "
            "training adapter is added; `flame-train merge` writes a base with all of them"
        )
    if not modules or misfits:
        reason = f"{misfits[0]} has another shape" if misfits else f"it has no layer of the {part.component}"
        raise ModelFileError(f"{file}: is no adapter for {part.path}: {reason}; name the one that was made for it")
    with open_weights(part.path) as weights:
        if f'"{file.name}"' in weights.metadata.get(MERGED_KEY, ""):
            _LOG.warning("%s: %s was merged into it before, and is added to it once more", part.path, file.name)
    return AdaptedPart(
        **{f.name: getattr(part, f.name) for f in fields(Part)}, adapter=file, factors=modules, strength=strength
    )
