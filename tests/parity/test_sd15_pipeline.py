"""Small pipelines of Stable Diffusion 1 and 2, from the folders that diffusers saves: the same image, and loss."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from flame_train.adapters.attach import attach, attach_factors, layers_of
from flame_train.adapters.formats import from_file
from flame_train.config.schema import LossSection, ModelSection
from flame_train.engine import no_grad, tensor
from flame_train.errors import ConfigError
from flame_train.io.safetensors import save_file
from flame_train.io.weights import open_weights
from flame_train.models.registry import FAMILIES, family_of
from flame_train.models.sd15.names import SD15_FILES, lora_family
from flame_train.text_encoders.clip.names import clip_from_openclip
from flame_train.text_encoders.clip.tokenizer import SHIPPED, ClipTokenizer
from flame_train.tools.lora_files import write_lora
from tests.parity.pipelines import PROMPT, check_accepted, check_refused_config, check_sample, opening, random

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

WIDTH, SIZE = 16, {"width": 128, "height": 64}
VERSIONS = {
    "v1": ("epsilon", "quick_gelu", "<|endoftext|>", 2, False),
    "v2": ("v_prediction", "gelu", "!", [2, 4, 4, 4], True),
}
"""What it predicts, CLIP's activation and padding, heads, and whether projections are linear."""
FLAME = {"epsilon": "epsilon", "v_prediction": "v"}


def tokenizer(folder, pad):
    model = json.loads(gzip.decompress(SHIPPED.read_bytes()))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *model["merges"]]) + "\n")
    return transformers.CLIPTokenizer.from_pretrained(folder, pad_token=pad, model_max_length=77)


def clip(activation):
    config = transformers.CLIPTextConfig(
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        hidden_act=activation,
        bos_token_id=49406,
        eos_token_id=49407,
    )
    made = random(transformers.CLIPTextModel(config), 1, 0.3)
    return made


@pytest.fixture(scope="module", params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture(scope="module")
def pipeline(version, tmp_path_factory):
    predicts, activation, pad, heads, linear = VERSIONS[version]
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=[8, 16, 16, 16],
        down_block_types=["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
        up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
        cross_attention_dim=WIDTH,
        attention_head_dim=heads,
        norm_num_groups=4,
        use_linear_projection=linear,
        layers_per_block=2,
    )
    vae = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 16, 16, 16],
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    )
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, steps_offset=1, prediction_type=predicts
    )
    parts = random(vae, 0), clip(activation), tokenizer(tmp_path_factory.mktemp("clip"), pad), random(unet, 2, 0.1)
    made = diffusers.StableDiffusionPipeline(*parts, scheduler, None, None, requires_safety_checker=False)
    made.scheduler = diffusers.EulerDiscreteScheduler.from_config(scheduler.config, timestep_spacing="leading")
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("sd15")
    pipeline.save_pretrained(path)
    return path


@pytest.fixture
def prediction(version):
    return FLAME[VERSIONS[version][0]]


@pytest.mark.parametrize("skip", [1, 2])
def test_sample_draws_what_the_pipeline_draws(pipeline, folder, tmp_path, prediction, skip, monkeypatch):
    """With the last state of CLIP, and with that before the last layer: diffusers calls it clip_skip 1."""
    if not hasattr(pipeline.text_encoder, "text_model"):  # of newer transformers, where the pipeline still looks there
        monkeypatch.setattr(type(pipeline.text_encoder), "text_model", property(lambda own: own), raising=False)
    assert family_of(folder).name == "sd15"
    more = {"prediction": prediction, "text_encoders": {"clip_skip": skip}, **SIZE}

    def drawn_by(**given):
        return pipeline(clip_skip=skip - 1 or None, **given)

    check_sample(folder, tmp_path / "image.png", (8, 16, 4), drawn_by, **more)


def test_the_training_loss_is_that_of_the_pipelines_parts(pipeline, folder, off, prediction):
    """As diffusers' train_text_to_image_lora.py has it."""
    settings = ModelSection(prediction=prediction)
    model = FAMILIES["sd15"].open(replace(opening(folder), model=settings))
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((2, 8, 16, 4)).astype(np.float32) for _ in range(2))
    timesteps = np.array([37, 871], np.int32)
    (encoder,) = model.text
    network, prompts = encoder.load(device="cpu", dtype="fp32", precision="auto"), [PROMPT, "a cat, " * 30]
    rows = [encoder.inputs(text) for text in prompts]
    with no_grad():
        made = encoder.encode(network, {name: tensor(np.stack([row[name] for row in rows])) for name in rows[0]})
    objective = model.objective(settings, LossSection(), "cpu")
    denoiser = model.load_denoiser(device="cpu", dtype="fp32")
    x, n, t = tensor(latents), tensor(noise), tensor(timesteps)
    with no_grad():
        found = objective.losses(denoiser.denoise(objective.noised(x, n, t), t, made), x, n, t).mean().item()

    with torch.no_grad():
        states, _ = pipeline.encode_prompt(prompts, "cpu", 1, False)
        assert off(made["clip"], states) < 1e-5
        images, noises = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (latents, noise))
        schedule = diffusers.DDPMScheduler.from_config(pipeline.scheduler.config)
        at = torch.from_numpy(timesteps.astype(np.int64))
        predicted = pipeline.unet(schedule.add_noise(images, noises, at), at, states).sample
        target = noises if prediction == "epsilon" else schedule.get_velocity(images, noises, at)
        expected = float(torch.mean((predicted - target) ** 2))
    assert abs(found - expected) < 1e-5 * expected
    assert expected > 0.1


