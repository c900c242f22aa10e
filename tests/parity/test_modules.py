"""What is done to modules between steps, beside torch.nn.Module: freezing, tying, removing, putting together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn, optim

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

X = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)


class Ours(nn.Module):
    def __init__(self) -> None:
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: flame.Tensor) -> flame.Tensor:
        return self.b(F.relu(self.a(x)))


class Theirs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.b(torch.relu(self.a(x)))


def pair(tied: bool = False) -> tuple[Ours, Theirs]:
    """Both networks with the same weights, trainable."""
    ours, theirs = Ours(), Theirs()
    ours.init(np.random.default_rng(1))
    if tied:
        ours.b.weight, theirs.b.weight = ours.a.weight, theirs.a.weight
    ours.requires_grad_()
    for name, p in theirs.named_parameters():
        p.data = torch.tensor(dict(ours.weights())[name].numpy().copy())
    return ours, theirs


def stepped(model: Any, x: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    (model(x) * model(x)).mean().backward()
    optimizer.step()


def alike(ours: Ours, theirs: Theirs) -> None:
    found = {name: p.numpy() for name, p in ours.named_parameters()}
    expected = {name: p.detach().numpy() for name, p in theirs.named_parameters()}
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def run(ours: Ours, theirs: Theirs, between: Callable[[Any], None]) -> None:
    """Two steps of one optimizer each, `between` done to the network in the middle."""
    mine, other = optim.AdamW(ours.parameters(), lr=0.1), torch.optim.AdamW(theirs.parameters(), lr=0.1)
    for model, x, optimizer in ((ours, flame.tensor(X), mine), (theirs, torch.tensor(X), other)):
        stepped(model, x, optimizer)
        between(model)
        stepped(model, x, optimizer)
    alike(ours, theirs)


@pytest.mark.parametrize("tied", [False, True])
def test_what_was_frozen_for_a_while_is_trained_again(tied: bool) -> None:
    def frozen_for_a_while(model: Any) -> None:
        before = model.a.weight
        model.requires_grad_(False)
        assert not model.a.weight.requires_grad
        assert not model(flame.tensor(X) if isinstance(model, Ours) else torch.tensor(X)).requires_grad
        model.requires_grad_()
        assert model.a.weight is before

    run(*pair(tied), frozen_for_a_while)


def test_what_was_frozen_after_its_use_gets_no_gradient() -> None:
    for space, tensor in ((flame, flame.tensor), (torch, torch.tensor)):
        made = [tensor(v, requires_grad=True) for v in ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0])]
        kept, frozen, held = made
        (held * 2).sum().backward()
        loss = (kept * frozen * held).sum()
        frozen.requires_grad_(False)
        held.requires_grad_(False)
        loss.backward()
        assert frozen.grad is None, space
        assert kept.grad.tolist() == [15.0, 24.0]
        assert held.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("tied", [False, True])
def test_asking_again_for_gradients_changes_nothing(tied: bool) -> None:
    run(*pair(tied), lambda model: model.requires_grad_())


def test_tied_weights_stay_one() -> None:
    ours, theirs = pair(tied=True)
    assert ours.b.weight is ours.a.weight
    alike(ours, theirs)
    ours.requires_grad_(False)
    theirs.requires_grad_(False)
    assert ours.b.weight is ours.a.weight


def test_the_weights_of_two_networks_fit_one_optimizer() -> None:
    """Their names are alike; in one list, and as groups."""
    for grouped in (False, True):
        (a, ta), (b, tb) = pair(), pair()
        rates = {"lr": 0.01}
        mine: list[Any] = [*a.parameters(), *b.parameters()]
        other: list[Any] = [*ta.parameters(), *tb.parameters()]
        if grouped:
            mine = [{"params": a.parameters()}, {"params": b.parameters(), **rates}]
            other = [{"params": ta.parameters()}, {"params": tb.parameters(), **rates}]
        made, theirs = optim.AdamW(mine, lr=0.1), torch.optim.AdamW(other, lr=0.1)
        for _ in range(3):
            stepped(lambda x, a=a, b=b: b(a(x)), flame.tensor(X), made)
            stepped(lambda x, a=ta, b=tb: b(a(x)), torch.tensor(X), theirs)
        alike(a, ta)
        alike(b, tb)
        assert len(made.state_dict()) == 3 + 2 * 8  # three numbers, and two moments of each weight


def test_a_part_under_two_names_is_trained_once() -> None:
    def twice(model: Any) -> Any:
        model.b = model.a
        return model.requires_grad_()

    ours, theirs = pair()
    run(twice(ours), twice(theirs), lambda model: None)
    assert list(ours.shapes()) == list(theirs.state_dict())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: delattr(m, "b"),
        lambda m: setattr(m, "b", None),
        lambda m: setattr(m, "a", m.b),
        lambda m: setattr(m.a, "bias", None),
        lambda m: delattr(m.a, "bias"),
    ],
)
def test_what_was_removed_or_replaced_is_no_weight(change: Callable[[Any], None]) -> None:
    ours, theirs = pair()
    change(ours)
    change(theirs)
    assert list(ours.shapes()) == list(theirs.state_dict())
    assert [name for name, _ in ours.weights()] == list(theirs.state_dict())
    alike(ours, theirs)


def test_what_is_no_module_takes_the_place_of_one() -> None:
    """torch.nn.Module refuses a function in the place of a part that is there."""
    ours, _ = pair()
    ours.b = F.relu
    assert list(ours.shapes()) == ["a.weight", "a.bias"]
    assert ours(flame.tensor(X)).numpy().min() == 0


def test_a_part_in_a_weights_place_and_a_weight_in_a_parts() -> None:
    ours, _ = pair()
    ours.b.bias = nn.Linear(2, 3)
    ours.a = nn.param(5)
    assert list(ours.shapes()) == ["a", "b.weight", "b.bias.weight", "b.bias.bias"]
    with pytest.raises(RuntimeError, match="declared but not loaded"):
        _ = ours.a


def test_removing_what_is_not_there_is_an_error() -> None:
    for model in pair():
        with pytest.raises(AttributeError, match="c"):
            del model.c


def test_parts_in_a_row_can_be_replaced_by_name() -> None:
    parts = nn.ModuleList([nn.Linear(2, 3), None, nn.Linear(3, 4)])
    new = nn.Linear(3, 5)
    setattr(parts, "2", new)
    assert list(parts)[1:] == [None, new]
    assert parts[-1] is new
    assert parts[1:] == [None, new]
    assert parts.shapes() == {"0.weight": (3, 2), "0.bias": (3,), "2.weight": (5, 3), "2.bias": (5,)}
