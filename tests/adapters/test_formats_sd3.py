"""SD3's LoRA files: the names and shapes of every model's, and values through every conversion."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.formats import from_file, to_diffusers, to_kohya
from flame_train.adapters.metadata import model_spec, network_metadata
from flame_train.engine import nn
from flame_train.errors import ModelFileError
from flame_train.io.safetensors import save_file
from flame_train.io.weights import open_weights
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.models.sd3.names import lora_family, lora_family_of
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder
from tests.golden_keys import golden

MODELS = {
    "sd3_medium": MMDiTArch.sd3_medium(),
    "sd35_medium": MMDiTArch.sd35_medium(),
    "sd35_large": MMDiTArch.sd35_large(),
}
COUNTS = {"sd3_medium": 237, "sd35_medium": 263, "sd35_large": 377}
TARGETS = {  # a set of PEFT's list: our modules
    "attention": r"joint_blocks\.\d+\.\w+\.attn\..*",
    "attention_ff": r"joint_blocks\.\d+\.\w+\.(attn|mlp)\..*",
    "attention_attn2_ff": r"joint_blocks\.\d+\.\w+\.(attn|attn2|mlp)\..*",
}
SETS = [(model, targets) for model in MODELS for targets in TARGETS if "attn2" not in targets or MODELS[model].dual]
D = 4  # the width of small ones
ROWS = {"attn.qkv": 3 * D, "attn2.qkv": 3 * D, "mlp.fc1": 4 * D}


@pytest.fixture(params=MODELS)
def model(request):
    return request.param


def linears(network, chosen=r".*"):
    """Path -> shape of the weight, of a network of any size: nothing is allocated."""
    layers = {n: m for n, m in network.named_modules() if isinstance(m, nn.Linear) and re.fullmatch(chosen, n)}
    return {name: layer.shapes()["weight"] for name, layer in layers.items()}


def zeros(weights, rank):
    """A LoRA of the weights' true shapes that takes no memory."""
    half = np.zeros((), np.float16)
    return {
        name: LoraFactors(np.broadcast_to(half, (rank, into)), np.broadcast_to(half, (out, rank)), float(rank))
        for name, (out, into) in weights.items()
    }


def trained(model, seed=0, rank=2, alpha=1.0, dtype=np.float16):
    """Every linear layer of the blocks, in the true names and numbers but small; the text's last modulation differs."""
    rng = np.random.default_rng(seed)
    arch = MODELS[model]
    found = {}
    for name in linears(MMDiT(arch), r"joint_blocks\..*"):
        block, stream, kind = re.fullmatch(r"joint_blocks\.(\d+)\.(\w+?)_block\.(.*)", name).groups()
        rows, columns = ROWS.get(kind, D), 4 * D if kind == "mlp.fc2" else D
        if kind.startswith("adaLN"):
            last = stream == "context" and int(block) + 1 == arch.depth
            rows = (9 if stream == "x" and int(block) in arch.dual else 2 if last else 6) * D
        down, up = (rng.standard_normal(shape).astype(dtype) for shape in ((rank, columns), (rows, rank)))
        found[name] = LoraFactors(down, up, alpha)
    return found


def read(tmp_path, tensors, metadata=None):
    """As a program reads it that knows nothing but the file."""
    path = tmp_path / "x.safetensors"
    save_file(path, tensors, metadata)
    with open_weights(path) as weights:
        return from_file(path, lora_family_of(weights.shapes))


def same(a, b):
    return a.keys() == b.keys() and all(
        x.dtype == b[name].dtype and x.shape == b[name].shape and x.tobytes() == b[name].tobytes()
        for name, x in a.items()
    )


# ---- names and shapes -------------------------------------------------------------------------------


