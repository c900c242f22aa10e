"""A small Krea 2 pipeline, read from the folder that diffusers saves: the same image, and the same training loss."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flame_train.config.schema import LossSection, ModelSection
from flame_train.data.padding import collate
from flame_train.data.tokenizers.qwen import bytes_alone
from flame_train.engine import no_grad, tensor
from flame_train.engine.random import Rng
from flame_train.errors import ModelFileError
from flame_train.recipes import FAMILIES, NOTHING_NAMED, family_of
from flame_train.text_encoders.qwen3 import DESCRIBING
from flame_train.tools.sample import sample
from flame_train.training.preview import PREVIEW_NOISE
from tests.tools.test_sample import PLAIN

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

PROMPT = "a red circle"
LONGER = "a much longer caption, which takes more than thirty-two tokens of bytes"
TAPS = [1, 2, 4]  # the last of them normalised


def random(module, seed):
    torch.manual_seed(seed)
    for p in module.parameters():
        p.data = torch.randn_like(p) * (0.05 if p.ndim > 1 else 0.2)
    return module.eval()


def text_encoder():
    text = {
        "vocab_size": 288, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    made = random(transformers.Qwen3VLModel(transformers.Qwen3VLConfig(text_config=text, vision_config=vision)), 1)
    for name, p in made.named_parameters():
        p.data += 1.0 if name.endswith("norm.weight") else 0.0
    return made


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "tokenizer.json").write_text(bytes_alone())
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|endoftext|>"
    )
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=64, num_layers=2, attention_head_dim=16, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=80, timestep_embed_dim=32, text_hidden_dim=32, num_text_layers=3, text_num_attention_heads=4,
        text_num_key_value_heads=4, text_intermediate_size=40, num_layerwise_text_blocks=1, num_refiner_text_blocks=1,
        axes_dims_rope=(8, 4, 4), rope_theta=500.0, norm_eps=1e-4,
    )  # fmt: skip
    vae = random(diffusers.AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1), 0)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=6400
    )
    made = diffusers.Krea2Pipeline(
        scheduler, vae, text_encoder(), tokenizer, random(transformer, 2), text_encoder_select_layers=TAPS
    )
    # a vocabulary of bytes makes more tokens of the instruction than the published one
    made.prompt_template_encode_start_idx = len(tokenizer(made.prompt_template_encode_prefix).input_ids)
    made.prompt_template_encode_num_suffix_tokens = len(tokenizer(made.prompt_template_encode_suffix).input_ids)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("krea2")
    pipeline.save_pretrained(path)
    return path


def opened(folder):
    return FAMILIES["krea2"].open(replace(NOTHING_NAMED, base=folder))


def test_the_folder_is_krea_2(folder):
    assert family_of(folder).name == "krea2"


def test_sample_draws_what_the_pipeline_draws(pipeline, folder, tmp_path):
    """From the same noise, guided, in fp32: within rounding of 8 bits."""
    noise = Rng(np, PLAIN["seed"], 0, np.zeros(1, np.int64)).normal(PREVIEW_NOISE, (8, 12, 16))
    latents = torch.from_numpy(np.array(noise, np.float32)).permute(0, 3, 1, 2)
    expected = pipeline(
        PROMPT,
        negative_prompt="",
        num_inference_steps=PLAIN["steps"],
        guidance_scale=PLAIN["guidance_scale"] - 1.0,  # diffusers counts what is added to the conditional prediction
        height=PLAIN["height"],
        width=PLAIN["width"],
        latents=pipeline._pack_latents(latents, 1, 16, 8, 12),
    ).images[0]
    expected = np.asarray(expected).astype(float)
    sample(str(folder), [PROMPT], tmp_path / "image.png", **PLAIN)
    with Image.open(tmp_path / "image.png") as drawn:
        found = np.asarray(drawn).astype(float)
    assert expected.std() > 5
    assert np.abs(found - expected).max() <= 1


def test_the_training_loss_is_that_of_diffusers(pipeline, folder, off):
    model = opened(folder)
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((2, 8, 12, 16)).astype(np.float32) for _ in range(2))
    levels = np.array([0.3, 0.875], np.float32)
    (encoder,) = model.text
    network, examples = encoder.load(device="cpu", dtype="fp32", precision="auto"), []
    for text in (PROMPT, LONGER):
        row = encoder.inputs(text)
        with no_grad():
            made = encoder.encode(network, {name: tensor(a[None]) for name, a in row.items()})
        examples.append(encoder.without_padding(row, {"qwen3": made["qwen3"].numpy()[0]}))
    objective, denoiser = (
        model.objective(ModelSection(), LossSection(), "cpu"),
        model.load_denoiser(device="cpu", dtype="fp32"),
    )
    x, n, t = tensor(latents), tensor(noise), tensor(levels)
    cond = {name: tensor(a) for name, a in collate(examples, model.paddings).items()}
    with no_grad():
        found = objective.losses(denoiser.denoise(objective.noised(x, n, t), t, cond), x, n, t).mean().item()

    with torch.no_grad():
        states, mask = pipeline.encode_prompt([PROMPT, LONGER], max_sequence_length=512)
        for ours, theirs, seen in zip(examples, states, mask, strict=True):
            assert off(ours["qwen3"], theirs[seen].flatten(1)) < 1e-5
        images, noises = (torch.from_numpy(a).permute(0, 3, 1, 2) for a in (latents, noise))
        sigmas = torch.from_numpy(levels)
        at = sigmas[:, None, None, None]
        predicted = pipeline.transformer(
            pipeline._pack_latents((1.0 - at) * images + at * noises, 2, 16, 8, 12),
            states,
            sigmas,
            pipeline.prepare_position_ids(512, 4, 6, "cpu"),
            mask,
            return_dict=False,
        )[0]
        target = pipeline._pack_latents(noises - images, 2, 16, 8, 12)
        expected = float(torch.mean((predicted.float() - target) ** 2))
    assert abs(found - expected) < 1e-5 * expected
    assert expected > 0.1


def test_a_caption_that_is_cut_ends_as_the_pipelines(pipeline, folder):
    """The message's end stands behind it, and the instruction before it is not among the rows."""
    (encoder,) = opened(folder).text
    short = replace(encoder, length=64)
    ids, seen = (short.inputs(LONGER)[name] for name in ("ids", "mask"))
    prefix, ends = pipeline.prompt_template_encode_start_idx, pipeline.prompt_template_encode_num_suffix_tokens
    text = pipeline.tokenizer(
        pipeline.prompt_template_encode_prefix + LONGER, truncation=True, max_length=64 + prefix - ends
    ).input_ids
    assert list(ids) == text + pipeline.tokenizer(pipeline.prompt_template_encode_suffix).input_ids
    assert seen.all()
    assert short.rows({"mask": seen}) == 64
    assert short.overlong(LONGER)
    assert not short.overlong(PROMPT)


