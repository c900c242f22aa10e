"""A stand-in for CuPy over NumPy: the CUDA backend's own code runs without a GPU, and every launch is checked.

What a kernel would compute is left out; that a call fits the kernel's C signature is not: pointers to the right
element type, whole numbers and fractions of the right width, a grid and a block that exist.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import re
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from flame_train.engine.backend.cuda.arrays import is_plain
from flame_train.engine.backend.cuda.libraries.cudnn import CuDnn
from flame_train.engine.backend.shapes.driver import H100
from flame_train.engine.backend.shapes.driver import Gpu as Card

NUMBERS = {
    "int": np.int32,
    "unsigned": np.uint32,
    "long long": np.int64,
    "float": np.float32,
    "double": np.float64,
}
ELEMENTS = {
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    "bool": np.dtype(bool),
    "fp16": np.dtype(np.float16),
    "__half": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "__nv_bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int": np.dtype(np.int32),
    "long long": np.dtype(np.int64),
    "unsigned": np.dtype(np.uint32),
    "unsigned char": np.dtype(np.uint8),
    "e4m3": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
}


class OnDevice(np.ndarray):
    """An array that says it lies on a GPU. What is done with it would be a launch of CuPy's, and is noted."""

    device = SimpleNamespace(compute_capability=H100.capability, id=0)
    operations: ClassVar[list[str]] = []

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, out: Any = (), **kwargs: Any) -> Any:
        self.operations.append(ufunc.__name__)
        if out:
            kwargs["out"] = tuple(bare(o) for o in out)
        found = getattr(ufunc, method)(*map(bare, args), **kwargs)
        return out[0] if out else on_device(found)

    def __getitem__(self, key: Any) -> Any:
        return on_device(bare(self)[bare(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.operations.append("assignment")
        bare(self)[bare(key)] = bare(value)

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        if self.dtype == dtype and not copy:
            return self
        self.operations.append("astype")
        return on_device(_copied(bare(self), dtype))

    def copy(self, order: Any = "C") -> Any:
        self.operations.append("copy")
        return on_device(bare(self).copy(order))

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.__array_interface__["data"][0])

    def set(self, host: np.ndarray, stream: object = None) -> None:
        self[...] = host

    def get(self, stream: object = None, out: Any = None, blocking: bool = True) -> np.ndarray:
        host = _copied(self.view(np.ndarray), self.dtype)
        if out is None:
            return host
        out[...] = host
        return out


def _copied(x: np.ndarray, dtype: Any) -> np.ndarray:
    """A copy of `x`, part by part where its parts lie far apart, as two arrays seen as one do.

    NumPy 2.4 crashes at times where the copy of such an array lies between its parts.
    """
    if x.ndim < 2 or abs(x.strides[0]) <= x.nbytes:
        return x.astype(dtype)
    made = np.empty(x.shape, dtype)
    for place, part in zip(made, x, strict=True):
        place[...] = part
    return made


def bare(given: Any) -> Any:
    """The same memory as an array of NumPy's own."""
    if isinstance(given, (tuple, list)):
        return type(given)(map(bare, given))
    return given.view(np.ndarray) if isinstance(given, OnDevice) else given


def on_device(found: Any) -> Any:
    """Arrays and numbers out of NumPy as CuPy has them: arrays on the device, none of them a scalar."""
    if isinstance(found, (np.ndarray, np.generic)):
        return np.asarray(found).view(OnDevice)
    if isinstance(found, (tuple, list)):
        return type(found)(map(on_device, found))
    return found


class Function:
    """A kernel that checks how it is called."""

    def __init__(self, module: RawModule, name: str, parameters: list[str]) -> None:
        self.module, self.card, self.name, self.calls = module, module.card, name, 0
        self.max_dynamic_shared_size_bytes = 48 << 10
        self.parameters = [self._read(p) for p in parameters]

    @staticmethod
    def _read(text: str) -> tuple[str, bool]:
        words = re.sub(r"\b(const|__restrict__)\b", "", text).replace("*", " * ").split()
        return " ".join(w for w in words[:-1] if w != "*"), "*" in words

    @property
    def kernel(self) -> Any:
        """Launched with all blocks at once, which they must be few enough for."""

        def call(grid: Any, block: Any, args: Any, shared_mem: int, enable_cooperative_groups: bool) -> None:
            assert enable_cooperative_groups
            assert np.prod(grid) <= self.card.multiprocessors
            self(grid, block, args, shared_mem)

        return call

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_mem: int = 0
    ) -> None:
        self.calls += 1
        assert len(args) == len(self.parameters), f"{self.name}: {len(args)} arguments for {len(self.parameters)}"
        for n, (a, (kind, pointer)) in enumerate(zip(args, self.parameters, strict=True)):
            where = f"{self.name}, argument {n}"
            if not pointer and isinstance(a, np.ndarray):
                assert re.search(rf"^struct {kind} {{", self.module.code, re.MULTILINE), f"{where}: no struct {kind}"
                assert a.dtype.fields, f"{where}: {a.dtype} for {kind}"
            elif not pointer:
                assert type(a) is NUMBERS[kind], f"{where}: {type(a)} for {kind}"
            elif isinstance(a, (np.uint64, np.int64)):
                assert a == 0, f"{where}: only a null pointer may be a number"
            else:
                assert isinstance(a, OnDevice), f"{where}: {type(a)} for a pointer"
                assert kind == "void" or a.dtype == ELEMENTS[kind], f"{where}: {a.dtype} for {kind}"
        assert all(1 <= n <= limit for n, limit in zip(grid, (2**31 - 1, 65535, 65535), strict=False)), (
            self.name,
            grid,
        )
        assert 1 <= np.prod(block) <= 1024
        assert shared_mem <= self.max_dynamic_shared_size_bytes <= self.card.shared_bytes


class RawModule:
    """CuPy's, as far as it is used: finds kernels in the text, also those a macro defines."""

    def __init__(self, card: Card, code: str, options: tuple[str, ...] = ()) -> None:
        self.card, self.code, self.options = card, code, options
        element = next((o.split("=")[1] for o in options if o.startswith("-DELEMENT=")), "T")
        self._text = (
            re.sub(r"//[^\n]*", "", code).replace("\\\n", "\n").replace("typedef ELEMENT", f"typedef {element}")
        )
        self._types = {name: kind for kind, name in re.findall(r"^typedef ([\w ]+) (\w+);$", self._text, re.MULTILINE)}

    def get_function(self, name: str) -> Function:
        return Function(self, name, self._parameters(name))

    def _parameters(self, name: str) -> list[str]:
        direct = rf"__global__ void(?: __launch_bounds__\([^)]*\))?\s+{name}\(([^)]*)\)"
        found = re.search(direct, self._text)
        if found is None:
            assert re.search(rf"^KERNEL\({name}, ", self._text, re.MULTILINE), f"no kernel {name}"
            found = re.search(direct.replace(name, "NAME"), self._text)
        assert found is not None
        return [re.sub(r"\w+", lambda w: self._types.get(w[0], w[0]), p) for p in found.group(1).split(",")]


class Cubins:
    """Kernels for compute capability 9.0 alone: that they are there, and take as much as they are given."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def get(self, text: str, kernel: str, dtype: Any, shared_bytes: int) -> Any:
        assert self._card.capability == "90", f"{kernel} on {self._card}"
        assert shared_bytes <= self._card.shared_bytes
        found = re.search(rf"__global__ [^{{;]*\b{kernel}\(([^)]*)\) {{", text)
        assert found is not None, f"no kernel {kernel}"
        parameters = found.group(1).split(",")

        def call(grid: Any, block: Any, args: Any, shared_mem: int) -> None:
            assert len(args) == len(parameters), f"{kernel}: {len(args)} arguments for {len(parameters)}"
            assert all(isinstance(a, OnDevice) == ("*" in p) for a, p in zip(args, parameters, strict=True))

        return call


class Products:
    """cuBLASLt's part, computed by NumPy where its conditions hold."""

    def product(
        self,
        a: Any,
        b: Any,
        out: Any,
        *,
        bias: Any = None,
        alpha: float = 1.0,
        plus: Any = None,
        gelu: Any = None,
        scales: Any = None,
        blocks: bool = False,
    ) -> None:
        assert a.ndim == b.ndim == out.ndim
        assert is_plain(a)
        assert is_plain(b)
        assert a.dtype == b.dtype
        assert a.dtype == np.uint8 or scales is None
        assert (a.dtype == np.int8) == (out.dtype == np.int32)
        if a.itemsize == 1:
            assert a.strides[-1] == b.strides[-2] == 1, "products of 8 bits are along rows"
            assert not a.shape[-1] % 16
            assert not b.shape[-1] % 16
        if a.dtype == np.int8:
            assert (alpha, bias, plus, gelu) == (1.0, None, None, None), "sums in int32 are the product alone"
        if a.dtype == np.uint8:
            a, b = (np.asarray(x).view(ml_dtypes.float8_e4m3fn).astype(np.float64) for x in (a, b))
        if blocks:
            assert not a.shape[1] % 32
            a, b = a * self._by_blocks(scales[0], a.shape), b * self._by_blocks(scales[1], b.T.shape).T
        elif scales is not None:
            by = [s.view(np.float32).astype(np.float64) for s in scales]
            a, b = a * by[0][:, None], b * by[1]
        y = alpha * np.matmul(a.astype(np.float64), b.astype(np.float64))
        y = y if bias is None else y + bias.astype(np.float64)
        if gelu is not None:
            y = self._through(y, gelu)
        out[...] = y if plus is None else y + plus.astype(np.float64)

    @staticmethod
    def _by_blocks(tiles: Any, shape: tuple[int, int]) -> Any:
        """The scale of each number of a matrix, by the place of its block's byte, as cuBLAS' documentation has it.

        A tile of 512 bytes is of 128 rows and 4 blocks. Of row r and block b it is byte r % 32 * 16 + r / 32 * 4 + b.
        """
        rows, columns = shape
        assert tiles.shape == (-(-rows // 128), -(-columns // 128), 512)
        made = np.empty(shape)
        for r in range(rows):
            for b in range(columns // 32):
                byte = tiles[r // 128, b // 4, r % 128 % 32 * 16 + r % 128 // 32 * 4 + b % 4]
                made[r, 32 * b : 32 * b + 32] = np.nan if byte == 255 else 2.0 ** (int(byte) - 127)
        return made

    @staticmethod
    def _through(y: Any, gelu: Any) -> Any:
        """tanh-GELU of y, which is kept; or its slope, by central differences, at what was kept, times y."""
        assert gelu.hidden.shape == y.shape

        def of(x: Any) -> Any:
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

        if gelu.derivative:
            hidden = gelu.hidden.astype(np.float64)
            return y * (of(hidden + 1e-5) - of(hidden - 1e-5)) / 2e-5
        gelu.hidden[...] = y
        return of(y)


class NoPairs:
    """Leaves both products of a pair to cuBLASLt's part."""

    def made(self, x: Any, otherwise: Any) -> bool:
        assert x.out.shape == (len(x.a), x.b.shape[1])
        assert x.b2 is None or x.a2.shape == (len(x.a), x.parts * len(x.b2))
        return False


class Plans:
    """cuDNN's part: calls fit the signatures."""

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(CuDnn, name))
        return lambda *args, **kwargs: signature.bind(self, *args, **kwargs) and None


class Event:
    """Remembers how often it was recorded and awaited."""

    def __init__(self, **_: Any) -> None:
        self.recorded = self.awaited = 0

    def record(self, stream: Any = None) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        self.awaited += 1


class Device(SimpleNamespace):
    """The only GPU, whose context changes nothing."""

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None: ...


class Stream:
    """Does everything at once; while it captures, it also keeps what is done for later."""

    ptr = 0

    def __init__(self) -> None:
        self.capturing, self.waits = False, []

    def use(self) -> None: ...
    def synchronize(self) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def record(self) -> Event:
        event = Event()
        event.record()
        return event

    def wait_event(self, event: Event) -> None:
        self.waits.append(event)

    def begin_capture(self) -> None:
        self.capturing = True

    def end_capture(self) -> None:
        self.capturing = False


class Graph:
    """Counts its launches."""

    def __init__(self, cupy: StandIn, stream: Stream) -> None:
        stream.end_capture()
        self.launches = 0

    def launch(self, stream: Stream) -> None:
        self.launches += 1


def broadcast_to(x: Any, shape: tuple[int, ...]) -> Any:
    """As NumPy's, but writable as CuPy's is."""
    strides = np.broadcast_to(x, shape).strides
    return np.lib.stride_tricks.as_strided(x, shape, strides, subok=True)


class Pinned:
    """A block of pinned memory."""

    def __init__(self, size: int) -> None:
        self._block = ctypes.create_string_buffer(size)
        self.ptr = ctypes.addressof(self._block)


RUNTIME = SimpleNamespace(
    memGetInfo=lambda: (5, 9),
    CUDARuntimeError=OSError,
    memcpyDeviceToHost=2,
    memcpyHostToDevice=1,
    hostRegister=lambda begin, size, flags: None,
    hostUnregister=lambda begin: None,
    memcpyAsync=lambda to, source, size, kind, stream: ctypes.memmove(to, source, size),
    getDeviceProperties=lambda index: {"name": b"stand-in"},
)


class StandIn:
    """The module `cupy`."""

    ndarray, newaxis = OnDevice, None

    def __init__(self, card: Card) -> None:
        self.RawModule = partial(RawModule, card)
        attributes = {"MultiProcessorCount": card.multiprocessors, "MaxSharedMemoryPerBlockOptin": card.shared_bytes}
        self.ElementwiseKernel = lambda *_: lambda x: on_device(np.zeros_like(x))
        stream, freed = Stream(), lambda: None
        pool = SimpleNamespace(
            used_bytes=lambda: 3, total_bytes=lambda: 4, malloc=lambda size: None, free_all_blocks=freed
        )
        self.cuda = SimpleNamespace(
            Stream=lambda non_blocking=False: Stream() if non_blocking else stream,
            MemoryPool=lambda allocator=None: pool,
            set_allocator=lambda _: None,
            using_allocator=lambda _: nullcontext(),
            Event=Event,
            get_current_stream=lambda: stream,
            alloc_pinned_memory=bytearray,
            Device=lambda: Device(attributes=attributes, compute_capability=card.capability),
            PinnedMemoryPool=lambda: SimpleNamespace(malloc=Pinned),
            PinnedMemory=Pinned,
            runtime=RUNTIME,
            memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        )
        self.broadcast_to = broadcast_to
        self.lib = SimpleNamespace(
            stride_tricks=SimpleNamespace(
                as_strided=lambda x, shape, strides: np.lib.stride_tricks.as_strided(x, shape, strides, subok=True)
            )
        )

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            if name in ("where", "full", "ones", "zeros", "arange"):  # no ufunc, which is noted anyway
                OnDevice.operations.append(name)
            result = found(*args, **kwargs)
            return result if name.endswith("_shapes") else on_device(result)

        if isinstance(found, np.ufunc):
            call.at = found.at

        # Memory as it comes from the device may hold anything; zeros keep NumPy from warning of it.
        return (lambda shape, dtype=float: on_device(np.zeros(shape, dtype))) if name == "empty" else call
