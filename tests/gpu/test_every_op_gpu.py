"""Every op on the GPU: references and kernels against the fp64 reference on the CPU, by one tolerance rule.

Truth is the fp64 reference on the same rounded inputs. The baseline is the largest error in the tested dtype among the
reference on the CPU, for a kernel the reference on the GPU, and PyTorch on the GPU where it is installed and has the
function. For chains of products of 8 bits in fp32 it is also what a few units in the last place of the arguments
change. An implementation passes with an error of at most twice the baseline plus one unit in the last place.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine.dispatch import explain
from flame_train.engine.dtype import bfloat16, float16, float32, float64, is_float
from flame_train.engine.gradcheck import generator, gradcheck
from flame_train.engine.mode import use
from flame_train.engine.op import REGISTRY, Op, Sample
from flame_train.engine.op_samples import materialise, tensor_arguments

pytestmark = pytest.mark.gpu

OPS = sorted(REGISTRY)
CASES = [
    pytest.param(n, f"{kind}{i}", s, id=f"{n}-{kind}{i}")
    for n in OPS
    for kind, found in (("s", REGISTRY[n].iter_samples()), ("l", REGISTRY[n].iter_perf_samples()))
    for i, s in enumerate(found)
]
DTYPES = [float32, bfloat16, float16]  # fp64 is gradcheck's


def outputs(result: Any) -> list[flame.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def on(bound: dict[str, Any], op: Op, device: str, dtype: Any) -> dict[str, Any]:
    """The same drawn arguments on a device, the floats in `dtype`."""

    def move(t: Any) -> Any:
        if isinstance(t, list):
            return [move(x) for x in t]
        if not isinstance(t, flame.Tensor):
            return t
        return flame.tensor(t.numpy(), dtype if is_float(t.dtype) else None, device)

    return {n: move(v) if n in op.tensor_names else v for n, v in bound.items()}


def results(
    op: Op, bound: dict[str, Any], weights: list[np.ndarray] | None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Outputs and the gradients of every differentiable argument, on the host in fp64."""
    found = [t for a, _, t in tensor_arguments(op, bound) if a in op.differentiable and is_float(t.dtype)]
    for t in found:
        t.requires_grad_()
    made = outputs(op(**bound))
    values = [np.asarray(o.numpy(), np.float64) for o in made]
    roots = [o for o in made if o.requires_grad]
    if not roots or weights is None:
        return values, []
    cotangents = [flame.tensor(w, o.dtype, o.device) for o, w in zip(roots, weights, strict=False)]
    got = flame.grad(roots, found, cotangents, allow_unused=True)
    return values, [
        np.zeros(t.shape) if g is None else np.asarray(g.numpy(), np.float64) for t, g in zip(found, got, strict=True)
    ]


def pytorch(
    op: Op, bound: dict[str, Any], weights: list[np.ndarray], dtype: Any
) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
    """What PyTorch makes of the same arguments on the GPU in the same dtype; None where it has no such function."""
    torch = pytest.importorskip("torch")
    if op.torch is None or op.list_names or op.multiple or op.name == "getitem":
        return None
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    nhwc = bound.get("layout") == "NHWC"
    leaves: list[Any] = []

    def to(name: str, t: Any) -> Any:
        if not isinstance(t, flame.Tensor):
            return t
        x = torch.from_numpy(np.array(t.numpy(), np.float64 if is_float(t.dtype) else None)).cuda()
        if not is_float(t.dtype):
            return x
        leaf = x.to(getattr(torch, dtype.name)).requires_grad_()
        if name in op.differentiable:
            leaves.append(leaf)
        return leaf.permute(0, 3, 1, 2) if nhwc and leaf.ndim == 4 and name == "input" else leaf

    arguments = {n: to(n, v) for n, v in bound.items() if n != "layout"}
    fn: Any = torch
    for part in op.torch.split("."):
        fn = getattr(fn, part, None)
    try:
        with warnings.catch_warnings(action="ignore"):  # advice to PyTorch's users
            y = fn(**arguments)
            if not isinstance(y, torch.Tensor) or not y.is_floating_point() or not y.requires_grad:
                return None
            out = y.permute(0, 2, 3, 1) if nhwc and y.ndim == 4 else y
            cotangent = torch.from_numpy(weights[0]).cuda().to(out.dtype)
            grads = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    except (TypeError, RuntimeError, NotImplementedError, ValueError):
        return None  # its arguments or its coverage differ: no baseline
    host = [g.detach().double().cpu().numpy() for g in (out, *(g for g in grads if g is not None))]
    return (host[:1], host[1:]) if len(host) == 1 + len(leaves) else None


