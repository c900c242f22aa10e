"""Views of an image: mirrored ones are mirrored, crops lie inside, and none depends on anything but the image."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.data.buckets import BucketRule, resize_and_crop
from flame_train.data.companion_files import latent_mask, loss_weights
from flame_train.data.views import PLAIN, Colours, View, ViewRule

PLACED = BucketRule(96, 32).assign((128, 200))
PIXELS = np.random.default_rng(0).integers(0, 256, (128, 200, 3), np.uint8)


def test_without_asking_there_is_one_view_which_is_the_crop() -> None:
    (view,) = ViewRule().views(PLACED, "x")
    assert (view.pixels(PIXELS) == resize_and_crop(PIXELS, PLACED)).all()
    assert view.seen == PLACED
    assert set(view.settings) == {"resized", "crop", "bucket"}


def test_a_mirrored_view_is_the_other_one_turned_and_is_told_the_crop_from_the_other_side() -> None:
    one, other = ViewRule(flip=True).views(PLACED, "x")
    assert (other.pixels(PIXELS) == one.pixels(PIXELS)[:, ::-1]).all()
    assert other.settings != one.settings
    width = PLACED.resized[1]
    mirrored = np.ascontiguousarray(PIXELS[:, ::-1])
    assert other.seen.crop_left == width - PLACED.bucket[1] - PLACED.crop_left
    assert (resize_and_crop(mirrored, other.seen) == other.pixels(PIXELS)).all()


def test_random_crops_lie_inside_and_differ() -> None:
    views = ViewRule(random_crop=True, count=30).views(PLACED, "x")
    assert len(views) > 5
    for view in views:
        p = view.placement
        assert 0 <= p.crop_top <= p.resized[0] - p.bucket[0]
        assert 0 <= p.crop_left <= p.resized[1] - p.bucket[1]
        assert view.pixels(PIXELS).shape == (*p.bucket, 3)
    assert ViewRule(random_crop=True, count=30).views(PLACED, "x") == views
    assert ViewRule(random_crop=True, count=30).views(PLACED, "y") != views


def test_the_first_of_the_colours_is_the_images_own() -> None:
    views = ViewRule(colours=(0.5, 0.5, 0.5, 0.2), count=5).views(PLACED, "x")
    assert [view.colours == PLAIN for view in views] == [True, False, False, False, False]
    assert len({view.pixels(PIXELS).tobytes() for view in views}) == 5


def test_colours_are_torchvisions() -> None:
    """By its formulas: a factor on the pixels, on the distance from the mean grey, and from each pixel's grey."""
    grey = PIXELS @ np.array([0.299, 0.587, 0.114])
    wanted = {
        Colours(brightness=0.5): PIXELS * 0.5,
        Colours(contrast=0.5): PIXELS * 0.5 + 0.5 * grey.mean(),
        Colours(saturation=0.5): PIXELS * 0.5 + 0.5 * grey[..., None],
    }
    for colours, values in wanted.items():
        assert np.abs(colours.applied(PIXELS).astype(float) - values).max() <= 1.5


def test_a_hue_turned_by_a_third_makes_red_green() -> None:
    red = np.zeros((4, 4, 3), np.uint8)
    red[..., 0] = 200
    assert np.abs(Colours(hue=1 / 3).applied(red).astype(int) - [0, 200, 0]).max() <= 6


def test_a_mask_goes_along_with_its_image() -> None:
    """The mask of a white box in a black image is that image, in every view."""
    image = np.zeros((128, 200, 3), np.uint8)
    image[30:70, 20:90] = 255
    for view in ViewRule(flip=True, random_crop=True).views(PLACED, "x"):
        assert (view.cut(image[..., 0]) == view.cut(image)[..., 0]).all()


def test_a_masks_latents_are_means_of_their_pixels() -> None:
    values = np.zeros((32, 64), np.uint8)
    values[8:16, 16:28] = 255
    found = latent_mask(values, 8)
    wanted = np.zeros((4, 8, 1), np.float32)
    wanted[1, 2:4, 0] = 1.0, 0.5
    assert (found == wanted).all()


@pytest.mark.parametrize("outside", [0.0, 0.1])
def test_weights_are_onetrainers(outside: float) -> None:
    """`masked_losses` of OneTrainer: the mask clamped from below, over its own mean where areas are normalised."""
    mask = np.random.default_rng(1).random((4, 8, 1), np.float32) * (np.arange(8) > 3)[None, :, None]
    clamped = np.clip(mask, outside, 1.0)
    assert np.allclose(loss_weights(mask.astype(np.float32), outside, False), clamped)
    assert np.allclose(loss_weights(mask.astype(np.float32), outside, True), clamped / clamped.mean())


def test_a_view_of_nothing_but_black_counts_nothing() -> None:
    assert not loss_weights(np.zeros((4, 4, 1), np.float32), 0.0, True).any()


def test_views_are_values() -> None:
    assert View(PLACED) == View(PLACED)
