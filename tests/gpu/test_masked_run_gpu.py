"""Masks and weights in a captured step: the loss is the CPU's, and a run is the same bytes twice."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from flame_train.config.render import resolved
from flame_train.run.commands.stages import train
from tests.run_files import losses_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def config(small_config, drawn, tmp_path):
    """Writes a config of the drawings, half of them with masks, as one set of two; steps beyond the first captured."""
    for path in sorted(drawn.glob("*.png"))[::2]:
        with Image.open(path) as image:
            pixels = np.zeros((image.height, image.width), np.uint8)
        pixels[16:48, 16:48] = 255
        Image.fromarray(pixels).save(path.with_name(f"{path.stem}.mask.png"))

    def write(name, **data):
        sets = ({"path": str(drawn)}, {"path": str(drawn), "regularization": True, "regularization_weight": 0.5})
        usual = {"path": "", "cache": str(tmp_path / "cache"), "sets": sets, "batch_size": 2, "flip": True}
        made = small_config(
            data=usual | data,
            train={"precision": "fp32", "steps": 12},
            output={"dir": str(tmp_path / name)},
        )
        (tmp_path / f"{name}.toml").write_text(resolved(made))
        return str(tmp_path / f"{name}.toml")

    return write


@pytest.mark.parametrize("data", [{"masks": "files", "mask_normalize": True}, {}])
def test_a_captured_step_takes_masks_and_weights(config, tmp_path, data):
    first = config("run", **data)
    train(first, [], "cuda", False)
    whole = (tmp_path / "run" / "lora.safetensors").read_bytes()
    found = losses_of(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "one")
    train(first, [], "cuda", False)
    assert (tmp_path / "run" / "lora.safetensors").read_bytes() == whole
    train(config("cpu", **data), [], "cpu", False)
    np.testing.assert_allclose(found, losses_of(tmp_path / "cpu"), rtol=2e-3)
