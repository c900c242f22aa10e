"""The drawings as two sets with everything on: the same bytes twice, and after being killed and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flame_train.config.load import load
from flame_train.data.order import Choice
from flame_train.errors import DataError
from flame_train.models.registry import FAMILIES
from flame_train.run.check.check_run import check
from flame_train.run.commands.stages import train
from flame_train.run.encode.encode import encode
from flame_train.run.plan.plan import make_plan
from flame_train.training.session import Session, StopRequest
from tests.run_files import log_of

ROOT = Path(__file__).parents[2]

CONFIG = """
[model]
checkpoint = "{base}"
[data]
resolutions = [64, 96]
bucket_step = 32
cache = "{tmp}/cache"
flip = true
caption_dropout = 0.2
masks = "files"
mask_weight = 0.25
mask_normalize = true
[captions]
shuffle = true
separator = " "
keep_tokens = 1
tag_dropout = 0.2
variants = 4
[[data.sets]]
path = "{tmp}/images"
repeats = 2
batch_size = 2
captions.trigger = "delft"
[[data.sets]]
path = "{tmp}/kept"
weight = 0.5
random_crop = true
views = 2
brightness = 0.2
regularization = true
regularization_weight = 0.5
captions.shuffle = false
[[data.sets]]
path = "{tmp}/held"
validation = true
[lora]
rank = 2
[schedule]
name = "constant"
[train]
precision = "fp32"
steps = 12
[checkpoint]
every = 3
[validation]
every = 4
[sample]
every = 6
steps = 2
width = 64
height = 64
prompts = ["a red circle --d 3", "a delft tile --w 96"]
[output]
dir = "{tmp}/{out}"
{text}
"""
TEXT = {
    "sdxl": "[text_encoders]\nclip_g_dropout = 0.3",
    "sd3": '[text_encoders]\nt5_tokens = 77\nt5_padding = "masked"\nt5_dropout = 0.3',
    "flux": "[text_encoders]\nt5_tokens = 77\nclip_l_dropout = 0.3",
}


@pytest.fixture
def config(drawn, tmp_path, small_base):
    """Writes the config of a run folder; the drawings lie in three sets, three of the first with masks."""
    for name, ending in (("kept", "1"), ("held", "2")):
        (tmp_path / name).mkdir()
        for path in drawn.glob(f"*-0{ending}.*"):
            path.rename(tmp_path / name / path.name)
    for path in sorted(drawn.glob("*.png"))[:3]:
        with Image.open(path) as image:
            pixels = np.zeros((image.height, image.width), np.uint8)
        pixels[16:48, 16:48] = 255
        Image.fromarray(pixels).save(path.with_name(f"{path.stem}.mask.png"))

    def write(out="run", family="sdxl", **changes):
        base = small_base
        if family != "sdxl":
            FAMILIES[family].write_small_base(tmp_path, 3)
            base = tmp_path / "base.safetensors"
        text = CONFIG.format(base=base, tmp=tmp_path, out=out, text=TEXT[family])
        for old, new in changes.items():
            text = text.replace(old, new)
        (tmp_path / f"{out}.toml").write_text(text)
        return str(tmp_path / f"{out}.toml")

    return write


def result(config: str) -> bytes:
    train(config, [], "cpu", False)
    return (Path(load(config).output.dir) / "lora.safetensors").read_bytes()


@pytest.mark.parametrize(
    "family", ["sdxl", pytest.param("sd3", marks=pytest.mark.proof), pytest.param("flux", marks=pytest.mark.proof)]
)
def test_killed_and_continued_it_is_the_same_bytes(config, tmp_path, family, forked):
    path = config(family=family)
    arm = "import sys; from flame_train.disk import failpoint; failpoint.arm(sys.argv.pop(1)); "
    program = arm + "from flame_train import cli; cli.main()"
    for point in ("train.in_step:9", "train.before_update:3"):
        ended = subprocess.run(
            [*forked, "-c", program, point, "train", "--config", path, "--device", "cpu"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            timeout=240,
        )
        assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    killed = result(path)
    assert validations(tmp_path / "run") == [4, 8, 12]
    (tmp_path / "run").rename(tmp_path / "killed")
    assert result(path) == killed
    for name in ("step-000006.png", "step-000012.png"):
        assert (tmp_path / "run/samples" / name).read_bytes() == (tmp_path / "killed/samples" / name).read_bytes()
    if family != "sdxl":  # a third time where time is no matter
        (tmp_path / "run").rename(tmp_path / "once")
        assert result(path) == killed


def validations(folder: Path) -> list[int]:
    """The steps after which the run's log has a validation."""
    records = log_of(folder)
    return [record["step"] for record in records if "validation" in record]


