"""The model and the pictures that quickstart makes: what they are said to be, they are."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from skimage import data

from flame_train.data.dataset import Dataset
from flame_train.engine import no_grad, tensor
from flame_train.io.safetensors import SafetensorsFile
from flame_train.models.identify import identify
from flame_train.models.loading import load_sdxl
from flame_train.recipes.drawings import drawings, write_drawings
from flame_train.recipes.small_base import write_small_base


@pytest.fixture(scope="module")
def vae(small_base):
    return load_sdxl(small_base, device="cpu", dtype="float32", components=("vae",)).vae


def through(vae, pixels):
    """Pictures (H, W, 3) encoded and decoded, in 0..255, not rounded."""
    with no_grad():
        mean, _ = vae.encode_moments(tensor(pixels[None].astype(np.float32) / 127.5 - 1.0))
        decoded = vae.decode(mean * vae.arch.scaling_factor).numpy()[0]
    return (np.clip(decoded, -1.0, 1.0) + 1.0) * 127.5


def test_it_is_sdxl_by_its_structure(small_base):
    with SafetensorsFile(small_base) as file:
        found = identify({name: file.info(name).shape for name in file.names}, file.metadata)
    assert (found.kind, found.family, found.layout) == ("checkpoint", "sdxl", "single-file")
    assert found.parts == ("unet", "vae", "text_encoder", "text_encoder_2")
    assert "reduced size" in found.detail


def test_it_loads_whole_and_nothing_is_left_over(small_base):
    models = load_sdxl(small_base, device="cpu", dtype="float32")
    assert models.ignored == ()
    assert models.text_encoder.arch.vocabulary == models.text_encoder_2.arch.vocabulary == 49408
    assert models.unet.arch.channel_mult == (1, 2, 4)
    assert models.vae.arch.downscale == 8


def test_it_is_the_same_every_time(small_base, tmp_path):
    write_small_base(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == small_base.read_bytes()


def test_the_autoencoder_keeps_a_plain_colour(vae):
    for colour in ((255, 0, 0), (10, 200, 90), (128, 128, 128), (255, 255, 255)):
        decoded = through(vae, np.full((96, 96, 3), colour, np.uint8))
        np.testing.assert_allclose(decoded[24:-24, 24:-24], np.full((48, 48, 3), colour), atol=1.0)


def test_the_autoencoder_is_an_eighth_of_the_resolution_and_back(vae):
    """Beside Pillow, which averages 8x8 blocks and enlarges them again; borders are smoothed another way."""
    photo = Image.fromarray(data.astronaut()).resize((128, 128))
    small = photo.resize((16, 16), Image.Resampling.BOX)
    beside = np.asarray(small.resize((128, 128), Image.Resampling.BILINEAR)).astype(float)
    difference = np.abs(through(vae, np.asarray(photo)) - beside)[16:-16, 16:-16]
    assert difference.mean() < 5.0


def test_latents_of_pictures_have_the_spread_that_noise_has(vae):
    photos = [np.asarray(Image.fromarray(f()).resize((128, 128))) for f in (data.astronaut, data.chelsea, data.coffee)]
    with no_grad():
        mean, logvar = vae.encode_moments(tensor(np.stack(photos).astype(np.float32) / 127.5 - 1.0))
    assert 0.5 < float(mean.numpy().std()) * vae.arch.scaling_factor < 2.0
    assert float(logvar.numpy().max()) < -10.0


def test_drawings_are_a_dataset_of_three_shapes(tmp_path):
    assert write_drawings(tmp_path) == 12
    dataset = Dataset.scan(tmp_path)
    assert len({item.caption for item in dataset.items}) == 12
    assert len({item.size for item in dataset.items}) == 3
    assert not dataset.notices


def test_captions_say_what_is_there(tmp_path):
    write_drawings(tmp_path)
    for drawing in drawings():
        with Image.open(tmp_path / f"{drawing.name}.png") as picture:
            assert picture.size == drawing.size
            middle, corner = picture.getpixel((drawing.size[0] // 2, drawing.size[1] // 2)), picture.getpixel((0, 0))
        assert middle[2] > middle[0]  # blue
        assert corner[0] > corner[2]  # warm
        assert (tmp_path / f"{drawing.name}.txt").read_text() == drawing.caption
        assert drawing.name.split("-")[0] in drawing.caption


def test_drawings_are_the_same_every_time(tmp_path):
    for name in ("a", "b"):
        write_drawings(tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
