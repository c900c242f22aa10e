"""The file a run leaves: read by other programs' rules it is the update that was trained, in both formats."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from flame_train.adapters.attach import Attached, attach
from flame_train.adapters.formats import from_file
from flame_train.adapters.targets import UNET_PRESETS, resolve
from flame_train.config.keys import keys
from flame_train.data.sets import DataSet
from flame_train.engine.backend import get_backend
from flame_train.errors import ModelFileError, NonFiniteError
from flame_train.io.safetensors import SafetensorsFile
from flame_train.models.flux import names as flux
from flame_train.models.sd3 import names as sd3
from flame_train.models.sdxl.names import lora_family
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.run.finish.finish import lora_writer
from flame_train.run.train.step_state import build_optimizer
from flame_train.tools.lora_files import require_lora
from flame_train.training.result import Sources, checkpoint_files

RANK, ALPHA = 3, 5.0
CAPTIONS = ("cat, red", "cat", "dog, , red")
SET = DataSet(path="photos", flip=True)
PHOTOS = SimpleNamespace(
    sets=(SET,),
    rows=[
        SimpleNamespace(
            item=SimpleNamespace(caption=text, captions=(text,), sha256=str(i)),
            set=SET,
            repeats=repeats,
            placement=SimpleNamespace(bucket=(64, 96) if i else (64, 64)),
        )
        for i, (text, repeats) in enumerate(zip(CAPTIONS, (2, 2, 3), strict=True))
    ],
)
"""What is asked of the samples."""


@pytest.fixture(scope="module")
def attached():
    """A small UNet with adapters everywhere, as after training: no matrix is zero."""
    unet = UNet(UNetArch.tiny(16))
    rng = np.random.default_rng(0)
    unet.init(rng)
    made = attach(unet, resolve(unet, ["full"], UNET_PRESETS), rank=RANK, alpha=ALPHA, seed=1)
    for parameter in made.parameters():
        parameter.data[...] = rng.standard_normal(parameter.shape)
    return made


def named(names):
    """Of a model what its LoRA files say: how they name modules, and the first component as the denoiser."""
    first = names.components[0].name
    return SimpleNamespace(
        lora_names=names, denoiser=SimpleNamespace(component=first), place=lambda layer, trained: (first, layer)
    )


@pytest.fixture
def write(attached, small_config, tmp_path):
    def to(name, **sections):
        path = tmp_path / name
        out = {"precision": "fp32"} | sections.pop("output", {})
        config = small_config(**{"lora": {"rank": RANK, "alpha": ALPHA}, "output": out, **sections})
        lora_writer(config, named(lora_family()), attached, PHOTOS, 4).write(path, 7, config.output.format)
        return path

    return to


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)])
def test_matrices_are_rounded_once_to_nearest_even(write, precision, dtype):
    exact = safetensors.numpy.load_file(write("exact.safetensors"))
    path = write("rounded.safetensors", output={"precision": precision})
    with SafetensorsFile(path) as file:
        for name, value in exact.items():
            wanted = value if name.endswith(".alpha") else value.astype(dtype)
            assert file.read(name).dtype == wanted.dtype
            np.testing.assert_array_equal(file.read(name), wanted)


def test_what_fp16_cannot_hold_is_not_written(attached, write):
    up = attached.parameters()[1].data
    before = up.copy()
    up[...] = 1e6
    try:
        with pytest.raises(NonFiniteError, match=r'is too large for float16; set output\.precision = "bf16"'):
            write("large.safetensors", output={"precision": "fp16"})
    finally:
        up[...] = before


def test_says_who_made_it_and_of_what(write):
    about = {"title": "Tiles", "author": "A. N.", "trigger": "ohwx tile"}
    path = write("about.safetensors", output=about, train={"steps": 9}, data={"batch_size": 2})
    with safetensors.safe_open(path, "numpy") as file:
        found = file.metadata()
    assert [found[f"modelspec.{key}"] for key in ("title", "author", "trigger_phrase")] == list(about.values())
    assert json.loads(found["ss_tag_frequency"]) == {"photos": {"cat": 2, "red": 2, "dog": 1}}
    assert [found[f"ss_{key}"] for key in ("num_train_images", "num_batches_per_epoch", "num_epochs")] == [
        "7",
        "4",
        "3",
    ]
    assert found["ss_output_name"] == "Tiles"
    assert found["ss_optimizer"] == "adamw"


def test_a_name_is_the_title_where_none_is_given(write):
    for about, title in (({"name": "tiles_v2"}, "tiles_v2"), ({"name": "tiles_v2", "title": "Tiles"}, "Tiles")):
        with safetensors.safe_open(write("named.safetensors", output=about), "numpy") as file:
            assert file.metadata()["ss_output_name"] == "tiles_v2"
            assert file.metadata()["modelspec.title"] == title


def test_a_tag_list_that_is_too_long_keeps_the_most_frequent(monkeypatch, write):
    texts = [f"often, tag {i:05d} {'x' * 40}" for i in range(3000)]
    items = [SimpleNamespace(caption=tags, captions=(tags,), sha256="0") for tags in texts]
    rows = [SimpleNamespace(item=item, set=SET, repeats=1, placement=PHOTOS.rows[0].placement) for item in items]
    monkeypatch.setattr(PHOTOS, "rows", rows)
    with safetensors.safe_open(write("tags.safetensors"), "numpy") as file:
        text = file.metadata()["ss_tag_frequency"]
    assert 20_000 < len(text) <= 65536
    assert json.loads(text)["photos"]["often"] == 3000


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
def test_reads_back_as_the_attached_update(attached, write, form):
    state = from_file(write("l.safetensors", output={"format": form}), lora_family()).state
    assert state.keys() == {"unet"}
    assert state["unet"].keys() == attached.adapters.keys()
    for name, factors in state["unet"].items():
        np.testing.assert_allclose(factors.delta(), attached.adapters[name].delta().numpy(), rtol=1e-5, atol=1e-5)


def test_kohya_by_its_own_rules(attached, write):
    """W' = W + alpha / rank * up @ down, with flattened names."""
    tensors = safetensors.numpy.load_file(write("l.safetensors"))
    assert len(tensors) == 3 * len(attached.adapters)
    for name, adapter in attached.adapters.items():
        key = f"lora_unet_{name.replace('.', '_')}"
        up, down, alpha = (tensors[f"{key}.{part}"] for part in ("lora_up.weight", "lora_down.weight", "alpha"))
        update = float(alpha) / down.shape[0] * np.tensordot(up.reshape(up.shape[:2]), down, 1)
        np.testing.assert_allclose(update, adapter.delta().numpy(), rtol=1e-5, atol=1e-5)