def test_the_instruction_has_the_published_length():
    from flame_train.data.tokenizers.qwen import QwenTokenizer

    assert (DESCRIBING.unseen(QwenTokenizer()), len(QwenTokenizer().encode(DESCRIBING.after))) == (34, 5)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("transformer/config", {"num_key_value_heads": 1}, "num_key_value_heads is 1, expected 2"),
        ("transformer/config", {"axes_dims_rope": [16, 8, 8]}, r"axes_dims_rope is \[16, 8, 8\]"),
        ("vae/config", {"attn_scales": [1.0]}, "attn_scales is"),
        ("text_encoder/config", {"text_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
        (
            "model_index",
            {"text_encoder_select_layers": [1, 2]},
            "with states after 3 of its layers, found width 32, 4 layers, and states after .1, 2.",
        ),
        ("model_index", {"text_encoder_select_layers": [1, 2, 9]}, "4 layers, and states after .1, 2, 9."),
        ("model_index", {"patch_size": 1}, "patch_size is 1"),
    ],
)
def test_a_config_that_says_something_else_is_refused(folder, part, change, words):
    path = folder / f"{part}.json"
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole) | change))
    try:
        with pytest.raises(ModelFileError, match=words):
            opened(folder)
    finally:
        path.write_text(whole)
