"""Our LoRA files in diffusers' own hands: every key understood, every module changed as the formula says."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.formats import from_file, to_diffusers, to_kohya
from flame_train.adapters.kinds.dora import DoraFactors
from flame_train.adapters.kinds.loha import LohaFactors
from flame_train.adapters.kinds.lokr import LokrFactors
from flame_train.adapters.metadata import network_metadata, peft_scales, with_hashes
from flame_train.adapters.nearest import Truncation
from flame_train.adapters.shared_alpha import for_kohya, misread
from flame_train.io.safetensors import save_file
from flame_train.models.registry import FAMILIES
from flame_train.models.sdxl.names import lora_family
from flame_train.tools.extract import resize
from flame_train.tools.merge_loras import WeightedLora, merge_loras
from flame_train.tools.verify import verify
from tests.golden_keys import golden

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
get_pattern_key = pytest.importorskip("peft.utils.other").get_pattern_key

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own deprecations
]

COMPONENT = {"lora_unet": "unet", "lora_te1": "text_encoder", "lora_te2": "text_encoder_2"}
SDXL = lora_family()


def small_state(name, shrink):
    rng = np.random.default_rng(0)
    state = {}
    for module, base in golden(name).items():
        component = COMPONENT["_".join(module.split("_")[:2])]
        path = base["base"].removeprefix("model.diffusion_model.").removesuffix(".weight")
        out, into, *kernel = shrink(component, base["shape"])
        down = rng.standard_normal((2, into, *kernel)).astype(np.float32)
        up = rng.standard_normal((out, 2, *[1] * len(kernel))).astype(np.float32)
        state.setdefault(component, {})[path] = LoraFactors(down, up, 3.0)
    return state


def tiny(component, shape):
    return [min(size, 4) for size in shape]


def write_both(folder, state):
    """The two files, by format."""
    kohya = to_kohya(state, SDXL)
    save_file(folder / "kohya.safetensors", kohya, with_hashes(kohya, network_metadata(state, SDXL)))
    tensors, record = to_diffusers(state, SDXL)
    save_file(folder / "diffusers.safetensors", tensors, with_hashes(tensors, record | {"format": "pt"}))
    return {name: str(folder / f"{name}.safetensors") for name in ("kohya", "diffusers")}


def as_diffusers_scales_it(tensors, component):
    """Module's path in diffusers -> the alpha that its PEFT configuration of a file in kohya's naming gives it."""
    from diffusers.loaders.lora_conversion_utils import (
        _convert_non_diffusers_lora_to_diffusers,
        _maybe_map_sgm_blocks_to_diffusers,
    )
    from diffusers.utils import state_dict_utils as own
    from diffusers.utils.peft_utils import get_peft_kwargs

    kohya = {key: torch.from_numpy(np.array(value)) for key, value in tensors.items()}
    mapped = _maybe_map_sgm_blocks_to_diffusers(kohya, type("Config", (), {"layers_per_block": 2})())
    both = [
        {key.removeprefix(f"{component}."): value for key, value in found.items() if key.startswith(f"{component}.")}
        for found in _convert_non_diffusers_lora_to_diffusers(mapped)
    ]
    unet = component == "unet"
    old = both[0] if unet else own.convert_state_dict_to_diffusers(both[0])
    state = own.convert_unet_state_dict_to_peft(old) if unet else own.convert_state_dict_to_peft(old)
    ranks = {key: value.shape[1] for key, value in state.items() if "lora_B" in key}
    config = peft.LoraConfig(**get_peft_kwargs(ranks, both[1], state, is_unet=unet))
    paths = [key.removesuffix(".lora_B.weight") for key in ranks]
    return {p: config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, p), config.lora_alpha) for p in paths}


@pytest.mark.proof
@pytest.mark.parametrize("component", ["unet", "text_encoder", "text_encoder_2"])
@pytest.mark.parametrize("settled", [False, True])
def test_diffusers_takes_each_alpha_of_a_file_as_it_is_written(component, settled):
    """Attention has four alphas, the rest 8, which is the commonest. As they are, diffusers gives every layer 8."""
    found = small_state("lora_kohya_sdxl", tiny)[component]
    of_attention = {".to_q": 4.0, ".to_k": 2.0, ".to_v": 1.0, ".to_out.0": 0.5}
    of_attention |= {".q_proj": 4.0, ".k_proj": 2.0, ".v_proj": 1.0, ".out_proj": 0.5}
    alphas = {n: next((a for end, a in of_attention.items() if n.endswith(end)), 8.0) for n in found}
    state = {component: {n: LoraFactors(f.down, f.up, alphas[n]) for n, f in found.items()}}
    written, _ = for_kohya(state, SDXL) if settled else (state, {})
    modules = next(c.modules for c in SDXL.components if c.name == component)
    theirs = as_diffusers_scales_it(to_kohya(written, SDXL), component)
    wrong = {n for n, f in written[component].items() if theirs[next(iter(modules[n]))] != f.alpha}
    lost = misread(next(c for c in SDXL.components if c.name == component), alphas)
    assert wrong == (set() if settled else set(lost))
    assert lost


@pytest.mark.parametrize("name", ["lora_kohya_sdxl", "lora_kohya_sdxl_conv"])
def test_diffusers_converter_leaves_no_key_and_we_read_what_it_makes(tmp_path, name):
    from diffusers.loaders.lora_conversion_utils import (
        _convert_non_diffusers_lora_to_diffusers,
        _maybe_map_sgm_blocks_to_diffusers,
    )

    state = small_state(name, tiny)
    kohya = {key: torch.from_numpy(np.array(value)) for key, value in to_kohya(state, SDXL).items()}
    mapped = _maybe_map_sgm_blocks_to_diffusers(kohya, type("Config", (), {"layers_per_block": 2})())
    converted, alphas = _convert_non_diffusers_lora_to_diffusers(mapped)  # raises when a key is left

    assert set(alphas.values()) == {3.0}
    save_file(tmp_path / "x.safetensors", {key: value.numpy() for key, value in converted.items()})
    back = from_file(tmp_path / "x.safetensors", SDXL)
    assert back.dialects == ("peft",)
    assert {part: modules.keys() for part, modules in back.state.items()} == {
        part: modules.keys() for part, modules in state.items()
    }
    for part, modules in state.items():
        for path, factors in modules.items():
            np.testing.assert_array_equal(back.state[part][path].down, factors.down)
            np.testing.assert_array_equal(back.state[part][path].up, factors.up)


@pytest.fixture(scope="module")
def unet():
    """SDXL's structure with 32, 64 and 128 channels."""
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=2,
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(2, 4, 8),
        cross_attention_dim=48,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
    )


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
def test_every_unet_module_changes_by_the_formula(tmp_path, unet, form):
    from diffusers import StableDiffusionXLPipeline

    before = {name: value.detach().numpy().copy() for name, value in unet.state_dict().items()}
    modules = next(c for c in SDXL.components if c.name == "unet").modules
    unet_paths = {module: path for module, (path,) in modules.items()}
    state = {"unet": small_state("lora_kohya_sdxl_conv", tiny)["unet"]}
    rng = np.random.default_rng(1)
    for path in state["unet"]:
        out, into, *kernel = before[f"{unet_paths[path]}.weight"].shape
        down = rng.standard_normal((4, into, *kernel)).astype(np.float32)
        up = rng.standard_normal((out, 4, *[1] * len(kernel))).astype(np.float32)
        state["unet"][path] = LoraFactors(down, up, 3.0)
    file = write_both(tmp_path, state)[form]
    loaded, alphas, metadata = StableDiffusionXLPipeline.lora_state_dict(
        file, unet_config=unet.config, return_lora_metadata=True
    )
    StableDiffusionXLPipeline.load_lora_into_unet(loaded, alphas, unet, metadata=metadata)
    try:
        unet.fuse_lora()
        after = {name.replace(".base_layer", ""): v.detach().numpy().copy() for name, v in unet.state_dict().items()}
    finally:
        unet.unfuse_lora()
        unet.unload_lora()
    for path, factors in state["unet"].items():
        name = f"{unet_paths[path]}.weight"
        np.testing.assert_allclose(after[name] - before[name], factors.delta(), atol=2e-5)
    touched = {f"{unet_paths[path]}.weight" for path in state["unet"]}
    assert all(np.array_equal(after[name], value) for name, value in before.items() if name not in touched)


