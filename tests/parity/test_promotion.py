"""Which dtype comes out where dtypes meet: PyTorch's categories, in which a 0-d tensor widens no other of its kind."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.dtype import is_float

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
SHAPES = [((3,), ()), ((), (3,)), ((3,), (3,)), ((), ())]
OPS = ("add", "sub", "mul", "div", "maximum", "minimum", "pow", "where", "eq", "lt")


def pair(shape: tuple[int, ...], dtype: str, value: float) -> tuple[flame.Tensor, Any]:
    values = np.full(shape, value)
    return flame.tensor(values, dtype), torch.tensor(values).to(getattr(torch, dtype))


def run(space: Any, op: str, a: Any, b: Any, mask: Any) -> Any:
    return space.where(mask, a, b) if op == "where" else getattr(space, op)(a, b)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_the_dtype_is_pytorchs(op: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    mask = np.array([True, False, True])
    wrong = []
    for one, two in itertools.product(DTYPES, DTYPES):
        if "bool" in (one, two) and (op == "sub" or (op == "pow" and one == two)):
            continue  # which PyTorch refuses
        (a, ta), (b, tb) = pair(shapes[0], one, 3.25), pair(shapes[1], two, 2.0)
        ours, theirs = run(F, op, a, b, flame.tensor(mask)), run(torch, op, ta, tb, torch.tensor(mask))
        if str(theirs.dtype).removeprefix("torch.") != ours.dtype.name:
            wrong.append((one, two, ours.dtype.name, theirs.dtype))
        limit = 1e-2 if {one, two} & {"bfloat16", "float16"} and is_float(ours.dtype) else 1e-6
        np.testing.assert_allclose(ours.numpy().astype(np.float64), theirs.double().numpy(), rtol=limit)
    assert not wrong


def test_gradients_keep_the_dtype_of_what_they_are_for() -> None:
    scale, x = flame.tensor(0.5, requires_grad=True), flame.tensor([1.0, 2.0], "bfloat16", requires_grad=True)
    ts, tx = torch.tensor(0.5, requires_grad=True), torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    (x * scale).sum().backward()
    (tx * ts).sum().backward()
    assert scale.grad is not None
    assert x.grad is not None
    assert (scale.grad.dtype, x.grad.dtype) == (scale.dtype, x.dtype)
    assert (scale.grad.tolist(), x.grad.tolist()) == (ts.grad.tolist(), tx.grad.tolist())


def test_a_number_is_compared_as_the_wider_tensor_would_hold_it() -> None:
    x, point = flame.tensor([0.1, 0.7], "bfloat16"), flame.tensor(0.1)
    assert (x == point).tolist() == (torch.tensor([0.1, 0.7], dtype=torch.bfloat16) == torch.tensor(0.1)).tolist()


@pytest.mark.parametrize("op", ["square", "sign"])
def test_truth_values_become_what_pytorch_makes_of_them(op: str) -> None:
    values = np.array([True, False])
    theirs = getattr(torch, op)(torch.tensor(values))
    ours = getattr(F, op)(flame.tensor(values))
    assert (ours.dtype.name, ours.tolist()) == (str(theirs.dtype).removeprefix("torch."), theirs.tolist())


@pytest.mark.parametrize("other", [2, 2.0, 0])
def test_powers_of_truth_values_are_no_bytes(other: float) -> None:
    ours, theirs = flame.tensor([True, False]), torch.tensor([True, False])
    for mine, want in ((ours**other, theirs**other), (other**ours, other**theirs)):
        assert (mine.dtype.name, mine.tolist()) == (str(want.dtype).removeprefix("torch."), want.tolist())
