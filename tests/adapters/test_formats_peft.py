"""LoRAs as PEFT saves them: a folder with settings beside the weights, whose scales are held to PEFT's own updates."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest

from flame_train.adapters.formats import from_file
from flame_train.errors import ModelFileError
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.sdxl.names import lora_family

SDXL = lora_family()
BLOCK = "down_blocks.1.attentions.0.transformer_blocks.0"
PATHS = [f"{BLOCK}.attn1.to_q", f"{BLOCK}.attn2.to_k", f"{BLOCK}.attn2.to_v", f"{BLOCK}.ff.net.0.proj"]
NATIVE = {path: path.replace("down_blocks.1.attentions.0", "input_blocks.4.1") for path in PATHS}


@pytest.fixture
def saved(tmp_path):
    """A PEFT folder of these settings, and the update of each layer that PEFT makes of it."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")

    def save(**settings):
        torch.manual_seed(0)
        root = torch.nn.Module()
        for path in PATHS:
            parent = root
            *folders, name = path.split(".")
            for folder in folders:
                parent.add_module(folder, getattr(parent, folder, None) or torch.nn.Module())
                parent = getattr(parent, folder)
            parent.add_module(name, torch.nn.Linear(12, 8, bias=False))
        config = peft.LoraConfig(target_modules=[path.split(".", 2)[2] for path in PATHS], **settings)
        model = peft.get_peft_model(root, config)
        layers = {path: model.base_model.model.get_submodule(path) for path in PATHS}
        for layer in layers.values():
            torch.nn.init.normal_(layer.lora_B["default"].weight)
        model.save_pretrained(str(tmp_path))
        return {path: layer.get_delta_weight("default").detach().numpy() for path, layer in layers.items()}

    return save


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "lora_alpha": 32},
        {"r": 4, "lora_alpha": 4},
        {"r": 4, "lora_alpha": 6, "use_rslora": True},
        {"r": 4, "lora_alpha": 8, "rank_pattern": {"to_k": 2}, "alpha_pattern": {"attn2.to_v": 3, r".*ff\..*": 16}},
        {"r": 4, "lora_alpha": 8, "alpha_pattern": {"attn2.to_k": 5, "to_k": 1}, "use_rslora": True},
    ],
    ids=str,
)
def test_each_layer_has_the_scale_that_peft_gives_it(saved, tmp_path, caplog, settings):
    expected = saved(**settings)
    for place in (tmp_path, tmp_path / "adapter_model.safetensors"):
        with caplog.at_level(logging.WARNING):
            state = from_file(place, SDXL).state["unet"]
        assert state.keys() == set(NATIVE.values())
        for path, update in expected.items():
            np.testing.assert_allclose(state[NATIVE[path]].delta(), update, rtol=1e-5, atol=1e-6)
    assert caplog.text == ""


def matrices(rank=4):
    rng = np.random.default_rng(0)
    return {
        f"base_model.model.{path}.lora_{end}.weight": rng.standard_normal(shape).astype(np.float32)
        for path in PATHS
        for end, shape in (("A", (rank, 12)), ("B", (8, rank)))
    }


def scales(place):
    return {factors.scale for factors in from_file(place, SDXL).state["unet"].values()}


def test_where_alpha_is_taken_to_be_the_rank_it_is_told(tmp_path, caplog):
    save_file(tmp_path / "other.safetensors", matrices(), {"ss_network_alpha": "2", "ss_network_dim": "4"})
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 32}')
    assert scales(tmp_path / "other.safetensors") == {1.0}
    assert "says no alpha for 4 modules, so it is taken to be their rank" in caplog.text
    assert "its metadata has ss_network_alpha 2; adapter_config.json beside it has lora_alpha 32" in caplog.text


