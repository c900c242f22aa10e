"""Sample grids: their layout, and that nothing but prompts, noise and weights decides what they show."""

from __future__ import annotations

import io
from functools import partial

import numpy as np
import pytest
from PIL import Image

from flame_train.adapters.attach import at_strength, attach
from flame_train.config.prompts import Prompt
from flame_train.config.schema import Config, SampleSection
from flame_train.data.grid import grid, write_png
from flame_train.data.samples import EncoderInput
from flame_train.engine import no_grad
from flame_train.errors import ConfigError, Interrupted
from flame_train.run.check.check_run import check
from flame_train.run.encode.encoders import load_encoders
from flame_train.run.plan.plan import make_plan
from flame_train.run.sampling.draw import generate, generate_image, sampler_spec, uncropped
from flame_train.run.sampling.requests import check_sampling, requests
from flame_train.training.session import StopRequest

SIZE = (64, 96)  # height, width
TEXTS = ("a blue circle", "a red house", "")
PROMPTS = TEXTS[:2]


@pytest.fixture
def studio(small_config):
    """studio(prompts, **sample): the images of a section with these prompts, by the small base."""
    plan = make_plan(check(small_config()), StopRequest())
    model = plan.model
    with no_grad():
        encoders = load_encoders(plan.encoding, "cpu")
        captions = {prompt: encoders.captions([EncoderInput(prompt)])[0] for prompt in TEXTS}
    denoiser, vae = model.load_denoiser(device="cpu", dtype="fp32"), model.vae.load("fp32", "cpu")

    def images(prompts, stop=None, watched=None, **section):
        usual = {"steps": 3, "guidance_scale": 3.0, "seed": 5, "height": SIZE[0], "width": SIZE[1]}
        given = tuple(Prompt.model_validate(p) for p in prompts)
        sample = SampleSection(**(usual | section), prompts=given)
        wanted = requests(sample, 96, model)
        config = Config()
        check_sampling(wanted, config.model, config.loss, model)
        how = [sampler_spec(each, config.model, config.loss, model, device="cpu", dtype="fp32") for each in wanted]
        stop = stop or StopRequest()
        if watched is not None:
            sizes = uncropped(model, wanted[0].size)
            examples = [captions[text] | sizes for text in (wanted[0].text, wanted[0].negative)]
            return generate(how[0], partial(watched, denoiser), lambda latents: latents.numpy(), *examples, stop)
        return [
            generate_image(each, spec, captions.__getitem__, denoiser, vae, stop)
            for each, spec in zip(wanted, how, strict=True)
        ]

    images.network, images.captions = denoiser.network, captions
    return images


@pytest.mark.bytes
def test_same_seed_same_bytes(studio, tmp_path):
    sampled = {name: grid(studio(PROMPTS[:2])) for name in "ab"}
    for name, sheet in sampled.items():
        write_png(tmp_path / f"{name}.png", sheet)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    stored = np.asarray(Image.open(io.BytesIO((tmp_path / "a.png").read_bytes())))
    np.testing.assert_array_equal(stored, sampled["b"])


def test_images_have_the_size_asked_for(studio):
    (image,) = studio(PROMPTS[:1])
    assert image.shape == (*SIZE, 3)
    assert image.dtype == np.uint8


@pytest.mark.bytes
def test_an_image_does_not_depend_on_its_neighbours(studio):
    """Number i of seed s is number 0 of seed s + i."""
    _, second = studio(PROMPTS[:2])
    (alone,) = studio(PROMPTS[1:2], seed=6)
    np.testing.assert_array_equal(second, alone)


def test_what_is_wanted_and_what_is_not_go_through_the_denoiser_together(studio):
    """As they would one by one, but for the order of fp32 sums."""
    calls = []

    def watched(denoiser, x, t, cond):
        calls.append((x, t, cond, denoiser.denoise(x, t, cond), denoiser))
        return calls[-1][3]

    studio(PROMPTS[:1], watched=watched)
    assert len(calls) == 3
    for x, t, cond, made, denoiser in calls:
        for i, prompt in enumerate((PROMPTS[0], "")):
            for name in ("clip_l", "clip_g"):
                np.testing.assert_array_equal(cond[name].numpy()[i], studio.captions[prompt][name])
            with no_grad():
                alone = denoiser.denoise(x[i : i + 1], t[i : i + 1], {n: c[i : i + 1] for n, c in cond.items()})
            np.testing.assert_allclose(made.numpy()[i : i + 1], alone.numpy(), rtol=1e-4, atol=1e-5)


