"""Sample grids of a run whose prompts differ in all that they may."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest
from PIL import Image

from flame_train.errors import ConfigError
from flame_train.run.commands.stages import train


@pytest.fixture
def asked(small_base, drawn, tmp_path):
    def make(name, **sample):
        return {
            "model": {"checkpoint": str(small_base)},
            "data": {"path": str(drawn), "resolution": 64, "bucket_step": 32, "batch_size": 2},
            "lora": {"rank": 2, "alpha": 2.0},
            "optimizer": {"lr": 0.05},
            "train": {"precision": "fp32", "steps": 3},
            "sample": {"every": 3, "steps": 2} | sample,
            "output": {"dir": str(tmp_path / name), "title": "tiles"},
        }

    return make


def grid(tmp_path, name, step):
    with Image.open(tmp_path / name / "samples" / f"step-{step:06d}.png") as image:
        return np.asarray(image).astype(int)


def test_a_grid_of_unlike_prompts_changes_no_trained_byte(asked, tmp_path):
    """A prompt of strength 0 shows the base model before and after training; the others change."""
    (tmp_path / "more.txt").write_text(
        "# kohya's\na red house --d 3 --w 64 --h 32 --s 3 --l 2 --ss euler_a --n a circle\n"
    )
    prompts = ["a blue circle --am 0", {"text": "a blue circle", "seed": 42, "sampler": "heun", "strength": 0.5}]
    train(asked("with", prompts=prompts, prompt_file=str(tmp_path / "more.txt")), [], "cpu", False)
    train(asked("without"), [], "cpu", False)
    assert (tmp_path / "with" / "lora.safetensors").read_bytes() == (
        tmp_path / "without" / "lora.safetensors"
    ).read_bytes()
    before, after = (grid(tmp_path, "with", step) for step in (0, 3))
    assert before.shape == (64 + 4 + 64, 64 + 4 + 64, 3)
    np.testing.assert_array_equal(before[:64, :64], after[:64, :64])
    assert not np.array_equal(before[:64, 68:], after[:64, 68:])
    assert not np.array_equal(before[68:100, :64], after[68:100, :64])
    assert (after[100:, :64] == 255).all()
    kept = tomllib.loads((tmp_path / "with" / "config.toml").read_text())["sample"]
    assert (len(kept["prompts"]), kept["prompt_file"]) == (3, "")
    train(asked("again", **kept), [], "cpu", False)
    np.testing.assert_array_equal(grid(tmp_path, "again", 3), after)


def test_what_is_wrong_with_prompts_is_told_before_the_first_step_with_everything_else(asked, tmp_path):
    (tmp_path / "more.txt").write_text("fine\nx --zz 1\ny --w 7\n")
    source = asked("run", prompt_file=str(tmp_path / "more.txt"))
    source["lora"]["targets"] = ["nothing.*"]
    with pytest.raises(ConfigError) as told:
        train(source, [], "cpu", False)
    said = str(told.value)
    assert f"{tmp_path / 'more.txt'}:2: unknown flag --zz" in said
    assert f"{tmp_path / 'more.txt'}:3: width: " in said
    assert "lora.targets" in said
    assert not (tmp_path / "run").exists()


def test_trackers_get_each_step_the_images_and_the_config(asked, tmp_path, monkeypatch):
    """And change no trained byte."""
    pytest.importorskip("tensorboardX")
    begun, told = [], []

    class Recorder:
        def __init__(self, folder, project, config, name):
            begun.append((folder, project, config["train"]["steps"], name))

        def write(self, record):
            told.append(record["step"])

        def show(self, step, images):
            told.append((step, *images))

        def close(self):
            told.append("closed")

    monkeypatch.setattr("flame_train.training.loop.WeightsAndBiases", Recorder)
    with_trackers = asked("with", prompts=["a blue circle"])
    with_trackers["output"] |= {"tensorboard": True, "wandb": "loras"}
    train(with_trackers, [], "cpu", False)
    train(asked("without"), [], "cpu", False)
    assert begun == [(tmp_path / "with", "loras", 3, "with")]
    image = "samples/01 a blue circle"
    assert told == [(0, image), 1, 2, 3, (3, image), "closed"]
    events = b"".join(path.read_bytes() for path in (tmp_path / "with" / "tensorboard").iterdir())
    assert events.count(image.encode()) == 2
    assert b"config/text_summary" in events
    trained = [(tmp_path / name / "lora.safetensors").read_bytes() for name in ("with", "without")]
    assert trained[0] == trained[1]
