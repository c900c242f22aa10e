"""Every registered op on every sample: the one test file of the op registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional
from flame_train.engine.dispatch import explain
from flame_train.engine.dtype import Array, bfloat16, float16, float32, float64, is_float
from flame_train.engine.gradcheck import TOLERANCE, generator, gradcheck
from flame_train.engine.op import REGISTRY, Op, Sample, composite, primitive, sample
from flame_train.engine.op_samples import materialise, tensor_arguments
from flame_train.engine.tensors.tensor import Tensor
from flame_train.errors import ShapeError

OPS = sorted(REGISTRY)
ERRORS = [pytest.param(n, e, id=f"{n}-{i}") for n in OPS for i, e in enumerate(REGISTRY[n].iter_errors())]


def outputs(result: Any) -> list[flame.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def draw(op: Op, index: int, s: Sample, dtype: Any = float64) -> dict[str, Any]:
    return materialise(op, s, generator(op.name, index), dtype)


@contextmanager
def noted(name: str, index: int) -> Iterator[None]:
    """What goes wrong within says with which sample."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"sample {index} of {name}")
        raise


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
    assert set(op.tensor_names) == set(op.differentiable) | op.non_differentiable_names | op.unsupported_grads
    assert not op.unsupported_grads & (set(op.differentiable) | op.non_differentiable_names)
    exercised = {a for s in op.iter_samples() for a, _, _ in tensor_arguments(op, draw(op, 0, s))}
    assert exercised == set(op.tensor_names)


@pytest.mark.parametrize("name", OPS)
def test_gradients_meet_finite_differences(name: str) -> None:
    failed = [v for v in gradcheck(REGISTRY[name]) if not v.passed]
    assert not failed


@pytest.mark.parametrize("name", OPS)
def test_does_not_change_its_inputs(name: str) -> None:
    op = REGISTRY[name]
    for index, s in enumerate(op.iter_samples()):
        with noted(name, index):
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


