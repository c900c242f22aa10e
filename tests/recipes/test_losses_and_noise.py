"""Every family trains with every kind of noise, and with losses and timesteps beside the usual ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.recipes.bases import lose_end, settings
from tests.run_files import lora_of, losses_of

NOISES = {
    "loss.offset_noise": "0.1",
    "loss.offset_noise_random": "true",
    "loss.offset_noise_adaptive": "0.05",
    "loss.pyramid_noise": "4",
    "loss.immiscible_noise": "true",
    "loss.input_perturbation": "0.1",
}
OTHERS = {
    "loss.kind": "huber",
    "loss.huber_schedule": "exponential",
    "loss.timestep_sampling": "beta",
    "loss.min_timestep": "100",
    "loss.max_timestep": "900",
}


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_a_run_with_all_of_them_continues_to_the_bit(
    family: str, train_small: Callable[..., int], tmp_path: Path
) -> None:
    keys = NOISES | OTHERS | {"checkpoint.every": "2"}

    def run(name: str, **more: str) -> dict[str, bytes]:
        place = {"output.dir": str(tmp_path / name), "schedule.name": "constant"}
        assert train_small(family, *settings(place | more)) == 0
        return lora_of(tmp_path / name)

    whole = run("parts", **keys)
    losses = losses_of(tmp_path / "parts")
    assert len(losses) == 3
    assert np.isfinite(losses).all()
    lose_end(tmp_path / "parts")
    assert run("parts", **keys) == whole
    assert run("plain") != whole
