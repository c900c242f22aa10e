"""A second GPU of one machine: tensors, gradients across both, a captured step, training on the second alone."""

from __future__ import annotations

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn, optim
from flame_train.engine.backend import get_backend
from flame_train.errors import EnvironmentFault

pytestmark = pytest.mark.gpu


@pytest.fixture
def second() -> str:
    try:
        get_backend("cuda:1")
    except EnvironmentFault as e:
        pytest.skip(f"needs two GPUs: {e}")
    return "cuda:1"


def test_the_first_has_two_names() -> None:
    x = flame.tensor([1.0], device="cuda:0")
    assert x.device == "cuda"
    assert x.to("cuda") is x


def test_one_that_is_not_there_is_named() -> None:
    with pytest.raises(EnvironmentFault, match=r"cuda:99 is not there; this machine has cuda:0 \("):
        flame.tensor([1.0], device="cuda:99")


def test_gradients_cross_from_one_to_the_other(second: str) -> None:
    a = np.random.default_rng(0).normal(size=(65, 33)).astype(np.float32)
    x = flame.tensor(a, device="cuda", requires_grad=True)
    w = flame.tensor(a.T.copy(), device=second, requires_grad=True)
    y = F.gelu(x * 2.0).to(second) @ w
    assert y.device == second
    loss = (y.softmax(-1).to("cuda") * x.detach()[:, :1]).sum()
    flame.backward(loss)
    assert (x.grad.device, w.grad.device) == ("cuda", second)
    host, hw = (flame.tensor(v, requires_grad=True) for v in (a, a.T.copy()))
    flame.backward(((F.gelu(host * 2.0) @ hw).softmax(-1) * host.detach()[:, :1]).sum())
    np.testing.assert_allclose(x.grad.numpy(), host.grad.numpy(), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(w.grad.numpy(), hw.grad.numpy(), rtol=1e-3, atol=1e-4)


def test_tensors_on_two_gpus_do_not_meet(second: str) -> None:
    with pytest.raises(RuntimeError, match="input on cuda, other on cuda:1"):
        flame.tensor([1.0], device="cuda") + flame.tensor([1.0], device=second)


def test_a_step_on_the_second_equals_one_on_the_first(second: str) -> None:
    rng = np.random.default_rng(1)
    images = rng.normal(size=(8, 8, 8, 3)).astype(np.float32)
    losses = {}
    for device in ("cuda", second):
        model = nn.Conv2d(3, 16, 3, padding=1)
        model.init(np.random.default_rng(0), device=device)
        model.requires_grad_()
        optimizer = optim.AdamW(model.named_parameters(), lr=1e-2)
        x = flame.tensor(images, device=device)
        out = flame.tensor(np.zeros((), np.float32), device=device)

        def step(model=model, optimizer=optimizer, x=x, out=out) -> None:
            optimizer.zero_grad()
            loss = F.silu(model(x)).square().mean()
            loss.backward()
            optimizer.step()
            out.copy_(loss.detach())

        captured, losses[device] = flame.capture(step, device), []
        for _ in range(5):
            captured()
            losses[device].append(out.item())
    assert losses[second] == losses["cuda"]
    assert losses["cuda"][-1] < losses["cuda"][0]
