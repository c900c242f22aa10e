"""A step whose recording found no memory, and was begun anew, is the step that was recorded at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flame_train.engine import no_grad
from flame_train.tools import bench
from flame_train.training.step import batch_losses
from tests.recorded_graphs import bare, recording

Figures = list[np.ndarray[Any, Any]]


def prepared() -> bench.Prepared:
    """Weights wait on the host, as do blocks' inputs, and dropout draws numbers of its own."""
    how: dict[str, Any] = {"precision": "fp32", "checkpointing": "offload", "device": "cpu"}
    settings = ("lora.dropout=0.3", "model.offload=1.0")
    return bench.prepare(bench.BenchCase("flux-tiny", 64, 2, 2, settings=settings, **how))


def figures(p: bench.Prepared, step: Callable[[], None]) -> Figures:
    """Loss, gradients' norm and weights after each of four steps. Between two of them the network is used otherwise."""
    s, found = p.state, list[np.ndarray[Any, Any]]()
    for number in range(4):
        p.batch.step[...] = number
        step()
        found += [bare(a).copy() for a in (s.figures, s.optimizer.arena.values)]
        with no_grad():
            found.append(bare(batch_losses(s.denoiser, s.objective, s.dtype, 1, p.batch)[0].data))
    return found


@pytest.fixture(scope="module")
def expected() -> Figures:
    p = prepared()
    return figures(p, p.step)


@pytest.fixture(scope="module")
def length(expected: Figures) -> int:
    """Calls of a step that is recorded at once, which computes what Python does."""
    with pytest.MonkeyPatch.context() as patch:
        tape, p = recording(patch), prepared()
        for found, wanted in zip(figures(p, p.backend.capture(p.step)), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
        return tape.length


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_a_step_that_is_recorded_again_computes_the_same(
    share: float, length: int, expected: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ended in the forward pass, in the backward pass, or when the graph was made of what was recorded."""
    tape, p = recording(monkeypatch), prepared()
    tape.ends_after = int(share * length)
    for found, wanted in zip(figures(p, p.backend.capture(p.step)), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert (tape.ends_after, tape.length) == (None, length)
