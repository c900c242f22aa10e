"""The autoencoder set by hand, with which a small Wan learns a style or a motion: what comes back, and how far off."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from flame_train.engine import Tensor, no_grad
from flame_train.models.wan.names import TINY_VAE
from flame_train.networks.vae.vae import Vae

from .accepting import SCRIPTS


def test_a_tile_comes_back_with_the_mean_colours_of_its_cells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of 255, away from edges, which are drawn smoothly."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    small_clip, style = (importlib.import_module(name) for name in ("small_clip", "small_style"))
    vae = Vae(TINY_VAE)
    vae.init(np.random.default_rng(0), "float32")
    by_hand = small_clip.autoencoder(TINY_VAE)
    for name, part, attribute, _ in vae.named_specs():
        getattr(part, attribute).data[...] = by_hand[name]
    tile = style.image(np.random.default_rng(6), "red", "square", tile=True)
    with no_grad():
        latents = vae.encode_moments(Tensor(small_clip.to_unit(tile[None, None])))[0]
        found = vae.decode(latents).numpy().reshape(style.SIDE, style.SIDE, 3)
    pixels = (found + 1) * 127.5
    for row, column, colour in ((40, 40, style._LIGHT), (96, 96, small_clip.COLOURS["red"])):
        assert np.abs(pixels[row, column] - colour).max() < 6, (row, column, pixels[row, column], colour)
