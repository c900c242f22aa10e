"""SDXL's network as a rectified flow: what is told and compared, runs, previews, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flame_train import cli
from flame_train.config.schema import LossSection, ModelSection
from flame_train.data.buckets import Placement
from flame_train.diffusion.flow import FlowObjective
from flame_train.diffusion.samplers.euler import Euler
from flame_train.engine import Tensor
from flame_train.io.safetensors import SafetensorsFile
from flame_train.models.common.family import Opening
from flame_train.models.registry import FAMILIES, NOTHING_NAMED
from flame_train.models.sdxl.family import SdxlFlowModel
from tests.recipes.bases import lose_end, settings
from tests.run_files import lora_of, losses_of


def opened(small_base: Path) -> SdxlFlowModel:
    model = FAMILIES["sdxl"].open(Opening(small_base, ModelSection(prediction="flow"), NOTHING_NAMED.text, 77))
    assert isinstance(model, SdxlFlowModel)
    return model


def test_the_network_is_told_the_thousandfold_level(small_base: Path) -> None:
    """And sees the straight mixture, whose noise less image it is compared with."""
    model, told = opened(small_base), []

    def network(x: Tensor, t: Tensor, *_: Tensor) -> Tensor:
        told.append(t.numpy())
        return x

    x = Tensor(np.ones((2, 4, 4, 4), np.float32))
    s = Tensor(np.array([0.25, 0.7318], np.float32))
    words = {name: Tensor(np.zeros((2, *shape), np.float32)) for name, shape in model.caption_shapes().items()}
    whole = (32, 32)
    ids = model.size_conditioning(Placement(whole, whole, whole, 0, 0))
    cond = words | {name: Tensor(np.stack([value] * 2)) for name, value in ids.items()}
    model.predict(network, x, s, cond, x)  # type: ignore[arg-type]  # it is only called
    np.testing.assert_allclose(told[0], [250.0, 731.8], rtol=1e-6)
    objective = model.objective(ModelSection(prediction="flow"), LossSection(), "cpu")
    assert isinstance(objective, FlowObjective)
    noise = Tensor(np.full((2, 4, 4, 4), 3.0, np.float32))
    np.testing.assert_allclose(objective.noised(x, noise, s).numpy()[:, 0, 0, 0], 1 + 2 * s.numpy(), rtol=1e-6)
    assert (objective.target(x, noise, s).numpy() == 2.0).all()


def test_its_sampler_comes_to_the_image(small_base: Path) -> None:
    """For a network that knows the image: x_s = (1 - s) image + s noise gives noise - image."""
    image, noise = (np.random.default_rng(i).standard_normal((1, 4, 4, 4)).astype(np.float32) for i in range(2))
    path = opened(small_base).path(ModelSection(prediction="flow"), LossSection(), 7, (32, 32))
    found = Euler().sample(lambda x, s, cond: Tensor(noise - image), Tensor(noise), None, path, lambda i: Tensor(noise))
    np.testing.assert_allclose(found.numpy(), image, atol=1e-5)


def test_a_run_continues_to_the_bit_with_every_choice(train_small: Callable[..., int], tmp_path: Path) -> None:
    keys = {
        "model.prediction": "flow",
        "loss.shift": "2.5",
        "loss.kind": "huber",
        "loss.weighting": "cosmap",
        "loss.timestep_sampling": "beta",
        "loss.min_timestep": "100",
        "loss.pyramid_noise": "3",
        "schedule.name": "constant",
        "checkpoint.every": "2",
        "sample.every": "2",
        "sample.prompts": "['a red circle']",
        "sample.steps": "2",
    }

    run = tmp_path / "run"
    asked = settings(keys | {"output.dir": str(run)})
    assert train_small("sdxl", *asked) == 0
    whole = lora_of(run)
    losses = losses_of(run)
    assert len(losses) == 3
    assert np.isfinite(losses).all()
    with SafetensorsFile(run / "lora.safetensors") as file:
        assert "flow" in file.metadata.values()
    lose_end(run)
    assert train_small("sdxl", *asked) == 0
    assert lora_of(run) == whole


def test_images_are_drawn_by_its_command(small_base: Path, tmp_path: Path) -> None:
    command = ["sample", "--checkpoint", str(small_base), "--prompt", "a red circle", "--prediction", "flow"]
    size = [
        "--steps",
        "2",
        "--width",
        "64",
        "--height",
        "64",
        "--device",
        "cpu",
        "--output",
        str(tmp_path / "drawn.png"),
    ]
    assert cli.run([*command, *size]) == 0
    assert list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"model.prediction": "flow", "loss.weighting": "min_snr"}, 'loss.weighting: "min_snr" has no formula'),
        ({"model.prediction": "flow", "loss.zero_terminal_snr": "true"}, "loss.zero_terminal_snr: means nothing with"),
        ({"model.prediction": "flow", "sample.sampler": "ddim"}, 'sample.sampler: expected "euler" or "heun" for a'),
        ({"loss.shift": "2.0"}, 'loss.shift: expected model.prediction = "flow" with it, got 2.0'),
        ({"loss.weighting": "cosmap"}, 'loss.weighting: "cosmap" has no formula'),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    keys: dict[str, str], told: str, train_small: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_small("sdxl", *settings(keys | {"output.dir": str(tmp_path / "run")}), "--dry-run") == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if told in line]
    assert len(lines) == 1