def test_a_resized_and_a_merged_lora_are_loaded_and_computed_as_here(tmp_path, unet):
    from diffusers import StableDiffusionXLPipeline

    before = {name: value.detach().numpy().copy() for name, value in unet.state_dict().items()}
    modules = next(c for c in SDXL.components if c.name == "unet").modules
    rng = np.random.default_rng(1)
    state = {}
    for path in list(small_state("lora_kohya_sdxl_conv", tiny)["unet"])[::7]:
        out, into, *kernel = before[f"{next(iter(modules[path]))}.weight"].shape
        down = rng.standard_normal((4, into, *kernel)).astype(np.float32)
        state[path] = LoraFactors(down, rng.standard_normal((out, 4, *[1] * len(kernel))).astype(np.float32), 3.0)
    save_file(tmp_path / "a.safetensors", *to_diffusers({"unet": state}, SDXL))
    resize(tmp_path / "a.safetensors", tmp_path / "resized.safetensors", Truncation(rank=2))
    merge_loras([WeightedLora(tmp_path / "a.safetensors", 0.25)] * 2, tmp_path / "merged.safetensors", None)
    for name, rank in (("resized", 2), ("merged", 8)):
        file = tmp_path / f"{name}.safetensors"
        loaded, alphas, metadata = StableDiffusionXLPipeline.lora_state_dict(
            str(file), unet_config=unet.config, return_lora_metadata=True
        )
        StableDiffusionXLPipeline.load_lora_into_unet(loaded, alphas, unet, metadata=metadata)
        try:
            unet.fuse_lora()
            after = {n.replace(".base_layer", ""): v.detach().numpy().copy() for n, v in unet.state_dict().items()}
        finally:
            unet.unfuse_lora()
            unet.unload_lora()
        for path, factors in from_file(file, SDXL).state["unet"].items():
            there = f"{next(iter(modules[path]))}.weight"
            wanted = factors.delta() if name == "resized" else 0.5 * state[path].delta()
            assert factors.rank <= rank
            np.testing.assert_allclose(after[there] - before[there], wanted, atol=2e-5)


