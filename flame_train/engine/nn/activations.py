"""Parts without weights, as torch.nn names them: for nn.Sequential, and for who looks for them there."""

from __future__ import annotations

from typing import Any, ClassVar

from .. import functional as F
from ..tensors.tensor import Tensor
from .module import Module


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
