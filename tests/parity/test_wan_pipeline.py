"""A small Wan pipeline, read from the folder that diffusers saves: the same still, and the same training loss."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flame_train.data.padding import collate
from flame_train.engine import tensor
from flame_train.engine.random import Rng
from flame_train.errors import ModelFileError
from flame_train.models.registry import FAMILIES, NOTHING_NAMED, family_of
from flame_train.models.wan.names import TINY_VAE
from flame_train.run.sampling.draw import SAMPLE_NOISE
from flame_train.tools.sample import sample
from tests.parity.models.test_vae_wan import twin_of
from tests.parity.pipelines import read_alone, training_loss
from tests.parity.test_chroma_pipeline import random, tokenizer
from tests.tools.test_sample import PLAIN

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

PROMPT, LONGER = "a red  circle", "a blue square &amp; a much longer caption, which is cut"
LATENTS = (1, 4, 6, 48)
TOKENS = 77


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    text = transformers.UMT5Config(
        vocab_size=384, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=48,
        out_channels=48,
        text_dim=32,
        ffn_dim=64,
        num_layers=2,
    )
    made = diffusers.WanPipeline(
        tokenizer(tmp_path_factory.mktemp("t5")),
        random(transformers.UMT5EncoderModel(text), 1),
        random(twin_of(TINY_VAE), 0),
        diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        random(transformer, 2),
        expand_timesteps=True,
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("wan")
    pipeline.save_pretrained(path)
    return path


def opening(folder):
    return replace(NOTHING_NAMED, base=folder)


def channels_first(array):
    return torch.from_numpy(np.array(array, np.float32)).permute(0, 4, 1, 2, 3)


def test_sample_draws_what_the_pipeline_draws(pipeline, folder, tmp_path):
    """From the same noise, guided, in fp32: within rounding of 8 bits."""
    assert family_of(folder).name == "wan"
    noise = Rng(np, PLAIN["seed"], 0, np.zeros(1, np.int64)).normal(SAMPLE_NOISE, LATENTS)
    expected = pipeline(
        PROMPT,
        num_inference_steps=PLAIN["steps"],
        guidance_scale=PLAIN["guidance_scale"],
        height=PLAIN["height"],
        width=PLAIN["width"],
        num_frames=1,
        latents=channels_first(noise),
        max_sequence_length=TOKENS,
        output_type="np",
    ).frames[0, 0]
    expected = np.rint(255 * expected)
    sample(str(folder), [PROMPT], tmp_path / "image.png", **PLAIN, text_encoders={"t5_tokens": TOKENS})
    with Image.open(tmp_path / "image.png") as drawn:
        found = np.asarray(drawn).astype(float)
    assert expected.std() > 5
    assert np.abs(found - expected).max() <= 1


def test_the_training_loss_is_that_of_the_pipelines_parts(pipeline, folder, off):
    """Rows behind a caption are zeros, and the denoiser looks at all of them."""
    model = FAMILIES["wan"].open(opening(folder))
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((2, *LATENTS)).astype(np.float32) for _ in range(2))
    levels = np.array([0.3, 0.875], np.float32)
    encoder = replace(model.text[0], length=TOKENS)
    examples = read_alone(encoder, (PROMPT, LONGER))
    cond = {name: tensor(a) for name, a in collate(examples, encoder.paddings).items()}
    assert cond["t5"].shape == (2, TOKENS, 32)
    found = training_loss(model, cond, latents, noise, levels)

    with torch.no_grad():
        captions, _ = pipeline.encode_prompt(
            [PROMPT, LONGER], do_classifier_free_guidance=False, max_sequence_length=TOKENS
        )
        assert off(cond["t5"], captions) < 1e-5
        films, noises = channels_first(latents), channels_first(noise)
        sigmas = torch.from_numpy(levels)[:, None, None, None, None]
        predicted = pipeline.transformer(
            hidden_states=(1.0 - sigmas) * films + sigmas * noises,
            timestep=torch.from_numpy(1000 * levels),
            encoder_hidden_states=captions,
        ).sample
        expected = float(torch.mean((predicted - (noises - films)) ** 2))
    assert abs(found - expected) < 1e-5 * expected
    assert expected > 0.1


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("transformer", {"qk_norm": None}, "qk_norm is None"),
        ("transformer", {"num_attention_heads": 4}, "num_attention_heads is 4, expected 2"),
        ("vae", {"is_residual": False}, "is_residual is False"),
        ("text_encoder", {"feed_forward_proj": "relu"}, "feed_forward_proj is 'relu'"),
    ],
)
def test_a_config_that_says_something_else_is_refused(folder, part, change, words):
    path = folder / part / "config.json"
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole) | change))
    try:
        with pytest.raises(ModelFileError, match=words):
            FAMILIES["wan"].open(opening(folder))
    finally:
        path.write_text(whole)
