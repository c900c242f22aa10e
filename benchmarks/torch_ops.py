"""PyTorch's time for the calls that `bench ops` times, where it is installed: eager, captured in a graph likewise."""

from __future__ import annotations

import importlib
import inspect
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from flame_train.engine import Tensor, get_float32_matmul_precision
from flame_train.engine.dtype import as_dtype
from flame_train.engine.op import Op

_ROUNDS, _REPEATS = 5, 20
_OURS = ("layout", "rng", "stream", "known")  # arguments that PyTorch's functions do not have


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


def _cat_rms_norm(torch: Any, tensors: Any, weights: Any, cos: Any, sin: Any, dim: int, eps: float) -> Any:
    norm = torch.nn.functional.rms_norm
    x = torch.cat([norm(x, (x.shape[-1],), w, eps) for x, w in zip(tensors, weights, strict=True)], dim)
    return x * cos + _turned(torch, x) * sin


def _cat_gelu(torch: Any, input: Any, hidden: Any, approximate: str) -> Any:
    return torch.cat([input, torch.nn.functional.gelu(hidden, approximate=approximate)], -1)


def _cat_group_norm_silu(
    torch: Any, input: Any, other: Any, num_groups: int, weight: Any, bias: Any, shift: Any, eps: float
) -> Any:
    x = torch.cat([input.movedim(-1, 1), other.movedim(-1, 1)], 1) + shift[:, :, None, None]
    return torch.nn.functional.silu(torch.nn.functional.group_norm(x, num_groups, weight, bias, eps)).movedim(1, -1)


def _feed_forward(torch: Any, input: Any, weight1: Any, bias1: Any, weight2: Any, bias2: Any) -> Any:
    f = torch.nn.functional
    return f.linear(f.gelu(f.linear(input, weight1, bias1), approximate="tanh"), weight2, bias2)


def _linear_add(torch: Any, input: Any, weight: Any, bias: Any, residual: Any) -> Any:
    return torch.nn.functional.linear(input, weight, bias) + residual


def _lora_linears(torch: Any, input: Any, weights: Any, downs: Any, ups: Any, scale: float) -> Any:
    linear, sizes = torch.nn.functional.linear, [len(w) for w in weights]
    whole = linear(input, torch.cat(weights)).split(sizes, -1)
    pairs = zip(whole, downs, ups, strict=True)
    return tuple(y + linear(linear(input, down), up) * scale for y, down, up in pairs)


def _lora_conv2d(
    torch: Any, input: Any, weight: Any, bias: Any, down: Any, up: Any, scale: float, stride: Any, padding: Any
) -> Any:
    conv = torch.nn.functional.conv2d
    return conv(input, weight, bias, stride, padding) + conv(conv(input, down, None, stride, padding) * scale, up)


def _batch_norm_train(torch: Any, input: Any, weight: Any, bias: Any, eps: float) -> Any:
    return torch.nn.functional.batch_norm(input, None, None, weight, bias, True, eps=eps)


def _batch_norm_inference(
    torch: Any, input: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, eps: float
) -> Any:
    return torch.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, False, eps=eps)


def _upsample_nearest(torch: Any, input: Any, scale_factor: int) -> Any:
    return torch.nn.functional.interpolate(input, scale_factor=scale_factor)


def _timestep_embedding(torch: Any, timesteps: Any, dim: int, max_period: float, dtype: Any) -> Any:
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    angles = timesteps[:, None].float() * torch.exp(-math.log(max_period) * steps / half)[None]
    return torch.cat([torch.cos(angles), torch.sin(angles)], -1)


def _cast(torch: Any, input: Any, dtype: Any) -> Any:
    return input.to(getattr(torch, as_dtype(dtype).name))


def _max_dim(torch: Any, input: Any, dim: int, keepdim: bool) -> Any:
    return torch.max(input, dim, keepdim)


def _min_dim(torch: Any, input: Any, dim: int, keepdim: bool) -> Any:
    return torch.min(input, dim, keepdim)


def _dora_gain(
    torch: Any, magnitude: Any, squares: Any, crossed: Any, own: Any, squared: Any, scale: float, dim: int
) -> Any:
    over = 1 - dim
    norm = squares + 2 * scale * (crossed * own).sum(over) + scale**2 * (crossed * squared).sum(over)
    return magnitude / norm.sqrt() - 1


