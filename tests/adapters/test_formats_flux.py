"""Flux's LoRA files: names against the lists of other trainers' files, and values through every conversion."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.formats import from_file, to_diffusers, to_kohya
from flame_train.adapters.metadata import network_metadata
from flame_train.errors import ModelFileError
from flame_train.io.safetensors import save_file
from flame_train.models.flux.names import lora_family
from tests.golden_keys import golden

FLUX = lora_family()
COMPONENT = {"lora_unet": "transformer", "lora_te1": "text_encoder", "lora_te3": "text_encoder_2"}


def kohya_file(name="lora_kohya_flux", rank=2, alpha=1.0, dtype=np.float16):
    """Tensors as kohya's own network names them, with few rows and columns."""
    rng = np.random.default_rng(0)
    tensors = {}
    for module, base in golden(name).items():
        out, into = (max(1, size // 768) for size in base["shape"])
        tensors[f"{module}.lora_down.weight"] = rng.standard_normal((rank, into)).astype(dtype)
        tensors[f"{module}.lora_up.weight"] = rng.standard_normal((out, rank)).astype(dtype)
        tensors[f"{module}.alpha"] = np.array(alpha, dtype)
    return tensors


def peft_file(targets, rank=4, dtype=np.float16):
    """Tensors as PEFT's own adapter names them, every down matrix another."""
    rng = np.random.default_rng(1)
    shapes = golden("lora_peft_flux")[targets]
    small = {k: (rank, c // 768) if "lora_A" in k else (max(1, r // 768), rank) for k, (r, c) in shapes.items()}
    return {key: rng.standard_normal(shape).astype(dtype) for key, shape in small.items()}


def read(tmp_path, tensors, metadata=None):
    save_file(tmp_path / "x.safetensors", tensors, metadata)
    return from_file(tmp_path / "x.safetensors", FLUX)


def same(a, b):
    return a.keys() == b.keys() and all(
        x.dtype == b[name].dtype and x.shape == b[name].shape and x.tobytes() == b[name].tobytes()
        for name, x in a.items()
    )


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("lora_kohya_flux", {"transformer": 304, "text_encoder": 72}),
        ("lora_kohya_flux_with_t5", {"transformer": 304, "text_encoder": 72, "text_encoder_2": 168}),
    ],
)
def test_kohya_keys_are_those_of_kohyas_own_network(tmp_path, name, counts):
    tensors = kohya_file(name)
    found = read(tmp_path, tensors)
    assert {component: len(modules) for component, modules in found.state.items()} == counts
    assert found.dialects == ("kohya",)
    for module, base in golden(name).items():
        component = COMPONENT["_".join(module.split("_")[:2])]
        assert base["base"].removesuffix(".weight") in found.state[component]
    assert same(to_kohya(found.state, FLUX), tensors)


def test_onetrainers_name_for_t5(tmp_path):
    """`lora_te2` in its files for Flux, `lora_te3` in kohya's."""
    tensors = kohya_file("lora_kohya_flux_with_t5")
    renamed = {key.replace("lora_te3_", "lora_te2_"): array for key, array in tensors.items()}
    found = read(tmp_path, renamed)
    assert len(found.state["text_encoder_2"]) == 168
    assert same(to_kohya(found.state, FLUX), tensors)


def test_simpletuners_lycoris_names(tmp_path):
    """`lycoris_` and diffusers' path, flat; the matrices are those of a plain LoRA."""
    peft = peft_file(next(iter(golden("lora_peft_flux"))))

    def flat(key):
        module, _, end = key.removeprefix("transformer.").partition(".lora_")
        return f"lycoris_{module.replace('.', '_')}.lora_{ {'A.weight': 'down.weight', 'B.weight': 'up.weight'}[end] }"

    expected = read(tmp_path, peft).state
    found = read(tmp_path, {flat(key): array for key, array in peft.items()}).state
    assert found.keys() == expected.keys()
    for name, factors in expected["transformer"].items():
        np.testing.assert_array_equal(found["transformer"][name].delta(), factors.delta())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("alpha", [1.0, 2.0, 3.0, 1.3])
def test_kohya_files_survive_the_way_to_diffusers_and_back(tmp_path, alpha, dtype):
    tensors = kohya_file("lora_kohya_flux_with_t5", alpha=alpha, dtype=dtype)
    there = to_diffusers(read(tmp_path, tensors).state, FLUX)
    assert same(to_kohya(read(tmp_path, *there).state, FLUX), tensors)


def test_whole_modules_become_diffusers_parts(tmp_path):
    """Six of a double block's ten are whole there, each qkv three, linear1 four."""
    tensors, _ = to_diffusers(read(tmp_path, kohya_file(alpha=2.0)).state, FLUX)
    transformer = [key for key in tensors if key.startswith("transformer.")]
    assert len(transformer) == 2 * (19 * (8 + 2 * 3) + 38 * (2 + 4))
    assert set(golden("lora_peft_flux")["attention_ff"]) < set(transformer)


@pytest.mark.parametrize("targets", ["attention", "attention_ff", "attention_ff_single"])
def test_peft_files_survive_the_way_to_kohya_and_back(tmp_path, targets):
    tensors = peft_file(targets)
    found = read(tmp_path, tensors)
    assert found.dialects == ("peft",)
    kohya = to_kohya(found.state, FLUX)
    back, metadata = to_diffusers(read(tmp_path, kohya).state, FLUX)
    assert metadata == {}
    assert same(back, tensors)


def test_stacked_parts_have_the_effect_of_each(tmp_path):
    tensors = peft_file("attention_ff_single", dtype=np.float32)
    state = read(tmp_path, tensors).state["transformer"]
    module = "transformer.single_transformer_blocks.5"
    parts = [f"{module}.attn.to_q", f"{module}.attn.to_k", f"{module}.attn.to_v", f"{module}.proj_mlp"]
    expected = np.concatenate([tensors[f"{p}.lora_B.weight"] @ tensors[f"{p}.lora_A.weight"] for p in parts])
    np.testing.assert_allclose(state["single_blocks.5.linear1"].delta(), expected, rtol=1e-5, atol=1e-5)
    double = state["double_blocks.0.txt_attn.qkv"]
    assert (double.rank, double.alpha) == (12, 12.0)


def test_the_last_modulation_changes_its_halves(tmp_path):
    up = np.arange(12.0).reshape(6, 2)
    state = {"transformer": {"final_layer.adaLN_modulation.1": LoraFactors(np.ones((2, 3)), up, 2.0)}}
    tensors, _ = to_diffusers(state, FLUX)
    np.testing.assert_array_equal(tensors["transformer.norm_out.linear.lora_B.weight"], up[[3, 4, 5, 0, 1, 2]])
    np.testing.assert_array_equal(read(tmp_path, tensors).state["transformer"]["final_layer.adaLN_modulation.1"].up, up)


@pytest.mark.parametrize("prefix", ["diffusion_model.", "model.diffusion_model.", ""])
@pytest.mark.parametrize(("down", "up"), [("lora_A", "lora_B"), ("lora_down", "lora_up")])
def test_native_names_with_dots(tmp_path, prefix, down, up):
    """As ComfyUI, ai-toolkit's relatives and BFL write them."""
    state = read(tmp_path, kohya_file(alpha=2.0)).state["transformer"]
    tensors = {f"{prefix}{m}.{down}.weight": f.down for m, f in state.items()}
    tensors |= {f"{prefix}{m}.{up}.weight": f.up for m, f in state.items()}
    found = read(tmp_path, tensors)
    assert found.dialects == ("native",)
    assert same(to_kohya(found.state, FLUX), to_kohya({"transformer": state}, FLUX))


def test_flattened_diffusers_paths(tmp_path):
    """As OneTrainer wrote them."""
    tensors = peft_file("attention_ff")
    ends = {"lora_A": "lora_down", "lora_B": "lora_up"}
    flat = {}
    for key, value in tensors.items():
        module, matrix, _ = key.rsplit(".", 2)
        flat[f"lora_{module.replace('.', '_')}.{ends[matrix]}.weight"] = value
    assert "lora_transformer_transformer_blocks_0_attn_to_q.lora_down.weight" in flat
    assert same(to_diffusers(read(tmp_path, flat).state, FLUX)[0], tensors)


def test_whole_and_in_parts_at_once(tmp_path):
    tensors = kohya_file() | {k: v for k, v in peft_file("attention").items() if ".add_q_proj." in k}
    with pytest.raises(ModelFileError, match="is there twice, whole and in parts"):
        read(tmp_path, tensors)


def test_parts_that_do_not_fit_together(tmp_path):
    tensors = peft_file("attention")
    name = "transformer.transformer_blocks.0.attn.to_k.lora_B.weight"
    tensors[name] = np.concatenate([tensors[name]] * 2)
    with pytest.raises(ModelFileError, match=r"double_blocks.0.img_attn.qkv do not fit together.*to_k is \(8, 4\)"):
        read(tmp_path, tensors)


def test_rows_that_no_part_can_have(tmp_path):
    """Whole modules are looked at as parts are: cut all the same, rows would be lost without a word."""
    tensors = kohya_file()
    name = "lora_unet_single_blocks_3_linear1.lora_up.weight"
    tensors[name] = np.concatenate([tensors[name], tensors[name][:5]])
    with pytest.raises(ModelFileError, match=r"transformer single_blocks\.3\.linear1: .* 33 rows"):
        read(tmp_path, tensors)


def test_metadata_says_flux(tmp_path):
    found = network_metadata(read(tmp_path, kohya_file()).state, FLUX)
    assert (found["ss_base_model_version"], found["ss_network_module"]) == ("flux1", "networks.lora_flux")
    assert (found["ss_network_dim"], found["ss_network_alpha"]) == ("2", "1.0")
