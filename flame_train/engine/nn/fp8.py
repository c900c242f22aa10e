"""A linear layer's weight in 8 bits: how much of a network fits on a device is mostly how its weights are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

from ...errors import ConfigError, EnvironmentFault
from .. import functional as F
from ..backend import get_backend
from ..dtype import DType, as_dtype
from ..tensor import Frozen, Tensor

Fp8 = Literal["off", "weights", "dynamic"]
"""How linear layers are stored: as all else; in e4m3; and so that products are of 8 bits by 8 bits as well."""


def check_fp8(fp8: Fp8, device: str, dtype: DType | str) -> None:
    """Whether a device can do what is asked for with activations of `dtype`.

    Raises ValueError for another word than the three, EnvironmentFault where a GPU makes no products of 8 bits with a
    factor a row, which only Hopper's do, and ConfigError where those would have results of 32 bits.
    """
    if fp8 not in get_args(Fp8):
        raise ValueError(f"fp8: expected one of {', '.join(get_args(Fp8))}, got {fp8!r}")
    k = get_backend(device).kernels if fp8 == "dynamic" else None
    if k is not None and as_dtype(dtype).itemsize > 2:
        raise ConfigError('fp8 "dynamic" on a GPU needs precision "bf16" or "fp16", got "fp32"')
    if k is not None and k.compute_capability != 90:
        found = f"{k.compute_capability // 10}.{k.compute_capability % 10}"
        raise EnvironmentFault(
            f'fp8 "dynamic" needs a GPU of compute capability 9.0, such as H100 and H200, found {found}; use "weights"'
        )


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