def drawn(
    name: str, s: Sample, dtype: Any, rng: np.random.Generator
) -> tuple[Op, dict[str, Any], dict[str, Any], list[np.ndarray]]:
    """The op, arguments rounded to `dtype`, the same in fp64, and what its outputs are weighed with for gradients."""
    op = REGISTRY[name]
    if "dtype" in op.names:  # an output dtype of its own: the one under test
        s = Sample(s.args[: op.names.index("dtype")], {**s.kwargs, "dtype": dtype})
    rounded = on(materialise(op, s, rng), op, "cpu", dtype)
    exact = on(rounded, op, "cpu", float64)
    shapes = [o.shape for o in outputs(op(**exact)) if is_float(o.dtype)]
    return op, rounded, exact, [rng.standard_normal(n).astype(dtype).astype(np.float64) for n in shapes]


def nudged(exact: dict[str, Any], op: Op, rng: np.random.Generator) -> dict[str, Any]:
    """The arguments changed by a few fp32 units in the last place.

    What is rounded to 8 bits half way jumps at ties, so an fp32 error before it can move a value by a whole level.
    """

    def move(t: Any) -> Any:
        if isinstance(t, list):
            return [move(x) for x in t]
        if not isinstance(t, flame.Tensor) or not is_float(t.dtype):
            return t
        return flame.tensor(t.numpy() * (1 + 8 * ulp(float32) * rng.uniform(-1, 1, t.shape)), float64)

    return {n: move(v) if n in op.tensor_names else v for n, v in exact.items()}


def error(got: np.ndarray, truth: np.ndarray) -> float:
    assert got.shape == truth.shape
    assert not np.isnan(got).any()
    scale = np.linalg.norm(truth)
    return float(np.linalg.norm(got - truth) / scale) if scale else float(np.linalg.norm(got))


def ulp(dtype: Any) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def record(row: dict[str, Any]) -> None:
    """The measured ratios, for the generated op table, when OUT names a folder."""
    if "OUT" in os.environ:
        with open(Path(os.environ["OUT"]) / "op_errors.jsonl", "a") as f:
            f.write(json.dumps(row) + "\n")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize(("name", "label", "s"), CASES)
def test_meets_the_tolerance_rule(name: str, label: str, s: Sample, dtype: Any) -> None:
    rng = generator(name, len(label) * 100 + int(label[1:]))
    op, rounded, exact, weights = drawn(name, s, dtype, rng)
    with use(**{name: "reference"}) if not op.composite else use():
        truth = results(op, exact, weights)
        yard = results(op, rounded, weights)
    moved = on(rounded, op, "cuda", dtype)
    chosen = next(i for i, why in explain(op, **moved) if why == "chosen")
    yards = [yard]
    if chosen != "reference" and not op.composite:
        with use(**{name: "reference"}):
            yards.append(results(op, on(rounded, op, "cuda", dtype), weights))
    if op.composite and s.kwargs.get("dynamic") and dtype == float32:
        yards.append(results(op, nudged(exact, op, rng), weights))
    theirs = pytorch(op, rounded, weights, dtype) if weights else None
    if theirs is not None and [len(p) for p in theirs] == [len(p) for p in yard]:
        yards.append(theirs)
    got = results(op, moved, weights)
    worst = 0.0
    for part in (0, 1):
        for n, (g, t) in enumerate(zip(got[part], truth[part], strict=True)):
            limit = 2.0 * max(error(y[part][n], t) for y in yards) + ulp(dtype)
            worst = max(worst, error(g, t) / limit)
    record({"op": name, "sample": label, "dtype": dtype.name, "impl": chosen, "of_limit": worst})
    assert worst <= 1.0, f"{chosen}: {worst:.2f} of the allowed error"


