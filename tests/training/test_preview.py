"""Sample grids: their layout, and that nothing but prompts, noise and weights decides what they show."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from flame_train.adapters.attach import attach
from flame_train.config.schema import Config, SampleSection
from flame_train.engine import no_grad
from flame_train.errors import Interrupted
from flame_train.run.check import check
from flame_train.run.plan import make_plan
from flame_train.run.sampling import drawing, uncropped
from flame_train.training.preview import draw, grid, write_png
from flame_train.training.stop import StopRequest

SIZE = (64, 96)  # height, width
PROMPTS = ("a blue circle", "a red house", "")


@pytest.fixture
def studio(small_config):
    """Everything `draw` needs: how, denoiser, decoder, and conditioning by prompt."""
    plan = make_plan(check(small_config()), StopRequest())
    sizes = uncropped(plan.model, SIZE)
    with no_grad():
        encoders = plan.encoding.encoders("cpu")
        examples = {prompt: encoders.caption(prompt) | sizes for prompt in PROMPTS}
    denoiser = plan.model.load_denoiser(device="cpu", dtype="fp32")
    return asked(plan.model), denoiser, plan.model.vae.load("fp32", "cpu").decode, examples


def asked(model, **changes):
    """How images of `SIZE` are drawn for a section with these keys."""
    config = Config(sample=SampleSection(**({"steps": 3, "guidance_scale": 3.0, "seed": 5} | changes)))
    return drawing(config.sample, SIZE, config.model, config.loss, model, device="cpu", dtype="fp32")


def images(studio, prompts, **changes):
    how, denoiser, decode, examples = studio
    how = dataclasses.replace(how, **changes)
    return draw(how, denoiser.denoise, decode, [examples[p] for p in prompts], examples[""], StopRequest())


def test_same_seed_same_bytes(studio, tmp_path):
    drawn = {name: grid(images(studio, PROMPTS[:2])) for name in "ab"}
    for name, sheet in drawn.items():
        write_png(tmp_path / f"{name}.png", sheet)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    stored = np.asarray(Image.open(io.BytesIO((tmp_path / "a.png").read_bytes())))
    np.testing.assert_array_equal(stored, drawn["b"])


def test_images_have_the_size_asked_for(studio):
    (image,) = images(studio, PROMPTS[:1])
    assert image.shape == (*SIZE, 3)
    assert image.dtype == np.uint8


def test_an_image_does_not_depend_on_its_neighbours(studio):
    """Number i of seed s is number 0 of seed s + i."""
    _, second = images(studio, PROMPTS[:2])
    (alone,) = images(studio, PROMPTS[1:2], seed=6)
    np.testing.assert_array_equal(second, alone)


def test_what_is_wanted_and_what_is_not_go_through_the_denoiser_together(studio):
    """As they would one by one, but for the order of fp32 sums."""
    how, denoiser, _, examples = studio
    calls = []

    def watched(x, t, cond):
        calls.append((x, t, cond, denoiser.denoise(x, t, cond)))
        return calls[-1][-1]

    draw(how, watched, lambda latents: latents.numpy(), [examples[PROMPTS[0]]], examples[""], StopRequest())
    assert len(calls) == 3
    for x, t, cond, made in calls:
        for i, prompt in enumerate((PROMPTS[0], "")):
            for name in ("clip_l", "clip_g"):
                np.testing.assert_array_equal(cond[name].numpy()[i], examples[prompt][name])
            with no_grad():
                alone = denoiser.denoise(x[i : i + 1], t[i : i + 1], {n: c[i : i + 1] for n, c in cond.items()})
            np.testing.assert_allclose(made.numpy()[i : i + 1], alone.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", [{"seed": 6}, {"steps": 4}, {"sampler": "ddim"}, {"guidance_scale": 1.0}])
def test_what_is_asked_for_is_used(studio, change):
    how = asked(studio[1].model, **change)
    assert not np.array_equal(images(studio, PROMPTS[:1])[0], images((how, *studio[1:]), PROMPTS[:1])[0])


def test_the_prompt_is_heard(studio):
    first, second = (images(studio, [p], guidance=12.0)[0] for p in PROMPTS[:2])
    assert not np.array_equal(first, second)


def test_an_untrained_adapter_changes_nothing_and_a_trained_one_does(studio):
    before = images(studio, PROMPTS[:1])[0]
    attached = attach(studio[1].network, ["output_blocks.8.0.skip_connection"], rank=2, alpha=2.0, seed=0)
    np.testing.assert_array_equal(images(studio, PROMPTS[:1])[0], before)
    attached.parameters()[1].data[...] = 0.5
    assert not np.array_equal(images(studio, PROMPTS[:1])[0], before)


def test_drawing_stops_when_asked(studio):
    how, denoiser, decode, examples = studio
    stop = StopRequest()
    stop.signal_number = 15
    with pytest.raises(Interrupted, match="while sampling"):
        draw(how, denoiser.denoise, decode, [examples[PROMPTS[0]]], examples[""], stop)


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
