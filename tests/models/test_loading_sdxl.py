"""Loading small SDXL models from both layouts, and refusing what is not one."""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

from flame_train.errors import ModelFileError
from flame_train.io.safetensors import save_file
from flame_train.models.sdxl.names import SDXL_FILES
from flame_train.models.sdxl.names_unet import stated_prediction, unet_from_diffusers
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.networks.vae.names import vae_from_diffusers
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.names import clip_from_openclip
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder

safetensors = pytest.importorskip("safetensors.numpy")

PREFIXES = {
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text_encoder": "conditioner.embedders.0.transformer.",
    "text_encoder_2": "conditioner.embedders.1.model.",
}


@pytest.fixture(scope="module")
def models():
    """One small network each, weights representable in fp16."""
    made = {
        "unet": UNet(UNetArch.tiny(16)),
        "vae": Vae(VaeArch.tiny(16)),
        "text_encoder": ClipTextEncoder(ClipArch.tiny("quick_gelu")),
        "text_encoder_2": ClipTextEncoder(ClipArch.tiny("gelu", 32)),
    }
    rng = np.random.default_rng(0)
    for model in made.values():
        model.init(rng, "float16")
    return made


def renamed(model, table=None):
    arrays = {name: t.numpy() for name, t in model.weights()}
    if table is not None:
        reader = type("Reader", (), {"read": staticmethod(arrays.__getitem__)})
        arrays = {name: source.read(reader) for name, source in table.pull(arrays).sources.items()}
    return {name: np.array(array, order="C") for name, array in arrays.items()}


def single_file(models):
    tables = {"text_encoder_2": clip_from_openclip().inverse}
    tensors = {
        prefix + name: array
        for part, prefix in PREFIXES.items()
        for name, array in renamed(models[part], tables.get(part)).items()
    }
    extras = {
        "conditioner.embedders.0.transformer.text_model.embeddings.position_ids": np.arange(77)[None],
        "conditioner.embedders.1.model.logit_scale": np.array(4.6, np.float32),
        "denoiser.sigmas": np.ones(1000, np.float32),
        "first_stage_model.loss.logvar": np.zeros((), np.float32),
        "first_stage_model.loss.discriminator.main.0.weight": np.zeros((2, 3, 4, 4), np.float32),
    }
    return tensors | extras


@pytest.fixture(scope="module")
def checkpoint(models, tmp_path_factory):
    path = tmp_path_factory.mktemp("single") / "tiny.safetensors"
    safetensors.save_file(single_file(models), path)
    return path


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    tables = {"unet": unet_from_diffusers().inverse, "vae": vae_from_diffusers().inverse}
    for part, model in models.items():
        (root / part).mkdir()
        stem = "model" if part.startswith("text") else "diffusion_pytorch_model"
        safetensors.save_file(renamed(model, tables.get(part)), root / part / f"{stem}.safetensors")
    return root


def load(path, component, dtype="float32"):
    return SDXL_FILES.load(path, component, device="cpu", dtype=dtype)


@pytest.mark.parametrize("layout", ["checkpoint", "folder"])
def test_every_weight_arrives(layout, models, request):
    path = request.getfixturevalue(layout)
    assert SDXL_FILES.all_parts(path, "unet").keys() == set(models)
    for part, model in models.items():
        loaded = load(path, part)
        assert loaded.arch == model.arch
        for (name, t), (_, expected) in zip(loaded.weights(), model.weights(), strict=True):
            assert t.dtype.name == "float32"
            np.testing.assert_array_equal(t.numpy(), expected.numpy(), err_msg=f"{part} {name}")


def test_convolutions_lie_channels_last_in_memory(checkpoint):
    weight = load(checkpoint, "unet").input_blocks[1][0].in_layers[2].weight.data
    assert weight.transpose(0, 2, 3, 1).flags.c_contiguous


def test_all_faults_of_all_components_in_one_message(models, tmp_path):
    tensors = single_file(models)
    tensors["model.diffusion_model.out.2.bias_"] = tensors.pop("model.diffusion_model.out.2.bias")
    tensors["first_stage_model.encoder.conv_out.bias"] = np.zeros(9, np.float16)
    tensors["first_stage_model.extra"] = np.zeros(3, np.float16)
    del tensors["conditioner.embedders.1.model.ln_final.bias"]
    path = tmp_path / "broken.safetensors"
    safetensors.save_file(tensors, path)
    with pytest.raises(ModelFileError) as caught:
        SDXL_FILES.parts(path, PREFIXES)
    text = str(caught.value)
    assert "missing: 1\n    out.2.bias (the file has out.2.bias_)" in text
    assert "encoder.conv_out.bias: expected (8,), found (9,)" in text
    assert "unexpected: 1\n    extra" in text
    assert "text_model.final_layer_norm.bias" in text


