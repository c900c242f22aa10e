"""A small Chroma pipeline, read from the folder that diffusers saves: the same image, and the same training loss."""

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
from flame_train.models.common.small import write_vocabulary
from flame_train.models.registry import FAMILIES, NOTHING_NAMED, family_of
from flame_train.run.sampling.draw import SAMPLE_NOISE
from flame_train.tools.sample import sample
from tests.parity.pipelines import (
    flux_vae,
    random,
    read_alone,
    training_loss,
)
from tests.tools.test_sample import PLAIN

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

PROMPT, LONGER = "a red circle", "a much longer caption of a blue square, which takes more than thirty-two tokens"


def tokenizer(folder):
    """The small vocabulary in transformers' hands: words that begin with a mark, and an end token."""
    write_vocabulary(folder)
    pieces = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram([(p, s) for p, s in pieces], unk_id=2, byte_fallback=False))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    text = transformers.T5Config(
        vocab_size=384, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
    )
    transformer = diffusers.ChromaTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        axes_dims_rope=[4, 6, 6],
        approximator_hidden_dim=48,
        approximator_layers=2,
    )
    made = diffusers.ChromaPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        flux_vae(),
        random(transformers.T5EncoderModel(text), 1),
        tokenizer(tmp_path_factory.mktemp("t5")),
        random(transformer, 2),
    )
    made.set_progress_bar_config(disable=True)
    usual = made._get_t5_prompt_embeds

    def masked(*args, **kwargs):
        """The pipeline's mask is of floats, which attention adds: it masks nothing (diffusers issue 12116)."""
        states, mask = usual(*args, **kwargs)
        return states, mask.bool()

    made._get_t5_prompt_embeds = masked
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("chroma")
    pipeline.save_pretrained(path)
    return path


def opening(folder):
    return replace(NOTHING_NAMED, base=folder)


def test_sample_draws_what_the_pipeline_draws(pipeline, folder, tmp_path):
    """From the same noise, guided, in fp32: within rounding of 8 bits."""
    assert family_of(folder).name == "chroma"
    noise = Rng(np, PLAIN["seed"], 0, np.zeros(1, np.int64)).normal(SAMPLE_NOISE, (8, 12, 16))
    latents = torch.from_numpy(np.array(noise, np.float32)).permute(0, 3, 1, 2)
    expected = pipeline(
        PROMPT,
        num_inference_steps=PLAIN["steps"],
        guidance_scale=PLAIN["guidance_scale"],
        height=PLAIN["height"],
        width=PLAIN["width"],
        latents=pipeline._pack_latents(latents, *latents.shape),
        max_sequence_length=77,
    ).images[0]
    expected = np.asarray(expected).astype(float)
    sample(str(folder), [PROMPT], tmp_path / "image.png", **PLAIN, text_encoders={"t5_tokens": 77})
    with Image.open(tmp_path / "image.png") as drawn:
        found = np.asarray(drawn).astype(float)
    assert expected.std() > 5
    assert np.abs(found - expected).max() <= 1


def test_the_training_loss_is_that_of_the_pipelines_parts(pipeline, folder, off):
    """The captions' rows are those that the pipeline's mask shows: the tokens, and one of the padding."""
    model = FAMILIES["chroma"].open(opening(folder))
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((2, 8, 12, 16)).astype(np.float32) for _ in range(2))
    levels = np.array([0.3, 0.875], np.float32)
    encoder = model.text[0]
    examples = read_alone(encoder, (PROMPT, LONGER))
    cond = {name: tensor(a) for name, a in collate(examples, model.paddings).items()}
    assert cond["t5"].shape[1] % 32 == 0
    found = training_loss(model, cond, latents, noise, levels)

    with torch.no_grad():
        captions, text_ids, mask, *_ = pipeline.encode_prompt([PROMPT, LONGER], do_classifier_free_guidance=False)
        for ours, theirs, seen in zip(examples, captions, mask, strict=True):
            assert len(ours["t5"]) == int(seen.sum())
            assert off(ours["t5"], theirs[seen]) < 1e-5
        images, noises = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (latents, noise))
        sigmas = torch.from_numpy(levels)[:, None, None, None]
        predicted = pipeline.transformer(
            hidden_states=pipeline._pack_latents((1.0 - sigmas) * images + sigmas * noises, *images.shape),
            timestep=torch.from_numpy(levels),
            encoder_hidden_states=captions,
            txt_ids=text_ids,
            img_ids=pipeline._prepare_latent_image_ids(2, 4, 6, "cpu", torch.float32),
            attention_mask=pipeline._prepare_attention_mask(2, 24, torch.float32, mask),
        ).sample
        target = pipeline._pack_latents(noises - images, *images.shape)
        expected = float(torch.mean((predicted - target) ** 2))
    assert abs(found - expected) < 1e-5 * expected
    assert expected > 0.1


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("transformer", {"axes_dims_rope": [8, 4, 4]}, "axes_dims_rope is"),
        ("transformer", {"num_attention_heads": 2}, "num_attention_heads is 2, expected 4"),
        ("vae", {"scaling_factor": 0.18215}, "scaling_factor is 0.18215"),
        ("text_encoder", {"feed_forward_proj": "relu"}, "feed_forward_proj is 'relu'"),
    ],
)
def test_a_config_that_says_something_else_is_refused(folder, part, change, words):
    path = folder / part / "config.json"
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole) | change))
    try:
        with pytest.raises(ModelFileError, match=words):
            FAMILIES["chroma"].open(opening(folder))
    finally:
        path.write_text(whole)
