"""Tensors. `Tensor` is an array with a place in the graph; `Frozen` and `Parameter` are its two special kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ...errors import ShapeError, kind_of
from .. import lazy
from ..autograd.backprop import backward
from ..autograd.graph import HookHandle, Hooks, Node
from ..backend import get_backend
from ..counterparts import absent_from_tensor
from ..dtype import Array, DType, as_dtype, is_float
from ..mode import mode
from ..op import REGISTRY
from .display import values_shown
from .inplace import InPlace
from .methods import Methods
from .tensor_base import device_copy_node


class Tensor(Methods["Tensor"], InPlace["Tensor"]):
    """An array on a device, with an optional place in the graph. Names and meaning follow torch.Tensor.

    Its state is in `tensor_base.py`, its operators in `operators.py`, its methods in `methods.py`, those that write in
    place in `inplace.py`. `data` is a NumPy or CuPy array, and is not copied; `tensor()` makes tensors of other things.
    """

    __slots__ = ()

    @classmethod
    def _from_op(cls, data: Array, node: Node | None, index: int) -> Tensor:
        """Returns output `index` of the op that `node` records; one that is not floating is outside the graph."""
        t = Tensor(data)
        if node is not None and is_float(data.dtype):
            t._node, t._index, t._requires_grad = node, index, True
        return t

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Says what to write for a method that PyTorch has."""
            if hint := absent_from_tensor(name, REGISTRY | lazy.OPS):
                raise AttributeError(f"Tensor has no attribute {name!r}: {hint}")
            return object.__getattribute__(self, name)  # raises Python's own error, or a property's

    # ---- what it is --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Tensor]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d tensor")
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        """Returns the values, of large tensors those at the edges and the shape; in a captured step the shape alone."""
        extra = ", requires_grad=True" if self.requires_grad else ""
        shown = values_shown(self.data, self.backend, len(type(self).__name__) + 1)
        return f"{type(self).__name__}({shown}, dtype={self.dtype.name}, device={self.device!r}{extra})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.ndim else super().__format__(spec)

    # ---- reading it on the host --------------------------------------------------------------------

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns the values on the host. Raises RuntimeError while a step is captured."""
        return self.backend.to_host(self.data)

    def item(self) -> float:
        """Returns the single value as a Python number. Raises ValueError unless there is exactly one."""
        if self.size != 1:
            raise ValueError(f"item(): expected one element, this tensor has shape {self.shape}")
        return self.numpy().reshape(-1)[0].item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def tolist(self) -> Any:
        """Returns the values as nested lists of Python numbers."""
        return self.numpy().tolist()

    def __array__(self, dtype: DType | None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.numpy(), dtype, copy=copy)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()

    # ---- gradients ---------------------------------------------------------------------------------

    @property
    def _leaf(self) -> Tensor:
        """The tensor that keeps the gradient reaching this leaf, and whose hooks see it."""
        return self

    @property
    def grad(self) -> Tensor | None:
        """The accumulated gradient. May be read, replaced and edited in place."""
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"grad: expected a Tensor or None, got {kind_of(value)}")
        if value is not None and value.shape != self.shape:
            raise ValueError(f"grad: expected shape {self.shape}, got {value.shape}")
        self._grad = value

    def _accumulate(self, g: Array) -> None:
        """Adds a complete gradient, in place if there is one already. `g` is copied: others may refer to it."""
        if self._grad is None:
            self._grad = Tensor(g.copy())
        else:
            self._grad.data += g

    def backward(self, gradient: Tensor | None = None, *, retain_graph: bool = False) -> None:
        """Accumulates the gradient of this tensor into the `.grad` of every leaf it was computed from.

        `gradient` has this tensor's shape; a scalar needs none. Raises what `backprop.backward` does.
        """
        backward([self], [gradient], retain_graph=retain_graph)

    def register_hook(self, hook: Hook) -> HookHandle:
        """Calls `hook` with this tensor's complete gradient; what it returns, if anything, replaces it."""
        if not self.requires_grad:
            raise RuntimeError("register_hook: this tensor does not require grad")
        if not callable(hook):
            raise TypeError(f"hook: expected a function of the gradient, got {hook!r}")
        run = partial(_call_hook, hook)
        if self._node is not None:
            return self._node.hooks.setdefault(self._index, Hooks()).register(run)
        self._hooks = self._hooks if self._hooks is not None else Hooks()
        return self._hooks.register(run)

    def detach(self) -> Tensor:
        """Returns the same values without their history; shares memory."""
        return Tensor(self.data)

    # ---- moving and casting ------------------------------------------------------------------------

    def to(self, target: str | DType, dtype: str | DType | None = None) -> Tensor:
        """Returns a copy on another device, in another dtype, or both, differentiable; itself if it is there already.

        `target` is a device, "cpu", "cuda" or "cuda:1", or a dtype. As torch.Tensor.to. Raises `TypeError` for an
        unknown dtype, `EnvironmentFault` where a GPU cannot be used.
        """
        if dtype is not None:
            return self.to(target).to(dtype)
        if isinstance(target, str) and target.partition(":")[0] in ("cpu", "cuda"):
            here, there = self.backend, get_backend(target)
            if there is here:
                return self
            node = device_copy_node(self, there) if self.requires_grad and mode().grad else None
            host = here.to_host(self.data)
            return Tensor._from_op(there.to_device(host), node, 0)
        wanted = as_dtype(target)
        return self if wanted == self.dtype else REGISTRY["cast"](self, wanted)

    def cpu(self) -> Tensor:
        """Returns the values on the CPU."""
        return self.to("cpu")

    def cuda(self) -> Tensor:
        """Returns the values on the first GPU."""
        return self.to("cuda")

    def float(self) -> Tensor:
        """Returns the values in fp32."""
        return self.to("float32")

    def double(self) -> Tensor:
        """Returns the values in fp64."""
        return self.to("float64")

    def half(self) -> Tensor:
        """Returns the values in fp16."""
        return self.to("float16")

    def bfloat16(self) -> Tensor:
        """Returns the values in bf16."""
        return self.to("bfloat16")

    def long(self) -> Tensor:
        """Returns the values as int64, rounded towards 0."""
        return self.to("int64")

    def clone(self) -> Tensor:
        """Returns a copy in memory of its own, differentiable."""
        return REGISTRY["clone"](self)

    def contiguous(self) -> Tensor:
        """Returns the same values in row-major memory; itself if they are in it already."""
        return self if self.data.flags.c_contiguous else self.clone()


