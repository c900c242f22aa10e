"""All ambient state of the engine: one frozen value in a ContextVar.

A thread, an asyncio task or a test that changes the mode changes it for itself alone. Leaving a `with` block restores
what the block changed, even when an exception passes through. What was set inside it, such as a seed, stays set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

from .dtype import Array, DType, HostBytes, as_dtype, float32, is_float

Float32Precision = Literal["highest", "high"]


class OpHook(Protocol):
    """Observes every op that runs: timing, NaN hunting, memory. Costs nothing while none is set."""

    def before(self, op: str, phase: str, arrays: list[Array]) -> None:
        """Hears of op `op` before it runs on `arrays`; `phase` is "forward", "backward", or "body" for a composite."""

    def after(self, op: str, phase: str, arrays: list[Array]) -> None:
        """Hears of what the op made: outputs and saved values forward, its inputs' gradients backward."""


class NodeWatch(Protocol):
    """Observes every node of a backward pass. While one is set, nodes know the line that made them."""

    def before_node(self, node: Any, grads: Sequence[Array | None]) -> None:
        """Called with the complete gradients of a node's outputs, before its formulas run."""

    def after_node(self, node: Any, grads: Sequence[Array | None], sent: Sequence[Array | None]) -> None:
        """Called with what it sends along each of its edges."""


class SharedMemory(Protocol):
    """Host memory that processes of this machine map together. All of them ask for the same places in one order."""

    @property
    def number(self) -> int:
        """Which of them this process is."""

    @property
    def count(self) -> int:
        """How many there are."""

    def place(self, nbytes: int, own: bool) -> HostBytes:
        """Returns the next bytes, from the beginning of a page. This process writes them if they are its `own`.

        Raises DeviceFault if the system has no memory for them.
        """

    def complete(self) -> None:
        """Says that this process wrote all that is its own, and waits until the others did.

        Raises OtherRankFailed if one of them failed before.
        """


@dataclass(frozen=True, slots=True)
class Mode:
    """The ambient settings.

    - `grad`: ops record a graph.
    - `device`: where new tensors are made, "cpu", "cuda" or "cuda:1".
    - `dtype`: what new tensors of numbers with a point are made in.
    - `seed`, `drawn`: of the random numbers of new tensors, and how many of these were drawn with that seed.
    - `deterministic`: kernels must give the same bits every run.
    - `float32_precision`: "highest", or "high": products and convolutions of fp32 may round their operands to TF32.
    - `capturing`: a step is being captured, so nothing may be read back to the host.
    - `recomputing`: what was computed before is computed a second time, for a gradient.
    - `hooks`: the observers of every op.
    - `watch`: the observers of every node of a backward pass.
    - `forced`: the implementation an op must use, by the op's name.
    - `shared`: where arrays that wait on the host for good are kept once for several processes; None: each has its own.
    """

    grad: bool = True
    device: str = "cpu"
    dtype: DType = float32
    seed: int = 0
    drawn: int = 0
    deterministic: bool = True
    float32_precision: Float32Precision = "highest"
    capturing: bool = False
    recomputing: bool = False
    hooks: tuple[OpHook, ...] = ()
    watch: tuple[NodeWatch, ...] = ()
    forced: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    shared: SharedMemory | None = None


_DEFAULT = Mode()
_MODE: ContextVar[Mode] = ContextVar("flame_mode", default=_DEFAULT)


def mode() -> Mode:
    """Returns the mode in force here."""
    return _MODE.get()


def set_mode(**fields: Any) -> None:
    """Sets fields of the mode from here on, in this thread."""
    _MODE.set(replace(mode(), **fields))


@contextmanager
def _changed(**fields: Any) -> Iterator[None]:
    before = mode()
    set_mode(**fields)
    try:
        yield
    finally:
        set_mode(**{name: getattr(before, name) for name in fields})


@contextmanager
def no_grad() -> Iterator[None]:
    """Keeps what is computed inside from recording a graph; works as a decorator too, as torch.no_grad."""
    with _changed(grad=False):
        yield


