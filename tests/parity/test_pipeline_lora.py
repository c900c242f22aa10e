"""A LoRA trained by the pipeline, in diffusers' hands: no key left over, and the same predictions as here."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from benchmarks.torch_models import unet_arguments
from flame_train.adapters.attach import attach, attach_factors, layers_of
from flame_train.adapters.formats import from_file
from flame_train.adapters.kinds import ADAPTERS
from flame_train.engine import no_grad, tensor
from flame_train.engine.random import Rng
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.sdxl.names import SDXL_FILES, lora_family
from flame_train.models.sdxl.names_unet import SDXL_LEVELS, unet_from_diffusers
from flame_train.models.sdxl.unet import vector_conditioning
from flame_train.networks.vae.names import vae_from_diffusers
from flame_train.run.check.check_run import check
from flame_train.run.commands.stages import train_plan
from flame_train.run.plan.plan import make_plan
from flame_train.run.sampling.draw import SAMPLE_NOISE
from flame_train.text_encoders.clip.encoder import end_positions
from flame_train.text_encoders.clip.names import clip_from_bare_transformers
from flame_train.text_encoders.clip.tokenizer import SHIPPED, ClipTokenizer
from flame_train.tools.lora_files import write_lora
from flame_train.tools.merge import merge
from flame_train.tools.sample import sample
from flame_train.training.session import Session, StopRequest
from tests.keymaps import fill
from tests.parity.test_diffusion import theirs as theirs_of_schedule
from tests.tools.test_sample import PLAIN

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own deprecations
]

TRAINED = [("kohya", "attention", 0.5), ("diffusers", "attention", 0.5), ("kohya", "full", 2e-2)]
"""Format, targets and a rate that is large enough for two steps to change the predictions."""

DRAWN = [("lora", {}, "diffusers"), ("lora", {}, "kohya"), ("locon", {"conv_rank": 2}, "kohya")]
DRAWN += [("locon", {"conv_rank": 2}, "diffusers"), ("dora", {"wd_on_output": True}, "diffusers")]
"""LoCon has two alphas: 4 and, of convolutions, 8."""


def unet_twin(unet):
    twin = diffusers.UNet2DConditionModel(**unet_arguments(unet.arch))
    return fill(twin, unet, unet_from_diffusers(SDXL_LEVELS).inverse)


def vae_twin(vae):
    arch = vae.arch
    stages = len(arch.channel_mult)
    twin = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * stages,
        up_block_types=["UpDecoderBlock2D"] * stages,
        block_out_channels=[arch.channels * m for m in arch.channel_mult],
        layers_per_block=arch.num_res_blocks,
        latent_channels=arch.latent_channels,
        norm_num_groups=arch.groups,
        scaling_factor=arch.scaling_factor,
    )
    return fill(twin, vae, vae_from_diffusers(stages).inverse)


def text_twin(encoder):
    arch = encoder.arch
    config = transformers.CLIPTextConfig(
        vocab_size=arch.vocabulary,
        hidden_size=arch.width,
        intermediate_size=arch.hidden,
        num_hidden_layers=arch.layers,
        num_attention_heads=arch.heads,
        max_position_embeddings=arch.positions,
        hidden_act=arch.activation,
        projection_dim=arch.projection or 16,
        bos_token_id=49406,
        eos_token_id=49407,
    )
    plain = arch.projection is None
    twin = (transformers.CLIPTextModel if plain else transformers.CLIPTextModelWithProjection)(config)
    native = any(name.startswith("text_model.") for name in twin.state_dict())
    return fill(twin, encoder, None if native else clip_from_bare_transformers().inverse)


def tokenizer_twin(folder, pad):
    model = json.loads(gzip.decompress(SHIPPED.read_bytes()))["model"]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *model["merges"]]) + "\n")
    return transformers.CLIPTokenizer.from_pretrained(folder, pad_token=pad, model_max_length=77)


@pytest.fixture(scope="module")
def base(small_base, tmp_path_factory):
    """The small base in fp32, so that merging into it rounds nothing away."""
    path = tmp_path_factory.mktemp("fp32") / "base.safetensors"
    with SafetensorsFile(small_base) as file:
        save_file(path, {name: np.array(file.read(name)).astype(np.float32) for name in file.names})
    return path


@pytest.fixture(scope="module")
def networks(base):
    components = "unet", "vae", "text_encoder", "text_encoder_2"
    return SimpleNamespace(**{c: SDXL_FILES.load(base, c, device="cpu", dtype="float32") for c in components})


@pytest.fixture
def pipeline(networks, tmp_path):
    return diffusers.StableDiffusionXLPipeline(
        vae=vae_twin(networks.vae),
        unet=unet_twin(networks.unet),
        scheduler=diffusers.EulerDiscreteScheduler(),
        text_encoder=text_twin(networks.text_encoder),
        text_encoder_2=text_twin(networks.text_encoder_2),
        tokenizer=tokenizer_twin(tmp_path / "tokenizer", "<|endoftext|>"),
        tokenizer_2=tokenizer_twin(tmp_path / "tokenizer_2", "!"),
    )


@pytest.fixture(params=TRAINED, ids=lambda p: f"{p[0]}-{p[1]}")
def lora(request, small_config, base, drawn):
    """The result of two steps on two drawings."""
    form, targets, rate = request.param
    for path in sorted(drawn.glob("*.png"))[2:]:
        path.unlink()
        path.with_suffix(".txt").unlink()
    config = small_config(
        model={"checkpoint": str(base)},
        data={"resolution": 64},
        lora={"rank": 4, "alpha": 2.0, "targets": (targets,)},
        optimizer={"lr": rate},
        train={"steps": 2},
        output={"format": form},
        sample={"every": 0},
    )
    stop = StopRequest()
    done = train_plan(make_plan(check(config), stop), Session("cpu", stop=stop))
    return done["lora"]


@pytest.fixture
def batch(networks):
    rng = np.random.default_rng(4)
    arch = networks.unet.arch
    return {
        "latents": rng.standard_normal((2, 16, 12, 4)).astype(np.float32),
        "timesteps": np.array([40.0, 820.0], np.float32),
        "context": rng.standard_normal((2, 77, arch.context_dim)).astype(np.float32),
        "pooled": rng.standard_normal((2, arch.adm_in_channels - 1536)).astype(np.float32),
        "time_ids": np.array([[128, 96, 0, 0, 128, 96], [200, 300, 8, 0, 128, 96]], np.float32),
    }


def ours(unet, batch):
    vector = vector_conditioning(tensor(batch["pooled"]), tensor(batch["time_ids"]))
    with no_grad():
        return unet(tensor(batch["latents"]), tensor(batch["timesteps"]), tensor(batch["context"]), vector).numpy()


def theirs(unet, batch):
    call = {
        "sample": torch.from_numpy(batch["latents"]).permute(0, 3, 1, 2),
        "timestep": torch.from_numpy(batch["timesteps"]),
        "encoder_hidden_states": torch.from_numpy(batch["context"]),
        "added_cond_kwargs": {
            "text_embeds": torch.from_numpy(batch["pooled"]),
            "time_ids": torch.from_numpy(batch["time_ids"]),
        },
    }
    with torch.no_grad():
        return unet(**call).sample.permute(0, 2, 3, 1).numpy()


def test_the_trained_file_predicts_the_same_there_merged_and_here(
    pipeline, lora, networks, base, batch, tmp_path, loaded, off
):
    plain = ours(networks.unet, batch)
    assert off(theirs(pipeline.unet, batch), plain) < 1e-4

    layers = loaded(pipeline, lora, "unet", "CLIPTextModel")
    state = from_file(lora, lora_family()).state
    assert layers == len(state["unet"]) >= 88  # 11 transformer blocks of 8 layers at least
    expected = theirs(pipeline.unet, batch)
    assert off(plain, expected) > 1e-2  # the LoRA does something

    attached = attach_factors(networks.unet, state["unet"])
    try:
        assert off(ours(networks.unet, batch), expected) < 1e-4
    finally:
        attached.detach()

    merge(base, lora, tmp_path / "merged.safetensors")
    merged = SDXL_FILES.load(tmp_path / "merged.safetensors", "unet", device="cpu", dtype="float32")
    assert off(ours(merged, batch), expected) < 1e-4
    assert off(theirs(unet_twin(merged), batch), expected) < 1e-4


@pytest.mark.parametrize("lora", TRAINED[:1], indirect=True)
def test_the_whole_pipeline_draws_with_it(pipeline, lora, loaded):
    """From a prompt to an image, captions read by diffusers: it runs, and the LoRA is seen in it."""

    def image():
        noise = torch.Generator().manual_seed(1)
        return pipeline(
            "a blue circle", num_inference_steps=3, height=64, width=64, output_type="np", generator=noise
        ).images[0]

    pipeline.set_progress_bar_config(disable=True)
    before = image()
    loaded(pipeline, lora, "unet", "CLIPTextModel")
    after = image()
    assert after.shape == (64, 64, 3)
    assert np.isfinite(after).all()
    assert np.abs(after - before).max() > 1e-3


@pytest.mark.parametrize(("kind", "keys", "form"), DRAWN, ids=[f"{kind}-{form}" for kind, _, form in DRAWN])
def test_the_pipeline_draws_what_sample_draws(pipeline, networks, base, tmp_path, loaded, kind, keys, form):
    """From the same noise, guided, in fp32: mean difference under 2 of 255, and far less than what the file changes."""
    unet, file, image = networks.unet, tmp_path / "file.safetensors", tmp_path / "image.png"
    ends = ("attn2.to_k", "attn1.to_q", *(("in_layers.2", "out_layers.3") if kind == "locon" else ()))
    names = [name for name in layers_of(unet) if name.endswith(ends)]
    attached = attach(unet, names, rank=4, alpha=4.0, seed=2, kind=ADAPTERS[kind](**keys))
    rng = np.random.default_rng(3)
    for p in attached.parameters():
        p.data[...] = p.data * 1.2 + 0.1 * rng.standard_normal(p.shape)
    state = {"unet": {name: adapter.factors() for name, adapter in attached.adapters.items()}}
    attached.detach()
    write_lora(file, state, lora_family(), form, {})

    def ours(**more):
        sample(str(base), ["a blue circle"], image, **PLAIN, **more, force=True)
        with Image.open(image) as drawn:
            return np.asarray(drawn).astype(float)

    pipeline.scheduler = theirs_of_schedule("EulerDiscreteScheduler")
    pipeline.set_progress_bar_config(disable=True)
    assert loaded(pipeline, file, "unet", "CLIPTextModel") == len(names)
    noise = Rng(np, PLAIN["seed"], 0, np.zeros(1, np.int64)).normal(SAMPLE_NOISE, (8, 12, 4))
    expected = pipeline(
        "a blue circle",
        negative_prompt="",
        num_inference_steps=PLAIN["steps"],
        guidance_scale=PLAIN["guidance_scale"],
        height=PLAIN["height"],
        width=PLAIN["width"],
        latents=torch.from_numpy(np.array(noise, np.float32)).permute(0, 3, 1, 2),
    ).images[0]
    expected = np.asarray(expected).astype(float)
    found = np.abs(ours(loras=[(file, 1.0)]) - expected).mean()
    assert found < min(2.0, 0.25 * np.abs(ours() - expected).mean())


def reads(networks, text):
    """The context (1, 77, C) and the pooled text (1, P) that both text encoders make of a caption."""
    states, pooled = [], None
    for encoder, pad in ((networks.text_encoder, 49407), (networks.text_encoder_2, 0)):
        ids = ClipTokenizer(pad).chunks(text).ids[:1]
        with no_grad():
            state, pooled = encoder(tensor(ids.astype(np.int32)), tensor(end_positions(ids)))
        states.append(state.numpy())
    return np.concatenate(states, axis=2), pooled.numpy()


@pytest.mark.parametrize("form", ["kohya", "diffusers"])
def test_adapters_of_text_encoders_read_captions_there_as_here(pipeline, networks, tmp_path, off, form):
    file, text = tmp_path / "file.safetensors", "a blue circle"
    rng = np.random.default_rng(5)
    attached, state = [], {}
    for component in ("text_encoder", "text_encoder_2"):
        network = getattr(networks, component)
        names = [name for name in layers_of(network) if ".self_attn." in name or ".mlp." in name]
        attached.append(attach(network, names, rank=4, alpha=2.0, seed=1, kind=ADAPTERS["lora"]()))
        for p in attached[-1].parameters():
            p.data[...] = p.data + 0.1 * rng.standard_normal(p.shape)
        state[component] = {name: adapter.factors() for name, adapter in attached[-1].adapters.items()}
    with_lora = reads(networks, text)
    for one in attached:
        one.detach()
    plain = reads(networks, text)
    write_lora(file, state, lora_family(), form, {})

    def theirs():
        with torch.no_grad():
            context, _, pooled, _ = pipeline.encode_prompt(text, do_classifier_free_guidance=False)
        return context.numpy(), pooled.numpy()

    for found, expected in zip(theirs(), plain, strict=True):
        assert off(found, expected) < 1e-4
    pipeline.load_lora_weights(file)
    for component, layers in state.items():
        modules = getattr(pipeline, component).modules()
        assert sum(hasattr(module, "lora_A") for module in modules) == len(layers)
    for found, expected, before in zip(theirs(), with_lora, plain, strict=True):
        assert off(found, expected) < 1e-4
        assert off(before, expected) > 1e-2  # the adapters do something


@pytest.mark.parametrize("text", ["", "a blue circle on an orange background", "Ünïcode, 12 & 'quotes'..."])
def test_the_pipeline_reads_captions_as_we_do(pipeline, text):
    for twin, pad in ((pipeline.tokenizer, 49407), (pipeline.tokenizer_2, 0)):
        theirs = twin(text, padding="max_length", max_length=77, truncation=True).input_ids
        assert theirs == ClipTokenizer(pad).chunks(text).ids[0].tolist()
