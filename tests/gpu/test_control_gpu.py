"""Control images in a captured step: the loss is the CPU's, and a run is the same bytes twice, streamed or not."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageOps

from flame_train.models.registry import FAMILIES
from flame_train.run.commands.stages import train
from tests.run_files import losses_of

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["flux2", "flux"])
def config(request, drawn, tmp_path):
    """Writes a config of drawings with their negatives as control images; steps beyond the first are captured."""
    FAMILIES[request.param].write_small_base(tmp_path, 3)
    (tmp_path / "base.safetensors").rename(tmp_path / "kontext.safetensors")
    (tmp_path / "before").mkdir()
    for path in drawn.glob("*.png"):
        with Image.open(path) as image:
            ImageOps.invert(image.convert("RGB")).save(tmp_path / "before" / path.name)
    tokens = "qwen3_tokens = 128" if request.param == "flux2" else "t5_tokens = 77"

    def write(name):
        path = tmp_path / f"{name}.toml"
        path.write_text(
            f'[model]\ncheckpoint = "{tmp_path / "kontext.safetensors"}"\n[text_encoders]\n{tokens}\n'
            f'[data]\npath = "{drawn}"\ncontrol = "{tmp_path / "before"}"\ncache = "{tmp_path / "cache"}"\n'
            "resolution = 128\nbucket_step = 32\nbatch_size = 2\nflip = true\n[lora]\nrank = 4\nalpha = 4.0\n"
            '[gradient]\ncheckpointing = "full"\n[train]\nsteps = 12\nprecision = "fp32"\n'
            f'[sample]\nevery = 12\nsteps = 2\nprompts = ["a"]\ncontrol = "{next((tmp_path / "before").iterdir())}"\n'
            f'[output]\ndir = "{tmp_path / name}"\n'
        )
        return str(path)

    return write


def test_a_captured_step_takes_control_images(config, tmp_path):
    train(config("run"), [], "cuda", False)
    whole, found = (tmp_path / "run" / "lora.safetensors").read_bytes(), losses_of(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "one")
    train(config("run"), [], "cuda", False)
    assert (tmp_path / "run" / "lora.safetensors").read_bytes() == whole
    train(config("streamed"), ["model.offload=1.0"], "cuda", False)
    assert losses_of(tmp_path / "streamed") == found
    train(config("cpu"), [], "cpu", False)
    np.testing.assert_allclose(found, losses_of(tmp_path / "cpu"), rtol=2e-3)
