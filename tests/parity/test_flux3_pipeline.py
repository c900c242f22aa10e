"""A small FLUX.3 klein, read from the folder that diffusers saves: the same images, and the same training loss."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from flame_train.config.schema import ModelSection
from flame_train.data.padding import collate
from flame_train.engine import tensor
from flame_train.errors import ConfigError
from flame_train.models.common.control import by_name
from flame_train.models.registry import FAMILIES, family_of
from tests.parity.pipelines import (
    PROMPT,
    check_accepted,
    check_refused_config,
    check_sample,
    control_images,
    flux2_vae,
    opening,
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

LONGER = "a much longer caption, which takes more than eighty tokens of bytes with the template around it"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class TextProcessor(transformers.ProcessorMixin):
    """Qwen3-VL's without its part for images, which needs torchvision."""

    def __init__(self, tokenizer=None, chat_template=None):
        super().__init__(tokenizer, chat_template=chat_template)


def transformer(flow_map):
    made = diffusers.Flux3Transformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=8 * 16,
        axes_dims_rope=(4, 4, 4, 4),
        flow_map=flow_map,
    )
    return random(made, 2, 0.12)


def assembled(blocks, flow_map, folder):
    """A pipeline of these blocks without the model that writes longer prompts, saved in `folder`."""
    blocks.sub_blocks.pop("prompt_upsampler")
    made = blocks.init_pipeline()
    made.update_components(
        tokenizer=TextProcessor(qwen_tokenizer(folder, TEMPLATE), chat_template=TEMPLATE),
        text_encoder=qwen3_vl(transformers.Qwen3VLForConditionalGeneration, 33, 16, 2),
        transformer=transformer(flow_map),
        vae=flux2_vae(),
    )
    made.set_progress_bar_config(disable=True)
    made.save_pretrained(str(folder))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("flux3")


@pytest.fixture(scope="module")
def pipeline(folder):
    return assembled(diffusers.Flux3AutoBlocks(), False, folder)


@pytest.fixture(scope="module")
def few_steps(tmp_path_factory):
    """The distilled pipeline, and its folder."""
    path = tmp_path_factory.mktemp("distilled")
    return assembled(diffusers.Flux3DistilledAutoBlocks(), True, path), path


def drawing(pipeline):
    """A call of a pipeline as `check_sample` wants it; the distilled one knows no guidance."""

    def drawn_by(guidance_scale, **given):
        if "guider" in pipeline.components:
            pipeline.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=guidance_scale))
        return SimpleNamespace(images=pipeline(output="images", **given))

    return drawn_by


def test_sample_draws_what_the_pipeline_draws(pipeline, folder, tmp_path):
    assert family_of(folder).name == "flux3"
    check_sample(folder, tmp_path / "image.png", (4, 6, 128), drawing(pipeline))


@pytest.mark.parametrize("sizes", [[(112, 64)], [(100, 70), (65, 90)]], ids=["one", "two"])
def test_sample_draws_what_the_pipeline_draws_of_control_images(pipeline, folder, tmp_path, sizes):
    """Two are cut to whole tokens; one alone has whole ones, as the pipeline would fill it up."""
    files = control_images(tmp_path, *sizes)
    plain = check_sample(folder, tmp_path / "plain.png", (4, 6, 128), drawing(pipeline))
    found = check_sample(folder, tmp_path / "image.png", (4, 6, 128), drawing(pipeline), control=files)
    assert np.abs(found - plain).max() > 5


@pytest.mark.parametrize("sizes", [[], [(112, 64)]], ids=["", "control image"])
def test_sample_draws_what_the_distilled_pipeline_draws(few_steps, tmp_path, monkeypatch, sizes):
    distilled, folder = few_steps
    monkeypatch.setitem(PLAIN, "guidance_scale", 1.0)
    files = control_images(tmp_path, *sizes)
    check_sample(folder, tmp_path / "image.png", (4, 6, 128), drawing(distilled), 1.0, files)


