"""Buckets: bounds that always hold, known cases worked by hand, and a search by brute force."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from flame_train.data.buckets import BucketRule, resize_and_crop
from flame_train.errors import ConfigError, DataError

SDXL = BucketRule(1024)

SIZES = st.tuples(st.integers(1, 6000), st.integers(1, 6000))


@st.composite
def rules(draw: st.DrawFn) -> BucketRule:
    step = draw(st.sampled_from([8, 16, 32, 64]))
    resolution = draw(st.integers(step, 2048))
    return BucketRule(resolution, step, upscale=draw(st.booleans()))


@given(rules())
def test_every_bucket_is_within_bounds(rule: BucketRule) -> None:
    assert rule.buckets
    for height, width in rule.buckets:
        assert height * width <= rule.resolution**2
        assert height % rule.step == width % rule.step == 0
        assert rule.shortest <= min(height, width)
        assert max(height, width) <= 2 * rule.resolution
    turned = {(width, height) for height, width in rule.buckets}
    assert turned == set(rule.buckets)
    square = rule.resolution // rule.step * rule.step
    assert (square, square) in rule.buckets


@given(rules(), SIZES)
def test_placement_covers_its_bucket_and_never_enlarges(rule: BucketRule, size: tuple[int, int]) -> None:
    try:
        p = rule.assign(size)
    except DataError:
        assert not rule.upscale
        assert_too_small(rule, size)
        return
    (height, width), (rows, columns) = p.resized, p.bucket
    assert rows * columns <= rule.resolution**2
    assert rows % rule.step == columns % rule.step == 0
    assert height >= rows
    assert width >= columns
    assert height == rows or width == columns  # no larger than needed
    assert 0 <= p.crop_top <= height - rows
    assert 0 <= p.crop_left <= width - columns
    assert abs(2 * p.crop_top - (height - rows)) <= 1
    assert abs(2 * p.crop_left - (width - columns)) <= 1
    if not rule.upscale:
        assert height <= size[0]
        assert width <= size[1]
    scale = max(Fraction(rows, size[0]), Fraction(columns, size[1]))
    assert abs(scale * size[0] - height) < 1  # the ratio is kept but for whole pixels
    assert abs(scale * size[1] - width) < 1
    assert p.time_ids == (*size, p.crop_top, p.crop_left, rows, columns)
    assert 0 < p.kept <= 1


def assert_too_small(rule: BucketRule, size: tuple[int, int]) -> None:
    """A refused image has a side that is shorter than the shortest, once its area is within bounds."""
    height, width = size
    shrink = min(1.0, rule.resolution / math.sqrt(height * width))
    assert min(height, width) * shrink < rule.shortest + 1e-6


@given(SIZES)
def test_nearest_aspect_ratio_wins(size: tuple[int, int]) -> None:
    chosen = BucketRule(1024, upscale=True).assign(size).bucket
    wanted = math.log(size[0] / size[1])
    best = min(abs(math.log(h / w) - wanted) for h, w in SDXL.buckets)
    assert abs(math.log(chosen[0] / chosen[1]) - wanted) <= best + 1e-12


@given(SIZES)
def test_turned_image_is_placed_turned(size: tuple[int, int]) -> None:
    rule = BucketRule(512, 64)
    assume(size[0] != size[1])
    try:
        upright = rule.assign(size)
    except DataError:
        with pytest.raises(DataError):
            rule.assign(size[::-1])
        return
    turned = rule.assign(size[::-1])
    if upright.bucket[0] != upright.bucket[1]:
        assert turned.bucket == upright.bucket[::-1]
        assert turned.resized == upright.resized[::-1]
        assert (turned.crop_left, turned.crop_top) == (upright.crop_top, upright.crop_left)


@pytest.mark.parametrize(
    ("size", "bucket", "resized", "crop"),
    [
        ((1024, 1024), (1024, 1024), (1024, 1024), (0, 0)),
        ((4000, 4000), (1024, 1024), (1024, 1024), (0, 0)),
        ((3000, 4000), (896, 1152), (896, 1195), (0, 21)),
        ((4000, 3000), (1152, 896), (1195, 896), (21, 0)),
        ((1080, 1920), (768, 1344), (768, 1365), (0, 10)),
        ((2000, 4000), (704, 1408), (704, 1408), (0, 0)),
        ((8000, 1000), (2048, 256), (2048, 256), (0, 0)),
        ((1000, 1000), (960, 960), (960, 960), (0, 0)),  # smaller than 1024: rounded down, not enlarged
        ((700, 500), (640, 448), (640, 457), (0, 4)),
        ((1030, 1022), (1024, 960), (1024, 1016), (0, 28)),
    ],
)
def test_known_placements(
    size: tuple[int, int], bucket: tuple[int, int], resized: tuple[int, int], crop: tuple[int, int]
) -> None:
    p = SDXL.assign(size)
    assert (p.bucket, p.resized, (p.crop_top, p.crop_left)) == (bucket, resized, crop)


def test_the_regular_buckets_hold_those_sdxl_was_trained_on() -> None:
    """Podell et al. 2023, appendix I, the middle of its table (height, width)."""
    paper = [
        (704, 1408),
        (704, 1344),
        (768, 1344),
        (768, 1280),
        (832, 1216),
        (832, 1152),
        (896, 1152),
        (896, 1088),
        (960, 1088),
        (960, 1024),
        (1024, 1024),
    ]
    widest = {height: max(w for h, w in paper if h == height) for height, _ in paper}
    for height in (768, 832, 896, 960, 1024):
        assert (height, widest[height]) in SDXL.buckets


def test_upscale_is_asked_for() -> None:
    size = (300, 300)
    assert SDXL.assign(size).bucket == (256, 256)
    grown = BucketRule(1024, upscale=True).assign(size)
    assert (grown.bucket, grown.resized) == ((1024, 1024), (1024, 1024))


@pytest.mark.parametrize("size", [(1, 1), (255, 255), (3000, 200), (10, 8000)])
def test_too_small_is_refused_with_a_remedy(size: tuple[int, int]) -> None:
    with pytest.raises(DataError, match=r"below .*data\.upscale"):
        SDXL.assign(size)


def test_small_resolutions_work() -> None:
    rule = BucketRule(64, 8)
    assert (rule.shortest, rule.longest) == (16, 128)
    assert rule.assign((480, 640)).bucket == (56, 72)
    assert rule.assign((20, 20)).bucket == (16, 16)
    assert BucketRule(64, 64).buckets == ((64, 64),)
    assert BucketRule(64, 64).assign((100, 90)).resized == (71, 64)


def test_own_bounds() -> None:
    rule = BucketRule(1024, 64, min_side=640, max_side=1536)
    assert {min(b) for b in rule.buckets} == {640, 704, 768, 832, 896, 960, 1024}
    assert max(max(b) for b in rule.buckets) == 1536


@pytest.mark.parametrize(
    "bad", [{"resolution": 32}, {"resolution": 1024, "min_side": 1100}, {"resolution": 1024, "max_side": 512}]
)
def test_impossible_bounds(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="buckets: "):
        BucketRule(**bad)


def test_resize_and_crop_takes_the_centre(image: Callable[..., np.ndarray[Any, Any]]) -> None:
    array = image(90, 200)
    p = BucketRule(64, 8).assign((90, 200))
    cut = resize_and_crop(array, p)
    assert cut.shape == (*p.bucket, 3)
    whole = np.asarray(Image.fromarray(array).resize(p.resized[::-1], Image.Resampling.LANCZOS))
    bottom, right = p.crop_top + p.bucket[0], p.crop_left + p.bucket[1]
    assert np.array_equal(cut, whole[p.crop_top : bottom, p.crop_left : right])


def test_exact_size_is_left_untouched(image: Callable[..., np.ndarray[Any, Any]]) -> None:
    array = image(64, 64)
    assert np.array_equal(resize_and_crop(array, BucketRule(64, 64).assign((64, 64))), array)
    with pytest.raises(ValueError, match="expected an image"):
        resize_and_crop(array, BucketRule(64, 64).assign((64, 65)))
