"""A stand-in for CUDA graphs on the CPU: what a captured step computes is written down, and done when it is launched.

As on a GPU, recording changes no memory, and a launch does what was recorded, whatever Python would do by then. The
recording itself is `engine/backend/cuda/capture.py`. Where `Tape.ends_after` says, the memory is at its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from flame_train.engine import backend as backends
from flame_train.engine.backend.cpu import CpuBackend
from flame_train.engine.backend.cuda.capture import capture


def bare(given: Any) -> Any:
    """The same memory as an array of NumPy's own."""
    if isinstance(given, (tuple, list)):
        return type(given)(map(bare, given))
    if isinstance(given, dict):
        return {name: bare(value) for name, value in given.items()}
    return given.view(np.ndarray) if isinstance(given, Traced) else given


def traced(found: Any) -> Any:
    """What NumPy made, as arrays that are written down; none of them a scalar."""
    if isinstance(found, (np.ndarray, np.generic)):
        return np.asarray(found).view(Traced)
    return type(found)(map(traced, found)) if isinstance(found, (tuple, list)) else found


def arrays_in(found: Any) -> Iterator[np.ndarray]:
    """All arrays of a result."""
    if isinstance(found, np.ndarray):
        yield found
    elif isinstance(found, (tuple, list)):
        for part in found:
            yield from arrays_in(part)


class Tape:
    """What is computed while a step is captured."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] | None = None
        self.length = 0
        """Calls of the last recording."""
        self.ends_after: int | None = None
        """So many calls of a recording find memory, and the graph of so many does not, once."""
        self._before = dict[int, tuple[np.ndarray, np.ndarray]]()

    def begin(self) -> None:
        self.calls, self._before = [], {}

    def end(self) -> list[Callable[[], None]]:
        """Puts back what memory held, and returns the calls."""
        calls, self.calls = self.calls or [], None
        for owner, held in self._before.values():
            owner[...] = held
        return calls

    def recorded(self) -> list[Callable[[], None]]:
        """Returns the calls as a graph."""
        calls = self.end()
        self._need_memory(len(calls))
        self.length = len(calls)
        return calls

    def _need_memory(self, calls: int) -> None:
        if self.ends_after == calls:
            self.ends_after = None
            raise MemoryError

    def run(self, fn: Callable[..., Any], args: Any, options: Any = None, writes: Any = None) -> Any:
        """Calls `fn`, which may write to the array `writes`."""
        args, options = bare(args), bare(options or {})
        if self.calls is None:
            return traced(fn(*args, **options))
        self._need_memory(len(self.calls))
        if writes is not None:
            self._keep(bare(writes))
        found = traced(fn(*args, **options))

        def again() -> None:
            for old, new in zip(arrays_in(found), arrays_in(traced(fn(*args, **options))), strict=True):
                if not np.may_share_memory(old, new):  # else it is a view, or what was written to
                    bare(old)[...] = bare(new)

        self.calls.append(again)
        return found

    def _keep(self, array: np.ndarray) -> None:
        while isinstance(array.base, np.ndarray):
            array = array.base
        if id(array) not in self._before:
            self._before[id(array)] = bare(array), bare(array).copy("K")


class Traced(np.ndarray):
    """An array whose operations are written down while a step is captured."""

    tape: ClassVar[Tape]

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, out: Any = (), **options: Any) -> Any:
        options |= {"out": out} if out else {}
        made = self.tape.run(getattr(ufunc, method), args, options, args[0] if method == "at" else (out or [None])[0])
        return out[0] if len(out) == 1 else made

    def __array_function__(self, fn: Any, types: Any, args: Any, options: Any) -> Any:
        return self.tape.run(fn, args, options, args[0] if fn is np.copyto else options.get("out"))

    def __getitem__(self, key: Any) -> Any:
        return self.tape.run(np.ndarray.__getitem__, (self, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tape.run(np.ndarray.__setitem__, (self, key, value), None, self)


def _method(name: str) -> Any:
    def call(self: Traced, *args: Any, **options: Any) -> Any:
        return self.tape.run(getattr(np.ndarray, name), (self, *args), options)

    return call


for _name in (
    *("argmax", "argmin", "argsort", "astype", "copy", "cumprod", "cumsum", "dot", "flatten", "ravel", "repeat"),
    *("reshape", "round", "searchsorted", "squeeze", "swapaxes", "take", "transpose"),
):
    setattr(Traced, _name, _method(_name))


class _Numpy:
    """The module `numpy`, whose functions give such arrays."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, (type, np.ufunc)) or not callable(found):
            return found
        if name in ("may_share_memory", "shares_memory", "result_type", "broadcast_shapes", "isscalar"):
            return lambda *args, **options: found(*bare(args), **options)
        return lambda *args, **options: self._tape.run(found, args, options, options.get("out"))


class _Graph:
    """What was recorded."""

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        self._calls = calls

    def launch(self, stream: Any) -> None:
        for call in self._calls:
            call()


class GraphBackend(CpuBackend):
    """The CPU, where steps are captured as on a GPU."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self.xp = self.references = _Numpy(tape)  # type: ignore[assignment]  # it stands in for the module
        self.program, self.once_bytes = 0, 0
        self.graphs = weakref.WeakSet[Any]()
        self.graph_pool = SimpleNamespace(total_bytes=lambda: 1, used_bytes=lambda: 0)
        self.stream = SimpleNamespace(begin_capture=tape.begin, end_capture=tape.end)

    def empty(self, shape: Any, dtype: Any) -> Any:
        return self.tape.run(np.zeros, (tuple(shape), dtype))

    def to_device(self, host: Any) -> Any:
        return traced(super().to_device(host))

    def offload(self, array: Any, *, keep: bool = False) -> Any:
        held = super().offload(array, keep=keep)
        held._held = traced(array).copy("K")
        return held

    def begin_program(self) -> None:
        self.program += 1

    def graph_memory(self) -> Any:
        return nullcontext()

    def free_unused(self) -> None: ...

    def forget_side_streams(self) -> None: ...

    def recorded(self) -> Any:
        return _Graph(self.tape.recorded())

    def capture(self, fn: Callable[[], None]) -> Callable[[], None]:
        return capture(_Capturing(self), fn)  # type: ignore[arg-type]  # it stands in for the CUDA backend


class _Capturing:
    """The same as `capture.py` asks for it: with a workspace, which no operation here uses."""

    kernels = SimpleNamespace(workspace=SimpleNamespace(buffer=None, reserve=lambda: None))

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def recording(patch: pytest.MonkeyPatch) -> Tape:
    """Makes the CPU record captured steps."""
    made = Tape()
    patch.setattr(Traced, "tape", made, raising=False)
    patch.setattr(backends, "_CPU", GraphBackend(made))
    return made
