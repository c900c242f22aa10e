"""PyTorch's own sample inputs, run through the ops that bear the same name: values and gradients in fp64.

What an op does not take is listed with the reason, and nothing else is left out.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine.dtype import bfloat16, float32
from flame_train.engine.mode import use
from flame_train.engine.op import REGISTRY
from flame_train.engine.shape_run import shape_run

torch = pytest.importorskip("torch")
for needed in ("expecttest", "setuptools"):
    pytest.importorskip(needed, reason=f"PyTorch's sample inputs need {needed}: pip install 'flame-train[parity]'")
pytestmark = [pytest.mark.parity, pytest.mark.proof, pytest.mark.filterwarnings("ignore")]

LIMIT = 1e-10
OWN_LIMIT = {"hardsigmoid": 1e-7}
"""Where PyTorch is less exact: its gradient has 1 / 6 in fp32."""
MOST = 200  # samples of one op and variant
NO_SAMPLES = {"fold", "log_softmax", "max_pool2d_with_indices", "softmax"}
"""PyTorch lists these under other names or not at all; test_ops.py has them."""


@dataclass(frozen=True)
class Unsupported:
    """Samples an op does not take, and why."""

    op: str
    reason: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Found:
    """Outputs and gradients, ours or PyTorch's; no gradients where PyTorch has none."""

    values: list[Any]
    grads: list[Any] | None

    def on_host(self) -> list[np.ndarray]:
        """All of them in fp64, the outputs first."""
        return [_host(t) for t in (*self.values, *(self.grads or ()))]


def _host(t: Any) -> np.ndarray:
    plain = t.double().cpu().numpy() if isinstance(t, torch.Tensor) else t.numpy()
    return np.asarray(plain, np.float64)


def has(*names: str) -> Callable[[Any], bool]:
    return lambda s: any(n in s.kwargs for n in names)


def dims(n: int) -> Callable[[Any], bool]:
    return lambda s: s.input.ndim == n


UNSUPPORTED = [
    *(
        Unsupported(op, "a dtype for the result: cast first, .to(dtype)", has("dtype"))
        for op in ("cumsum", "prod", "softmin")
    ),
    *(Unsupported(op, "`unbiased`: correction says it", has("unbiased")) for op in ("std", "var")),
    *(
        Unsupported(op, "`unbiased` by position", lambda s: s.args and isinstance(s.args[0], bool))
        for op in ("std", "var")
    ),
    *(
        Unsupported(op, "an image without a batch: unsqueeze(0)", dims(3))
        for op in ("conv2d", "conv_transpose2d", "adaptive_avg_pool2d")
    ),
    Unsupported("conv1d", "a signal without a batch: unsqueeze(0)", dims(2)),
    *(
        Unsupported(
            op, "'same' for a kernel without a middle: pad() first", lambda s: s.kwargs.get("padding") == "same"
        )
        for op in ("conv1d", "conv2d")
    ),
    Unsupported("batch_norm", "a batch of numbers instead of vectors", dims(1)),
    Unsupported("cat", "an empty 1-D tensor among others, a relic", lambda s: {t.ndim for t in s.input} == {1, 2}),
    Unsupported(
        "dropout", "chance without an rng", lambda s: s.kwargs.get("training", True) and s.kwargs.get("p", 0.5) > 0
    ),
    Unsupported("gather", "an index of other dims than the input", lambda s: s.args[1].ndim != s.input.ndim),
    *(
        Unsupported("interpolate", f"mode {mode}", lambda s, mode=mode: s.kwargs.get("mode") == mode)
        for mode in ("area", "bicubic")
    ),
    Unsupported("narrow", "a tensor as start", lambda s: isinstance(s.args[1], torch.Tensor)),
    Unsupported("norm", "the nuclear norm", lambda s: s.args[:1] == ("nuc",)),
    Unsupported(
        "repeat_interleave",
        "a tensor of repeats: the result's shape would be read from the device",
        lambda s: any(isinstance(v, torch.Tensor) for v in (*s.args, *s.kwargs.values())),
    ),
    Unsupported("scaled_dot_product_attention", "chance without an rng", lambda s: s.kwargs.get("dropout_p", 0.0) > 0),
    Unsupported(
        "scaled_dot_product_attention",
        "batches that broadcast: expand first",
        lambda s: s.input.shape[:-2] != s.args[0].shape[:-2] and not s.kwargs.get("enable_gqa"),
    ),
]


