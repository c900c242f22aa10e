"""A small Krea 2 pipeline, read from the folder that diffusers saves: the same image, and the same training loss."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flame_train.config.schema import TextEncodersSection
from flame_train.data.buckets import Placement
from flame_train.data.padding import collate
from flame_train.data.samples import EncoderInput
from flame_train.data.views import View, ViewedImage
from flame_train.engine import no_grad, tensor
from flame_train.models.registry import FAMILIES, family_of
from flame_train.text_encoders.qwen3.encoder import DESCRIBING
from flame_train.text_encoders.qwen3.tokenizer import QwenTokenizer
from tests.parity.pipelines import (
    PROMPT,
    check_accepted,
    check_refused_config,
    check_sample,
    opening,
    places_of_pixels,
    qwen3_vl,
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

LONGER = "a much longer caption, which takes more than thirty-two tokens of bytes"
LONG_TEXTS = TextEncodersSection(qwen3_tokens=512)
TAPS = [1, 2, 4]  # the last of them normalised


@pytest.fixture(scope="module", autouse=True)
def template_of_bytes():
    """The pipeline counts the published vocabulary's tokens of its template; one of bytes has more."""
    usual = diffusers.Krea2Pipeline.__init__

    @functools.wraps(usual)
    def init(self, *args, **kwargs):
        usual(self, *args, **kwargs)
        start, end = self.prompt_template_encode_prefix, self.prompt_template_encode_suffix
        self.prompt_template_encode_start_idx = len(self.tokenizer(start).input_ids)
        self.prompt_template_encode_num_suffix_tokens = len(self.tokenizer(end).input_ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusers.Krea2Pipeline, "__init__", init)
        yield


