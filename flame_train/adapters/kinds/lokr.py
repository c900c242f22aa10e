"""LoKr (arXiv 2212.10650, LyCORIS' `lokr`): W' = W + scale * kron(w1, w2), both whole or products of two matrices.

A weight (out, in, kernel) has out = a b and in = c d: w1 is (a, c), w2 (b, d, kernel). The scale is alpha / rank, and 1
where neither is a product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from flame_train.adapters.factors import Array
from flame_train.adapters.file_form import ALPHA, Arrays, FileForm
from flame_train.adapters.merged import KEPT_BELOW, MatrixFactors, MergedAdapter, dense, product_of
from flame_train.engine import Parameter, Tensor, no_grad, rematerialize
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, float32
from flame_train.settings import field

from .kind import AdapterKind, Layer, Make, shrink

ARRAYS: Final = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")


@dataclass(frozen=True, slots=True)
class LokrFactors(MatrixFactors):
    """One module's matrices. Of a convolution's w2 the kernel is flattened in w2_b, and has dims of its own in w2."""

    @property
    def kind(self) -> str:
        return "lokr"

    @property
    def rank(self) -> int:
        """The inner width of a product; where there is none the alpha, as LyCORIS writes it."""
        products = [array for name, array in self.arrays.items() if name.endswith("_b")]
        return int(products[-1].shape[0]) if products else max(1, int(self.alpha))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if has_product(self.arrays) else 1.0

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight; a matrix where the file does not tell the kernel."""
        (a, c), (b, d, *kernel) = (_shape(self.arrays, which) for which in ("lokr_w1", "lokr_w2"))
        return (a * b, c * d, *kernel)

    def delta(self, weight: Array, strength: float = 1.0) -> Array:
        w1, w2 = (_whole(self.arrays, which) for which in ("lokr_w1", "lokr_w2"))
        product: Array = np.float32(strength * self.scale) * np.kron(w1, w2.reshape(len(w2), -1))
        return product.reshape(weight.shape)


def _array_problem(arrays: Arrays) -> str:
    for which in ("lokr_w1", "lokr_w2"):
        a, b = f"{which}_a", f"{which}_b"
        if (which in arrays) == (a in arrays and b in arrays) or (a in arrays) != (b in arrays):
            return f"has neither {which} nor {a} with {b}" if which not in arrays else f"has {which} twice"
        shapes = [arrays[name].shape for name in (which, a, b) if name in arrays]
        if any(len(shape) != 2 or 0 in shape for shape in shapes) and (which, len(shapes[0])) != ("lokr_w2", 4):
            return f"has a {which} of shapes {', '.join(map(str, shapes))}"
        if len(shapes) == 2 and shapes[0][1] != shapes[1][0]:
            return f"has a {which} of shapes {shapes[0]} and {shapes[1]}, which do not fit together"
    return ""