def test_kohya_files_have_kohyas_keys_and_shapes(model):
    layer = r"text_model\.encoder\.layers\..*"
    family = lora_family(MODELS[model].depth, MODELS[model].dual)
    state = {
        "transformer": zeros(linears(MMDiT(MODELS[model]), r"joint_blocks\..*"), 4),
        "text_encoder": zeros(linears(ClipTextEncoder(ClipArch.clip_l()), layer), 4),
        "text_encoder_2": zeros(linears(ClipTextEncoder(ClipArch.bigg()), layer), 4),
    }
    assert {name: len(found) for name, found in state.items()} == {
        "transformer": COUNTS[model],
        "text_encoder": 72,
        "text_encoder_2": 192,
    }
    expected = {}
    for module, line in golden(f"lora_kohya_{model}").items():
        out, into = line["shape"]
        shapes = {"lora_down.weight": (4, into), "lora_up.weight": (out, 4), "alpha": ()}
        expected |= {f"{module}.{end}": shape for end, shape in shapes.items()}
    assert {name: x.shape for name, x in to_kohya(state, family).items()} == expected


@pytest.mark.parametrize(("model", "targets"), SETS)
def test_diffusers_files_have_pefts_keys_and_shapes(model, targets):
    family = lora_family(MODELS[model].depth, MODELS[model].dual)
    state = {"transformer": zeros(linears(MMDiT(MODELS[model]), TARGETS[targets]), 4)}
    tensors, metadata = to_diffusers(state, family)
    expected = {name: tuple(shape) for name, shape in golden(f"lora_peft_{model}")[targets].items()}
    assert {name: x.shape for name, x in tensors.items()} == expected
    assert metadata == {}


