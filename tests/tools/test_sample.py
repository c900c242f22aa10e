"""`sample`: the same image from the same words, a LoRA that acts as the merged model does, and clear refusals."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.adapters.attach import attach
from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.formats import to_diffusers, to_kohya
from flame_train.adapters.kinds import ADAPTERS
from flame_train.diffusion.samplers import SAMPLERS
from flame_train.engine import nn, tensor
from flame_train.errors import ConfigError, ModelFileError, NonFiniteError
from flame_train.families import FAMILY_TITLES
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.sdxl.names import lora_family
from flame_train.tools.merge import merge
from flame_train.tools.sample import sample

PLAIN = {
    "negative": "",
    "steps": 2,
    "guidance_scale": 2.0,
    "sampler": "euler",
    "prediction": "epsilon",
    "precision": "fp32",
    "seed": 3,
    "width": 96,
    "height": 64,
    "device": "cpu",
}
UNET = "model.diffusion_model."
PROMPTS = ("a blue circle", "a red house")


@pytest.fixture
def sampled_with(small_base, tmp_path):
    """The pixels that `sample` writes, by default for one prompt and without a LoRA."""

    def draw(prompts=PROMPTS[:1], base=small_base, *, lora=None, strength=1.0, **changes):
        path = tmp_path / "sample.png"
        changes |= {"loras": [(lora, strength)]} if lora else {}
        sample(str(base), list(prompts), path, **{**PLAIN, **changes}, force=True)
        with Image.open(path) as image:
            return np.asarray(image).astype(int)

    return draw


@pytest.fixture(scope="module")
def state(small_base):
    """A LoRA for the small model's UNet (attention and a convolution) and its first text encoder."""
    rng = np.random.default_rng(0)

    def factors(*shape):
        out, *into = shape
        down, up = rng.standard_normal((2, *into)), rng.standard_normal((out, 2, *([1] * (len(into) - 1))))
        return LoraFactors((0.3 * down).astype(np.float32), (0.3 * up).astype(np.float32), 1.5)

    with SafetensorsFile(small_base) as file:
        shapes = {n.removeprefix(UNET): file.info(n).shape for n in file.names if n.startswith(UNET)}
    unet = ["output_blocks.8.0.skip_connection", "output_blocks.8.0.out_layers.3", "middle_block.1.proj_in"]
    unet += [name.removesuffix(".weight") for name in shapes if name.endswith("attn2.to_k.weight")]
    return {
        "unet": {name: factors(*shapes[f"{name}.weight"]) for name in unet},
        "text_encoder": {"text_model.encoder.layers.0.mlp.fc1": factors(128, 32)},
    }


@pytest.fixture
def kohya(state, tmp_path):
    path = tmp_path / "kohya.safetensors"
    save_file(path, to_kohya(state, lora_family()))
    return path


@pytest.fixture
def diffusers(state, tmp_path):
    path = tmp_path / "diffusers.safetensors"
    tensors, metadata = to_diffusers(state, lora_family())
    save_file(path, tensors, metadata)
    return path


@pytest.fixture
def trained_as(small_base, state, tmp_path):
    """trained_as(kind): a file with an adapter of that kind on one of the layers of `state`, with random values."""

    def write(kind):
        name = "output_blocks.8.0.out_layers.3" if kind == "dora" else next(n for n in state["unet"] if "to_k" in n)
        with SafetensorsFile(small_base) as file:
            weight = np.array(file.read(f"{UNET}{name}.weight")).astype(np.float32)
        layer = nn.Linear(weight.shape[1], weight.shape[0]) if weight.ndim == 2 else nn.Conv2d(*weight.shape[1::-1], 3)
        layer.init(np.random.default_rng(0))
        layer.weight = tensor(weight)
        made = attach(nn.Sequential(layer), ["0"], rank=2, alpha=2.0, seed=3, kind=ADAPTERS[kind]())
        rng = np.random.default_rng(1)
        for parameter in made.parameters():
            parameter.data[...] = parameter.data * 1.2 + 0.3 * rng.standard_normal(parameter.shape)
        path = tmp_path / f"{kind}.safetensors"
        save_file(path, to_kohya({"unet": {name: made.adapters["0"].factors()}}, lora_family()))
        return path

    return write


def test_one_image_a_prompt_in_a_grid(sampled_with):
    both = sampled_with(PROMPTS)
    assert both.shape == (64, 96 + 4 + 96, 3)
    np.testing.assert_array_equal(both[:, :96], sampled_with(PROMPTS[:1]))
    np.testing.assert_array_equal(both[:, 100:], sampled_with(PROMPTS[1:], seed=4))


