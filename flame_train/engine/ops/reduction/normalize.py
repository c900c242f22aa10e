"""Vectors divided by their length."""

from __future__ import annotations

from ....errors import ShapeError
from ...op import ErrorSample, composite, sample
from ...tensors.tensor import Tensor
from ..common.dims import Dims
from ..pointwise.where_clamp import clamp
from .reduce import norm


@composite(torch="nn.functional.normalize")
def normalize(input: Tensor, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12) -> Tensor:
    """input / max(||input||_p, eps), the norm over dim"""
    length: Tensor = norm(input, p, dim, True)
    return input / clamp(length, eps)


normalize.samples(sample((2, 3)), sample((2, 3, 4), 3.0, -1), sample((3, 4), dim=0))
normalize.errors(ErrorSample(sample((2, 3), 2.0, 2), ShapeError, "dim 2 is outside a tensor of 2 dims"))
