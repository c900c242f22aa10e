"""Batch normalisation as a layer, with its running statistics as buffers."""

from __future__ import annotations

from typing import ClassVar

from ...errors import ShapeError
from .. import functional as F
from ..autograd.versions import VERSIONS
from ..dtype import int64
from ..mode import mode
from ..tensors.tensor import Tensor
from .module import Module, compute_copy
from .spec import buffer, param


class _BatchNorm(Module):
    """(x - mean) / sqrt(var + eps) * weight + bias per channel (arXiv 1502.03167).

    While `training` with the batch's mean and variance, towards which `running_mean` and `running_var` move by
    `momentum`; after `eval()` with these. Statistics are fp32, the result has x's dtype.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    dims: ClassVar[tuple[int, ...]]

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine = affine
        if affine:
            self.weight = param(num_features, init="ones")
            self.bias = param(num_features, init="zeros")
        self.running_mean = buffer(num_features)
        self.running_var = buffer(num_features, init="ones")
        self.num_batches_tracked = buffer(dtype=int64)
        self.layout = "NCHW"

    def forward(self, x: Tensor) -> Tensor:
        """x normalised. Raises ShapeError for an input of other dims or channels."""
        if x.ndim not in self.dims or x.shape[-1 if self.layout == "NHWC" else 1] != self.num_features:
            raise ShapeError(
                f"{type(self).__name__}: expected an input of {' or '.join(map(str, self.dims))} dims, "
                f"{self.layout}, with {self.num_features} channels, got shape {x.shape}"
            )
        weight, bias = (compute_copy(self.weight), compute_copy(self.bias)) if self.affine else (None, None)
        y: Tensor = F.batch_norm(
            x, self.running_mean, self.running_var, weight, bias, self.training, self.momentum, self.eps, self.layout
        )
        if self.training and not mode().recomputing:
            self.num_batches_tracked.data += 1
            VERSIONS.mark_written(self.num_batches_tracked.data)
        return y.to(x.dtype)


class BatchNorm1d(_BatchNorm):
    """Batch normalisation over (N, C) or (N, C, L). As torch.nn.BatchNorm1d."""

    __doc__ = f"{__doc__}\n\n    {_BatchNorm.__doc__}"
    dims = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Batch normalisation over channels-last images (B, H, W, C), or (B, C, H, W) with layout="NCHW".

    As torch.nn.BatchNorm2d.
    """

    __doc__ = f"{__doc__}\n\n    {_BatchNorm.__doc__}"
    dims = (4,)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        *,
        layout: str = "NHWC",
    ) -> None:
        """Makes weight, bias and running statistics.

        Args:
            num_features: channels.
            eps: is added to the variance.
            momentum: the share of a batch's statistics in the new running ones.
            affine: whether there are weight and bias.
            layout: "NHWC" or "NCHW".

        Raises:
            ShapeError: the layout is another.
        """
        super().__init__(num_features, eps, momentum, affine)
        if layout not in ("NHWC", "NCHW"):
            raise ShapeError(f"BatchNorm2d: expected layout 'NCHW' or 'NHWC', got {layout!r}")
        self.layout = layout