def text_encoder(tokenizer):
    return qwen3_vl(transformers.Qwen3VLModel, 4, **places_of_pixels(tokenizer))


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    tokenizer = qwen_tokenizer(tmp_path_factory.mktemp("qwen"), None)
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=64,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=80,
        timestep_embed_dim=32,
        text_hidden_dim=32,
        num_text_layers=3,
        text_num_attention_heads=4,
        text_num_key_value_heads=4,
        text_intermediate_size=40,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(8, 4, 4),
        rope_theta=500.0,
        norm_eps=1e-4,
    )
    vae = random(diffusers.AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1), 4)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=6400
    )
    made = diffusers.Krea2Pipeline(
        scheduler, vae, text_encoder(tokenizer), tokenizer, random(transformer, 2), text_encoder_select_layers=TAPS
    )
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def folder(pipeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("krea2")
    pipeline.save_pretrained(path)
    return path


def test_the_folder_is_krea_2(folder):
    assert family_of(folder).name == "krea2"


def test_sample_draws_what_the_pipeline_draws(pipeline, folder, tmp_path):
    def drawn_by(latents, **given):
        return pipeline(latents=pipeline._pack_latents(latents, *latents.shape), **given)

    added = PLAIN["guidance_scale"] - 1.0  # diffusers counts what is added to the conditional prediction
    check_sample(folder, tmp_path / "image.png", (8, 12, 16), functools.partial(drawn_by, negative_prompt=""), added)


@pytest.mark.parametrize("sizes", [[(300, 200)], [(1000, 700), (60, 90)]], ids=["one image", "two images"])
def test_a_caption_beside_control_images_has_the_states_of_ai_toolkit(pipeline, folder, tmp_path, off, sizes):
    """Its message, with images of at most 384 x 384 pixels; the states in their places are kept."""
    (encoder,) = FAMILIES["krea2"].open(replace(opening(folder), text=LONG_TEXTS)).with_images().text
    tokenizer, rng = pipeline.tokenizer, np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (height, width, 3), np.uint8) for width, height in sizes]
    views = [View(Placement(x.shape[:2], x.shape[:2], x.shape[:2], 0, 0)) for x in pixels]
    reading, given = EncoderInput(PROMPT, tuple(ViewedImage(tmp_path, "", view) for view in views)), iter(pixels)
    row = encoder.read(reading, lambda _: next(given))
    network = encoder.load(device="cpu", dtype="fp32", precision="auto")
    with no_grad():
        made = encoder.encode(network, {name: tensor(a[None]) for name, a in row.items()})
    kept = encoder.without_padding(row, {"qwen3": made["qwen3"].numpy()[0]})["qwen3"]
    assert len(kept) == encoder.rows_of(reading) == int(made["qwen3_rows"].numpy()[0])

    how = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processor = transformers.Qwen2VLImageProcessor(**how, size={"shortest_edge": 256**2, "longest_edge": 4096**2})
    read = [Image.fromarray(row[f"image{i}"]) for i in range(1, len(sizes) + 1)]
    images = processor(images=read, return_tensors="pt")
    near = []
    for x in pixels:
        scale = min(1.0, (384 * 384 / (x.shape[0] * x.shape[1])) ** 0.5)
        near.append(Image.fromarray(x).resize((round(x.shape[1] * scale), round(x.shape[0] * scale))))
    assert images.image_grid_thw.equal(processor(images=near, return_tensors="pt").image_grid_thw)
    counts = [int(grid.prod()) // 4 for grid in images.image_grid_thw]
    shown = "".join(
        f"Picture {i}: <|vision_start|>{'<|image_pad|>' * n}<|vision_end|>" for i, n in enumerate(counts, 1)
    )
    start, end = pipeline.prompt_template_encode_prefix, pipeline.prompt_template_encode_suffix
    ids = tokenizer(start + shown + PROMPT + end, return_tensors="pt").input_ids
    place = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    with torch.no_grad():
        found = pipeline.text_encoder(
            input_ids=ids, mm_token_type_ids=(ids == place).int(), output_hidden_states=True, **images
        ).hidden_states
    expected = torch.cat([found[tap] for tap in TAPS], dim=-1)[0, pipeline.prompt_template_encode_start_idx :]
    assert off(kept, expected) < 1e-5


def test_the_training_loss_is_that_of_diffusers(pipeline, folder, off):
    model = FAMILIES["krea2"].open(opening(folder))
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((2, 8, 12, 16)).astype(np.float32) for _ in range(2))
    levels = np.array([0.3, 0.875], np.float32)
    (encoder,) = model.text
    examples = read_alone(encoder, (PROMPT, LONGER))
    cond = {name: tensor(a) for name, a in collate(examples, model.paddings).items()}
    found = training_loss(model, cond, latents, noise, levels)

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
    (encoder,) = FAMILIES["krea2"].open(opening(folder)).text
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


@pytest.mark.proof
def test_the_folder_is_accepted(folder, tmp_path, monkeypatch):
    """Its image, and that with the LoRA it trained, beside the pipeline's."""
    check_accepted(monkeypatch, folder, tmp_path / "out", 2 * 5, "--set", "data.bucket_step=32")


def test_the_instruction_has_the_published_length():
    assert (DESCRIBING.unseen(QwenTokenizer()), len(QwenTokenizer().encode(DESCRIBING.after))) == (34, 5)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("transformer/config.json", {"num_key_value_heads": 1}, "num_key_value_heads is 1, expected 2"),
        ("transformer/config.json", {"axes_dims_rope": [16, 8, 8]}, r"axes_dims_rope is \[16, 8, 8\]"),
        ("vae/config.json", {"attn_scales": [1.0]}, "attn_scales is"),
        ("text_encoder/config.json", {"text_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
        (
            "model_index.json",
            {"text_encoder_select_layers": [1, 2]},
            "with states after 3 of its layers, found width 32, 4 layers, and states after .1, 2.",
        ),
        ("model_index.json", {"text_encoder_select_layers": [1, 2, 9]}, "4 layers, and states after .1, 2, 9."),
        ("model_index.json", {"patch_size": 1}, "patch_size is 1"),
    ],
)
def test_a_config_that_says_something_else_is_refused(folder, part, change, words):
    check_refused_config("krea2", folder, part, change, words)