def lying(xp: Any, a: Any, how: int) -> Any:
    """The same values in memory of another order, distance, direction or alignment."""
    if how == 0 or a.ndim == 0:  # an element behind the boundaries that wide accesses need
        room = xp.empty(a.size + 1, a.dtype)[1:].reshape(a.shape)
    elif how == 1:  # every other element
        room = xp.empty((*a.shape[:-1], 2 * a.shape[-1]), a.dtype)[..., ::2]
    elif how == 2:  # rows with gaps of an odd length
        room = xp.empty((*a.shape[:-1], a.shape[-1] + 3), a.dtype)[..., 1:-2]
    elif how == 3:  # dims the other way round
        room = xp.empty(a.shape[::-1], a.dtype).T
    else:  # backwards
        room = xp.empty(a.shape, a.dtype)[..., ::-1]
    room[...] = a
    return room


@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize(("name", "label", "s"), CASES)
def test_how_arrays_lie_in_memory_does_not_matter(
    name: str, label: str, s: Sample, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views reach kernels that were written for whole arrays: those must take them as they lie, or copy, or decline."""
    rng = generator(name, len(label) * 100 + int(label[1:]))
    op, rounded, exact, weights = drawn(name, s, dtype, rng)
    truth, yard = results(op, exact, weights), results(op, rounded, weights)
    whole = results(op, on(rounded, op, "cuda", dtype), weights)
    plain, turn = flame.tensor, itertools.count(int(rng.integers(5)))

    def odd(data: Any, dtype: Any = None, device: str | None = None) -> flame.Tensor:
        made = plain(data, dtype, device)
        return flame.Tensor(lying(made.backend.xp, made.data, next(turn) % 5)) if device == "cuda" else made

    monkeypatch.setattr(flame, "tensor", odd)
    for _ in range(3):
        got = results(op, on(rounded, op, "cuda", dtype), weights)
        next(turn)
        for part in (0, 1):
            for g, t, w, y in zip(got[part], truth[part], whole[part], yard[part], strict=True):
                assert error(g, t) <= 2.0 * max(error(w, t), error(y, t)) + 2 * ulp(dtype)


@pytest.mark.parametrize("name", OPS)
def test_gradients_meet_finite_differences_on_the_gpu(name: str) -> None:
    assert not [v for v in gradcheck(REGISTRY[name], "cuda") if not v.passed]


@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize(("name", "label", "s"), [c for c in CASES if c.values[1].startswith("l")])
def test_two_runs_are_bit_equal(name: str, label: str, s: Sample, dtype: Any) -> None:
    op = REGISTRY[name]
    rng = generator(name, int(label[1:]))
    bound = materialise(op, s, rng)
    weights = [rng.standard_normal(o.shape) for o in outputs(op(**bound))]
    runs = [results(op, on(bound, op, "cuda", dtype), weights) for _ in range(2)]
    for first, second in zip(runs[0][0] + runs[0][1], runs[1][0] + runs[1][1], strict=True):
        assert np.array_equal(first, second)


@pytest.mark.parametrize(
    ("name", "impl"), [(n, k.impl) for n in OPS for k in REGISTRY[n].kernels], ids=lambda v: str(v)
)
def test_every_kernel_is_reached_by_some_sample(name: str, impl: str) -> None:
    op = REGISTRY[name]
    for s in [*op.iter_samples(), *op.iter_perf_samples()]:
        for dtype in DTYPES:
            moved = on(materialise(op, s, generator(name, 0)), op, "cuda", dtype)
            if (impl, "chosen") in explain(op, **moved):
                return
    pytest.fail(f"no sample of {name} is taken by {impl}")