def test_a_name_that_the_diffusers_table_does_not_know_is_unexpected(models, tmp_path):
    tensors = renamed(models["unet"], unet_from_diffusers().inverse) | {"conv_inn.bias": np.zeros(3, np.float16)}
    root = tmp_path / "root"
    (root / "unet").mkdir(parents=True)
    safetensors.save_file(tensors, root / "unet" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ModelFileError, match=r"unexpected: 1\n    unet/conv_inn\.bias"):
        load(root, "unet")


@pytest.mark.parametrize("marker", ["v_pred", "ztsnr"])
def test_a_single_file_says_by_a_marker_that_it_predicts_v(models, tmp_path, marker):
    path = tmp_path / "v.safetensors"
    safetensors.save_file(single_file(models) | {marker: np.zeros(0, np.float32)}, path)
    assert stated_prediction(path) == "v"
    assert load(path, "unet").arch == models["unet"].arch


@pytest.mark.parametrize(("said", "stated"), [("v", "v"), ("epsilon", "")])
def test_a_single_files_metadata_is_believed_when_it_says_v(models, tmp_path, said, stated):
    path = tmp_path / "said.safetensors"
    safetensors.save_file(single_file(models), path, {"modelspec.prediction_type": said})
    assert stated_prediction(path) == stated


@pytest.mark.parametrize(("written", "stated"), [("v_prediction", "v"), ("epsilon", "epsilon"), (None, "")])
def test_a_folder_says_it_in_its_schedulers_configuration(folder, tmp_path, written, stated):
    shutil.copytree(folder, tmp_path / "copy")
    if written:
        (tmp_path / "copy" / "scheduler").mkdir()
        text = json.dumps({"_class_name": "EulerDiscreteScheduler", "prediction_type": written})
        (tmp_path / "copy" / "scheduler" / "scheduler_config.json").write_text(text)
    assert stated_prediction(tmp_path / "copy") == stated


def test_a_schedulers_configuration_that_is_none(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "scheduler").mkdir()
    (tmp_path / "copy" / "scheduler" / "scheduler_config.json").write_text("[")
    with pytest.raises(ModelFileError, match="expected JSON that describes a scheduler"):
        stated_prediction(tmp_path / "copy")


def test_nan_is_named(models, tmp_path):
    tensors = single_file(models)
    tensors["model.diffusion_model.out.0.bias"] = np.full(16, np.nan, np.float16)
    path = tmp_path / "nan.safetensors"
    safetensors.save_file(tensors, path)
    with pytest.raises(ModelFileError, match=r"NaN or infinity in 1 tensor \(out\.0\.bias\)"):
        load(path, "unet")


def test_numbers_too_large_for_fp16_are_told_from_damage(models, tmp_path):
    tensors = single_file(models)
    tensors["model.diffusion_model.out.0.bias"] = np.full(16, 1e6, np.float32)
    path = tmp_path / "large.safetensors"
    safetensors.save_file(tensors, path)
    load(path, "unet")
    with pytest.raises(ModelFileError, match=r"beyond the 65504 of fp16 in .*or take bf16"):
        load(path, "unet", "float16")


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_weights_that_another_program_quantised(models, tmp_path, dtype):
    tensors = single_file(models)
    tensors["model.diffusion_model.out.0.bias"] = np.ones(16, dtype)
    path = tmp_path / "quantised.safetensors"
    safetensors.save_file(tensors, path)
    with pytest.raises(ModelFileError, match=rf"unet: out\.0\.bias holds whole numbers \({np.dtype(dtype)}\)"):
        load(path, "unet")


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ({"double_blocks.0.img_attn.norm.key_norm.scale": (128,), "img_in.weight": (3072, 64)}, "Flux"),
        ({"lora_unet_input_blocks_4_1_proj_in.lora_down.weight": (4, 640)}, "LoRA"),
        ({"anything": (3,)}, "not a model that is known"),
    ],
)
def test_another_file_is_named_for_what_it_is(tensors, name, tmp_path):
    path = tmp_path / "other.safetensors"
    safetensors.save_file({n: np.zeros(shape, np.float16) for n, shape in tensors.items()}, path)
    with pytest.raises(ModelFileError, match=f"expected SDXL, found .*{name}"):
        load(path, "unet")


def test_a_lone_unet_lacks_the_rest(models, tmp_path):
    path = tmp_path / "unet.safetensors"
    safetensors.save_file(renamed(models["unet"]), path)
    assert load(path, "unet").arch == models["unet"].arch
    with pytest.raises(ModelFileError, match="holds no vae, no text_encoder, no text_encoder_2"):
        SDXL_FILES.parts(path, PREFIXES)


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
def test_a_lone_vae(models, tmp_path, prefix):
    path = tmp_path / "vae.safetensors"
    safetensors.save_file({prefix + name: array for name, array in renamed(models["vae"]).items()}, path)
    loaded = load(path, "vae")
    for (name, t), (_, expected) in zip(loaded.weights(), models["vae"].weights(), strict=True):
        np.testing.assert_array_equal(t.numpy(), expected.numpy(), err_msg=name)


