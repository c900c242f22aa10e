"""What is often got wrong is told in words: what was expected, what came. Nothing of NumPy's or Python's insides."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn, optim
from flame_train.engine.gradcheck import generator
from flame_train.engine.op import REGISTRY
from flame_train.engine.op_samples import materialise
from flame_train.engine.random import Rng
from flame_train.errors import ShapeError


def leaf() -> flame.Tensor:
    return flame.tensor([1.0, 2.0, 3.0], requires_grad=True)


def with_hook(returned: Any) -> None:
    x = leaf()
    x.register_hook(lambda g: returned)
    (x * 2.0).sum().backward()


def checkpointed(returned: Any) -> Callable[[], Any]:
    return lambda: flame.checkpoint(lambda x: returned, leaf())


def replaced_by_a_tensor() -> None:
    x = leaf()
    x.data = flame.tensor([1.0])
    x + 1.0


def assigned(name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(leaf(), name, value)


def drawn() -> nn.Linear:
    layer = nn.Linear(2, 3)
    layer.init(np.random.default_rng(0))
    return layer


def chain(arena: Any, transforms: Any) -> optim.Optimizer:
    return optim.Optimizer(arena, transforms, lr=1e-3)


def another_librarys(*shape: int) -> Any:
    """A tensor as PyTorch has them: called Tensor, with detach(), data and a dtype of its own, read by NumPy."""

    class Tensor:
        dtype, requires_grad, shape = object(), False, ()
        __module__ = "torch"

        def detach(self) -> Tensor:
            return self

        data = property(detach)

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return np.zeros(shape, dtype or np.int64)

    return Tensor()


def attended(**arguments: Any) -> flame.Tensor:
    return F.scaled_dot_product_attention(*[IMAGES] * 3, None, 0.5, **arguments)


ONE = flame.tensor(1.0)
IMAGES = flame.tensor(np.ones((2, 4, 3, 3), np.float32))
MISTAKES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: (leaf() * 2.0).backward(np.ones(3)), TypeError, "backward: expected a Tensor or None .*, got ndarray"),
    (lambda: flame.backward([3.0]), TypeError, "expected Tensors as outputs, got float"),
    (lambda: flame.grad(leaf().sum(), [3]), TypeError, "grad: expected Tensors as inputs, got int"),
    (lambda: flame.grad([leaf().sum()] * 2, leaf(), [ONE]), ValueError, "got 1 for 2"),
    (lambda: flame.grad([leaf().sum()], leaf(), [ONE, ONE]), ValueError, "got 2 for 1"),
    (assigned("grad", np.ones(3)), TypeError, "grad: expected a Tensor or None, got ndarray"),
    (assigned("grad", 5), TypeError, "grad: expected a Tensor or None, got int"),
    (lambda: with_hook(np.ones(3)), TypeError, "a hook: .* got ndarray"),
    (lambda: with_hook(2.0), TypeError, "a hook: .* got float"),
    (lambda: leaf() + None, TypeError, "add: expected a Tensor or a number for 'other', got None"),
    (lambda: leaf() < None, TypeError, "lt: expected a Tensor or a number for 'other', got None"),
    (lambda: leaf() @ 3, TypeError, "matmul: expected a Tensor for 'other', got int"),
    (lambda: F.pow(2, 3), TypeError, "pow: expected at least one Tensor"),
    (lambda: F.exp(3), TypeError, "exp: expected a Tensor for 'input', got int"),
    (lambda: F.linear(leaf(), None), TypeError, "linear: expected a Tensor for 'weight', got None"),
    (lambda: F.cat(leaf()), TypeError, "cat: expected a list or tuple of Tensors for 'tensors', got Tensor"),
    (lambda: F.stack(3), TypeError, "stack: expected a list or tuple of Tensors for 'tensors', got int"),
    (replaced_by_a_tensor, TypeError, r"a tensor's data is an array, this is a Tensor; engine\.tensor\(\)"),
    (lambda: flame.Tensor([1.0, 2.0]), TypeError, r"this is a list; engine\.tensor\(\) makes tensors"),
    (lambda: leaf().to("cuda:one"), ValueError, "expected 'cpu', 'cuda' or a GPU by its number, .* got 'cuda:one'"),
    (
        lambda: flame.set_default_device("tpu"),
        ValueError,
        "expected 'cpu', 'cuda' or a GPU by its number, .* got 'tpu'",
    ),
    (lambda: flame.arange(0, math.inf), ValueError, "arange: expected finite numbers, got 0, inf and step 1"),
    (lambda: flame.arange(0, 1, math.nan), ValueError, "arange: expected finite numbers, got 0, 1 and step nan"),
    (lambda: flame.explain("relu", leaf()), TypeError, "explain: expected an op, .* got str"),
    (lambda: flame.explain_gradients(3, leaf()), TypeError, "explain: expected an op, .* got int"),
    (lambda: list(ONE), TypeError, "iteration over a 0-d tensor"),
    (lambda: leaf().var(False), TypeError, "var: expected a whole number for the dim, got False"),
    (lambda: leaf()[flame.tensor(np.ones(3, np.uint8))], ShapeError, "uint8 .* bool .* int64"),
    (lambda: flame.tensor(None), TypeError, "expected numbers, got NoneType$"),
    (lambda: flame.tensor("abc"), TypeError, "expected numbers, got str$"),
    (lambda: flame.tensor([leaf(), leaf()]), TypeError, "functional.stack puts tensors together"),
    (checkpointed([leaf()]), TypeError, "checkpoint: .* a Tensor or a tuple of them, got list alone"),
    (checkpointed({"a": leaf()}), TypeError, "checkpoint: .* got dict alone"),
    (checkpointed(None), TypeError, "checkpoint: .* got NoneType alone"),
    (checkpointed((leaf(), 3)), TypeError, "checkpoint: .* got int in a tuple"),
    (lambda: leaf().register_hook(3), TypeError, "hook: expected a function of the gradient, got 3"),
    (lambda: flame.tensor([[1], [1, 2]]), ValueError, "tensor: expected nested lists of equal lengths"),
    (lambda: optim.AdamW([leaf()], lr="1e-4"), TypeError, "expected a number for lr, got '1e-4'"),
    (lambda: optim.SGD([leaf()], lr=None), TypeError, "expected a number for lr, got None"),
    (lambda: optim.AdamW([leaf()], betas=0.9), TypeError, "expected two betas, got 0.9"),
    (lambda: optim.AdamW(drawn().parameters()), ValueError, r"at least one parameter, got none; .* requires_grad_\(\)"),
    (lambda: optim.AdamW(leaf()), TypeError, "expected parameters in a list, got a single Tensor"),
    (lambda: optim.FlatParameters(leaf()), TypeError, "expected parameters in a list, got a single Tensor"),
    (
        lambda: chain([leaf()], [optim.SGDRule()]),
        TypeError,
        r"expected FlatParameters, got list; make them by optim.FlatParameters\(",
    ),
    (lambda: chain(optim.FlatParameters([leaf()]), optim.SGDRule()), TypeError, "transforms in a list, got SGDRule"),
    (lambda: optim.SGD([leaf()]).step(lambda: ONE), TypeError, "expected the loss, a Tensor, or nothing, got function"),
    (lambda: optim.Schedule("linear", 10, warmup=-3), ValueError, "expected warmup of at least 0 .*, got -3"),
    (lambda: optim.Schedule("cosine_restarts", 10, cycles=0), ValueError, "expected cycles of at least 1 .*, got 0"),
    (lambda: optim.Schedule("linear", 10, min_lr=math.nan), ValueError, "expected min_lr of at least 0 .*, got nan"),
    (lambda: optim.clip_grad_norm_(leaf(), -1.0), ValueError, "expected max_norm of at least 0, got -1"),
    (lambda: optim.clip_grad_norm_(leaf(), math.nan), ValueError, "expected max_norm of at least 0, got nan"),
    (
        lambda: optim.clip_grad_norm_(leaf(), 1.0, "l2"),
        ValueError,
        """norm_type: expected a number or "inf", got 'l2'""",
    ),
    (lambda: optim.clip_each_grad_norm_(leaf(), -1.0), ValueError, "expected max_norm of at least 0, got -1"),
    (lambda: optim.clip_grad_value_(leaf(), -1.0), ValueError, "expected clip_value of at least 0, got -1"),
    (lambda: optim.add_noise_(leaf(), -1.0, seed=0), ValueError, "expected std of at least 0 .*, got -1"),
    (lambda: optim.normalize(leaf(), math.nan), ValueError, "expected norm of at least 0 .*, got nan"),
    (lambda: F.exp(another_librarys()), TypeError, r"a Tensor for 'input', got torch\.Tensor; wrap it"),
    (lambda: leaf() + another_librarys(), TypeError, r"a number for 'other', got torch\.Tensor; wrap it"),
    (lambda: leaf().copy_(another_librarys()), TypeError, r"copy_: expected a Tensor, got torch\.Tensor"),
    (assigned("grad", another_librarys()), TypeError, r"grad: expected a Tensor or None, got torch\.Tensor"),
    (lambda: with_hook(another_librarys()), TypeError, r"a hook: .* got torch\.Tensor"),
    (lambda: (leaf() * 2.0).backward(another_librarys()), TypeError, r"a Tensor or None .*, got torch\.Tensor"),
    (lambda: flame.backward([another_librarys()]), TypeError, r"Tensors as outputs, got torch\.Tensor"),
    (checkpointed(another_librarys()), TypeError, r"checkpoint: .* got torch\.Tensor alone"),
    (lambda: optim.AdamW([another_librarys()]), TypeError, r"parameter '0': expected a Tensor, got torch\.Tensor"),
    (lambda: nn.param((3, 4)), TypeError, r"param: expected ints .* param\(3, 4\), got \(3, 4\)"),
    (lambda: nn.param(3.0), TypeError, r"param: expected ints .*, got 3\.0"),
    (lambda: nn.param(3, -1), ValueError, "weight: expected sizes of at least 0, got -1"),
    (lambda: nn.param(3, init="xavier"), ValueError, "expected init to be one of fan_in, .*, got 'xavier'"),
    (lambda: nn.Linear(2, 3).init(0), TypeError, "init: expected a generator, .*, got int"),
    (lambda: nn.load(drawn(), {}, dtype="float32", device="cpu", what="net"), TypeError, "shapes and read.*, got dict"),
    (lambda: Rng(np, 0, 0, [0, 1]), TypeError, "Rng: expected samples as an array of whole numbers, got list"),
    (lambda: Rng(np, 0, 0, 2), TypeError, "Rng: expected samples as an array of whole numbers, got int"),
    (lambda: Rng(np, 0, 0, leaf()), TypeError, "Rng: expected samples as an array of whole numbers, got Tensor"),
    (lambda: Rng(np, 0, 0, np.ones(2)), TypeError, "Rng: expected samples .* whole numbers, got one of float64"),
    (lambda: F.dropout(leaf(), rng=np.random.default_rng(0)), TypeError, "dropout: training needs .*, got Generator"),
    (lambda: attended(rng=np.random.default_rng(0)), TypeError, "dropout_p needs .*, got Generator"),
    (lambda: F.group_norm(IMAGES, 2, leaf()), ShapeError, r"group_norm: weight: expected 4 values, .*, got \(3,\)"),
    (lambda: F.batch_norm(IMAGES, None, None, leaf(), None, True), ShapeError, "batch_norm: weight: expected 4 values"),
    (lambda: F.batch_norm(IMAGES, leaf(), leaf()), ShapeError, "batch_norm: running_mean: expected 4 values"),
    (lambda: F.batch_norm(IMAGES, leaf(), None, training=True), ShapeError, "batch_norm: running_mean: expected 4"),
    (lambda: F.einsum("i->ij", leaf()), ShapeError, "einsum: the result in 'i->ij' names 'j' twice, or no operand"),
    (lambda: F.einsum("i->ii", leaf()), ShapeError, "einsum: the result in 'i->ii' names 'i' twice, or no operand"),
    (lambda: nn.Linear(-1, 3), ValueError, "Linear: expected in_features of at least 0, got -1"),
]


@pytest.mark.parametrize(("mistake", "error", "match"), MISTAKES)
def test_a_mistake_is_told_in_words(mistake: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        mistake()


ALONG = {n for n, op in REGISTRY.items() if {"dim", "dim0"} & set(op.names)} - {"timestep_embedding"}  # there a size


@pytest.mark.parametrize("name", sorted(ALONG))
def test_true_is_no_dim(name: str) -> None:
    """Python counts it as 1."""
    op = REGISTRY[name]
    values = materialise(op, next(op.iter_samples()), generator(name, 0))
    values["dim" if "dim" in op.names else "dim0"] = True
    with pytest.raises(TypeError, match="whole number"):
        op._run(values)


def test_indices_and_values_of_another_library_are_read_as_arrays() -> None:
    x = flame.tensor([1.0, 2.0, 3.0])
    assert x[another_librarys(2)].tolist() == [1.0, 1.0]
    x[1:] = another_librarys(2)
    assert x.tolist() == [1.0, 0.0, 0.0]


def test_numbers_of_numpy_are_numbers() -> None:
    x = flame.tensor([1.0, 2.0], "bfloat16")
    for number in (np.float32(2), np.float64(2), np.int64(2)):
        for made in (x * number, number * x, x + number, number - x, x / number):
            assert made.dtype == x.dtype
        np.testing.assert_array_equal((number * x).tolist(), [2.0, 4.0])
    assert (x < np.float32(1.5)).tolist() == [True, False]
    assert x.reshape(1, 2).sum(np.int64(1)).shape == (1,)


def test_a_tensor_is_handed_to_numpy_as_its_values() -> None:
    x = leaf()
    for made in (np.asarray(x), np.array(x), np.asarray(x, np.float64)):
        np.testing.assert_array_equal(made, [1.0, 2.0, 3.0])
        assert made.dtype.kind == "f"
    assert np.array(x) is not x.data
    assert np.asarray(x, np.float64).dtype == np.float64


def test_arrays_of_either_byte_order_make_tensors() -> None:
    made = flame.tensor(np.array([1.0, 2.0], ">f4"))
    assert made.dtype == np.float32
    assert (made * 2.0).tolist() == [2.0, 4.0]


def test_numbers_are_written_as_numbers_are() -> None:
    loss = leaf().sum() / 7.0
    assert f"{loss:.4f} {loss:8.2e}" == "0.8571 8.57e-01"
    assert f"{leaf()}" == repr(leaf())


NO_NUMBER = """
import flame_train.engine as f
x = f.tensor([float("inf"), -float("inf")], requires_grad=True)
made = [f.tensor([-1.0]).sqrt(), f.tensor([0.0]).log(), x.sum(), x.mean(), x.var(), x.cumsum(0)]
(x.sum() + 0.0 * x).backward(x.detach())
print([t.tolist() for t in (*made, x.grad)])
"""


def test_what_is_no_number_in_the_end_is_not_warned_of() -> None:
    """Nor in sums, where NumPy warns in its own name."""
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", NO_NUMBER], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert done.stdout.strip() == "[[nan], [-inf], nan, nan, nan, [inf, nan], [nan, nan]]"
