"""LoHa (arXiv 2108.06098, LyCORIS' `loha`): W' = W + scale * (w1_a @ w1_b) * (w2_a @ w2_b), elementwise between."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from flame_train.adapters.merged import KEPT_BELOW, MatrixFactors, MergedAdapter, as_matrix, dense, product_of
from flame_train.adapters.qkv_split import Paths
from flame_train.engine import Parameter, Tensor, rematerialize
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType

from .kind import AdapterKind, HostArray, Layer, Make, alpha_of, alpha_tensor, generator, kohya_only, shrink, unjoined

ARRAYS: Final = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


@dataclass(frozen=True, slots=True)
class LohaFactors(MatrixFactors):
    """One module's four matrices: w1_a and w2_a are (out, rank), w1_b and w2_b (rank, in * kernel)."""

    @property
    def kind(self) -> str:
        return "loha"

    @property
    def rank(self) -> int:
        return int(self.arrays["hada_w1_b"].shape[0])

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight as a matrix: files do not tell the kernel."""
        return int(self.arrays["hada_w1_a"].shape[0]), int(self.arrays["hada_w1_b"].shape[1])

    def delta(self, weight: HostArray, strength: float = 1.0) -> HostArray:
        w1_a, w1_b, w2_a, w2_b = (self.arrays[name].astype(np.float32) for name in ARRAYS)
        product: HostArray = np.float32(strength * self.alpha / self.rank) * ((w1_a @ w1_b) * (w2_a @ w2_b))
        return product.reshape(weight.shape)


class Loha(AdapterKind):
    """w1_a begins normal with std 0.1, w1_b and w2_b with std 1, as in LyCORIS; w2_a is zero."""

    name = "loha"
    inner = ("hada_w1_b",)
    ends = MappingProxyType({f".{name}": name for name in ARRAYS} | {".alpha": "alpha"})

    def create(self, layer: Layer, name: str, rank: int, alpha: float, seed: int, make: Make) -> LohaAdapter:
        out, *taps = layer.weight.shape
        rng, width = generator(seed, name), math.prod(taps)
        values = [
            0.1 * rng.standard_normal((out, rank)),
            rng.standard_normal((rank, width)),
            np.zeros((out, rank)),
            rng.standard_normal((rank, width)),
        ]
        return _adapter(layer, name, values, alpha, make)

    def from_factors(self, layer: Layer, name: str, factors: LohaFactors, strength: float, make: Make) -> LohaAdapter:
        return _adapter(layer, name, [factors.arrays[n] for n in ARRAYS], factors.alpha * strength, make)

    def count(self, weight_shape: tuple[int, ...], rank: int) -> int:
        return 2 * rank * (weight_shape[0] + math.prod(weight_shape[1:]))

    def misfit_of_format(self, form: str) -> str:
        return kohya_only("LoHa", form)

    def network_args(self, factors: LohaFactors) -> dict[str, str]:
        return {"algo": "loha"}

    def kohya(self, factors: LohaFactors) -> dict[str, HostArray]:
        named = {f".{name}": array for name, array in factors.arrays.items()}
        return {**named, ".alpha": alpha_tensor(factors.alpha, factors.arrays["hada_w1_a"].dtype)}

    def fault(self, slots: Mapping[str, HostArray]) -> str:
        missing = [name for name in ARRAYS if name not in slots]
        if missing:
            return f"has no {missing[0]}"
        shapes = [slots[name].shape for name in ARRAYS]
        if any(len(shape) != 2 for shape in shapes):
            return f"has shapes {', '.join(map(str, shapes))}; expected four matrices"
        (out, rank), (rank_b, width), *_ = shapes
        if rank == 0 or [(out, rank), (rank, width)] * 2 != shapes or rank != rank_b:
            return f"has shapes {', '.join(map(str, shapes))}, which do not fit together"
        return alpha_of(slots, rank)[1]

    def read(self, slots: Mapping[str, HostArray], folded: float | None, scale: float) -> LohaFactors:
        arrays = {name: slots[name] for name in ARRAYS}
        return LohaFactors(arrays, alpha_of(slots, arrays["hada_w1_b"].shape[0])[0])

    def join(self, parts: Mapping[str, LohaFactors], paths: Paths) -> LohaFactors:
        return unjoined("LoHa", parts)


@dataclass(frozen=True, slots=True)
class LohaAdapter(MergedAdapter):
    """One layer's four matrices, sitting in the layer's `adapter` slot."""

    matrices: Mapping[str, Parameter]
    alpha: float
    shape: tuple[int, ...]

    @property
    def scale(self) -> float:  # type: ignore[override]
        return self.alpha / self.matrices["hada_w1_b"].shape[0]

    def parameters(self) -> Mapping[str, Parameter]:
        return self.matrices

    def product(self, dtype: DType, weight_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        w1_a, w1_b, w2_a, w2_b = (self.matrices[name].compute_copy.to(dtype) for name in ARRAYS)
        first, second = product_of(w1_a, w1_b), product_of(w2_a, w2_b)
        return first, second, first.shape

    def merged(self, weight: Any, dtype: DType) -> Tensor:
        """As its parent's, by an op that keeps neither product."""
        matrices = [self.matrices[name].compute_copy.to(dtype) for name in ARRAYS]
        return rematerialize(_added, weight, *matrices, self.scale, dtype, min_bytes=KEPT_BELOW)

    def delta(self) -> Tensor:
        return self.update(self.shape)

    def limit(self, max_norm: float) -> None:
        shrink(self.delta().square().sum().sqrt(), max_norm, (self.matrices["hada_w1_a"],))

    def factors(self) -> LohaFactors:
        return LohaFactors({name: p.numpy() for name, p in self.matrices.items()}, self.alpha)


def _added(weight: Any, w1_a: Tensor, w1_b: Tensor, w2_a: Tensor, w2_b: Tensor, scale: float, dtype: DType) -> Tensor:
    made: Tensor = F.hadamard_add(dense(weight, dtype), w1_a, w1_b, w2_a, w2_b, scale)
    return made


def _adapter(layer: Layer, name: str, values: list[HostArray], alpha: float, make: Make) -> LohaAdapter:
    matrices = {
        which: make(f"{name}.{which}", as_matrix(array.astype(np.float32)), layer.weight.device)
        for which, array in zip(ARRAYS, values, strict=True)
    }
    return LohaAdapter(matrices, alpha, tuple(layer.weight.shape))
