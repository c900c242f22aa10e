"""What is compiled ahead is what a step asks for: on a stand-in for a GPU, the kernels that a run on shapes foresaw."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend.cuda.kernel_requests import KernelRequests
from flame_train.engine.backend.cuda.made_once import MadeOnce, started
from flame_train.engine.dtype import bfloat16
from flame_train.engine.shape_run import H100, shape_run


def step() -> None:
    """Attention behind a norm, a convolution behind another, and their gradients, in bf16."""

    def on_gpu(*shape: int) -> flame.Tensor:
        return flame.tensor(np.zeros(shape, bfloat16), device="cuda").requires_grad_()

    x, w = on_gpu(2, 64, 128), on_gpu(128, 128)
    h = F.linear(F.layer_norm(x, (128,), on_gpu(128), on_gpu(128), 1e-5), w)
    heads = h.reshape(2, 64, 2, 64).transpose(1, 2)
    h = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(2, 8, 8, 128)
    h = F.conv2d(
        F.silu(F.group_norm(h, 32, on_gpu(128), on_gpu(128), layout="NHWC")),
        on_gpu(128, 128, 3, 3),
        padding=1,
        layout="NHWC",
    )
    h.float().square().mean().backward()


def test_a_run_on_shapes_asks_for_every_kernel_of_the_step(gpu: Any) -> None:
    with shape_run(H100) as run:
        step()
    foreseen = run.kernel_requests
    step()
    modules = gpu.kernels._modules
    assert modules._generated
    assert set(modules._generated) <= set(foreseen.texts)
    assert set(modules._functions) <= {request[:3] for request in foreseen.files}


def test_what_is_compiled_ahead_is_not_compiled_again(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with shape_run(H100) as run:
        step()
    modules, compiled = gpu.kernels._modules, []
    usual = modules._of_text
    monkeypatch.setattr(
        modules, "_of_text", lambda text, kernel: compiled.append((text, kernel)) or usual(text, kernel)
    )
    KernelRequests((), run.kernel_requests.texts, ()).compile(modules, None, lambda call: None)
    for text, kernel in run.kernel_requests.texts:
        modules.generated(text, kernel)  # waits for it
    step()
    assert sorted(compiled) == sorted(run.kernel_requests.texts)


def test_each_value_is_made_by_the_first_to_ask() -> None:
    made, values, together = [], MadeOnce[int, object](), threading.Barrier(8)

    def ask(i: int) -> object:
        together.wait()
        return values.of(i % 2, lambda: made.append(i) or object())

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert len(made) == 2
    assert found[0::2] == [values[0]] * 4
    assert found[1::2] == [values[1]] * 4


def test_calls_wait_for_those_they_come_after() -> None:
    begin, order = threading.Event(), list[str]()
    first = started([lambda: begin.wait(30) and order.append("ours")] * 4)
    second = started([lambda: order.append("CuPy's")], 4, first)
    assert not any(call.done() for call in second)
    begin.set()
    second[0].result(30)
    assert order == [*["ours"] * 4, "CuPy's"]


def test_what_fails_is_told_and_made_again_for_the_next() -> None:
    values = MadeOnce[str, int]()

    def fails() -> int:
        raise ValueError("a mistake")

    done = threading.Event()
    started([lambda: values.of("a", fails), done.set])
    assert done.wait(30)
    with pytest.raises(ValueError, match="a mistake"):
        values.of("a", fails)
    assert values.of("a", lambda: 3) == values.of("a", fails) == 3
