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
_OURS = ("layout", "rng", "stream")  # arguments that PyTorch's functions do not have


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


def _quick_gelu(torch: Any, input: Any) -> Any:
    return input * torch.sigmoid(1.702 * input)


def _group_norm_silu(torch: Any, input: Any, num_groups: int, weight: Any, bias: Any, eps: float) -> Any:
    return torch.nn.functional.silu(torch.nn.functional.group_norm(input, num_groups, weight, bias, eps))


def _lora_linear(
    torch: Any, input: Any, weight: Any, bias: Any, down: Any, up: Any, scale: float, residual: Any
) -> Any:
    linear = torch.nn.functional.linear
    y = linear(input, weight, bias) + linear(linear(input, down), up) * scale
    return y if residual is None else y + residual


_WRITTEN_OUT: Mapping[str, Callable[..., Any]] = {
    "rope": _rope,
    "rms_norm_rope": _rms_norm_rope,
    "layer_norm_modulate": _modulate,
    "gated_add": _gated_add,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "quick_gelu": _quick_gelu,
    "group_norm_silu": _group_norm_silu,
    "lora_linear": _lora_linear,
}
"""The code of a PyTorch user for an op that PyTorch lacks."""


def torch_seconds(
    op: Op, sets: Sequence[Mapping[str, Any]], wanted: Sequence[str], device: str, phase: str
) -> float | None:
    """Times PyTorch on the arguments of an op.

    Args:
        op: the op.
        sets: sets of its arguments, used in turn.
        wanted: the arguments whose gradients the backward pass computes.
        device: "cuda" or "cpu".
        phase: "forward" or "backward".

    Returns:
        Seconds of a call; None if PyTorch has no such op.
    """
    torch = importlib.import_module("torch")
    fn = function(torch, op)
    if fn is None:
        return None
    every = [arguments(torch, bound) for bound in sets]
    if device == "cpu":
        return _timed(torch, _calls(torch, fn, every, wanted, phase), None)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # a backward pass runs on its forward pass's stream, which must be the captured one
        return _timed(torch, _calls(torch, fn, every, wanted, phase), stream)


def _calls(
    torch: Any, fn: Callable[..., Any], every: Sequence[dict[str, Any]], wanted: Sequence[str], phase: str
) -> list[Callable[[], Any]]:
    if phase == "backward":
        return [_backward(torch, fn, a, wanted) for a in every]

    def forward(arguments: dict[str, Any]) -> Any:
        with torch.no_grad():
            return fn(**arguments)

    return [partial(forward, a) for a in every]


def function(torch: Any, op: Op) -> Callable[..., Any] | None:
    """PyTorch's function for an op, or what its user would write, to be called by our names; None if there is none."""
    if op.name in _WRITTEN_OUT:
        return lambda **a: _WRITTEN_OUT[op.name](torch, **a)
    if op.torch is None:
        return None
    fn: Any = torch
    for part in op.torch.split("."):
        fn = getattr(fn, part)
    found: Callable[..., Any] = fn
    return found


def _backward(torch: Any, fn: Callable[..., Any], given: dict[str, Any], wanted: Sequence[str]) -> Callable[[], Any]:
    tensors = [v for n, v in given.items() if n in wanted and isinstance(v, torch.Tensor)]
    leaves = [v.requires_grad_() for v in tensors if v.is_floating_point()]
    out = fn(**given)
    g = out.detach().clone()
    return lambda: torch.autograd.grad(out, leaves, g, retain_graph=True)


def arguments(torch: Any, bound: Mapping[str, Any]) -> dict[str, Any]:
    """The same memory as torch tensors, NHWC as channels-last, without what only our ops take."""
    nhwc = bound.get("layout") == "NHWC"
    as_bits = {as_dtype("bf16"): (np.int16, torch.bfloat16), as_dtype("bool"): (np.uint8, torch.bool)}

    def to(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        bits, dtype = as_bits.get(value.dtype, (value.dtype, None))
        t = torch.from_dlpack(value.data.view(bits))
        t = t.view(dtype) if dtype else t
        return t.permute(0, 3, 1, 2) if nhwc and t.ndim == 4 and value is bound["input"] else t

    return {n: [to(t) for t in v] if isinstance(v, list) else to(v) for n, v in bound.items() if n not in _OURS}


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
