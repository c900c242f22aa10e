"""A small Qwen-Image 2.1 pipeline, read from the folder of its parts: the same image, and the same training loss."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from flame_train.config.schema import ModelSection
from flame_train.data.buckets import Placement
from flame_train.data.padding import collate
from flame_train.data.samples import EncoderInput
from flame_train.data.views import View, ViewedImage
from flame_train.engine import no_grad, tensor
from flame_train.errors import ConfigError
from flame_train.models.common.control import by_name
from flame_train.models.qwenimage import family as qwenimage
from flame_train.models.qwenimage.family import control_placement
from flame_train.models.registry import FAMILIES, family_of
from flame_train.text_encoders.qwen3.encoder import COMPREHENDING
from flame_train.text_encoders.qwen3.tokenizer import QwenTokenizer
from tests.parity.pipelines import (
    PROMPT,
    check_accepted,
    check_refused_config,
    check_sample,
    control_images,
    opening,
    places_of_pixels,
    qwen3_vl,
    qwen_tokenizer,
    random,
    training_loss,
)

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

LONGER = "a much longer caption, which takes more than thirty-two tokens of bytes"
ANY_SIZE = {"shortest_edge": 32**2, "longest_edge": 4096**2}  # in pixels
PARTS = ("transformer", "vae", "text_encoder", "scheduler")


class Processor:
    """Qwen3-VL's processor without its half for films, which needs torchvision."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        how = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        self.image_processor = transformers.Qwen2VLImageProcessor(**how, size=ANY_SIZE)

    def apply_chat_template(self, messages, tokenize, return_dict):
        ((role, content),) = ((message["role"], message["content"][0]["text"]) for message in messages)
        return [self.tokenizer(f"<|im_start|>{role}\n{content}<|im_end|>\n").input_ids]

    def __call__(self, text, padding, return_tensors, images=None, padding_side="right"):
        made = {} if images is None else self.image_processor(images=images, return_tensors="pt")
        counts = iter(int(grid.prod()) // 4 for grid in made.get("image_grid_thw", ()))
        whole = [re.sub(r"<\|image_pad\|>", lambda found: found[0] * next(counts), each) for each in text]
        read = self.tokenizer(whole, padding=padding, padding_side=padding_side, return_tensors=return_tensors)
        if images is not None:
            place = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
            read["mm_token_type_ids"] = (read["input_ids"] == place).int()
        return transformers.BatchFeature({**read, **made})


def text_encoder(tokenizer):
    kind = transformers.Qwen3VLForConditionalGeneration
    return qwen3_vl(kind, 3, **places_of_pixels(tokenizer))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    transformer = diffusers.QwenImage21Transformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        context_in_dim=32,
        axes_dims_rope=(8, 4, 4),
        eps=1e-5,
    )
    vae = diffusers.AutoencoderKLQwenImage21(base_dim=8, decoder_base_dim=12, num_res_blocks=1)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02
    )
    processor = Processor(qwen_tokenizer(tmp_path_factory.mktemp("qwen"), None))
    text = text_encoder(processor.tokenizer)
    made = diffusers.QwenImage21Pipeline(scheduler, random(vae, 4), text, processor, random(transformer, 2))
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen-image")
    for name in PARTS:
        getattr(pipeline, name).save_pretrained(path / name)
    pipeline.processor.tokenizer.save_pretrained(path / "processor")
    (path / "model_index.json").write_text(json.dumps({"_class_name": "QwenImage21Pipeline", "sample_sigmas": None}))
    return path


def test_the_folder_is_qwen_image(folder):
    assert family_of(folder).name == "qwenimage"


def test_sample_draws_what_the_pipeline_draws(pipeline, folder, tmp_path):
    """With an empty negative prompt, of which the pipeline makes a space; its alpha is left out."""

    def drawn_by(latents, guidance_scale, **given):
        packed = pipeline._pack_latents(latents, *latents.shape)
        (image,) = pipeline(latents=packed, true_cfg_scale=guidance_scale, negative_prompt="", **given).images
        assert image.mode == "RGBA"
        return SimpleNamespace(images=[image.convert("RGB")])

    check_sample(folder, tmp_path / "image.png", (4, 6, 64), drawn_by)


