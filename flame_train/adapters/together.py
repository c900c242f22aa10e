"""Several finished adapters at once: in a network, each with a strength, or as one, whose rank is the sum of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from flame_train.adapters.folding import fold
from flame_train.adapters.qkv_split import holding
from flame_train.engine import Tensor, nn, tensor
from flame_train.engine.dtype import DType, float32

from .attach import attach_factors, layers_of, require_fit
from .factors import Array, LoraFactors
from .kinds import Factors, Layer
from .merged import MergedAdapter, dense

Strong = tuple[Mapping[str, Factors], float]
"""The adapters of one file, by layer, and their strength."""

_Parts = Sequence[tuple[Factors, float]]


@contextmanager
def attach_sum(model: nn.Module, several: Sequence[Strong]) -> Iterator[None]:
    """Within, a loaded `model` computes with the sum of several files' adapters.

    A layer with one adapter has it as `attach_factors` does. With several LoRAs, one with their matrices side by side.
    With others, the sum of their updates as a matrix, each of the layer's own weight.

    Raises ModelFileError as `attach_factors` does.
    """
    layers, parts = layers_of(model), dict[str, list[tuple[Factors, float]]]()
    for factors, strength in several:
        require_fit(model, factors)
        for name, one in factors.items():
            parts.setdefault(name, []).append((one, strength))
    whole: dict[float, dict[str, Factors]] = {}
    mixed = {}
    for name, found in parts.items():
        plain = [(one, strength) for one, strength in found if isinstance(one, LoraFactors)]
        if len(found) == 1:
            whole.setdefault(found[0][1], {})[name] = found[0][0]
        elif len(plain) == len(found) and len({one.down.shape[1:] for one, _ in plain}) == 1:
            whole.setdefault(1.0, {})[name] = summed(plain)
        else:
            mixed[name] = found
    try:
        for strength, chosen in whole.items():
            attach_factors(model, chosen, strength)
        for name, found in mixed.items():
            layers[name].adapter = SummedAdapter(
                tensor(_update(layers[name], found), device=layers[name].weight.device)
            )
        yield
    finally:
        for name in parts:
            layers[name].adapter = None


def _update(layer: Layer, parts: _Parts) -> Array:
    weight = dense(layer.weight, float32).numpy()
    total: Array = np.zeros_like(weight)
    for factors, strength in parts:
        total += factors.delta(weight, strength).reshape(weight.shape)
    return total


@dataclass(frozen=True, slots=True)
class SummedAdapter(MergedAdapter):
    """An update that is a matrix, whatever it was summed from."""

    matrix: Tensor
    scale: float = 1.0

    def product(self, dtype: DType, weight_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        one = Tensor(self.matrix.backend.xp.ones((1,) * len(weight_shape), dtype))
        return self.matrix.to(dtype), one, weight_shape


def summed(parts: Sequence[tuple[LoraFactors, float]]) -> LoraFactors:
    """Returns the LoRA whose update is the sum of each one's, times its strength. ValueError where shapes differ.

    Where strength times alpha / rank is the same for all, the matrices stay bit for bit, and alpha takes it up.
    Otherwise it goes into the up matrices: in their own format if that is exact, in fp32 if not.
    """
    shapes = {factors.weight_shape for factors, _ in parts}
    if len({shape[:2] for shape in shapes}) > 1 or len({shape[2:] for shape in shapes}) > 1:
        raise ValueError(f"is of shape {' and '.join(str(shape) for shape in sorted(shapes))}")
    rank = sum(factors.rank for factors, _ in parts)
    scales = {factors.scale * strength for factors, strength in parts}
    if len(scales) == 1:
        alpha, ups = scales.pop() * rank, [factors.up for factors, _ in parts]
    else:
        alpha = float(rank)
        ups = [fold(LoraFactors(factors.down, factors.up, factors.alpha * strength)) for factors, strength in parts]
    of_downs, of_ups = holding([factors.down for factors, _ in parts]), holding(ups)
    return LoraFactors(
        np.concatenate([factors.down.astype(of_downs, copy=False) for factors, _ in parts]),
        np.concatenate([up.astype(of_ups, copy=False) for up in ups], axis=1),
        alpha,
    )
