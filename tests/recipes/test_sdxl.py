"""What SDXL's recipe refuses before anything is read, and which blocks are checkpointed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flame_train.config.schema import Config
from flame_train.engine import tensor
from flame_train.engine.shape_run import H100
from flame_train.errors import ConfigError
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.registry import FAMILIES, Opening
from flame_train.run.check.check_run import check
from flame_train.run.commands.describe import describe
from flame_train.run.memory.prediction import predicted_memory
from flame_train.run.plan.plan import make_plan
from flame_train.run.sampling.draw import sampler_spec
from flame_train.run.sampling.requests import requests
from flame_train.run.train.step_state import load_denoiser
from flame_train.training.session import StopRequest


@pytest.mark.parametrize(("marked", "given", "said"), [(True, "epsilon", "v"), (True, "v", ""), (False, "v", "")])
def test_a_model_that_says_it_predicts_v_is_not_trained_on_the_noise(
    small_base, small_config, tmp_path, marked, given, said
):
    """NoobAI's v models say so by a marker; a file without one may be either."""
    with SafetensorsFile(small_base) as file:
        tensors = {name: np.array(file.read(name)) for name in file.names}
    save_file(tmp_path / "base.safetensors", tensors | ({"v_pred": np.zeros(1, np.float32)} if marked else {}))
    config = small_config(model={"checkpoint": str(tmp_path / "base.safetensors"), "prediction": given})
    if said:
        with pytest.raises(ConfigError, match=rf'says that it predicts {said}, got "{given}"; set model.prediction'):
            check(config, FAMILIES["sdxl"])
    else:
        check(config, FAMILIES["sdxl"])


@pytest.mark.filterwarnings("ignore")  # of diffusers
@pytest.mark.parametrize(
    ("stated", "asked", "more", "spacing"),
    [
        (None, "auto", {}, "leading"),
        (None, "trailing", {}, "trailing"),
        ("trailing", "auto", {}, "trailing"),
        ("trailing", "leading", {}, "leading"),
        (None, "auto", {"rescale_betas_zero_snr": True}, "trailing"),
    ],
)
def test_timesteps_are_spaced_as_diffusers_spaces_them(
    small_base, small_config, tmp_path, stated, asked, more, spacing
):
    """SDXL Turbo's folder says trailing; a schedule of zero terminal SNR wants it."""
    diffusers = pytest.importorskip("diffusers")
    zero = bool(more)
    shared = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1, **more}
    reference = diffusers.EulerDiscreteScheduler(timestep_spacing=spacing, **shared)
    reference.set_timesteps(3)
    model = {"checkpoint": str(small_base), "prediction": "v" if zero else "epsilon"}
    sample = {"spacing": asked, "prompts": ("a",), "steps": 3, "guidance_scale": 1.0}
    config = small_config(model=model, loss={"zero_terminal_snr": zero}, sample=sample)
    opened = FAMILIES["sdxl"].open(Opening(small_base, config.model, config.text_encoders, 77))
    if stated:
        (tmp_path / "scheduler").mkdir()
        (tmp_path / "scheduler/scheduler_config.json").write_text(json.dumps({"timestep_spacing": stated}))
        parts = FAMILIES["sdxl"].files.parts(small_base, ["unet", "vae", "text_encoder", "text_encoder_2"])
        opened = FAMILIES["sdxl"].assemble(parts, Opening(tmp_path, config.model, config.text_encoders, 77))
    (wanted,) = requests(config.sample, 64, opened)
    path = sampler_spec(wanted, config.model, config.loss, opened, device="cpu", dtype="fp32").path
    assert [int(t) for t in path.times] == reference.timesteps.tolist()
    np.testing.assert_allclose(path.levels, reference.sigmas.numpy(), rtol=1e-5)
    assert path.begin(tensor(np.ones(1, np.float32))).numpy()[0] == pytest.approx(float(reference.init_noise_sigma))


def test_few_step_models_of_sd15_are_drawn_from_pure_noise(train_small, tmp_path):
    """By the key, or because the folder of SD Turbo's kind says so."""
    run = f"--set=output.dir={tmp_path / 'run'}"
    assert train_small("sd15", run, "--set=sample.spacing=trailing", "--set=data.bucket_step=64", "--dry-run") == 0
    family, base = FAMILIES["sd15"], tmp_path / "sd15/base.safetensors"
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler/scheduler_config.json").write_text('{"timestep_spacing": "trailing"}')
    parts = family.files.parts(base, ["unet", "vae", "text_encoder"])
    plain = Config()
    for place, first in ((base, 667), (tmp_path, 999)):
        model = family.assemble(parts, Opening(place, plain.model, plain.text_encoders, 77))
        assert model.path(plain.model, plain.loss, 3, (64, 64)).times[0] == first


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        ("sdxl", ["--set", "model.prediction=flow"], 'means nothing with model.prediction = "flow"'),
        ("flux", [], "it has no effect on Flux"),
    ],
)
def test_a_spacing_is_refused_where_no_timesteps_are(train_small, capsys, tmp_path, family, more, said):
    assert train_small(family, *more, "--set", "sample.spacing=trailing", f"--set=output.dir={tmp_path / 'run'}") == 2
    assert f"sample.spacing: {said}" in capsys.readouterr().err


def test_the_blocks_that_a_config_chooses_are_checkpointed(small_config):
    def plan(**gradient):
        return make_plan(check(small_config(gradient=gradient)), StopRequest())

    some = {"checkpointing": "full", "checkpoint_blocks": ("output_blocks.*",)}
    plans = [plan(), plan(**some), plan(checkpointing="full")]
    memory = [predicted_memory(p, H100) for p in plans]
    told = [describe(p, m, H100, "cuda") for p, m in zip(plans, memory, strict=True)]
    none, few, every = (t["recomputed_blocks"] for t in told)
    assert (none, every) == (0, told[0]["blocks"])
    assert 0 < few < every
    training = [m.training for m in memory]
    assert training == sorted(set(training), reverse=True)
    blocks = load_denoiser(plans[1], "cpu").network.named_blocks()
    checkpointed = {name for name, block in blocks.items() if block.checkpointing == "full"}
    assert checkpointed == {name for name in blocks if name.startswith("output_blocks.")}
    assert len(checkpointed) == few


def test_a_choice_of_blocks_that_are_not_there_is_refused(small_config):
    config = small_config(gradient={"checkpointing": "full", "checkpoint_blocks": ("mid_block.*",)})
    with pytest.raises(ConfigError, match=r"gradient\.checkpoint_blocks: .*\n  'mid_block\.\*'; near it: middle_block"):
        check(config, FAMILIES["sdxl"])


@pytest.mark.parametrize("loss", [{"logit_mean": 0.5}, {"weighting": "sigma_sqrt"}, {"guidance_scale": 3.0}])
def test_what_no_sdxl_is_trained_with_is_refused_once(small_config, loss):
    (key,) = loss
    with pytest.raises(ConfigError) as refused:
        check(small_config(loss=loss), FAMILIES["sdxl"])
    assert str(refused.value).count(f"loss.{key}: ") == 1
