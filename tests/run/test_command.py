"""A run from config to LoRA: what its parts are told."""

from __future__ import annotations

import pytest

from flame_train.engine.mode import mode
from flame_train.engine.shape_run import H100
from flame_train.errors import ConfigError
from flame_train.models.sdxl.unet import UNet
from flame_train.networks.vae.vae import Encoder
from flame_train.run.check.check_run import check
from flame_train.run.commands.stages import train_plan
from flame_train.run.memory.prediction import notice_memory, predicted_memory
from flame_train.run.plan.plan import make_plan
from flame_train.training.session import Session, StopRequest


def test_an_epoch_beyond_all_memory_is_refused_by_the_plan(small_config):
    config = small_config(data={"repeats": 10**9})
    with pytest.raises(ConfigError, match=r"data\.repeats: expected an epoch of at most 10,000,000 samples, got "):
        make_plan(check(config), StopRequest())


def test_more_memory_than_there_is_is_told(small_config, caplog):
    """Only where it is so: the run goes on, for a prediction may be wrong."""
    plan = make_plan(check(small_config()), StopRequest())
    found = predicted_memory(plan, H100)
    notice_memory(lambda: found, found.peak)
    assert not caplog.records
    notice_memory(lambda: found, found.peak - 1)
    assert "GiB are predicted and the GPU has 0.0: if memory runs out, try data.batch_size=1" in caplog.text


def test_a_prediction_that_fails_costs_no_run(caplog):
    def broken():
        raise AttributeError("a shape run has no function 'new'")

    notice_memory(broken, 1)
    assert "could not be predicted: AttributeError: a shape run has no function 'new'" in caplog.text


def test_only_training_steps_may_vary(small_config, monkeypatch, tmp_path):
    """Cached images and grids are the same bytes however one trains, and wait for no measurement of their own."""
    seen: dict[str, set[bool]] = {"encoding": set(), "drawing": set(), "training": set()}
    encode, denoise = Encoder.forward, UNet.forward

    def encoding(self, *args):
        seen["encoding"].add(mode().deterministic)
        return encode(self, *args)

    def denoising(self, *args, **more):
        seen["training" if mode().grad else "drawing"].add(mode().deterministic)
        return denoise(self, *args, **more)

    monkeypatch.setattr(Encoder, "forward", encoding)
    monkeypatch.setattr(UNet, "forward", denoising)
    config = small_config(
        train={"precision": "fp32", "steps": 1, "deterministic": False},
        sample={"every": 1, "steps": 1, "prompts": ("a circle",)},
        data={"cache": str(tmp_path / "cache")},  # nothing is encoded yet
    )
    with StopRequest() as stop:
        train_plan(make_plan(check(config), stop), Session("cpu", stop=stop))
    assert seen == {"encoding": {True}, "drawing": {True}, "training": {False}}
