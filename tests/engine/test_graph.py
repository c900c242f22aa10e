"""The graph: accumulation, hooks, isolation, recomputation, and that nothing is left behind."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.autograd.graph import Node
from flame_train.engine.mode import Mode, mode
from flame_train.engine.op import REGISTRY
from flame_train.errors import ShapeError, Unsupported


def leaf(*shape: int, seed: int = 0) -> flame.Tensor:
    return flame.tensor(np.random.default_rng(seed).standard_normal(shape), requires_grad=True)


@pytest.fixture(autouse=True)
def _mode_is_restored():  # type: ignore[no-untyped-def]
    yield
    assert mode() == Mode()


def test_a_tensor_used_twice_gets_the_sum() -> None:
    x = leaf(3)
    y = x + x
    (y * x).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 4 * x.numpy())


@pytest.mark.parametrize("uses", [2, 3, 4, 7])
@pytest.mark.parametrize("inner", [False, True])
def test_a_number_gets_the_sum_of_all_its_uses(uses: int, inner: bool) -> None:
    x = flame.tensor(3.0, requires_grad=True)
    y = x * 1.0 if inner else x
    total = y
    for _ in range(uses - 1):
        total = total + y
    total.backward()
    assert x.grad is not None
    assert x.grad.item() == uses
    x.grad.mul_(2.0)
    (x * 1.0).backward()
    assert x.grad.item() == 2 * uses + 1


def test_a_number_that_is_computed_gets_every_derivative() -> None:
    v = leaf(5)
    mean = (v * v).mean()
    (mean + mean.sqrt() + mean.log() + 0.5 * mean).backward()
    m = float((v.numpy() ** 2).mean())
    slope = 1 + 0.5 / m**0.5 + 1 / m + 0.5
    np.testing.assert_allclose(v.grad.numpy(), slope * 2 * v.numpy() / 5)


def test_a_recomputed_number_gets_the_sum_of_all_its_uses() -> None:
    x = flame.tensor(2.0, requires_grad=True)
    flame.checkpoint(lambda a: a * a + a + a.exp() + 3.0 * a, x * 1.0).backward()
    assert x.grad.item() == pytest.approx(2 * 2.0 + 1 + np.exp(2.0) + 3)


def test_accumulates_over_calls_and_never_aliases() -> None:
    x, y = leaf(3), leaf(3, seed=1)
    z = x + y
    z.backward(flame.tensor(np.ones(3)))
    x.grad.data[...] = 7.0
    np.testing.assert_array_equal(y.grad.numpy(), np.ones(3))
    (x * 1.0).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.full(3, 8.0))


def test_deep_chain_needs_no_recursion() -> None:
    x = leaf(2)
    y = x
    for _ in range(20_000):
        y = y + 1.0
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.ones(2))


def test_second_backward_says_what_to_do() -> None:
    x = leaf(2)
    y = x.exp().sum()
    y.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        y.backward()


def test_retain_graph_gives_the_same_gradient_again() -> None:
    x = leaf(2)
    y = x.exp().sum()
    y.backward(retain_graph=True)
    first = x.grad.numpy().copy()
    y.backward()
    np.testing.assert_array_equal(x.grad.numpy(), 2 * first)


def test_grad_calls_the_hooks_of_its_inputs_alone() -> None:
    x, y = leaf(3), leaf(3, seed=1)
    called: list[str] = []
    x.register_hook(lambda g: called.append("x"))
    y.register_hook(lambda g: called.append("y"))
    (gx,) = flame.grad((x * y + x.exp() * y).sum(), [x])
    np.testing.assert_allclose(gx.numpy(), y.numpy() * (1.0 + np.exp(x.numpy())))
    assert called == ["x"]


def test_grad_touches_no_grad_and_reaches_inner_tensors() -> None:
    x = leaf(3)
    h = x.exp()
    gx, gh = flame.grad((h * h).sum(), [x, h])
    np.testing.assert_allclose(gh.numpy(), 2 * h.numpy())
    np.testing.assert_allclose(gx.numpy(), 2 * h.numpy() ** 2)
    assert x.grad is None


def test_grad_refuses_what_it_cannot_do() -> None:
    x, y = leaf(2), leaf(2)
    with pytest.raises(Unsupported, match="first order"):
        flame.grad(x.sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="not used"):
        flame.grad(x.sum(), [y])
    assert flame.grad(x.sum(), [y], allow_unused=True) == (None,)
    with pytest.raises(RuntimeError, match="only scalars"):
        x.exp().backward()
    with pytest.raises(ShapeError, match="expected a gradient of shape"):
        x.exp().backward(flame.tensor(np.ones(3)))


def test_hooks_replace_inner_and_leaf_gradients() -> None:
    x = leaf(3)
    h = x * 2.0
    handle = h.register_hook(lambda g: g * 10.0)
    x.register_hook(lambda g: g + 1.0)
    h.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), np.full(3, 21.0))
    handle.remove()
    (x * 2.0).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), np.full(3, 24.0))


def test_leaf_hook_sees_the_whole_gradient_once() -> None:
    x, seen = leaf(3), []
    x.register_hook(lambda g: seen.append(g.numpy().copy()))
    (x * 2.0 + flame.checkpoint(lambda a: a * 3.0, x) + x).sum().backward()
    assert len(seen) == 1
    np.testing.assert_allclose(seen[0], np.full(3, 6.0))


def test_no_grad_is_for_its_own_thread() -> None:
    seen: list[bool] = []
    with flame.no_grad():
        worker = threading.Thread(target=lambda: seen.append((leaf(2) * 2.0).requires_grad))
        worker.start()
        worker.join()
        assert not (leaf(2) * 2.0).requires_grad
    assert seen == [True]


def test_threads_get_the_results_of_one() -> None:
    def work(seed: int) -> bytes:
        x, w = leaf(8, 8, seed=seed), leaf(8, 8, seed=seed + 100)
        for _ in range(20):
            F.layer_norm(F.linear(x, w), (8,)).tanh().sum().backward()
        return x.grad.numpy().tobytes()

    alone = [work(s) for s in range(4)]
    together: dict[int, bytes] = {}
    threads = [threading.Thread(target=lambda s=s: together.__setitem__(s, work(s))) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [together[s] for s in range(4)] == alone


def test_frozen_has_no_gradient_at_all() -> None:
    w = flame.Frozen(np.ones((2, 3)))
    assert not hasattr(w, "grad")
    with pytest.raises(TypeError, match="Frozen"):
        w.requires_grad_()
    x = leaf(4, 3)
    y = F.linear(x, w)
    assert set(y._node.saved) == {"weight"}
    y.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), np.full((4, 3), 2.0))


def test_memory_is_freed_as_backward_goes_without_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        x = leaf(4, 4)
        y = F.layer_norm(F.linear(x, leaf(4, 4, seed=1)), (4,)).exp()
        nodes = []
        stack: list[Node] = [y._node]
        while stack:
            node = stack.pop()
            nodes.append(weakref.ref(node))
            stack += [e.node for e in node.edges if e.node is not None]
        del node, stack
        y.sum().backward()
        del y
        assert not [n() for n in nodes if n() is not None]
    finally:
        gc.enable()


class TestCheckpoint:
    @staticmethod
    def block(x: flame.Tensor, w: flame.Tensor) -> flame.Tensor:
        return F.gelu(F.linear(F.layer_norm(x, (6,)), w)) + x

    def test_several_results(self) -> None:
        def block(a: flame.Tensor, b: flame.Tensor) -> tuple[flame.Tensor, flame.Tensor]:
            h = F.tanh(a @ b)
            return h + a, F.silu(h) * b

        def run(wrapped: bool, use: str) -> list[bytes]:
            a, b = leaf(4, 4), leaf(4, 4, seed=1)
            x, y = flame.checkpoint(block, a * 1.5, b) if wrapped else block(a * 1.5, b)
            {"both": (x * y).sum(), "first": x.sum(), "second": y.sum()}[use].backward()
            return [t.grad.numpy().tobytes() for t in (a, b)]

        for use in ("both", "first", "second"):
            assert run(True, use) == run(False, use)

    def test_an_argument_used_outside_as_well_gets_the_same_bits(self) -> None:
        def run(wrapped: bool) -> bytes:
            x, w = leaf(64), leaf(64, seed=1)

            def block(h: flame.Tensor) -> flame.Tensor:
                return F.silu(h * w) + h * 0.1

            h = x * 1.7
            y = flame.checkpoint(block, h) if wrapped else block(h)
            (y * h.square() + F.tanh(h)).sum().backward()
            return x.grad.numpy().tobytes() + w.grad.numpy().tobytes()

        assert run(True) == run(False)

    def test_equals_plain_bit_for_bit_parameters_included(self) -> None:
        def run(wrap: bool) -> list[bytes]:
            x, w, outside = leaf(3, 6), leaf(6, 6, seed=1), leaf(6, 6, seed=2)
            call = (
                (lambda a, b: flame.checkpoint(lambda p, q: F.linear(self.block(p, q), outside), a, b))
                if wrap
                else (lambda a, b: F.linear(self.block(a, b), outside))
            )
            h = call(x, w)
            call(h, w).square().sum().backward()
            return [t.grad.numpy().tobytes() for t in (x, w, outside)]

        assert run(True) == run(False)

    def test_sums_in_the_order_of_a_plain_run(self) -> None:
        """An input used twice inside and once later, as a UNet's skip: three terms, whose order shows in the bits."""

        def run(wrap: bool) -> list[bytes]:
            x, w, skip = leaf(40, 6), leaf(6, 6, seed=1), leaf(40, 6, seed=2)
            h = x * 1.7
            y = flame.checkpoint(self.block, h, w) if wrap else self.block(h, w)
            z = self.block(y, w)  # w too is used in both
            (z.square() + h * skip).sum().backward()
            return [t.grad.numpy().tobytes() for t in (x, w, skip)]

        assert run(True) == run(False)

    def test_offload_keeps_computed_arguments_on_the_host_only(self) -> None:
        x, w = leaf(3, 6), leaf(6, 6, seed=1)
        h = x * 2.0
        held = weakref.ref(h.data)
        y = flame.checkpoint(self.block, h, w, offload=True)
        del h
        assert held() is None
        y.square().sum().backward(retain_graph=True)
        away = [t.grad.numpy().copy() for t in (x, w)]
        x.grad = w.grad = None
        self.block(x * 2.0, w).square().sum().backward()
        for t, g in zip((x, w), away, strict=True):
            assert np.array_equal(t.grad.numpy(), g)
        y.square().sum().backward()  # the copy on the host serves again

    def test_running_statistics_move_once(self) -> None:
        x, mean, var = leaf(8, 3), flame.tensor(np.zeros(3)), flame.tensor(np.ones(3))
        flame.checkpoint(lambda a: F.batch_norm(a, mean, var, training=True), x).square().sum().backward()
        np.testing.assert_allclose(mean.numpy(), 0.1 * x.numpy().mean(0))
        np.testing.assert_allclose(var.numpy(), 0.9 + 0.1 * x.numpy().var(0, ddof=1))

    def test_runs_backward_twice_when_the_graph_is_kept(self) -> None:
        x, w = leaf(3, 6), leaf(6, 6, seed=1)
        y = flame.checkpoint(self.block, x, w).square().sum()
        y.backward(retain_graph=True)
        once = x.grad.numpy().copy()
        y.backward()
        np.testing.assert_array_equal(x.grad.numpy(), 2 * once)

    def test_of_something_frozen_records_nothing(self) -> None:
        x, w = flame.tensor(np.ones((2, 6))), flame.Frozen(np.ones((6, 6)))
        y = flame.checkpoint(self.block, x, w)
        assert not y.requires_grad
        np.testing.assert_array_equal(y.numpy(), self.block(x, w).numpy())

    def test_keeps_only_its_inputs(self) -> None:
        x, w = leaf(3, 6), leaf(6, 6, seed=1)
        y = flame.checkpoint(self.block, x, w)
        assert [e.leaf for e in y._node.edges] == [x, w]

    def test_reaches_parameters_when_no_argument_requires_grad(self) -> None:
        w = leaf(6, 6)
        flame.checkpoint(lambda a: F.linear(a, w), flame.tensor(np.ones((2, 6)))).sum().backward()
        np.testing.assert_allclose(w.grad.numpy(), np.full((6, 6), 2.0))


def test_a_call_is_bound_in_the_order_of_the_signature() -> None:
    bound = REGISTRY["linear"].bind((1,), {"bias": 3, "weight": 2})
    assert list(bound.items()) == [("input", 1), ("weight", 2), ("bias", 3)]


def test_devices_do_not_mix_and_arrays_must_be_wrapped() -> None:
    with pytest.raises(TypeError, match=r"wrap it with engine\.tensor"):
        F.exp(np.ones(3))
    with pytest.raises(TypeError, match="missing argument 'dim'"):
        F.softmax(leaf(3))
    with pytest.raises(ValueError, match="expected 'cpu', 'cuda' or a GPU by its number, as in 'cuda:1', got"):
        flame.tensor([1.0], device="tpu")


def test_dlpack_both_ways() -> None:
    x = leaf(2, 3)
    back = np.from_dlpack(x)
    np.testing.assert_array_equal(back, x.numpy())
    np.testing.assert_array_equal(flame.tensor(x).numpy(), x.numpy())
