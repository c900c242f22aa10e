"""Running losses of images: what is hard at any noise level stands out, and nothing else does."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flame_train.training.image_losses import ImageLosses, merge_losses

NAMES = tuple(f"{i}.png" for i in range(8))


def fed(hard=3, by=1.6, rounds=400, seed=0, skip=()):
    """Losses that follow the level by far more than the image, of which one is harder by a factor."""
    losses, rng = ImageLosses(), np.random.default_rng(seed)
    for number in range(rounds):
        which = rng.permutation(8)[:4]
        levels = rng.uniform(size=4)
        cost = 0.01 + levels**2 * np.where(which == hard, by, 1.0) * rng.uniform(0.9, 1.1, 4)
        if number not in skip:
            losses.add([NAMES[i] for i in which], np.stack([cost, levels]).astype(np.float32))
    return losses


def relative(losses):
    return {row["file"]: row["relative_loss"] for row in json.loads(losses.report(1))["images"]}


def test_an_image_that_costs_more_at_every_level_is_told_apart():
    found = relative(fed())
    assert next(iter(found)) == "3.png"
    assert found["3.png"] == pytest.approx(1.6 / (1 + 0.6 / 8), rel=0.15)
    assert all(0.8 < value < 1.1 for name, value in found.items() if name != "3.png")


def test_the_noise_level_alone_makes_no_difference():
    """One image always comes with much noise, another with little: both are average."""
    losses, rng = ImageLosses(), np.random.default_rng(1)
    for _ in range(300):
        levels = np.array([rng.uniform(0.8, 1.0), rng.uniform(0.0, 0.2), rng.uniform()])
        losses.add(("much", "little", "any"), np.stack([0.01 + levels**2, levels]).astype(np.float32))
    assert all(value == pytest.approx(1.0, abs=0.15) for value in relative(losses).values())


def test_what_is_not_finite_is_passed_over():
    losses = ImageLosses()
    losses.add(("a", "b"), np.array([[np.nan, 1.0], [0.5, 0.5]], np.float32))
    assert list(losses.images) == ["b"]
    losses.add(("a", "b"), np.array([[np.inf, 1.0], [0.5, 1.0]], np.float32))
    assert (losses.images["b"].seen, sum(losses.counts)) == (2, 2)


def test_the_state_goes_on_to_the_bit():
    whole, part = fed(rounds=100), fed(rounds=100, skip=range(50, 100))
    rng = np.random.default_rng(0)
    again = ImageLosses.read(part.state())
    for number in range(100):
        which = rng.permutation(8)[:4]
        levels = rng.uniform(size=4)
        cost = 0.01 + levels**2 * np.where(which == 3, 1.6, 1.0) * rng.uniform(0.9, 1.1, 4)
        if number >= 50:
            again.add([NAMES[i] for i in which], np.stack([cost, levels]).astype(np.float32))
    assert again.state() == whole.state()
    assert again.report(7) == whole.report(7)


@pytest.mark.parametrize("raw", [b"{}", b"[]", b"\xff", b'{"images": {"a": [1]}, "means": [], "counts": []}', b"3"])
def test_a_state_that_is_none_is_refused(raw):
    with pytest.raises(ValueError, match=r".+"):
        ImageLosses.read(raw)


def test_parts_of_several_processes_make_one_and_stay_as_they_are():
    one, other = fed(seed=1), fed(seed=2)
    kept = one.state(), other.state()
    both = merge_losses([one, other])
    assert (one.state(), other.state()) == kept
    assert sum(image.seen for image in both.images.values()) == sum(both.counts) == 2 * 400 * 4
    assert next(iter(relative(both))) == "3.png"
    for band, mean in enumerate(both.means):
        assert min(one.means[band], other.means[band]) <= mean <= max(one.means[band], other.means[band])
    assert merge_losses([one]).report(1) == one.report(1)


def test_the_log_gets_few_names_and_the_cost():
    told = fed().summary()
    assert next(iter(told["highest"])) == "3.png"
    assert len(told["highest"]) == len(told["lowest"]) == 5
    assert told["host_ms"] > 0
