"""Ambient state: what a block changes is changed inside it alone, in this thread alone."""

from __future__ import annotations

import threading

import numpy as np

import flame_train.engine as flame
from flame_train.engine.mode import deterministic, device, enable_grad, mode, no_grad


def test_blocks_nest_and_end() -> None:
    before = mode()
    with no_grad():
        assert not mode().grad
        with enable_grad():
            assert mode().grad
        assert not mode().grad
    with deterministic(not before.deterministic), device("cuda"):
        assert (mode().deterministic, mode().device) == (not before.deterministic, "cuda")
        with device("cpu"):
            assert flame.tensor(np.ones(2)).device == mode().device == "cpu"
    assert mode() == before
    assert before.device == "cpu"


def test_a_gradient_is_recorded_again_inside() -> None:
    x = flame.tensor(np.array([3.0]), requires_grad=True)
    with no_grad():
        assert not (x * x).requires_grad
        with enable_grad():
            y = x * x
    y.sum().backward()
    assert x.grad.item() == 6.0


def test_another_thread_has_its_own() -> None:
    seen = []
    with no_grad():
        thread = threading.Thread(target=lambda: seen.append(mode().grad))
        thread.start()
        thread.join()
    assert seen == [True]