def test_the_single_file_has_the_folders_values(folder, tmp_path, version, prediction):
    """As published: A1111's prefixes, OpenCLIP's names in 2, and CLIP-L's old ones without `text_model.` in 1."""
    parts = SD15_FILES.all_parts(folder, "unet")
    loaded = {name: part.load(device="cpu", dtype="fp32") for name, part in parts.items()}
    arrays = {name: {n: np.array(t.numpy()) for n, t in network.weights()} for name, network in loaded.items()}
    text = arrays["text_encoder"]
    if version == "v2":
        reader = type("Reader", (), {"read": staticmethod(text.__getitem__)})
        pulled = clip_from_openclip().inverse.pull(text).sources
        text = {f"model.{name}": np.array(source.read(reader)) for name, source in pulled.items()}
    else:
        text = {f"transformer.{name.removeprefix('text_model.')}": array for name, array in text.items()}
    prefixed = {
        "model.diffusion_model.": arrays["unet"],
        "first_stage_model.": arrays["vae"],
        "cond_stage_model.": text,
    }
    tensors = {prefix + name: array for prefix, part in prefixed.items() for name, array in part.items()}
    save_file(tmp_path / "base.safetensors", tensors)
    assert family_of(tmp_path / "base.safetensors").name == "sd15"
    for name, part in SD15_FILES.all_parts(tmp_path / "base.safetensors", "unet").items():
        for native, array in part.load(device="cpu", dtype="fp32").weights():
            np.testing.assert_array_equal(array.numpy(), arrays[name][native], err_msg=f"{name} {native}")
    with open_weights(tmp_path / "base.safetensors") as weights:
        assert len(weights.names) == len(tensors)


def test_training_on_another_target_than_the_folder_says_is_refused(folder, prediction):
    other = "v" if prediction == "epsilon" else "epsilon"
    with pytest.raises(ConfigError, match=f'says that it predicts {prediction}, got "{other}"'):
        FAMILIES["sd15"].open(replace(opening(folder), model=ModelSection(prediction=other)))


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("unet", {"addition_embed_type": "text_time"}, "addition_embed_type is 'text_time', expected None"),
        ("unet", {"attention_head_dim": [1, 2, 8, 8]}, "expected the numbers of heads of one width, or one number"),
        ("vae", {"scaling_factor": 0.13025}, "scaling_factor is 0.13025, expected 0.18215"),
        ("text_encoder", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ],
)
def test_a_config_that_says_something_else_is_refused(folder, part, change, words, prediction):
    if prediction == "epsilon":
        check_refused_config("sd15", folder, part, change, words)


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
def test_a_lora_of_every_kind_of_layer_predicts_there_what_it_predicts_here(
    pipeline, folder, tmp_path, version, form, off
):
    """Of attention, projections, convolutions and CLIP, from its file: the noise, and the caption's states."""
    rng, names = np.random.default_rng(3), lora_family(version == "v2", False)
    ends = ("attn1.to_q", "attn2.to_k", "ff.net.2", "proj_in", "proj_out", "in_layers.2", "op", "out_proj", "fc1")
    networks, state = {}, {}
    for component in ("unet", "text_encoder"):
        networks[component] = SD15_FILES.load(folder, component, device="cpu", dtype="fp32")
        layers = [name for name in layers_of(networks[component]) if name.endswith(ends)]
        attached = attach(networks[component], layers, rank=2, alpha=1.0, seed=2)
        for p in attached.parameters():
            p.data[...] = 0.2 * rng.standard_normal(p.shape)
        state[component] = {name: adapter.factors() for name, adapter in attached.adapters.items()}
        attached.detach()
    write_lora(tmp_path / "lora.safetensors", state, names, form, {})
    x, context = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 8, 16, 4), (1, 7, WIDTH)))
    ids = token_ids(PROMPT, version)

    def ours():
        with no_grad():
            predicted = networks["unet"](tensor(x), tensor(np.array([500.0], np.float32)), tensor(context))
            return predicted.numpy(), networks["text_encoder"].normalised(tensor(ids)).numpy()

    def theirs():
        with torch.no_grad():
            latents, states = torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(context)
            predicted = pipeline.unet(latents, 500, states).sample.permute(0, 2, 3, 1)
            return predicted.numpy(), pipeline.encode_prompt(PROMPT, "cpu", 1, False)[0].numpy()

    plain = ours()
    pipeline.load_lora_weights(tmp_path, weight_name="lora.safetensors")
    try:
        expected = theirs()
    finally:
        pipeline.unload_lora_weights()
    read = from_file(tmp_path / "lora.safetensors", names).state
    for component, factors in read.items():
        attach_factors(networks[component], factors)
    for found, wanted, before in zip(ours(), expected, plain, strict=True):
        assert off(found, wanted) < 1e-5
        assert off(before, wanted) > 1e-2


def token_ids(text, version):
    return ClipTokenizer(0 if version == "v2" else 49407).chunks(text).ids


@pytest.mark.slow
def test_the_acceptance_passes(folder, tmp_path, monkeypatch, prediction):
    check_accepted(monkeypatch, folder, tmp_path, 128, "--set", f"model.prediction={prediction}")
