"""`sample` of SD3 and Flux: from one file, or from files as they are published, one for each network."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.io.safetensors import save_file
from flame_train.io.weights import open_weights
from flame_train.models.registry import FAMILIES

PARTS = {
    "vae": "first_stage_model.",
    "clip-l": "text_encoders.clip_l.transformer.",
    "clip-g": "text_encoders.clip_g.transformer.",
    "t5": "text_encoders.t5xxl.transformer.",
}


@pytest.fixture(scope="module", params=["sd3", "flux"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def base(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp(family)
    FAMILIES[family].write_small_base(folder, 3)
    return folder / "base.safetensors"


@pytest.fixture(scope="module")
def split(base, tmp_path_factory):
    """The transformer's file, and the options that name the others'; T5's vocabulary lies in a folder of its own."""
    folder = tmp_path_factory.mktemp("split")
    with open_weights(base) as weights:
        arrays = {name: np.array(weights.read(name)) for name in weights.names}
    options = ["--t5-vocabulary", shutil.copy(base.parent / "tokenizer.json", tmp_path_factory.mktemp("words"))]
    for option, prefix in PARTS.items():
        found = {name.removeprefix(prefix): arrays.pop(name) for name in list(arrays) if name.startswith(prefix)}
        if found:
            save_file(folder / f"{option}.safetensors", found)
            options += [f"--{option}", str(folder / f"{option}.safetensors")]
    save_file(folder / "transformer.safetensors", arrays)
    return folder / "transformer.safetensors", options


@pytest.fixture
def draw(tmp_path):
    def run(checkpoint, *options):
        line = f"sample -m {checkpoint} -p circle -o {tmp_path / 'x.png'} --force --device cpu --precision fp32"
        return cli.run([*line.split(), "--steps", "2", "--width", "64", "--height", "64", *options])

    return run


@pytest.fixture
def drawn(draw, tmp_path):
    def pixels(checkpoint, *options):
        assert draw(checkpoint, *options) == 0
        with Image.open(tmp_path / "x.png") as image:
            return np.asarray(image).astype(int)

    return pixels


def test_networks_in_files_of_their_own_draw_the_same(drawn, base, split):
    checkpoint, options = split
    np.testing.assert_array_equal(drawn(checkpoint, *options), drawn(base))


def test_a_file_that_is_lacking_is_named_by_its_option(draw, split, capsys):
    checkpoint, options = split
    at = options.index("--t5")
    assert draw(checkpoint, *options[:at], *options[at + 2 :]) == 2
    assert "--t5: " in capsys.readouterr().err


def test_t5_is_given_as_many_tokens_as_a_lora_was_trained_with(draw, drawn, base, family, capsys):
    usual = {"sd3": "256", "flux": "512"}[family]
    np.testing.assert_array_equal(drawn(base, "--t5-tokens", usual), drawn(base))
    assert not np.array_equal(drawn(base, "--t5-tokens", "77"), drawn(base))
    assert draw(base, "--t5-tokens", "78") == 2
    assert "--t5-tokens: expected one of 0, 77, 154, 256, 512, got 78" in capsys.readouterr().err


def test_t5_in_8_bits_draws_nearly_the_same(drawn, base):
    away = np.abs(drawn(base, "--text-precision", "fp8") - drawn(base))
    assert away.max() > 0
    assert away.mean() < 4


def test_a_file_that_means_nothing_is_refused(small_base, draw, base, family, capsys):
    assert draw(small_base, "--t5", str(base)) == 2
    assert "--t5: it has no effect on SDXL" in capsys.readouterr().err
    if family == "flux":
        assert draw(base, "--clip-g", str(base)) == 2
        assert "--clip-g: it has no effect on Flux.1" in capsys.readouterr().err