Hook = Callable[[Tensor], Tensor | None]


def _call_hook(hook: Hook, g: Array) -> Array:
    """Returns the gradient that `hook` makes of `g`. Raises TypeError, or ShapeError for another shape."""
    found = hook(Tensor(g))
    if found is None:
        return g
    if not isinstance(found, Tensor):
        raise TypeError(f"a hook: expected it to return a Tensor or None, got {kind_of(found)}")
    if found.shape != g.shape:
        raise ShapeError(f"a hook: expected it to return a gradient of shape {g.shape}, got {found.shape}")
    if found.dtype != g.dtype:
        raise TypeError(
            f"a hook: expected it to return a {g.dtype.name} gradient, got {found.dtype.name}; cast it back with .to()"
        )
    return found.data


class Frozen(Tensor):
    """A base weight: read-only, never trained, of any dtype. Its `.grad` raises AttributeError rather than be None."""

    __slots__ = ()

    @property
    def grad(self) -> Tensor | None:
        raise AttributeError("a Frozen tensor has no gradient")

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        raise AttributeError("a Frozen tensor has no gradient")

    def _check_writable(self) -> None:
        raise TypeError("a Frozen tensor is read-only; it cannot be written in place")

    def requires_grad_(self, value: bool = True) -> Self:
        if value:
            raise TypeError("a Frozen tensor cannot require grad; trainable weights are Parameters")
        return self


