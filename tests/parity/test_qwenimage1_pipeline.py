"""A small Qwen-Image 1 pipeline, read from the folder that diffusers saves: the same image, and the same loss."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.data.padding import collate
from flame_train.engine import tensor
from flame_train.models.registry import FAMILIES, family_of
from tests.parity.pipelines import (
    PROMPT,
    check_refused_config,
    check_sample,
    opening,
    qwen_tokenizer,
    random,
    read_alone,
    training_loss,
)

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

LONGER = "a much longer caption, which takes more than thirty-two tokens of bytes"


def text_encoder(**places):
    text = {
        "vocab_size": 288,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [2, 1, 1]},
    }
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **places)
    return random(transformers.Qwen2_5_VLForConditionalGeneration(config), 1)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    transformer = diffusers.QwenImageTransformer2DModel(
        num_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32, axes_dims_rope=(8, 4, 4)
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02
    )
    made = diffusers.QwenImagePipeline(
        scheduler,
        random(diffusers.AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1), 4),
        text_encoder(),
        qwen_tokenizer(tmp_path_factory.mktemp("qwen"), None),
        random(transformer, 2),
    )
    # it counts the published vocabulary's tokens of its template; one of bytes has more
    start = made.prompt_template_encode.partition("{}")[0]
    made.prompt_template_encode_start_idx = len(made.tokenizer(start).input_ids)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen-image-1")
    pipeline.save_pretrained(path)
    return path


def test_the_folder_is_qwen_image_1(folder):
    assert family_of(folder).name == "qwenimage1"


def test_sample_draws_what_the_pipeline_draws(pipeline, folder, tmp_path):
    """Guided, with the length of the conditional prediction kept."""

    def drawn_by(latents, guidance_scale, **given):
        packed = pipeline._pack_latents(latents, *latents.shape)
        return pipeline(latents=packed, true_cfg_scale=guidance_scale, negative_prompt="", **given)

    check_sample(folder, tmp_path / "image.png", (8, 12, 16), drawn_by)


def test_the_training_loss_is_that_of_diffusers(pipeline, folder, off):
    model = FAMILIES["qwenimage1"].open(opening(folder))
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((2, 8, 12, 16)).astype(np.float32) for _ in range(2))
    levels = np.array([0.3, 0.875], np.float32)
    (encoder,) = model.text
    examples = read_alone(encoder, (PROMPT, LONGER))
    cond = {name: tensor(a) for name, a in collate(examples, model.paddings).items()}
    found = training_loss(model, cond, latents, noise, levels)

    with torch.no_grad():
        states, mask = pipeline.encode_prompt([PROMPT, LONGER])
        for ours, theirs, seen in zip(examples, states, mask.bool(), strict=True):
            assert off(ours["qwen3"], theirs[seen]) < 1e-5
        images, noises = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (latents, noise))
        sigmas = torch.from_numpy(levels)
        at = sigmas[:, None, None, None]
        predicted = pipeline.transformer(
            pipeline._pack_latents((1.0 - at) * images + at * noises, 2, 16, 8, 12),
            states,
            mask,
            sigmas,
            [[(1, 4, 6)]] * 2,
            return_dict=False,
        )[0]
        target = pipeline._pack_latents(noises - images, 2, 16, 8, 12)
        expected = float(torch.mean((predicted.float() - target) ** 2))
    assert abs(found - expected) < 1e-5 * expected
    assert expected > 0.1


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("transformer", {"num_attention_heads": 2}, "num_attention_heads is 2, expected 4"),
        ("transformer", {"use_layer3d_rope": True}, "use_layer3d_rope is True, expected False"),
        ("text_encoder", {"text_config": {"hidden_act": "gelu", "num_attention_heads": 4}}, "hidden_act is 'gelu'"),
        ("vae", {"attn_scales": [1.0]}, "attn_scales is"),
    ],
)
def test_a_config_that_says_something_else_is_refused(folder, part, change, words):
    check_refused_config("qwenimage1", folder, part, change, words)
