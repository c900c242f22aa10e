"""Work side_stream the main line of a captured step: when it may begin, and who waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend.cuda.host_copies import SideStream
from flame_train.engine.dtype import bfloat16
from flame_train.engine.mode import capturing
from flame_train.engine.optim import FlatParameters
from flame_train.engine.tensors.tensor import Parameter
from tests.engine.backend.lines import Cuda, Line, surely_done


@pytest.fixture
def side_stream() -> SideStream:
    main = Line()
    main.use()
    return SideStream(Cuda(), main)


def before(side_stream: SideStream, line: Line, what: str) -> set[str]:
    """All that is certain to be done when `what` of a line begins."""
    return surely_done([side_stream._main, side_stream._side], line, what)


def launch(name: str) -> Any:
    return lambda: Line.current.queued.append(name)


def test_outside_a_capture_all_is_in_line(side_stream: SideStream) -> None:
    side_stream.run(launch("a"))
    assert side_stream._main.queued == ["a"]
    side_stream.join()
    assert side_stream._main.queued == ["a"]


def test_a_piece_comes_after_what_was_before_it_and_what_follows_does_not_wait(side_stream: SideStream) -> None:
    with capturing():
        launch("first")()
        side_stream.run(launch("a"))
        launch("second")()
        assert before(side_stream, side_stream._side, "a") == {"first"}
        assert before(side_stream, side_stream._main, "second") == {"first"}
        assert Line.current is side_stream._main
        side_stream.join()
        launch("third")()
        assert before(side_stream, side_stream._main, "third") == {"first", "a", "second"}


def test_the_next_piece_waits_for_the_last_and_all_after_it_too(side_stream: SideStream) -> None:
    with capturing():
        side_stream.run(launch("a"))
        launch("main")()
        side_stream.run(launch("b"))
        launch("after")()
        assert before(side_stream, side_stream._side, "b") == {"a", "main"}
        assert before(side_stream, side_stream._main, "after") == {"a", "main"}


def test_a_piece_that_fails_leaves_the_main_line_current(side_stream: SideStream) -> None:
    def fails() -> None:
        raise ValueError("no such kernel")

    with capturing(), pytest.raises(ValueError, match="no such kernel"):
        side_stream.run(fails)
    assert Line.current is side_stream._main


def step(gpu: Any, x: flame.Tensor, factors: list[flame.Tensor], uses: int) -> list[str]:
    """What is put side_stream and joined in a captured pass backward through `uses` layers with the same factors."""
    told = list[str]()

    class Watched:
        def run(self, launch: Any, *arrays: Any) -> None:
            told.append("put")

        def join(self) -> None:
            told.append("join")

    gpu.kernels.side_stream = Watched()
    frozen, cotangent = weight(64, 64), weight(*x.shape)
    with capturing():
        y = x
        for _ in range(uses):
            y = F.lora_linear(y, frozen, None, *factors, 1.0)
        y.backward(cotangent)
    return told


def weight(*shape: int) -> flame.Tensor:
    return flame.tensor(np.zeros(shape), "bfloat16", "cuda")


def leaves(dtype: str = "float32") -> list[flame.Tensor]:
    return [flame.tensor(np.zeros(s), dtype, "cuda").requires_grad_() for s in ((16, 64), (64, 16))]


def parameters() -> list[Parameter]:
    return [Parameter(f.data, str(f.shape)) for f in leaves()]


def working(of: list[Parameter]) -> list[flame.Tensor]:
    """The copies that training computes with, of parameters that have gradients to add to."""
    FlatParameters(of, compute_dtype=bfloat16)
    return [f.compute_copy for f in of]


def test_factors_gradients_go_beside_once_there_is_something_to_add_to(gpu: Any) -> None:
    x = weight(1024, 64)
    assert step(gpu, x, working(parameters()), 1) == ["put", "join"]
    assert step(gpu, x, leaves("bfloat16"), 1) == ["join"]


def test_a_second_contribution_in_one_pass_waits_for_the_first(gpu: Any) -> None:
    assert step(gpu, weight(1024, 64), working(parameters()), 2) == ["put", "join", "join", "put", "join"]


def test_who_watches_gradients_gets_them_at_once(gpu: Any) -> None:
    watched = parameters()
    watched[0].register_hook(lambda g: None)
    assert "put" not in step(gpu, weight(1024, 64), working(watched), 1)


def test_what_is_converted_on_arrival_comes_in_line(gpu: Any) -> None:
    rounded = leaves("bfloat16")
    for f in rounded:
        f.grad = flame.tensor(np.zeros(f.shape, np.float32), device="cuda")
    assert "put" not in step(gpu, weight(1024, 64), rounded, 1)