@pytest.mark.parametrize("name", OPS)
def test_no_grad_gives_the_same_bits(name: str) -> None:
    op = REGISTRY[name]
    for index, s in enumerate(op.iter_samples()):
        with noted(name, index):
            bound = draw(op, index, s)
            with flame.no_grad():
                plain = outputs(op(**bound))
            for arg, _, t in tensor_arguments(op, bound):
                t.requires_grad_(is_float(t.dtype) and arg in op.differentiable)
            taped = outputs(op(**bound))
            assert all(not p.requires_grad for p in plain)
            assert all(np.array_equal(p.numpy(), q.numpy(), equal_nan=True) for p, q in zip(plain, taped, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_strided_inputs_give_the_same_values(name: str) -> None:
    """Each tensor read backwards from a reversed copy: other strides, same values."""
    op = REGISTRY[name]
    for index, s in enumerate(op.iter_samples()):
        with noted(name, index):
            bound = draw(op, index, s)
            expected = [o.numpy() for o in outputs(op(**bound))]
            for _, _, t in tensor_arguments(op, bound):
                if t.ndim:
                    t.data = np.ascontiguousarray(t.data[::-1])[::-1]
                    t.data = np.asfortranarray(t.data) if t.ndim > 1 else t.data
            for got, want in zip(outputs(op(**bound)), expected, strict=True):
                np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPS)
def test_saves_exactly_what_its_formulas_name(name: str) -> None:
    op = REGISTRY[name]
    if op.composite:
        return
    for index, s in enumerate(op.iter_samples()):
        with noted(name, index):
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
@pytest.mark.parametrize("name", OPS)
def test_precision_is_one_rounding_of_the_working_precision(name: str, dtype: Any) -> None:
    """Low precision equals the reference run in fp32 on the same (rounded) inputs, rounded once."""
    op = REGISTRY[name]
    if "dtype" in op.names:
        return
    for index, s in enumerate(op.iter_samples()):
        with noted(name, index):
            low = draw(op, index, s, dtype)
            high = dict(low)
            for arg in op.tensor_names:
                value = low[arg]
                if isinstance(value, list):
                    high[arg] = [t.to(float32) if is_float(t.dtype) else t for t in value]
                elif isinstance(value, flame.Tensor) and is_float(value.dtype):
                    high[arg] = value.to(float32)
            for got, want in zip(outputs(op(**low)), outputs(op(**high)), strict=True):
                if is_float(got.dtype) and not op.composite:
                    assert got.dtype == dtype
                    assert np.array_equal(got.numpy(), want.numpy().astype(dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.bool_], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", [n for n in OPS if REGISTRY[n].promoted])
def test_whole_numbers_where_floats_are_meant_are_their_fp32(name: str, dtype: Any) -> None:
    """Each such argument by itself, so that whole numbers meet floats, and all of them together."""
    op = REGISTRY[name]
    for index, s in enumerate(op.iter_samples()):
        with noted(name, index):
            for args in [*[{a} for a in op.promoted], op.promoted]:
                whole, real = draw(op, index, s, float32), draw(op, index, s, float32)
                for (arg, _, t), (_, _, r) in zip(tensor_arguments(op, whole), tensor_arguments(op, real), strict=True):
                    if arg in args and is_float(t.dtype):
                        t.data = np.asarray(np.rint(t.data) % 2).astype(dtype)
                        r.data = t.data.astype(np.float32)
                for got, want in zip(outputs(op(**whole)), outputs(op(**real)), strict=True):
                    assert got.dtype == want.dtype
                    assert np.array_equal(got.numpy(), want.numpy(), equal_nan=is_float(want.dtype))


@pytest.mark.parametrize(("name", "case"), ERRORS)
def test_refuses_bad_input_with_a_word(name: str, case: Any) -> None:
    op = REGISTRY[name]
    with pytest.raises(case.error, match=case.match):
        op(**draw(op, 0, case.sample))


TAKES_ANYTHING = set(
    """
    abs cast ceil clone cos elu erf exp expm1 floor hardsigmoid hardswish isfinite leaky_relu log log1p logical_not
    logsigmoid mish neg quick_gelu reciprocal relu relu6 round rsqrt selu sigmoid sign silu sin softplus softsign sqrt
    square tanh trunc
    """.split()
)
"""One tensor of any shape, and numbers: nothing but the wrong kind of thing can be wrong; that is tested for all."""


def test_every_op_that_can_be_given_wrong_shapes_says_so() -> None:
    assert {n for n in OPS if not list(REGISTRY[n].iter_errors())} == TAKES_ANYTHING


@pytest.mark.parametrize("name", OPS)
def test_refuses_what_is_no_tensor_by_the_arguments_name(name: str) -> None:
    op = REGISTRY[name]
    bound = draw(op, 0, next(op.iter_samples()))
    for arg in op.tensor_names:
        bad = [np.ones(2)] if arg in op.list_names else np.ones(2)
        with pytest.raises(TypeError, match=rf"{name}: expected a Tensor( or a number)? for '{arg}', got ndarray"):
            op(**{**bound, arg: bad})


@pytest.mark.parametrize("name", OPS)
def test_refuses_arguments_it_does_not_know(name: str) -> None:
    op = REGISTRY[name]
    bound = draw(op, 0, next(op.iter_samples()))
    with pytest.raises(TypeError, match=f"{name}: argument 'colour' is unknown"):
        op(**bound, colour=1)
    with pytest.raises(TypeError, match=f"{name}: missing argument '{op.names[0]}'"):
        op(**{n: v for n, v in bound.items() if n != op.names[0]})


@pytest.mark.parametrize("name", [n for n in OPS if "layout" in REGISTRY[n].names])
def test_refuses_a_layout_it_does_not_know(name: str) -> None:
    op = REGISTRY[name]
    bound = draw(op, 0, next(op.iter_samples()))
    with pytest.raises(ShapeError, match=f"{name}: expected layout 'NCHW' or 'NHWC', got 'nhwc'"):
        op(**{**bound, "layout": "nhwc"})


@pytest.fixture
def plant() -> Iterator[Callable[..., Op]]:
    """Declares ops for a test and takes them out of the registry again."""
    planted: list[str] = []

    def declare(op: Op, samples: Callable[[], Iterator[Sample]]) -> Op:
        op.samples(*samples())
        planted.append(op.name)
        return op

    yield declare
    for name in planted:
        del REGISTRY[name]


def caught(op: Op) -> bool:
    verdicts = list(gradcheck(op))
    assert verdicts
    return any(v.error > TOLERANCE for v in verdicts)


class TestWrongFormulasAreCaught:
    """The check itself is checked: gradients off by a factor of 1 + 1e-5, or wrong where it is easy to be wrong."""

    @pytest.mark.parametrize("factor", [1.0, 1 + 1e-5])
    def test_elementwise(self, plant: Callable[..., Op], factor: float) -> None:
        @primitive()
        def planted_sin(xp: Any, input: Array) -> Array:
            """sin"""
            return xp.sin(input)

        @planted_sin.vjp("input")
        def _(xp: Any, g: Array, input: Array) -> Array:
            return g * xp.cos(input) * factor

        op = plant(planted_sin, lambda: iter([sample((3, 4))]))
        assert caught(op) == (factor != 1.0)

    @pytest.mark.parametrize("wrong", [False, True])
    def test_reduction_that_forgets_where_the_maximum_was(self, plant: Callable[..., Op], wrong: bool) -> None:
        @primitive()
        def planted_max(xp: Any, input: Array, dim: int) -> Array:
            """the largest along dim"""
            return xp.max(input, axis=dim)

        @planted_max.vjp("input")
        def _(xp: Any, g: Array, input: Array, out: Array, dim: int) -> Array:
            spread = xp.broadcast_to(xp.expand_dims(g, dim), input.shape)
            return spread if wrong else xp.where(input == xp.expand_dims(out, dim), spread, 0.0)

        assert caught(plant(planted_max, lambda: iter([sample((2, 3), 1)]))) == wrong

    @pytest.mark.parametrize("wrong", [False, True])
    def test_list_input_with_two_pieces_exchanged(self, plant: Callable[..., Op], wrong: bool) -> None:
        @primitive()
        def planted_sum(xp: Any, tensors: Sequence[Array]) -> Array:
            """the sum of i * tensors[i]"""
            return sum(i * t for i, t in enumerate(tensors))

        @planted_sum.vjp("tensors")
        def _(xp: Any, g: Array, tensors_shape: list[tuple[int, ...]]) -> list[Array]:
            count = len(tensors_shape)
            return [(count - 1 - i if wrong else i) * g for i in range(count)]

        assert caught(plant(planted_sum, lambda: iter([sample([(2, 3), (2, 3), (2, 3)])]))) == wrong

    @pytest.mark.parametrize("wrong", [False, True])
    def test_several_outputs_of_which_one_is_forgotten(self, plant: Callable[..., Op], wrong: bool) -> None:
        @primitive(multiple=True)
        def planted_pair(xp: Any, input: Array) -> tuple[Array, Array]:
            """sin and cos"""
            return xp.sin(input), xp.cos(input)

        @planted_pair.vjp("input")
        def _(xp: Any, g: tuple[Array, Array], input: Array) -> Array:
            return g[0] * xp.cos(input) - (0.0 if wrong else g[1] * xp.sin(input))

        assert caught(plant(planted_pair, lambda: iter([sample((2, 3))]))) == wrong

    @pytest.mark.parametrize("wrong", [False, True])
    def test_composite_of_a_wrong_part(self, plant: Callable[..., Op], wrong: bool) -> None:
        @primitive()
        def planted_part(xp: Any, input: Array) -> Array:
            """tanh"""
            return xp.tanh(input)

        @planted_part.vjp("input")
        def _(xp: Any, g: Array, out: Array) -> Array:
            return g * (1.0 - (out if wrong else out * out))

        plant(planted_part, lambda: iter([sample((2,))]))

        @composite()
        def planted_whole(input: Tensor, scale: Tensor) -> Tensor:
            """scale * tanh(input)"""
            return planted_part(input) * scale

        assert caught(plant(planted_whole, lambda: iter([sample((2, 3), (3,))]))) == wrong

    @pytest.mark.parametrize("wrong", [False, True])
    def test_saved_value_that_the_forward_pass_did_not_use(self, plant: Callable[..., Op], wrong: bool) -> None:
        @primitive(aux=("norm",))
        def planted_unit(xp: Any, input: Array) -> tuple[Array, Array]:
            """input / |input|"""
            norm = xp.sqrt(xp.sum(input * input))
            return input / norm, norm * (1.0 + 1e-4) if wrong else norm

        @planted_unit.vjp("input")
        def _(xp: Any, g: Array, out: Array, norm: Array) -> Array:
            return (g - out * xp.sum(g * out)) / norm

        assert caught(plant(planted_unit, lambda: iter([sample((5,))]))) == wrong


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
def test_kernels_take_arguments_of_the_op(name: str) -> None:
    """Kernels cannot run here, but that they can be called at all is seen from their signatures."""
    op = REGISTRY[name]
    for kernel in op.kernels:
        known = set(op.names)
        assert set(kernel.names) <= known, kernel.impl
        assert kernel.when is None or set(kernel.when.names) <= known, kernel.impl


def test_samples_of_a_function_are_made_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of weights in 8 bits took a third of the time that each command needed to start."""
    made: list[int] = []

    def samples() -> list[Sample]:
        made.append(1)
        return [sample((2, 3))]

    op = REGISTRY["scaled_linear"]
    monkeypatch.setattr(op, "_perf_samples", ())
    op.perf_samples(sample((1, 1)), samples)
    assert not made
    assert [each.args for each in op.iter_perf_samples()] == [((1, 1),), ((2, 3),)]
    assert made == [1]
