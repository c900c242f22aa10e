"""Tensors. `Tensor` is an array with a place in the graph; `Frozen` and `Parameter` are its two special kinds.

Operators and methods find their ops by name in the registry, so this module imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import numpy as np

from .backend import Backend, backend_of, get_backend
from .dtype import Array, DType, as_dtype, is_float
from .graph import Node, backward
from .mode import mode
from .op import REGISTRY

Hook = Callable[["Tensor"], "Tensor | None"]
Number = float
Index = int | slice | EllipsisType | None | Sequence[int]


class HookHandle:
    """Returned by `register_hook`; `remove()` takes the hook off again."""

    def __init__(self, hooks: list[Hook], hook: Hook) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


class Tensor:
    """An array on a device, with an optional place in the graph. Names and meaning follow torch.Tensor."""

    __slots__ = ("__weakref__", "_grad", "_hooks", "_index", "_node", "_requires_grad", "data")
    __array_priority__ = 1000

    def __init__(self, data: Array, *, requires_grad: bool = False) -> None:
        if requires_grad and not is_float(data.dtype):
            raise TypeError(f"only floating tensors can require grad, this one is {data.dtype.name}")
        self.data = data
        self._requires_grad = requires_grad
        self._grad: Tensor | None = None
        self._node: Node | None = None
        self._index = 0
        self._hooks: list[Hook] | None = None

    @classmethod
    def _from_op(cls, data: Array, node: Node | None, index: int) -> Tensor:
        t = Tensor(data)
        if node is not None and is_float(data.dtype):
            t._node, t._index, t._requires_grad = node, index, True
        return t

    # ---- what it is --------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        return len(self.data.shape)

    @property
    def size(self) -> int:
        """The number of elements (torch's numel())."""
        return int(self.data.size)

    @property
    def dtype(self) -> DType:
        result: DType = self.data.dtype
        return result

    @property
    def device(self) -> str:
        return self.backend.name

    @property
    def backend(self) -> Backend:
        return backend_of(self.data)

    @property
    def is_leaf(self) -> bool:
        """True if no op computed it from something that requires grad."""
        return self._node is None

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        extra = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype.name}, device={self.device!r}{extra})"

    # ---- reading it on the host --------------------------------------------------------------------

    def numpy(self) -> np.ndarray[Any, Any]:
        """The values on the host. Raises RuntimeError while a step is captured."""
        return self.backend.get(self.data)

    def item(self) -> float:
        """The single value as a Python number."""
        if self.size != 1:
            raise ValueError(f"item(): expected one element, this tensor has shape {self.shape}")
        return self.numpy().reshape(-1)[0].item()

    __float__ = item

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def tolist(self) -> Any:
        return self.numpy().tolist()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()

    # ---- gradients ---------------------------------------------------------------------------------

    @property
    def _leaf(self) -> Tensor:
        """Where a gradient that reaches this leaf is kept; also the one whose hooks see it."""
        return self

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, value: bool = True) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError("requires_grad can be changed on leaves only; use detach() on a computed tensor")
        if value and not is_float(self.dtype):
            raise TypeError(f"only floating tensors can require grad, this one is {self.dtype.name}")
        self._requires_grad = value
        return self

    @property
    def grad(self) -> Tensor | None:
        """The accumulated gradient. May be read, replaced and edited in place."""
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and value.shape != self.shape:
            raise ValueError(f"grad: expected shape {self.shape}, got {value.shape}")
        self._grad = value

    def _accumulate(self, g: Array) -> None:
        """Adds a finished gradient. The array is copied: nobody else may see the leaf's own buffer."""
        if self._grad is None:
            self._grad = Tensor(g.copy())
        else:
            self._grad.data += g

    def backward(self, gradient: Tensor | None = None, *, retain_graph: bool = False) -> None:
        """Accumulates the gradient of this tensor into every leaf it came from."""
        backward([self], [gradient], retain_graph=retain_graph)

    def register_hook(self, hook: Hook) -> HookHandle:
        """Calls `hook` with this tensor's complete gradient; what it returns, if anything, replaces it."""
        if not self.requires_grad:
            raise RuntimeError("register_hook: this tensor does not require grad")
        if self._node is not None:
            hooks = self._node.hooks.setdefault(self._index, [])
        else:
            self._hooks = hooks = self._hooks if self._hooks is not None else []
        hooks.append(hook)
        return HookHandle(hooks, hook)

    def detach(self) -> Tensor:
        """The same values without their history; shares memory."""
        return Tensor(self.data)

    # ---- moving and casting ------------------------------------------------------------------------

    def to(self, target: str | DType) -> Tensor:
        """A copy on another device, or in another dtype (differentiable). As torch.Tensor.to."""
        if isinstance(target, str) and target in ("cpu", "cuda"):
            if target == self.device:
                return self
            return Tensor(get_backend(target).put(self.backend.get(self.data)), requires_grad=False)
        dtype = as_dtype(target)
        return self if dtype == self.dtype else _op("cast", self, dtype)

    def float(self) -> Tensor:
        return self.to("float32")

    def clone(self) -> Tensor:
        return _op("clone", self)

    def contiguous(self) -> Tensor:
        """The same values in row-major memory; itself if they are already."""
        return self if self.data.flags.c_contiguous else self.clone()

    # ---- arithmetic --------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Tensor:
        return _op("add", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return _op("add", self, other)

    def __sub__(self, other: Any) -> Tensor:
        return _op("sub", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return _op("rsub", self, other)

    def __mul__(self, other: Any) -> Tensor:
        return _op("mul", self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return _op("mul", self, other)

    def __truediv__(self, other: Any) -> Tensor:
        return _op("div", self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return _op("mul", _op("reciprocal", self), other)

    def __pow__(self, exponent: Any) -> Tensor:
        return _op("pow", self, exponent)

    def __neg__(self) -> Tensor:
        return _op("neg", self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return _op("matmul", self, other)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        return _op("getitem", self, index)

    def __lt__(self, other: Any) -> Tensor:
        return _op("lt", self, other)

    def __le__(self, other: Any) -> Tensor:
        return _op("le", self, other)

    def __gt__(self, other: Any) -> Tensor:
        return _op("gt", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return _op("ge", self, other)

    # ---- shape -------------------------------------------------------------------------------------

    def reshape(self, *shape: Any) -> Tensor:
        return _op("reshape", self, _spread(shape))

    def permute(self, *dims: Any) -> Tensor:
        return _op("permute", self, _spread(dims))

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        return _op("transpose", self, dim0, dim1)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        return _op("flatten", self, start_dim, end_dim)

    def squeeze(self, dim: int) -> Tensor:
        return _op("squeeze", self, dim)

    def unsqueeze(self, dim: int) -> Tensor:
        return _op("unsqueeze", self, dim)

    def expand(self, *shape: Any) -> Tensor:
        return _op("expand", self, _spread(shape))

    # ---- reductions --------------------------------------------------------------------------------

    def sum(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        return _op("sum", self, dim, keepdim)

    def mean(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
        return _op("mean", self, dim, keepdim)

    # ---- elementwise -------------------------------------------------------------------------------

    def exp(self) -> Tensor:
        return _op("exp", self)

    def log(self) -> Tensor:
        return _op("log", self)

    def sqrt(self) -> Tensor:
        return _op("sqrt", self)

    def square(self) -> Tensor:
        return _op("square", self)

    def sigmoid(self) -> Tensor:
        return _op("sigmoid", self)

    def tanh(self) -> Tensor:
        return _op("tanh", self)

    def clamp(self, min: Number | None = None, max: Number | None = None) -> Tensor:
        return _op("clamp", self, min, max)

    def softmax(self, dim: int) -> Tensor:
        return _op("softmax", self, dim)


class Frozen(Tensor):
    """A base weight: read-only, never trained, in any storage. It has no gradient, not even an empty one."""

    __slots__ = ()

    @property
    def grad(self) -> Tensor | None:
        raise AttributeError("a Frozen tensor has no gradient")

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        raise AttributeError("a Frozen tensor has no gradient")

    def requires_grad_(self, value: bool = True) -> Tensor:
        if value:
            raise TypeError("a Frozen tensor cannot require grad; trainable weights are Parameters")
        return self


class Parameter(Tensor):
    """A trainable weight: an fp32 leaf with a name, whose values and gradient may be views into an arena."""

    __slots__ = ("_working", "name")

    def __init__(self, data: Array, name: str = "") -> None:
        super().__init__(data, requires_grad=True)
        self.name = name
        self._working: Tensor | None = None

    @property
    def working(self) -> Tensor:
        """The values in the dtype that activations have, where an arena keeps such a copy; else the parameter."""
        return self if self._working is None else self._working

    def _accumulate(self, g: Array) -> None:
        if self._grad is None:
            self._grad = Tensor(g.copy())
        else:
            self._grad.data[...] += g

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, shape={self.shape}, dtype={self.dtype.name}, device={self.device!r})"


class Working(Tensor):
    """A low-precision copy of a parameter, for use in its place: the gradient goes to the parameter, in fp32."""

    __slots__ = ("parameter",)

    def __init__(self, data: Array, parameter: Parameter) -> None:
        super().__init__(data, requires_grad=True)
        self.parameter = parameter

    @property
    def _leaf(self) -> Tensor:
        return self.parameter


def tensor(
    data: Any, dtype: str | DType | None = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """A new tensor holding a copy of `data` (NumPy array, nested lists, numbers, or anything with DLPack).

    Python floats become float32, as torch.tensor does; arrays keep their dtype unless `dtype` is given.
    """
    if hasattr(data, "__dlpack__") and not isinstance(data, np.ndarray):
        host = np.from_dlpack(data)
    else:
        host = np.asarray(data)
        if host.dtype == np.float64 and not isinstance(data, (np.ndarray, np.generic)):
            host = host.astype(np.float32)
    if dtype is not None:
        host = host.astype(as_dtype(dtype))
    return Tensor(get_backend(device or mode().device).put(host), requires_grad=requires_grad)


def _op(name: str, *args: Any) -> Any:
    return REGISTRY[name](*args)


def _spread(values: tuple[Any, ...]) -> tuple[int, ...]:
    """`x.reshape(2, 3)` and `x.reshape((2, 3))` mean the same."""
    if len(values) == 1 and isinstance(values[0], (tuple, list)):
        return tuple(values[0])
    return tuple(values)
