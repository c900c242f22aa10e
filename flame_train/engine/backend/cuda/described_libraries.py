"""The libraries of a described GPU: they multiply nothing, and take the memory that they would take.

How much a plan of cuDNN's works in is known on the card alone. What was seen there (docs/log/) fits these rules:

- a convolution in fp32 copies its images to another order of dims: as many bytes as it reads and writes of them;
- a convolution in 16 bits takes nothing worth counting;
- attention's gradients in a fixed order, and those of a mask, write down all scores. They have the operands' dtype and
  whole tiles of 64 queries and 128 keys;
- other gradients of attention are by atomics, which add up the queries' in fp32;
- where heads share keys, the keys' and values' gradients of each head are written down too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...dtype import Array, DType, float32
from ...mode import mode
from ..shapes.array import ShapeArray
from .dual_gemm import DualGemm, Operands, Tile
from .launch_hooks import LaunchHooks
from .libraries.cublaslt import _WORKSPACE_BYTES as PRODUCTS_BYTES
from .libraries.cublaslt import Gelu
from .libraries.cudnn import CuDnn
from .workspace import Workspace

PRODUCTS = "matrix products"


class Traffic:
    """What a run on shapes moves: launches of kernels and products, bytes of their operands, and bytes to or from the
    host. Of the products' operations, `narrow` are in 8 bits.
    """

    def __init__(self) -> None:
        self.launches = self.operands = self.copied = self.narrow = 0

    def launched(self, args: Sequence[Any] = ()) -> None:
        """Notes a launch with its arguments, of which arrays are read or written whole."""
        self.launches += 1
        self.operands += sum(int(a.nbytes) for a in args if isinstance(a, ShapeArray))


class Modules:
    """Kernels that do nothing: none is compiled or even read. They record the requests, and what they would move."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.files = dict[tuple[str, str, DType, int], None]()
        self.texts = dict[tuple[str, str], None]()

    def get(self, file: str, kernel: str, dtype: DType, shared_bytes: int = 0) -> Callable[..., None]:
        self.files[file, kernel, dtype, shared_bytes] = None
        return self._launch

    def generated(self, text: str, kernel: str) -> Callable[..., None]:
        self.texts[text, kernel] = None
        return self._launch

    def _launch(self, grid: Any, block: Any, args: Sequence[Any] = (), **_: Any) -> None:
        self._traffic.launched(args)


class Products:
    """In cuBLASLt's place: one workspace for all products."""

    def __init__(self, cupy: Any, launch_hooks: LaunchHooks, traffic: Traffic) -> None:
        self._launch_hooks, self._workspace = launch_hooks, cupy.cuda.alloc(PRODUCTS_BYTES)
        self._traffic = traffic

    def product(
        self,
        a: Array,
        b: Array,
        out: Array,
        *,
        bias: Array | None = None,
        alpha: float = 1.0,
        plus: Array | None = None,
        gelu: Gelu | None = None,
        scales: tuple[Array, Array] | None = None,
    ) -> None:
        """Counts 2 M N K for each matrix.

        Args:
            a, b, out: the factors and the result, (..., M, K), (..., K, N) and (..., M, N).
            bias, alpha, plus, gelu, scales: as in `CublasLt.product`; they change no count.
        """
        flops = 2 * out.size * a.shape[-1]
        self._launch_hooks.multiplied(PRODUCTS, flops)
        self._traffic.launched()
        self._traffic.narrow += 0 if scales is None else flops


class Pairs(DualGemm):
    """The kernel of our own for two products, where the rule takes it: nothing is timed."""

    def run(self, tile: Tile, x: Operands) -> None:
        self._function(tile, x)
        (m, k), n, rank = x.a.shape, x.out.shape[1], x.b2.shape[0]
        self._launch_hooks.multiplied(PRODUCTS, 2 * m * n * (k + rank))
        if x.thin is not None:
            self._launch_hooks.multiplied(PRODUCTS, 2 * m * k * x.thin.shape[1])

    def _choose(self, problem: Any, x: Operands, otherwise: Any) -> Tile | None:
        return super()._choose(problem._replace(measured=False), x, otherwise)


class Plans(CuDnn):
    """In cuDNN's place: counts, and works in what the rules above say."""

    def __init__(self, workspace: Workspace, launch_hooks: LaunchHooks) -> None:
        self._workspace, self._launch_hooks = workspace, launch_hooks

    def _run(self, key: tuple[Any, ...], dtype: DType, build: Callable[..., None], arrays: dict[str, Array]) -> None:
        self._workspace.get(workspace_bytes(key[0], dtype, arrays))
        kind = "attention" if key[0].startswith("sdpa") else "convolution"
        self._launch_hooks.multiplied(kind, _flops(key[0], arrays))


def workspace_bytes(kind: str, dtype: DType, arrays: dict[str, Array]) -> int:
    """Bytes that a plan of cuDNN's works in."""
    if kind == "sdpa":
        return 0
    if kind == "sdpa_backward":
        return _attention_bytes(arrays["q"], arrays["k"], arrays["v"], mode().deterministic or "db" in arrays)
    images = [a for name, a in arrays.items() if name in ("x", "y", "g", "dx")]
    return sum(int(a.nbytes) for a in images) if dtype == float32 else 0


def _attention_bytes(queries: Array, keys: Array, values: Array, scores: bool) -> int:
    batch, heads, length, _ = queries.shape
    sums = int(queries.size) * float32.itemsize
    if scores:
        sums = batch * heads * -(-length // 64) * 64 * -(-keys.shape[2] // 128) * 128 * queries.itemsize
    shared = heads // keys.shape[1] if heads != keys.shape[1] else 0
    return sums + shared * (int(keys.nbytes) + int(values.nbytes))


def _flops(kind: str, arrays: dict[str, Array]) -> int:
    """Attention is two products, one of them with keys, and its gradients five, three of them with keys."""
    if kind.startswith("sdpa"):
        queries, keys, values = arrays["q"], arrays["k"], arrays["v"]
        scores = math.prod(queries.shape[:-1]) * int(keys.shape[-2])
        with_keys, others = (1, 1) if kind == "sdpa" else (3, 2)
        return 2 * scores * (with_keys * int(queries.shape[-1]) + others * int(values.shape[-1]))
    weight = arrays["w" if "w" in arrays else "dw"]
    return 2 * int(arrays["y" if "y" in arrays else "g"].size) * int(weight.size) // int(weight.shape[0])
