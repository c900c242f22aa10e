"""A small Anima, read from the folders that diffusers saves: the same image, and the same training loss."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from flame_train.engine import no_grad, tensor
from flame_train.engine.random import Rng
from flame_train.errors import ModelFileError
from flame_train.models.registry import FAMILIES, NOTHING_NAMED, family_of
from flame_train.run.sampling.draw import SAMPLE_NOISE
from flame_train.text_encoders.qwen3.tokenizer import bytes_alone
from flame_train.text_encoders.t5.tokenizer import SHIPPED
from flame_train.tools.sample import sample
from tests.parity.pipelines import check_accepted, random, training_loss
from tests.tools.test_sample import PLAIN

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

PROMPT = "a red circle"


def t5_tokenizer(folder):
    """transformers' fast tokenizer of T5's vocabulary, which ends a text with its end token."""
    from tokenizers import processors

    file = folder / "t5.json"
    file.write_bytes(gzip.decompress(SHIPPED.read_bytes()))
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), pad_token="<pad>", eos_token="</s>")
    made.backend_tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return made


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    here = pytest.importorskip("diffusers.models.transformers.transformer_cosmos")
    functional = SimpleNamespace(resize=lambda x, size, interpolation: torch.nn.functional.interpolate(x, size))
    if not hasattr(here, "transforms"):  # torchvision's one function that it calls, on a mask of zeros
        here.transforms = SimpleNamespace(functional=functional, InterpolationMode=SimpleNamespace(NEAREST="nearest"))
    folder = tmp_path_factory.mktemp("vocabularies")
    (folder / "tokenizer.json").write_text(bytes_alone())
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
    made = diffusers.AnimaAutoBlocks().init_pipeline()
    made.update_components(
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|endoftext|>"
        ),
        t5_tokenizer=t5_tokenizer(folder),
        text_encoder=random(transformers.Qwen3Model(text), 1),
        text_conditioner=random(
            diffusers.AnimaTextConditioner(
                source_dim=32,
                target_dim=24,
                model_dim=32,
                num_layers=2,
                num_attention_heads=2,
                mlp_ratio=2.0,
                min_sequence_length=16,
            ),
            2,
        ),
        transformer=random(
            diffusers.CosmosTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=24,
                num_layers=2,
                mlp_ratio=2.0,
                text_embed_dim=24,
                adaln_lora_dim=8,
                rope_scale=(1.0, 3.0, 4.0),
                extra_pos_embed_type=None,
            ),
            3,
        ),
        vae=random(diffusers.AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1), 4),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("anima")
    pipeline.save_pretrained(str(path))
    return path


def opening(folder):
    return replace(NOTHING_NAMED, base=folder)


def test_the_folder_is_anima(folder):
    assert family_of(folder).name == "anima"


def test_sample_draws_what_the_pipeline_draws(pipeline, folder, tmp_path):
    """From the same noise, guided, in fp32: within rounding of 8 bits."""
    noise = Rng(np, PLAIN["seed"], 0, np.zeros(1, np.int64)).normal(SAMPLE_NOISE, (8, 12, 16))
    pipeline.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=PLAIN["guidance_scale"]))
    expected = pipeline(
        prompt=PROMPT,
        num_inference_steps=PLAIN["steps"],
        height=PLAIN["height"],
        width=PLAIN["width"],
        latents=torch.from_numpy(np.array(noise, np.float32)).permute(0, 3, 1, 2).unsqueeze(2),
        output="images",
    )[0]
    expected = np.asarray(expected).astype(float)
    sample(str(folder), [PROMPT], tmp_path / "image.png", **PLAIN)
    with Image.open(tmp_path / "image.png") as drawn:
        found = np.asarray(drawn).astype(float)
    assert expected.std() > 5
    assert np.abs(found - expected).max() <= 1


def test_the_training_loss_is_that_of_diffusers_parts(pipeline, folder, off):
    """With captions of several lengths, in a batch: the text, and the loss of the flow that it gives."""
    model = FAMILIES["anima"].open(opening(folder))
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((2, 8, 12, 16)).astype(np.float32) for _ in range(2))
    levels = np.array([0.3, 0.875], np.float32)
    texts = [PROMPT, "a much longer caption, of more than sixteen tokens: blue squares beside a green triangle, 日本"]
    (encoder,) = model.text
    network = encoder.load(device="cpu", dtype="fp32", precision="auto")
    rows = [encoder.inputs(text) for text in texts]
    with no_grad():
        made = encoder.encode(network, {name: tensor(np.stack([row[name] for row in rows])) for name in rows[0]})
    context = made["anima"].numpy()

    cond = {"anima": tensor(context)}
    found = training_loss(model, cond, latents, noise, levels)

    encoded = pipeline.blocks.sub_blocks["text_encoder"].encode_prompt(
        pipeline, texts, prepare_unconditional_embeds=False, device="cpu"
    )
    with torch.no_grad():
        text = pipeline.text_conditioner(
            encoded["qwen_prompt_embeds"],
            encoded["t5_input_ids"],
            encoded["t5_attention_mask"],
            encoded["qwen_attention_mask"],
        )
        for ours, theirs, row in zip(context, text, rows, strict=True):
            own = encoder.rows(row)
            assert off(ours[:own], theirs[:own]) < 1e-5
            assert not ours[own:].any()
        # ours is filled up to the length that captions are given, diffusers' to the least
        text = torch.nn.functional.pad(text, (0, 0, 0, context.shape[1] - text.shape[1]))
        images, noises = (torch.from_numpy(a).permute(0, 3, 1, 2).unsqueeze(2) for a in (latents, noise))
        sigmas = torch.from_numpy(levels)[:, None, None, None, None]
        noised = (1.0 - sigmas) * images + sigmas * noises
        predicted = pipeline.transformer(
            noised, torch.from_numpy(levels), text, padding_mask=torch.zeros(1, 1, 64, 96), return_dict=False
        )[0]
        expected = float(torch.mean((predicted - (noises - images)) ** 2))
    assert abs(found - expected) < 1e-5 * expected
    assert expected > 0.1


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("transformer", {"num_attention_heads": 3}, "num_attention_heads is 3, expected 2"),
        ("transformer", {"extra_pos_embed_type": "learnable"}, "extra_pos_embed_type is 'learnable'"),
        ("text_conditioner", {"use_layer_norm": True}, "use_layer_norm is True"),
        ("vae", {"latents_mean": [0.0]}, "latents_mean: expected 16 numbers"),
        ("text_encoder", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_a_config_that_says_something_else_is_refused(folder, part, change, words):
    path = folder / part / "config.json"
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole) | change))
    try:
        with pytest.raises(ModelFileError, match=words):
            FAMILIES["anima"].open(opening(folder))
    finally:
        path.write_text(whole)


@pytest.mark.proof
def test_the_folder_is_accepted(folder, tmp_path, monkeypatch):
    check_accepted(monkeypatch, folder, tmp_path / "out", 2 * 8, "--set", "data.bucket_step=32")