@pytest.mark.parametrize("beside", [(), ((3, 5), (4, 2))], ids=["", "control images"])
def test_the_training_loss_is_that_of_diffusers_parts(pipeline, folder, off, beside):
    """Of a batch whose captions have windows of other lengths; the pipeline reads each alone."""
    model = FAMILIES["flux3"].open(opening(folder))
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((2, 4, 6, 128)).astype(np.float32) for _ in range(2))
    controls = [rng.standard_normal((2, *size, 128)).astype(np.float32) for size in beside]
    levels = np.array([0.3, 0.875], np.float32)
    (encoder,) = model.text
    examples = read_alone(encoder, (PROMPT, LONGER))
    cond = {name: tensor(a) for name, a in collate(examples, model.paddings).items()}
    assert cond["qwen3"].shape == (2, 160, 8 * 16)
    cond |= by_name(map(tensor, controls))
    found = training_loss(model, cond, latents, noise, levels)

    from diffusers.modular_pipelines.flux3 import before_denoise, encoders

    errors = []
    with torch.no_grad():
        for i, (text, ours) in enumerate(zip((PROMPT, LONGER), examples, strict=True)):
            states = encoders.Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
                pipeline.text_encoder, pipeline.tokenizer, text
            )
            assert off(ours["qwen3"], states[0]) < 1e-5
            image, noises = (torch.from_numpy(a[i : i + 1]).flatten(1, 2) for a in (latents, noise))
            level = torch.from_numpy(levels[i : i + 1])
            clean = [torch.from_numpy(each[i : i + 1]).flatten(1, 2) for each in controls]
            ids = [before_denoise._prepare_image_ids(*size, 0.5, -(1 + k)) for k, size in enumerate(beside)]
            predicted = pipeline.transformer(
                (1.0 - level) * image + level * noises,
                states,
                level,
                before_denoise._prepare_image_ids(4, 6, 0.5),
                before_denoise.Flux3TextRoPEInputsStep._prepare_text_ids(states),
                torch.cat(clean, dim=1) if beside else None,
                torch.cat(ids) if beside else None,
                return_dict=False,
            )[0]
            errors.append(float(torch.mean((predicted - (noises - image)) ** 2)))
    expected = np.mean(errors)
    assert abs(found - expected) < 1e-5 * expected
    assert expected > 0.1


@pytest.mark.parametrize("tokens", [81, 160, 161, 512])
def test_windows_end_where_the_pipelines_do(pipeline, folder, off, tokens):
    """At multiples of 80, and at the most tokens; of a caption that is cut, too."""
    from diffusers.modular_pipelines.flux3 import encoders

    (encoder,) = FAMILIES["flux3"].open(opening(folder)).text
    text = "x" * (tokens - int(encoder.inputs("")["mask"].sum()))
    row = encoder.inputs(text)
    assert row["mask"].sum() == tokens
    read = encoders.Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds
    theirs = read(pipeline.text_encoder, pipeline.tokenizer, text, max_sequence_length=512)
    assert encoder.rows(row) == theirs.shape[1]


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("transformer", {"axes_dims_rope": [8, 4, 2, 2]}, "axes_dims_rope is"),
        ("transformer", {"rope_theta": 2000}, "rope_theta is 2000"),
        ("transformer", {"flow_map": True}, "flow_map is True, expected False"),
        ("vae", {"batch_norm_eps": 1e-5}, "batch_norm_eps is 1e-05"),
        ("text_encoder", {"text_config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
    ],
)
def test_a_config_that_says_something_else_is_refused(pipeline, folder, part, change, words):
    check_refused_config("flux3", folder, part, change, words)


def test_the_schedulers_shift_is_read(pipeline, folder):
    """A pipeline's folder has none, its blocks do: it is read where one lies there, and another kind refused."""
    family, file = FAMILIES["flux3"], folder / "scheduler" / "scheduler_config.json"
    assert not file.exists()
    assert family.open(opening(folder)).shift(4096) == pipeline.scheduler.config.shift == 6.93
    diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(file.parent)
    try:
        assert family.open(opening(folder)).shift(4096) == 3.0
        check_refused_config("flux3", folder, f"scheduler/{file.name}", {"use_dynamic_shifting": True}, "shifting is")
    finally:
        shutil.rmtree(file.parent)


def test_the_distilled_one_is_refused_as_a_base(pipeline, folder, few_steps):
    family, (_, distilled) = FAMILIES["flux3"], few_steps
    assert family.distilled(folder) == ""
    with pytest.raises(ConfigError, match="is a flow map") as refused:
        family.refuse_distilled(distilled, ModelSection())
    assert "no loss of one is published" in str(refused.value)
    model = family.open(opening(distilled))
    assert (model.sampling_defaults.steps, model.sampling_defaults.guidance_scale) == (16, 1.0)
    assert 'expected "euler"' in model.sampler_problem("heun")
    assert family.open(opening(folder)).sampler_problem("heun") == ""


@pytest.mark.proof
def test_the_folder_is_accepted(pipeline, folder, tmp_path, monkeypatch):
    """Its image, and that with the LoRA it trained, beside the pipeline's; the networks are the folder's own."""
    index = folder / "modular_model_index.json"
    whole = index.read_text()
    index.write_text(whole.replace(str(folder), "black-forest-labs/flux-3-image-klein-base"))
    try:
        check_accepted(monkeypatch, folder, tmp_path / "out", 4 * (2 + 2 + 2))
    finally:
        index.write_text(whole)
