"""Bases written in ComfyUI's int8: by the formulas of comfy-kitchen 0.2.40, and read here to the same codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from flame_train import cli
from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.formats import to_kohya
from flame_train.engine import nn
from flame_train.errors import ConfigError, ModelFileError
from flame_train.io import safetensors as safetensors_reader
from flame_train.io.dtypes import DTYPE_OF_TAG
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.registry import FAMILIES
from flame_train.models.zimage.names import transformer_to_diffusers
from flame_train.tools import lora_files
from flame_train.tools.int8_files import FORMATS, convert_base, describe_base
from flame_train.tools.merge import merge
from flame_train.tools.verify import render, verify
from tests.keymaps import through
from tests.recipes.bases import FP8, below, options, small_base, trainer
from tests.run_files import arrays_of

BASES = ("zimage", "sdxl")


@pytest.fixture(scope="module", params=BASES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, family)


@pytest.fixture(scope="module")
def zimage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_base(tmp_path_factory, "zimage")


@pytest.fixture(scope="module", params=FORMATS)
def written(base: Path, request: pytest.FixtureRequest) -> tuple[str, Path]:
    target = base.with_name(f"{request.param}.safetensors")
    convert_base(base, target, request.param)
    return str(request.param), target


def kitchen(weight: np.ndarray, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes before they are rounded, factors and what codes stand for: `backends/eager/quantization.py`."""
    w = torch.from_numpy(weight.astype(np.float32))
    h = torch.ones(1, 1)
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    while len(h) < group:
        h = torch.kron(h, four)
    h = h / len(h) ** 0.5

    def turned(x: torch.Tensor) -> torch.Tensor:
        return (x.reshape(len(x), -1, len(h)) @ h.T).reshape(x.shape)

    scale = (turned(w).abs().amax(-1, keepdim=True) / 127.0).clamp(min=1e-30)
    exact = turned(w) / scale
    return exact, scale, turned(exact.round().clamp(-128, 127) * scale)


def test_codes_and_factors_are_those_of_comfy_kitchen(base: Path, written: tuple[str, Path]) -> None:
    """The former but for numbers in the middle of two: one divides by the factor, the other multiplies."""
    to, target = written
    plain, stored = arrays_of(base), arrays_of(target)
    marks = {name.removesuffix(".comfy_quant"): a for name, a in stored.items() if name.endswith(".comfy_quant")}
    assert marks
    for layer, mark in marks.items():
        said, weight = json.loads(mark.tobytes()), plain.pop(f"{layer}.weight")
        group = said.pop("convrot_groupsize", 0)
        assert said == {"format": "int8_tensorwise"} | ({"convrot": True} if group else {})
        sizes = (256, 64, 16) if to.endswith("convrot") else ()
        assert group == next((size for size in sizes if weight.shape[1] % size == 0), 0)
        exact, scale, numbers = kitchen(weight, group)
        found, factors = stored.pop(f"{layer}.weight"), stored.pop(f"{layer}.weight_scale")
        assert (found.dtype, factors.dtype, factors.shape) == (np.int8, np.float32, (len(weight), 1))
        np.testing.assert_allclose(factors, scale.numpy(), rtol=2e-6)
        assert np.abs(found - exact.numpy()).max() < 0.5001
        error = np.linalg.norm(numbers.numpy() - weight.astype(np.float32)) / np.linalg.norm(weight.astype(np.float32))
        assert error < 0.02
    for name in marks:
        stored.pop(f"{name}.comfy_quant")
    assert stored.keys() == plain.keys()
    for name, array in plain.items():
        assert array.dtype == stored[name].dtype
        np.testing.assert_array_equal(array, stored[name], err_msg=name)