def test_a_lora_acts_and_its_strength_counts(sampled_with, kohya):
    plain, without = sampled_with(), sampled_with(lora=kohya, strength=0.0)
    half, whole = (sampled_with(lora=kohya, strength=s) for s in (0.5, 1.0))
    np.testing.assert_array_equal(without, plain)
    distances = [np.abs(p - plain).mean() for p in (half, whole)]
    assert 1.0 < distances[0] < distances[1]


def test_both_formats_draw_the_same(sampled_with, kohya, diffusers):
    """Up to the rounding of the folded scale, which may turn a value to the next."""
    one, other = (sampled_with(lora=path) for path in (kohya, diffusers))
    assert np.abs(one - other).max() <= 1


def test_a_lora_attached_is_a_lora_merged(sampled_with, kohya, small_base, tmp_path):
    """The merged base, in fp32 so that nothing is rounded away, draws the same image."""
    with SafetensorsFile(small_base) as file:
        exact = {name: np.array(file.read(name), np.float32) for name in file.names}
    base, merged = tmp_path / "fp32.safetensors", tmp_path / "merged.safetensors"
    save_file(base, exact)
    merge(base, kohya, merged, 0.7)
    difference = sampled_with(base=merged) - sampled_with(base=base, lora=kohya, strength=0.7)
    assert np.abs(difference).max() <= 1


@pytest.mark.parametrize(
    ("kind", "keys"), [("loha", {}), ("lokr", {"factor": 2}), ("dora", {}), ("dora", {"wd_on_output": True})], ids=str
)
def test_so_is_an_adapter_of_any_kind(sampled_with, state, small_base, tmp_path, kind, keys):
    """Beside the base that it was merged into, at half its strength."""
    with SafetensorsFile(small_base) as file:
        exact = {name: np.array(file.read(name), np.float32) for name in file.names}
    base, lora, merged = (tmp_path / f"{name}.safetensors" for name in ("fp32", "lora", "merged"))
    save_file(base, exact)
    adapters = {}
    for module in state["unet"]:
        holder = nn.Module()
        weight = exact[f"{UNET}{module}.weight"]
        out, width, *kernel = weight.shape
        holder.layer = nn.Conv2d(width, out, tuple(kernel), bias=False) if kernel else nn.Linear(width, out, bias=False)
        holder.layer.weight = tensor(weight)
        attached = attach(holder, ["layer"], rank=2, alpha=1.5, seed=1, kind=ADAPTERS[kind](**keys))
        for p in attached.parameters():
            p.data[...] = np.where(p.data == 0, 0.2, p.data * 1.1)
        adapters[module] = attached.adapters["layer"].factors()
    save_file(lora, to_kohya({"unet": adapters}, lora_family()))
    merge(base, lora, merged, 0.5)
    attached_image = sampled_with(base=base, lora=lora, strength=0.5)
    assert np.abs(sampled_with(base=merged) - attached_image).max() <= 1
    assert not np.array_equal(attached_image, sampled_with(base=base))


def test_the_text_encoders_part_is_used(sampled_with, state, tmp_path):
    text_only = tmp_path / "text.safetensors"
    save_file(text_only, to_kohya({"text_encoder": state["text_encoder"]}, lora_family()))
    assert not np.array_equal(sampled_with(lora=text_only, strength=8.0), sampled_with())


