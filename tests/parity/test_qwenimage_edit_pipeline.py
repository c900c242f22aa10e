"""Small Qwen-Image-Edit 2509 and 2511, read from the folder of their parts: the pipeline's image, and the same loss.

The pipeline does not tell transformers which tokens are of images, which then have the wrong places; here it does.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flame_train.config.schema import ModelSection, TextEncodersSection
from flame_train.data.buckets import Placement
from flame_train.data.padding import collate
from flame_train.data.samples import EncoderInput
from flame_train.data.views import View, ViewedImage
from flame_train.engine import no_grad, tensor
from flame_train.errors import ConfigError
from flame_train.models.common.control import by_name
from flame_train.models.qwenimage.family import control_placement
from flame_train.models.qwenimage1 import family as qwenimage1
from flame_train.models.registry import FAMILIES, family_of
from flame_train.text_encoders.qwen3.encoder import EDITING
from flame_train.text_encoders.qwen3.tokenizer import QwenTokenizer
from flame_train.text_encoders.qwen3.vision_encoder import STATES_KEPT_2_5
from tests.parity.pipelines import (
    PROMPT,
    check_accepted,
    check_sample,
    control_images,
    opening,
    qwen_tokenizer,
    random,
    training_loss,
)
from tests.parity.test_qwenimage1_pipeline import text_encoder
from tests.parity.test_qwenimage_pipeline import PARTS, Processor

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
HERE = pytest.importorskip("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

ROOM = TextEncodersSection(qwen3_tokens=1024)
LONGER = "a much longer caption, which takes more than thirty-two tokens of bytes"


@pytest.fixture(scope="module", params=[False, True], ids=["2509", "2511"])
def pipeline(request, tmp_path_factory):
    tokenizer = qwen_tokenizer(tmp_path_factory.mktemp("qwen"), None)
    transformer = diffusers.QwenImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
        zero_cond_t=request.param,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02
    )
    place = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    text = text_encoder(image_token_id=place)
    usual = text.forward

    @functools.wraps(usual)
    def told(input_ids, **given):
        return usual(input_ids=input_ids, **given | {"mm_token_type_ids": (input_ids == place).int()})

    text.forward = told
    processor = Processor(tokenizer)
    size = {"shortest_edge": 3136, "longest_edge": 12845056}
    processor.image_processor = transformers.Qwen2VLImageProcessor(size=size)
    vae = random(diffusers.AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1), 4)
    made = diffusers.QwenImageEditPlusPipeline(scheduler, vae, text, tokenizer, processor, random(transformer, 2))
    # it counts the published vocabulary's tokens of its template; one of bytes has more
    start = made.prompt_template_encode.partition("{}")[0]
    made.prompt_template_encode_start_idx = len(tokenizer(start).input_ids)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("edited")
    for name in PARTS:
        getattr(pipeline, name).save_pretrained(path / name)
    pipeline.tokenizer.save_pretrained(path / "tokenizer")
    (path / "model_index.json").write_text(json.dumps({"_class_name": "QwenImageEditPlusPipeline"}))
    return path


@pytest.fixture
def model(folder):
    return FAMILIES["qwenimage1"].open(replace(opening(folder), text=ROOM))


def test_the_folder_says_which_it_is(pipeline, folder, model):
    assert family_of(folder).name == "qwenimage1"
    assert model.edit == ("2511" if pipeline.transformer.config.zero_cond_t else "2509")
    (encoder,) = model.text
    assert encoder.template.before + "{}" + encoder.template.after == pipeline.prompt_template_encode


@pytest.mark.parametrize("sizes", [[(128, 64)], [(96, 96), (64, 128)]], ids=["one image", "two images"])
def test_sample_draws_what_the_pipeline_draws(pipeline, folder, tmp_path, monkeypatch, sizes):
    """Guided; control images are scaled to some 96 x 96 pixels, as which they come, and to 384 x 384 for the text."""
    monkeypatch.setattr(qwenimage1, "control_placement", lambda size, _: control_placement(size, 96))
    monkeypatch.setattr(HERE, "VAE_IMAGE_SIZE", 96 * 96)

    def drawn_by(latents, guidance_scale, **given):
        packed = pipeline._pack_latents(latents, *latents.shape)
        return pipeline(latents=packed, true_cfg_scale=guidance_scale, negative_prompt=" ", **given)

    check_sample(folder, tmp_path / "image.png", (8, 12, 16), drawn_by, control=control_images(tmp_path, *sizes))


@pytest.mark.proof
@pytest.mark.parametrize("pipeline", [True], ids=["2511"], indirect=True)
def test_the_folder_is_accepted(pipeline, folder, tmp_path, monkeypatch):
    """Its image, and that with the LoRA it trained, beside the pipeline's; loading that would need torchvision."""
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", lambda *args, **kwargs: pipeline)
    room = "--set", "text_encoders.qwen3_tokens=1024"
    check_accepted(monkeypatch, folder, tmp_path / "out", 2 * 8, "--controls", "1", *room)


