"""PyTorch's own sample inputs, run through the ops that bear the same name: values and gradients in fp64.

What an op does not take is listed with the reason, and nothing else is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine.op import REGISTRY

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's sample inputs need it")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

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


def converted(value: Any) -> Any:
    """Tensors as ours, also inside lists, tuples and keyword arguments."""
    if isinstance(value, torch.Tensor):
        return flame.tensor(value.detach().numpy(), requires_grad=value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(converted(v) for v in value)
    if isinstance(value, dict):
        return {k: converted(v) for k, v in value.items()}
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


def check(name: str, info: Any, s: Any) -> None:
    want = info.op(s.input, *s.args, **s.kwargs)
    first, args, kwargs = converted(s.input), converted(s.args), converted(s.kwargs)
    got = call(name, first, args, kwargs)
    theirs = list(want) if isinstance(want, (tuple, list)) else [want]
    ours = list(got) if isinstance(got, tuple) else [got]
    assert len(ours) == len(theirs)
    for o, t in zip(ours, theirs, strict=True):
        assert o.dtype == t.detach().numpy().dtype
        assert error(o.numpy().astype(np.float64), t.detach().numpy().astype(np.float64)) <= OWN_LIMIT.get(name, LIMIT)
    pairs = [(o, t) for o, t in zip(ours, theirs, strict=True) if t.requires_grad]
    inputs = list(leaves([s.input, s.args, s.kwargs], [first, args, kwargs]))
    if not pairs or not inputs or (name == "scatter" and _partial_source(s)):
        return
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(o.shape) for o, _ in pairs]
    mine = flame.grad(
        [o for o, _ in pairs], [o for _, o in inputs], [flame.tensor(w) for w in weights], allow_unused=True
    )
    given = [torch.from_numpy(np.asarray(w)) for w in weights]
    other = torch.autograd.grad([t for _, t in pairs], [t for t, _ in inputs], given, allow_unused=True)
    for (t, _), m, g in zip(inputs, mine, other, strict=True):
        a, b = (np.zeros(t.shape) if x is None else x.numpy() for x in (m, g))
        assert error(a, b) <= OWN_LIMIT.get(name, LIMIT)


@pytest.mark.parametrize(("name", "theirs"), list(named()), ids=lambda v: str(v))
def test_samples(name: str, theirs: str, record_property: Any) -> None:
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
    record_property("samples", run)
    assert run
    assert not wrong, "\n".join(wrong)


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
