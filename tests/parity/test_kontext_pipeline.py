"""A small FLUX.1 Kontext pipeline, read from the folder that diffusers saves: the same image and training loss."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from flame_train.data.views import View
from flame_train.engine import no_grad, tensor
from flame_train.models.common.control import by_name
from flame_train.models.common.small import write_vocabulary
from flame_train.models.flux import family as flux
from flame_train.models.registry import FAMILIES, family_of
from tests.parity.pipelines import (
    PROMPT,
    check_sample,
    control_images,
    flux_vae,
    opening,
    random,
    training_loss,
)

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

HERE = pytest.importorskip("diffusers.pipelines.flux.pipeline_flux_kontext")
CLIP = {"vocab_size": 49408, "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2}
T5 = {"vocab_size": 384, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}


@pytest.fixture(scope="module")
def pipeline():
    transformer = diffusers.FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=[4, 6, 6],
    )
    clip = transformers.CLIPTextConfig(num_attention_heads=2, projection_dim=32, **CLIP)
    made = diffusers.FluxKontextPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        flux_vae(0.1),
        random(transformers.CLIPTextModel(clip), 1),
        None,
        random(transformers.T5EncoderModel(transformers.T5Config(feed_forward_proj="gated-gelu", **T5)), 2),
        None,
        random(transformer, 3, 0.12),
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("edits")
    pipeline.save_pretrained(path)
    write_vocabulary(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return FAMILIES["flux"].open(opening(folder))


@pytest.fixture(scope="module")
def captions(model):
    """The arrays of text encoders, each of which has a parity test of its own."""

    def made(texts):
        cond = {}
        with no_grad():
            for encoder in model.text:
                inputs = [encoder.inputs(text) for text in texts]
                stacked = {name: tensor(np.stack([row[name] for row in inputs])) for name in inputs[0]}
                cond |= encoder.encode(encoder.load(device="cpu", dtype="fp32", precision="auto"), stacked)
        return cond

    return made


def as_theirs(cond):
    return {
        "prompt_embeds": torch.from_numpy(np.array(cond["t5"].numpy())),
        "pooled_prompt_embeds": torch.from_numpy(np.array(cond["pooled"].numpy())),
    }


def test_sample_draws_what_the_pipeline_draws(pipeline, folder, model, captions, tmp_path, monkeypatch):
    """The shapes that Kontext prefers are a sixteenth of theirs here; no control image has one of them."""
    small = [(width // 64 * 16, height // 64 * 16) for width, height in HERE.PREFERRED_KONTEXT_RESOLUTIONS]
    monkeypatch.setattr(HERE, "PREFERRED_KONTEXT_RESOLUTIONS", small)
    monkeypatch.setattr(flux, "_SIDES", tuple(small))
    assert family_of(folder).name == "flux"
    assert model.kontext

    def drawn(prompt, latents, image, height, width, **settings):
        cond, packed = as_theirs(captions([prompt])), pipeline._pack_latents(latents, *latents.shape)
        area = {"height": height, "width": width, "max_area": height * width}
        return pipeline(image=image[0], latents=packed, **cond, **area, **settings)

    seen = [
        check_sample(folder, tmp_path / f"{size[0]}.png", (8, 12, 16), drawn, control=control_images(tmp_path, size))
        for size in ((100, 70), (90, 130))
    ]
    assert np.abs(seen[0] - seen[1]).max() > 2


def test_the_training_loss_is_that_of_the_pipelines_network(pipeline, model, captions):
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((2, 8, 12, 16)).astype(np.float32) for _ in range(2))
    control = rng.standard_normal((2, 6, 4, 16)).astype(np.float32)
    levels, cond = np.array([0.3, 0.875], np.float32), captions([PROMPT, "a blue square"])
    theirs = as_theirs(cond)
    seen = cond | by_name([tensor(control)])
    found = training_loss(model, seen, latents, noise, levels, guidance_scale=2.5)

    with torch.no_grad():
        images, noises, clean = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (latents, noise, control))
        sigmas = torch.from_numpy(levels)[:, None, None, None]
        noised = (1.0 - sigmas) * images + sigmas * noises
        tokens = [pipeline._pack_latents(each, *each.shape) for each in (noised, clean)]
        ids = [pipeline._prepare_latent_image_ids(2, *size, "cpu", torch.float32) for size in ((4, 6), (3, 2))]
        ids[1][:, 0] = 1
        predicted = pipeline.transformer(
            hidden_states=torch.cat(tokens, dim=1),
            timestep=torch.from_numpy(levels),
            guidance=torch.full((2,), 2.5),
            pooled_projections=theirs["pooled_prompt_embeds"],
            encoder_hidden_states=theirs["prompt_embeds"],
            txt_ids=torch.zeros(theirs["prompt_embeds"].shape[1], 3),
            img_ids=torch.cat(ids),
        ).sample[:, : 4 * 6]
        target = pipeline._pack_latents(noises - images, *images.shape)
        expected = float(torch.mean((predicted - target) ** 2))
    assert abs(found - expected) < 1e-5 * expected
    assert expected > 0.1


@pytest.mark.parametrize("size", [(100, 70), (90, 130), (2000, 1500), (16, 999), (1024, 1024)])
def test_a_control_image_is_stretched_as_in_the_pipeline(pipeline, size):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image, processor = Image.fromarray(pixels), pipeline.image_processor
    height, width = processor.get_default_height_width(image)
    ratio = width / height
    _, width, height = min((abs(ratio - w / h), w, h) for w, h in HERE.PREFERRED_KONTEXT_RESOLUTIONS)
    resized = processor.resize(image, height, width)
    found = View(flux.control_placement(size[::-1], 1024)).pixels(pixels)
    np.testing.assert_array_equal(found, np.asarray(resized))


def test_kontext_is_told_by_a_name_or_by_a_key(tmp_path):
    for name, kontext in (("flux1-kontext-dev.safetensors", True), ("flux1-dev.safetensors", False)):
        assert flux._is_kontext(tmp_path / name) == kontext
    hub = tmp_path / "models--black-forest-labs--FLUX.1-Kontext-dev" / "snapshots" / "1234"
    assert flux._is_kontext(hub)
