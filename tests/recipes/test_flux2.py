"""FLUX.2 klein from a config to a LoRA, on a small base with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flame_train import cli
from flame_train.adapters.formats import from_file
from flame_train.models.flux2.names import lora_family
from flame_train.models.registry import family_of
from tests.recipes.bases import small_base
from tests.run_files import log_of


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "flux2")


def test_a_run_writes_the_same_lora_in_both_formats(base: Path, drawn: Path, tmp_path: Path) -> None:
    """Images are cut into latent pixels of 16; a side of 48 is three of them."""
    assert family_of(base).name == "flux2"
    config = tmp_path / "config.toml"
    config.write_text(
        f'[model]\ncheckpoint = "{base}"\n[text_encoders]\nqwen3_tokens = 128\n[data]\npath = "{drawn}"\n'
        "resolution = 48\nbucket_step = 16\nbatch_size = 2\n[lora]\nrank = 2\nalpha = 2.0\n"
        'targets = ["full"]\n[train]\nsteps = 2\nprecision = "fp32"\n[sample]\nevery = 2\nprompts = ["a red circle"]\n'
        f'steps = 2\n[output]\nformat = "both"\ndir = "{tmp_path / "run"}"\n'
    )
    assert cli.run(["train", str(config), "--device", "cpu"]) == 0
    run = tmp_path / "run"
    log = log_of(run)
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in log)
    assert (run / "samples" / "step-000002.png").exists()
    files = [from_file(path, lora_family()).state["transformer"] for path in sorted(run.glob("lora*.safetensors"))]
    assert len(files) == 2
    assert files[0].keys() == files[1].keys()
    assert len(files[0]) == 20
