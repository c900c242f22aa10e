"""A small FLUX.2 klein pipeline, read from the folder that diffusers saves: the same image and training loss."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from flame_train.config.schema import ModelSection
from flame_train.data.views import View
from flame_train.engine import no_grad, tensor
from flame_train.errors import ConfigError
from flame_train.models.common.control import by_name
from flame_train.models.flux2.family import control_placement
from flame_train.models.registry import FAMILIES, family_of
from tests.parity.pipelines import (
    PROMPT,
    check_refused_config,
    check_sample,
    control_images,
    flux2_vae,
    opening,
    qwen_tokenizer,
    random,
    training_loss,
)

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    tokenizer = qwen_tokenizer(tmp_path_factory.mktemp("qwen"), TEMPLATE)
    text = transformers.Qwen3Config(
        vocab_size=288,
        hidden_size=16,
        num_hidden_layers=28,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        head_dim=8,
    )
    transformer = diffusers.Flux2Transformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=48,
        axes_dims_rope=[4, 4, 4, 4],
        guidance_embeds=False,
    )
    made = diffusers.Flux2KleinPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        flux2_vae(),
        random(transformers.Qwen3ForCausalLM(text), 1),
        tokenizer,
        random(transformer, 2, 0.12),
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("flux2")
    pipeline.save_pretrained(path)
    return path


def test_sample_draws_what_the_pipeline_draws(pipeline, folder, tmp_path):
    assert family_of(folder).name == "flux2"
    check_sample(folder, tmp_path / "image.png", (4, 6, 128), pipeline)


def test_sample_draws_what_the_pipeline_draws_of_control_images(pipeline, folder, tmp_path):
    """Their sides are no multiples of 16."""
    files = control_images(tmp_path, (100, 70), (65, 90))
    check_sample(folder, tmp_path / "image.png", (4, 6, 128), pipeline, control=files)


@pytest.mark.parametrize("size", [(100, 70), (2000, 1500), (1024, 1024), (1027, 1023), (64, 500)])
def test_a_control_image_is_scaled_as_in_the_pipeline(pipeline, size):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    image, processor = Image.fromarray(pixels), pipeline.image_processor
    expected = image if size[0] * size[1] <= 1024**2 else processor._resize_to_target_area(image, 1024**2)
    cut = [side // 16 * 16 for side in expected.size]
    expected = processor.preprocess(expected, height=cut[1], width=cut[0], resize_mode="crop")
    found = View(control_placement(size[::-1], 1024)).pixels(pixels)
    np.testing.assert_array_equal(found, np.rint((expected[0].permute(1, 2, 0).numpy() + 1.0) * 127.5))


@pytest.mark.parametrize("beside", [(), ((3, 5), (4, 2))], ids=["", "control images"])
def test_the_training_loss_is_that_of_diffusers_script(pipeline, folder, off, beside):
    """With control images, that of diffusers' script for images to edit, which joins their tokens to the noised."""
    model = FAMILIES["flux2"].open(opening(folder))
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((2, 4, 6, 128)).astype(np.float32) for _ in range(2))
    controls = [rng.standard_normal((2, *size, 128)).astype(np.float32) for size in beside]
    levels = np.array([0.3, 0.875], np.float32)
    encoder, prompts = model.text[0], [PROMPT, "кошка на крыше"]
    inputs = [encoder.inputs(text) for text in prompts]
    stacked = {name: tensor(np.stack([row[name] for row in inputs])) for name in inputs[0]}
    with no_grad():
        cond = encoder.encode(encoder.load(device="cpu", dtype="fp32", precision="auto"), stacked)
    cond |= by_name(map(tensor, controls))
    found = training_loss(model, cond, latents, noise, levels)

    with torch.no_grad():
        captions, text_ids = pipeline.encode_prompt(prompts)
        assert off(cond["qwen3"], captions) < 1e-5
        images, noises = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (latents, noise))
        sigmas = torch.from_numpy(levels)[:, None, None, None]
        noised = (1.0 - sigmas) * images + sigmas * noises
        clean = [torch.from_numpy(each).permute(0, 3, 1, 2) for each in controls]
        ids = [pipeline._prepare_latent_ids(noised)]
        if clean:
            ids.append(pipeline._prepare_image_ids([each[:1] for each in clean]).expand(2, -1, -1))
        tokens = torch.cat([pipeline._pack_latents(each) for each in (noised, *clean)], dim=1)
        settings = {"timestep": torch.from_numpy(levels), "guidance": None}
        settings |= {"encoder_hidden_states": captions, "txt_ids": text_ids}
        predicted = pipeline.transformer(tokens, img_ids=torch.cat(ids, dim=1), **settings).sample[:, : 4 * 6]
        alone = pipeline.transformer(tokens[:, : 4 * 6], img_ids=ids[0], **settings).sample
        assert bool(beside) == (off(predicted, alone) > 1e-2)
        target = pipeline._pack_latents(noises - images)
        expected = float(torch.mean((predicted - target) ** 2))
    assert abs(found - expected) < 1e-5 * expected
    assert expected > 0.1


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("transformer", {"axes_dims_rope": [8, 4, 2, 2]}, "axes_dims_rope is"),
        ("transformer", {"rope_theta": 10000}, "rope_theta is 10000"),
        ("vae", {"batch_norm_eps": 1e-5}, "batch_norm_eps is 1e-05"),
    ],
)
def test_a_config_that_says_something_else_is_refused(folder, part, change, words):
    check_refused_config("flux2", folder, part, change, words)


def test_a_distilled_pipeline_is_refused_as_a_base(folder):
    path, family = folder / "model_index.json", FAMILIES["flux2"]
    whole = path.read_text()
    assert family.distilled(folder) == ""
    path.write_text(json.dumps(json.loads(whole) | {"is_distilled": True}))
    try:
        with pytest.raises(ConfigError, match="says so of itself"):
            family.refuse_distilled(folder, ModelSection())
        family.refuse_distilled(folder, ModelSection(training_adapter="adapter.safetensors"))
        assert family.open(opening(folder)).sampling_defaults.steps == 4
    finally:
        path.write_text(whole)
    for name, distilled in (("flux-2-klein-4b.safetensors", True), ("flux-2-klein-base-4b.safetensors", False)):
        assert bool(family.distilled(folder.parent / name)) == distilled
