"""What training sees of an imported config, beside tables that follow the source of ai-toolkit and OneTrainer by hand.

ostris/ai-toolkit@27a03a9:

- `jobs/process/BaseSDTrainProcess.py:2611`: an update each `gradient_accumulation_steps` steps, each of one batch.
- `toolkit/scheduler.py:11` and `extensions_built_in/sd_trainer/SDTrainer.py:2300`: the schedule, which counts batches.
- `toolkit/lora_special.py`: the layers; alpha is the rank with PEFT's names. `toolkit/optimizer.py:38`: Prodigy's rate.

Nerogar/OneTrainer@23df383:

- `modules/util/create.py:1125`: updates, and what a warm-up counts. `modules/util/lr_scheduler_util.py`: the rate.
- `modules/util/config/TrainConfig.py`: the defaults. `modules/module/LoRAModule.py`: the layers of a preset.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flame_train.adapters.targets import UNET_PRESETS
from flame_train.config.load import load
from flame_train.config.schema import Config
from flame_train.globs import choose
from flame_train.models.sdxl.names_unet import UNET_MODULES
from flame_train.schedules import SCHEDULES
from flame_train.tools.import_config import import_config

from .test_meaning import job

RATE = 1e-4


def ai_toolkit(folder: Path, train: str, model: str = "arch: flux", dataset: str = "") -> Config:
    (folder / "theirs.yaml").write_text(job(train, model, dataset=dataset))
    import_config(str(folder / "theirs.yaml"), folder / "ours.toml", force=True)
    return load(str(folder / "ours.toml"))


def onetrainer(folder: Path, **more: Any) -> Config:
    given = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "base_model_name": "b.safetensors"}
    own = {"output_model_destination": "o/fox", "learning_rate": RATE, "concepts": [{"path": "images"}]}
    (folder / "theirs.json").write_text(json.dumps(given | own | more))
    import_config(str(folder / "theirs.json"), folder / "ours.toml", force=True)
    return load(str(folder / "ours.toml"))


def rates(config: Config, total: int, at: int) -> list[float]:
    """The factors on the rate of the updates around one."""
    least = config.schedule.min_lr / config.optimizer.lr
    schedule = SCHEDULES.chosen(config.schedule).build(total, config.schedule.warmup_of(total), least)
    return sorted(float(schedule.rate(np, np.int64(step), np.float64(1))) for step in (at - 1, at, at + 1))


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize(("name", "more", "warmup"), [("cosine", "", 0), ("constant_with_warmup", "100", 100)])
def test_updates_and_rates_of_ai_toolkit(tmp_path: Path, accumulated: int, name: str, more: str, warmup: int) -> None:
    """Update n, from 0, comes with batch (n + 1) * accumulated - 1, before which the schedule went on as often."""
    params = f", lr_scheduler_params: {{num_warmup_steps: {more}}}" if more else ""
    train = f", batch_size: 2, gradient_accumulation_steps: {accumulated}, lr_scheduler: {name}{params}"
    config = ai_toolkit(tmp_path, train)
    updates = 2000 // accumulated
    assert config.train.steps == updates
    assert config.data.batch_size * config.gradient.accumulation == 2 * accumulated
    assert config.optimizer.lr == RATE
    for step in (1, updates // 50, updates // 4, updates // 2, updates - 2):
        batch = (step + 1) * accumulated - 1
        there = 0.5 * (1 + math.cos(math.pi * batch / 2000)) if not warmup else min(1.0, batch / warmup)
        around = rates(config, updates, step)
        assert around[0] - 0.01 <= there <= around[-1] + 0.01, (step, there, around)


@pytest.mark.parametrize(
    ("model", "rank", "alpha", "layers"),
    [
        ("arch: flux", 8, 8.0, ("full",)),
        ("arch: sdxl", 8, 1.0, ("attention+mlp", "*.proj_in", "*.proj_out")),
        ("arch: zimage", 8, 8.0, ("layers.*",)),
    ],
)
def test_ranks_layers_and_resolution_of_ai_toolkit(
    tmp_path: Path, model: str, rank: int, alpha: float, layers: tuple[str, ...]
) -> None:
    config = ai_toolkit(tmp_path, "", model)
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (rank, alpha, layers)
    assert (config.data.resolution, config.optimizer.eps, config.gradient.clip_norm) == (512, 1e-6, 1.0)


def test_layers_of_sdxl_of_both(tmp_path: Path) -> None:
    """722 linear layers in the blocks of SDXL's UNet, as `LoRASpecialNetwork` and kohya's network count them.

    OneTrainer's full preset has all linear layers and convolutions of the UNet; its attn-mlp those of the blocks.
    """
    names = UNET_MODULES
    linear = ai_toolkit(tmp_path, "", "arch: sdxl").lora.targets
    assert len(choose(names, linear, UNET_PRESETS, "", "")) == 722
    blocks = onetrainer(tmp_path, layer_filter_preset="attn-mlp").lora.targets
    assert len(choose(names, blocks, UNET_PRESETS, "", "")) == 722


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("name", ["CONSTANT", "LINEAR", "COSINE", "COSINE_WITH_HARD_RESTARTS", "REX"])
@pytest.mark.parametrize("least", [0.0, 0.1])
def test_rates_of_onetrainer(tmp_path: Path, accumulated: int, name: str, least: float) -> None:
    more = {"learning_rate_warmup_steps": 80, "learning_rate_cycles": 2, "learning_rate_min_factor": least}
    config = onetrainer(
        tmp_path, learning_rate_scheduler=name, gradient_accumulation_steps=accumulated, batch_size=3, **more
    )
    assert config.data.batch_size * config.gradient.accumulation == 3 * accumulated
    total, warmup = 1000, 80 // accumulated
    for step in (1, warmup // 2, warmup + 1, 300, 640, 900, 998):
        if step < warmup:
            there = step / warmup
        else:
            done = (step - warmup) / (total - warmup)
            factor = {
                "CONSTANT": 1.0,
                "LINEAR": 1 - done,
                "COSINE": 0.5 * (1 + math.cos(math.pi * done)),
                "COSINE_WITH_HARD_RESTARTS": 0.5 * (1 + math.cos(math.pi * (done * 2 % 1.0))),
                "REX": (1 - done) / (0.1 + 0.9 * (1 - done)),
            }[name]
            there = factor if name == "CONSTANT" else least + (1 - least) * factor
        around = rates(config, total, step)
        assert around[0] - 0.01 <= there <= around[-1] + 0.01, (step, there, around)


def test_defaults_of_onetrainer(tmp_path: Path) -> None:
    """`TrainConfig.py:1061` and below: a rate of 3e-6, 100 epochs, 512 pixels, rank 16 at an alpha of 1."""
    config = onetrainer(tmp_path, learning_rate=3e-6)
    assert (config.optimizer.lr, config.train.epochs, config.data.resolution) == (3e-6, 100, 512)
    assert (config.lora.rank, config.lora.alpha, config.schedule.warmup_steps) == (16, 1.0, 200)
    assert (config.data.batch_size, config.gradient.accumulation, config.gradient.clip_norm) == (1, 1, 1.0)


@pytest.mark.parametrize(("model", "ours"), [("STABLE_DIFFUSION_XL_10_BASE", "kohya"), ("Z_IMAGE", "diffusers")])
def test_a_lora_of_onetrainer_for_comfyui_has_names_that_it_reads(tmp_path: Path, model: str, ours: str) -> None:
    assert onetrainer(tmp_path, model_type=model, output_model_format="COMFY_LORA").output.format == ours


WINDOW: dict[str, Any] = {  # of a config that OneTrainer's window saved, which names the settings of all optimizers
    **{"scale_parameter": False, "nesterov": False, "safeguard_warmup": False, "stochastic_rounding": True},
    **{"d_limiter": True, "factored": True, "split_groups": True, "rms_rescaling": True, "weight_decay": None},
}


@pytest.mark.parametrize(
    ("optimizer", "listed", "carried"),
    [
        ("ADAMW", [], set()),
        ("ADAFACTOR", [], {"optimizer.scale_parameter"}),
        ("PRODIGY_PLUS_SCHEDULE_FREE", ["split_groups"], {"optimizer.d_limiter", "optimizer.factored"}),
    ],
)
def test_settings_of_optimizers_that_are_not_chosen_are_no_loss(
    tmp_path: Path, optimizer: str, listed: list[str], carried: set[str]
) -> None:
    given = {"training_method": "LORA", "model_type": "FLUX_DEV_1", "base_model_name": "b.safetensors"}
    more = {"oft_block_size": 32, "non_ema_sampling": True, "ema": "OFF", "quantization": {"__version": 0}}
    given |= more | {"optimizer": {"__version": 0, "optimizer": optimizer, **WINDOW}}
    (tmp_path / "theirs.json").write_text(json.dumps(given))
    result = import_config(str(tmp_path / "theirs.json"), None)
    assert [line.split(": ")[1].split(" ")[0].rpartition(".")[2] for line in result["listed"]] == listed
    own = {key for key in result["carried"] if key.startswith("optimizer.")} - {"optimizer.name", "optimizer.lr"}
    assert own == carried
