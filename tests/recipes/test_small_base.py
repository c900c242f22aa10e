"""The small SDXL that comes with the package, and the drawn world it knows: what they are said to be, they are."""

from __future__ import annotations

import numpy as np
import pytest
from flame_train.recipes.small_base import copy_small_sdxl
from PIL import Image

from flame_train.data.dataset import Dataset
from flame_train.engine import no_grad, tensor
from flame_train.io.safetensors import SafetensorsFile
from flame_train.models.identify import identify
from flame_train.models.keys import sdxl
from flame_train.models.loading_sdxl import SDXL_FILES
from flame_train.quickstart.drawings import COLOURS, SIZES, Scene, Shape, render, scenes, tiles, write_images
from flame_train.tools.sample import sample


def nearest(pixel):
    """The name of the palette's colour that a pixel comes nearest to."""
    return min(COLOURS, key=lambda name: np.abs(np.subtract(COLOURS[name], pixel, dtype=float)).sum())


def test_it_is_sdxl_by_its_structure_and_small(small_base):
    with SafetensorsFile(small_base) as file:
        found = identify({name: file.info(name).shape for name in file.names}, file.metadata)
        weights = sum(int(np.prod(file.info(name).shape)) for name in file.names)
    assert (found.kind, found.family, found.layout) == ("checkpoint", "sdxl", "single-file")
    assert found.parts == ("unet", "vae", "text_encoder", "text_encoder_2")
    assert "reduced size" in found.detail
    assert 3e6 < weights < 8e6
    assert small_base.stat().st_size <= 16 << 20


def test_it_loads_whole_and_nothing_is_left_over(small_base):
    components = "unet", "vae", "text_encoder", "text_encoder_2"
    unet, vae, *clips = (SDXL_FILES.load(small_base, c, device="cpu", dtype="float32") for c in components)
    with SafetensorsFile(small_base) as file:
        resolved = sdxl.resolve(file.names)
    assert resolved.unknown == resolved.ignored == ()
    assert {clip.arch.vocabulary for clip in clips} == {49408}
    assert unet.arch.channel_mult == (1, 2, 2)
    assert vae.arch.downscale == 8


def test_a_copy_is_the_same_file(small_base, tmp_path):
    copy_small_sdxl(tmp_path / "copy.safetensors")
    assert (tmp_path / "copy.safetensors").read_bytes() == small_base.read_bytes()


def test_the_autoencoder_gives_pictures_back(small_base):
    """Pictures it was not trained on: within 4 of 255 on average, their latents of the spread that noise has."""
    vae = SDXL_FILES.load(small_base, "vae", device="cpu", dtype="float32")
    pixels = render(np, [*scenes(3, (96, 96), 77), *tiles(1, (96, 96), 77)], (96, 96))
    with no_grad():
        mean, logvar = vae.encode_moments(tensor(pixels.astype(np.float32) / 127.5 - 1.0))
        latents = mean * vae.arch.scaling_factor
        decoded = (np.clip(vae.decode(latents).numpy(), -1.0, 1.0) + 1.0) * 127.5
    assert np.abs(decoded - pixels).mean() < 4.0
    assert 0.5 < float(latents.numpy().std()) < 2.0
    assert float(logvar.numpy().max()) < -4.0


@pytest.mark.slow
def test_it_draws_what_the_caption_says(small_base, tmp_path):
    """The colours of shape and background where the caption wants them, nowhere else."""
    prompts = [
        "a large red circle in the middle on a blue background",
        "a yellow square on the left on a black background",
    ]
    sample(
        str(small_base), prompts, tmp_path / "drawn.png", lora=None, strength=1.0, negative="", steps=16, guidance=3.0,
        sampler="euler", prediction="epsilon", precision="fp32", seed=3, width=96, height=96, device="cpu",
    )  # fmt: skip
    with Image.open(tmp_path / "drawn.png") as picture:
        first, second = (np.asarray(picture.convert("RGB"))[:, left : left + 96] for left in (0, 100))
    assert nearest(first[48, 48]) == "red"
    assert [nearest(first[y, x]) for y in (4, 91) for x in (4, 91)] == ["blue"] * 4
    assert nearest(second[48, 26]) == "yellow"
    assert [nearest(second[y, x]) for y, x in ((48, 70), (5, 5), (90, 90), (48, 90))] == ["black"] * 4


@pytest.mark.parametrize("make", [scenes, tiles])
def test_pictures_are_a_dataset_in_three_sizes(tmp_path, make):
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


def test_pictures_are_the_same_every_time(tmp_path):
    for name in ("a", "b"):
        write_images(tmp_path / name, 8, 3)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
