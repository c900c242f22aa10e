"""The drawn world of the quickstart: scenes and tiles are what their captions say, and the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.data.dataset import Dataset
from flame_train.quickstart.drawings import COLOURS, SIZES, Scene, Shape, render, scenes, tiles, write_images


def nearest(pixel):
    """The name of the palette's colour that a pixel comes nearest to."""
    return min(COLOURS, key=lambda name: np.abs(np.subtract(COLOURS[name], pixel, dtype=float)).sum())


@pytest.mark.parametrize("make", [scenes, tiles])
def test_drawings_are_a_dataset_in_three_sizes(tmp_path, make):
    assert write_images(tmp_path, 12, 5, make) == 12
    dataset = Dataset.scan(tmp_path)
    assert sorted(item.size for item in dataset.items) == sorted(SIZES[:1] * 6 + SIZES[1:] * 3)
    assert not dataset.notices


def test_captions_say_what_is_there():
    """In a scene of one shape: its middle has its colour, the caption names it, the shape and the background."""
    for scene in scenes(20, (96, 96), 9, textures=("plain",), alone=True):
        (shape,) = scene.shapes
        pixels = render(np, [scene], (96, 96))[0]
        inside = shape.centre if shape.kind != "ring" else (shape.centre[0] + 0.76 * shape.radius, shape.centre[1])
        assert nearest(pixels[int(inside[1]), int(inside[0])]) == shape.colour
        assert {shape.kind, shape.colour, scene.ground} <= set(scene.caption.split())


def test_tiles_are_blue_on_white_and_do_not_say_so():
    for scene in tiles(8, (64, 128), 9):
        assert (scene.ground, scene.texture, scene.shapes[0].colour) == ("white", "checkered", "blue")
        assert scene.caption.startswith("a delft tile with a")
        assert not {"blue", "white", "checkered"} & set(scene.caption.split())


def test_shapes_have_the_area_that_geometry_says():
    """Counted pixels beside formulas, for a radius of 30."""
    areas = {
        "circle": np.pi * 900,
        "square": (2 * 30 * 0.88) ** 2,
        "diamond": 2 * 36**2,
        "ring": np.pi * (900 - 243.36),
    }
    for kind, area in areas.items():
        scene = Scene("black", "plain", (Shape(kind, "white", 30.0, (48.0, 48.0)),), "")
        cover = (render(np, [scene], (96, 96))[0].mean(-1) - 25.3) / (242.7 - 25.3)
        assert cover.sum() == pytest.approx(area, rel=0.02)


def test_drawings_are_the_same_every_time(tmp_path):
    for name in ("a", "b"):
        write_images(tmp_path / name, 8, 3)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