@pytest.mark.parametrize("size", [(100, 70), (2000, 1500), (1024, 1024), (90, 1000)])
def test_what_the_text_encoder_reads_is_scaled_as_in_the_pipeline(pipeline, size):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    wide, tall = HERE.calculate_dimensions(HERE.CONDITION_IMAGE_SIZE, size[0] / size[1])
    first = pipeline.image_processor.resize(Image.fromarray(pixels), tall, wide)
    given = pipeline.processor.image_processor(images=[first], return_tensors="pt")
    found = STATES_KEPT_2_5.scaled(pixels)
    assert [1, *(side // 14 for side in found.shape[:2])] == given.image_grid_thw[0].tolist()
    again = pipeline.processor.image_processor(images=[Image.fromarray(found)], return_tensors="pt")
    assert float((again.pixel_values - given.pixel_values).abs().max()) < 2 / 255 / 0.26  # it may scale by PyTorch's


@pytest.mark.parametrize("sizes", [[], [(96, 64)], [(96, 64), (32, 96), (64, 64)]], ids=["none", "one", "three"])
def test_the_training_loss_is_that_of_diffusers(pipeline, model, tmp_path, off, sizes):
    """Of captions of two lengths and of none, each beside control images of its own; and the text's states."""
    model = model.with_images() if sizes else model
    texts = PROMPT, LONGER, ""
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((3, 8, 12, 16)).astype(np.float32) for _ in range(2))
    levels = np.array([0.3, 0.875, 0.5], np.float32)
    images = [[rng.integers(0, 256, (h, w, 3), np.uint8) for w, h in sizes] for _ in texts]
    (encoder,) = model.text
    network, vae = encoder.load(device="cpu", dtype="fp32", precision="auto"), model.vae.load("fp32", "cpu", 0)
    examples = []
    for text, own in zip(texts, images, strict=True):
        files = [ViewedImage(tmp_path, "", View(Placement(x.shape[:2], x.shape[:2], x.shape[:2], 0, 0))) for x in own]
        given, reading = iter(own), EncoderInput(text, tuple(files))
        row = encoder.read(reading, lambda _, given=given: next(given))
        with no_grad():
            made = encoder.encode(network, {name: tensor(a[None]) for name, a in row.items()})
            clean = [vae.encoder().start([vae.inputs(x)])()[0]["mean"] for x in own]
        kept = encoder.without_padding(row, {"qwen3": made["qwen3"].numpy()[0]})
        assert len(kept["qwen3"]) == encoder.rows_of(reading) == int(made["qwen3_rows"].numpy()[0])
        examples.append(kept | by_name(model.vae.seen(x) for x in clean))
    cond = {name: tensor(a) for name, a in collate(examples, model.paddings).items()}
    found = training_loss(model, cond, latents, noise, levels)

    losses = []
    for text, own, example, image, noised, level in zip(texts, images, examples, latents, noise, levels, strict=True):
        read = [Image.fromarray(STATES_KEPT_2_5.scaled(x)) for x in own]
        with torch.no_grad():
            states, mask = pipeline.encode_prompt(text or " ", read or None)
            assert mask is None
            assert off(example["qwen3"], states[0]) < 1e-5
            seen = [pipeline.image_processor.preprocess(Image.fromarray(x)).unsqueeze(2) for x in own]
            _, clean = pipeline.prepare_latents(seen or None, 1, 16, 64, 96, torch.float32, "cpu", None)
            begin, end = (
                pipeline._pack_latents(torch.from_numpy(x[None]).permute(0, 3, 1, 2), 1, 16, 8, 12)
                for x in (image, noised)
            )
            noisy = (1.0 - level) * begin + level * end
            predicted = pipeline.transformer(
                noisy if clean is None else torch.cat([noisy, clean], dim=1),
                states,
                mask,
                torch.tensor([level]),
                [[(1, 4, 6), *((1, h // 16, w // 16) for w, h in sizes)]],
                return_dict=False,
            )[0][:, :24]
            losses.append(float(torch.mean((predicted.float() - (end - begin)) ** 2)))
    expected = float(np.mean(losses))
    assert abs(found - expected) < 1e-5 * expected
    assert expected > 0.1


def test_the_instruction_has_the_length_that_the_pipeline_drops():
    """64 tokens of the published vocabulary, and a square image's states are 196 of those that are kept."""
    published = QwenTokenizer()
    assert EDITING.unseen(published) == 64
    assert [published.encode(x) for x in ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")] == [
        *([151655], [151652], [151653])
    ]
    assert [STATES_KEPT_2_5.places(size) for size in ((1024, 1024), (288, 512), (320, 448))] == [196, 180, 176]


def test_a_key_that_contradicts_the_folder_is_refused(pipeline, folder):
    wrong = replace(opening(folder), model=ModelSection(qwen_edit="2509"), text=ROOM)
    if pipeline.transformer.config.zero_cond_t:
        with pytest.raises(ConfigError, match=r'expected "2511" for .* got "2509"; remove it'):
            FAMILIES["qwenimage1"].open(wrong)
    else:
        assert FAMILIES["qwenimage1"].open(wrong).edit == "2509"
