"""GPUs by number: the names that are devices, and what is said of one that is not there."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import flame_train.engine as flame
from flame_train.cli import app
from flame_train.engine import backend as backends
from flame_train.engine.backend import cuda
from flame_train.engine.backend.cuda import device
from flame_train.engine.mode import device as on_device
from flame_train.errors import EnvironmentFault


class Runtime:
    """A driver with two GPUs."""

    def getDeviceCount(self) -> int:  # noqa: N802  # CUDA's names
        return 2

    def getDeviceProperties(self, index: int) -> dict[str, Any]:  # noqa: N802
        return {"name": f"Card {index}".encode(), "major": 9, "minor": 0}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = type("cupy", (), {"cuda": type("cuda", (), {"runtime": Runtime()})})
    monkeypatch.setitem(sys.modules, "cupy", namespace)
    monkeypatch.setattr(cuda, "_STATE", {})


@pytest.mark.parametrize("name", ["cuda:2", "cuda:17"])
def test_a_gpu_that_is_not_there_is_named_with_those_that_are(two_gpus: None, name: str) -> None:
    match = rf"{name} is not there; this machine has cuda:0 \(Card 0\), cuda:1 \(Card 1\)"
    for use in (backends.get_backend, flame.tensor([1.0]).to, lambda n: flame.tensor([1.0], device=n)):
        with pytest.raises(EnvironmentFault, match=match):
            use(name)
    with on_device(name), pytest.raises(EnvironmentFault, match=match):
        flame.tensor([1.0])


def test_a_gpu_that_is_there_is_taken(two_gpus: None) -> None:
    assert device._import_cupy(1) is sys.modules["cupy"]


@pytest.mark.parametrize("name", ["cuda:", "cuda:-1", "cuda:x", "gpu", "cuda1"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected 'cpu', 'cuda' or a GPU by its number"):
        backends.get_backend(name)
    found = CliRunner().invoke(app, ["doctor", "--device", name])
    assert found.exit_code == 2
    assert "--device" in found.output


def test_one_loss_needs_no_list() -> None:
    x, y = (flame.tensor(np.array(v), requires_grad=True) for v in ([1.0, 2.0], [3.0, 5.0]))
    flame.backward((x * y).sum())
    assert x.grad.tolist() == [3.0, 5.0]
    flame.backward(x * y, flame.tensor(np.array([1.0, 10.0])))
    assert y.grad.tolist() == [2.0, 22.0]
    with pytest.raises(TypeError, match="expected a Tensor or a list of them, got int"):
        flame.backward(3)


def test_device_and_dtype_in_one_call() -> None:
    x = flame.tensor([1.5, 2.5], requires_grad=True)
    y = x.to("cpu", "float64")
    assert (y.dtype, y.device) == (np.float64, "cpu")
    y.sum().backward()
    assert x.grad.dtype == np.float32