class Parameter(Tensor):
    """A trainable weight: a leaf with a name, whose values and gradient may be views into an optimizer's arena."""

    __slots__ = ("_compute_copy", "name")

    def __init__(self, data: Array, name: str = "") -> None:
        super().__init__(data, requires_grad=True)
        self.name = name
        self._compute_copy: Tensor | None = None

    @property
    def compute_copy(self) -> Tensor:
        """The copy that an arena keeps in the activations' dtype, if it does; else the parameter itself."""
        return self if self._compute_copy is None else self._compute_copy

    def __repr__(self) -> str:
        shown = values_shown(self.data, self.backend, len("Parameter("))
        return f"Parameter({shown}, name={self.name!r}, dtype={self.dtype.name}, device={self.device!r})"


class ComputeCopy(Tensor):
    """A low-precision copy of a parameter, to compute with instead of it.

    `grad` (fp32), `requires_grad` and hooks are the parameter's.
    """

    __slots__ = ("parameter",)

    def __init__(self, data: Array, parameter: Parameter) -> None:
        super().__init__(data)
        self.parameter = parameter

    @property
    def _leaf(self) -> Tensor:
        return self.parameter

    @property
    def requires_grad(self) -> bool:
        return self.parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.parameter.requires_grad = value

    def requires_grad_(self, value: bool = True) -> Self:
        self.parameter.requires_grad_(value)
        return self

    @property
    def grad(self) -> Tensor | None:
        return self.parameter.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.parameter.grad = value

    def register_hook(self, hook: Hook) -> HookHandle:
        return self.parameter.register_hook(hook)


def host_array(where: str, name: str, value: Any) -> np.ndarray[Any, Any]:
    """The entry `name` of a mapping of tensors or arrays, on the host. Raises TypeError, beginning with `where`."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, np.ndarray):
        return value
    raise TypeError(f"{where}: expected a Tensor or a NumPy array for {name}, got {kind_of(value)}")


def _as_array(data: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(data)
    except ValueError as e:
        raise ValueError(f"tensor: expected nested lists of equal lengths: {e}") from None


def _of_tensors(data: Any) -> bool:
    """Tells whether nested lists hold tensors: copying their values would silently drop their gradients."""
    while isinstance(data, (list, tuple)) and data:
        data = data[0]
    return isinstance(data, Tensor)


def tensor(
    data: Any, dtype: str | DType | None = None, device: str | None = None, requires_grad: bool = False
) -> Tensor:
    """A new tensor holding a copy of `data`: a NumPy array, nested lists, a number, a Tensor, or an object with DLPack.

    Python floats get the mode's dtype, float32 unless set otherwise, as torch.tensor does; arrays keep theirs unless
    `dtype` is given. `device` is the mode's unless given.

    Raises `TypeError` for what holds no numbers, for tensors in a list, and for an object with DLPack that NumPy cannot
    read: on a GPU, or of a dtype that NumPy lacks, such as bfloat16.
    """
    if isinstance(data, Tensor):
        host = data.numpy()
    elif hasattr(data, "__dlpack__") and not isinstance(data, np.ndarray):
        try:
            host = np.from_dlpack(data)
        except (BufferError, RuntimeError) as e:
            raise TypeError(
                f"tensor: NumPy cannot take this {type(data).__name__}: {e}; give it float32 on the CPU"
            ) from e
    else:
        if _of_tensors(data):
            raise TypeError("tensor: expected numbers, got tensors in a list; functional.stack puts tensors together")
        host = _as_array(data)
        if host.dtype == np.float64 and not isinstance(data, (np.ndarray, np.generic)):
            host = host.astype(mode().dtype)
    host = host.astype(host.dtype.newbyteorder("="), copy=False)
    if not is_float(host.dtype) and host.dtype.kind not in "biu":
        kind = f"numbers of {host.dtype}" if host.dtype.kind in "fc" else type(data).__name__
        raise TypeError(f"tensor: expected numbers, got {kind}")
    if dtype is not None:
        host = host.astype(as_dtype(dtype))
    return Tensor(get_backend(device or mode().device).to_device(host), requires_grad=requires_grad)
