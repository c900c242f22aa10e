"""Small programs over graphs, hooks and places, run in PyTorch and here: the same numbers, or both refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.errors import Unsupported

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity


def _recomputed(fn: Callable[..., Any], *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False)


def _leaf(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda values: make(np.asarray(values, np.float32), requires_grad=True)


OURS, THEIRS = SimpleNamespace(), SimpleNamespace()
OURS.tensor, OURS.leaf, OURS.checkpoint = flame.tensor, _leaf(flame.tensor), flame.checkpoint
OURS.grad, OURS.no_grad, OURS.cat, OURS.nn = flame.grad, flame.no_grad, F.cat, F
THEIRS.tensor, THEIRS.leaf, THEIRS.checkpoint = torch.tensor, _leaf(torch.tensor), _recomputed
THEIRS.grad, THEIRS.no_grad = torch.autograd.grad, torch.no_grad
THEIRS.cat, THEIRS.nn = torch.cat, torch.nn.functional
PROGRAMS: list[Any] = []


def program(fn: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    PROGRAMS.append(pytest.param(fn, id=fn.__name__))
    return fn


# ---- which part of a graph runs ----------------------------------------------------------------------


@program
def what_lies_behind_the_inputs_of_grad_stays(t: Any) -> list[Any]:
    x = t.leaf([0.1, 0.2, 0.3])
    h = x.exp()
    a, b = (h * h).sum(), (h * 3.0).sum()
    (ga,) = t.grad(a, h)
    (gb,) = t.grad(b, h)
    h.backward(ga + gb)
    return [ga, gb, x.grad]


@program
def what_runs_is_freed(t: Any) -> list[Any]:
    x = t.leaf([0.1, 0.2, 0.3])
    loss = x.exp().log().sum()
    t.grad(loss, x)
    try:
        t.grad(loss, x)
    except RuntimeError:
        return ["freed"]
    return ["kept"]


@program
def an_output_that_does_not_lead_there_is_not_run(t: Any) -> list[Any]:
    x, y = t.leaf([0.5, 1.5]), t.leaf([2.0, 3.0])
    a, b = x.exp().sum(), (x * y).exp().sum()
    (gy,) = t.grad([a, b], [y])
    a.backward()
    return [gy, x.grad]


@program
def inputs_of_grad_in_a_row(t: Any) -> list[Any]:
    x = t.leaf([0.1, 0.2])
    h = x.exp()
    k = h.exp()
    called: list[str] = []
    x.register_hook(lambda g: called.append("x"))
    h.register_hook(lambda g: called.append("h"))
    k.register_hook(lambda g: called.append("k"))
    found = list(t.grad((k * h).sum(), [h, k], retain_graph=True))
    return [*found, *called, "then", *t.grad((k * 2.0).sum(), [k]), *called]


@program
def blocks_behind_the_inputs_of_grad_are_not_run_again(t: Any) -> list[Any]:
    runs: list[str] = []

    def block(name: str) -> Callable[[Any], Any]:
        def run(v: Any) -> Any:
            runs.append(name)
            return v.exp()

        return run

    x = t.leaf([0.1, 0.2])
    h = t.checkpoint(block("first"), x)
    y = t.checkpoint(block("second"), h)
    (g,) = t.grad(y.sum(), h)
    return [g, *runs]


@program
def a_gradient_of_another_dtype_is_cast(t: Any) -> list[Any]:
    x = t.leaf([0.1, 0.2])
    x.backward(t.tensor(np.ones(2)))
    (x * 2.0).backward(t.tensor(np.ones(2)))
    return [x.grad, str(x.grad.dtype).removeprefix("torch.")]


@program
def the_output_itself_is_an_input(t: Any) -> list[Any]:
    x = t.leaf([0.1, 0.2])
    s = x.exp().sum()
    return [*t.grad(s, s), *t.grad(s, x)]


@program
def one_of_a_list(t: Any) -> list[Any]:
    x, y, w = t.leaf([0.1, 0.2]), t.leaf([0.3, 0.4]), t.leaf([2.0])
    h = w.exp()
    joined = t.cat([x * h, y.exp()])
    return [*t.grad((joined * joined).sum(), [y], retain_graph=True), *t.grad((joined * h).sum(), [x])]


# ---- hooks ---------------------------------------------------------------------------------------------


@program
def a_hook_that_removes_itself_hides_no_other(t: Any) -> list[Any]:
    called: list[str] = []

    def once(g: Any) -> None:
        called.append("once")
        handle.remove()

    for x in (t.leaf([1.0, 2.0]), t.leaf([1.0, 2.0]) * 1.0):
        handle = x.register_hook(once)
        x.register_hook(lambda g: called.append("each time"))
        for _ in range(2):
            (x * 2.0).sum().backward(retain_graph=True)
    return called


@program
def one_function_registered_twice(t: Any) -> list[Any]:
    x = t.leaf([1.0, 2.0])

    def double(g: Any) -> Any:
        return g * 2.0

    one = x.register_hook(double)
    x.register_hook(double)
    one.remove()
    one.remove()
    (x * 1.0).sum().backward()
    return [x.grad]


@program
def a_hook_for_a_while(t: Any) -> list[Any]:
    x = t.leaf([1.0, 2.0])
    with x.register_hook(lambda g: g * 10.0):
        (x * 1.0).sum().backward()
    (x * 1.0).sum().backward()
    return [x.grad]


@program
def what_a_hook_may_not_return(t: Any) -> list[Any]:
    said = []
    for wrong in (lambda g: g.double() if hasattr(g, "double") else g.to("float64"), lambda g: 5, lambda g: g.numpy()):
        x = t.leaf([1.0, 2.0])
        x.register_hook(wrong)
        try:
            (x * 2.0).sum().backward()
        except (RuntimeError, TypeError):
            said.append("refused")
    return said


# ---- recomputation -------------------------------------------------------------------------------------


@program
def a_tensor_of_two_blocks_closures(t: Any) -> list[Any]:
    x, w = t.leaf([0.3, 0.4]), t.leaf([1.5, 2.5])
    shared = w.exp()
    first = t.checkpoint(lambda v: v * shared, x)
    second = t.checkpoint(lambda v: v.exp() * shared, first)
    (second * shared).sum().backward()
    return [x.grad, w.grad]


@program
def a_list_of_tensors_that_are_used_outside_too(t: Any) -> list[Any]:
    x, w = t.leaf([0.3, 0.4]), t.leaf([1.5, 2.5])
    h, k = x.exp(), w * w
    y = t.checkpoint(lambda v, others: v * others[0] + others[1], x * 2.0, [h, k])
    (y * h * k).sum().backward()
    return [x.grad, w.grad]


@program
def a_closure_inside_a_block_inside_a_block(t: Any) -> list[Any]:
    x, w = t.leaf([0.3, 0.4]), t.leaf([1.5, 2.5])
    shared = w.exp()

    def outer(v: Any) -> Any:
        inner = v * shared
        return t.checkpoint(lambda u: u * inner.exp() * shared, v.exp()) + inner

    (t.checkpoint(outer, x) * shared).sum().backward()
    return [x.grad, w.grad]


@program
def grad_of_what_only_a_closure_uses(t: Any) -> list[Any]:
    x, w = t.leaf([0.3, 0.4]), t.leaf([1.5, 2.5])
    shared = w.exp()
    y = t.checkpoint(lambda v: v * shared, x)
    return [*t.grad(y.sum(), [shared], retain_graph=True), *t.grad(y.sum(), [w, x])]


# ---- writing in place ----------------------------------------------------------------------------------


def said(fn: Callable[[], Any]) -> str:
    try:
        fn()
    except RuntimeError:
        return "refused"
    return "done"


@program
def descent_by_augmented_assignment(t: Any) -> list[Any]:
    p = t.leaf([1.0, 2.0])
    kept = p
    for _ in range(3):
        (p * p).sum().backward()
        with t.no_grad():
            p -= 0.1 * p.grad
            p.grad *= 0.0
            p *= 2.0
            p /= 4.0
            p += 1.0
    return [p, kept, p is kept]


@program
def augmented_assignment_of_a_leaf_in_a_graph(t: Any) -> list[Any]:
    p = t.leaf([1.0, 2.0])

    def write() -> None:
        nonlocal p
        p -= 0.1

    return [said(write), p]


@program
def what_a_graph_keeps_was_written(t: Any) -> list[Any]:
    def of(keep: Callable[[Any, Any], Any], write: Callable[[Any], Any]) -> str:
        x, c = t.leaf([1.0, 2.0]), t.tensor([3.0, 4.0])
        y = keep(x, c)
        with t.no_grad():
            write(c)
            (x * c).sum()
        return said(lambda: y.sum().backward())

    def bracket(c: Any) -> None:
        c[0] = 1.0

    def part(c: Any) -> None:
        c[:1].zero_()

    writes = [lambda c: c.fill_(5.0), lambda c: c.add_(1.0), lambda c: c.copy_(c * 2.0), bracket, part]
    kept = [of(lambda x, c: x * c, write) for write in writes]
    viewed = [of(lambda x, c: x * c.reshape(2, 1), write) for write in writes]
    free = [of(lambda x, c: x + c, write) for write in writes]
    return [*kept, "viewed", *viewed, "free", *free, of(lambda x, c: (x * c) * c.exp(), lambda c: None)]


@program
def what_was_written_before_or_beside(t: Any) -> list[Any]:
    x, c = t.leaf([1.0, 2.0]), t.tensor([3.0, 4.0])
    c.fill_(2.0)
    y = x * c
    other = c * 1.0
    other.fill_(7.0)
    y.sum().backward()
    return [x.grad]


@program
def a_leaf_that_was_trained_meanwhile(t: Any) -> list[Any]:
    w = t.leaf([1.0, 2.0])
    z = (w * w).sum()
    with t.no_grad():
        w.sub_(0.5)
    return [said(z.backward)]


# ---- brackets ------------------------------------------------------------------------------------------


@program
def an_ellipsis_for_no_dims_at_all(t: Any) -> list[Any]:
    z = t.tensor(np.arange(24.0).reshape(4, 2, 3))
    found = [z[:, [0, 1], ..., [0, 2]], z[..., 0, 1, 2], z[0, ..., [0, 1], [1, 2]], z[[0, 1], ..., 1, [0, 2]]]
    z[:, [0, 1], ..., [0, 2]] = t.tensor(np.ones((4, 2)))
    z[..., [0, 1], [1, 1]] = t.tensor(np.arange(2.0))
    return [*found, z]


@program
def one_number_in_a_dim_of_its_own_is_written(t: Any) -> list[Any]:
    x, y = t.tensor([1.0, 2.0, 3.0]), t.tensor(np.zeros((2, 3)))
    x[1] = t.tensor([5.0])
    y[0] = t.tensor(np.array([[1.0, 2.0, 3.0]]))
    y[1, 2] = t.tensor(np.array([[[4.0]]]))
    y[:, 0] = t.tensor(np.array([[7.0]]))
    return [x, y]


# ---- small things --------------------------------------------------------------------------------------


@program
def dims_in_reverse_order(t: Any) -> list[Any]:
    shapes = ((2, 3), (2, 3, 4), (3,), ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [t.tensor(np.arange(float(np.prod(s))).reshape(s)).T for s in shapes]


@program
def whole_numbers_rounded_stay_whole(t: Any) -> list[Any]:
    x = t.tensor([1, 2, 2**60 + 1])
    return [getattr(x, name)() - 2**60 for name in ("round", "floor", "ceil", "trunc")]


@program
def numbers_divided_by_a_tensor_downwards(t: Any) -> list[Any]:
    return [5 // t.tensor([1.0, 2.0, -3.0]), 7 // t.tensor([2, 3]), 7.5 // t.tensor([2, -2])]


@program
def what_is_shuffled_by_one_lies_elsewhere(t: Any) -> list[Any]:
    x = t.tensor(np.ones((1, 2, 2, 2)))
    shuffled, back = t.nn.pixel_shuffle(x, 1), t.nn.pixel_unshuffle(x, 1)
    x.zero_()
    return [shuffled, back]


@program
def weights_of_losses_that_would_get_no_gradient(t: Any) -> list[Any]:
    def of(loss: Callable[[Any], Any]) -> str:
        try:
            loss(t.leaf([0.5, 0.3])).sum().backward()
        except (RuntimeError, NotImplementedError, Unsupported):
            return "refused"
        return "done"

    x, classes, p = t.leaf([[0.3, 0.6]]), t.tensor([1]), t.tensor(np.array([[0.2, 0.8]], np.float32))
    return [
        of(lambda w: t.nn.nll_loss(x, classes, w)),
        of(lambda w: t.nn.cross_entropy(x, classes, w)),
        of(lambda w: t.nn.binary_cross_entropy(x, p, w)),
    ]


def _plain(found: Any) -> Any:
    """Tensors as lists, in whatever they are in."""
    if isinstance(found, (list, tuple)):
        return [_plain(f) for f in found]
    return found.tolist() if hasattr(found, "tolist") else found


@pytest.mark.parametrize("run", PROGRAMS)
def test_a_program_gives_the_same_in_both(run: Callable[[Any], list[Any]]) -> None:
    ours, theirs = _plain(run(OURS)), _plain(run(THEIRS))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, str) or mine is None:
            assert mine == other
        else:
            np.testing.assert_allclose(mine, other, rtol=1e-6)