class Lokr(AdapterKind):
    """First values as in LyCORIS: w1 and the left half of w2 are uniform (Kaiming with a = sqrt 5), the rest zero."""

    name = "lokr"
    files = FileForm(
        "LoKr",
        {f".{name}": name for name in (*ARRAYS, ALPHA)},
        LokrFactors,
        _array_problem,
        inner=("lokr_w2_b", "lokr_w1_b"),
        network_args={"algo": "lokr"},
    )

    factor: int = field(
        -1, "size of the smaller matrix, or the next below that divides a side; -1: nearly square", ge=-1
    )
    decompose_both: bool = field(False, "also the smaller matrix is a product, where lora.rank is small enough")
    full_matrix: bool = field(False, "neither matrix is a product: lora.rank and lora.alpha do not matter")

    def shape_problem(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, str] | None:
        return ("factor", "expected -1 or at least 1, got 0") if self.factor == 0 else None

    def initial(self, layer: Layer, rank: int, alpha: float, rng: np.random.Generator) -> LokrFactors:
        values = {
            which: np.zeros(shape) if which in ("lokr_w2", "lokr_w2_b") else _uniform(rng, shape)
            for which, shape in self.shapes(tuple(layer.weight.shape), rank).items()
        }
        return LokrFactors(values, alpha if has_product(values) else float(rank))  # as LyCORIS has it

    def shapes(self, weight_shape: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a layer's matrices by name: which are products is LyCORIS' rule."""
        out, width, *kernel = weight_shape
        (a, b), (c, d) = factorization(out, self.factor), factorization(width, self.factor)
        shapes: dict[str, tuple[int, ...]] = {}
        if self.decompose_both and not self.full_matrix and rank < max(a, c) / 2:
            shapes |= {"lokr_w1_a": (a, rank), "lokr_w1_b": (rank, c)}
        else:
            shapes["lokr_w1"] = (a, c)
        if rank < max(b, d) / 2 and not self.full_matrix:
            shapes |= {"lokr_w2_a": (b, rank), "lokr_w2_b": (rank, d * math.prod(kernel))}
        else:
            shapes["lokr_w2"] = (b, d, *kernel)
        return shapes

    def from_factors(self, layer: Layer, factors: LokrFactors, strength: float, make: Make) -> LokrAdapter:
        matrices = {which: make(which, array.astype(np.float32)) for which, array in factors.arrays.items()}
        alpha = factors.alpha if has_product(matrices) else float(factors.rank)
        return LokrAdapter(matrices, alpha, factors.scale * strength, tuple(layer.weight.shape))

    def count(self, weight_shape: tuple[int, ...], rank: int) -> int:
        return sum(math.prod(shape) for shape in self.shapes(weight_shape, rank).values())


@dataclass(frozen=True, slots=True)
class LokrAdapter(MergedAdapter):
    """One layer's matrices, sitting in the layer's `adapter` slot."""

    matrices: Mapping[str, Parameter]
    alpha: float
    scale: float
    shape: tuple[int, ...]

    def parameters(self) -> Mapping[str, Parameter]:
        return self.matrices

    def product(self, dtype: DType, weight_shape: tuple[int, ...]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        (a, c), kernel = _shape(self.matrices, "lokr_w1"), weight_shape[2:]
        b, d = weight_shape[0] // a, weight_shape[1] // c
        w1, w2 = self._whole("lokr_w1", dtype), self._whole("lokr_w2", dtype)
        ones = (1,) * len(kernel)
        return w1.reshape(a, 1, c, 1, *ones), w2.reshape(1, b, 1, d, *kernel), (a, b, c, d, *kernel)

    def merged(self, weight: Any, dtype: DType) -> Tensor:
        """Adds as its parent does, by an op whose gradients read the weight's once."""
        w1, w2 = self._whole("lokr_w1", dtype), self._whole("lokr_w2", dtype)
        kernel = tuple(weight.shape[2:])
        w2 = w2.reshape(len(w2), -1, *kernel)
        return rematerialize(_added, weight, w1, w2, self.scale, dtype, min_bytes=KEPT_BELOW)

    def _whole(self, which: str, dtype: DType) -> Tensor:
        if which in self.matrices:
            return self.matrices[which].compute_copy.to(dtype)
        left, right = (self.matrices[f"{which}_{half}"].compute_copy.to(dtype) for half in "ab")
        return product_of(left, right)

    def delta(self) -> Tensor:
        return self.update(self.shape)

    def limit(self, max_norm: float) -> None:
        with no_grad():
            w1, w2 = (self._whole(which, float32).square().sum().sqrt() for which in ("lokr_w1", "lokr_w2"))
            first = self.matrices.get("lokr_w1", self.matrices.get("lokr_w1_a"))
            assert first is not None
            shrink(w1 * w2 * abs(self.scale), max_norm, (first,))

    def factors(self) -> LokrFactors:
        return LokrFactors({name: p.numpy() for name, p in self.matrices.items()}, self.alpha)


def _added(weight: Any, w1: Tensor, w2: Tensor, scale: float, dtype: DType) -> Tensor:
    out: Tensor = F.kron_add(dense(weight, dtype), w1, w2, scale)
    return out


def factorization(dimension: int, factor: int) -> tuple[int, int]:
    """(m, n) with m * n = dimension and m <= n: one of them `factor`, or m the next below it; for -1 nearly equal."""
    if factor > 0 and dimension % factor == 0:
        m, n = sorted((factor, dimension // factor))
        return m, n
    most = math.isqrt(dimension)
    m = next(m for m in range(min(factor, most) if factor > 0 else most, 0, -1) if dimension % m == 0)
    return m, dimension // m


def has_product(arrays: Mapping[str, object]) -> bool:
    """Says whether one of the two matrices is a product: only then do rank and alpha mean something."""
    return any(name.endswith("_a") for name in arrays)


def _uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    bound = 1.0 / math.sqrt(math.prod(shape[1:]))
    return rng.uniform(-bound, bound, shape)


def _shape(arrays: Mapping[str, Array | Parameter], which: str) -> tuple[int, ...]:
    if which in arrays:
        return tuple(arrays[which].shape)
    return int(arrays[f"{which}_a"].shape[0]), int(arrays[f"{which}_b"].shape[1])


def _whole(arrays: Mapping[str, Array], which: str) -> Array:
    if which in arrays:
        return arrays[which].astype(np.float32)
    product: Array = arrays[f"{which}_a"].astype(np.float32) @ arrays[f"{which}_b"].astype(np.float32)
    return product
