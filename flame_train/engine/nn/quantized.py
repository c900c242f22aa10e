"""A linear layer's weight stored in fewer bits: 8 with a factor for each row, or 4 with one for each 64."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from flame_train.io.convrot import group_of
from flame_train.io.weight_files import Kept, StoredNf4

from ...errors import ConfigError, EnvironmentFault
from .. import functional as F
from ..backend import Backend, get_backend
from ..checkpoint import rematerialize
from ..dtype import Array, DType, as_dtype, float32, uint32
from ..ops.linear.convrot import GROUPS
from ..ops.linear.e4m3 import multiplied
from ..ops.linear.nf4 import BLOCK, DYNAMIC, NESTED_BLOCK, NORMAL
from ..tensors.tensor import Frozen, Tensor

FORMATS: Final = ("fp8", "int8", "int8-convrot", "nf4")
"""What a weight may be stored in: e4m3, whole numbers of 8 bits, also of rotated columns, or bitsandbytes' 4 bits."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How a network's quantizable layers are stored. With `dynamic` products are of that format, too.

    Raises ValueError for an unknown format.
    """

    format: str
    dynamic: bool = False

    @property
    def whole(self) -> bool:
        """Whether weights are whole numbers of 8 bits."""
        return self.format.startswith("int8")

    @property
    def rotated(self) -> bool:
        """Whether groups of their columns are rotated first."""
        return self.format == "int8-convrot"

    def group_of(self, columns: int) -> int:
        """Returns how many of so many columns are rotated together; 0: none."""
        return group_of(columns) if self.rotated else 0

    def of_layer(self, rounds_input: bool) -> Storage:
        """Returns how a layer is stored that rounds its input for products of this format, or does not."""
        return replace(self, dynamic=self.dynamic and rounds_input)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"Storage: expected one of {', '.join(FORMATS)}, got {self.format!r}")
        if self.dynamic and self.format == "nf4":
            raise ValueError("Storage: there are no products in nf4")

    def check(self, device: str, dtype: DType | str) -> None:
        """Raises unless `device` multiplies in this format for activations of `dtype`.

        ConfigError if activations are wider than 16 bits on a GPU. EnvironmentFault if its compute capability is not
        9.0 or 12 for e4m3, which alone have products of it with a factor for each row, or below 8.0 for int8.
        """
        k = get_backend(device).kernels if self.dynamic else None
        if k is None:
            return
        if as_dtype(dtype).itemsize > 2:
            raise ConfigError(
                f'products in {self.format} on a GPU need precision "bf16" or "fp16", got "{as_dtype(dtype).name}"'
            )
        found = f"{k.compute_capability // 10}.{k.compute_capability % 10}"
        if self.format == "fp8" and not multiplied(k.compute_capability):
            raise EnvironmentFault(
                "products in fp8 need a GPU of compute capability 9.0, such as H100, or 12, such as RTX 5090, "
                f'found {found}; use model.arithmetic = "int8" with model.quantize = "int8", or "bf16"'
            )
        if self.format == "fp8":
            _ = k.scales_blocks  # says now, before the first step, if this card's products are slow
        if self.whole and k.compute_capability < 80:
            raise EnvironmentFault(
                "products in int8 need a GPU of compute capability 8.0 or later, such as A100 and RTX 3090, "
                f'found {found}; use model.arithmetic = "bf16"'
            )


class QuantizedWeight(ABC):
    """A weight that is no Tensor, so that no op takes the stored data for numbers."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors that it is kept as."""

    @abstractmethod
    def dequantize(self, dtype: DType) -> Tensor:
        """Returns the decoded weight (out, in), in `dtype`."""

    @abstractmethod
    def to(self, device: str) -> Self:
        """Returns the same on `device`."""

    @classmethod
    def of(cls, weight: Tensor, storage: Storage) -> QuantizedWeight:
        """Returns `weight`, stored so."""
        if storage.format == "nf4":
            return Nf4Weight(weight.shape, *(Frozen(part.data) for part in F.nf4_quantize(weight)))
        group = storage.group_of(weight.shape[-1])
        data, scales = F.int8_quantize(weight, group) if storage.whole else F.fp8_quantize(weight)
        return ScaledWeight(Frozen(data.data), Frozen(scales.data), storage.dynamic, group)

    @classmethod
    def kept(cls, sizes: tuple[int, ...], stored: Kept, storage: Storage, backend: Backend) -> QuantizedWeight | None:
        """Returns the weight with its bytes as they are; None if it is to be stored otherwise, or ops read others."""
        if isinstance(stored, StoredNf4):
            return Nf4Weight.of_parts(sizes, stored, backend) if storage.format == "nf4" else None
        groups = (*(GROUPS if storage.rotated else ()), storage.group_of(sizes[-1]))
        if not storage.whole or stored.data.shape != sizes or stored.rotated not in groups:
            return None
        factors = np.array(stored.factors, np.float32).view(uint32)
        data, scales = (Frozen(backend.to_device(part)) for part in (np.array(stored.data), factors))
        return ScaledWeight(data, scales, storage.dynamic, stored.rotated)

    @property
    @abstractmethod
    def magnitudes(self) -> Array:
        """Of the numbers, fp32 ones that are finite where all are."""

    @property
    def device(self) -> str:
        return self.stored[0].device

    @property
    def nbytes(self) -> int:
        return sum(int(part.data.nbytes) for part in self.stored)


