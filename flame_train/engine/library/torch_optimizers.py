"""Optimizers under PyTorch's names, for PyTorch users: the given leaves are packed into one arena.

A parameter whose gradient is None counts as having a gradient of zeros. PyTorch would leave it alone, here
momentum and weight decay still act on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..optim.flat_parameters import FlatParameters, listed, named_parameters
from ..optim.optimizer import Optimizer
from ..optim.optimizers import AdamRule, AdamWRule, SGDRule
from ..optim.transform import check
from ..tensors.tensor import Tensor

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Mapping[str, Any]]
"""Tensors, (name, tensor) pairs, or groups: {"params": tensors or one, "lr": ..., "weight_decay": ...}."""


Betas = tuple[float, float]
_USUAL: Betas = (0.9, 0.999)


class AdamW(Optimizer):
    """torch.optim.AdamW over fp32 leaves; groups may differ in `lr` and `weight_decay`.

    Args:
        params: the leaves, with or without names, or groups of them.
        lr: the learning rate.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: decay of the weights, decoupled from the gradient.

    Raises:
        TypeError: a group sets anything else.
        ValueError: a number is outside its bounds.
    """

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: Betas = _USUAL, eps: float = 1e-8, weight_decay: float = 1e-2
    ) -> None:
        arena, lr, weight_decay = _pack(params, lr, weight_decay)
        super().__init__(arena, [AdamWRule(betas, eps, weight_decay)], lr=lr)


class Adam(Optimizer):
    """torch.optim.Adam over fp32 leaves; groups may differ in `lr` and `weight_decay`.

    Args:
        params, lr, betas, eps: as in `AdamW`.
        weight_decay: a share of the weights, added to the gradient.
    """

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: Betas = _USUAL, eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        arena, lr, weight_decay = _pack(params, lr, weight_decay)
        super().__init__(arena, [AdamRule(betas, eps, weight_decay)], lr=lr)


class SGD(Optimizer):
    """torch.optim.SGD over fp32 leaves; groups may differ in `lr` and `weight_decay`.

    Args:
        params, lr: as in `AdamW`.
        momentum: decay of the velocity; 0: none.
        dampening: the share of a gradient that does not enter the velocity.
        weight_decay: a share of the weights, added to the gradient.
        nesterov: whether the velocity looks a step ahead.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        arena, lr, weight_decay = _pack(params, lr, weight_decay)
        super().__init__(arena, [SGDRule(momentum, dampening, weight_decay, nesterov)], lr=lr)


def _pack(params: Params, lr: float, weight_decay: float) -> tuple[FlatParameters, float, float]:
    """Returns the arena, and the largest rate and decay of any group, of which the arena holds each group's share."""
    given = listed(params)
    groups: list[Any] = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    members: list[Any] = []
    rates: list[float] = []
    decays: list[float] = []
    for group in groups:
        unknown = sorted(set(group) - {"params", "lr", "weight_decay"})
        if unknown:
            raise TypeError(f"optimizer: a group may set params, lr and weight_decay; got {unknown[0]!r}")
        one = isinstance(group["params"], Tensor)
        in_group = [group["params"]] if one else list(group["params"])
        members += in_group
        rates += [group.get("lr", lr)] * len(in_group)
        decays += [group.get("weight_decay", weight_decay)] * len(in_group)
    named = named_parameters(members)
    names = [name for name, _ in named]
    for rate, decay in zip(rates, decays, strict=True):
        check("optimizer", lr=rate, weight_decay=decay)
    lr, weight_decay = max(rates, default=lr), max(decays, default=weight_decay)
    arena = FlatParameters(named, lr_scale=_shares(names, rates, lr), decay_scale=_shares(names, decays, weight_decay))
    return arena, lr, weight_decay


def _shares(names: Sequence[str], values: Sequence[float], largest: float) -> dict[str, float]:
    return {name: v / largest if largest else 1.0 for name, v in zip(names, values, strict=True)}
