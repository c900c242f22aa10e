"""`bench ops`: every op at the sizes that matter, against this machine's own measured ceilings."""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from flame_train.engine import Tensor, capture, no_grad
from flame_train.engine import functional as F
from flame_train.engine.backend import Backend, get_backend
from flame_train.engine.check import generator
from flame_train.engine.dispatch import explain
from flame_train.engine.dtype import DType, as_dtype
from flame_train.engine.op import REGISTRY, Op, Sample, sample
from flame_train.engine.sample import materialise, tensor_arguments
from flame_train.errors import ConfigError, EnvironmentFault

_ROUNDS, _TARGET_S = 5, 0.02

_SIZES: Mapping[str, list[Sample]] = {
    "add": [sample((4, 4096, 640), (4, 4096, 640))],
    "silu": [sample((4, 128, 128, 320))],
    "linear": [sample((4096, 1280), (1280, 1280), (1280,)), sample((4096, 1280), (10240, 1280), (10240,))],
    "matmul": [sample((4096, 4096), (4096, 4096)), sample((8, 1024, 64), (8, 64, 1024))],
    "conv2d": [
        sample((4, 64, 64, 640), (640, 640, 3, 3), (640,), 1, 1, layout="NHWC"),
        sample((4, 128, 128, 320), (320, 320, 3, 3), (320,), 1, 1, layout="NHWC"),
    ],
    "group_norm": [sample((4, 128, 128, 320), 32, (320,), (320,), layout="NHWC")],
    "group_norm_silu": [sample((4, 128, 128, 320), 32, (320,), (320,), layout="NHWC")],
    "layer_norm": [sample((4, 1024, 1280), (1280,), (1280,), (1280,))],
    "geglu": [sample((4, 1024, 10240))],
    "lora_linear": [sample((4, 1024, 1280), (1280, 1280), (1280,), (16, 1280), (1280, 16), 1.0)],
    "scaled_dot_product_attention": [
        sample((4, 10, 4096, 64), (4, 10, 4096, 64), (4, 10, 4096, 64)),
        sample((4, 20, 1024, 64), (4, 20, 77, 64), (4, 20, 77, 64)),
    ],
}
"""What one SDXL step at batch 4 and 1024 x 1024 is made of; other ops are timed on their own large samples."""


@dataclass(frozen=True, slots=True)
class Row:
    """One op at one size. `rate` is in TFLOP/s where arithmetic counts, else TB/s; `share` is of the ceiling."""

    op: str
    shapes: str
    us: float
    rate: float
    unit: str
    share: float
    implementation: str
    declined: str
    torch_us: float | None = None

    @property
    def ratio(self) -> float | None:
        """Our time over PyTorch's."""
        return None if self.torch_us is None else self.us / self.torch_us


def run(names: list[str], device: str, dtype: str, against: str | None) -> dict[str, Any]:
    """Times the named ops' forward pass, or every op that has a size of its own.

    Raises `ConfigError` for an unknown op, `EnvironmentFault` if `against` is "torch" and it is not importable.
    """
    _check_names(names)
    if against and importlib.util.find_spec(against) is None:
        raise EnvironmentFault(f"bench ops --against {against}: it is not installed; leave the option out")
    backend, low = get_backend(device), as_dtype(dtype)
    flops, bandwidth = ceilings(backend, low)
    rows = []
    for name in names or sorted(_SIZES):
        op = REGISTRY[name]
        for s in _SIZES.get(name) or [*op.iter_large_samples()] or [*op.iter_samples()]:
            rows.append(_row(op, s, backend, low, flops, bandwidth, against))
    return {
        "device": device,
        "dtype": dtype,
        "ceiling TFLOP/s": round(flops / 1e12, 3),
        "ceiling TB/s": round(bandwidth / 1e12, 4),
        "ops": [asdict(r) | {"ratio": r.ratio} for r in rows],
    }


def _check_names(names: list[str]) -> None:
    unknown = [n for n in names if n not in REGISTRY]
    if unknown:
        near = get_close_matches(unknown[0], REGISTRY, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"bench ops: no op named {unknown[0]!r}{hint}")


def ceilings(backend: Backend, dtype: DType) -> tuple[float, float]:
    """This machine's own best: FLOP/s of a large matrix product, and bytes/s (read and written) of a large copy."""
    n, size = (8192, 1 << 30) if backend.name == "cuda" else (1024, 1 << 26)
    rng = np.random.default_rng(0)
    matrices = [Tensor(backend.put(rng.standard_normal((n, n), np.float32)).astype(dtype)) for _ in range(2)]
    source = backend.empty((size,), np.dtype(np.uint8))
    source.fill(1)
    target = backend.empty((size,), np.dtype(np.uint8))

    def copy() -> None:
        target[...] = source

    product = _seconds(lambda: F.matmul(*matrices), backend)
    return 2.0 * n**3 / product, 2.0 * size / _seconds(copy, backend)