@dataclass(frozen=True, slots=True)
class ScaledWeight(QuantizedWeight):
    """`data` (out, in), e4m3 in uint8 or int8, and `scales` (out,). See `ops/linear/scaled.py`.

    With `dynamic` the layer's inputs and gradients are rounded to the same format for its products, too. So many
    columns are `rotated` together, see `ops/linear/convrot.py`; 0: none.
    """

    data: Tensor
    scales: Tensor
    dynamic: bool
    rotated: int = 0

    @classmethod
    def joined(cls, weights: Sequence[ScaledWeight]) -> list[Self]:
        """Weights of one shape and format, moved next to each other in memory, so that one product can read them."""
        blocks = [F.stack([getattr(w, part) for w in weights]).data for part in ("data", "scales")]
        return [cls(Frozen(c), Frozen(s), w.dynamic, w.rotated) for c, s, w in zip(*blocks, weights, strict=True)]

    def alike(self, other: object) -> bool:
        """Tells whether one op can take both."""
        if not isinstance(other, ScaledWeight):
            return False
        own, its = ((w.data.dtype, w.dynamic, w.rotated) for w in (self, other))
        return own == its

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def stored(self) -> tuple[Tensor, ...]:
        return self.data, self.scales

    def dequantize(self, dtype: DType) -> Tensor:
        made: Tensor = F.scaled_dequantize(self.data, self.scales, dtype, self.rotated)
        return made

    def to(self, device: str) -> Self:
        data, scales = (Frozen(t.to(device).data) for t in self.stored)
        return type(self)(data, scales, self.dynamic, self.rotated)

    @property
    def magnitudes(self) -> Array:
        return self.scales.data.view(float32)


@dataclass(frozen=True, slots=True)
class Nf4Weight(QuantizedWeight):
    """A weight of these sizes in the parts that `nf4_quantize` makes. See `ops/linear/nf4.py`.

    It is decoded wherever an op needs it, and not kept: see `operand`.
    """

    sizes: tuple[int, ...]
    data: Tensor
    absmax: Tensor
    nested: Tensor
    offset: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    @property
    def stored(self) -> tuple[Tensor, ...]:
        return self.data, self.absmax, self.nested, self.offset

    @classmethod
    def of_parts(cls, sizes: tuple[int, ...], stored: StoredNf4, backend: Backend) -> Self | None:
        """The weight with its bytes as they are; None if its blocks or its numbers are not those of `ops/linear`."""
        found = stored.block, stored.outer_block, list(stored.codes), list(stored.outer_codes)
        if found != (BLOCK, NESTED_BLOCK, list(NORMAL), list(DYNAMIC)):
            return None
        outer = np.array(stored.outer, np.float32), np.array([stored.offset], np.float32)
        parts = stored.data, stored.magnitudes, *(each.view(uint32) for each in outer)
        return cls(sizes, *(Frozen(backend.to_device(each)) for each in parts))

    @property
    def magnitudes(self) -> Array:
        """Of magnitudes the largest, and their mean."""
        xp = self.data.backend.xp
        made: Array = xp.concatenate([self.nested.data, self.offset.data]).view(float32)
        return made

    def dequantize(self, dtype: DType) -> Tensor:
        made: Tensor = F.nf4_dequantize(*self.stored, self.shape, dtype)
        return made

    def operand(self, dtype: DType) -> Tensor:
        """Returns the decoded weight for an op, which decodes it again for its gradient, even inside a checkpoint."""
        return rematerialize(F.nf4_dequantize, *self.stored, self.shape, dtype, within_checkpoint=True)

    def to(self, device: str) -> Self:
        return type(self)(self.sizes, *(Frozen(part.to(device).data) for part in self.stored))