def test_diffusers_by_its_own_rules(attached, write):
    """W' = W + B @ A, with no alpha anywhere."""
    tensors = safetensors.numpy.load_file(write("l.safetensors", output={"format": "diffusers"}))
    assert len(tensors) == 2 * len(attached.adapters)
    name = "input_blocks.4.1.transformer_blocks.0.attn1.to_q"
    key = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    update = tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
    np.testing.assert_allclose(update, attached.adapters[name].delta().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
def test_says_what_it_is_and_where_it_came_from(write, form):
    path = write("l.safetensors", output={"format": form}, train={"seed": 11})
    with safetensors.safe_open(path, "numpy") as file:
        said = file.metadata()
    assert said["ss_base_model_version"] == "sdxl_base_v1-0"
    assert said["modelspec.architecture"] == "stable-diffusion-xl-v1-base/lora"
    assert (said["ss_network_dim"], float(said["ss_network_alpha"])) == (str(RANK), ALPHA)
    assert (said["ss_steps"], said["ss_seed"], said["ss_sd_model_name"]) == ("7", "11", "small_sdxl.safetensors")
    config = json.loads(said["flame_train_config"])
    assert config["lora.rank"] == RANK
    assert config["train.seed"] == 11


@pytest.mark.parametrize(
    ("names", "architecture", "prediction"),
    [
        (lora_family(), "stable-diffusion-xl-v1-base/lora", "v"),
        (flux.lora_family(dev=True), "flux-1-dev/lora", None),
        (flux.lora_family(dev=False), "flux-1-schnell/lora", None),
        (sd3.lora_family(24, ()), "stable-diffusion-3-medium/lora", None),
    ],
    ids=["sdxl", "flux-dev", "flux-schnell", "sd3-medium"],
)
def test_says_what_it_was_trained_as(attached, small_config, tmp_path, names, architecture, prediction):
    """As sd-scripts has it: no prediction type where a family knows but one. Resolution is the run's."""
    config = small_config(data={"resolution": 512}, model={"prediction": "v"})
    denoiser = names.components[0]
    one = Attached(attached.model, {next(iter(denoiser.modules)): next(iter(attached.adapters.values()))})
    lora_writer(config, named(names), one, PHOTOS, 4).write(tmp_path / "l.safetensors", 1, "kohya")
    with safetensors.safe_open(tmp_path / "l.safetensors", "numpy") as file:
        said = file.metadata()
    assert (said["modelspec.architecture"], said.get("modelspec.prediction_type")) == (architecture, prediction)
    assert said["modelspec.resolution"] == "512x512"


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
def test_equal_runs_give_equal_bytes(write, form):
    first, second = (write(f"{n}.safetensors", output={"format": form}).read_bytes() for n in "ab")
    assert first == second


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_never_writes_what_is_not_finite(attached, write, tmp_path, bad):
    name, adapter = next(iter(attached.adapters.items()))
    held = float(adapter.up.data.flat[0])
    adapter.up.data.flat[0] = bad
    try:
        with pytest.raises(NonFiniteError, match=name):
            write("l.safetensors")
    finally:
        adapter.up.data.flat[0] = held
    assert not (tmp_path / "l.safetensors").exists()


def test_where_the_files_lay_does_not_show(write):
    """Two people with the same files in other folders get the same bytes, whichever files a config can name."""
    texts = {path: key for path, key in keys().items() if key.annotation is str and key.default == ""}
    notes = {"data.caption", "sample.negative", "output.title", "output.author", "output.trigger", "output.name"}
    notes |= {path for path in texts if path.startswith("captions.")}
    notes.add("output.dir")  # the last folder's name is the LoRA's title

    def run(name, folder):
        sections: dict[str, dict[str, str]] = {}
        for path in texts.keys() - notes:
            section, key = path.split(".")
            sections.setdefault(section, {})[key] = f"{folder}{key}.safetensors"
        return write(name, **sections)

    here, there = run("a.safetensors", "/home/a/"), run("b.safetensors", "../")
    assert here.read_bytes() == there.read_bytes()
    with safetensors.safe_open(here, "numpy") as file:
        assert not any("/home" in value for value in file.metadata().values())


def test_what_a_run_is_continued_from_is_told_from_a_lora(small_config, tmp_path):
    unet = UNet(UNetArch.tiny(16))
    unet.init(np.random.default_rng(0))
    adapters = attach(unet, resolve(unet, ["attention"], UNET_PRESETS), rank=RANK, alpha=ALPHA, seed=1)
    c = small_config()
    optimizer = build_optimizer(adapters.parameters(), c.train, c.optimizer, c.schedule, c.gradient, get_backend("cpu"))
    files, _ = checkpoint_files(optimizer, 3, Sources("", "", "", "images"), {}, 1)
    files["optimizer.safetensors"](tmp_path / "optimizer.safetensors")
    with pytest.raises(ModelFileError, match="expected a LoRA, but this is: a checkpoint of a flame-train run"):
        require_lora(tmp_path / "optimizer.safetensors")