@contextmanager
def enable_grad() -> Iterator[None]:
    """Records a graph again inside a `no_grad` block, as torch.enable_grad."""
    with _changed(grad=True):
        yield


@contextmanager
def device(name: str) -> Iterator[None]:
    """New tensors are made on `name` ("cpu" or "cuda") unless a device is given."""
    with _changed(device=name):
        yield


def gpu_number(device: str) -> int | None:
    """The number of the GPU that a device's name means; None for the CPU. Raises ValueError for any other name."""
    kind, colon, number = str(device).partition(":")
    if kind == "cuda" and (number.isdecimal() or not colon):
        return int(number or 0)
    if device != "cpu":
        raise ValueError(f"device: expected 'cpu', 'cuda' or a GPU by its number, as in 'cuda:1', got {device!r}")
    return None


def set_default_device(name: str) -> None:
    """Makes new tensors on `name` in this thread, unless a device is given. ValueError for what names no device."""
    gpu_number(name)
    set_mode(device=name)


def set_default_dtype(dtype: str | DType) -> None:
    """Makes new floating tensors in `dtype` in this thread, unless one is given. TypeError for no floating dtype."""
    found = as_dtype(dtype)
    if not is_float(found):
        raise TypeError(f"set_default_dtype: expected a floating dtype, got {found.name}")
    set_mode(dtype=found)


@contextmanager
def op_hooks(*hooks: OpHook) -> Iterator[None]:
    """Adds observers of every op run inside."""
    with _changed(hooks=(*mode().hooks, *hooks)):
        yield


@contextmanager
def watching(watch: NodeWatch) -> Iterator[None]:
    """Adds an observer of every node of the backward passes inside."""
    with _changed(watch=(*mode().watch, watch)):
        yield


@contextmanager
def use(**implementations: str) -> Iterator[None]:
    """Forces implementations by op name: `use(linear="reference")`.

    An op whose forced implementation does not exist or cannot run raises RuntimeError when it is called.
    """
    with _changed(forced=MappingProxyType({**mode().forced, **implementations})):
        yield


@contextmanager
def keeping_in(shared: SharedMemory) -> Iterator[None]:
    """Keeps what waits on the host for good in memory that several processes share. All of them load the same."""
    with _changed(shared=shared):
        yield


@contextmanager
def capturing() -> Iterator[None]:
    """Marks the extent of a graph capture, in which nothing may be read back to the host."""
    with _changed(capturing=True):
        yield


@contextmanager
def recomputing(first: Mode, grad: bool = True) -> Iterator[None]:
    """Runs again what began in the mode `first`, with the same random numbers, and records a graph if `grad`.

    Side effects such as running statistics have happened.
    """
    with _changed(grad=grad, recomputing=True, seed=first.seed, drawn=first.drawn):
        yield


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Whether kernels must give the same bits every run, where the library offers the choice."""
    with _changed(deterministic=on):
        yield


class set_float32_matmul_precision:  # noqa: N801  # torch's name
    """How exact products and convolutions of fp32 are on a GPU, from now on, as torch.set_float32_matmul_precision.

    "highest" is fp32 throughout. "high" lets them round their operands to TF32, which keeps 10 bits of 23, and sums up
    in fp32; there convolutions follow too. In a `with` block the earlier choice comes back at its end. Other threads
    have a choice of their own. Raises ValueError for another word.
    """

    def __init__(self, precision: Float32Precision) -> None:
        if precision not in get_args(Float32Precision):
            raise ValueError(f"set_float32_matmul_precision: expected 'highest' or 'high', got {precision!r}")
        self._token = _MODE.set(replace(mode(), float32_precision=precision))

    def __enter__(self) -> None:
        """The choice was made already."""

    def __exit__(self, *exception: object) -> None:
        _MODE.reset(self._token)


def get_float32_matmul_precision() -> Float32Precision:
    """Returns the choice in force here, as torch.get_float32_matmul_precision."""
    return mode().float32_precision