def test_the_report_says_each_images_captions_bucket_crop_and_mask(config, tmp_path):
    path = config()
    train(path, ["train.steps=1"], "cpu", False)
    rows = json.loads((tmp_path / "run" / "dataset.json").read_text())
    assert {row["set"] for row in rows if "validation" not in row} == {"images", "kept"}
    assert {row["set"] for row in rows if "validation" in row} == {"held"}
    masked = [row for row in rows if "mask" in row]
    assert len({row["file"] for row in masked}) == 3
    assert len(masked) == 6  # at two resolutions
    assert {row["bucket"] for row in rows} >= {"64x64", "96x96"}
    assert all(len(row["views"]) == (4 if row["set"] == "kept" else 2) for row in rows)
    assert all("delft" in text for row in rows if row["set"] == "images" for text in row["captions"])
    assert max(len(row["captions"]) for row in rows) == 4


def test_an_example_has_its_choice_of_view_text_and_weights(config):
    plan, stop = make_plan(check(load(config())), StopRequest()), StopRequest()
    keys = plan.encoding.keys(plan.samples, ())
    encoded = encode(plan, keys, Session("cpu", stop=stop))
    rows = plan.samples.rows
    masked = next(i for i, row in enumerate(rows) if row.item.mask)
    plain = next(i for i, row in enumerate(rows) if not row.item.mask and not row.set.regularization)
    kept = next(i for i, row in enumerate(rows) if row.set.regularization)
    own, mirrored = (encoded.example(masked, Choice(view=view)) for view in (0, 1))
    assert (own["mean"] != mirrored["mean"]).any()
    assert np.allclose(own["loss_weight"], mirrored["loss_weight"][:, ::-1])
    assert own["loss_weight"].mean() == pytest.approx(1.0, rel=1e-6)
    assert own["loss_weight"].max() / own["loss_weight"].min() == pytest.approx(4.0)
    assert (encoded.example(plain)["loss_weight"] == 1.0).all()
    assert (encoded.example(kept)["loss_weight"] == 0.5).all()
    texts = [encoded.example(masked, Choice(text=text)) for text in range(2)]
    assert any((texts[0][name] != texts[1][name]).any() for name in encoded.encoding.caption_shapes)


def test_a_black_mask_is_refused_before_the_first_step(config, drawn, tmp_path):
    names = sorted(path.name for path in drawn.glob("*.mask.png"))
    for name in names[:2]:
        with Image.open(drawn / name) as mask:
            size = mask.size
        Image.new("L", size).save(drawn / name)
    path = config(**{"mask_weight = 0.25": "mask_weight = 0.0"})
    with pytest.raises(DataError) as error:
        train(path, [], "cpu", False)
    assert all(f"{name}: the mask is black all over" in str(error.value) for name in names[:2])
    assert not (tmp_path / "run" / "checkpoints").exists() or not list((tmp_path / "run" / "checkpoints").iterdir())


def test_what_is_wrong_with_all_sets_is_one_report(config, drawn, tmp_path):
    mask = sorted(drawn.glob("*.mask.png"))[0]
    Image.new("L", (8, 8)).save(mask)
    text = sorted((tmp_path / "kept").glob("*.txt"))[0]
    text.write_text("a {red|blue tile")
    for path in (tmp_path / "held").iterdir():
        path.unlink()
    source = config(**{"captions.shuffle = false": "captions.wildcards = true"})
    with pytest.raises(DataError) as error:
        train(source, [], "cpu", False)
    said = str(error.value)
    assert f"{mask.name}: a mask of 8x8 pixels for " in said
    assert f"{text.stem}.png: its caption: the wildcard that begins at character 3 does not close" in said
    assert "no usable image" in said
