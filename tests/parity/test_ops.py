"""Every op that PyTorch has, against PyTorch: values, every gradient, names, order and defaults of the arguments.

The samples are the op's own. An argument that equals our default is left out of PyTorch's call, so that the test also
holds our defaults to PyTorch's. Channels-last samples are transposed for PyTorch and its results back.
"""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine.dtype import float32, float64, is_float
from flame_train.engine.gradcheck import generator
from flame_train.engine.op import REGISTRY, Op, Sample
from flame_train.engine.op_samples import materialise, tensor_arguments

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

OPS = sorted(n for n, op in REGISTRY.items() if op.torch)
CASES = [
    pytest.param(n, i, s, id=f"{n}-{i}")
    for n in OPS
    for i, s in enumerate(REGISTRY[n].iter_samples())
    if "rng" not in s.kwargs  # which elements fall is ours to say; see the ops' own tests
]
LIMIT = {float32: 1e-5, float64: 1e-10}
OWN_LIMIT = {"celu": 1e-8, "hardsigmoid": 1e-7}
"""Where PyTorch's own gradient is less exact in fp64: a constant in it is rounded to fp32."""
NO_GRADIENT_THERE = {("scatter", 1), ("scatter_add", 1), ("cosine_similarity", 3), ("cosine_similarity", 4)}
"""PyTorch has no gradient for a source larger than the index, forgets the bound of norms, and rounds the gradient of
two numbers' cosine, which is 0; finite differences check ours."""


def counterpart(op: Op) -> Any:
    assert op.torch is not None
    return attrgetter(op.torch)(torch)


def ours_to_torch(value: Any) -> Any:
    """Tensors as torch tensors, also inside lists, tuples and indices."""
    if isinstance(value, flame.Tensor):
        return torch.from_numpy(value.numpy().copy()).requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(ours_to_torch(v) for v in value)
    return value


def channels_first(value: Any) -> Any:
    return value.movedim(-1, 1) if isinstance(value, torch.Tensor) and value.ndim > 2 else value


def masked_padding(call: dict[str, Any]) -> Any:
    """The mask for lengths of keys, which PyTorch's attention does not take, and for the mask beside them, if any."""
    keys, lengths, mask = call["key"].shape[-2], call.pop("key_value_seq_lengths"), call["attn_mask"]
    seen = torch.arange(keys) < lengths.reshape(-1, *(1,) * (call["query"].ndim - 1))
    if mask is None and not call["is_causal"]:
        return seen
    barred = torch.zeros(seen.shape, dtype=call["query"].dtype).masked_fill(~seen, -torch.inf)
    if call["is_causal"]:  # which PyTorch refuses beside a mask
        pairs = torch.ones(call["query"].shape[-2], keys, dtype=torch.bool).tril()
        barred = barred + torch.zeros(pairs.shape, dtype=barred.dtype).masked_fill(~pairs, -torch.inf)
        call["is_causal"] = False
    return barred if mask is None else barred + mask


