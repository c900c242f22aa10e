"""Gradients that add themselves to others, and those written where they are joined: nothing is copied on the way up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.autograd.grad_target import GradTargets
from flame_train.engine.dtype import Array
from flame_train.engine.mode import Mode, mode
from flame_train.engine.op import REGISTRY, Op, primitive


def leaf(*shape: int, seed: int = 0) -> flame.Tensor:
    return flame.tensor(np.random.default_rng(seed).standard_normal(shape), requires_grad=True)


@pytest.fixture(autouse=True)
def _mode_is_restored():  # type: ignore[no-untyped-def]
    yield
    assert mode() == Mode()


@pytest.fixture
def doubled() -> Iterator[tuple[Op, list[str]]]:
    """An op whose gradient formula can add itself to what is there, and a record of when it did, and how."""
    calls: list[str] = []

    @primitive()
    def planted_double(xp: Any, input: Array) -> Array:
        """2 * input"""
        return 2.0 * input

    @planted_double.vjp("input")
    def _(xp: Any, g: Array, targets: GradTargets) -> Array:
        target = targets["input"]
        calls.append("alone" if target.addend is None else "in place" if target.overwrites else "sum")
        if target.addend is None:
            return 2.0 * g
        if not target.overwrites:
            return target.addend + 2.0 * g
        target.addend[...] += 2.0 * g
        return target.addend

    yield planted_double, calls
    del REGISTRY["planted_double"]


class TestGradientsThatAddThemselves:
    def test_to_an_inner_gradient_that_belongs_to_someone_else(self, doubled: tuple[Op, list[str]]) -> None:
        double, calls = doubled
        x = leaf(3)
        h = x * 1.0
        y = double(h)
        (h + y).backward(flame.tensor(np.array([1.0, 2.0, 3.0])))
        assert calls == ["sum"]
        np.testing.assert_array_equal(x.grad.numpy(), [3.0, 6.0, 9.0])

    def test_to_a_sum_of_several(self, doubled: tuple[Op, list[str]]) -> None:
        double, calls = doubled
        x = leaf(3)
        h = x * 1.0
        (double(double(h)) + h + h).sum().backward()
        assert calls == ["alone", "in place"]
        np.testing.assert_array_equal(x.grad.numpy(), np.full(3, 6.0))

    def test_to_a_leafs_gradient_over_several_passes(self, doubled: tuple[Op, list[str]]) -> None:
        double, calls = doubled
        x = leaf(3)
        for _ in range(3):
            double(x).sum().backward()
        assert calls == ["alone", "in place", "in place"]
        np.testing.assert_array_equal(x.grad.numpy(), np.full(3, 6.0))

    def test_not_where_a_hook_must_see_the_whole(self, doubled: tuple[Op, list[str]]) -> None:
        double, calls = doubled
        x, seen = leaf(3), []
        x.grad = flame.tensor(np.ones(3))
        x.register_hook(lambda g: seen.append(g.numpy().copy()))
        double(x).sum().backward()
        assert calls == ["alone"]
        np.testing.assert_array_equal(seen, [np.full(3, 2.0)])
        np.testing.assert_array_equal(x.grad.numpy(), np.full(3, 3.0))

    def test_not_for_gradients_that_are_asked_for(self, doubled: tuple[Op, list[str]]) -> None:
        double, calls = doubled
        x = leaf(3)
        x.grad = flame.tensor(np.ones(3))
        (g,) = flame.grad(double(x).sum(), x)
        assert calls == ["alone"]
        np.testing.assert_array_equal(g.numpy(), np.full(3, 2.0))
        np.testing.assert_array_equal(x.grad.numpy(), np.ones(3))

    def test_in_a_checkpoint_as_outside(self, doubled: tuple[Op, list[str]]) -> None:
        double, calls = doubled
        w = leaf(3, seed=1)
        w.grad = flame.tensor(np.ones(3))
        x = leaf(3)
        flame.checkpoint(lambda h: double(h) + h + double(w), x * 1.0).sum().backward()
        assert sorted(calls) == ["in place", "sum"]
        np.testing.assert_array_equal(x.grad.numpy(), np.full(3, 3.0))
        np.testing.assert_array_equal(w.grad.numpy(), np.full(3, 3.0))


@pytest.fixture
def tripled() -> Iterator[tuple[Op, list[Array | None]]]:
    """An op that writes its gradient where it is told, if it is `obliging`, and a record of where that was."""
    places: list[Array | None] = []

    @primitive()
    def planted_triple(xp: Any, input: Array, obliging: bool = True) -> Array:
        """3 * input"""
        return 3.0 * input

    @planted_triple.vjp("input", accumulates=False)
    def _(xp: Any, g: Array, obliging: bool, targets: GradTargets) -> Array:
        place = targets["input"].buffer
        places.append(place)
        if place is None or not obliging:
            return 3.0 * g
        place[...] = 3.0 * g
        return place

    yield planted_triple, places
    del REGISTRY["planted_triple"]


@pytest.fixture
def added() -> Iterator[tuple[Op, list[dict[int, Array]]]]:
    """A sum of several tensors that writes their gradients where it is told, if it is `obliging`, and a record."""
    places: list[dict[int, Array]] = []

    @primitive()
    def planted_sum(xp: Any, tensors: Sequence[Array], obliging: bool = True) -> Array:
        """The sum of the tensors"""
        return sum(tensors[1:], tensors[0])

    @planted_sum.vjp("tensors", accumulates=False)
    def _(xp: Any, g: Array, tensors_shape: list[Any], obliging: bool, targets: GradTargets) -> list[Array]:
        rooms = {i: t.buffer for i, t in targets["tensors"].items() if t.buffer is not None}
        places.append(rooms)
        for place in rooms.values():
            place[...] = g if obliging else np.nan
        return [rooms[i] if obliging and i in rooms else g for i in range(len(tensors_shape))]

    yield planted_sum, places
    del REGISTRY["planted_sum"]


class TestGradientsWrittenWhereTheyAreJoined:
    def test_views_lie_in_what_they_are_views_of(self, tripled: tuple[Op, list[Array | None]]) -> None:
        triple, places = tripled
        x = leaf(2, 4, 6)
        a, b = F.split(x * 1.0, (2, 4), dim=-1)
        turned = triple(b.reshape(2, 4, 2, 2).transpose(1, 2))
        (triple(a).sum() + (turned * turned).sum()).backward()
        of_b, of_a = places if places[0].ndim == 4 else places[::-1]
        assert of_b.strides == (192, 16, 48, 8)
        assert of_a.shape == (2, 4, 2)
        assert of_b.ctypes.data - of_a.ctypes.data == 16
        want = np.concatenate([np.full((2, 4, 2), 3.0), 18.0 * x.numpy()[..., 2:]], -1)
        np.testing.assert_allclose(x.grad.numpy(), want)

    def test_items_of_a_list_lie_there_too(self, added: tuple[Op, list[dict[int, Array]]]) -> None:
        add, places = added
        x = leaf(2, 6)
        a, b, c = F.split(x * 1.0, 2, dim=-1)
        (add([a, leaf(2, 2), b]) * 3.0 + add([c, c], False)).sum().backward()
        last, first = places
        assert first.keys() == {0, 2}
        assert first[2].ctypes.data - first[0].ctypes.data == 16
        assert last.keys() == {0}  # one place for both
        np.testing.assert_allclose(x.grad.numpy(), [[3.0, 3.0, 3.0, 3.0, 2.0, 2.0]] * 2)

    def test_one_place_is_lent_once(self, tripled: tuple[Op, list[Array | None]]) -> None:
        triple, places = tripled
        x = leaf(2, 6)
        a, b = F.split(x * 1.0, 3, dim=-1)
        (triple(a.reshape(6)).sum() + triple(a.transpose(0, 1)).sum() + triple(a).sum() + b.sum()).backward()
        assert sum(p is not None for p in places) == 1
        np.testing.assert_allclose(x.grad.numpy(), [[9.0, 9.0, 9.0, 1.0, 1.0, 1.0]] * 2)

    def test_what_is_not_used_is_lent_again(self, tripled: tuple[Op, list[Array | None]]) -> None:
        triple, places = tripled
        x = leaf(2, 6)
        a, b = F.split(x * 1.0, 3, dim=-1)
        turned, first = a.transpose(0, 1), triple(a)
        (triple(turned, False).transpose(0, 1) + first + b).sum().backward()
        assert [p is not None for p in places] == [True, True]
        np.testing.assert_allclose(x.grad.numpy(), [[6.0, 6.0, 6.0, 1.0, 1.0, 1.0]] * 2)

    def test_what_a_hook_has_kept_stays_as_it_was(self, tripled: tuple[Op, list[Array | None]]) -> None:
        triple, _ = tripled
        x, kept = leaf(2, 6), []
        a, b = F.split(x * 1.0, 3, dim=-1)
        seen = a.reshape(6)
        seen.register_hook(kept.append)
        (triple(seen).sum() + (5.0 * a).sum() + b.sum()).backward()
        np.testing.assert_array_equal(kept[0].numpy(), np.full(6, 3.0))
        np.testing.assert_allclose(x.grad.numpy(), [[8.0, 8.0, 8.0, 1.0, 1.0, 1.0]] * 2)

    def test_what_others_have_written_is_not_lent_again(self, tripled: tuple[Op, list[Array | None]]) -> None:
        triple, places = tripled
        x = leaf(2, 6)
        a, b = F.split(x * 1.0, (4, 2), dim=-1)
        third, (second, _), first = a.unsqueeze(0), F.split(a, 2, dim=-1), a.unsqueeze(0)  # in the order of gradients
        sums = [triple(third).sum() * 5.0, triple(second, False).sum(), triple(first).sum()]
        (sums[0] + sums[1] + sums[2] + b.sum()).backward()
        assert [p is not None for p in places] == [True, True, False]
        np.testing.assert_allclose(x.grad.numpy(), [[21.0, 21.0, 18.0, 18.0, 1.0, 1.0]] * 2)

    def test_memory_that_a_reshape_leaves_is_not_lent(self, tripled: tuple[Op, list[Array | None]]) -> None:
        triple, places = tripled
        x = leaf(2, 6)
        a, b = F.split(x * 1.0, 3, dim=-1)
        (triple(a.transpose(0, 1).reshape(6)).sum() + triple(b).sum() + triple(a).sum()).backward()
        assert [p is None for p in places] == [False, False, True]
        np.testing.assert_allclose(x.grad.numpy(), [[6.0, 6.0, 6.0, 3.0, 3.0, 3.0]] * 2)

    def test_pieces_without_elements(self, tripled: tuple[Op, list[Array | None]]) -> None:
        triple, _ = tripled
        x = leaf(2, 3)
        nothing, all_of_it = F.split(x * 1.0, (0, 3), dim=-1)
        (triple(nothing).sum() + triple(all_of_it).sum()).backward()
        np.testing.assert_allclose(x.grad.numpy(), np.full((2, 3), 3.0))

    def test_in_a_checkpoint_as_outside(self, tripled: tuple[Op, list[Array | None]]) -> None:
        triple, places = tripled

        def block(h: flame.Tensor) -> flame.Tensor:
            a, b = F.split(h * 2.0, 3, dim=-1)
            return triple(a) * triple(b) + h[:, :3]

        grads = []
        for run in (block, lambda h: flame.checkpoint(block, h)):
            x = leaf(2, 6)
            run(x * 1.0).sum().backward()
            grads.append(x.grad.numpy())
        assert [p is not None for p in places] == [True] * 4
        np.testing.assert_array_equal(*grads)
