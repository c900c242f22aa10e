"""Tensor's operators and methods are the ops; writing in place; what a tensor says of itself."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.op import REGISTRY
from flame_train.engine.tensors.methods import Methods

RNG = np.random.default_rng(0)
X = flame.tensor(RNG.uniform(0.3, 2.0, (3, 4)))
Y = flame.tensor(RNG.uniform(0.3, 2.0, (3, 4)))
SQUARE = flame.tensor(RNG.standard_normal((2, 3, 3)))
VECTOR = flame.tensor(RNG.standard_normal(4))
MASK = flame.tensor(RNG.random((3, 4)) < 0.5)
INDEX = flame.tensor(RNG.integers(0, 3, (2, 4)))

# What a method is called with where one tensor alone will not do: (the tensor, the arguments).
CALLS: dict[str, tuple[flame.Tensor, tuple[Any, ...]]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "pow", "maximum", "minimum"), (X, (Y,))),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), (X, (Y,))),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), (MASK, (MASK,))),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "logsumexp", "unsqueeze"), (X, (1,))),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "prod", "max", "min", "argmax", "argmin"), (X, (0, True))),
    "lerp": (X, (Y, 0.3)),
    "clamp": (X, (0.5, 1.0)),
    "masked_fill": (X, (MASK, 0.0)),
    "norm": (X, (1, 0, True)),
    "permute": (X, ((1, 0),)),
    "transpose": (X, (0, 1)),
    "movedim": (X, (0, 1)),
    "narrow": (X, (1, 1, 2)),
    "split": (X, (2, 1)),
    "chunk": (X, (2, 1)),
    "flip": (X, ((0, 1),)),
    "roll": (X, (1, 0)),
    "reshape": (X, ((4, 3),)),
    "view": (X, ((2, 6),)),
    "expand": (X, ((2, 3, 4),)),
    "repeat": (X, ((2, 1),)),
    "gather": (X, (0, INDEX)),
    "scatter": (X, (0, INDEX, 0.0)),
    "scatter_add": (X, (0, INDEX, X)),
    "index_select": (X, (0, INDEX[0])),
    "take_along_dim": (X, (INDEX, 0)),
    "topk": (X, (2,)),
    "repeat_interleave": (X, (2, 1)),
    "addcmul": (X, (Y, Y)),
    "addcdiv": (X, (Y, Y + 3.0)),
    "matmul": (X, (X.T,)),
    "bmm": (SQUARE, (SQUARE,)),
    "outer": (VECTOR, (VECTOR,)),
}
METHODS = sorted(n for n, f in vars(Methods).items() if inspect.isfunction(f) and not n.startswith("_"))


def values(result: Any) -> list[np.ndarray]:
    return [t.numpy() for t in (result if isinstance(result, tuple) else (result,))]


@pytest.mark.parametrize("name", [n for n in METHODS if n != "where"])
def test_a_method_is_the_op_of_its_name(name: str) -> None:
    assert name in REGISTRY
    t, args = CALLS.get(name, (X, ()))
    for got, want in zip(values(getattr(t, name)(*args)), values(getattr(F, name)(t, *args)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_arguments_are_the_ops(name: str) -> None:
    """Names, order, defaults, and what is given by name only; a shape may be spread out instead."""
    mine = list(inspect.signature(getattr(Methods, name)).parameters.values())[1:]
    if any(p.kind is p.VAR_POSITIONAL for p in mine):
        return
    if mine[-1:] and mine[-1].kind is mine[-1].VAR_KEYWORD:  # NumPy's names of these
        mine.pop()
    op = REGISTRY[name]
    theirs = [p for p in op.params if p.name not in ("input", "tensor")]
    spelled = {"split_size": "split_size_or_sections"}
    assert [spelled.get(p.name, p.name) for p in mine] == [p.name for p in theirs]
    assert [p.default for p in mine] == [p.default for p in theirs]
    assert [p.kind is p.KEYWORD_ONLY for p in mine] == [p.named for p in theirs]


def test_operators() -> None:
    x, y = X.numpy(), Y.numpy()
    pairs = [
        (X + Y, x + y),
        (1 + X, 1 + x),
        (X - Y, x - y),
        (1 - X, 1 - x),
        (X * Y, x * y),
        (2 * X, 2 * x),
        (X / Y, x / y),
        (1 / X, 1 / x),
        (X // Y, x // y),
        (X**2, x**2),
        (2**X, 2**x),
        (X**Y, x**y),
        (-X, -x),
        (abs(-X), x),
        (X @ X.T, x @ x.T),
        (X < Y, x < y),
        (X <= Y, x <= y),
        (X > Y, x > y),
        (X >= Y, x >= y),
        (X == Y, x == y),
        (X != Y, x != y),
        ((X < 1) & (Y < 1), (x < 1) & (y < 1)),
        ((X < 1) | (Y < 1), (x < 1) | (y < 1)),
        ((X < 1) ^ (Y < 1), (x < 1) ^ (y < 1)),
        (~(X < 1), ~(x < 1)),
        (X[1:, ::2], x[1:, ::2]),
        (X[X > 1], x[x > 1]),
        (SQUARE.mT, SQUARE.numpy().swapaxes(1, 2)),
        (X.where(MASK, 0.0), np.where(MASK.numpy(), x, 0.0)),
    ]
    for got, want in pairs:
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-14)


def test_comparing_with_something_else_is_plain_python() -> None:
    assert (X == None) is False  # noqa: E711
    assert X != "x"
    assert len({X, X, Y}) == 2
    with pytest.raises(TypeError, match="for boolean tensors here"):
        X & Y


def test_writing_in_place_keeps_the_memory() -> None:
    t = flame.tensor(np.arange(4, dtype=np.float32))
    memory = t.data
    t.add_(1.0, alpha=2.0).mul_(3.0).sub_(1.0).div_(2.0).clamp_(max=6.0)
    np.testing.assert_allclose(t.numpy(), [2.5, 4.0, 5.5, 6.0])
    t[1] = 0.0
    t[flame.tensor(np.array([True, False, False, True]))] = flame.tensor([7.0, 8.0])
    np.testing.assert_allclose(t.numpy(), [7.0, 0.0, 5.5, 8.0])
    assert t.copy_(flame.tensor(np.ones(4))).fill_(2.0).zero_() is t
    assert t.data is memory
    assert not t.numpy().any()


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        ((0, slice(None), [0, 2]), (3, 2)),
        ((slice(None), 1, [3, 3, 0]), (2, 3)),
        ((1, ..., [0]), (3, 1)),
        (([0, 1], slice(None), 2), (2, 3)),
        ((1, 2, flame.tensor([True, False, False, True])), (2,)),
    ],
)
def test_what_is_written_in_brackets_is_read_there(index: Any, shape: tuple[int, ...]) -> None:
    """A whole number takes its dim away before arrays of them are looked at, which NumPy does not do."""
    t = flame.tensor(np.zeros((2, 3, 4)))
    value = np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape)
    t[index] = flame.tensor(value)
    assert t[index].shape == shape
    assert set(t.numpy().ravel()) <= {0.0, *value.ravel()}
    want = np.array([t.numpy()[at] for at in places(index, t.numpy())]).reshape(shape)
    np.testing.assert_array_equal(t[index].numpy(), want)


def places(index: Any, x: np.ndarray) -> list[tuple[int, ...]]:
    """The elements that an index of one array names, written out dim by dim."""
    dims = [p for p in index if p is not ...]
    if ... in index:
        at = index.index(...)
        dims[at:at] = [slice(None)] * (x.ndim - len(dims))
    lists = []
    for p, n in zip(dims, x.shape, strict=True):
        p = np.flatnonzero(p.numpy()) if isinstance(p, flame.Tensor) else p
        lists.append([p] if isinstance(p, int) else list(range(n))[p] if isinstance(p, slice) else [int(i) for i in p])
    return list(itertools.product(*lists))


def test_gradients_are_edited_in_place() -> None:
    w = flame.tensor(np.ones(3), requires_grad=True)
    (w * flame.tensor(np.array([1.0, 2.0, 3.0]))).sum().backward()
    w.grad.mul_(2.0)
    w.grad[0] = 0.0
    np.testing.assert_array_equal(w.grad.numpy(), [0, 4, 6])
    w.grad = flame.tensor(np.zeros(3))
    with pytest.raises(ValueError, match=r"expected shape \(3,\), got \(2,\)"):
        w.grad = flame.tensor(np.zeros(2))


def test_writing_refuses_where_a_graph_is_recorded() -> None:
    w = flame.tensor(np.ones(3), requires_grad=True)
    for write in (lambda: w.zero_(), lambda: w.add_(1.0), lambda: w.__setitem__(0, 1.0), lambda: (w * 2).zero_()):
        with pytest.raises(RuntimeError, match=r"use no_grad\(\), or detach\(\)"):
            write()
    with flame.no_grad():
        w.sub_(0.5)
    np.testing.assert_array_equal(w.numpy(), np.full(3, 0.5))
    with pytest.raises(TypeError, match="read-only"):
        flame.Frozen(np.ones(3)).zero_()


def test_freezing_and_thawing() -> None:
    w, x = flame.tensor(np.ones(3), requires_grad=True), flame.tensor(np.ones(3), requires_grad=True)
    w.requires_grad = False
    (w * x).sum().backward()
    assert w.grad is None
    with pytest.raises(RuntimeError, match="does not require grad"):
        w.register_hook(lambda g: g)
    with pytest.raises(RuntimeError, match="leaves only"):
        (x * 2).requires_grad_(False)
    w.requires_grad_()
    (w * x).sum().backward()
    np.testing.assert_array_equal(w.grad.numpy(), np.ones(3))
    assert not (w * x).detach().requires_grad


def test_what_a_tensor_says_of_itself() -> None:
    t = flame.tensor([[1, 2, 3]], requires_grad=False)
    assert (t.numel(), t.dim(), len(t), t.ndim, t.size) == (3, 2, 1, 2, 3)
    assert repr(t) == "Tensor([[1, 2, 3]], dtype=int64, device='cpu')"
    assert "requires_grad=True" in repr(flame.tensor([1.0], requires_grad=True))
    assert (int(t[0, 1]), float(t[0, 2]), bool(t[0, 0]), t.tolist()) == (2, 3.0, True, [[1, 2, 3]])
    with pytest.raises(ValueError, match="expected one element"):
        t.item()
    with pytest.raises(TypeError, match="only floating tensors can require grad"):
        t.requires_grad_()
    with pytest.raises(TypeError, match="only floating tensors can require grad"):
        flame.tensor([1], requires_grad=True)
    assert [row.tolist() for row in flame.tensor([[1.0], [2.0]])] == [[1.0], [2.0]]


@pytest.mark.parametrize("data", [None, "abc", 1j, [flame.tensor(1.0), flame.tensor(2.0)], [1, None]], ids=str)
def test_only_numbers_make_a_tensor(data: Any) -> None:
    with pytest.raises(TypeError, match="tensor: expected numbers, got"):
        flame.tensor(data)


def test_what_numpy_does_not_know_is_not_taken_by_dlpack() -> None:
    class Foreign:
        def __dlpack__(self, **kwargs: Any) -> Any:
            raise BufferError("of another device")

        def __dlpack_device__(self) -> Any:
            return (1, 0)

    with pytest.raises(TypeError, match="NumPy cannot take this Foreign: of another device; give it float32"):
        flame.tensor(Foreign())


def test_a_tensor_makes_a_tensor_of_its_own() -> None:
    x = flame.tensor([1.0, 2.5], "bfloat16")
    y = flame.tensor(x)
    assert (y.dtype, y.tolist()) == (x.dtype, [1.0, 2.5])
    assert not np.shares_memory(y.data, x.data)


def test_a_number_has_no_length() -> None:
    with pytest.raises(TypeError, match="len"):
        len(flame.tensor(1.0))


def test_what_is_reversed_lies_elsewhere() -> None:
    x = flame.tensor([1.0, 2.0, 3.0])
    y = x.flip((0,))
    y[0] = 9.0
    assert (x.tolist(), y.tolist()) == ([1.0, 2.0, 3.0], [9.0, 2.0, 1.0])


def test_an_image_pooled_to_nothing() -> None:
    x = flame.tensor(np.ones((2, 3, 4, 5)), requires_grad=True)
    y = F.adaptive_avg_pool2d(x, 0)
    assert y.shape == (2, 3, 0, 0)
    y.sum().backward()
    assert not x.grad.numpy().any()


def test_running_statistics_do_not_move_for_no_images() -> None:
    mean, var = flame.tensor([1.0, 2.0]), flame.tensor([3.0, 4.0])
    assert F.instance_norm(flame.tensor(np.zeros((0, 2, 4))), mean, var).shape == (0, 2, 4)
    assert (mean.tolist(), var.tolist()) == ([1.0, 2.0], [3.0, 4.0])


def test_fractions_of_whole_numbers_are_fp32() -> None:
    t = flame.tensor([1, 2, 4])
    for made in (t.exp(), t / 2, t.float().mean(), F.div(t, t)):
        assert made.dtype == np.float32
    assert (t * 2).dtype == np.int64
    assert (t // 2).dtype == np.int64


def test_what_whole_numbers_stay_whole_in() -> None:
    t = flame.tensor(np.array([[3, 200], [100, 7]], np.uint8))
    assert [m.dtype for m in (t.sum(), t.prod(0), t.cumsum(1))] == [np.int64] * 3
    assert int(t.sum()) == 310
    assert [m.dtype for m in (F.relu(t), t.tril(), t.masked_fill(t > 5, 2), t.amax())] == [np.uint8] * 4
    assert (t > 5).triu().dtype == np.bool_
    np.testing.assert_array_equal(F.div(flame.tensor([-7, 7]), 2, rounding_mode="trunc").numpy(), [-3, 3])
    assert F.div(flame.tensor([7]), flame.tensor([2.5]), rounding_mode="trunc").dtype == np.float32
    for write in (lambda: t.add_(1.5), lambda: t.div_(2), lambda: t.mul_(flame.tensor(0.5))):
        with pytest.raises(TypeError, match="which a tensor of uint8 cannot hold"):
            write()


def test_dtypes_that_meet_give_the_wider() -> None:
    half, brain, single = (flame.tensor([1.5], d) for d in ("float16", "bfloat16", "float32"))
    assert [(half + brain).dtype, F.cat([half, brain]).dtype, F.matmul(half, brain).dtype] == [np.float32] * 3
    assert [(half * single).dtype, F.stack([brain, single]).dtype] == [np.float32] * 2
    whole = flame.tensor([300])
    assert F.cat([single, whole]).dtype == np.float32
    assert F.stack([brain, whole]).dtype == brain.dtype
    np.testing.assert_array_equal(F.cat([half, brain, whole]).numpy(), [1.5, 1.5, 300.0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_number_is_compared_as_the_tensor_would_hold_it(dtype: str) -> None:
    t = flame.tensor([0.1, 0.7, -0.3], dtype, requires_grad=True)
    held = [0.1, 0.7, -0.3]
    for i, x in enumerate(held):
        assert [bool((t == x)[i]), bool((t >= x)[i]), bool((t <= x)[i])] == [True] * 3
        assert not any((bool((t != x)[i]), bool((t < x)[i]), bool((t > x)[i])))
        t.grad = None
        (F.clamp(t, max=x) + F.clamp(t, min=x)).sum().backward()
        np.testing.assert_array_equal(t.grad.numpy()[i], 2.0)  # bounds lie inside both times


def test_a_number_does_not_widen_the_result() -> None:
    t = flame.tensor([1.0], "float32")
    assert [(t * 2.5).dtype, (t * np.float64(2.5)).dtype] == [np.float32, np.float32]  # which is a float as well


def test_a_base_weight_has_no_gradient_and_takes_none() -> None:
    weight = flame.Frozen(np.ones((2, 3), np.float32))
    for act in (lambda: weight.grad, lambda: setattr(weight, "grad", None)):
        with pytest.raises(AttributeError, match="a Frozen tensor has no gradient"):
            act()
    with pytest.raises(TypeError, match="trainable weights are Parameters"):
        weight.requires_grad_()
    assert weight.requires_grad_(False) is weight


def test_it_is_handed_to_other_libraries_without_a_copy() -> None:
    x = flame.tensor(np.arange(6.0).reshape(2, 3))
    there = np.from_dlpack(x)
    assert np.shares_memory(there, x.data)
    np.testing.assert_array_equal(there, x.numpy())
    turned = x.transpose(0, 1)
    assert not turned.data.flags.c_contiguous
    assert turned.contiguous().data.flags.c_contiguous
    assert x.contiguous() is x
    assert x.to("cpu") is x
