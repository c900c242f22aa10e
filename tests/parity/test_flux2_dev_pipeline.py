"""A small FLUX.2 dev pipeline, read from the folder that diffusers saves: the same image and training loss."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.config.schema import LossSection, ModelSection, TextEncodersSection
from flame_train.engine import no_grad, tensor
from flame_train.errors import ConfigError
from flame_train.models.common.family import Opening
from flame_train.models.registry import FAMILIES, family_of
from flame_train.text_encoders.mistral.tokenizer import bytes_alone
from tests.parity.pipelines import (
    PROMPT,
    check_refused_config,
    check_sample,
    control_images,
    flux2_vae,
    opening,
    random,
)

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TEMPLATE = (
    "<s>{% for message in messages %}{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content[0].text }}"
    "[/SYSTEM_PROMPT]{% else %}[INST]{{ message.content[0].text }}[/INST]{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    file = tmp_path_factory.mktemp("tekken") / "tokenizer.json"
    file.write_text(bytes_alone())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), pad_token="<pad>", padding_side="left", chat_template=TEMPLATE
    )
    text = {
        "model_type": "mistral",
        "vocab_size": 1256,
        "hidden_size": 16,
        "num_hidden_layers": 31,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
        "sliding_window": None,
    }
    vision = {"model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 16, "image_size": 28, "patch_size": 14}
    transformer = diffusers.Flux2Transformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=48,
        axes_dims_rope=[4, 4, 4, 4],
        guidance_embeds=True,
    )
    made = diffusers.Flux2Pipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        flux2_vae(),
        random(
            transformers.Mistral3ForConditionalGeneration(
                transformers.Mistral3Config(text_config=text, vision_config=vision)
            ),
            1,
        ),
        tokenizer,
        random(transformer, 2, 0.12),
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("flux2-dev")
    pipeline.save_pretrained(path)
    return path


@pytest.mark.parametrize("sizes", [(), ((100, 70), (65, 90))], ids=["", "control images"])
def test_sample_draws_what_the_pipeline_draws(pipeline, folder, tmp_path, sizes):
    """The scale is an input of the network, which sees no negative prompt."""
    assert family_of(folder).name == "flux2"
    check_sample(folder, tmp_path / "image.png", (4, 6, 128), pipeline, control=control_images(tmp_path, *sizes))


def test_the_training_loss_is_that_of_diffusers_script(pipeline, folder, off):
    """At a guidance of 1, and of 3.5 as that script has it."""
    model = FAMILIES["flux2"].open(opening(folder))
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((2, 4, 6, 128)).astype(np.float32) for _ in range(2))
    levels = np.array([0.3, 0.875], np.float32)
    encoder, prompts = model.text[0], [PROMPT, "кошка на крыше"]
    inputs = [encoder.inputs(text) for text in prompts]
    stacked = {name: tensor(np.stack([row[name] for row in inputs])) for name in inputs[0]}
    objective = model.objective(ModelSection(), LossSection(), "cpu")
    x, n, t = tensor(latents), tensor(noise), tensor(levels)
    with no_grad():
        cond = encoder.encode(encoder.load(device="cpu", dtype="fp32", precision="auto"), stacked)
    with torch.no_grad():
        captions, text_ids = pipeline.encode_prompt(prompts)
        images, noises = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (latents, noise))
        sigmas = torch.from_numpy(levels)[:, None, None, None]
        noised = (1.0 - sigmas) * images + sigmas * noises
        told = {"img_ids": pipeline._prepare_latent_ids(noised), "txt_ids": text_ids}
        told |= {"timestep": torch.from_numpy(levels), "encoder_hidden_states": captions}
        target = pipeline._pack_latents(noises - images)
    losses = []
    for guidance in (LossSection().guidance_scale, 3.5):
        denoiser = model.load_denoiser(device="cpu", dtype="fp32", guidance_scale=guidance)
        with no_grad():
            found = objective.losses(denoiser.denoise(objective.noised(x, n, t), t, cond), x, n, t).mean().item()
        with torch.no_grad():
            given = torch.full((2,), guidance)
            out = pipeline.transformer(pipeline._pack_latents(noised), guidance=given, **told).sample
            expected = float(torch.mean((out - target) ** 2))
        assert abs(found - expected) < 1e-5 * expected
        losses.append(expected)
    assert abs(losses[0] - losses[1]) > 1e-4 * losses[0] > 0


def test_what_the_folder_says_otherwise_is_refused(folder):
    check_refused_config("flux2", folder, "transformer", {"guidance_embeds": False}, "guidance_embeds is False")
    text = {"text_config": {"num_attention_heads": 4, "head_dim": 8}}
    check_refused_config("flux2", folder, "text_encoder", text, "num_attention_heads is 4, expected 2")


def test_keys_of_the_other_text_encoder_are_refused(folder):
    text = TextEncodersSection(qwen3="/qwen", qwen3_tokens=128)
    with pytest.raises(
        ConfigError, match=r"text_encoders\.qwen3: it has no effect on .*text_encoders\.mistral"
    ) as refused:
        FAMILIES["flux2"].open(Opening(folder, ModelSection(), text, 75))
    assert "text_encoders.qwen3_tokens" in str(refused.value)
