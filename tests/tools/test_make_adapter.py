"""`flame-train adapter`: what it draws, keeps, continues and writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from flame_train import cli
from flame_train.errors import Interrupted
from flame_train.io.safetensors import SafetensorsFile
from flame_train.models.registry import FAMILIES
from flame_train.run.encode import encode
from flame_train.tools import make_adapter
from flame_train.tools.make_adapter import AdapterOrder, captions_of
from tests.recipes.test_distilled import write_adapter
from tests.run_files import bytes_of

IMAGES = 6


@pytest.fixture
def turbo(tmp_path: Path) -> Path:
    FAMILIES["zimage"].write_small_base(tmp_path, 3)
    return (tmp_path / "base.safetensors").rename(tmp_path / "z_image_turbo.safetensors")


def asked(turbo: Path, output: Path) -> list[str]:
    settings = ("data.bucket_step=32", "train.precision=fp32", "sample.steps=2", "validation.patience=1")
    own = ["--resolution", "64", "--images", str(IMAGES), "--steps", "4", "--every", "2", "--rank", "2", "--batch", "2"]
    own += [word for setting in settings for word in ("--set", setting)]
    return ["adapter", str(turbo), "-o", str(output), *own, "--device", "cpu"]


def test_it_is_made_of_what_the_model_draws_and_goes_on_after_a_stop(
    turbo: Path, tmp_path: Path, drawn: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped while it draws, it goes on to the same bytes. The autoencoder reads no image: latents are kept."""
    monkeypatch.setattr(encode, "_encode_images", lambda *_: pytest.fail("an image was encoded"))
    whole, stopped = (tmp_path / name / "adapter.safetensors" for name in ("whole", "stopped"))
    for file in (whole, stopped):
        file.parent.mkdir()
    assert cli.run([*asked(turbo, whole), "--dry-run", "--json"]) == 0
    foreseen = json.loads(capsys.readouterr().out)
    assert not list(whole.parent.iterdir())
    assert cli.run(asked(turbo, whole)) == 0
    images = sorted((tmp_path / "whole/adapter.making/images").glob("*.png"))
    assert len(images) == foreseen["images"] == IMAGES
    assert len({image.read_bytes() for image in images}) == IMAGES
    taken = sum(path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file())
    assert foreseen["disk_gib"] < 0.1 > taken / 2**30

    draw, count = make_adapter.generate_image, iter(range(IMAGES))

    def until_stopped(*given: object) -> object:
        if next(count) == 3:
            raise Interrupted("stopped")
        return draw(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(make_adapter, "generate_image", until_stopped)
    assert cli.run(asked(turbo, stopped)) != 0
    assert len(list((tmp_path / "stopped/adapter.making/images").glob("*.png"))) == 3
    monkeypatch.setattr(make_adapter, "generate_image", draw)
    assert cli.run(asked(turbo, stopped)) == 0
    assert bytes_of(stopped) == bytes_of(whole)
    with SafetensorsFile(whole) as file:
        assert "add it to z_image_turbo.safetensors" in file.metadata["flame_train_purpose"]
        down = next(name for name in file.names if name.endswith("lora_down.weight"))
        assert file.read(down).shape[0] == 2

    capsys.readouterr()
    assert cli.run(asked(turbo, whole)) != 0
    assert "adapter.safetensors" in capsys.readouterr().err
    config = tmp_path / "on-it.toml"
    config.write_text(
        f'[model]\ncheckpoint = "{turbo}"\ntraining_adapter = "{whole}"\n[data]\npath = "{drawn}"\nresolution = 64\n'
        f'bucket_step = 32\n[train]\nsteps = 1\nprecision = "fp32"\n[output]\ndir = "{tmp_path / "on-it"}"\n'
    )
    assert cli.run(["train", str(config), "--device", "cpu", "--dry-run"]) == 0


def test_images_that_something_else_drew_are_not_taken(
    turbo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another model, of other captions, of another seed, or more of them; more images are drawn beside them."""
    other, output = tmp_path / "other", tmp_path / "adapter.safetensors"
    other.mkdir()
    FAMILIES["zimage"].write_small_base(other, 9)
    asked_first = asked(turbo, output)
    assert cli.run(asked_first) == 0
    shutil.rmtree(tmp_path / "adapter.making/run")
    output.unlink()
    (tmp_path / "captions.txt").write_text("one\ntwo\n")
    fewer = ["4" if word == str(IMAGES) else word for word in asked_first]
    for given, named in (
        (asked(other / "base.safetensors", output), "another model"),
        ([*asked_first, "--captions", str(tmp_path / "captions.txt")], "another text"),
        ([*asked_first, "--seed", "7"], "another seed"),
        (fewer, f"was begun for {IMAGES} images, more than"),
    ):
        capsys.readouterr()
        assert cli.run(given) == 6
        assert named in capsys.readouterr().err
    record = tmp_path / "adapter.making/images.json"
    kept = record.read_bytes()
    record.write_bytes(b"{}")
    assert cli.run(asked_first) == 6
    record.write_bytes(kept)
    assert cli.run(["8" if word == str(IMAGES) else word for word in asked_first]) == 0
    assert len(list((tmp_path / "adapter.making/images").glob("*.png"))) == 8


@pytest.mark.parametrize("key", ["model.training_adapter", "sample.model"])
def test_images_are_of_the_model_itself(
    turbo: Path, tmp_path: Path, drawn: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    (tmp_path / "same.safetensors").write_bytes(turbo.read_bytes())
    given = write_adapter(tmp_path / "a.safetensors") if key.startswith("model") else tmp_path / "same.safetensors"
    assert cli.run([*asked(turbo, tmp_path / "adapter.safetensors"), "--set", f"{key}={given}"]) == 2
    assert f"{key}: expected none" in capsys.readouterr().err
    assert cli.run([*asked(turbo, tmp_path / "adapter.safetensors"), "--set", f"data.path={drawn}"]) == 2
    assert "learns the images that the model draws" in capsys.readouterr().err


def test_real_images_are_mixed_in(turbo: Path, tmp_path: Path, drawn: Path) -> None:
    shutil.copytree(drawn, tmp_path / "real")
    output = tmp_path / "adapter.safetensors"
    assert cli.run([*asked(turbo, output), "--real", str(tmp_path / "real")]) == 0
    report = json.loads((tmp_path / "adapter.making/run/dataset.json").read_text())
    real = len(list((tmp_path / "real").glob("*.png")))
    assert len(report) == IMAGES + real


def test_captions_are_of_a_file_or_of_the_list_that_comes_along(tmp_path: Path) -> None:
    own = list(captions_of(AdapterOrder("m", tmp_path / "a.safetensors", images=400)))
    assert len(set(own)) > 390
    assert all(caption.count(",") >= 3 for caption in own)
    (tmp_path / "c.txt").write_text("one\n\n two \n", encoding="utf-8-sig")
    assert list(captions_of(AdapterOrder("m", tmp_path / "a.safetensors", tmp_path / "c.txt", 3))) == [
        "one",
        "two",
        "one",
    ]


def test_drawn_images_have_the_shapes_of_buckets(turbo: Path, tmp_path: Path) -> None:
    prompts = make_adapter._prompts(AdapterOrder(str(turbo), tmp_path / "a.safetensors"), 6)
    sizes = {(prompt["height"], prompt["width"]) for prompt in prompts}
    assert len(sizes) == 5
    assert all(np.isclose(h * w, 1024**2, rtol=0.1) for h, w in sizes)