@pytest.mark.parametrize(("width", "height"), [(100, 64), (64, 8)])
def test_a_size_the_model_cannot_draw_is_refused(sampled_with, width, height):
    with pytest.raises(ConfigError, match="multiple of"):
        sampled_with(width=width, height=height)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"guidance_scale": 0.5}, "--guidance-scale: expected 0, the model's own, or a number >= 1, got 0.5"),
        ({"base": ""}, "--checkpoint: expected the base model"),
        ({"prompts": ["a \udcff"]}, "--prompt: expected UTF-8 text"),
        ({"width": 72, "height": 68}, "--height: expected an integer from 0 to 8192, a multiple of 8, got 68"),
        ({"width": 72}, "--width: expected a multiple of 32"),
        ({"negative": "x", "guidance_scale": 1.0}, "--negative: expected none, got 'x': with a "),
    ],
)
def test_what_the_options_cannot_ask_for_is_told_by_their_names(sampled_with, change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        sampled_with(**change)


def test_a_lora_of_another_family_is_refused(sampled_with, tmp_path):
    path = tmp_path / "flux.safetensors"
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    save_file(
        path,
        {
            f"{name}.lora_down.weight": np.ones((2, 3072), np.float32),
            f"{name}.lora_up.weight": np.ones((9216, 2), np.float32),
        },
    )
    with pytest.raises(ModelFileError, match=r"expected a LoRA for SDXL.*Flux"):
        sampled_with(lora=path)


def test_a_lora_for_a_larger_base_is_refused_by_name(sampled_with, tmp_path):
    path = tmp_path / "large.safetensors"
    name = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    save_file(
        path,
        {
            f"{name}.lora_down.weight": np.ones((2, 640), np.float32),
            f"{name}.lora_up.weight": np.ones((640, 2), np.float32),
        },
    )
    with pytest.raises(ModelFileError, match=r"another base model"):
        sampled_with(lora=path)


def test_a_base_model_is_no_lora_and_a_lora_no_base_model(sampled_with, kohya, small_base):
    with pytest.raises(ModelFileError, match="expected a LoRA, but this is: SDXL"):
        sampled_with(lora=small_base)
    with pytest.raises(
        ModelFileError,
        match=f"expected a base model of {', '.join(FAMILY_TITLES.values())}, but this is: LoRA",
    ):
        sampled_with(base=kohya)


def test_the_command_says_where_the_image_is(small_base, kohya, tmp_path, capsys):
    path = tmp_path / "made" / "image.png"
    line = (
        f"sample -m {small_base} -p circle -o {path} --lora {kohya} --steps 2 --width 64 --height 64 --precision fp32"
    )
    assert cli.run([*line.split(), "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["image"], said["images"], said["prompts"]) == (str(path), [str(path)], ["circle"])
    assert said["loras"] == [{"lora": str(kohya), "strength": 1.0}]
    with Image.open(path) as image:
        assert image.size == (64, 64)


def test_the_command_says_what_each_image_was_drawn_with(small_base, tmp_path, capsys):
    line = ["sample", "-m", str(small_base), "--precision", "fp32", "--device", "cpu", "--steps", "3"]
    prompts = ["-p", "circle --s 2 --w 64 --h 96 --l 4 --d 3", "-p", "square --w 64 --h 64"]
    assert cli.run([*line, *prompts, "-o", str(tmp_path / "a.png"), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["drawn"]
    assert [first[name] for name in ("width", "height", "steps", "guidance_scale", "seed")] == [64, 96, 2, 4.0, 3]
    assert (second["prompt"], second["steps"], second["seed"]) == ("square", 3, 43)
    with Image.open(first["image"]) as image:
        assert image.size == (64, 96)
    assert cli.run([*line, *prompts[:2], "-o", str(tmp_path / "b.png")]) == 0
    assert "\nsteps: 2\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("a --ar 2:3", '--prompt: "a --ar 2:3": unknown flag --ar; known are --n'),
        ("a --w wide", "--w: expected a whole number, got 'wide'"),
        ("a --w 63", "width: input should be a multiple of 8"),
    ],
)
def test_a_wrong_flag_of_a_prompt_is_told_with_its_reason(prompt, reason, tmp_path, capsys):
    line = ["sample", "-m", "base.safetensors", "-p", "fine", "-p", prompt, "-o", str(tmp_path / "a.png")]
    assert cli.run([*line, "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert reason in told
    assert "('" not in told


@pytest.mark.parametrize("strength", [np.nan, np.inf])
def test_a_strength_that_is_no_number_is_refused(sampled_with, kohya, strength):
    with pytest.raises(ConfigError, match="finite"):
        sampled_with(lora=kohya, strength=strength)


def test_a_lora_that_holds_nan_is_not_drawn_with(sampled_with, kohya, tmp_path):
    with SafetensorsFile(kohya) as file:
        tensors = {name: np.array(file.read(name)) for name in file.names}
        said = dict(file.metadata)
    next(array for name, array in tensors.items() if "lora_up" in name).flat[0] = np.nan
    spoiled = tmp_path / "nan.safetensors"
    save_file(spoiled, tensors, said)
    with pytest.raises(NonFiniteError, match=r"nan\.safetensors: its .* holds NaN"):
        sampled_with(lora=spoiled)


def test_an_image_that_is_nan_is_not_written(sampled_with, kohya, tmp_path):
    """A LoRA that is finite and overflows."""
    with pytest.raises(NonFiniteError, match="no image"), np.errstate(all="ignore"):
        sampled_with(lora=kohya, strength=1e38)
    assert not (tmp_path / "sample.png").exists()


PARAMETERS = re.compile(
    r"(?P<prompt>.*?)(\nNegative prompt: (?P<negative>.*?))?\nSteps: (?P<steps>\d+), Sampler: (?P<sampler>[^,]+), "
    r"CFG scale: (?P<cfg>[\d.]+), Seed: (?P<seed>\d+), Size: (?P<size>\d+x\d+), Model: (?P<model>[^,]+), .*",
    re.DOTALL,
)


def told_by(path):
    with Image.open(path) as image:
        return PARAMETERS.fullmatch(image.info["parameters"]).groupdict(), np.asarray(image).astype(int)


def test_single_images_say_how_they_were_made_and_the_grid_has_them_all(sampled_with, kohya, tmp_path, small_base):
    prompts = ["a blue circle --n a house --d 9 --s 2", {"text": "a red house", "width": 64, "sampler": "heun"}]
    sheet = sampled_with(prompts, lora=kohya, strength=0.5)
    first, one = told_by(tmp_path / "sample-1.png")
    second, other = told_by(tmp_path / "sample-2.png")
    assert first == {
        "prompt": "a blue circle <lora:kohya:0.5>",
        "negative": "a house",
        "steps": "2",
        "sampler": "Euler",
        "cfg": "2",
        "seed": "9",
        "size": "96x64",
        "model": small_base.stem,
    }
    assert (second["negative"], second["sampler"], second["seed"], second["size"]) == (None, "Heun", "4", "64x64")
    np.testing.assert_array_equal(sheet[:, :96], one)
    np.testing.assert_array_equal(sheet[:, 100:164], other)
    with Image.open(tmp_path / "sample.png") as image:
        assert "parameters" not in image.info
    alone = sampled_with(["a red house"], lora=kohya, strength=0.5, sampler="heun", seed=4, width=64)
    np.testing.assert_array_equal(alone, other)


def test_what_is_written_is_enough_to_make_the_image_again(sampled_with, tmp_path):
    sampled_with(["a blue circle", "a red house --ss dpmpp_2m --d 11 --l 4"])
    told, image = told_by(tmp_path / "sample-2.png")
    again = sampled_with(
        [told["prompt"]],
        steps=int(told["steps"]),
        seed=int(told["seed"]),
        guidance_scale=float(told["cfg"]),
        sampler=next(name for name, kind in SAMPLERS.items() if kind.usual_name == told["sampler"]),
    )
    np.testing.assert_array_equal(again, image)


def test_several_loras_add_up(sampled_with, kohya, diffusers):
    """Two halves are one whole; a part of another strength counts; the order does not matter."""
    whole = sampled_with(lora=kohya, strength=1.0)
    halves = sampled_with(loras=[(kohya, 0.5), (diffusers, 0.5)])
    assert np.abs(halves - whole).max() <= 1
    uneven = sampled_with(loras=[(kohya, 0.25), (diffusers, 0.75)])
    assert np.abs(uneven - whole).max() <= 1
    np.testing.assert_array_equal(sampled_with(loras=[(kohya, 0.5), (diffusers, -0.5)]), sampled_with())


@pytest.mark.parametrize("kind", ["dora", "loha", "lokr"])
def test_a_lora_beside_one_of_another_kind_is_the_sum_of_the_updates(
    sampled_with, kohya, small_base, trained_as, tmp_path, kind
):
    """As the base model with both merged into it, one after the other, which is the sum where neither is a DoRA."""
    other = trained_as(kind)
    both = sampled_with(loras=[(kohya, 1.0), (other, 0.5)])
    assert not np.array_equal(both, sampled_with(lora=kohya))
    assert not np.array_equal(both, sampled_with(lora=other, strength=0.5))
    np.testing.assert_array_equal(sampled_with(loras=[(other, 0.5), (kohya, 1.0)]), both)
    if kind != "dora":
        merge(small_base, kohya, tmp_path / "one.safetensors", 1.0)
        merge(tmp_path / "one.safetensors", other, tmp_path / "two.safetensors", 0.5)
        assert np.abs(sampled_with(base=tmp_path / "two.safetensors") - both).max() <= 3


def test_a_prompts_strength_multiplies_those_of_the_loras(sampled_with, kohya):
    np.testing.assert_array_equal(
        sampled_with(["x --am 0.5"], lora=kohya), sampled_with(["x"], lora=kohya, strength=0.5)
    )
    np.testing.assert_array_equal(sampled_with(["x --am 0"], lora=kohya), sampled_with(["x"]))


def test_prompts_come_from_a_file_too(small_base, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("# two\na circle --w 64 --h 64\na house --w 64 --h 64 --ss euler_a\n")
    line = f"sample -m {small_base} --prompt-file {prompts} -o {tmp_path / 'all.png'} --steps 2 --precision fp32"
    assert cli.run([*line.split(), "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["images"] == [str(tmp_path / f"all-{i}.png") for i in (1, 2)]
    assert told_by(tmp_path / "all-2.png")[0]["sampler"] == "Euler a"
    assert cli.run([*line.split(), "--device", "cpu"]) == 6
    assert "all.png" in capsys.readouterr().err
    (tmp_path / "all.png").unlink()
    assert cli.run([*line.split(), "--device", "cpu"]) == 6
    assert "all-1.png" in capsys.readouterr().err
    prompts.write_text("a circle\nx --q 1\n")
    assert cli.run([*line.split(), "--force", "--device", "cpu"]) == 2
    assert f"{prompts}:2: unknown flag --q" in capsys.readouterr().err
    assert cli.run(["sample", "-m", str(small_base), "--device", "cpu", "-o", str(tmp_path / "none.png")]) == 2
    assert "at least one --prompt or --prompt-file" in capsys.readouterr().err
