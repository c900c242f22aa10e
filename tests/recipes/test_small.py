"""The small SDXL that comes with the package: what it is said to be, it is."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from flame_train.engine import no_grad, tensor
from flame_train.io.safetensors import SafetensorsFile
from flame_train.models.common.small import copy_small_sdxl
from flame_train.models.sdxl import names as sdxl
from flame_train.models.sdxl.names import SDXL_FILES
from flame_train.networks.files.identify import identify
from flame_train.quickstart.drawings import render, scenes, tiles
from flame_train.tools.sample import sample
from tests.quickstart.test_drawings import nearest


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
        resolved = sdxl.SDXL_FILES.resolve(file.names)
    assert resolved.unknown == resolved.ignored == ()
    assert {clip.arch.vocabulary for clip in clips} == {49408}
    assert unet.arch.channel_mult == (1, 2, 2)
    assert vae.arch.downscale == 8


def test_a_copy_is_the_same_file(small_base, tmp_path):
    copy_small_sdxl(tmp_path / "copy.safetensors")
    assert (tmp_path / "copy.safetensors").read_bytes() == small_base.read_bytes()


def test_the_autoencoder_gives_images_back(small_base):
    """Images it was not trained on: within 4 of 255 on average, their latents of the spread that noise has."""
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
        str(small_base),
        prompts,
        tmp_path / "drawn.png",
        negative="",
        steps=16,
        guidance_scale=3.0,
        sampler="euler",
        prediction="epsilon",
        precision="fp32",
        seed=3,
        width=96,
        height=96,
        device="cpu",
    )
    with Image.open(tmp_path / "drawn.png") as image:
        first, second = (np.asarray(image.convert("RGB"))[:, left : left + 96] for left in (0, 100))
    assert nearest(first[48, 48]) == "red"
    assert [nearest(first[y, x]) for y in (4, 91) for x in (4, 91)] == ["blue"] * 4
    assert nearest(second[48, 26]) == "yellow"
    assert [nearest(second[y, x]) for y, x in ((48, 70), (5, 5), (90, 90), (48, 90))] == ["black"] * 4
