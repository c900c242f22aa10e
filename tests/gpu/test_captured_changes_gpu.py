"""A captured step whose network has changed computes what the changed network computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flame_train.adapters.attach import attach, attach_factors
from flame_train.engine import capture, nn, no_grad, tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.nn.quantized import Storage
from flame_train.quickstart.first_run import run as quickstart

pytestmark = pytest.mark.gpu

NAMES = ["first", "second"]


class Net(nn.Module):
    def __init__(self) -> None:
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x))


class Captured:
    """A network's output by a captured step, and by an eager one."""

    def __init__(self) -> None:
        self.net, backend = Net(), get_backend("cuda")
        self.net.init(np.random.default_rng(1), "bf16", "cuda")
        self.x = tensor(np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32), device="cuda").to("bf16")
        self.out = backend.empty((8, 64), self.x.dtype)
        self.step = capture(self._forward, "cuda")

    def _forward(self) -> None:
        with no_grad():
            self.out[...] = self.net(self.x).data

    def outputs(self) -> np.ndarray:
        """The captured step's, equal to the eager one's at each of three calls."""
        with no_grad():
            expected = self.net(self.x).float().numpy()
        for _ in range(3):
            self.out[...] = 0
            self.step()
            np.testing.assert_array_equal(get_backend("cuda").to_host(self.out).astype(np.float32), expected)
        return expected


def trained(net: Net, strength: float = 1.0) -> Any:
    made = attach(net, NAMES, rank=4, alpha=4.0, seed=1)
    rng = np.random.default_rng(3)
    for p in made.parameters():
        p.backend.write(p.data, rng.standard_normal(p.shape).astype(np.float32))
    factors = {name: adapter.factors() for name, adapter in made.adapters.items()}
    made.detach()
    return attach_factors(net, factors, strength)


def reload(net: Net) -> None:
    net.unload()
    net.init(np.random.default_rng(9), "bf16", "cuda")


def replace_part(net: Net) -> None:
    net.second = nn.Linear(64, 64)
    net.second.init(np.random.default_rng(9), "bf16", "cuda")


def merge(net: Net) -> None:
    made = trained(net)
    merged = dict(made.merged())
    made.detach()
    net.first.weight, net.second.weight = merged["first.weight"], merged["second.weight"]


CHANGES: dict[str, Callable[[Net], Any]] = {
    "attached": trained,
    "half as strong": lambda net: trained(net, 0.5),
    "merged": merge,
    "loaded anew": reload,
    "a part replaced": replace_part,
    "stored in fewer bits": lambda net: net.first.quantize(Storage("fp8", False)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_changed_network_is_what_is_computed(change: Callable[[Net], Any]) -> None:
    captured = Captured()
    before = captured.outputs()
    change(captured.net)
    assert not np.array_equal(captured.outputs(), before)


def test_a_removed_adapter_leaves_the_bits_of_before() -> None:
    captured = Captured()
    before = captured.outputs()
    made = trained(captured.net)
    with_adapter = captured.outputs()
    made.detach()
    np.testing.assert_array_equal(captured.outputs(), before)
    assert not np.array_equal(with_adapter, before)


def test_quickstart_says_that_something_was_learnt(tmp_path: Path) -> None:
    losses = quickstart(tmp_path / "quickstart", "cuda")["held_out_loss"]
    assert losses["new"]["after"] < 0.6 * losses["new"]["before"], losses
