"""What help shows of a Tensor, and of every public op."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
from typing import get_args

import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn
from flame_train.engine.nn.spec import Init
from flame_train.engine.op import REGISTRY, Op


def test_every_public_member_of_a_tensor_has_a_docstring() -> None:
    members = [n for n in dir(flame.Tensor) if not n.startswith("_") and n != "data"]
    assert len(members) > 120
    without = [n for n in members if not (inspect.getdoc(inspect.getattr_static(flame.Tensor, n)) or "").strip()]
    assert not without


def test_a_method_says_what_its_op_does_and_takes() -> None:
    shown = inspect.getdoc(flame.Tensor.gelu)
    assert shown is not None
    assert "input * Phi(input)" in shown
    assert "approximate = 'none' (by name)" in shown
    assert inspect.getdoc(flame.Tensor.leaky_relu) == "As functional.leaky_relu, whose help says more."
    assert str(inspect.signature(flame.Tensor.sum)).startswith("(self, dim")
    assert "Written into this tensor" in (inspect.getdoc(flame.Tensor.add_) or "")


@pytest.mark.parametrize("name", sorted(n for n in dir(F) if isinstance(getattr(F, n), Op)))
def test_help_of_every_op_names_its_arguments_and_has_an_example_that_runs(name: str) -> None:
    op = getattr(F, name)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        help(op)
    text = shown.getvalue()
    signature = inspect.signature(op)
    assert all(argument in text for argument in signature.parameters)
    assert "Args:" in text
    assert "xp: the array" not in text
    example = doctest.DocTestParser().get_doctest(op.__doc__, {}, name, None, None)
    assert len(example.examples) == 2
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_class_keeps_its_docstring_and_an_op_its_formula() -> None:
    assert inspect.getdoc(Op) is not None
    assert str(inspect.getdoc(Op)).startswith("A named operation")
    assert all(str(op.__doc__).startswith(str(inspect.cleandoc(op.fn.__doc__ or ""))[:20]) for op in REGISTRY.values())


def test_help_of_param_says_how_weights_are_filled() -> None:
    assert all(f'"{init}"' in (inspect.getdoc(nn.param) or "") for init in get_args(Init))