CHANGES = [
    {"seed": 6},
    {"steps": 4},
    {"sampler": "ddim"},
    {"sampler": "heun"},
    {"sampler": "dpmpp_2m"},
    {"sampler": "euler_ancestral"},
    {"guidance_scale": 1.0},
    {"negative": "a red house"},
    {"width": 64},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_is_asked_for_is_used_and_a_prompt_asks_as_the_section_does(studio, change):
    (usual,) = studio(PROMPTS[:1])
    (by_section,) = studio(PROMPTS[:1], **change)
    (by_prompt,) = studio([{"text": PROMPTS[0], **change}])
    assert not np.array_equal(usual, by_section)
    np.testing.assert_array_equal(by_section, by_prompt)


def test_new_noise_of_a_sampler_follows_the_seed(studio):
    asked = [{"text": PROMPTS[0], "seed": seed} for seed in (9, 9, 10)]
    first, again, other = studio(asked, sampler="euler_ancestral")
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.usefixtures("trained_base")
@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (
            {"text": "", "width": 40},
            "sample.prompts: width of prompt 2: expected a multiple of 32 for this model, got 40",
        ),
        ({"text": "", "steps": 1000}, "sample.prompts: steps of prompt 2: 1000 leading steps do not fit"),
        ({"text": "", "guidance_scale": 1.0, "negative": "x"}, "sample.prompts: negative of prompt 2: expected none"),
    ],
)
def test_a_prompt_that_allows_no_image_is_told_by_its_number(studio, prompt, told):
    with pytest.raises(ConfigError) as error:
        studio([PROMPTS[0], prompt])
    assert str(error.value).startswith(told)


def test_the_prompt_is_heard(studio):
    first, second = studio([{"text": text, "seed": 5} for text in PROMPTS[:2]], guidance_scale=12.0)
    assert not np.array_equal(first, second)


@pytest.mark.bytes
@pytest.mark.usefixtures("trained_base")
def test_an_untrained_adapter_changes_nothing_and_a_trained_one_does(studio):
    before = studio(PROMPTS[:1])[0]
    attached = attach(studio.network, ["output_blocks.8.0.skip_connection"], rank=2, alpha=2.0, seed=0)
    np.testing.assert_array_equal(studio(PROMPTS[:1])[0], before)
    attached.parameters()[1].data[...] = 0.5
    assert not np.array_equal(studio(PROMPTS[:1])[0], before)


@pytest.mark.bytes
@pytest.mark.usefixtures("trained_base")
def test_a_strength_acts_within_and_leaves_the_adapters_as_they_were(studio):
    base = studio(PROMPTS[:1])[0]
    attached = attach(studio.network, ["output_blocks.8.0.skip_connection"], rank=2, alpha=2.0, seed=0)
    up = attached.parameters()[1].data
    up[...] = 0.5
    whole = studio(PROMPTS[:1])[0]
    up[...] = 0.25
    half = studio(PROMPTS[:1])[0]
    up[...] = 0.5
    for strength, expected in ((1.0, whole), (0.5, half), (0.0, base)):
        with at_strength(attached, strength):
            np.testing.assert_array_equal(studio(PROMPTS[:1])[0], expected)
        np.testing.assert_array_equal(studio(PROMPTS[:1])[0], whole)


def test_sampling_stops_when_asked(studio):
    stop = StopRequest()
    stop.signal_number = 15
    with pytest.raises(Interrupted, match="while sampling"):
        studio(PROMPTS[:1], stop=stop)


@pytest.mark.parametrize(
    ("count", "rows", "columns"), [(1, 1, 1), (2, 1, 2), (3, 2, 2), (4, 2, 2), (5, 2, 3), (9, 3, 3), (10, 3, 4)]
)
def test_grid_layout(count, rows, columns):
    """Row by row, with white between and where nothing is."""
    h, w, gap = 6, 8, 4
    sheet = grid([np.full((h, w, 3), i, np.uint8) for i in range(count)], gap)
    assert sheet.shape == (rows * (h + gap) - gap, columns * (w + gap) - gap, 3)
    left = sheet.copy()
    for i in range(count):
        y, x = i // columns * (h + gap), i % columns * (w + gap)
        assert (sheet[y : y + h, x : x + w] == i).all()
        left[y : y + h, x : x + w] = 255
    assert (left == 255).all()


def test_images_of_several_sizes_lie_in_places_of_the_largest():
    sheet = grid([np.zeros((6, 4, 3), np.uint8), np.zeros((3, 8, 3), np.uint8)])
    assert sheet.shape == (6, 20, 3)
    assert (sheet[:, :4] == 0).all()
    assert (sheet[:3, 12:] == 0).all()
    assert (sheet[:, 4:12] == 255).all()
    assert (sheet[3:, 12:] == 255).all()