@pytest.mark.parametrize("markers", [("edm_mean", "edm_std"), ("edm_vpred.sigma_max",), ("edm_vpred.sigma_min",)])
def test_an_edm_model_is_refused_by_name(models, tmp_path, markers):
    path = tmp_path / "edm.safetensors"
    safetensors.save_file(single_file(models) | {marker: np.zeros(1, np.float32) for marker in markers}, path)
    with pytest.raises(ModelFileError, match=rf"is an EDM model \({markers[0]}\), such as Playground v2.5 and CosXL"):
        stated_prediction(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"_class_name": "EDMDPMSolverMultistepScheduler", "prediction_type": "epsilon"}, r"an EDM model \(EDMDPM"),
        ({"_class_name": "EulerDiscreteScheduler", "prediction_type": "sample"}, "predicts 'sample'; expected one of"),
        (
            {"prediction_type": "epsilon", "beta_schedule": "linear", "beta_end": 0.02},
            "beta_schedule 'linear', beta_end",
        ),
    ],
)
def test_a_scheduler_of_another_process_is_refused_by_name(folder, tmp_path, content, told):
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "scheduler").mkdir()
    (tmp_path / "copy" / "scheduler" / "scheduler_config.json").write_text(json.dumps(content))
    with pytest.raises(ModelFileError, match=told):
        stated_prediction(tmp_path / "copy")


def test_tensors_of_no_part_are_told_once(models, tmp_path, caplog):
    path = tmp_path / "stray.safetensors"
    safetensors.save_file(single_file(models) | {"strange.marker": np.zeros(1, np.float32)}, path)
    for _ in range(2):
        SDXL_FILES.all_parts(path, "unet")
    (told,) = caplog.messages
    assert told == f"{path}: left out 1 tensor of no part of the model, such as strange.marker"


def test_what_a_folder_states_of_the_unet_is_honoured_or_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    stated = tmp_path / "copy" / "unet" / "config.json"
    stated.write_text('{"norm_eps": 0.01, "norm_num_groups": 4, "act_fn": "silu"}')
    unet = load(tmp_path / "copy", "unet")
    assert unet.arch.eps == 0.01
    assert unet.input_blocks[1][0].in_layers[0].eps == unet.out[0].eps == 0.01
    stated.write_text('{"resnet_time_scale_shift": "scale_shift", "freq_shift": 1}')
    with pytest.raises(ModelFileError, match=r"freq_shift is 1, expected 0; resnet_time_scale_shift is 'scale_shift'"):
        load(tmp_path / "copy", "unet")


def test_scaled_fp8_is_read_with_its_factors(models, tmp_path):
    """ComfyUI's: each matrix of 8 bits with a number that it is multiplied by, in the UNet and in CLIP-L."""
    tensors, expected = {}, {}
    for name, array in single_file(models).items():
        scaled = (
            array.ndim == 2
            and name.endswith(("proj.weight", "to_k.weight", "fc1.weight"))
            and "embedders.1" not in name
        )
        if scaled:
            eight = (array.astype(np.float32) * 7).astype(ml_dtypes.float8_e4m3fn)
            factor = np.array(1 / 7, np.float32)
            tensors |= {name: eight, name.replace(".weight", ".scale_weight"): factor}
            expected[name] = eight.astype(np.float32) * factor
        else:
            tensors[name] = array
    tensors["model.diffusion_model.scaled_fp8"] = np.zeros(0, ml_dtypes.float8_e4m3fn)
    path = tmp_path / "scaled.safetensors"
    save_file(path, tensors)
    assert len(expected) > 5
    for part in ("unet", "text_encoder"):
        loaded = dict(load(path, part).weights())
        own = {name.removeprefix(PREFIXES[part]): a for name, a in expected.items() if name.startswith(PREFIXES[part])}
        assert own
        for name, array in own.items():
            np.testing.assert_array_equal(loaded[name].numpy(), array, err_msg=name)


@pytest.mark.parametrize("end", ["weight_scale", "weight_scale_inv"])
def test_another_form_of_scaled_fp8_is_refused_by_name(models, tmp_path, end):
    tensors = single_file(models)
    tensors[f"model.diffusion_model.label_emb.0.0.{end}"] = np.ones(1, np.float32)
    path = tmp_path / "scaled.safetensors"
    safetensors.save_file(tensors, path)
    with pytest.raises(ModelFileError, match=rf"unet has weights in 8 bits of a form that.* \(.*{end}\)"):
        load(path, "unet")
