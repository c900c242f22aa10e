"""A linear layer's weight in 8 bits: how much of a network fits on a device is mostly how its weights are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from .. import functional as F
from ..dtype import DType
from ..tensor import Frozen, Tensor

Fp8 = Literal["off", "weights", "dynamic"]
"""How linear layers are stored: as all else; in e4m3; and so that products are of 8 bits by 8 bits as well."""


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """What `fp8_quantize` makes of a weight (out, in). No Tensor, so that no op takes the codes for numbers.

    With `dynamic` what the layer is given, and its gradient, are rounded to 8 bits for its products.
    """

    codes: Tensor
    scales: Tensor
    dynamic: bool

    @classmethod
    def of(cls, weight: Tensor, dynamic: bool) -> Self:
        """The weight, rounded."""
        codes, scales = F.fp8_quantize(weight)
        return cls(Frozen(codes.data), Frozen(scales.data), dynamic)

    @classmethod
    def joined(cls, weights: Sequence[Fp8Weight]) -> list[Self]:
        """Weights of one shape next to each other in memory, for one product to read them."""
        blocks = [F.stack([getattr(w, part) for w in weights]).data for part in ("codes", "scales")]
        return [cls(Frozen(c), Frozen(s), w.dynamic) for c, s, w in zip(*blocks, weights, strict=True)]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def device(self) -> str:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return int(self.codes.data.nbytes + self.scales.data.nbytes)

    def given_back(self, dtype: DType) -> Tensor:
        """The weight as products see it."""
        made: Tensor = F.fp8_dequantize(self.codes, self.scales, dtype)
        return made
