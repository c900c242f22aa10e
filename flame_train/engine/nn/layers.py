"""The layers networks are made of. `Linear` and `Conv2d` carry a spec in which an adapter can sit."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Protocol

from ...errors import ShapeError
from .. import functional as F
from ..op import LAYOUTS
from ..ops.conv.geometry import Padding, Pair
from ..tensors.tensor import Parameter, Tensor
from .module import Module, compute_copy, operand
from .quantized import QuantizedWeight, ScaledWeight, Storage
from .spec import param


class LayerAdapter(Protocol):
    """What a layer's `adapter` may be: it computes the layer's output, with its own update, in the layer's stead."""

    def __call__(self, layer: Linear | Conv2d, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns the adapted layer's output for `x`; a linear layer's with `residual` added, if there is one."""

    def apply_grouped(self, layers: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...] | None:
        """The outputs of all `layers`, the first of which has this adapter, for `x`; None if they cannot be joined."""


class Linear(Module):
    """x @ weight^T + bias; weight is (out_features, in_features), stored in fewer bits after `quantize`."""

    weight: Tensor | QuantizedWeight
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        _sizes(self, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight = param(out_features, in_features)
        self.bias = param(out_features, init="zeros") if bias else None
        self.adapter: LayerAdapter | None = None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns the output (..., out_features) for x (..., in_features), plus `residual`, of the output's shape."""
        return self.bare(x, residual) if self.adapter is None else self.adapter(self, x, residual)

    def bare(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns the same without the adapter."""
        w, b = operand(self.weight, x.dtype), compute_copy(self.bias)
        if isinstance(w, ScaledWeight):
            alike = residual if residual is not None and residual.dtype == x.dtype else None
            y: Tensor = F.scaled_linear(x, w.data, w.scales, b, alike, dynamic=w.dynamic, rotated=w.rotated)
            return y if residual is alike else y + residual
        if residual is not None:
            return F.linear_add(x, w, b, residual)
        return F.linear(x, w, b)

    def quantize(self, storage: Storage, rounds_input: bool = True) -> None:
        """Stores the loaded weight as `storage` says, whose `dynamic` holds where the layer `rounds_input`.

        Raises TypeError for a weight that is trained, or stored in fewer bits already.
        """
        w = self.weight
        if isinstance(w, QuantizedWeight) or (isinstance(w, Parameter) and w.requires_grad):
            what = "is trained" if isinstance(w, Parameter) else "is stored in fewer bits already"
            raise TypeError(f"quantize: expected a frozen weight, this one {what}")
        self.weight = QuantizedWeight.of(w, storage.of_layer(rounds_input))


def grouped_linear(layers: Sequence[Linear], x: Tensor) -> tuple[Tensor, ...]:
    """Returns each layer's output for the same input, in one product where their adapters can be joined."""
    adapter = layers[0].adapter
    joined = adapter.apply_grouped(layers, x) if adapter is not None else None
    return joined if joined is not None else tuple(layer(x) for layer in layers)


class Convolution(Module):
    """The weight and the bias of a convolution. Raises ShapeError for channels that groups do not divide.

    Args:
        channels: of input and output.
        kernel_size: pixels, one number or (h, w).
        groups: groups of channels that do not mix.
        bias: whether there is one.
        transposed: whether it is a transposed convolution.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, channels: tuple[int, int], kernel_size: Pair, groups: int, bias: bool, transposed: bool = False
    ) -> None:
        self.kernel_size = _kernel(self, *channels, kernel_size, groups)
        (self.in_channels, self.out_channels), self.groups = channels, groups
        outer, inner = channels if transposed else channels[::-1]
        self.weight = param(outer, inner // groups, *self.kernel_size)
        self.bias = param(self.out_channels, init="zeros") if bias else None


class Conv2d(Convolution):
    """2-D convolution over channels-last activations (B, H, W, C).

    weight is (out, in / groups, kh, kw) as in checkpoints.

    Args:
        in_channels, out_channels: channels of input and output.
        kernel_size, stride, padding, dilation: pixels, one number or (h, w).
        groups: groups of channels that do not mix.
        bias: whether there is one.
        layout: "NHWC" or "NCHW", of input and output.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Padding = 0,
        dilation: Pair = 1,
        groups: int = 1,
        *,
        bias: bool = True,
        layout: str = "NHWC",
    ) -> None:
        super().__init__((in_channels, out_channels), kernel_size, groups, bias)
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.layout = checked_layout(self, layout)
        self.adapter: LayerAdapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.adapter is None:
            return self.bare(x)
        if self.layout == "NHWC":
            return self.adapter(self, x)
        return self.adapter(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def bare(self, x: Tensor) -> Tensor:
        """Returns the convolution without the adapter."""
        w, b = compute_copy(self.weight), compute_copy(self.bias)
        return F.conv2d(x, w, b, self.stride, self.padding, self.dilation, self.groups, layout=self.layout)


class LayerNorm(Module):
    """Layer normalisation over the last dim, or over the last few: `LayerNorm((4, 8))`."""

    weight: Tensor
    bias: Tensor

    def __init__(self, dim: int | Sequence[int], eps: float = 1e-5) -> None:
        self.dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
        for size in self.dims:
            _sizes(self, dim=size)
        self.eps = eps
        self.weight = param(*self.dims, init="ones")
        self.bias = param(*self.dims, init="zeros")

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.dims, compute_copy(self.weight), compute_copy(self.bias), self.eps)


class RMSNorm(Module):
    """Root-mean-square normalisation over the last dim: without subtracting a mean, and without a bias."""

    weight: Tensor

    def __init__(self, dim: int, eps: float | None = None) -> None:
        _sizes(self, dim=dim)
        self.dim, self.eps = dim, eps
        self.weight = param(dim, init="ones")

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.dim,), compute_copy(self.weight), self.eps)


