"""The cache is keyed by everything an entry depends on, and by nothing else: edit one thing, see what is made anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flame_train.config.keys import keys
from flame_train.config.load import load_located
from flame_train.data import images
from flame_train.data.order import Choice
from flame_train.engine.backend.cpu import CpuBackend
from flame_train.errors import ConfigError, DataError
from flame_train.io import digests
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.networks.files import part
from flame_train.run.check.check_run import check
from flame_train.run.encode.encode import Encoded, encode
from flame_train.run.plan.encoding import ENCODED
from flame_train.run.plan.plan import make_plan
from flame_train.training.session import Session, StopRequest

SQUARE, WIDE, TALL = KEPT = ("96x96-01", "64x128-01", "128x64-01")
IMAGES, CAPTIONS = 3, 4  # every caption is another; the fourth is the empty one


def run(config) -> Encoded:
    plan, stop = make_plan(check(config), StopRequest()), StopRequest()
    keys = plan.encoding.keys(plan.samples, ())
    return encode(plan, keys, Session("cpu", stop=stop))


@pytest.fixture(autouse=True)
def few(drawn):
    """Three images are enough here."""
    for path in drawn.iterdir():
        if path.stem not in KEPT:
            path.unlink()


@pytest.fixture
def encoded(drawn):
    """A cache of this test alone."""
    return drawn / ".flame-cache"


@pytest.fixture
def made_anew(drawn):
    """(images, captions) that encoding a config adds to the cache, told from the folder alone."""
    folder = drawn / ".flame-cache"

    def count(config):
        before = set(folder.rglob("*.safetensors"))
        run(config)
        new = set(folder.rglob("*.safetensors")) - before
        kinds = []
        for path in new:
            with SafetensorsFile(path) as file:
                kinds.append("mean" in file.names)
        return sum(kinds), len(kinds) - sum(kinds)

    return count


@pytest.fixture
def warm(small_config, made_anew):
    """The config, its cache filled."""
    config = small_config()
    assert made_anew(config) == (IMAGES, CAPTIONS)
    return config


def test_nothing_changed_nothing_made(warm, made_anew):
    assert made_anew(warm) == (0, 0)


def test_one_caption_edited_makes_one_text_anew(warm, made_anew, drawn):
    (drawn / f"{SQUARE}.txt").write_text("a blue circle on a yellow background, and a hat")
    assert made_anew(warm) == (0, 1)


def test_one_image_edited_makes_one_image_anew(warm, made_anew, drawn):
    path = drawn / f"{SQUARE}.png"
    pixels = np.array(Image.open(path))
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(path)
    assert made_anew(warm) == (1, 0)


def test_renamed_and_touched_files_are_the_same_images(warm, made_anew, drawn):
    for ending in ("png", "txt"):
        (drawn / f"{SQUARE}.{ending}").rename(drawn / f"other.{ending}")
    (drawn / f"{WIDE}.png").touch()
    assert made_anew(warm) == (0, 0)


def test_one_more_image_is_one_more(warm, made_anew, drawn):
    Image.new("RGB", (150, 150), (9, 200, 30)).save(drawn / "green.png")
    (drawn / "green.txt").write_text("a green nothing")
    assert made_anew(warm) == (1, 1)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"data": {"resolution": 64}}, (IMAGES, 0)),
        ({"model": {"vae_precision": "bf16"}}, (IMAGES, 0)),
        ({"model": {"vae_precision": "tf32"}}, (IMAGES, 0)),
        ({"model": {"vae_tile": 64}}, (IMAGES, 0)),
        ({"train": {"precision": "bf16"}}, (0, CAPTIONS)),
        ({"data": {"max_tokens": 150}}, (0, CAPTIONS)),
        ({"text_encoders": {"precision": "fp16"}}, (0, CAPTIONS)),
        ({"text_encoders": {"clip_l_dropout": 0.5}}, (0, 0)),
        ({"train": {"seed": 7, "steps": 9}, "lora": {"rank": 4}, "optimizer": {"lr": 0.5}}, (0, 0)),
        ({"data": {"batch_size": 3, "repeats": 2, "caption_dropout": 0.5}}, (0, 0)),
    ],
)
def test_a_setting_makes_anew_what_depends_on_it(warm, made_anew, small_config, sections, expected):
    assert made_anew(small_config(**sections)) == expected


@pytest.mark.usefixtures("trained_base")
@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        ("first_stage_model.encoder.conv_in.bias", (IMAGES, 0)),
        ("conditioner.embedders.0.transformer.text_model.encoder.layers.0.mlp.fc1.bias", (0, CAPTIONS)),
        ("conditioner.embedders.1.model.ln_final.bias", (0, CAPTIONS)),
        ("model.diffusion_model.out.2.bias", (0, 0)),
    ],
)
def test_a_network_makes_anew_what_it_encodes(warm, made_anew, small_config, small_base, tmp_path, tensor, expected):
    with SafetensorsFile(small_base) as file:
        tensors = {name: np.array(file.read(name)) for name in file.names}
    tensors[tensor] += np.float16(0.5)
    other = tmp_path / "other.safetensors"
    save_file(other, tensors)
    assert made_anew(small_config(model={"checkpoint": str(other)})) == expected


def test_the_same_model_under_another_name_is_the_same(warm, made_anew, small_config, small_base, tmp_path):
    copy = tmp_path / "copy.safetensors"
    shutil.copy(small_base, copy)
    assert made_anew(small_config(model={"checkpoint": str(copy)})) == (0, 0)


def test_another_vae_is_used_and_told_from_the_checkpoints_own(warm, made_anew, small_config, small_base, tmp_path):
    prefix = "first_stage_model."
    with SafetensorsFile(small_base) as file:
        tensors = {n.removeprefix(prefix): np.array(file.read(n)) for n in file.names if n.startswith(prefix)}
    tensors["quant_conv.bias"] = tensors["quant_conv.bias"].astype(np.float32) + 1.0
    lone = tmp_path / "vae.safetensors"
    save_file(lone, tensors)
    config = small_config(model={"vae": str(lone)})
    assert made_anew(config) == (IMAGES, 0)
    own, other = (run(c).example(0)["mean"] for c in (warm, config))
    np.testing.assert_allclose(other, own + 1.0, atol=1e-4)


@pytest.mark.bytes
def test_a_second_start_reads_neither_networks_nor_images(warm, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "_SETTLED", 0)  # the files are younger than two seconds

    def start():
        plan = make_plan(check(warm), StopRequest())
        return plan.encoding.keys(plan.samples, ())

    first = start()

    def read(*_, **__):
        raise AssertionError("a file was read whose digest is known")

    monkeypatch.setattr(part, "digest", read)
    monkeypatch.setattr(images, "read_bytes", read)
    assert start() == first


def entries(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.bytes
def test_the_cache_has_the_same_bytes_one_by_one_and_together(small_config, drawn, tmp_path, monkeypatch):
    """On a CPU each entry has the bytes of an item encoded alone. In batches, as a GPU has them, its values agree."""
    for name in KEPT:  # a second image of each shape, so that batches have several
        pixels = np.array(Image.open(drawn / f"{name}.png"))
        Image.fromarray(pixels[::-1]).save(drawn / f"{name} again.png")
        (drawn / f"{name} again.txt").write_text(f"{name}, upside down")
    run(small_config(data={"cache": str(tmp_path / "together")}))
    for image in sorted(drawn.glob("*.png")):
        alone = tmp_path / "alone" / image.stem
        alone.mkdir(parents=True)
        for ending in ("png", "txt"):
            shutil.copy(image.with_suffix(f".{ending}"), alone)
        run(small_config(data={"path": str(alone), "cache": str(tmp_path / "one by one")}))
    together = entries(tmp_path / "together")
    assert len(together) == 2 * IMAGES + 2 * IMAGES + 1
    assert entries(tmp_path / "one by one") == together

    monkeypatch.setattr(CpuBackend, "asynchronous", True)
    run(small_config(data={"cache": str(tmp_path / "in batches")}))
    batched = {path.name: path for path in (tmp_path / "in batches").rglob("*.safetensors")}
    assert batched.keys() == together.keys()
    for alone in (tmp_path / "together").rglob("*.safetensors"):
        with SafetensorsFile(alone) as one, SafetensorsFile(batched[alone.name]) as other:
            assert one.names == other.names
            for name in one.names:
                np.testing.assert_allclose(other.read(name), one.read(name), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("trained_base")
def test_an_example_has_the_image_the_caption_and_the_size(warm):
    encoded = run(warm)
    index = next(i for i, item in enumerate(row.item for row in encoded.plan.samples.rows) if item.key == f"{WIDE}.png")
    example, dropped = encoded.example(index), encoded.example(index, Choice(drop_caption=True))
    height, width = encoded.plan.samples.placements[index].bucket
    assert example["mean"].shape == example["logvar"].shape == (height // 8, width // 8, 4)
    assert example["clip_l"].shape == example["clip_g"].shape == (77, 32)
    assert example["pooled"].shape == (32,)
    assert example["time_ids"].tolist() == [64, 128, 0, 0, height, width]
    np.testing.assert_array_equal(dropped["mean"], example["mean"])
    for name in ("clip_l", "clip_g", "pooled"):
        np.testing.assert_array_equal(dropped[name], encoded.caption("")[name])
        assert not np.array_equal(dropped[name], example[name])


def test_a_damaged_entry_is_made_again(warm, drawn):
    victim = next((drawn / ".flame-cache").rglob("*.safetensors"))
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-1])
    run(warm)
    assert victim.read_bytes() == whole


def test_an_entry_that_vanished_is_told(warm, drawn):
    encoded = run(warm)
    shutil.rmtree(drawn / ".flame-cache")
    with pytest.raises(DataError, match="start again"):
        encoded.example(0)


def test_a_base_without_a_text_encoder_is_refused_by_the_key_that_names_its_file(small_config, small_base, tmp_path):
    with SafetensorsFile(small_base) as file:
        kept = {n: np.array(file.read(n)) for n in file.names if not n.startswith("conditioner.embedders.1")}
    part = Path(tmp_path / "part.safetensors")
    save_file(part, kept)
    with pytest.raises(ConfigError, match=r"text_encoders\.clip_g: .* holds no such network; name its file"):
        run(small_config(model={"checkpoint": str(part)}))


def other_values(key):
    """What else a setting could be, as a file writes it; the rules between keys may refuse some."""
    usual = key.default
    if key.choices:
        return [json.dumps(choice) for choice in key.choices if choice != usual]
    if isinstance(usual, bool):
        return [json.dumps(not usual)]
    return [usual + 1, usual / 2 or 0.5] if isinstance(usual, int | float) else []


def test_what_a_sweep_does_not_compare_changes_no_key(drawn, small_base, tmp_path):
    """All other settings of the schema are changed at once, as far as the rules between keys allow."""
    source = tmp_path / "config.toml"
    data = f"data = {{path = '{drawn}', resolution = 96, bucket_step = 32}}"
    sample = "sample = {every = 1, prompts = [{text = 'a disc'}]}"
    source.write_text(
        f"model = {{checkpoint = '{small_base}'}}\n{data}\n{sample}\noutput = {{dir = '{tmp_path}/run'}}\n"
    )

    def accepted(overrides):
        try:
            return bool(load_located(str(source), overrides))
        except ConfigError:
            return False

    of_others = "loss.guidance_scale", "loss.shift", "lora.kind", "train.epochs"  # refused here, once there is a model
    slider = ['preservation.kind="slider"', 'preservation.positive="large"', 'preservation.negative="small"']
    changed = [each for each in slider if not each.startswith(ENCODED)]
    for path, key in keys().items():
        if not path.startswith((*ENCODED, "output.", *of_others)):
            settings = ([*changed, f"{path}={value}"] for value in other_values(key))
            changed = next(filter(accepted, settings), changed)
    assert len(changed) > 40
    usual, other = (make_plan(check(load_located(str(source), each)), StopRequest()) for each in ([], changed))
    assert usual.cache_keys() == other.cache_keys()
