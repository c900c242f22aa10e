"""Ambient state: what a block changes is changed inside it alone, in this thread alone."""

from __future__ import annotations

import threading

import numpy as np
import pytest

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


def test_the_precision_of_fp32_products_is_set_from_now_on_or_for_a_block() -> None:
    assert flame.get_float32_matmul_precision() == "highest"
    with flame.set_float32_matmul_precision("high"):
        assert flame.get_float32_matmul_precision() == mode().float32_precision == "high"
        seen = []
        thread = threading.Thread(target=lambda: seen.append(flame.get_float32_matmul_precision()))
        thread.start()
        thread.join()
        assert seen == ["highest"]
    assert flame.get_float32_matmul_precision() == "highest"
    flame.set_float32_matmul_precision("high")
    try:
        assert flame.get_float32_matmul_precision() == "high"
    finally:
        flame.set_float32_matmul_precision("highest")


def test_another_word_for_a_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 'highest' or 'high', got 'medium'"):
        flame.set_float32_matmul_precision("medium")  # type: ignore[arg-type]
    assert flame.get_float32_matmul_precision() == "highest"