def test_lora_alpha_in_a_files_own_metadata_is_read(tmp_path, caplog):
    save_file(tmp_path / "x.safetensors", matrices(), {"lora_alpha": "16", "rank": "4"})
    assert scales(tmp_path / "x.safetensors") == {4.0}
    assert caplog.text == ""
    save_file(tmp_path / "x.safetensors", matrices(), {"lora_alpha": "16", "rank": "8"})
    with pytest.raises(ModelFileError, match=r"its metadata has rank '8', but its matrices have rank 4"):
        scales(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"peft_type": "LOKR"}, "peft_type LOKR"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4, an adapter of a base that was"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True"),
        ({"layer_replication": [[0, 4]]}, r"layer_replication = \[\[0, 4\]\]"),
        ({"alpha_pattern": {"(a+)+b": 3}}, "alpha_pattern that is not tried"),
        ([], "adapter_config.json beside it cannot be read|says no alpha"),
        ("{", "adapter_config.json beside it cannot be read"),
    ],
)
def test_a_setting_that_is_no_scale_is_refused_by_name(tmp_path, settings, told):
    save_file(tmp_path / "adapter_model.safetensors", matrices())
    text = settings if isinstance(settings, str) else json.dumps(settings)
    (tmp_path / "adapter_config.json").write_text(text)
    if settings == []:
        assert scales(tmp_path) == {1.0}
        return
    with pytest.raises(ModelFileError, match=told):
        scales(tmp_path)


def test_a_folder_with_other_weights_is_read_by_pefts_name(tmp_path):
    save_file(tmp_path / "adapter_model.safetensors", matrices())
    save_file(tmp_path / "optimizer.safetensors", {"x": np.ones(1, np.float32)})
    with SafetensorsFile(tmp_path / "adapter_model.safetensors") as file:
        assert len(file.names) == 8
    assert scales(tmp_path) == {1.0}


DENOISER = replace(SDXL, components=SDXL.components[:1])  # as of families whose text encoders get no LoRA
BESIDE = {
    "lora_te1_layers_25_mlp_down_proj.lora_down.weight": "1 are a text encoder's LoRA, which is not trained or read",
    "text_encoder.layers.25.mlp.down_proj.lora_A.weight": "1 are a text encoder's LoRA, which is not trained or read",
    f"lora_unet_{BLOCK.replace('.', '_')}_norm1.w_norm": r"1 are norms and biases that LyCORIS trained beside it",
    f"lora_unet_{BLOCK.replace('.', '_')}_norm1.b_norm": r"1 are norms and biases that LyCORIS trained beside it",
    "lora_unet_nowhere.lora_down.weight": r"lora_unet_nowhere\.lora_down\.weight",
}
CHANGES = {
    f"base_model.model.{PATHS[0]}.scalar": r"1 are factors of its updates \(LyCORIS's use_scalar\)",
    f"base_model.model.{PATHS[0]}.reshape_weight": "1 are other shapes for the weights that it changes",
}


@pytest.mark.parametrize("name", [*BESIDE, *CHANGES])
def test_a_part_that_is_not_read_says_what_it_is(tmp_path, caplog, name):
    save_file(tmp_path / "x.safetensors", matrices() | {name: np.ones((2, 2), np.float32)})
    with pytest.raises(ModelFileError, match=(BESIDE | CHANGES)[name]) as caught:
        from_file(tmp_path / "x.safetensors", DENOISER)
    assert ("--skip-unknown" in str(caught.value)) == (name in BESIDE)
    if name in CHANGES:  # what is left would be another LoRA
        with pytest.raises(ModelFileError):
            from_file(tmp_path / "x.safetensors", DENOISER, skip_unknown=True)
        return
    state = from_file(tmp_path / "x.safetensors", DENOISER, skip_unknown=True).state
    assert state["unet"].keys() == set(NATIVE.values())
    assert "1 tensors are left out: " in caplog.text


def test_a_file_of_unknown_parts_alone_is_no_lora_of_the_family(tmp_path):
    save_file(tmp_path / "x.safetensors", {name: np.ones((2, 2), np.float32) for name in BESIDE})
    with pytest.raises(ModelFileError, match="belong to no module of this family"):
        from_file(tmp_path / "x.safetensors", DENOISER, skip_unknown=True)
