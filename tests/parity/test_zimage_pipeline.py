"""A small Z-Image pipeline, read from the folder that diffusers saves: the same image, and the same training loss."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from flame_train.data.padding import collate
from flame_train.engine import tensor
from flame_train.models.registry import FAMILIES, family_of
from tests.parity.pipelines import (
    PROMPT,
    check_accepted,
    check_refused_config,
    check_sample,
    flux_vae,
    opening,
    qwen_tokenizer,
    random,
    read_alone,
    training_loss,
)
from tests.tools.test_sample import PLAIN

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    tokenizer = qwen_tokenizer(tmp_path_factory.mktemp("qwen"), TEMPLATE)
    text = transformers.Qwen3Config(
        vocab_size=288,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )
    transformer = diffusers.ZImageTransformer2DModel(
        dim=96,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=3,
        n_kv_heads=3,
        cap_feat_dim=32,
        axes_dims=[8, 12, 12],
        axes_lens=[1024, 64, 64],
    )
    made = diffusers.ZImagePipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0),
        flux_vae(),
        random(transformers.Qwen3ForCausalLM(text), 1),
        tokenizer,
        random(transformer, 2),
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("zimage")
    pipeline.save_pretrained(path)
    return path


def test_the_folder_is_z_image(folder):
    assert family_of(folder).name == "zimage"


def test_sample_draws_what_the_pipeline_draws(pipeline, folder, tmp_path):
    added = PLAIN["guidance_scale"] - 1.0  # diffusers counts what is added to the conditional prediction
    check_sample(folder, tmp_path / "image.png", (8, 12, 16), partial(pipeline, negative_prompt=""), added)


def test_the_training_loss_is_that_of_diffusers_script(pipeline, folder, off):
    model = FAMILIES["zimage"].open(opening(folder))
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((2, 8, 12, 16)).astype(np.float32) for _ in range(2))
    levels = np.array([0.3, 0.875], np.float32)
    texts = [PROMPT, "a much longer caption, which takes more than thirty-two tokens of bytes"]
    examples = read_alone(model.text[0], texts)
    cond = {name: tensor(a) for name, a in collate(examples, model.paddings).items()}
    found = training_loss(model, cond, latents, noise, levels)

    captions, _ = pipeline.encode_prompt(texts, do_classifier_free_guidance=False)
    for ours, theirs in zip(examples, captions, strict=True):
        assert off(ours["qwen3"], theirs.detach()) < 1e-5
    with torch.no_grad():
        images, noises = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (latents, noise))
        sigmas = torch.from_numpy(levels)[:, None, None, None]
        noised = (1.0 - sigmas) * images + sigmas * noises
        told = (1000 - torch.from_numpy(levels) * 1000) / 1000
        predicted = pipeline.transformer(list(noised.unsqueeze(2).unbind(0)), told, captions, return_dict=False)[0]
        predicted = -torch.stack(predicted, dim=0).squeeze(2)
        expected = float(torch.mean((predicted.float() - (noises - images).float()) ** 2))
    assert abs(found - expected) < 1e-5 * expected
    assert expected > 0.1


def test_the_folder_is_accepted(folder, tmp_path, monkeypatch):
    """Its image, and that with the LoRA it trained, beside the pipeline's."""
    layers = 2 * 4  # queries, keys and values are one layer here
    check_accepted(monkeypatch, folder, tmp_path / "out", layers, "--set", "data.bucket_step=32")


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("transformer", {"n_kv_heads": 1}, "n_kv_heads is 1, expected 3"),
        ("transformer", {"axes_dims": [16, 8, 8], "norm_eps": 1e-6}, "norm_eps is 1e-06"),
        ("vae", {"scaling_factor": 0.18215}, "scaling_factor is 0.18215"),
        ("text_encoder", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_a_config_that_says_something_else_is_refused(folder, part, change, words):
    check_refused_config("zimage", folder, part, change, words)
