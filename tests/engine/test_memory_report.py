"""The memory report: what ops make, what lives at the peak, what a graph keeps, and that a step leaves nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.memory_report import memory_report, saved_by_op

KIB = 1024


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leaf(*shape: int) -> flame.Tensor:
    return flame.tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32), requires_grad=True)


def test_counts_what_ops_make_and_forgets_what_is_freed(no_collector: None) -> None:
    x = leaf(256)  # 1 KiB
    with memory_report() as report:
        y = x.exp()
        assert report.live == KIB
        z = y.reshape(16, 16)  # a view: no memory of its own
        assert report.live == KIB
        w = z.exp() + z
        assert report.live == 2 * KIB + KIB  # exp's result stays for its gradient
        del y, z, w
    assert report.live == 0
    assert report.peak == 3 * KIB
    rows = {(r.op, r.phase): r for r in report.rows()}
    assert rows["exp", "forward"].calls == 2
    assert rows["exp", "forward"].made == 2 * KIB
    assert rows["exp", "forward"].at_peak == 2 * KIB
    assert rows["reshape", "forward"].made == 0
    assert "exp" in report.table()


def test_what_an_op_is_given_is_not_what_it_makes(no_collector: None) -> None:
    x = leaf(1000)
    with memory_report() as report:
        y = x.reshape(10, 100)  # a view of memory that no op made
        z = y[1:].T
        assert report.live == 0
        e = z.exp()
        assert report.live == 9 * 100 * 4
        del y, z, e
    assert (report.live, report.peak) == (0, 9 * 100 * 4)


def test_what_is_kept_beside_the_results_is_made_as_well(no_collector: None) -> None:
    x = leaf(4, 8)
    with memory_report() as report:
        y = F.layer_norm(x, (8,))
        kept = sum(saved_by_op(y).values())
        assert kept > 0
        assert report.live == y.data.nbytes + kept  # the input is a leaf: all that is kept was made
        del y
    assert report.live == 0


def test_a_step_leaves_nothing_without_the_collector(no_collector: None) -> None:
    x, w = leaf(8, 16), leaf(16, 16)
    with memory_report() as report:
        for _ in range(3):
            h = F.gelu(F.linear(F.layer_norm(x, (16,)), w))
            flame.checkpoint(lambda a: F.linear(a, w).square(), h).mean().backward()
            del h
            assert report.live == 0
    assert {r.phase for r in report.rows()} == {"forward", "backward"}


def test_what_a_hook_refers_to_goes_with_the_graph(no_collector: None) -> None:
    x = leaf(8)
    with memory_report() as report:
        for _ in range(3):
            mask, y = x.detach().exp(), x.square()
            handle = y.register_hook(lambda g, mask=mask: g * mask)
            y.sum().backward()
            del mask, y
            assert report.live == 0
    handle.remove()  # of hooks that are gone


def test_a_hook_that_refers_to_its_own_tensor_goes_with_the_graph(no_collector: None) -> None:
    x = leaf(8)
    with memory_report() as report:
        for _ in range(3):
            y = x.square()
            y.register_hook(lambda g, y=y: g * y.detach())
            y.sum().backward()
            del y
            assert report.live == 0


def test_checkpointing_lowers_the_peak(no_collector: None) -> None:
    x, w = leaf(64, 64), leaf(64, 64)

    def block(a: flame.Tensor) -> flame.Tensor:
        return F.gelu(F.linear(F.gelu(F.linear(a, w)), w))

    def peak(wrapped: bool) -> int:
        with memory_report() as report:
            h = x
            for _ in range(6):
                h = flame.checkpoint(block, h) if wrapped else block(h)
            h.sum().backward()
        return report.peak

    assert peak(True) < 0.6 * peak(False)


def test_what_a_checkpoint_was_given_goes_as_the_backward_pass_goes_by(no_collector: None) -> None:
    """Though the loss, and with it the graph's nodes, is there to the end."""
    x, seen = leaf(256), []

    def gone(g: flame.Tensor) -> None:
        seen.append(report.live)

    with memory_report() as report:
        first = x.exp()
        first.register_hook(gone)
        h = first
        for _ in range(4):
            h = flame.checkpoint(F.sin, h)
        loss = h.sum()
        del first, h
        loss.backward()
    assert seen[0] <= 3 * KIB + loss.data.nbytes  # exp's result, the gradient on its way, a gradient just used


def test_saved_by_op_says_what_a_graph_keeps() -> None:
    x, w = leaf(8, 16), flame.tensor(np.ones((16, 16), np.float32), requires_grad=True)
    y = F.linear(x, w)  # keeps its operands, which are leaves
    assert saved_by_op(y) == {}
    z = y.exp().square().sum()  # exp keeps its result, which square keeps too: once
    assert saved_by_op(z) == {"exp": 8 * 16 * 4}
    frozen = flame.Frozen(np.ones((16, 16), np.float32))
    f = F.linear(leaf(8, 16), frozen).sum()
    assert saved_by_op(f) == {"linear": frozen.data.nbytes}
    assert saved_by_op(f, besides=[frozen]) == {}
    c = flame.checkpoint(lambda a: a.tanh().exp(), y).sum()
    assert saved_by_op(c) == {"checkpoint": 8 * 16 * 4}