def torch_run(op: Op, bound: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """PyTorch's outputs, and the tensors it was given by argument."""
    given = {n: ours_to_torch(v) for n, v in bound.items() if n != "layout"}
    last = bound.get("layout") == "NHWC"
    call = {n: channels_first(v) if last and n == "input" else v for n, v in given.items()}
    if bound.get("key_value_seq_lengths") is not None:
        call["attn_mask"] = masked_padding(call)
    required = [p.name for p in op.params if p.default is inspect.Parameter.empty]
    defaults = {p.name: p.default for p in op.params}
    named = {
        n: v for n, v in call.items() if n not in required and not (type(v) is type(defaults[n]) and v == defaults[n])
    }
    result = counterpart(op)(*(call[n] for n in required), **named)
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    if last:
        outputs = [o.movedim(1, -1) for o in outputs]
    return outputs, given


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want| over all elements; what is not finite must be equal."""
    assert got.shape == want.shape
    finite = np.isfinite(want)
    assert np.array_equal(got[~finite], want[~finite], equal_nan=True)
    scale = np.linalg.norm(want[finite])
    error = np.linalg.norm(got[finite] - want[finite])
    return float(error / scale) if scale else float(error)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize("dtype", [float32, float64], ids=lambda d: d.name)
@pytest.mark.parametrize(("name", "index", "s"), CASES)
def test_values_and_gradients(name: str, index: int, s: Sample, dtype: Any) -> None:
    op, rng = REGISTRY[name], generator(name, index)
    bound = materialise(op, s, rng, dtype)
    found = [(a, i, t) for a, i, t in tensor_arguments(op, bound) if a in op.differentiable and is_float(t.dtype)]
    for _, _, t in found:
        t.requires_grad_()
    theirs, given = torch_run(op, bound)
    mine = op(**bound)
    mine = list(mine) if isinstance(mine, tuple) else [mine]
    assert len(mine) == len(theirs)
    for got, want in zip(mine, theirs, strict=True):
        expected = want.detach().numpy()
        assert got.dtype == expected.dtype
        if is_float(got.dtype):
            assert relative(got.numpy(), expected) < LIMIT[dtype]
        else:
            assert np.array_equal(got.numpy(), expected)
    for arg in op.mutates:
        if given[arg] is not None:
            assert relative(bound[arg].numpy(), given[arg].numpy()) < LIMIT[dtype]
    pairs = [(m, t) for m, t in zip(mine, theirs, strict=True) if m.requires_grad]
    assert [t.requires_grad for _, t in pairs] == [True] * len(pairs)
    if not pairs or (name, index) in NO_GRADIENT_THERE:
        return
    weights = [rng.standard_normal(m.shape).astype(dtype) for m, _ in pairs]
    mine_g = flame.grad(
        [m for m, _ in pairs], [t for _, _, t in found], [flame.tensor(w) for w in weights], allow_unused=True
    )
    inputs = [given[a] if i is None else given[a][i] for a, i, _ in found]
    theirs_g = torch.autograd.grad(
        [t for _, t in pairs], inputs, [torch.from_numpy(w) for w in weights], allow_unused=True
    )
    for (arg, _, t), m, w in zip(found, mine_g, theirs_g, strict=True):
        got = np.zeros(t.shape) if m is None else m.numpy()
        want = np.zeros(t.shape) if w is None else w.numpy()
        assert relative(got, want) < max(LIMIT[dtype], OWN_LIMIT.get(name, 0.0)), arg


NAMESAKES = {"upsample_nearest"}
"""PyTorch's is a deprecated name of interpolate, with its arguments; ours takes a whole factor alone."""


def test_no_op_escapes() -> None:
    """An op whose name PyTorch knows must say so, or it would go unchecked; and what it says must exist."""
    places = (torch, torch.nn.functional, torch.Tensor)
    silent = {n for n, op in REGISTRY.items() if not op.torch and any(hasattr(p, n) for p in places)}
    assert silent == NAMESAKES
    for name in OPS:
        assert callable(counterpart(REGISTRY[name]))
        assert REGISTRY[name].torch.rpartition(".")[2] in (name, "__getitem__")
    assert {c.values[0] for c in CASES} == set(OPS)


OF_ITS_OWN = {"einsum", "expand", "getitem", "max", "min", "repeat", "sort", "view"}
"""PyTorch spells these `*sizes`, `*operands`, in brackets, or as several functions under one name."""


ATEN = {"logsigmoid": "log_sigmoid"}
"""Where PyTorch's schema has another name."""


def torch_arguments(op: Op) -> list[list[str]]:
    """The names of the counterpart's arguments in order, for each of its overloads."""
    fn = counterpart(op) if op.name != "max_pool2d" else torch.nn.functional._max_pool2d
    try:
        return [list(inspect.signature(fn).parameters)]
    except ValueError:  # built in: the schema knows, and calls `self` what Python calls `input`
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{ATEN.get(op.name, op.name)}")
        return [["input" if a.name == "self" else a.name for a in s.arguments] for s in schemas]


@pytest.mark.parametrize("name", [n for n in OPS if n not in OF_ITS_OWN])
def test_arguments_are_named_and_ordered_alike(name: str) -> None:
    """What may be given by position stands where PyTorch has it; what may only be named has its name, or is ours."""
    op, ours = REGISTRY[name], {"layout", "rng", "stream", "key_value_seq_lengths"}
    positional = [n for n in op.positional if n not in ours]
    named = set(op.names) - set(positional) - ours
    overloads = torch_arguments(op)
    assert any(a[: len(positional)] == positional and named <= set(a) for a in overloads), (
        positional,
        named,
        overloads,
    )


def test_dropout_keeps_its_share_and_scales_the_rest() -> None:
    from flame_train.engine import functional as F
    from flame_train.engine.random import Rng

    x = flame.tensor(np.ones((64, 1000)), requires_grad=True)
    y = F.dropout(x, 0.3, rng=Rng(np, 1, 2, np.arange(64)))
    kept = y.numpy() != 0
    assert abs(kept.mean() - 0.7) < 0.01
    want = torch.nn.functional.dropout(torch.ones(64, 1000, dtype=torch.float64), 0.3).unique()
    assert np.array_equal(np.unique(y.numpy()), want.numpy())
    y.sum().backward()
    assert np.array_equal(x.grad.numpy() != 0, kept)


@pytest.mark.parametrize("factor", [2, 3])
def test_upsample_nearest_is_interpolate(factor: int) -> None:
    from flame_train.engine import functional as F

    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    want = torch.nn.functional.interpolate(torch.from_numpy(x), scale_factor=factor)
    assert np.array_equal(F.upsample_nearest(flame.tensor(x), factor).numpy(), want.numpy())


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
@pytest.mark.parametrize("more", [{}, {"reduction": "sum"}, {"label_smoothing": 0.2, "reduction": "none"}], ids=str)
@pytest.mark.parametrize("target", [[1, 2, -100], [1, 1, -100], [-100, -100, -100]], ids=str)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # a mean over nothing
def test_losses_of_classes_that_cannot_be(name: str, more: dict[str, Any], target: list[int]) -> None:
    """Logits of minus infinity where another class is right, and rows that count nothing, alone and together."""
    from flame_train.engine import functional as F

    if name == "nll_loss" and "label_smoothing" in more:
        return
    logits = np.array([[-np.inf, 1.0, 2.0], [-np.inf, 0.5, 0.1], [-np.inf, -np.inf, 0.0]])
    x, tx = flame.tensor(logits, requires_grad=True), torch.tensor(logits, requires_grad=True)
    mine = getattr(F, name)(x, flame.tensor(np.array(target)), **more)
    theirs = getattr(torch.nn.functional, name)(tx, torch.tensor(target), **more)
    np.testing.assert_allclose(mine.numpy(), theirs.detach().numpy())
    mine.backward(flame.tensor(np.ones(mine.shape)))
    theirs.backward(torch.ones_like(theirs))
    np.testing.assert_allclose(x.grad.numpy(), tx.grad.numpy())


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["var", "std"])
def test_slope_of_the_variance_of_one_number(name: str) -> None:
    from flame_train.engine import functional as F

    x, tx = flame.tensor([[1.0, 2.0]], requires_grad=True), torch.tensor([[1.0, 2.0]], requires_grad=True)
    getattr(F, name)(x, 0).sum().backward()
    getattr(torch, name)(tx, 0).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), tx.grad.numpy())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("row", [[np.inf, 1.0], [-np.inf, 1.0], [np.inf, -np.inf, 0.0]], ids=str)