@pytest.mark.parametrize("sizes", [[(100, 70)], [(65, 90), (64, 64)]], ids=["one image", "two images"])
def test_sample_draws_what_the_pipeline_draws_of_control_images(pipeline, folder, tmp_path, monkeypatch, sizes):
    """The pipeline scales them to as many pixels as `output_resolution` says."""
    monkeypatch.setattr(qwenimage, "control_placement", lambda size, _: control_placement(size, 96))

    def drawn_by(latents, guidance_scale, **given):
        packed = pipeline._pack_latents(latents, *latents.shape)
        how = {"true_cfg_scale": guidance_scale, "negative_prompt": "", "output_resolution": 96}
        (image,) = pipeline(latents=packed, **how, **given).images
        return SimpleNamespace(images=[image.convert("RGB")])

    check_sample(folder, tmp_path / "image.png", (4, 6, 64), drawn_by, control=control_images(tmp_path, *sizes))


@pytest.mark.parametrize("size", [(100, 70), (2000, 1500), (1024, 1024), (90, 1000)])
def test_a_control_image_is_scaled_as_in_the_pipeline(pipeline, size):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    wide, tall, _ = diffusers.pipelines.qwenimage21.pipeline_qwenimage21.calculate_dimensions(
        512 * 512, size[0] / size[1]
    )
    expected = pipeline.image_processor.resize(Image.fromarray(pixels).convert("RGBA"), width=wide, height=tall)
    found = View(control_placement(size[::-1], 512)).pixels(pixels)
    np.testing.assert_array_equal(found, np.asarray(expected.convert("RGB")))


