"""convert and merge on SD3 files of the true structure, shrunk; merge against NumPy in fp64, place by place."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import safetensors.numpy

from flame_train.errors import ModelFileError
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.models.sd3.names import mmdit_to_diffusers
from flame_train.tools.inspect import inspect_file
from flame_train.tools.lora_files import convert
from flame_train.tools.merge import merge
from tests.golden_keys import golden
from tests.keymaps import through

D = 64
TARGETS = {  # native module: rows, columns
    "joint_blocks.1.x_block.attn.qkv": (3 * D, D),
    "joint_blocks.0.x_block.attn2.qkv": (3 * D, D),
    "joint_blocks.2.context_block.attn.qkv": (3 * D, D),
    "joint_blocks.0.context_block.attn.proj": (D, D),
    "joint_blocks.2.x_block.mlp.fc2": (D, 4 * D),
    "joint_blocks.1.context_block.adaLN_modulation.1": (6 * D, D),
    "joint_blocks.2.context_block.adaLN_modulation.1": (2 * D, D),
    "final_layer.adaLN_modulation.1": (2 * D, D),
}
FULL = {"lora_kohya_sd3_medium": 501, "lora_kohya_sd35_medium": 527, "lora_kohya_sd35_large": 641}
FAMILIES = {
    "lora_kohya_sd3_medium": "sd3",
    "lora_kohya_sd35_medium": "sd35-medium",
    "lora_kohya_sd35_large": "sd35-large",
}


@pytest.fixture(scope="module")
def base():
    model = MMDiT(MMDiTArch.tiny())
    model.init(np.random.default_rng(0))
    return {name: weight.numpy() for name, weight in model.weights()}


@pytest.fixture(scope="module")
def lora(lora_over):
    return lora_over(TARGETS)


@pytest.fixture
def in_diffusers():
    return partial(through, mmdit_to_diffusers(3))


def test_a_lora_without_the_first_block_is_converted(tmp_path):
    """As diffusers' `--lora_blocks 12` makes it. Queries have no partners: keys and values stay as they are."""
    name = "transformer.transformer_blocks.12.attn.to_q"
    down, up = np.full((2, 1536), 0.5, np.float32), np.full((1536, 2), 0.25, np.float32)
    save_file(tmp_path / "a.safetensors", {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up})
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "kohya")
    tensors = safetensors.numpy.load_file(tmp_path / "b.safetensors")
    rows = tensors["lora_unet_joint_blocks_12_x_block_attn_qkv.lora_up.weight"]
    np.testing.assert_array_equal(rows, np.concatenate([up, np.zeros((2 * 1536, 2), np.float32)]))


@pytest.mark.parametrize("layout", ["single-file", "diffusers", "prefixed"])
@pytest.mark.parametrize("form", ["kohya", "native", "diffusers"])
def test_merging(base, lora, layout, form, in_diffusers, check_merging):
    check_merging(base, lora, layout, form, in_diffusers)


def test_the_last_modulations_halves_are_exchanged_on_the_way(tmp_path, lora, native):
    """In this LoRA of three blocks: the last block is told from the file."""
    save_file(tmp_path / "lora.safetensors", native(lora))
    convert(tmp_path / "lora.safetensors", tmp_path / "out.safetensors", "diffusers")
    found = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    names = "transformer.transformer_blocks.{}.norm1_context.linear.lora_B.weight"
    first, last = (lora[f"joint_blocks.{i}.context_block.adaLN_modulation.1"][1] for i in (1, 2))
    np.testing.assert_array_equal(found[names.format(1)], first)
    np.testing.assert_array_equal(found[names.format(2)], np.concatenate([last[D:], last[:D]]))


@pytest.mark.parametrize("name", FULL)
def test_whole_files_survive_convert_there_and_back(tmp_path, name):
    """Every module of sd-scripts' own lists, text encoders too, with few rows and columns."""
    rng = np.random.default_rng(0)
    lines = golden(name)
    tensors = {}
    for module, line in lines.items():
        out, into = (size // 128 for size in line["shape"])
        tensors[f"{module}.lora_down.weight"] = rng.standard_normal((2, into)).astype(np.float16)
        tensors[f"{module}.lora_up.weight"] = rng.standard_normal((out, 2)).astype(np.float16)
        tensors[f"{module}.alpha"] = np.float16(1.0)
    save_file(tmp_path / "a.safetensors", tensors, {"ss_network_module": "networks.lora_sd3", "ss_tag": "x"})
    there = convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "diffusers")
    back = convert(tmp_path / "b.safetensors", tmp_path / "c.safetensors", "kohya")
    assert (there.dialects, back.dialects) == (("kohya",), ("peft",))
    assert sum(there.modules.values()) == FULL[name] == len(lines)
    found = safetensors.numpy.load_file(tmp_path / "c.safetensors")
    assert found.keys() == tensors.keys()
    assert all(found[n].dtype == x.dtype and found[n].tobytes() == x.tobytes() for n, x in tensors.items())


