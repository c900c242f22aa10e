"""The small Qwen-Image-Edit whose weights are set by hand: it draws its control image again."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flame_train.engine import no_grad, tensor
from flame_train.models.registry import FAMILIES, NOTHING_NAMED
from flame_train.quickstart.drawings import render, scenes

from .accepting import SCRIPTS


def test_the_velocity_is_that_of_the_control_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(x - x0) / t at small times and large ones, and the autoencoder gives a drawing back, blurred."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    base = importlib.import_module("small_edit").write_base(tmp_path)
    model = FAMILIES["qwenimage1"].open(replace(NOTHING_NAMED, base=base))
    vae = model.vae.part.load(device="cpu", dtype="fp32")
    network = model.denoiser.load(device="cpu", dtype="fp32")
    pixels = np.asarray(render(np, scenes(2, (96, 64), 5, textures=("plain",)), (96, 64))) / 127.5 - 1.0
    rng = np.random.default_rng(0)
    with no_grad():
        mean, _ = vae.encode_moments(tensor(pixels.astype(np.float32)))
        assert np.abs(vae.decode(mean).numpy() - pixels).mean() < 0.1
        noise = rng.standard_normal(mean.shape).astype(np.float32)
        states, rows = tensor(rng.standard_normal((2, 64, 256)).astype(np.float32)), tensor(np.full(2, 64, np.int32))
        for t in (0.05, 0.9):
            x = tensor((1 - t) * mean.numpy() + t * noise)
            times = tensor(np.full(2, t, np.float32))
            made = network(x, times, states, rows, [mean], zero_cond=True).numpy()
            wanted = noise - mean.numpy()
            assert np.abs(made - wanted).mean() < 0.02 * np.abs(wanted).mean(), t
