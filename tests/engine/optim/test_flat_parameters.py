"""Parameters as views into one buffer whose addresses never move."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flame_train.engine import Frozen, Parameter, grad, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import bfloat16
from flame_train.engine.optim import SGD, FlatParameters
from flame_train.errors import ModelFileError


def parameters(seed: int = 0) -> list[Parameter]:
    rng = np.random.default_rng(seed)
    shapes = {"down": (3, 5), "up": (130,), "gain": ()}
    return [Parameter(np.asarray(rng.standard_normal(s), np.float32), n) for n, s in shapes.items()]


def test_values_are_kept_and_become_views() -> None:
    ps = parameters()
    before = [p.numpy().copy() for p in ps]
    arena = FlatParameters(ps)
    for p, old in zip(ps, before, strict=True):
        np.testing.assert_array_equal(p.numpy(), old)
        assert np.shares_memory(p.data, arena.values)
        assert np.shares_memory(p.grad.data, arena.grads)
    arena.values[...] = 3.0
    assert all((p.numpy() == 3.0).all() for p in ps)
    assert arena.count == 15 + 130 + 1
    covered = sum(s.stop - s.start for s in arena.segments) + sum(b - a for a, b in arena.padding)
    assert covered == arena.size
    inside = np.arange(arena.size) % 64 < np.repeat(arena.valid_lengths, 64)
    assert not any(inside[a:b].any() for a, b in arena.padding)
    assert inside.sum() == arena.count


def test_backward_accumulates_into_the_buffer() -> None:
    ps = parameters()
    arena = FlatParameters(ps)
    addresses = [p.grad.data.ctypes.data for p in ps]
    for _ in range(2):
        (ps[0].sum() * ps[2] + ps[1].square().sum()).backward()
    np.testing.assert_allclose(ps[1].grad.numpy(), 4 * ps[1].numpy(), rtol=1e-6)
    np.testing.assert_allclose(arena.grads[arena.segments[0].start], 2 * ps[2].item(), rtol=1e-6)
    arena.zero_grad()
    assert not arena.grads.any()
    assert [p.grad.data.ctypes.data for p in ps] == addresses


def test_plain_leaves_and_their_first_gradients_are_packed() -> None:
    x = tensor([1.0, 2.0], requires_grad=True)
    x.square().sum().backward()
    arena = FlatParameters([x])
    np.testing.assert_array_equal(x.grad.numpy(), [2.0, 4.0])
    F.sum(x).backward()
    np.testing.assert_array_equal(arena.grads[:2], [3.0, 5.0])


def test_replaced_and_dropped_gradients_come_back() -> None:
    ps = parameters()
    arena = FlatParameters(ps)
    arena.grads[...] = 9.0
    ps[0].grad = None
    ps[1].grad = tensor(np.full(130, 5.0, np.float32))
    arena.collect_grads()
    values = {s.name: arena.view(arena.grads, s) for s in arena.segments}
    assert (values["down"] == 0).all()
    assert (values["up"] == 5).all()
    assert (values["gain"] == 9).all()
    assert all(np.shares_memory(p.grad.data, arena.grads) for p in ps)


def test_replaced_values_are_an_error_not_a_silent_stop_of_training() -> None:
    ps = parameters()
    arena = FlatParameters(ps)
    ps[1].data = np.zeros(130, np.float32)
    with pytest.raises(RuntimeError, match=r"'up'.*replaced"):
        arena.collect_grads()


def test_state_round_trips_by_name_whatever_the_order() -> None:
    arena = FlatParameters(parameters())
    saved = arena.state()
    assert {n: a.shape for n, a in saved.items()} == {"down": (3, 5), "up": (130,), "gain": ()}
    arena.values[...] = 0.0
    assert any(a.any() for a in saved.values())
    other = FlatParameters(list(reversed(parameters(1))))
    other.load_state(saved)
    for name, p in other.parameters.items():
        np.testing.assert_array_equal(p.numpy(), saved[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("up"), "missing: up"),
        (lambda s: s.update(extra=np.zeros(1)), "unexpected: extra"),
        (lambda s: s.update(down=np.zeros((5, 3))), r"mis-shaped: down: expected \(3, 5\), found \(5, 3\)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change: object, message: str) -> None:
    arena = FlatParameters(parameters())
    state, before = arena.state(), arena.values.copy()
    change(state)
    with pytest.raises(ModelFileError, match=message):
        arena.load_state(state)
    np.testing.assert_array_equal(arena.values, before)


def test_what_cannot_be_trained_is_refused_by_name() -> None:
    one = np.ones(2, np.float32)
    with pytest.raises(TypeError, match="'base' is a Frozen weight"):
        FlatParameters({"base": Frozen(one)})
    with pytest.raises(TypeError, match=r"'half'.*float16"):
        FlatParameters({"half": tensor(one.astype(np.float16), requires_grad=True)})
    with pytest.raises(TypeError, match=r"'still'.*requires_grad_"):
        FlatParameters({"still": tensor(one)})
    with pytest.raises(TypeError, match="'made'"):
        FlatParameters({"made": Parameter(one) * 2.0})
    with pytest.raises(TypeError, match="expected a Tensor, got ndarray"):
        FlatParameters([one])
    with pytest.raises(ValueError, match="at least one parameter"):
        FlatParameters([])
    twice = Parameter(one, "w")
    with pytest.raises(ValueError, match="same tensor"):
        FlatParameters({"a": twice, "b": twice})
    with pytest.raises(ValueError, match="'w': the same name"):
        FlatParameters([("w", twice), ("w", Parameter(one))])
    with pytest.raises(ValueError, match="lr_scale: no parameter named 'v'"):
        FlatParameters([Parameter(one, "w")], lr_scale={"v": 2.0})


def test_working_copies_follow_the_values_and_gradients_reach_the_parameter_in_fp32() -> None:
    p = Parameter(np.array([1.0, 2.0, 3.0], np.float32), "p")
    arena = FlatParameters([p], compute_dtype=bfloat16)
    assert p.compute_copy.dtype == bfloat16
    (p.compute_copy * 3.0).float().sum().backward()
    np.testing.assert_array_equal(p.grad.numpy(), np.full(3, 3.0, np.float32))
    assert p.grad.dtype == np.float32
    p.data[...] = 5.0
    assert p.compute_copy.numpy().astype(np.float32)[0] == 1.0
    arena.sync_copies()
    assert p.compute_copy.numpy().astype(np.float32)[0] == 5.0
    arena.load_state({"p": np.full(3, 7.0, np.float32)})
    assert p.compute_copy.numpy().astype(np.float32)[0] == 7.0


def test_hooks_on_a_parameter_see_the_gradient_of_its_working_copy() -> None:
    p, seen = Parameter(np.ones(2, np.float32), "p"), []
    FlatParameters([p], compute_dtype=bfloat16)
    p.register_hook(lambda g: seen.append(g.dtype))
    (p.compute_copy * p.compute_copy).float().sum().backward()
    assert seen == [np.float32]


def test_without_a_working_dtype_a_parameter_works_as_itself() -> None:
    p = Parameter(np.ones(2, np.float32), "p")
    FlatParameters([p])
    assert p.compute_copy is p


def test_a_working_copy_is_frozen_with_its_parameter() -> None:
    p = Parameter(np.ones(2, np.float32), "p")
    FlatParameters([p], compute_dtype=bfloat16)
    p.requires_grad_(False)
    assert not p.compute_copy.requires_grad
    assert not (p.compute_copy * 2.0).requires_grad
    p.compute_copy.requires_grad_()
    assert p.requires_grad
    assert (p.compute_copy * 2.0).requires_grad


def test_what_was_frozen_since_is_refused_where_decay_would_move_it() -> None:
    p, q = parameters()[:2]
    arena = FlatParameters([p, q])
    p.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'down'.*frozen.*requires_grad_\(\)"):
        arena.collect_grads()
    p.requires_grad_()
    arena.collect_grads()


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: setattr(p.grad, "data", p.grad.data * 2),
        lambda p: setattr(p.grad, "data", np.full((3, 5), 7.0)),
        lambda p: setattr(p, "grad", tensor(np.full((3, 5), 7.0))),
    ],
)
def test_a_gradient_whose_data_was_replaced_reaches_the_step(edit: Callable[[Parameter], None]) -> None:
    p = parameters()[0]
    arena = FlatParameters([p])
    address = p.grad.data.ctypes.data
    p.grad.data[...] = 3.5
    edit(p)
    arena.collect_grads()
    assert (arena.grads[: p.size] == 7.0).all()
    assert p.grad.data.ctypes.data == address
    edit(p)
    arena.zero_grad()
    assert p.grad.data.ctypes.data == address
    (p * 2.0).sum().backward()
    assert (arena.grads[: p.size] == 2.0).all()


def test_a_gradient_of_another_shape_is_refused_by_name() -> None:
    p = parameters()[0]
    arena = FlatParameters([p])
    p.grad.data = np.ones(5, np.float32)
    with pytest.raises(ValueError, match=r"'down': expected a gradient of shape \(3, 5\), found \(5,\)"):
        arena.collect_grads()


def test_a_gradient_that_is_kept_outlives_zero_grad() -> None:
    p = parameters()[0]
    arena = FlatParameters([p])
    (p * 2.0).sum().backward()
    address, kept = p.grad.data.ctypes.data, p.grad
    arena.zero_grad()
    np.testing.assert_array_equal(kept.numpy(), 2.0)
    assert not p.grad.numpy().any()
    assert p.grad.data.ctypes.data == address
    (p * 3.0).sum().backward()
    np.testing.assert_array_equal(kept.numpy(), 2.0)
    np.testing.assert_array_equal(p.grad.numpy(), 3.0)


def test_tensors_of_one_name_are_told_apart_by_number() -> None:
    one = np.ones(2, np.float32)
    given = [Parameter(one, n) for n in ("w", "w.2", "w", "w", "v")] + [tensor(one, requires_grad=True)]
    arena = FlatParameters(given)
    assert list(arena.parameters.values()) == given
    assert list(arena.parameters) == ["w", "w.2", "w.3", "w.4", "v", "5"]
    assert list(FlatParameters(given).parameters) == list(arena.parameters)


def test_a_group_that_gives_a_name_twice_is_refused() -> None:
    a, b = (tensor(np.ones(2), "float32", requires_grad=True) for _ in range(2))
    with pytest.raises(ValueError, match="'w': the same name"):
        SGD([{"params": [("w", a)], "lr": 0.1}, {"params": [("w", b)], "lr": 0.2}])
    with pytest.raises(ValueError, match="'w': the same name"):
        SGD([("w", a), ("w", b)], lr=0.1)


def test_hooks_on_a_working_copy_are_the_parameters() -> None:
    p, seen = Parameter(np.ones(2, np.float32), "p"), []
    FlatParameters([p], compute_dtype=bfloat16)
    handle = p.compute_copy.register_hook(lambda g: seen.append(g.numpy().tolist()) or g * 2.0)
    (p.compute_copy * 3.0 + p).float().sum().backward()
    assert seen == [[4.0, 4.0]]
    np.testing.assert_array_equal(p.grad.numpy(), 8.0)
    assert p.compute_copy.grad is p.grad
    handle.remove()
    (p.compute_copy * 3.0).float().sum().backward()
    assert len(seen) == 1


def test_the_gradient_of_a_working_copy_can_be_asked_for() -> None:
    p, q = (Parameter(np.ones(2, np.float32), n) for n in "pq")
    FlatParameters([p, q], compute_dtype=bfloat16)
    total = (p.compute_copy * 3.0 + p.compute_copy * q.compute_copy).float().sum()
    found = grad(total, [p.compute_copy, q.compute_copy, q], retain_graph=True)
    assert [g.dtype for g in found] == [np.float32] * 3
    assert [g.numpy().tolist() for g in found] == [[4.0, 4.0], [1.0, 1.0], [1.0, 1.0]]
    assert not p.grad.numpy().any()
    with pytest.raises(RuntimeError, match="input 0 was not used"):
        grad((p.compute_copy * 2.0).sum(), [q.compute_copy])


def test_an_arena_without_working_copies_takes_those_of_another_away() -> None:
    p = Parameter(np.ones(2, np.float32), "p")
    FlatParameters([p], compute_dtype="bfloat16")
    FlatParameters([p])
    p.data[...] = 3.0
    np.testing.assert_array_equal(p.compute_copy.numpy(), 3.0)
