"""EriDiffusion's LoRA files: SDXL's are read with the alpha of their metadata, those that name no place are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

from flame_train import cli
from flame_train.errors import ModelFileError
from flame_train.io.safetensors import SafetensorsFile
from flame_train.tools.inspect import inspect_file, render
from flame_train.tools.lora_files import convert
from flame_train.tools.merge import merge
from tests.golden_keys import golden
from tests.tools.small_sdxl import base_tensors, small, write

HERE = ("input_blocks.4", "input_blocks.7", "middle_block", "output_blocks.0", "output_blocks.5")
NOT_HERE = ("input_blocks.1", "input_blocks.2", "output_blocks.6", "output_blocks.7", "output_blocks.8")
LAYERS = [f"attn{n}.to_{end}" for n in (1, 2) for end in ("q", "k", "v", "out.0")]
RANK, ALPHA = 2, 6.0


def module(block: str, layer: str) -> str:
    return f"{block}.1.transformer_blocks.0.{layer}"


def shapes() -> dict[str, tuple[int, ...]]:
    """Each module's weight, shrunk as the base is."""
    bases = golden("lora_kohya_sdxl_conv")
    return {
        module(block, layer): small(bases[f"lora_unet_{module(block, layer).replace('.', '_')}"]["shape"])
        for block in HERE
        for layer in LAYERS
    }


def its_file(absent: tuple[str, ...] = NOT_HERE) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    every = shapes() | {module(block, layer): (1, 1) for block in absent for layer in LAYERS}
    tensors = {}
    for name, (out, into) in every.items():
        tensors[f"{name}.lora_down.weight"] = rng.standard_normal((RANK, into)).astype(np.float32)
        tensors[f"{name}.lora_up.weight"] = rng.standard_normal((out, RANK)).astype(np.float32)
    return tensors


SAYS = {"rank": str(RANK), "alpha": str(ALPHA), "format": "pt", "ss_base_model_version": "sdxl_base_v1-0"}


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint-500.safetensors", its_file(), SAYS)


def test_convert_keeps_matrices_and_writes_the_alpha(lora: Path, tmp_path: Path, caplog) -> None:
    report = convert(lora, tmp_path / "kohya.safetensors", "kohya")
    assert report.modules == {"unet": len(HERE) * 8}
    before, after = its_file(), safetensors.numpy.load_file(tmp_path / "kohya.safetensors")
    assert len(after) == 3 * len(HERE) * 8
    for name in shapes():
        flat = f"lora_unet_{name.replace('.', '_')}"
        assert after[f"{flat}.alpha"] == ALPHA
        for end in (".lora_down.weight", ".lora_up.weight"):
            np.testing.assert_array_equal(after[flat + end], before[name + end])
    (told,) = [record.getMessage() for record in caplog.records]
    assert "40 modules are of layers that the model does not have" in told
    assert all(f"{block} (8)" in told for block in NOT_HERE)


def test_what_diffusers_gets_has_the_scale_and_no_stale_alpha(lora: Path, tmp_path: Path) -> None:
    convert(lora, tmp_path / "d.safetensors", "diffusers")
    before, after = its_file(), safetensors.numpy.load_file(tmp_path / "d.safetensors")
    name = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    up = before[module("input_blocks.4", "attn1.to_q") + ".lora_up.weight"]
    np.testing.assert_allclose(after[f"{name}.lora_B.weight"], up * (ALPHA / RANK), rtol=1e-6)
    metadata = inspect_file(tmp_path / "d.safetensors").metadata
    assert not {"rank", "alpha"} & metadata.keys()


def test_inspect_knows_it(lora: Path) -> None:
    report = inspect_file(lora)
    assert (report.identity.kind, report.identity.family, report.identity.layout) == ("lora", "sdxl", "native")
    assert report.lora is not None
    assert report.lora.alphas == {ALPHA: len(HERE) * 8}
    assert report.lora.ranks == {RANK: (len(HERE) + len(NOT_HERE)) * 8}
    assert report.lora.refused == ""


def test_merge_adds_it(lora: Path, tmp_path: Path) -> None:
    base = base_tensors(np.float32)
    write(tmp_path / "base.safetensors", base)
    merge(tmp_path / "base.safetensors", lora, tmp_path / "merged.safetensors")
    merged, its = safetensors.numpy.load_file(tmp_path / "merged.safetensors"), its_file()
    for name in shapes():
        weight = f"model.diffusion_model.{name}.weight"
        update = its[f"{name}.lora_up.weight"].astype(float) @ its[f"{name}.lora_down.weight"]
        np.testing.assert_allclose(merged[weight], base[weight] + ALPHA / RANK * update, rtol=1e-5, atol=1e-5)


