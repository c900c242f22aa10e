"""Layers of PyTorch that no network here has: batch normalisation, transposed convolution, parts without weights."""

from __future__ import annotations

from typing import Any, ClassVar

from ...errors import ShapeError
from .. import functional as F
from ..autograd.versions import VERSIONS
from ..dtype import int64
from ..mode import mode
from ..nn.layers import Convolution, checked_layout
from ..nn.module import Module, compute_copy
from ..nn.spec import buffer, param
from ..ops.conv.geometry import Pair
from ..tensors.tensor import Tensor


class _Part(Module):
    """A part without weights."""

    def __init__(self, inplace: bool = False) -> None:
        """Raises TypeError for `inplace`: no graph follows what is written in place."""
        if inplace:
            name = type(self).__name__
            raise TypeError(f"{name}: inplace=True is not here; leave it out and use the result, which is the same")


class _Activation(_Part):
    """A function of one tensor as a part."""

    function: ClassVar[Any]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(x)
        return y


class ReLU(_Activation):
    """max(x, 0). As torch.nn.ReLU."""

    function = F.relu


class SiLU(_Activation):
    """x * sigmoid(x). As torch.nn.SiLU."""

    function = F.silu


class Sigmoid(_Activation):
    """1 / (1 + exp(-x)). As torch.nn.Sigmoid."""

    function = F.sigmoid


class Tanh(_Activation):
    """The hyperbolic tangent. As torch.nn.Tanh."""

    function = F.tanh


class GELU(Module):
    """x times the normal distribution's share below it; "tanh" approximates that. As torch.nn.GELU."""

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.gelu(x, approximate=self.approximate)
        return y


class Identity(Module):
    """x itself, whatever it was made with. As torch.nn.Identity."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes anything, to stand in for any part."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Dropout(_Part):
    """While `training`, zeroes each element with probability `p` and divides the others by 1 - p. As torch.nn.Dropout.

    The numbers are those after `manual_seed`. Raises ValueError for a probability outside of [0, 1].
    """

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__(inplace)
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"Dropout: expected a probability p in [0, 1], got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.dropout(x, self.p, self.training)
        return y


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


class ConvTranspose2d(Convolution):
    """Transposed 2-D convolution over channels-last activations (B, H, W, C), or (B, C, H, W) with layout="NCHW".

    weight is (in, out / groups, kh, kw) as in checkpoints.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, groups, bias, dilation: as in `Conv2d`.
        output_padding: pixels added to the output at its ends.
        layout: "NHWC" or "NCHW", of input and output.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        output_padding: Pair = 0,
        groups: int = 1,
        *,
        bias: bool = True,
        dilation: Pair = 1,
        layout: str = "NHWC",
    ) -> None:
        super().__init__((in_channels, out_channels), kernel_size, groups, bias, transposed=True)
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.output_padding = output_padding
        self.layout = checked_layout(self, layout)

    def forward(self, x: Tensor) -> Tensor:
        w, b = compute_copy(self.weight), compute_copy(self.bias)
        return F.conv_transpose2d(
            x, w, b, self.stride, self.padding, self.output_padding, self.groups, self.dilation, layout=self.layout
        )