def test_every_layer_has_a_place(model):
    """What cuts the image into tokens, a convolution, included."""
    names = lora_family(MODELS[model].depth, MODELS[model].dual).components[0].modules
    layers = {n for n, m in MMDiT(MODELS[model]).named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    assert set(names) == layers
    diffusers = golden(f"{model}_diffusers_transformer")
    matrices = {name.removesuffix(".weight") for name, shape in diffusers.items() if len(shape) in (2, 4)}
    assert {path for paths in names.values() for path in paths} == {m for m in matrices if f"{m}.bias" in diffusers}


def test_t5_is_named_as_its_own_network():
    names = lora_family().components[3]
    assert (names.name, names.kohya) == ("text_encoder_3", "lora_te3")
    assert set(names.modules) == set(linears(T5Encoder(T5Arch.xxl())))


# ---- values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "dtype"), [(1.0, np.float16), (1.3, np.float16), (3.0, ml_dtypes.bfloat16)])
def test_kohya_files_survive_the_way_to_diffusers_and_back(tmp_path, model, alpha, dtype):
    family = lora_family(MODELS[model].depth)
    tensors = to_kohya({"transformer": trained(model, alpha=alpha, dtype=dtype)}, family)
    found = read(tmp_path, tensors)
    assert found.dialects == ("kohya",)
    there = to_diffusers(found.state, family)
    back = read(tmp_path, *there)
    assert back.dialects == ("peft",)
    assert same(to_kohya(back.state, family), tensors)


@pytest.mark.parametrize(("model", "targets"), SETS)
def test_peft_files_survive_the_way_to_kohya_and_back(tmp_path, model, targets):
    """Every part was trained apart; in kohya's file they are stacked."""
    rng = np.random.default_rng(1)
    shapes = golden(f"lora_peft_{model}")[targets]
    tensors = {
        name: rng.standard_normal((4, max(1, c // 512)) if "lora_A" in name else (max(1, r // 512), 4)).astype("f2")
        for name, (r, c) in shapes.items()
    }
    kohya = to_kohya(read(tmp_path, tensors).state, lora_family(MODELS[model].depth))
    assert len(kohya["lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight"]) == 12
    back, metadata = to_diffusers(read(tmp_path, kohya).state, lora_family(MODELS[model].depth))
    assert metadata == {}
    assert same(back, tensors)


def test_stacked_parts_have_the_effect_of_each(tmp_path):
    rng = np.random.default_rng(1)
    paths = [f"transformer.transformer_blocks.3.attn2.to_{part}" for part in "qkv"]
    tensors = {f"{p}.lora_A.weight": rng.standard_normal((2, D)) for p in paths}
    tensors |= {f"{p}.lora_B.weight": rng.standard_normal((D, 2)) for p in paths}
    expected = np.concatenate([tensors[f"{p}.lora_B.weight"] @ tensors[f"{p}.lora_A.weight"] for p in paths])
    found = read(tmp_path, tensors).state["transformer"]["joint_blocks.3.x_block.attn2.qkv"]
    np.testing.assert_allclose(found.delta(), expected, rtol=1e-5, atol=1e-6)


def test_the_two_last_modulations_change_their_halves_and_no_other(model):
    last = MODELS[model].depth - 1
    text = "joint_blocks.{}.context_block.adaLN_modulation.1"
    up, long = np.arange(4.0 * D).reshape(2 * D, 2), np.arange(12.0 * D).reshape(6 * D, 2)
    ups = {"final_layer.adaLN_modulation.1": up, text.format(last): up, text.format(last - 1): long}
    state = {"transformer": {name: LoraFactors(np.ones((2, D)), up, 2.0) for name, up in ups.items()}}
    tensors, _ = to_diffusers(state, lora_family(last + 1))
    halves = np.concatenate([up[D:], up[:D]])
    named = "transformer.transformer_blocks.{}.norm1_context.linear.lora_B.weight"
    np.testing.assert_array_equal(tensors["transformer.norm_out.linear.lora_B.weight"], halves)
    np.testing.assert_array_equal(tensors[named.format(last)], halves)
    np.testing.assert_array_equal(tensors[named.format(last - 1)], long)


# ---- other spellings --------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["diffusion_model.", "model.diffusion_model.", ""])
@pytest.mark.parametrize(("down", "up"), [("lora_A", "lora_B"), ("lora_down", "lora_up")])
def test_native_names_with_dots(tmp_path, prefix, down, up):
    state = trained("sd35_medium", alpha=2.0)
    tensors = {f"{prefix}{m}.{down}.weight": f.down for m, f in state.items()}
    tensors |= {f"{prefix}{m}.{up}.weight": f.up for m, f in state.items()}
    found = read(tmp_path, tensors)
    assert found.dialects == ("native",)
    family = lora_family(24)
    assert same(to_kohya(found.state, family), to_kohya({"transformer": state}, family))


@pytest.mark.parametrize(
    ("prefix", "down", "up"),
    [
        ("", "lora_A", "lora_B"),
        ("base_model.model.", "lora_A.default", "lora_B.default"),
        ("base_model.model.transformer.", "lora_A", "lora_B"),
        ("transformer.", "lora.down", "lora.up"),
        ("transformer.", "lora_linear_layer.down", "lora_linear_layer.up"),
    ],
)
def test_other_spellings_of_diffusers_names(tmp_path, prefix, down, up):
    """The depth is found in each of them, or the last modulation's halves would not be where they were."""
    family = lora_family(24)
    kohya = to_kohya({"transformer": trained("sd35_medium", alpha=2.0)}, family)
    tensors, _ = to_diffusers(read(tmp_path, kohya).state, family)
    ends = {"lora_A": down, "lora_B": up}
    spelled = {}
    for key, value in tensors.items():
        module, matrix, _ = key.removeprefix("transformer.").rsplit(".", 2)
        spelled[f"{prefix}{module}.{ends[matrix]}.weight"] = value
    assert same(to_kohya(read(tmp_path, spelled).state, family), kohya)


def test_flattened_diffusers_paths(tmp_path):
    family = lora_family(24)
    kohya = to_kohya({"transformer": trained("sd35_medium", alpha=2.0)}, family)
    tensors, _ = to_diffusers(read(tmp_path, kohya).state, family)
    ends = {"lora_A": "lora_down", "lora_B": "lora_up"}
    flat = {}
    for key, value in tensors.items():
        module, matrix, _ = key.rsplit(".", 2)
        flat[f"lora_{module.replace('.', '_')}.{ends[matrix]}.weight"] = value
    assert "lora_transformer_transformer_blocks_0_attn_to_q.lora_down.weight" in flat
    assert same(to_kohya(read(tmp_path, flat).state, family), kohya)


# ---- which model ------------------------------------------------------------------------------------


def depth_of(family):
    return len({m.split(".")[1] for m in family.components[0].modules if m.startswith("joint_blocks.")})


def kohya_shapes(weights, rank=4):
    shapes = {}
    for module, (out, into) in weights.items():
        name = f"lora_unet_{module.replace('.', '_')}"
        shapes |= {f"{name}.lora_down.weight": (rank, into), f"{name}.lora_up.weight": (out, rank)}
    return shapes


@pytest.mark.parametrize(
    ("arch", "chosen", "depth"),
    [
        (MMDiTArch.sd3_medium(), r"joint_blocks\..*", 24),
        (MMDiTArch.sd35_large(), r"joint_blocks\..*", 38),
        (MMDiTArch.tiny(), r"joint_blocks\..*", 3),
        (MMDiTArch.sd35_large(), r"joint_blocks\..*\.attn\..*", 38),
        (MMDiTArch.sd35_large(), r"joint_blocks\.30\..*", 38),
        (MMDiTArch.sd35_large(), r"joint_blocks\.23\.context_block\.adaLN.*", 38),
        (MMDiTArch.sd35_large(), r"joint_blocks\.23\.context_block\.attn\.proj", 38),
        (MMDiTArch.sd35_large(), r"joint_blocks\.5\..*", 24),  # names mean the same in both
        (MMDiTArch.sd3_medium(), r"joint_blocks\.23\..*\.attn\.qkv", 24),
        (MMDiTArch.sd3_medium(), r"final_layer\..*", 24),
    ],
)
def test_the_depth_is_found(arch, chosen, depth):
    assert depth_of(lora_family_of(kohya_shapes(linears(MMDiT(arch), chosen)))) == depth


@pytest.mark.parametrize(
    ("model", "chosen", "name"),
    [
        ("sd3_medium", r"joint_blocks\..*", "stable-diffusion-3/lora"),  # SD3.5 medium without its own attention?
        ("sd35_medium", r"joint_blocks\..*", "stable-diffusion-3-5-medium/lora"),
        ("sd35_large", r"joint_blocks\..*\.attn\..*", "stable-diffusion-3-5-large/lora"),
    ],
)
def test_a_file_that_is_silent_gets_the_name_of_its_model(model, chosen, name):
    family = lora_family_of(kohya_shapes(linears(MMDiT(MODELS[model]), chosen)))
    assert model_spec(family, "x")["modelspec.architecture"] == name


def test_metadata_says_sd3(tmp_path):
    family = lora_family(24, ())
    state = {"transformer": trained("sd3_medium")}
    found = network_metadata(state, family) | model_spec(family, "x")
    assert (found["ss_base_model_version"], found["ss_network_module"]) == ("sd3", "networks.lora_sd3")
    assert (found["ss_network_dim"], found["ss_network_alpha"]) == ("2", "1.0")
    assert found["modelspec.architecture"] == "stable-diffusion-3-medium/lora"


# ---- refusals ---------------------------------------------------------------------------------------


def test_whole_and_in_parts_at_once(tmp_path):
    family = lora_family(24)
    state = {"transformer": trained("sd3_medium")}
    parts = {k: v for k, v in to_diffusers(state, family)[0].items() if ".add_q_proj." in k}
    with pytest.raises(ModelFileError, match="is there twice, whole and in parts"):
        read(tmp_path, to_kohya(state, family) | parts)


def test_a_block_that_no_model_has(tmp_path):
    tensors = to_kohya({"transformer": trained("sd35_medium")}, lora_family(24))
    kohya = "lora_unet_joint_blocks_{}_x_block_attn2_proj.alpha"
    odd = tensors | {kohya.format(20): tensors[kohya.format(0)]}
    with pytest.raises(ModelFileError, match=r"belong to no module of this family(.|\n)*joint_blocks_20_x_block_attn2"):
        read(tmp_path, odd)