@pytest.mark.parametrize(
    ("name", "model"), [("sd35_large", "-5-large"), ("sd35_medium", "-5-medium"), ("sd3_medium", "")]
)
def test_the_name_of_the_model_is_written_where_it_shows(tmp_path, name, model):
    listed = golden(f"lora_kohya_{name}")
    lines = {module: line["shape"] for module, line in listed.items() if module.startswith("lora_unet")}
    save_file(tmp_path / "a.safetensors", half_zeros(lines))
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "kohya")
    with SafetensorsFile(tmp_path / "b.safetensors") as file:
        assert file.metadata["modelspec.architecture"] == f"stable-diffusion-3{model}/lora"
    assert inspect_file(tmp_path / "b.safetensors").identity.family == FAMILIES[f"lora_kohya_{name}"]


def half_zeros(modules):
    """A LoRA of rank 1 in fp16."""
    tensors = {f"{m}.lora_down.weight": np.zeros((1, into), np.float16) for m, (_, into) in modules.items()}
    return tensors | {f"{m}.lora_up.weight": np.zeros((out, 1), np.float16) for m, (out, _) in modules.items()}


def test_a_lora_of_text_encoders_takes_the_family_of_the_base(tmp_path, base):
    """SDXL's and SD3's have the same names."""
    names = {f"lora_te{n}_text_model_encoder_layers_0_self_attn_q_proj": (w, w) for n, w in ((1, 768), (2, 1280))}
    lora = {name: np.ones_like(x) for name, x in half_zeros(names).items()}
    save_file(tmp_path / "lora.safetensors", lora)
    text = "text_encoders.clip_{}.transformer.text_model.{}"
    stored = {f"model.diffusion_model.{name}": x for name, x in base.items()}
    for part, width in (("l", 768), ("g", 1280)):
        stored[text.format(part, "encoder.layers.0.self_attn.q_proj.weight")] = np.zeros((width, width), np.float32)
        stored[text.format(part, "embeddings.token_embedding.weight")] = np.zeros((4, width), np.float32)
    save_file(tmp_path / "base.safetensors", stored)
    report = merge(tmp_path / "base.safetensors", tmp_path / "lora.safetensors", tmp_path / "out.safetensors")
    assert report.modules == {"text_encoder": 1, "text_encoder_2": 1}
    found = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    assert all(np.all(found[name] == (1 if "q_proj" in name else x)) for name, x in stored.items())


def test_t5_in_a_file_of_its_own(tmp_path):
    lora = half_zeros({"lora_te3_encoder_block_0_layer_0_SelfAttention_q": (4096, 4096)})
    lora |= half_zeros({"lora_unet_joint_blocks_0_x_block_attn_proj": (1536, 1536)})
    save_file(tmp_path / "lora.safetensors", {name: np.ones_like(x) for name, x in lora.items()})
    q = "encoder.block.0.layer.0.SelfAttention.q.weight"
    t5 = {"shared.weight": np.zeros((32128, 4096), np.int8), q: np.zeros((4096, 4096), np.float16)}
    save_file(tmp_path / "base.safetensors", t5)
    report = merge(tmp_path / "base.safetensors", tmp_path / "lora.safetensors", tmp_path / "out.safetensors", 2.0)
    assert (report.modules, report.skipped) == ({"text_encoder_3": 1}, {"transformer": 1})
    with SafetensorsFile(tmp_path / "out.safetensors") as file:
        assert np.all(file.read(q) == 2)


def test_a_lora_of_a_deeper_model(tmp_path, base, lora, kohya):
    other = {name: pair for name, pair in lora.items() if ".2.context_block.ada" not in name}
    deeper = other | {"joint_blocks.5.x_block.attn.proj": lora["joint_blocks.0.context_block.attn.proj"]}
    save_file(tmp_path / "base.safetensors", base)
    save_file(tmp_path / "lora.safetensors", kohya(deeper))
    with pytest.raises(ModelFileError, match=r"transformer joint_blocks\.5\.x_block\.attn\.proj is not in the base"):
        merge(tmp_path / "base.safetensors", tmp_path / "lora.safetensors", tmp_path / "out.safetensors")


def test_an_sd3_lora_and_an_sdxl_base(tmp_path, lora, kohya):
    save_file(tmp_path / "lora.safetensors", kohya(lora))
    label, first = np.zeros((1280, 2816), np.float16), np.zeros((320, 4, 3, 3), np.float16)
    save_file(tmp_path / "base.safetensors", {"input_blocks.0.0.weight": first, "label_emb.0.0.weight": label})
    with pytest.raises(ModelFileError, match=r"is a LoRA for SD3.5 medium.*is SDXL"):
        merge(tmp_path / "base.safetensors", tmp_path / "lora.safetensors", tmp_path / "out.safetensors")