def test_a_dora_on_output_rows_is_loaded_and_computed_as_here(tmp_path, unet):
    """Linear layers and convolutions, in diffusers' own hands."""
    from diffusers import StableDiffusionXLPipeline

    before = {name: value.detach().numpy().copy() for name, value in unet.state_dict().items()}
    modules = next(c for c in SDXL.components if c.name == "unet").modules
    rng = np.random.default_rng(1)
    state = {}
    for path in list(small_state("lora_kohya_sdxl_conv", tiny)["unet"])[::7]:
        (there,) = modules[path]
        out, into, *kernel = before[f"{there}.weight"].shape
        down = rng.standard_normal((4, into, *kernel)).astype(np.float32)
        up = rng.standard_normal((out, 4, *[1] * len(kernel))).astype(np.float32)
        magnitude = rng.uniform(0.5, 2.0, (out, 1, *[1] * len(kernel))).astype(np.float32)
        state[path] = DoraFactors(LoraFactors(down, up, 3.0), magnitude)
    assert {len(f.weight_shape) for f in state.values()} == {2, 4}
    tensors, record = to_diffusers({"unet": state}, SDXL)
    save_file(tmp_path / "x.safetensors", tensors, with_hashes(tensors, record | {"format": "pt"}))
    loaded, alphas, metadata = StableDiffusionXLPipeline.lora_state_dict(
        str(tmp_path / "x.safetensors"), unet_config=unet.config, return_lora_metadata=True
    )
    StableDiffusionXLPipeline.load_lora_into_unet(loaded, alphas, unet, metadata=metadata)
    try:
        unet.fuse_lora()
        after = {name.replace(".base_layer", ""): v.detach().numpy().copy() for name, v in unet.state_dict().items()}
    finally:
        unet.unfuse_lora()
        unet.unload_lora()
    for path, factors in state.items():
        (there,) = modules[path]
        weight = before[f"{there}.weight"]
        np.testing.assert_allclose(after[f"{there}.weight"] - weight, factors.delta(weight), atol=2e-5)


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
def test_every_text_encoder_module_changes_by_the_formula(tmp_path, part, form):
    from diffusers import StableDiffusionXLPipeline
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    layers = {"text_encoder": 12, "text_encoder_2": 32}[part]
    config = CLIPTextConfig(
        vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2
    )
    kind = {"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection}[part]
    encoder = kind(config)
    before = weights_of(encoder)
    rng = np.random.default_rng(1)
    modules = {}
    for path in small_state("lora_kohya_sdxl", tiny)[part]:
        out, into = before[f"{path}.weight"].shape
        down, up = rng.standard_normal((4, into)), rng.standard_normal((out, 4))
        modules[path] = LoraFactors(down.astype(np.float32), up.astype(np.float32), 3.0)
    file = write_both(tmp_path, {part: modules})[form]
    loaded, alphas = StableDiffusionXLPipeline.lora_state_dict(file)
    StableDiffusionXLPipeline.load_lora_into_text_encoder(loaded, alphas, encoder, prefix=part)
    for module in encoder.modules():
        if hasattr(module, "merge"):
            module.merge()
    after = weights_of(encoder)
    for path, factors in modules.items():
        name = f"{path}.weight"
        np.testing.assert_allclose(after[name] - before[name], factors.delta(), atol=2e-5)


def weights_of(encoder):
    """Its weights by published name, whichever version of the library named them, LoRA matrices left out."""
    found = {}
    for name, value in encoder.state_dict().items():
        name = name.replace(".base_layer", "")
        if "lora_" not in name:
            name = name if name.startswith("text_") else f"text_model.{name}"
            found[name] = value.detach().numpy().copy()
    return found


_PATHS = ("down.0.attn1.to_q", "down.10.attn1.to_q", "to_q", "mid.attn1.to_q.extra", "down.0.attn2.to_qq")
_PATTERNS = (
    "to_q",
    "^to_q",
    "0.attn1.to_q",
    r"down\..*to_q",
    "attn1",
    "^down.0.attn1.to_q",
    "to_q|to_qq",
    "attn1.to_.",
)


@pytest.mark.parametrize("path", _PATHS)
def test_patterns_of_scales_mean_what_peft_makes_of_them(path):
    for first, second in itertools.permutations(_PATTERNS, 2):
        alphas = {first: 3, second: 5}
        config = {"unet.lora_alpha": 7, "unet.alpha_pattern": alphas}
        found = peft_scales({"lora_adapter_metadata": json.dumps(config)})("unet", path, 1)
        assert found == alphas.get(get_pattern_key(list(alphas), path), 7)


ATTENTION_OUT = {
    "sdxl": ("unet", "input_blocks.4.1.transformer_blocks.0.attn1.to_q", 640, "StableDiffusionXLPipeline"),
    "sd3": ("transformer", "joint_blocks.0.x_block.attn.proj", 1536, "StableDiffusion3Pipeline"),
    "flux": ("transformer", "double_blocks.0.img_attn.proj", 3072, "FluxPipeline"),
}


@pytest.mark.parametrize("family", ATTENTION_OUT)
@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_no_pipeline_takes_a_loha_or_lokr_and_verify_says_so(tmp_path, family, kind):
    """SDXL's refuses it. Those of SD3 and Flux look for names that begin with their network's, and find none."""
    component, module, width, pipeline = ATTENTION_OUT[family]
    shapes = {
        "loha": {"hada_w1_a": (width, 2), "hada_w1_b": (2, width), "hada_w2_a": (width, 2), "hada_w2_b": (2, width)},
        "lokr": {"lokr_w1": (width // 64, width // 64), "lokr_w2": (64, 64)},
    }[kind]
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    factors = LohaFactors(arrays, 2.0) if kind == "loha" else LokrFactors(arrays, 2.0)
    tensors = to_kohya({component: {module: factors}}, FAMILIES[family].lora_names_in({}))
    save_file(tmp_path / "x.safetensors", tensors, {"ss_base_model_version": family})
    assert {r.program: r.verdict for r in verify(tmp_path / "x.safetensors")}["diffusers"] == "no"
    given = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}
    more = {"unet_config": type("Config", (), {"layers_per_block": 2})()} if family == "sdxl" else {}
    convert = getattr(diffusers, pipeline).lora_state_dict
    if family == "sdxl":
        with pytest.raises(ValueError, match="not been correctly renamed"):
            convert(given, **more)
    else:
        made = convert(given)
        assert not any(key.startswith(f"{component}.") for key in made)
