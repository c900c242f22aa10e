"""PyTorch's time for the calls that `bench ops` times, where it is installed: eager, captured in a graph likewise."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from flame_train.engine import Tensor
from flame_train.engine.dtype import as_dtype
from flame_train.engine.op import Op

_ROUNDS, _REPEATS = 5, 20


def _turned(torch: Any, x: Any) -> Any:
    return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)


def _rope(torch: Any, input: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    return input * cos + _turned(torch, input) * sin


def _rms_norm_rope(torch: Any, input: Any, weight: Any, cos: Any, sin: Any, eps: float, interleaved: bool) -> Any:
    normed = torch.nn.functional.rms_norm(input, (input.shape[-1],), weight, eps)
    return normed * cos + _turned(torch, normed) * sin


def _modulate(torch: Any, input: Any, scale: Any, shift: Any, eps: float) -> Any:
    return torch.nn.functional.layer_norm(input, (input.shape[-1],), eps=eps) * (1 + scale) + shift


def _gated_add(torch: Any, input: Any, gate: Any, update: Any) -> Any:
    return input + gate * update


def _swiglu(torch: Any, input: Any) -> Any:
    value, gate = input.chunk(2, -1)
    return value * torch.nn.functional.silu(gate)


def _geglu(torch: Any, input: Any) -> Any:
    value, gate = input.chunk(2, -1)
    return value * torch.nn.functional.gelu(gate)


_WRITTEN_OUT: Mapping[str, Callable[..., Any]] = {
    "rope": _rope,
    "rms_norm_rope": _rms_norm_rope,
    "layer_norm_modulate": _modulate,
    "gated_add": _gated_add,
    "swiglu": _swiglu,
    "geglu": _geglu,
}
"""What a PyTorch user would write for an op that PyTorch has not."""


def torch_seconds(op: Op, sets: Sequence[Mapping[str, Any]], device: str, phase: str) -> float | None:
    """PyTorch's seconds for the same arguments; None for an op it does not have. `phase` is "forward" or "backward"."""
    torch = importlib.import_module("torch")
    fn = _function(torch, op)
    if fn is None:
        return None
    every = [_arguments(torch, op, bound) for bound in sets]
    if device != "cuda":
        return _timed(torch, _calls(torch, op, fn, every, phase), None)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # a backward pass runs on its forward pass's stream, which must be the captured one
        return _timed(torch, _calls(torch, op, fn, every, phase), stream)


def _calls(
    torch: Any, op: Op, fn: Callable[..., Any], every: Sequence[dict[str, Any]], phase: str
) -> list[Callable[[], Any]]:
    if phase == "backward":
        return [_backward(torch, op, fn, a) for a in every]

    def forward(arguments: dict[str, Any]) -> Any:
        with torch.no_grad():
            return fn(**arguments)

    return [partial(forward, a) for a in every]


def _function(torch: Any, op: Op) -> Callable[..., Any] | None:
    if op.name in _WRITTEN_OUT:
        return lambda **a: _WRITTEN_OUT[op.name](torch, **a)
    if op.torch is None:
        return None
    fn: Any = torch
    for part in op.torch.split("."):
        fn = getattr(fn, part)
    found: Callable[..., Any] = fn
    return found


def _backward(torch: Any, op: Op, fn: Callable[..., Any], arguments: dict[str, Any]) -> Callable[[], Any]:
    leaves = [v for n, v in arguments.items() if n in op.differentiable and isinstance(v, torch.Tensor)]
    leaves = [v.requires_grad_() for v in leaves if v.is_floating_point()]
    out = fn(**arguments)
    g = out.detach().clone()
    return lambda: torch.autograd.grad(out, leaves, g, retain_graph=True)


def _arguments(torch: Any, op: Op, bound: Mapping[str, Any]) -> dict[str, Any]:
    """The same memory as torch tensors, NHWC as channels-last, our layout word left out."""
    nhwc = bound.get("layout") == "NHWC"
    as_bits = {as_dtype("bf16"): (np.int16, torch.bfloat16), as_dtype("bool"): (np.uint8, torch.bool)}

    def to(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        bits, dtype = as_bits.get(value.dtype, (value.dtype, None))
        t = torch.from_dlpack(value.data.view(bits))
        t = t.view(dtype) if dtype else t
        return t.permute(0, 3, 1, 2) if nhwc and t.ndim == 4 and value is bound["input"] else t

    return {n: [to(t) for t in v] if isinstance(v, list) else to(v) for n, v in bound.items() if n != "layout"}


def _timed(torch: Any, calls: Sequence[Callable[[], Any]], stream: Any) -> float:
    """Seconds a call, the calls taking turns, the results of a round kept until its end."""

    def wait() -> None:
        if stream is not None:
            torch.cuda.synchronize()

    def many() -> list[Any]:
        return [calls[i % len(calls)]() for i in range(_REPEATS)]

    calls[0]()
    wait()
    run: Callable[[], Any] = many
    if stream is not None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = many()
        run = graph.replay
        del kept
    times = []
    for _ in range(_ROUNDS):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / _REPEATS