def _kron_add(torch: Any, input: Any, mat1: Any, mat2: Any, scale: float) -> Any:
    return input + scale * torch.kron(mat1, mat2)


def _hadamard_add(
    torch: Any, input: Any, first_a: Any, first_b: Any, second_a: Any, second_b: Any, scale: float
) -> Any:
    return input + scale * (first_a @ first_b) * (second_a @ second_b)


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
    "cat_rms_norm": _cat_rms_norm,
    "cat_gelu": _cat_gelu,
    "cat_group_norm_silu": _cat_group_norm_silu,
    "feed_forward": _feed_forward,
    "linear_add": _linear_add,
    "lora_linears": _lora_linears,
    "lora_conv2d": _lora_conv2d,
    "batch_norm_train": _batch_norm_train,
    "batch_norm_inference": _batch_norm_inference,
    "upsample_nearest": _upsample_nearest,
    "timestep_embedding": _timestep_embedding,
    "cast": _cast,
    "dora_gain": _dora_gain,
    "kron_add": _kron_add,
    "hadamard_add": _hadamard_add,
    "max_dim": _max_dim,
    "min_dim": _min_dim,
}
"""The code of a PyTorch user for an op that PyTorch lacks. Weights in 8 bits with a scale for each row have none."""


def torch_seconds(
    op: Op, sets: Sequence[Mapping[str, Any]], wanted: Sequence[str], device: str, phase: str, captured: bool = True
) -> float | None:
    """Times PyTorch on the arguments of an op.

    Args:
        op: the op.
        sets: sets of its arguments, used in turn.
        wanted: the arguments whose gradients the backward pass computes.
        device: "cuda" or "cpu".
        phase: "forward" or "backward".
        captured: whether many calls are one CUDA graph.

    Returns:
        Seconds of a call; None if PyTorch has no such op. Its products and convolutions of fp32 are in TF32 where ours
        are.

    Raises:
        RuntimeError: the calls were to be captured, and cannot be.
    """
    torch = importlib.import_module("torch")
    rounded = get_float32_matmul_precision() == "high"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = rounded
    fn = function(torch, op)
    if fn is None:
        return None
    every = [arguments(torch, bound) for bound in sets]
    if device == "cpu":
        return _timed(torch, _calls(torch, fn, every, wanted, phase), None, False)
    stream = torch.cuda.Stream()
    torch.cuda.empty_cache()  # of other sizes: this program's pool is beside it
    with torch.cuda.stream(stream):  # a backward pass runs on its forward pass's stream, which must be the captured one
        return _timed(torch, _calls(torch, fn, every, wanted, phase), stream, captured)


def empty_torch_cache() -> None:
    """Gives back what PyTorch keeps of the device, of which the next call may need most."""
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
    required = [p.name for p in op.params if p.default is inspect.Parameter.empty]
    defaults = {p.name: p.default for p in op.params}

    def call(**given: Any) -> Any:
        """As a user calls it: what must be given by position, as PyTorch's names of some differ, the rest by name."""
        named = {n: v for n, v in given.items() if n not in required and not _same(v, defaults[n])}
        return fn(*(given[n] for n in required), **named)

    return call


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _backward(torch: Any, fn: Callable[..., Any], given: dict[str, Any], wanted: Sequence[str]) -> Callable[[], Any]:
    tensors = [t for n, v in given.items() if n in wanted for t in (v if isinstance(v, list) else [v])]
    leaves = [t.requires_grad_() for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()]
    found = fn(**given)
    outs = [o for o in (found if isinstance(found, (tuple, list)) else (found,)) if o.requires_grad]
    gs = [o.detach().clone() for o in outs]
    return lambda: torch.autograd.grad(outs, leaves, gs, retain_graph=True, allow_unused=True)


def arguments(torch: Any, bound: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same memory as torch tensors, NHWC as channels-last, without what only our ops take."""
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


def _timed(torch: Any, calls: Sequence[Callable[[], Any]], stream: Any, captured: bool) -> float:
    """Seconds a call, the calls taking turns, the results of a round kept until its end."""

    def wait() -> None:
        if stream is not None:
            torch.cuda.synchronize()

    def many() -> list[Any]:
        return [calls[i % len(calls)]() for i in range(_REPEATS)]

    calls[0]()
    wait()
    run: Callable[[], Any] = many
    if captured:
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