def test_sample_draws_as_with_the_merged_model(small_base: Path, tmp_path: Path) -> None:
    rng, its = np.random.default_rng(0), {}
    with SafetensorsFile(small_base) as file:
        for layer in ("attn1.to_q", "attn2.to_v"):
            out, into = file.info(f"model.diffusion_model.{module('middle_block', layer)}.weight").shape
            its |= {
                f"{module('middle_block', layer)}.lora_down.weight": rng.standard_normal((RANK, into), np.float32),
                f"{module('middle_block', layer)}.lora_up.weight": 0.3 * rng.standard_normal((out, RANK), np.float32),
            }
    lora = write(tmp_path / "checkpoint-9.safetensors", its, SAYS)
    merge(small_base, lora, tmp_path / "merged.safetensors")
    drawn = []
    for base, extra in ((small_base, ["--lora", str(lora)]), (tmp_path / "merged.safetensors", []), (small_base, [])):
        png = tmp_path / f"{len(drawn)}.png"
        how = ["--steps", "2", "--width", "64", "--height", "64", "--precision", "fp32", "--device", "cpu"]
        assert cli.run(["sample", "-m", str(base), "-p", "a blue circle", "-o", str(png), *how, *extra]) == 0
        with Image.open(png) as image:
            drawn.append(np.asarray(image).astype(int))
    assert abs(drawn[0] - drawn[1]).max() <= 1
    assert abs(drawn[0] - drawn[2]).max() > 1


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ({"alpha": "much"}, "alpha 'much'; expected a positive number"),
        ({"alpha": "-1"}, "alpha '-1'; expected a positive number"),
        ({"alpha": "inf"}, "alpha 'inf'; expected a positive number"),
        ({"rank": "8"}, "rank '8', but its matrices have rank 2"),
    ],
)
def test_metadata_that_gives_no_scale_is_refused(tmp_path: Path, says: dict[str, str], reason: str) -> None:
    path = write(tmp_path / "x.safetensors", its_file(()), SAYS | says)
    with pytest.raises(ModelFileError, match=reason):
        convert(path, tmp_path / "y.safetensors", "kohya")
    report = inspect_file(path)
    assert report.lora is not None
    assert "not read by convert, merge and sample" in render(report)
    assert not (tmp_path / "y.safetensors").exists()


def test_without_an_alpha_the_scale_is_one(tmp_path: Path) -> None:
    says = {key: value for key, value in SAYS.items() if key not in ("rank", "alpha")}
    path = write(tmp_path / "x.safetensors", its_file(()), says)
    convert(path, tmp_path / "y.safetensors", "kohya")
    alphas = {k: v for k, v in safetensors.numpy.load_file(tmp_path / "y.safetensors").items() if k.endswith(".alpha")}
    assert {float(alpha) for alpha in alphas.values()} == {float(RANK)}


def flux() -> dict[str, np.ndarray]:
    layers = ("img_attn", "txt_attn", "img_attn.proj", "img_mlp.lin1")
    return {f"{m}.lora_{end}.weight": np.ones((2, 2), np.float32) for m in layers for end in ("down", "up")}


def newer(form: str) -> dict[str, np.ndarray]:
    names = [form.format(n, part, ab) for n in range(3) for part in "qkv" for ab in "AB"]
    return dict.fromkeys(names, np.ones((2, 2), np.float32))


@pytest.mark.parametrize("command", ["inspect", "convert", "merge", "sample"])
@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (flux(), "one pair of matrices for all blocks"),
        (newer("blocks.{:02}.attn.{}.lora_{}"), "do not say which attention"),
        (newer("lora.blocks.{:02}.attn.{}.{}"), "do not say which attention"),
    ],
    ids=["flux", "newer", "newer, A and B"],
)
def test_files_that_name_no_place_are_refused_with_the_reason(
    tmp_path: Path, small_base: Path, tensors: dict[str, np.ndarray], reason: str, command: str, capsys
) -> None:
    path, out = write(tmp_path / "flux_lora.safetensors", tensors, {"format": "pt"}), str(tmp_path / "out.safetensors")
    if command == "inspect":
        assert reason in render(inspect_file(path))
        return
    base = str(small_base)
    given = {
        "convert": [str(path), out, "--to", "kohya"],
        "merge": [base, str(path), out],
        "sample": ["-m", base, "--lora", str(path), "-p", "a", "-o", str(tmp_path / "out.png"), "--device", "cpu"],
    }[command]
    assert cli.run([command, *given]) == 3
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
