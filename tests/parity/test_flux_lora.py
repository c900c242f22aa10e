"""A Flux LoRA of the engine in diffusers' hands: no key left over, and the same predictions as here and merged."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.formats import from_file, to_diffusers, to_kohya
from flame_train.adapters.metadata import model_spec, network_metadata, with_hashes
from flame_train.engine import no_grad, tensor
from flame_train.io.safetensors import save_file
from flame_train.models.flux.family import PRESETS
from flame_train.models.flux.names import FLUX_FILES, lora_family
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.tools.merge import merge
from tests.golden_keys import golden
from tests.keymaps import fill
from tests.parity.twins import flux

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own deprecations
]

FLUX = lora_family()
# diffusers' reading of kohya files knows linear1 in the published width only; that is tested below
BLOCKS_BUT_LINEAR1 = ("double_blocks.*", "single_blocks.*.linear2", "single_blocks.*.modulation.lin")
WRITTEN = [("diffusers", ("full",)), ("diffusers", ("attention+mlp", "final_layer.*")), ("kohya", BLOCKS_BUT_LINEAR1)]


@pytest.fixture
def model():
    made = Flux(FluxArch.tiny())
    made.init(np.random.default_rng(0))
    return made


def as_diffusers(model):
    """A pipeline around diffusers' transformer with our weights in it."""
    twin = fill(flux.reference(model.arch), model, flux.TO_DIFFUSERS)
    return diffusers.FluxPipeline(diffusers.FlowMatchEulerDiscreteScheduler(), None, None, None, None, None, twin)


@pytest.fixture
def batch():
    rng = np.random.default_rng(1)
    shapes = {"latents": (2, 8, 6, 16), "context": (2, 5, 32), "pooled": (2, 32)}
    found = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return found | {"timesteps": np.array([125.0, 750.0], np.float32), "guidance": np.array([1.0, 3.5], np.float32)}


def ours(model, batch):
    with no_grad():
        return model(*(tensor(batch[n]) for n in ("latents", "timesteps", "context", "pooled", "guidance"))).numpy()


def theirs(pipeline, batch):
    x = {name: torch.from_numpy(array) for name, array in batch.items()}
    B, H, W, C = x["latents"].shape
    with torch.no_grad():
        out = pipeline.transformer(
            hidden_states=pipeline._pack_latents(x["latents"].permute(0, 3, 1, 2), B, C, H, W),
            timestep=x["timesteps"] / 1000,
            encoder_hidden_states=x["context"],
            pooled_projections=x["pooled"],
            guidance=x["guidance"],
            txt_ids=torch.zeros(5, 3),
            img_ids=pipeline._prepare_latent_image_ids(B, H // 2, W // 2, "cpu", torch.float32),
        ).sample
    return pipeline._unpack_latents(out, H * 8, W * 8, 8).permute(0, 2, 3, 1).numpy()


def written(path, factors, form):
    """The LoRA as a run writes it."""
    state = {"transformer": factors}
    metadata = network_metadata(state, FLUX) | model_spec(FLUX, "x")
    if form == "kohya":
        tensors = to_kohya(state, FLUX)
    else:
        tensors, record = to_diffusers(state, FLUX)
        metadata |= {"format": "pt", **record}
    save_file(path, tensors, with_hashes(tensors, metadata))
    return path


@pytest.mark.parametrize(("form", "targets"), WRITTEN, ids=["diffusers-full", "diffusers-mlp-final", "kohya"])
def test_the_file_predicts_the_same_there_merged_and_here(tmp_path, model, batch, form, targets, adapted, loaded, off):
    pipeline = as_diffusers(model)
    plain = ours(model, batch)
    assert off(theirs(pipeline, batch), plain) < 1e-4
    save_file(tmp_path / "base.safetensors", {name: weight.numpy() for name, weight in model.weights()})

    attached, factors = adapted(model, targets, PRESETS)
    file = written(tmp_path / "lora.safetensors", factors, form)
    layers = loaded(pipeline, file, "transformer", "NoneType")
    family = FLUX.components[0].modules
    assert layers == sum(len(family[module]) for module in factors) > 30

    expected = theirs(pipeline, batch)
    assert off(plain, expected) > 1e-2  # the LoRA does something
    assert off(ours(model, batch), expected) < 1e-4
    attached.detach()

    merge(tmp_path / "base.safetensors", file, tmp_path / "merged.safetensors")
    merged = FLUX_FILES.load(tmp_path / "merged.safetensors", "transformer", device="cpu", dtype="float32")
    assert off(ours(merged, batch), expected) < 1e-4
    assert off(theirs(as_diffusers(merged), batch), expected) < 1e-4


def test_diffusers_makes_of_a_kohya_file_what_we_make_of_it():
    """In the published width and depth: every module of kohya's own list, its numbers and its names."""
    from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers

    lines = {name: line for name, line in golden("lora_kohya_flux").items() if name.startswith("lora_unet")}
    rng = np.random.default_rng(0)
    state = {}
    for line in lines.values():
        out, into = line["shape"]
        pair = rng.integers(-9, 9, (1, into)).astype(np.float32), rng.integers(-9, 9, (out, 1)).astype(np.float32)
        state[line["base"].removesuffix(".weight")] = LoraFactors(*pair, 2.0)
    kohya = {name: torch.from_numpy(np.array(x)) for name, x in to_kohya({"transformer": state}, FLUX).items()}
    converted = _convert_kohya_flux_lora_to_diffusers(kohya)  # raises when a key is left
    made, _ = to_diffusers({"transformer": state}, FLUX)
    assert converted.keys() == made.keys()
    for name in made:
        if name.endswith("lora_B.weight"):
            down = name.replace("lora_B", "lora_A")
            found = converted[name][:, 0].numpy(), converted[down][0].numpy()
            np.testing.assert_array_equal(found[0] * found[1][0], made[name][:, 0] * made[down][0, 0], err_msg=name)
            np.testing.assert_array_equal(found[0][0] * found[1], made[name][0, 0] * made[down][0], err_msg=name)


def test_parts_trained_apart_are_understood_when_stacked(tmp_path):
    """What PEFT trains, stacked into kohya's fused layers, is cut by diffusers into what it was."""
    from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux_lora_to_diffusers

    rng = np.random.default_rng(0)
    block = "transformer.single_transformer_blocks.7"
    rows = {"attn.to_q": 3072, "attn.to_k": 3072, "attn.to_v": 3072, "proj_mlp": 12288}
    tensors = {}
    for part, out in rows.items():
        tensors[f"{block}.{part}.lora_A.weight"] = rng.integers(-9, 9, (2, 3072)).astype(np.float32)
        tensors[f"{block}.{part}.lora_B.weight"] = rng.integers(-9, 9, (out, 2)).astype(np.float32)
    save_file(tmp_path / "x.safetensors", tensors)
    kohya = to_kohya(from_file(tmp_path / "x.safetensors", FLUX).state, FLUX)
    converted = _convert_kohya_flux_lora_to_diffusers({n: torch.from_numpy(np.array(x)) for n, x in kohya.items()})
    assert converted.keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(converted[name].numpy(), values)
