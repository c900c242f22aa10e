"""Every kind of adapter on the card gives what it gives on the CPU: outputs, gradients and merged weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.adapters.kinds import ADAPTERS
from flame_train.engine import functional as F
from flame_train.engine import nn, tensor

pytestmark = pytest.mark.gpu

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("lora", {}),
    ("locon", {"conv_rank": 4}),
    ("loha", {}),
    ("lokr", {}),
    ("lokr", {"factor": 8, "decompose_both": True}),
    ("lokr", {"full_matrix": True}),
    ("dora", {}),
    ("dora", {"wd_on_output": True}),
]


class Net(nn.Module):
    """A convolution, and linear layers small enough for their merged weight to be kept and too large for that."""

    def __init__(self) -> None:
        self.conv = nn.Conv2d(16, 32, 3, padding=1)
        self.small = nn.Linear(32, 64)
        self.large = nn.Linear(64, 65536, bias=False)

    def forward(self, x: Any) -> Any:
        return self.large(F.silu(self.small(F.silu(self.conv(x)))))


def results(device: str, dtype: str, kind: str, keys: dict[str, Any]) -> dict[str, np.ndarray]:
    net = Net()
    net.init(np.random.default_rng(0), dtype, device)
    attached = attach(net, ["conv", "small", "large"], rank=8, alpha=4.0, seed=1, kind=ADAPTERS[kind](**keys))
    rng = np.random.default_rng(5)
    xp = attached.parameters()[0].backend.xp
    for p in attached.parameters():
        values = p.numpy()
        new = (1.0 + 0.1 * rng.standard_normal(p.shape)) * np.where(values == 0, 0.05, values)
        p.data[...] = xp.asarray(new.astype(np.float32))
    x = tensor(np.random.default_rng(2).standard_normal((2, 8, 8, 16)).astype(np.float32), dtype, device)
    y = net(x)
    y.float().square().mean().backward()
    found = {p.name: p.grad.numpy() for p in attached.parameters() if p.grad is not None}
    assert len(found) == len(attached.parameters())
    return found | {"y": y.float().numpy()} | {n: w.float().numpy() for n, w in attached.merged()}


@pytest.mark.parametrize(("dtype", "near"), [("float32", 2e-5), ("bfloat16", 0.06)])
@pytest.mark.parametrize(("kind", "keys"), KINDS, ids=str)
def test_the_card_computes_what_the_cpu_does(kind: str, keys: dict[str, Any], dtype: str, near: float) -> None:
    want, found = (
        results(device, kind=kind, keys=keys, dtype=d) for device, d in (("cpu", "float32"), ("cuda", dtype))
    )
    for name, expected in want.items():
        assert np.abs(found[name] - expected).max() <= near * np.abs(expected).max(), name