def test_logsumexp_of_what_is_infinite(row: list[float]) -> None:
    from flame_train.engine import functional as F

    x, tx = flame.tensor(row, requires_grad=True), torch.tensor(row, requires_grad=True)
    y, ty = F.logsumexp(x, 0), tx.logsumexp(0)
    y.backward()
    ty.backward()
    np.testing.assert_array_equal(y.numpy(), ty.detach().numpy())
    np.testing.assert_array_equal(x.grad.numpy(), tx.grad.numpy())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("base", [-2.0, 0.0, 3.0])
def test_a_number_to_the_power_of_a_tensor(base: float) -> None:
    from flame_train.engine import functional as F

    x, tx = flame.tensor([2.0, 3.0], requires_grad=True), torch.tensor([2.0, 3.0], requires_grad=True)
    F.pow(base, x).sum().backward()
    torch.pow(base, tx).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), tx.grad.numpy(), rtol=1e-6)


TAILS: dict[str, tuple[Any, Any]] = {
    "sigmoid": (lambda F, x: F.sigmoid(x), torch.sigmoid),
    "silu": (lambda F, x: F.silu(x), torch.nn.functional.silu),
    "quick_gelu": (lambda F, x: F.quick_gelu(x), lambda x: x * torch.sigmoid(1.702 * x)),
    "swiglu": (lambda F, x: F.swiglu(F.cat([x, x], -1)), lambda x: x * torch.nn.functional.silu(x)),
    "softplus": (lambda F, x: F.softplus(x), torch.nn.functional.softplus),
    "mish": (lambda F, x: F.mish(x), torch.nn.functional.mish),
    "binary_cross_entropy_with_logits": (
        lambda F, x: F.binary_cross_entropy_with_logits(x, x * 0.0, reduction="none"),
        lambda x: torch.nn.functional.binary_cross_entropy_with_logits(x, x * 0.0, reduction="none"),
    ),
}