def _row(op: Op, s: Sample, backend: Backend, dtype: DType, flops: float, bandwidth: float, against: str | None) -> Row:
    bound = materialise(op, s, generator(op.name, 0), dtype, backend.name)
    choices = explain(op, **bound)
    chosen = next(i for i, why in choices if why == "chosen")
    declined = "; ".join(f"{i}: {why}" for i, why in choices if i != chosen and "passed over" not in why)
    with no_grad():
        result = op(**bound)
        seconds = _seconds(lambda: op(**bound), backend)
    work = _flops(op.name, bound)
    moved = _bytes(op, bound, result)
    rate, unit = (work / seconds / 1e12, "TFLOP/s") if work else (moved / seconds / 1e12, "TB/s")
    share = rate * 1e12 / (flops if work else bandwidth)
    shapes = " ".join("x".join(map(str, t.shape)) for _, _, t in tensor_arguments(op, bound))
    other = _torch_seconds(op, bound, backend) if against else None
    return Row(
        op.name, shapes, round(seconds * 1e6, 2), round(rate, 4), unit, round(share, 4), chosen, declined,
        None if other is None else round(other * 1e6, 2),
    )  # fmt: skip


def _bytes(op: Op, bound: Mapping[str, Any], result: Any) -> int:
    """Each input read once, each output written once."""
    outputs = result if isinstance(result, tuple) else (result,)
    return sum(t.data.nbytes for _, _, t in tensor_arguments(op, dict(bound))) + sum(o.data.nbytes for o in outputs)


def _flops(name: str, b: Mapping[str, Any]) -> float:
    """Arithmetic of the ops that are bound by it; 0 for those bound by memory."""
    if name in ("linear", "lora_linear"):
        rank = b["down"].shape[0] if name == "lora_linear" else 0
        out, width = b["weight"].shape
        return 2.0 * b["input"].size / width * (width * out + rank * (width + out))
    if name == "matmul":
        return 2.0 * b["input"].size * b["other"].shape[-1]
    if name == "conv2d":
        image = b["input"].size / b["input"].shape[-1 if b["layout"] == "NHWC" else 1]
        return 2.0 * image * b["weight"].size / math.prod(np.broadcast_to(b["stride"], 2).tolist())
    if name == "scaled_dot_product_attention":
        return 4.0 * b["query"].size * b["key"].shape[-2]
    return 0.0


def _seconds(fn: Callable[[], Any], backend: Backend) -> float:
    """Seconds a call, the median of some rounds; on a GPU many calls are one captured graph, so gaps do not count."""
    fn()
    backend.synchronize()
    begin = time.perf_counter()
    fn()
    backend.synchronize()
    repeats = max(1, min(50, int(_TARGET_S / max(time.perf_counter() - begin, 1e-6))))

    def many() -> None:
        for _ in range(repeats):
            fn()

    whole = capture(many, backend.name)
    whole()
    times = list(_rounds(whole, backend))
    return statistics.median(times) / repeats


def _rounds(fn: Callable[[], None], backend: Backend) -> Iterator[float]:
    fn()
    for _ in range(_ROUNDS):
        backend.synchronize()
        begin = time.perf_counter()
        fn()
        backend.synchronize()
        yield time.perf_counter() - begin


def _torch_seconds(op: Op, bound: Mapping[str, Any], backend: Backend) -> float | None:
    """PyTorch's time for the same arguments, captured likewise; None for an op it does not have."""
    if op.torch is None:
        return None
    torch = importlib.import_module("torch")
    fn: Any = torch
    for part in op.torch.split("."):
        fn = getattr(fn, part)
    arguments = _torch_arguments(torch, op, bound, backend.name)
    with torch.no_grad():
        return _torch_time(torch, lambda: fn(**arguments), backend.name)


def _torch_arguments(torch: Any, op: Op, bound: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The same values as torch tensors: bf16 by its bits, NHWC as channels-last memory, our layout word left out."""
    nhwc = bound.get("layout") == "NHWC"

    def to(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        host = value.numpy()
        bits = host.dtype == as_dtype("bf16")
        t = torch.from_numpy(np.ascontiguousarray(host.view(np.uint16) if bits else host)).to(device)
        t = t.view(torch.bfloat16) if bits else t
        return t.permute(0, 3, 1, 2) if nhwc and t.ndim == 4 and value is bound["input"] else t

    return {n: [to(t) for t in v] if isinstance(v, list) else to(v) for n, v in bound.items() if n != "layout"}


def _torch_time(torch: Any, fn: Callable[[], Any], device: str) -> float:
    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        fn()
    wait()
    run: Callable[[], Any] = fn
    repeats = 20
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [fn() for _ in range(repeats)]
        run = graph.replay
        del kept
    else:
        run = lambda: [fn() for _ in range(repeats)]  # noqa: E731
    times = []
    for _ in range(_ROUNDS):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / repeats


def table(result: Mapping[str, Any]) -> str:
    """The result as lines of text."""
    lines = [
        f"{result['device']}, {result['dtype']}; this machine's own ceilings: {result['ceiling TFLOP/s']} TFLOP/s, "
        f"{result['ceiling TB/s']} TB/s"
    ]
    for r in result["ops"]:
        ratio = "" if r["ratio"] is None else f"  {r['ratio']:.2f} of torch's {r['torch_us']} us"
        why = f" ({r['declined']})" if r["declined"] else ""
        lines.append(
            f"{r['op']:<30} {r['us']:>10.1f} us {r['rate']:>9.3f} {r['unit']:<8} {r['share']:>6.1%}  "
            f"{r['implementation']}{why}{ratio}  [{r['shapes']}]"
        )
    return "\n".join(lines)
