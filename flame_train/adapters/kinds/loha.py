"""LoHa (arXiv 2108.06098, LyCORIS' `loha`): W' = W + scale * (w1_a @ w1_b) * (w2_a @ w2_b), elementwise between."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from flame_train.adapters.factors import Array
from flame_train.adapters.file_form import ALPHA, Arrays, FileForm
from flame_train.adapters.merged import KEPT_BELOW, MatrixFactors, MergedAdapter, as_matrix, dense, product_of
from flame_train.engine import Parameter, Tensor, rematerialize
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType

from .kind import AdapterKind, Layer, Make, shrink

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

    def delta(self, weight: Array, strength: float = 1.0) -> Array:
        w1_a, w1_b, w2_a, w2_b = (self.arrays[name].astype(np.float32) for name in ARRAYS)
        product: Array = np.float32(strength * self.alpha / self.rank) * ((w1_a @ w1_b) * (w2_a @ w2_b))
        return product.reshape(weight.shape)


def _array_problem(arrays: Arrays) -> str:
    missing = [name for name in ARRAYS if name not in arrays]
    if missing:
        return f"has no {missing[0]}"
    shapes = [arrays[name].shape for name in ARRAYS]
    if any(len(shape) != 2 for shape in shapes):
        return f"has shapes {', '.join(map(str, shapes))}; expected four matrices"
    (out, rank), (rank_b, width), *_ = shapes
    if rank == 0 or [(out, rank), (rank, width)] * 2 != shapes or rank != rank_b:
        return f"has shapes {', '.join(map(str, shapes))}, which do not fit together"
    return ""


class Loha(AdapterKind):
    """w1_a begins normal with std 0.1, w1_b and w2_b with std 1, as in LyCORIS; w2_a is zero."""

    name = "loha"
    files = FileForm(
        "LoHa",
        {f".{name}": name for name in (*ARRAYS, ALPHA)},
        LohaFactors,
        _array_problem,
        inner=("hada_w1_b",),
        network_args={"algo": "loha"},
    )

    def initial(self, layer: Layer, rank: int, alpha: float, rng: np.random.Generator) -> LohaFactors:
        out, *taps = layer.weight.shape
        width = math.prod(taps)
        values = [
            0.1 * rng.standard_normal((out, rank)),
            rng.standard_normal((rank, width)),
            np.zeros((out, rank)),
            rng.standard_normal((rank, width)),
        ]
        return LohaFactors(dict(zip(ARRAYS, values, strict=True)), alpha)

    def from_factors(self, layer: Layer, factors: LohaFactors, strength: float, make: Make) -> LohaAdapter:
        matrices = {name: make(name, as_matrix(factors.arrays[name].astype(np.float32))) for name in ARRAYS}
        return LohaAdapter(matrices, factors.alpha * strength, tuple(layer.weight.shape))

    def count(self, weight_shape: tuple[int, ...], rank: int) -> int:
        return 2 * rank * (weight_shape[0] + math.prod(weight_shape[1:]))


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
        """Adds as its parent does, by an op that keeps neither product."""
        matrices = [self.matrices[name].compute_copy.to(dtype) for name in ARRAYS]
        return rematerialize(_added, weight, *matrices, self.scale, dtype, min_bytes=KEPT_BELOW)

    def delta(self) -> Tensor:
        return self.update(self.shape)

    def limit(self, max_norm: float) -> None:
        shrink(self.delta().square().sum().sqrt(), max_norm, (self.matrices["hada_w1_a"],))

    def factors(self) -> LohaFactors:
        return LohaFactors({name: p.numpy() for name, p in self.matrices.items()}, self.alpha)


def _added(weight: Any, w1_a: Tensor, w1_b: Tensor, w2_a: Tensor, w2_b: Tensor, scale: float, dtype: DType) -> Tensor:
    out: Tensor = F.hadamard_add(dense(weight, dtype), w1_a, w1_b, w2_a, w2_b, scale)
    return out
