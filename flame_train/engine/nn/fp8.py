"""A linear layer's weight stored in 8 bits, which halves the memory of a 16-bit one."""

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
"""How linear layers are stored: "off" as all else, "weights" in e4m3, "dynamic" in e4m3 with products of 8 bits too."""


def check_fp8(fp8: Fp8, device: str, dtype: DType | str) -> None:
    """Raises unless `device` supports `fp8` for activations of `dtype`.

    ValueError for an unknown word. For "dynamic" on a GPU EnvironmentFault if its compute capability is not 9.0, which
    alone has 8-bit products with a factor for each row. ConfigError if activations are wider than 16 bits.
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
    """A weight (out, in) as `fp8_quantize` stores it: `data` (out, in) and `scales` (out,). See `ops/linear/fp8.py`.

    It is no Tensor, so that no op takes the data for numbers. With `dynamic` the layer's inputs and gradients are
    rounded to 8 bits for its products, too.
    """

    data: Tensor
    scales: Tensor
    dynamic: bool

    @classmethod
    def of(cls, weight: Tensor, dynamic: bool) -> Self:
        """`weight`, rounded to 8 bits."""
        data, scales = F.fp8_quantize(weight)
        return cls(Frozen(data.data), Frozen(scales.data), dynamic)

    @classmethod
    def joined(cls, weights: Sequence[Fp8Weight]) -> list[Self]:
        """Weights of one shape, moved next to each other in memory, so that one product can read them all."""
        blocks = [F.stack([getattr(w, part) for w in weights]).data for part in ("data", "scales")]
        return [cls(Frozen(c), Frozen(s), w.dynamic) for c, s, w in zip(*blocks, weights, strict=True)]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def device(self) -> str:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return int(self.data.data.nbytes + self.scales.data.nbytes)

    def dequantize(self, dtype: DType) -> Tensor:
        """The decoded weight (out, in), in `dtype`."""
        made: Tensor = F.fp8_dequantize(self.data, self.scales, dtype)
        return made
