"""What a tensor is besides what can be computed with it: an array on a device, with a place in the graph."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from ..autograd.graph import Edge, GraphTensor, Hooks, Node, Remat
from ..backend import Backend, backend_of
from ..dtype import Array, DType, is_float
from ..op import VJP


class TensorBase:
    """An array on a device, with an optional place in the graph. `Tensor` adds operators and methods.

    Raises `TypeError` for `data` that is no array, or that is to require grad and is not floating.
    """

    __slots__ = ("__weakref__", "_grad", "_hooks", "_index", "_node", "_remat", "_requires_grad", "data")
    __array_priority__ = 1000

    def __init__(self, data: Array, *, requires_grad: bool = False) -> None:
        if type(data) is not np.ndarray and not hasattr(type(data), "__cuda_array_interface__"):
            backend_of(data)  # accepts NumPy's scalars, raises TypeError for anything else
        if requires_grad:
            _check_floating(data.dtype)
        self.data = data
        self._requires_grad = requires_grad
        self._grad: Any = None
        self._node: Node | None = None
        self._index = 0
        self._hooks: Hooks | None = None
        self._remat: Remat | None = None  # how to recompute the values, if ops are to save that instead of them

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dim."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.data.shape)

    @property
    def size(self) -> int:
        """The number of elements (torch's numel())."""
        return int(self.data.size)

    @property
    def dtype(self) -> DType:
        """The elements' type, a NumPy dtype."""
        result: DType = self.data.dtype
        return result

    @property
    def device(self) -> str:
        """Where it is: "cpu", "cuda" or another GPU by its number, "cuda:1"."""
        return self.backend.name

    @property
    def backend(self) -> Backend:
        """What the device offers: memory, copies and kernels."""
        return backend_of(self.data)

    @property
    def is_leaf(self) -> bool:
        """True if no op computed it from something that requires grad."""
        return self._node is None

    def numel(self) -> int:
        """Returns the number of elements."""
        return self.size

    @property
    def nbytes(self) -> int:
        """The bytes that the elements take."""
        return int(self.data.nbytes)

    def dim(self) -> int:
        """Returns the number of dims."""
        return self.ndim

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    @property
    def requires_grad(self) -> bool:
        """Whether ops record a graph of what is computed from it."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, value: bool = True) -> Self:
        """Sets `requires_grad` of a leaf, which is floating; returns this tensor."""
        if not self.is_leaf:
            raise RuntimeError("requires_grad can be changed on leaves only; use detach() on a computed tensor")
        if value:
            _check_floating(self.dtype)
        self._requires_grad = value
        return self


def _check_floating(dtype: DType) -> None:
    """Raises TypeError for a dtype that no gradient can have."""
    if not is_float(dtype):
        raise TypeError(
            f'only floating tensors can require grad, this one is {dtype.name}; cast it first with .to("float32")'
        )


def device_copy_node(t: GraphTensor, there: Backend) -> Node:
    """Returns the node of a copy of `t` on another device, `there`. It saves nothing."""
    here = t.backend

    def copy_back(_: Any, g: Array) -> Array:
        return here.to_device(there.to_host(g))

    formula = VJP(("input",), copy_back, (), frozenset())
    return Node("to", (formula,), {}, [Edge(t, "input")], [(t.data.shape, t.data.dtype)], here)