class GroupNorm(Module):
    """Group normalisation over channels-last activations, or (B, C, ...) with layout="NCHW".

    Args:
        num_groups, num_channels: groups of channels, and channels.
        eps: is added to the variance.
        silu: whether SiLU is applied to the result, in the same pass.
        layout: "NHWC" or "NCHW".

    Raises:
        ShapeError: the groups do not divide the channels.
    """

    weight: Tensor
    bias: Tensor

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, *, silu: bool = False, layout: str = "NHWC"
    ) -> None:
        self.layout = checked_layout(self, layout)
        _sizes(self, num_groups=num_groups, num_channels=num_channels)
        if num_groups <= 0 or num_channels % num_groups:
            raise ShapeError(f"GroupNorm: {num_channels} channels are not divisible into {num_groups} groups")
        self.num_groups, self.eps = num_groups, eps
        self.op = F.group_norm_silu if silu else F.group_norm
        self.weight = param(num_channels, init="ones")
        self.bias = param(num_channels, init="zeros")

    def forward(self, x: Tensor) -> Tensor:
        w, b = compute_copy(self.weight), compute_copy(self.bias)
        return self.op(x, self.num_groups, w, b, self.eps, layout=self.layout)


class Embedding(Module):
    """Rows (embedding_dim,) of a table by index."""

    weight: Tensor

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        _sizes(self, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.weight = param(num_embeddings, embedding_dim, init="normal")

    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, compute_copy(self.weight))


def _kernel(layer: Module, in_channels: int, out_channels: int, kernel_size: Pair, groups: int) -> tuple[int, int]:
    """Returns a convolution's kernel as height and width, if all its sizes are sizes and fit each other."""
    kernel = kernel_size if isinstance(kernel_size, tuple) else (kernel_size, kernel_size)
    if len(kernel) != 2:
        raise TypeError(f"{type(layer).__name__}: expected an int kernel_size, or two, got {kernel_size!r}")
    for size in kernel:
        _sizes(layer, in_channels=in_channels, out_channels=out_channels, kernel_size=size, groups=groups)
    if groups == 0 or in_channels % groups or out_channels % groups:
        raise ShapeError(
            f"{type(layer).__name__}: {in_channels} and {out_channels} channels are not divisible into {groups} groups"
        )
    return kernel


def checked_layout(layer: Module, layout: str) -> str:
    """Returns `layout`. Raises ShapeError, naming the layer, unless it is one."""
    if layout not in LAYOUTS:
        raise ShapeError(f"{type(layer).__name__}: expected layout 'NCHW' or 'NHWC', got {layout!r}")
    return layout


def _sizes(layer: Module, **given: Any) -> None:
    """Raises TypeError, naming it, for a size that is no integer, ValueError for a negative one."""
    for name, value in given.items():
        if not isinstance(value, Integral):
            raise TypeError(f"{type(layer).__name__}: expected an int {name}, got {value!r}")
        if value < 0:
            raise ValueError(f"{type(layer).__name__}: expected {name} of at least 0, got {value}")
