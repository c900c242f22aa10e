"""What training sees of an imported config, beside a table that follows sd-scripts' source by hand.

The files are those of kohya-ss/sd-scripts@48d368f:

- `train_network.py:799`: updates of `max_train_epochs`, whose batches `train_util.py:2001` fills bucket by bucket.
- `library/train_util.py:5274`: the rate of a step, with the lambdas of transformers' `optimization.py`.
- `networks/lora.py:848` and `networks/lora_flux.py:708`: the layers, and their ranks and alphas.
- `library/train_util.py:5408`: the resolution.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from flame_train.adapters.kinds import ADAPTERS
from flame_train.adapters.targets import UNET_PRESETS, Presets, apply_rules
from flame_train.config.load import load
from flame_train.config.schema import Config
from flame_train.data.order import BatchSchedule
from flame_train.globs import choose
from flame_train.models.common.flow_model import DOUBLE_SINGLE_PRESETS
from flame_train.models.sdxl.names_unet import UNET_MODULES
from flame_train.schedules import SCHEDULES
from flame_train.tools.import_config import import_config

BASE = """\
pretrained_model_name_or_path = "/m.safetensors"
train_data_dir = "/d"
output_dir = "/o"
enable_bucket = true
resolution = "768,768"
network_module = "networks.lora"
network_dim = 16
network_alpha = 8
learning_rate = 1e-4
"""


def imported(tmp_path: Path, more: str, family: str = "sdxl") -> Config:
    (tmp_path / "theirs.toml").write_text(BASE + more)
    import_config(str(tmp_path / "theirs.toml"), tmp_path / "ours.toml", family, force=True)
    return load(str(tmp_path / "ours.toml"))


def rate_there(name: str, step: int, total: int, warmup: int, cycles: int = 1, power: float = 1.0) -> float:
    """The factor on the rate that update `step`, from 0, gets (transformers' `get_*_schedule_with_warmup`)."""
    if step < warmup:
        return step / max(1, warmup)
    done = (step - warmup) / max(1, total - warmup)
    return {
        "constant": 1.0,
        "constant_with_warmup": 1.0,
        "linear": max(0.0, 1 - done),
        "cosine": max(0.0, 0.5 * (1 + math.cos(math.pi * done))),
        "cosine_with_restarts": max(0.0, 0.5 * (1 + math.cos(math.pi * (cycles * done % 1.0)))) if done < 1 else 0.0,
        "polynomial": (1 - 1e-7 / 1e-4) * (1 - done) ** power + 1e-7 / 1e-4,
    }[name]


@pytest.mark.parametrize(
    ("name", "more", "warmup", "cycles", "power"),
    [
        ("constant", "", 0, 1, 1.0),
        ("constant_with_warmup", "lr_warmup_steps = 40", 40, 1, 1.0),
        ("linear", "lr_warmup_steps = 0.1", 100, 1, 1.0),
        ("cosine", "lr_warmup_steps = 100", 100, 1, 1.0),
        ("cosine_with_restarts", "lr_scheduler_num_cycles = 3", 0, 3, 1.0),
        ("polynomial", "lr_scheduler_power = 2.0\nlr_warmup_steps = 0.05", 50, 1, 2.0),
    ],
)
def test_the_rate_of_a_step(tmp_path: Path, name: str, more: str, warmup: int, cycles: int, power: float) -> None:
    """A step's rate there is one between that of our step before it and of our step: they count a rise from 0."""
    config = imported(tmp_path, f'lr_scheduler = "{name}"\nmax_train_steps = 1000\n{more}\n')
    assert (config.train.steps, config.optimizer.lr) == (1000, 1e-4)
    schedule = SCHEDULES.chosen(config.schedule).build(config.train.steps, config.schedule.warmup_of(1000), 0.0)
    for step in (1, 20, 50, 99, 101, 250, 500, 700, 900, 999):
        around = sorted(float(schedule.rate(np, np.int64(at), np.float64(1))) for at in (step - 1, step, step + 1))
        there = rate_there(name, step, 1000, warmup, cycles, power)
        assert around[0] - 2e-3 <= there <= around[-1] + 2e-3, (step, there, around)


@pytest.mark.parametrize(
    ("buckets", "repeats", "batch", "epochs", "updates"),
    [((12,), 10, 4, 5, 150), ((7, 5), 10, 4, 5, 155), ((3, 3, 1), 1, 2, 8, 40)],
)
def test_updates_of_epochs(
    tmp_path: Path, buckets: tuple[int, ...], repeats: int, batch: int, epochs: int, updates: int
) -> None:
    """epochs * sum over buckets of ceil(images * repeats / batch), each update of at most a batch of one bucket."""
    config = imported(tmp_path, f"max_train_epochs = {epochs}\nmax_train_steps = 9\ntrain_batch_size = {batch}\n")
    images = [bucket for bucket, count in enumerate(buckets) for _ in range(count)]
    order = BatchSchedule(images, repeats, config.data.batch_size, 0)
    assert config.train.epochs * order.batches_per_epoch == updates
    assert order.largest_batch == batch
    assert config.gradient.accumulation == 1
    assert config.data.resolution == 768


def adapted(config: Config, names: tuple[str, ...], presets: Presets) -> dict[str, tuple[int, float, float]]:
    """By layer: rank, alpha over it, and rate. A kernel's width is that of `conv_rank`."""
    own = apply_rules(choose(names, config.lora.targets, presets, "", ""), config.lora.rules, presets)
    kind = ADAPTERS.chosen(config.lora)
    found = {}
    for name, layer in own.items():
        shape = (8, 8, 3, 3) if name.endswith(KERNELS) and ".skip" not in name else (8, 8)
        usual = kind.sizes(shape, config.lora.rank, config.lora.alpha)
        rank = layer.rank or usual[0]
        found[name] = (rank, (layer.alpha or usual[1]) / rank, layer.lr or config.optimizer.lr)
    return found


KERNELS = ("in_layers.2", "out_layers.3", ".op", ".conv")


@pytest.mark.parametrize(
    ("more", "layers", "linear", "kernel"),
    [
        ("", 722, (16, 0.5), None),
        ("network_args = ['conv_dim=8', 'conv_alpha=2']", 788, (16, 0.5), (8, 0.25)),
        ("network_args = ['conv_dim=8']", 788, (16, 0.5), (8, 1 / 8)),
        ("NETWORK = 'lycoris.kohya'\nnetwork_args= ['algo=locon']", 788, (16, 0.5), (16, 0.5)),
        (
            "NETWORK = 'lycoris.kohya'\nnetwork_args= ['algo=loha', 'conv_dim=4', 'conv_alpha=4']",
            788,
            (16, 0.5),
            (4, 1.0),
        ),
        ("NETWORK = 'lycoris.kohya'\nnetwork_args= ['algo=lokr', 'preset=attn-mlp']", 722, (16, 0.5), None),
    ],
)
def test_layers_and_ranks_of_sdxl(
    tmp_path: Path, more: str, layers: int, linear: tuple[int, float], kernel: tuple[int, float] | None
) -> None:
    """722 layers is what sd-scripts says that it makes for SDXL's UNet, 788 with convolutions.

    Of these 38 are larger than 1x1: two in each of 17 residual blocks, and four that halve or double the size.
    """
    _, _, module = more.partition("NETWORK = ")
    config = imported(tmp_path, more) if not module else with_module(tmp_path, module)
    found = adapted(config, UNET_MODULES, UNET_PRESETS)
    kernels = {name for name in found if name.endswith(KERNELS)}
    assert (len(found), len(kernels)) == (layers, 38 if kernel else 0)
    assert {each[:2] for name, each in found.items() if name not in kernels} == {linear}
    assert {found[name][:2] for name in kernels} == ({kernel} if kernel else set())


def with_module(tmp_path: Path, more: str) -> Config:
    module, _, rest = more.partition("\n")
    (tmp_path / "theirs.toml").write_text(BASE.replace('"networks.lora"', module) + rest)
    import_config(str(tmp_path / "theirs.toml"), tmp_path / "ours.toml", "sdxl", force=True)
    return load(str(tmp_path / "ours.toml"))


def flux_names() -> tuple[str, ...]:
    parts = [
        f"{stream}_{part}"
        for stream in ("img", "txt")
        for part in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2", "mod.lin")
    ]
    double = [f"double_blocks.{i}.{part}" for i in range(19) for part in parts]
    return (
        *double,
        *(f"single_blocks.{i}.{part}" for i in range(38) for part in ("linear1", "linear2", "modulation.lin")),
    )


@pytest.mark.parametrize(
    ("args", "layers", "own"),
    [
        ([], 304, {}),
        (["train_blocks=single"], 114, {}),
        (["train_double_block_indices=0-1,7", "train_single_block_indices=none"], 30, {}),
        (["img_mod_dim=0", "single_dim=4"], 285, {"single_blocks.3.linear1": 4, "single_blocks.3.modulation.lin": 16}),
    ],
)
def test_layers_and_ranks_of_flux(tmp_path: Path, args: list[str], layers: int, own: dict[str, int]) -> None:
    """304 layers of 19 double blocks of 10 and 38 single ones of 3; a rank of 0 leaves a part of blocks out."""
    (tmp_path / "theirs.toml").write_text(
        BASE.replace("networks.lora", "networks.lora_flux") + f"network_args = {args}\nguidance_scale = 1.0\n"
    )
    import_config(str(tmp_path / "theirs.toml"), tmp_path / "ours.toml", "flux")
    config = load(str(tmp_path / "ours.toml"))
    found = adapted(config, flux_names(), DOUBLE_SINGLE_PRESETS)
    assert len(found) == layers
    assert {name: found[name][0] for name in own} == own


@pytest.mark.parametrize(
    ("more", "rates"),
    [
        ("", {"clip_l": 1e-4, "clip_g": 1e-4}),
        ("text_encoder_lr = [5e-5, 1e-5]", {"clip_l": 5e-5, "clip_g": 1e-5}),
        ("text_encoder_lr = 2e-5\nunet_lr = 3e-4", {"clip_l": 2e-5, "clip_g": 2e-5}),
        ("text_encoder_lr1 = 2e-5\ntext_encoder_lr2 = 0.0", {"clip_l": 2e-5}),
        ("network_train_unet_only = true", {}),
    ],
)
def test_rates_of_text_encoders(tmp_path: Path, more: str, rates: dict[str, float]) -> None:
    config = imported(tmp_path, more)
    shared = config.text_encoders.lr or config.optimizer.lr
    own = {rule.match[0].removesuffix(".*"): rule.lr for rule in config.lora.rules}
    assert {name: own.get(name, shared) for name in config.text_encoders.train} == rates


@pytest.mark.parametrize(
    ("options", "tokens", "listed"),
    [
        ("--qwen3_max_token_length=512 --t5_max_token_length=512", None, 0),
        ("--qwen3_max_token_length=256 --t5_max_token_length=256", 256, 0),
        ("--qwen3_max_token_length=256", 256, 0),
        ("--t5_max_token_length=300", None, 1),
    ],
)
def test_length_of_captions_of_anima(tmp_path: Path, options: str, tokens: int | None, listed: int) -> None:
    command = f"accelerate launch anima_train_network.py --pretrained_model_name_or_path=m {options} --network_dim=4"
    (tmp_path / "run.sh").write_text(f"{command} --network_module=networks.lora_anima --output_dir=o\n")
    result = import_config(str(tmp_path / "run.sh"), None)
    assert result["carried"].get("text_encoders.qwen3_tokens", {}).get("value") == tokens
    assert len([line for line in result["listed"] if "token_length" in line]) == listed