@cache
def opinfos() -> dict[str, list[Any]]:
    with patch("torch.backends.disable_global_flags"):  # else its import keeps all other tests from setting flags
        from torch.testing._internal.common_methods_invocations import op_db
    found = defaultdict(list)
    for info in op_db:
        found[info.name].append(info)
    return found


def named() -> Iterator[tuple[str, str]]:
    """Our name and PyTorch's, for every op that has one."""
    for name, op in sorted(REGISTRY.items()):
        if op.torch and name not in NO_SAMPLES:
            yield name, op.torch.removeprefix("Tensor.")


def samples(info: Any) -> list[Any]:
    dtype = torch.int64 if info.name == "nn.functional.one_hot" else torch.float64
    if dtype not in info.dtypes:
        return []  # a variant of complex numbers, or of another device
    return list(info.sample_inputs("cpu", dtype, requires_grad=dtype == torch.float64))[:MOST]


def why_not(name: str, s: Any) -> Unsupported | None:
    return next((u for u in UNSUPPORTED if u.op == name and u.holds(s)), None)


def converted(value: Any, dtype: Any = None, device: str = "cpu") -> Any:
    """Tensors as ours, floats in `dtype` if that is given; also inside lists, tuples and keyword arguments."""
    if isinstance(value, torch.Tensor):
        wanted = dtype if value.is_floating_point() else None
        return flame.tensor(value.detach().numpy(), wanted, device, requires_grad=value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(converted(v, dtype, device) for v in value)
    if isinstance(value, dict):
        return {k: converted(v, dtype, device) for k, v in value.items()}
    return value


def call(name: str, first: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ours on a sample: PyTorch's table puts the differentiable tensor first and spells sizes out, whatever the op."""
    op = REGISTRY[name]
    if name == "where":
        return op(args[0], first, args[1])
    if name == "embedding":
        return op(args[0], first, **kwargs)
    if name == "einsum":
        return op(args[0], list(first))
    if name in ("expand", "permute", "repeat", "view") and not (args and isinstance(args[0], (list, tuple))):
        args = (args,)
    return op(first, *args, **kwargs)


def leaves(theirs: Any, ours: Any) -> Iterator[tuple[Any, flame.Tensor]]:
    """Each tensor that wants a gradient, theirs and ours."""
    if isinstance(theirs, torch.Tensor) and theirs.requires_grad:
        yield theirs, ours
    elif isinstance(theirs, (list, tuple)):
        for t, o in zip(theirs, ours, strict=True):
            yield from leaves(t, o)
    elif isinstance(theirs, dict):
        for k in theirs:
            yield from leaves(theirs[k], ours[k])


def error(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want|; plain where all there is should be zero, up to rounding."""
    assert got.shape == want.shape
    finite = np.isfinite(want)
    assert np.array_equal(got[~finite], want[~finite], equal_nan=True)
    scale = float(np.linalg.norm(want[finite]))
    return float(np.linalg.norm(got[finite] - want[finite])) / (scale if scale > 1e-6 else 1.0)


def _partial_source(s: Any) -> bool:
    """A source larger than the index: PyTorch has no gradient for it."""
    return isinstance(s.args[2], torch.Tensor) and s.args[2].shape != s.args[1].shape


def listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def pytorch(name: str, info: Any, s: Any) -> Found:
    """What PyTorch makes of a sample, on the sample's device."""
    outs = listed(info.op(s.input, *s.args, **s.kwargs))
    inputs = [t for t, _ in leaves([s.input, s.args, s.kwargs], [s.input, s.args, s.kwargs])]
    roots = [t for t in outs if t.requires_grad]
    values = [t.detach() for t in outs]
    if not roots or not inputs or (name == "scatter" and _partial_source(s)):
        return Found(values, None)
    given = [torch.from_numpy(w).to(t) for w, t in zip(weights(roots), roots, strict=True)]
    grads = torch.autograd.grad(roots, inputs, given, allow_unused=True)
    return Found(values, [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, grads, strict=True)])


def engine(name: str, s: Any, truth: Found, dtype: Any = None, device: str = "cpu") -> Found:
    """What the engine makes of it, with gradients where the truth has some."""
    given = [converted(v, dtype, device) for v in (s.input, s.args, s.kwargs)]
    outs = listed(call(name, *given))
    assert len(outs) == len(truth.values)
    if truth.grads is None:
        return Found(outs, None)
    inputs = [o for _, o in leaves([s.input, s.args, s.kwargs], given)]
    roots = [o for o in outs if o.requires_grad]
    cotangents = [flame.tensor(w, o.dtype, o.device) for w, o in zip(weights(roots), roots, strict=True)]
    grads = flame.grad(roots, inputs, cotangents, allow_unused=True)
    return Found(outs, [flame.zeros_like(t) if g is None else g for t, g in zip(inputs, grads, strict=True)])


def weights(roots: list[Any]) -> list[np.ndarray]:
    """What outputs are weighed with for gradients: numbers that bf16 holds too."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(tuple(o.shape)).astype(ml_dtypes.bfloat16).astype(np.float64) for o in roots]


def check(name: str, info: Any, s: Any) -> None:
    """In fp64, on the CPU."""
    want = pytorch(name, info, s)
    got = engine(name, s, want)
    for o, t in zip(got.values, want.values, strict=True):
        assert o.dtype == t.numpy().dtype
    for o, t in zip(got.on_host(), want.on_host(), strict=True):
        assert error(o, t) <= OWN_LIMIT.get(name, LIMIT)


def in_dtypes(s: Any, *dtypes: str) -> Any:
    """The sample with its floats cast to each of the dtypes in turn."""

    def cast(v: Any) -> Any:
        if not isinstance(v, torch.Tensor) or not v.is_floating_point():
            return v
        made = v.detach()
        for dtype in dtypes:
            made = made.to(getattr(torch, dtype))
        return made.requires_grad_(v.requires_grad)

    return s.transform(cast)


def on_device(s: Any, device: str) -> Any:
    """The sample with its tensors on a device."""

    def move(v: Any) -> Any:
        return v.detach().to(device).requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v

    return s if device == "cpu" else s.transform(move)


def check_narrow(name: str, info: Any, s: Any, dtype: Any, device: str) -> None:
    """In fp32, bf16 or fp16, on a device, by the tolerance rule of tests/gpu/test_every_op_gpu.py.

    The truth is PyTorch's, in fp64 on the CPU. The yardstick is the larger error of the engine's reference and of
    PyTorch, each in `dtype`, on the CPU and on `device`: a GPU's own exp and rsqrt are not a CPU's.
    """
    s = in_dtypes(s, dtype.name, "float64")
    truth = pytorch(name, info, s)
    got = engine(name, s, truth, dtype, device)
    for o, t in zip(got.values, truth.values, strict=True):
        assert not t.is_floating_point() or o.dtype == dtype
        assert o.device == device
    exact, unit = truth.on_host(), float(ml_dtypes.finfo(dtype).eps)
    wanted = [in_range(t, dtype) for t in exact]
    if any(np.isinf(w).sum() > np.isinf(t).sum() for w, t in zip(wanted, exact, strict=True)):
        wanted = wanted[: len(truth.values)]  # sums of infinite gradients say nothing
    errors = [error(g, t) for g, t in zip(got.on_host(), wanted, strict=False)]
    if max(errors, default=0.0) <= unit:
        return  # within one unit in the last place: no yardstick is needed
    yards = []
    for place in {"cpu", device}:
        if place == "cpu" or not REGISTRY[name].composite:  # a composite's reference on the device is what is tested
            with use(**({} if REGISTRY[name].composite else {name: "reference"})):
                yards.append(engine(name, s, truth, dtype, place))
        with contextlib.suppress(RuntimeError, NotImplementedError):  # PyTorch lacks some ops in some dtypes
            yards.append(pytorch(name, info, on_device(in_dtypes(s, dtype.name), place)))
    for i, (found, t) in enumerate(zip(errors, wanted, strict=True)):
        allowed = 2.0 * max(error(y.on_host()[i], t) for y in yards) + unit
        assert found <= allowed, f"result {i}: an error of {found:.3g}, {allowed:.3g} allowed"


def in_range(truth: np.ndarray, dtype: Any) -> np.ndarray:
    """The truth with infinity for what is beyond `dtype`."""
    with np.errstate(over="ignore"):
        return np.where(np.isinf(truth.astype(dtype)), np.copysign(np.inf, truth), truth)


def held(name: str, theirs: str, check: Callable[[str, Any, Any], None]) -> int:
    """Runs `check` on every sample that the op takes; returns how many these are. Fails naming all that are wrong."""
    run, wrong = 0, []
    for info in opinfos()[theirs]:
        for i, s in enumerate(samples(info)):
            if why_not(name, s):
                continue
            run += 1
            try:
                check(name, info, s)
            except Exception as e:
                shapes = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in (s.input, *s.args)]
                wrong.append(f"{info.variant_test_name}[{i}] {shapes} {list(s.kwargs.items())}: {type(e).__name__} {e}")
    assert run
    assert not wrong, "\n".join(wrong)
    return run


@pytest.mark.parametrize(("name", "theirs"), list(named()), ids=lambda v: str(v))
def test_samples(name: str, theirs: str, record_property: Any) -> None:
    record_property("samples", held(name, theirs, check))


@pytest.mark.parametrize(("name", "theirs"), list(named()), ids=lambda v: str(v))
def test_samples_in_bf16(name: str, theirs: str) -> None:
    """By the rule that tests/gpu/test_opinfo_gpu.py has for a GPU."""
    held(name, theirs, partial(check_narrow, dtype=bfloat16, device="cpu"))


@pytest.mark.parametrize(("name", "theirs"), list(named()), ids=lambda v: str(v))
def test_samples_have_their_shapes_on_a_described_gpu(name: str, theirs: str) -> None:
    """What CuPy and our kernels refuse though NumPy takes it is seen without a GPU."""

    def check(name: str, info: Any, s: Any) -> None:
        if name == "one_hot" and s.kwargs.get("num_classes", -1) == -1:
            return  # how many there are is for the values to say
        if name == "getitem" and any(isinstance(a, torch.Tensor) and a.dtype == torch.bool for a in s.args):
            return  # how many are chosen, too
        want = pytorch(name, info, s)
        got = engine(name, s, want, float32, "cuda")
        for o, t in zip((*got.values, *(got.grads or ())), (*want.values, *(want.grads or ())), strict=True):
            assert (o.device, o.shape) == ("cuda", tuple(t.shape))

    with shape_run():
        held(name, theirs, check)


@pytest.mark.proof
def test_most_samples_run_and_no_exception_is_stale(record_property: Any) -> None:
    run, left_out, used = 0, 0, set()
    for name, theirs in named():
        for info in opinfos()[theirs]:
            for s in samples(info):
                reason = why_not(name, s)
                run, left_out = run + (reason is None), left_out + (reason is not None)
                used.add(reason)
    record_property("samples run", run)
    record_property("samples left out", left_out)
    assert [u.op + ": " + u.reason for u in UNSUPPORTED if u not in used] == []
    assert run > 1700
    assert left_out < 0.1 * run
