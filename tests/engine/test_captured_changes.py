"""A captured step does not outlive a change of the modules that it recorded: how often Python runs it, on shapes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.adapters.attach import Attached, at_strength, attach
from flame_train.engine import nn
from flame_train.engine.nn import allocate
from flame_train.engine.nn.quantized import Storage
from flame_train.engine.optim.flat_parameters import FlatParameters
from flame_train.engine.shape_run import shape_run

REPLAYED = 0
RECORDED = 2
"""An eager run and the recording."""


class Net(nn.Module):
    def __init__(self) -> None:
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def fusable_groups(self) -> Any:
        return [(self.first, self.second)]

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


class Step:
    """A captured forward pass, and how often Python ran it."""

    def __init__(self, net: Net) -> None:
        x, self.count = flame.tensor(np.zeros((4, 32), np.float32), device="cuda"), 0

        def forward() -> None:
            self.count += 1
            net(x)

        self._captured = flame.capture(forward, "cuda")
        assert self.runs() == RECORDED

    def runs(self) -> int:
        """Runs in Python that three calls take."""
        before = self.count
        for _ in range(3):
            self._captured()
        return self.count - before


@pytest.fixture
def net() -> Iterator[Net]:
    with shape_run():
        net = Net()
        allocate(net, dtype="fp32", device="cuda")
        yield net


def attached(net: Net, name: str = "first") -> Attached:
    return attach(net, [name], rank=4, alpha=4.0, seed=1)


def replace_weight(net: Net) -> None:
    net.first.weight = net.second.weight


def replace_part(net: Net) -> None:
    new = nn.Linear(32, 32)
    allocate(new, dtype="fp32", device="cuda")
    net.second = new


CHANGES: dict[str, Callable[[Net], Any]] = {
    "an adapter attached": attached,
    "loaded anew": lambda net: allocate(net, dtype="fp32", device="cuda"),
    "dropped and loaded": lambda net: (net.unload(), allocate(net, dtype="fp32", device="cuda")),
    "a weight replaced": replace_weight,
    "a part replaced": replace_part,
    "stored in fewer bits": lambda net: net.first.quantize(Storage("fp8", False)),
    "cast": lambda net: net.to(dtype="bf16"),
    "packed": lambda net: net.pack_contiguous(),
    "made trainable": lambda net: net.requires_grad_(),
    "told that training is over": lambda net: net.eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_network_is_captured_again(net: Net, change: Callable[[Net], Any]) -> None:
    step = Step(net)
    change(net)
    assert step.runs() == RECORDED
    assert step.runs() == REPLAYED


def test_an_adapter_removed_or_given_another_strength_is_captured_again(net: Net) -> None:
    lora = attached(net)
    step = Step(net)
    with at_strength(lora, 0.5):
        assert step.runs() == RECORDED
    assert step.runs() == RECORDED
    lora.detach()
    assert step.runs() == RECORDED


def test_parameters_that_an_optimizer_moves_are_captured_again(net: Net) -> None:
    lora = attached(net)
    step = Step(net)
    arena = FlatParameters(lora.parameters())
    assert step.runs() == RECORDED
    assert arena.size == 2 * 4 * 32


def test_what_is_as_before_is_only_replayed(net: Net) -> None:
    """Adapters that were off for a while, and another network that changes, record nothing again."""
    lora, other = attached(net), Net()
    step = Step(net)
    with lora.off():
        pass
    net.eval()
    net.train()
    allocate(other, dtype="fp32", device="cuda")
    attached(other)
    assert step.runs() == REPLAYED


def test_a_step_that_switches_adapters_itself_is_replayed(net: Net) -> None:
    lora = attached(net)
    x, runs = flame.tensor(np.zeros((4, 32), np.float32), device="cuda"), []

    def both() -> None:
        runs.append(1)
        net(x)
        with lora.off():
            net(x)

    step = flame.capture(both, "cuda")
    other = Step(net)
    for _ in range(4):
        step()
        assert other.runs() == REPLAYED
    assert len(runs) == RECORDED


def test_a_dropped_network_is_not_kept_alive(net: Net) -> None:
    """Memory of weights that were unloaded is free, though a captured step used them."""
    step = Step(net)
    memory = weakref.ref(net.first.weight.data)
    net.unload()
    assert memory() is None
    assert step.count == RECORDED