def test_a_base_and_its_int8_are_loaded_to_the_same_bytes(base: Path, written: tuple[str, Path], family: str) -> None:
    to, target = written
    files, denoiser = FAMILIES[family].files, FAMILIES[family].denoiser
    storage = nn.Storage(to.removeprefix("comfyui-"))
    one, other = (files.load(f, denoiser, device="cpu", dtype="float32", storage=storage) for f in (base, target))
    packed = 0
    for (name, a), (_, b) in zip(one.weights(), other.weights(), strict=True):
        for x, y in zip(*((w.stored if isinstance(w, nn.ScaledWeight) else (w,)) for w in (a, b)), strict=True):
            np.testing.assert_array_equal(x.numpy(), y.numpy(), err_msg=name)
        packed += isinstance(a, nn.ScaledWeight)
    with SafetensorsFile(target) as file:
        assert packed == sum(name.endswith(".comfy_quant") for name in file.names)


def test_each_layer_is_rounded_once(zimage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its factors lie before its codes, and still every tensor is aligned to its width."""
    rounded, original = list[tuple[int, ...]](), nn.QuantizedWeight.of

    def of(weight: Any, storage: nn.Storage) -> nn.QuantizedWeight:
        rounded.append(weight.shape)
        return original(weight, storage)

    monkeypatch.setattr(nn.QuantizedWeight, "of", of)
    convert_base(zimage, tmp_path / "int8.safetensors", FORMATS[0])
    with SafetensorsFile(tmp_path / "int8.safetensors") as file:
        assert len(rounded) == sum(name.endswith(".comfy_quant") for name in file.names)
        assert not [n for n in file.names if file.info(n).begin % DTYPE_OF_TAG[file.info(n).dtype].itemsize]


def test_training_takes_the_file_as_it_takes_the_base(zimage: Path, tmp_path: Path, drawn: Path) -> None:
    target = zimage.with_name("trained.safetensors")  # beside its tokenizer
    assert cli.run(["convert", str(zimage), str(target), "--to", "comfyui-int8-convrot"]) == 0
    trained = []
    for name, file in (("base", zimage), ("int8", target)):
        folder = tmp_path / name
        folder.mkdir()
        train = trainer(zimage, drawn, folder)
        settings = ("model.quantize=int8-convrot", "model.arithmetic=int8", "sample.every=0", "output.format=kohya")
        assert train(*options(f"model.checkpoint={file}", f"data.cache={folder / 'encoded'}", *settings)) == 0
        trained.append(arrays_of(folder / "run" / "lora.safetensors"))
    assert trained[0].keys() == trained[1].keys()
    for name, array in trained[0].items():
        np.testing.assert_array_equal(array, trained[1][name])


@pytest.mark.parametrize(
    ("quantize", "said"),
    [("off", '"off" unpacks them'), ("int8", '"int8" rounds them once more'), ("int8-convrot", "")],
)
def test_a_plan_says_which_setting_keeps_the_codes(
    zimage: Path, tmp_path: Path, drawn: Path, caplog: pytest.LogCaptureFixture, quantize: str, said: str
) -> None:
    target = zimage.with_name("planned.safetensors")
    convert_base(zimage, target, "comfyui-int8-convrot", force=True)
    train = trainer(target, drawn, tmp_path)
    assert train("--dry-run", "--set", f"model.quantize={quantize}") == 0
    kept = 'model.checkpoint: 20 layers are in int8-convrot; model.quantize = "int8-convrot" keeps them as they are, '
    assert [r.getMessage() for r in caplog.records if "keeps them" in r.getMessage()] == ([kept + said] if said else [])


def test_a_plan_reads_no_numbers_of_a_packed_base(
    zimage: Path, tmp_path: Path, drawn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file on the hub it has the header alone, in which formats may be said, too."""
    target = zimage.with_name("planned.safetensors")
    convert_base(zimage, target, "comfyui-int8", force=True)
    tensors, layers = arrays_of(target), {}
    for name in [name for name in tensors if name.endswith(".comfy_quant")]:
        layers[name.removesuffix(".comfy_quant")] = json.loads(tensors.pop(name).tobytes())
    save_file(str(target), tensors, {"_quantization_metadata": json.dumps({"layers": layers})})
    monkeypatch.setitem(safetensors_reader._HEADERS_ALONE, target, "fetch it")
    assert trainer(target, drawn, tmp_path)("--dry-run", "--set", "model.quantize=int8") == 0


def test_verify_says_which_comfyui_reads_it(written: tuple[str, Path], family: str, tmp_path: Path) -> None:
    """A mark without a format is what ComfyUI-INT8-Fast wrote: ComfyUI refuses it, as it does blocks in int8."""
    _, target = written
    (reader,) = verify(target)
    assert (reader.program, reader.version, reader.verdict) == ("ComfyUI", "0.27.0 and later", "yes")
    assert reader.names == {"zimage": "0.38.1 (2026-11-28)", "sdxl": "0.3.64 (2025-10-12)"}[family]
    tensors = arrays_of(target)
    assert f"yes, by its names in {reader.names}, {reader.taken} layers taken, 0 not" in render(target, [reader])
    assert reader.taken == sum(name.endswith(".comfy_quant") for name in tensors)
    layer = next(name for name in tensors if name.endswith(".comfy_quant"))
    for said in ({"convrot": False, "per_row": True}, {"format": "int8_blockwise"}):
        tensors[layer] = np.frombuffer(json.dumps(said).encode(), np.uint8)
        save_file(str(tmp_path / "other.safetensors"), tensors)
        (reader,) = verify(tmp_path / "other.safetensors")
        assert (reader.verdict, len(reader.left)) == ("no", 1)
        assert reader.left[0].startswith(layer.removesuffix(".comfy_quant"))


def test_verify_claims_nothing_of_what_it_does_not_know(zimage: Path, tmp_path: Path) -> None:
    """ComfyUI reads formats and families of which nothing is said here, and loads a model without some weights."""
    target, other = tmp_path / "int8.SAFETENSORS", tmp_path / "other.safetensors"
    convert_base(zimage, target, FORMATS[0])
    tensors = arrays_of(target)
    mark = next(name for name in tensors if name.endswith(".comfy_quant"))
    layer = mark.removesuffix(".comfy_quant")

    def read(**changed: np.ndarray | None) -> tuple[str, str, tuple[str, ...], int]:
        save_file(str(other), {n: a for n, a in (tensors | changed).items() if a is not None})
        (reader,) = verify(other)
        return reader.verdict, reader.lacks, reader.left, reader.taken

    verdict, _, _, count = read()
    assert verdict == "yes"
    assert verify(target)[0].verdict == "yes"  # an ending in capitals, too
    for kind in ("nvfp4", "mxfp8", "convrot_w4a4"):
        said = np.frombuffer(json.dumps({"format": kind}).encode(), np.uint8)
        assert read(**{mark: said}) == ("not checked", kind, (), count - 1)
    lost: dict[str, np.ndarray | None] = {f"{layer}.weight": None, f"{layer}.weight_scale": None}
    assert read(**lost) == ("part", "", (f"{layer} (no weight)",), count - 1)
    assert read(**{f"{layer}.comfy_quant": None}) == ("part", "", (f"{layer} (no mark)",), count - 1)
    with pytest.raises(ModelFileError, match=r"weight_scale: holds NaN, infinity or negative numbers"):
        read(**{f"{layer}.weight_scale": -tensors[f"{layer}.weight_scale"]})
    moved = {n.replace("model.diffusion_model.", "transformer/"): a for n, a in tensors.items()}
    save_file(str(other), moved)
    (reader,) = verify(other)
    assert (reader.verdict, reader.taken, len(reader.left)) == ("no", 0, count)


def test_a_lora_on_layers_that_stay_in_16_bits_is_merged_and_the_others_are_kept(zimage: Path, tmp_path: Path) -> None:
    base, lora = tmp_path / "int8.safetensors", tmp_path / "lora.safetensors"
    convert_base(zimage, base, "comfyui-int8-convrot")
    family, rng = FAMILIES["zimage"], np.random.default_rng(0)
    layers = [f"layers.{n}.adaLN_modulation.0" for n in range(2)]
    whole, packed = arrays_of(zimage), arrays_of(base)
    changed = [f"model.diffusion_model.{layer}.weight" for layer in layers]
    shapes = [whole[name].shape for name in changed]
    made = [LoraFactors(rng.normal(size=(2, c)), rng.normal(size=(r, 2)), 2.0) for r, c in shapes]
    state = {family.denoiser: dict(zip(layers, made, strict=True))}
    tensors = to_kohya(state, family.lora_names_in({}))
    save_file(str(lora), {name: array.astype(np.float32) for name, array in tensors.items()})
    for source in (zimage, base):
        merge(source, lora, tmp_path / f"of-{source.name}")
    merged, theirs = (arrays_of(tmp_path / f"of-{source.name}") for source in (base, zimage))
    assert merged.keys() == packed.keys()
    for name, array in merged.items():
        np.testing.assert_array_equal(array, (theirs if name in changed else packed)[name], err_msg=name)
        assert (name in changed) == (not np.array_equal(array, packed[name]))
    assert verify(tmp_path / "of-int8.safetensors")[0].verdict == "yes"


@pytest.mark.parametrize(
    ("name", "verdict", "said"),
    [("flux2", "yes", "by its names in 0.38.1"), ("flux3", "not checked", "it reads the formats of {} layers")],
)
def test_verify_looks_names_up_where_a_family_has_a_table(
    tmp_path_factory: pytest.TempPathFactory, name: str, verdict: str, said: str
) -> None:
    base = small_base(tmp_path_factory, name)
    target = base.with_name("int8.safetensors")
    convert_base(base, target, FORMATS[0])
    (reader,) = verify(target)
    assert (reader.verdict, reader.lacks) == (verdict, "" if verdict == "yes" else FAMILIES[name].title)
    assert said.format(reader.taken) in render(target, [reader])


def test_of_a_pipeline_its_transformer_is_to_be_given(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Qwen-Image 1 has one naming; that of a whole folder has its parts' names before it, as no program reads it."""
    folder, arrays = tmp_path_factory.mktemp("pipeline"), arrays_of(small_base(tmp_path_factory, "qwenimage1"))
    (folder / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    own = below("model.diffusion_model.", arrays)
    for part, tensors in (("transformer", own), ("vae", below("vae.", arrays))):
        (folder / part).mkdir()
        save_file(str(folder / part / "diffusion_pytorch_model.safetensors"), tensors)
    target = folder / "int8.safetensors"
    with pytest.raises(ModelFileError, match=r"below transformer/; name \S*transformer instead"):
        convert_base(folder, target, FORMATS[0])
    assert not target.exists()
    report = convert_base(folder / "transformer", target, FORMATS[0]).as_dict()
    assert {name for name in arrays_of(target) if not name.endswith((".comfy_quant", "_scale"))} == own.keys()
    assert report["size"] == sum(array.nbytes for array in own.values())
    assert f"before: {folder / 'transformer'}: {report['size'] / 1024:.1f} KiB" in describe_base(report, [])
    save_file(str(folder / "x.safetensors"), {f"diffusion_model.{name}": array for name, array in own.items()})
    with pytest.raises(ModelFileError, match=r"below diffusion_model\.; name the single file"):
        convert_base(folder / "x.safetensors", folder / "never.safetensors", FORMATS[0])


@pytest.mark.parametrize("how", ["tensor", "metadata"])
def test_a_packed_text_encoder_stays_as_it_is(
    zimage: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, source, target = arrays_of(zimage), tmp_path / "mixed.safetensors", tmp_path / "int8.safetensors"
    name = next(n for n in arrays if n.startswith("text_encoders") and n.endswith("q_proj.weight"))
    layer, said = name.removesuffix(".weight"), {"format": "float8_e4m3fn"}
    mark = {f"{layer}.comfy_quant": np.frombuffer(json.dumps(said).encode(), np.uint8)} if how == "tensor" else {}
    packed = {name: arrays[name].astype(FP8), f"{name}_scale": np.full((), 2, np.float32)} | mark
    notes = {} if mark else {"_quantization_metadata": json.dumps({"layers": {layer: said}})}
    save_file(str(source), arrays | packed, notes)
    convert_base(source, target, FORMATS[0])
    stored = arrays_of(target)
    for name, array in packed.items():
        assert (stored[name].dtype, stored[name].tobytes()) == (array.dtype, array.tobytes())
    with SafetensorsFile(target) as file:
        assert notes.items() <= file.metadata.items()
    assert verify(target)[0].verdict == "yes"
    if notes:
        monkeypatch.setattr(lora_files, "MAX_METADATA_VALUE", 50)
        with pytest.raises(ModelFileError, match="_quantization_metadata are too long"):
            convert_base(source, tmp_path / "never.safetensors", FORMATS[0])


def test_the_names_of_diffusers_are_refused(zimage: Path, tmp_path: Path) -> None:
    """ComfyUI knows no int8 below them."""
    prefix = "model.diffusion_model."
    native = {n.removeprefix(prefix): a for n, a in arrays_of(zimage).items() if n.startswith(prefix)}
    save_file(str(tmp_path / "transformer.safetensors"), through(transformer_to_diffusers(), native))
    with pytest.raises(ModelFileError, match=r"expected the names of ComfyUI's own files, such as .*, got"):
        convert_base(tmp_path / "transformer.safetensors", tmp_path / "out.safetensors", FORMATS[0])


def test_what_cannot_be_written_is_refused(zimage: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.safetensors"
    with pytest.raises(ConfigError, match="the same file"):
        convert_base(zimage, zimage, FORMATS[0])
    convert_base(zimage, target, FORMATS[0])
    with pytest.raises(ModelFileError, match="is packed as I8 already"):
        convert_base(target, tmp_path / "twice.safetensors", FORMATS[1])
    tensors = arrays_of(zimage)
    name = next(n for n in tensors if n.endswith("layers.0.attention.qkv.weight"))
    save_file(str(tmp_path / "fp8.safetensors"), tensors | {name: tensors[name].astype(FP8)})
    with pytest.raises(ModelFileError, match=r"qkv\.weight is packed as F8_E4M3 already"):
        convert_base(tmp_path / "fp8.safetensors", tmp_path / "never.safetensors", FORMATS[0])
    tensors[name] = np.full_like(tensors[name], np.nan)
    save_file(str(tmp_path / "nan.safetensors"), tensors)
    with pytest.raises(ModelFileError, match=r"qkv\.weight holds NaN or infinity"):
        convert_base(tmp_path / "nan.safetensors", tmp_path / "never.safetensors", FORMATS[0])
    assert not (tmp_path / "never.safetensors").exists()
    lora: dict[str, Any] = {
        f"diffusion_model.layers.0.attention.out.lora_{part}.weight": np.zeros(shape, ml_dtypes.bfloat16)
        for part, shape in (("A", (2, 64)), ("B", (64, 2)))
    }
    save_file(str(tmp_path / "lora.safetensors"), lora)
    assert cli.run(["convert", str(tmp_path / "lora.safetensors"), str(target), "--to", FORMATS[0], "--force"]) != 0
    assert "expected a base model of" in capsys.readouterr().err
    assert cli.run(["convert", str(zimage), str(target), "--to", FORMATS[0], "--force", "--skip-unknown"]) != 0
    assert "--skip-unknown goes with a LoRA" in capsys.readouterr().err
