"""The page on own ops: its code runs, its kernel computes, and what it says of declarations holds."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import check
from flame_train.engine.op import REGISTRY

PAGE = (Path(__file__).parents[3] / "docs" / "own-ops.md").read_text(encoding="utf-8")


@pytest.fixture
def registry() -> Iterator[None]:
    """Ops that a test declares are gone after it."""
    before = set(REGISTRY)
    yield
    for name in set(REGISTRY) - before:
        del REGISTRY[name]


def run(name: str, space: dict[str, Any]) -> dict[str, Any]:
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    exec(compile(found.group(1), name, "exec", dont_inherit=True), space)
    return space


def test_every_program_of_the_page_is_run() -> None:
    assert re.findall(r"<!-- (\w+) -->\n```python", PAGE) == ["elementwise", "primitive", "kernel"]
    assert PAGE.count("```python") == 3


def test_the_elementwise_functions(registry: None) -> None:
    space = run("elementwise", {})
    assert space["y"].tolist() == [-0.75, 0.0, 0.25]
    assert space["x"].grad.tolist() == [0.5, 0.0, 0.5]
    assert "sigmoid(gate)" in space["gated_shrink"].in_c()


def test_the_op_and_its_gradient(registry: None) -> None:
    space = run("primitive", {})
    assert space["worst"] < 1e-6
    assert space["softcap"](flame.tensor([1e9])).tolist() == [30.0]
    assert REGISTRY["softcap"] is space["softcap"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_kernel(registry: None, gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    space = run("kernel", run("primitive", {}))
    softcap = space["softcap"]
    x = flame.tensor(np.linspace(-90, 90, 301, dtype=np.float32), device="cuda")
    softcap(x)
    compiled.build()
    assert flame.explain(softcap, x)[0] == ("mine", "chosen")
    np.testing.assert_allclose(softcap(x).numpy(), softcap(x.to("cpu")).numpy(), rtol=1e-5, atol=1e-5)


def test_a_wrong_gradient_is_found(registry: None) -> None:
    @flame.primitive()
    def wrong(xp: Any, input: flame.Array) -> flame.Array:
        """input squared"""
        return input * input

    wrong.vjp("input")(lambda xp, g, input: g * input)
    wrong.samples(flame.sample((2, 2)))
    with pytest.raises(check.GradientError, match="wrong: the gradient of input, sample 0: an error of"):
        check.op(wrong)
    x = flame.tensor(np.ones(2), requires_grad=True)
    with pytest.raises(check.GradientError, match=r"input 0 of shape \(2,\)"):
        check.gradcheck(wrong, x)
    assert check.gradcheck(lambda a, b: (a * b, a.exp()), [x, flame.tensor(np.full(2, 3.0))]) < 1e-6
    with pytest.raises(TypeError, match="expected fp64 inputs"):
        check.gradcheck(wrong, flame.ones(2, requires_grad=True))


def test_an_argument_without_annotation_is_refused_when_declared(registry: None) -> None:
    def unsaid(xp, input):  # type: ignore[no-untyped-def]
        return input

    with pytest.raises(TypeError, match=r"op unsaid: argument 'input' has no annotation.*write input: Array"):
        flame.primitive()(unsaid)
    assert "unsaid" not in REGISTRY


@pytest.mark.parametrize(
    ("declared", "returned", "told"),
    [
        ({}, lambda x: (x, x), r"returned a tuple of ndarray, ndarray; expected an array.*multiple=True.*aux="),
        ({}, lambda x: 1.0, "returned float; expected an array"),
        ({}, lambda x: None, "returned NoneType; expected an array"),
        ({"multiple": True}, lambda x: x, "returned ndarray; expected a tuple of arrays, as multiple=True says"),
        ({"multiple": True}, lambda x: (x, None), "a tuple of ndarray, NoneType; expected a tuple of arrays"),
        ({"aux": ("mean",)}, lambda x: x, "returned ndarray; expected a tuple of the result and of mean"),
        ({"aux": ("mean",)}, lambda x: (x, x, x), "expected a tuple of the result and of mean, as aux says"),
    ],
)
def test_a_function_that_returns_something_else_than_declared(
    registry: None, declared: dict[str, Any], returned: Any, told: str
) -> None:
    def odd(xp: Any, input: flame.Array) -> Any:
        return returned(input)

    op = flame.primitive(**declared)(odd)
    with pytest.raises(TypeError, match=f"odd: its function .*{told}"):
        op(flame.ones(2, 2))


def test_the_import_makes_no_samples() -> None:
    """Random matrices were half of the time it took."""
    text = "import numpy\nnumpy.random.default_rng = None\nimport flame_train.engine"
    subprocess.run([sys.executable, "-c", text], check=True)


def test_samples_of_a_function_are_all_there() -> None:
    stored = {sample.args[0].dtype.name for sample in REGISTRY["scaled_dequantize"].iter_samples()}
    assert stored == {"uint8", "int8"}


def test_annotations_that_are_not_postponed(registry: None) -> None:
    """As in a notebook: objects instead of text."""
    space: dict[str, Any] = {"flame": flame}
    text = """
from collections.abc import Sequence
@flame.primitive()
def taken(xp, one: flame.Array, two: flame.Array | None, three: flame.Array | float, four: Sequence[flame.Array],
          five: int = 3) -> flame.Array:
    return one
"""
    exec(compile(text, "notebook", "exec", dont_inherit=True), space)
    op = space["taken"]
    assert (op.tensor_names, op.list_names) == (("one", "two", "three", "four"), {"four"})
    assert (op.optional_names, op.number_names) == ({"two"}, {"three"})


def test_examples_hold() -> None:
    assert doctest.testmod(check).failed == 0
