"""The memory report: what ops make, what lives at the peak, what a graph keeps, and that a step leaves nothing."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.memory_report import memory_report, saved_by_op
from flame_train.engine.mode import use
from flame_train.engine.shape_run import shape_run
from flame_train.errors import ShapeError

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


def test_what_comes_and_goes_inside_an_op_counts() -> None:
    """Attention's reference makes 64 MiB of scores, and works on them in more memory; its result is 1 MiB."""
    x = leaf(1, 4, 2048, 32).detach()
    with memory_report() as report:
        y = F.scaled_dot_product_attention(x, x, x)
    scores = 4 * 2048 * 2048 * 4
    (row,) = [r for r in report.rows() if r.op == "scaled_dot_product_attention"]
    assert row.made < 2 << 20  # the result, and each row's sum
    assert row.passing >= scores
    assert report.peak == row.at_peak
    assert scores < report.peak == row.made + row.passing < 6 * scores
    assert report.live == y.data.nbytes


def test_work_on_a_gpu_is_what_its_pool_counts() -> None:
    with shape_run() as run:
        x = flame.empty(1, 4, 2048, 32, device="cuda")
        begun = run.live_bytes
        with memory_report() as report, use(scaled_dot_product_attention="reference"):
            F.scaled_dot_product_attention(x, x, x)
        assert report.peak > 4 * 2048 * 2048 * 4
        assert abs(report.peak - (run.peak_bytes - begun)) <= 1 << 16


def test_work_counts_on_top_of_what_lives() -> None:
    x = leaf(1 << 18)  # 1 MiB
    with memory_report() as report:
        y = x.exp()
        z = F.softmax(y.reshape(512, 512), -1).sum()
        z.backward()
    rows = {(r.op, r.phase): r for r in report.rows()}
    assert rows["exp", "forward"].passing == 0  # all that it took is its result
    assert rows["softmax", "forward"].passing > 0
    assert report.peak == sum(r.at_peak for r in report.rows())
    assert y.data.nbytes < report.peak


def test_ops_in_a_checkpoint_count_their_work_once() -> None:
    x = leaf(512, 512)

    def peak(wrapped: bool) -> int:
        with memory_report() as report:
            y = flame.checkpoint(lambda a: F.softmax(a, -1), x) if wrapped else F.softmax(x, -1)
            y.backward(flame.ones_like(y))
        rows = {(r.op, r.phase): r for r in report.rows()}
        assert not wrapped or rows["checkpoint", "backward"].passing == 0
        return report.peak

    assert peak(True) <= peak(False) + x.data.nbytes


def test_an_op_that_fails_leaves_no_watch() -> None:
    x = leaf(8, 4)
    with memory_report() as report:
        with pytest.raises(ShapeError):
            x @ leaf(3, 2)
        x.exp()
    assert report.live == 0
    assert not tracemalloc.is_tracing()
    with pytest.raises(ShapeError), memory_report():
        x @ leaf(3, 2)
    assert not tracemalloc.is_tracing()


def test_the_watch_of_a_user_goes_on() -> None:
    tracemalloc.start()
    try:
        with memory_report():
            leaf(8).exp()
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()


def test_blocks_of_watching_lie_in_one_another() -> None:
    cpu, kept = get_backend("cpu"), []
    outer = cpu.watch_peak()
    np.ones(1 << 20, np.uint8)
    inner = cpu.watch_peak()
    kept.append(np.ones(1 << 22, np.uint8))
    found = inner()
    assert abs(found - (1 << 22)) < KIB * 16
    kept.clear()
    np.ones(1 << 20, np.uint8)
    assert abs(outer() - (1 << 22)) < KIB * 16
    assert not tracemalloc.is_tracing()
