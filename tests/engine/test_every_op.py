"""Every registered op on every sample: the one test file of the op registry."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional
from flame_train.engine.check import TOLERANCE, generator, gradcheck
from flame_train.engine.dispatch import explain
from flame_train.engine.dtype import bfloat16, float16, float32, float64, is_float
from flame_train.engine.op import REGISTRY, Op, Sample, primitive, sample
from flame_train.engine.sample import materialise, tensor_arguments

OPS = sorted(REGISTRY)
CASES = [pytest.param(n, i, s, id=f"{n}-{i}") for n in OPS for i, s in enumerate(REGISTRY[n].iter_samples())]
ERRORS = [pytest.param(n, e, id=f"{n}-{i}") for n in OPS for i, e in enumerate(REGISTRY[n].iter_errors())]


def outputs(result: Any) -> list[flame.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def draw(op: Op, index: int, s: Sample, dtype: Any = float64) -> dict[str, Any]:
    return materialise(op, s, generator(op.name, index), dtype)


@pytest.mark.parametrize("name", OPS)
def test_is_complete(name: str) -> None:
    """Samples, a docstring that opens with the formula, and an export: without them an op is not an op."""
    op = REGISTRY[name]
    assert list(op.iter_samples())
    assert op.__doc__
    assert getattr(functional, name) is op
    assert name in functional.__all__


@pytest.mark.parametrize("name", OPS)
def test_every_tensor_input_is_accounted_for(name: str) -> None:
    """An input either has a gradient or is declared to have none; no formula is left untested by the samples."""
    op = REGISTRY[name]
    assert set(op.tensor_names) == set(op.differentiable) | op.undifferentiable
    exercised = {a for s in op.iter_samples() for a, _, _ in tensor_arguments(op, draw(op, 0, s))}
    assert exercised == set(op.tensor_names)


@pytest.mark.parametrize("name", OPS)
def test_gradients_meet_finite_differences(name: str) -> None:
    failed = [v for v in gradcheck(REGISTRY[name]) if not v.passed]
    assert not failed


@pytest.mark.parametrize(("name", "index", "s"), CASES)
def test_does_not_change_its_inputs(name: str, index: int, s: Sample) -> None:
    op = REGISTRY[name]
    bound = draw(op, index, s)
    found = tensor_arguments(op, bound)
    before = [t.numpy().copy() for _, _, t in found]
    for arg, _, t in found:
        if arg in op.differentiable:
            t.requires_grad_(is_float(t.dtype))
    results = [o for o in outputs(op(**bound)) if o.requires_grad]
    cotangents = [flame.tensor(np.ones(o.shape)) for o in results]
    if results:
        flame.backward(results, cotangents)
    for (arg, _, t), held in zip(found, before, strict=True):
        if arg not in op.mutates:
            assert np.array_equal(t.numpy(), held), arg
    assert all(np.array_equal(c.numpy(), np.ones(c.shape)) for c in cotangents)


@pytest.mark.parametrize(("name", "index", "s"), CASES)
def test_no_grad_gives_the_same_bits(name: str, index: int, s: Sample) -> None:
    op = REGISTRY[name]
    bound = draw(op, index, s)
    with flame.no_grad():
        plain = outputs(op(**bound))
    for arg, _, t in tensor_arguments(op, bound):
        t.requires_grad_(is_float(t.dtype) and arg in op.differentiable)
    taped = outputs(op(**bound))
    assert all(not p.requires_grad for p in plain)
    assert all(np.array_equal(p.numpy(), q.numpy(), equal_nan=True) for p, q in zip(plain, taped, strict=True))


@pytest.mark.parametrize(("name", "index", "s"), CASES)
def test_strided_inputs_give_the_same_values(name: str, index: int, s: Sample) -> None:
    """Each tensor read backwards from a reversed copy: other strides, same values."""
    op = REGISTRY[name]
    bound = draw(op, index, s)
    expected = [o.numpy() for o in outputs(op(**bound))]
    for _, _, t in tensor_arguments(op, bound):
        if t.ndim:
            t.data = np.ascontiguousarray(t.data[::-1])[::-1]
            t.data = np.asfortranarray(t.data) if t.ndim > 1 else t.data
    for got, want in zip(outputs(op(**bound)), expected, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "index", "s"), CASES)
def test_saves_exactly_what_its_formulas_name(name: str, index: int, s: Sample) -> None:
    op = REGISTRY[name]
    if op.composite:
        return
    for wanted in op.differentiable:
        bound = draw(op, index, s)
        chosen = [t for arg, _, t in tensor_arguments(op, bound) if arg == wanted and is_float(t.dtype)]
        if not chosen:
            continue
        for t in chosen:
            t.requires_grad_()
        node = outputs(op(**bound))[0]._node
        formula = op.formula_for(wanted, op.formulas)
        assert node is not None
        assert node.saved is not None
        assert set(node.saved) == set(formula.names)


@pytest.mark.parametrize("dtype", [float32, bfloat16, float16], ids=lambda d: d.name)
@pytest.mark.parametrize(("name", "index", "s"), CASES)
def test_precision_is_one_rounding_of_the_working_precision(name: str, index: int, s: Sample, dtype: Any) -> None:
    """Low precision equals the reference run in fp32 on the same (rounded) inputs, rounded once."""
    op = REGISTRY[name]
    low = draw(op, index, s, dtype)
    high = dict(low)
    work = float32
    for arg in op.tensor_names:
        value = low[arg]
        if isinstance(value, list):
            high[arg] = [t.to(work) if is_float(t.dtype) else t for t in value]
        elif isinstance(value, flame.Tensor) and is_float(value.dtype):
            high[arg] = value.to(work)
    if "dtype" in op.names:
        return
    for got, want in zip(outputs(op(**low)), outputs(op(**high)), strict=True):
        expected = want.numpy()
        if is_float(got.dtype) and not op.composite:
            assert got.dtype == dtype
            expected = expected.astype(dtype)
            assert np.array_equal(got.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize(("name", "case"), ERRORS)
def test_refuses_bad_input_with_a_word(name: str, case: Any) -> None:
    op = REGISTRY[name]
    with pytest.raises(case.error, match=case.match):
        op(**draw(op, 0, case.sample))


def test_a_wrong_formula_is_caught() -> None:
    """The check itself is checked: an op whose gradient is off by a factor of 1 + 1e-5 must not pass."""

    def planted(xp: Any, input: Any) -> Any:
        """sin, with a wrong gradient"""
        return xp.sin(input)

    planted.__annotations__["input"] = "Array"
    op = primitive()(planted)
    try:

        @op.vjp("input")
        def _(xp: Any, g: Any, input: Any) -> Any:
            return g * xp.cos(input) * (1 + 1e-5)

        @op.samples
        def _() -> Any:
            yield sample((3, 4))

        verdicts = list(gradcheck(op))
        assert verdicts
        assert any(v.error > TOLERANCE for v in verdicts)
    finally:
        del REGISTRY["planted"]


def test_formula_naming_something_unknown_fails_at_declaration() -> None:
    op = REGISTRY["mul"]
    with pytest.raises(TypeError, match="nothing named 'weigth' to save"):

        @op.vjp("input")
        def _(xp: Any, g: Any, weigth: Any) -> Any:
            return g


def test_forced_implementation_that_cannot_run_is_an_error() -> None:
    from flame_train.engine.mode import use

    x = flame.tensor(np.ones((2, 2)))
    with use(exp="nonsense"), pytest.raises(RuntimeError, match="no implementation named 'nonsense'"):
        functional.exp(x)
    with use(exp="reference"):
        functional.exp(x)


def test_explain_names_the_choice() -> None:
    rows = dict(explain(REGISTRY["linear"], flame.tensor(np.ones((2, 3))), flame.tensor(np.ones((4, 3)))))
    assert rows["reference"] == "chosen"


def test_signatures_read_like_pytorch() -> None:
    assert str(inspect.signature(functional.layer_norm)).startswith("(input: 'Array', normalized_shape")


@pytest.mark.parametrize("name", [n for n in OPS if REGISTRY[n].kernels])
def test_kernels_take_exactly_the_ops_arguments(name: str) -> None:
    """Kernels cannot run here, but that they can be called at all is seen from their signatures."""
    op = REGISTRY[name]
    for kernel in op.kernels:
        assert list(inspect.signature(kernel.fn).parameters)[1:] == list(op.names), kernel.impl
        known = set(op.names)
        assert kernel.when is None or set(inspect.signature(kernel.when).parameters) <= known, kernel.impl