@pytest.mark.parametrize("dtype", [float32, float64], ids=lambda d: d.name)
@pytest.mark.parametrize("name", list(TAILS))
def test_logistic_functions_keep_their_digits_where_they_vanish(name: str, dtype: Any) -> None:
    """Each value by itself: a norm over all would not see what is small."""
    from flame_train.engine import functional as F

    mine, theirs = TAILS[name]
    numbers = np.linspace(-50.0, 50.0, 401).astype(dtype)
    x, tx = flame.tensor(numbers, requires_grad=True), torch.tensor(numbers, requires_grad=True)
    y, ty = mine(F, x), theirs(tx)
    limit = 2e-5 if dtype == float32 else 1e-12  # an exponent of 50 has two digits less to spare
    np.testing.assert_allclose(y.numpy(), ty.detach().numpy(), rtol=limit)
    y.sum().backward()
    ty.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), tx.grad.numpy(), rtol=limit, atol=1e-300)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("factor", [0.7, 1.0, 1.1, 2.0, 2.3, 2.9])
@pytest.mark.parametrize("shape", [(1, 2, 8), (1, 2, 3, 4), (1, 1, 2, 3, 4)], ids=str)
def test_nearest_pixels_by_odd_factors(shape: tuple[int, ...], factor: float, mode: str) -> None:
    """Values alone: PyTorch's gradient of these goes to other pixels than its result comes from."""
    from flame_train.engine import functional as F

    x = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    want = torch.nn.functional.interpolate(torch.from_numpy(x), scale_factor=factor, mode=mode)
    assert np.array_equal(F.interpolate(flame.tensor(x), None, factor, mode).numpy(), want.numpy())


def test_embedding_padding_row_gets_no_gradient() -> None:
    from flame_train.engine import functional as F

    index, table = np.array([[1, 0, 3], [3, 3, 2]]), np.random.default_rng(0).standard_normal((4, 2))
    w, tw = flame.tensor(table, requires_grad=True), torch.tensor(table, requires_grad=True)
    F.embedding(flame.tensor(index), w, -1).square().sum().backward()
    torch.nn.functional.embedding(torch.from_numpy(index), tw, -1).square().sum().backward()
    np.testing.assert_allclose(w.grad.numpy(), tw.grad.numpy())