@pytest.mark.parametrize(
    "sizes", [[], [(96, 64), (64, 96)], [(32, 32)] * 11], ids=["no images", "two images", "eleven images"]
)
def test_the_training_loss_is_that_of_diffusers(pipeline, folder, tmp_path, off, sizes):
    """Of captions of two lengths and of none, each beside control images of its own; and the text's states."""
    model = FAMILIES["qwenimage"].open(opening(folder))
    model = model.with_images() if sizes else model
    texts = PROMPT, LONGER, ""
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((3, 4, 6, 64)).astype(np.float32) for _ in range(2))
    levels = np.array([0.3, 0.875, 0.5], np.float32)
    images = [[rng.integers(0, 256, (h, w, 3), np.uint8) for w, h in sizes] for _ in texts]
    (encoder,) = model.text
    network, vae = encoder.load(device="cpu", dtype="fp32", precision="auto"), model.vae.load("fp32", "cpu", 0)
    examples = []
    for text, own in zip(texts, images, strict=True):
        files = [ViewedImage(tmp_path, "", View(Placement(x.shape[:2], x.shape[:2], x.shape[:2], 0, 0))) for x in own]
        given = iter(own)
        row = encoder.read(EncoderInput(text, tuple(files)), lambda _, given=given: next(given))
        with no_grad():
            made = encoder.encode(network, {name: tensor(a[None]) for name, a in row.items()})
            clean = [vae.encoder().start([vae.inputs(x)])()[0]["mean"] for x in own]
        kept = encoder.without_padding(row, {"qwen3": made["qwen3"].numpy()[0]})
        assert (
            len(kept["qwen3"])
            == encoder.rows_of(EncoderInput(text, tuple(files)))
            == int(made["qwen3_rows"].numpy()[0])
        )
        examples.append(kept | by_name(model.vae.seen(x) for x in clean))
    cond = {name: tensor(a) for name, a in collate(examples, model.paddings).items()}
    found = training_loss(model, cond, latents, noise, levels)

    losses = []
    for text, own, example, image, noised, level in zip(texts, images, examples, latents, noise, levels, strict=True):
        opaque = [Image.fromarray(each).convert("RGBA") for each in own]
        with torch.no_grad():
            states, mask, slots = pipeline.encode_prompt(text, opaque or None)
            assert mask is None
            assert off(example["qwen3"], states[0, ~slots[0]]) < 1e-5
            seen = [pipeline.image_processor.preprocess(each).unsqueeze(2) for each in opaque]
            _, clean = pipeline.prepare_latents(seen or None, 1, 64, 64, 96, torch.float32, "cpu", None)
            begin, end = torch.from_numpy(image).reshape(1, 24, 64), torch.from_numpy(noised).reshape(1, 24, 64)
            noisy = (1.0 - level) * begin + level * end
            predicted = pipeline.transformer(
                noisy if clean is None else torch.cat([clean, noisy], dim=1),
                states,
                torch.tensor([level]),
                [[*((1, h // 16, w // 16) for w, h in sizes), (1, 4, 6)]],
                torch.cat([slots, slots.new_ones(1, 6)], dim=1),
                return_dict=False,
            )[0][:, -24:]
            losses.append(float(torch.mean((predicted.float() - (end - begin)) ** 2)))
    expected = float(np.mean(losses))
    assert abs(found - expected) < 1e-5 * expected
    assert expected > 0.1


def test_the_instruction_has_the_length_that_the_pipeline_drops(pipeline, folder):
    """With the published vocabulary too, where its last tokens are the message's beginning."""
    published = QwenTokenizer()
    assert pipeline._drop_idx == COMPREHENDING.unseen(QwenTokenizer(folder / "processor" / "tokenizer.json"))
    row = COMPREHENDING.row(published, "a cat", 32)
    kept = row.ids[COMPREHENDING.unseen(published) : int(row.mask.sum())]
    assert list(kept) == published.encode("<|im_start|>user\na cat<|im_end|>\n<|im_start|>assistant\n")


def test_a_turbo_is_sampled_at_its_levels_and_refused_for_training(folder):
    file, family = folder / "model_index.json", FAMILIES["qwenimage"]
    usual = file.read_text()
    file.write_text(json.dumps(json.loads(usual) | {"sample_sigmas": [1.0, 0.6, 0.2]}))
    try:
        model = family.open(opening(folder))
        assert (model.sampling_defaults.steps, model.sampling_defaults.guidance_scale) == (3, 1.0)
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
        scheduler.set_timesteps(sigmas=[1.0, 0.6, 0.2], mu=np.log(model.shift(24)))
        np.testing.assert_allclose(model.sigmas(3, 24), scheduler.sigmas.numpy(), atol=1e-6)
        with pytest.raises(ConfigError, match="states noise levels of few steps, so it is distilled"):
            family.refuse_distilled(folder, ModelSection())
    finally:
        file.write_text(usual)
    family.refuse_distilled(folder, ModelSection())


@pytest.mark.proof
def test_the_folder_is_accepted(pipeline, folder, tmp_path, monkeypatch):
    """Its image, and that with the LoRA it trained, beside the pipeline's; loading that would need torchvision."""
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", lambda *args, **kwargs: pipeline)
    check_accepted(monkeypatch, folder, tmp_path / "out", 2 * 4, "--set", "data.bucket_step=32")


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("transformer", {"num_attention_heads": 2}, "num_attention_heads is 2, expected 4"),
        ("transformer", {"axes_dims_rope": [16, 8, 8]}, r"axes_dims_rope is \[16, 8, 8\]"),
        ("transformer", {"patch_size": 2}, "patch_size is 2, expected 1"),
        ("transformer", {"causal_condition": False}, "causal_condition is False, expected True"),
        ("vae", {"attn_scales": [1.0]}, "attn_scales is"),
        ("text_encoder", {"text_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
        ("scheduler/scheduler_config.json", {"use_dynamic_shifting": False}, "use_dynamic_shifting is False"),
    ],
)
def test_a_config_that_says_something_else_is_refused(folder, part, change, words):
    check_refused_config("qwenimage", folder, part, change, words)
