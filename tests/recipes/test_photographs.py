"""Learning from real photographs: the loss falls on noise that training never saw."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from skimage import data

from flame_train.adapters.attach import attach_factors
from flame_train.adapters.formats import from_file
from flame_train.config.schema import LossSection
from flame_train.engine.dtype import as_dtype
from flame_train.run.check.check_run import check
from flame_train.run.commands.stages import train_plan
from flame_train.run.encode.encode import encode
from flame_train.run.plan.plan import make_plan
from flame_train.run.train.step_state import load_denoiser
from flame_train.training.session import Session, StopRequest
from flame_train.training.validation import HeldOut, Validator

PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in PHOTOS:
        pixels = Image.fromarray(getattr(data, name)())
        pixels.thumbnail((240, 240))
        pixels.save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a photo of {name}")
    return folder


@pytest.mark.proof  # `quickstart`'s tests hold a shorter lesson to the same
def test_held_out_loss_falls_on_real_photographs(photos, small_config):
    stop = StopRequest()
    config = small_config(
        data={"path": str(photos), "batch_size": 4, "resolution": 128, "bucket_step": 32},
        lora={"rank": 8, "alpha": 8.0, "targets": ("full",)},
        optimizer={"lr": 7e-3},
        schedule={"warmup_steps": 4},
        train={"steps": 36, "precision": "fp32"},
    )
    plan = make_plan(check(config), stop)
    encoded = encode(plan, plan.encoding.keys(plan.samples, ()), Session("cpu", stop=stop))
    examples = [encoded.example(i) for i in range(len(PHOTOS))]
    denoiser, objective = load_denoiser(plan, "cpu"), plan.model.objective(config.model, LossSection(), "cpu")

    validator = Validator(
        denoiser, objective, HeldOut.of(examples), timesteps=8, batch_size=8, device="cpu", dtype=as_dtype("fp32")
    )

    def measured():
        return validator.measure().loss

    before = measured()
    assert measured() == before
    result = train_plan(plan, Session("cpu", stop=stop))
    learnt = from_file(result["lora"], plan.model.lora_names).state[denoiser.component]
    attached = attach_factors(denoiser.network, learnt)
    after = measured()
    assert after < 0.8 * before, (before, after)
    attached.detach()
    assert measured() == before


def test_the_figure_depends_on_nothing_but_noise_and_weights(small_config, photos):
    stop, config = StopRequest(), small_config(data={"path": str(photos)})
    plan = make_plan(check(config), stop)
    encoded = encode(plan, plan.encoding.keys(plan.samples, ()), Session("cpu", stop=stop))
    examples = [encoded.example(i) for i in range(2)]
    denoiser, objective = load_denoiser(plan, "cpu"), plan.model.objective(config.model, LossSection(), "cpu")

    def measured(which, timesteps=2, batch_size=3):
        images = HeldOut.of(which)
        found = Validator(
            denoiser,
            objective,
            images,
            timesteps=timesteps,
            batch_size=batch_size,
            device="cpu",
            dtype=as_dtype("fp32"),
        ).measure()
        assert np.isfinite(found.loss)
        return found

    first = measured(examples)
    assert (first.loss, first.bands) == (measured(examples).loss, measured(examples).bands)
    assert list(first.bands) == ["0-500", "500-1000"]
    assert first.loss == pytest.approx(np.mean(list(first.bands.values())))
    assert measured(examples, timesteps=3).loss != first.loss
    for size in (1, 2, 8):  # the batch's size rounds otherwise, and changes no noise
        assert measured(examples, batch_size=size).loss == pytest.approx(first.loss, rel=1e-5)
    alone = [measured([example]).loss for example in examples[:1]]
    assert alone[0] != first.loss
    with pytest.raises(ValueError, match="at least one"):
        measured([])
