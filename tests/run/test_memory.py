"""Predicted memory, held to what an H200 took (docs/log/): steps alone, and whole runs with encoding and grids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flame_train.adapters.targets import resolve
from flame_train.config.load import from_options
from flame_train.config.schema import Config
from flame_train.data.bucketed import assign_buckets
from flame_train.data.buckets import BucketRule
from flame_train.data.dataset import Dataset
from flame_train.data.samples import samples_of
from flame_train.data.sets import image_sets
from flame_train.engine.shape_run import H100, RTX_3090
from flame_train.models.common.family import Opening
from flame_train.models.common.small import write_vocabulary
from flame_train.models.registry import FAMILIES
from flame_train.networks.vae.vae import Vae
from flame_train.run.check.adapted_layers import blocks_named
from flame_train.run.check.check_run import Checked
from flame_train.run.memory.prediction import PredictedMemory, predicted_memory
from flame_train.run.plan.plan import Plan
from flame_train.run.sampling.requests import requests, with_defaults
from flame_train.tools.bench import BenchCase, predicted

GIB = 2**30
WITHIN = 0.03


@cache
def peak(case: BenchCase) -> int:
    """Of a step; several tests ask for the same ones."""
    return predicted(case).peak


# ---- steps alone ----------------------------------------------------------------------------------------


def proof(*case: Any) -> Any:
    """A case that differs from one of the others in one thing; each takes some seconds."""
    return pytest.param(*case, marks=pytest.mark.proof)


BF16_STEPS = [
    proof("sdxl", 1, True, 9.29),
    proof("sdxl", 2, True, 12.3),
    ("sdxl", 4, True, 17.60),
    proof("sdxl", 8, True, 30.0),
    proof("sd35-medium", 4, True, 25.22),
    proof("sd35-large", 1, True, 25.83),
    ("flux-dev", 1, True, 41.91),
    proof("flux-dev", 2, True, 60.67),
    proof("flux-dev", 1, False, 41.59),
]
"""`bench step`, rank 16, 1024 x 1024, captured: model, batch, deterministic, GiB."""


@pytest.mark.parametrize(("model", "batch", "exact", "took"), BF16_STEPS)
def test_a_step_takes_what_it_took_on_the_card(model: str, batch: int, exact: bool, took: float) -> None:
    found = peak(BenchCase(model, batch=batch, deterministic=exact))
    assert found / GIB == pytest.approx(took, rel=WITHIN)


IN_8_BITS = [
    ("sdxl", 1, "bf16", "off", 7.51),
    proof("sdxl", 4, "bf16", "off", 16.0),
    proof("sd35-medium", 4, "fp8", "off", 23.2),
    proof("sd35-large", 1, "fp8", "off", 18.4),
    proof("flux-dev", 1, "bf16", "off", 31.1),
    proof("flux-dev", 1, "fp8", "off", 30.6),
    proof("flux-dev", 1, "bf16", "full", 14.7),
    ("flux-dev", 1, "bf16", "offload", 13.3),
]
"""The same with the base in 8 bits, not deterministic: model, batch, arithmetic, checkpointing, GiB."""


@pytest.mark.parametrize(("model", "batch", "arithmetic", "checkpointing", "took"), IN_8_BITS)
def test_so_does_one_with_its_base_in_8_bits(
    model: str, batch: int, arithmetic: Any, checkpointing: Any, took: float
) -> None:
    case = BenchCase(
        model, batch=batch, deterministic=False, quantize="fp8", arithmetic=arithmetic, checkpointing=checkpointing
    )
    assert peak(case) / GIB == pytest.approx(took, rel=WITHIN)


BLOCKS = {"sdxl": 2_207_744_000, "flux-dev": 11_834_228_736}
"""Weights in the transformers' linear layers."""


@pytest.mark.parametrize("model", [proof("sdxl"), "flux-dev"])
def test_fewer_bits_take_what_they_say(model: str) -> None:
    """Checkpointed, so that weights are most; no decoded weight of 4 bits is there for longer than its layer runs."""
    case = BenchCase(model, checkpointing="full", deterministic=False)
    fp8, int8, nf4 = (peak(replace(case, quantize=kind)) for kind in ("fp8", "int8", "nf4"))
    assert int8 == fp8
    saved = BLOCKS[model] * (8 - 4.13) / 8
    assert fp8 - nf4 > 0.97 * saved


@pytest.mark.proof
@pytest.mark.parametrize("model", ["sdxl", "flux-dev"])
def test_each_way_of_checkpointing_takes_less_than_the_one_before(model: str) -> None:
    peaks = [peak(BenchCase(model, checkpointing=how)) for how in ("off", "mlp", "full", "offload")]
    assert peaks == sorted(set(peaks), reverse=True)


def test_checkpointing_some_blocks_lies_between() -> None:
    case = BenchCase("sd35-large")
    full = replace(case, checkpointing="full")
    assert peak(full) < peak(replace(full, checkpoint_blocks=("joint_blocks.1?",))) < peak(case)


# ---- whole runs -----------------------------------------------------------------------------------------

Predict = Callable[..., PredictedMemory]
NO_GRIDS: Any = {"sample": {"every": 0}}


@pytest.fixture
def plan_of(tmp_path: Path) -> Callable[..., Plan]:
    """The plan of a published model on one image of 1024 x 1024, as `scripts/full_run.py` trains; keywords by section.

    Its networks are in no file: only shapes are asked for.
    """
    (tmp_path / "images").mkdir()
    Image.fromarray(np.zeros((1024, 1024, 3), np.uint8)).save(tmp_path / "images" / "a.png")
    (tmp_path / "images" / "a.txt").write_text("a disc")
    write_vocabulary(tmp_path)

    def make(name: str, **given: dict[str, Any]) -> Plan:
        family = next(f for f in FAMILIES.values() if name in f.published)
        usual: dict[str, dict[str, Any]] = {
            "data": {"path": str(tmp_path / "images")},
            "lora": {"targets": ("attention",)},
            "sample": {"every": 6, "prompts": ("a disc",), "steps": 4},
            "train": {"steps": 12},
        }
        config: Config = from_options(**{s: usual.get(s, {}) | given.get(s, {}) for s in {**usual, **given}})
        model = family.declared(
            family.published[name](), Opening(tmp_path, config.model, config.text_encoders, config.data.max_tokens)
        )
        config = config.model_copy(update={"sample": with_defaults(config.sample, model)})
        targets = tuple(resolve(model.network, config.lora.targets, model.presets))
        blocks = blocks_named(model.network, config.gradient.checkpointing, config.gradient.checkpoint_blocks)
        data = config.data
        rule = BucketRule(data.resolution, data.bucket_step, data.min_bucket, data.max_bucket, data.upscale)
        placed = assign_buckets(Dataset.scan(Path(data.path), 1), rule, "stop")
        samples = samples_of([(image_sets(data)[0], placed)])
        wanted = requests(config.sample, config.data.resolution, model) if config.sample.repeats else ()
        return Plan(Checked(config, tmp_path, model, targets, blocks), samples, requests=wanted)

    return make


PREDICTED = dict[str, PredictedMemory]()
"""By model and settings: several tests ask for the same ones."""


@pytest.fixture
def predict(plan_of: Callable[..., Plan]) -> Predict:
    def of(name: str, **given: Any) -> PredictedMemory:
        if (key := f"{name} {given}") not in PREDICTED:
            PREDICTED[key] = predicted_memory(plan_of(name, **given), H100)
        return PREDICTED[key]

    return of


def test_several_processes_take_what_one_does_and_room_for_gradients_in_bf16(
    predict: Predict, plan_of: Callable[..., Plan]
) -> None:
    plan, rounded = plan_of("sd15", **NO_GRIDS), plan_of("sd15", gradient={"all_reduce": "bf16"}, **NO_GRIDS)
    alone, two = predict("sd15", **NO_GRIDS).training, predicted_memory(plan, H100, 2).training
    assert 0 <= two - alone < 2**20
    assert 0 <= predicted_memory(rounded, H100, 2).training - two - 2 * plan.parameters < 2**21
    assert predicted_memory(rounded, H100).training == alone


RUNS = [
    ("sd35-medium", {"data": {"batch_size": 4}}, 30.21),
    proof("sd35-large", {}, 30.97),
    ("sd35-large", {"model": {"quantize": "fp8", "arithmetic": "fp8"}}, 23.67),
    proof("flux-dev", {}, 46.15),
    (
        "flux-dev",
        {
            "model": {"quantize": "fp8"},
            "text_encoders": {"precision": "fp8"},
            "gradient": {"checkpointing": "full"},
        },
        19.79,
    ),
]
"""`scripts/full_run.py`: deterministic, two grids, everything encoded first: model, settings, GiB."""


@pytest.mark.parametrize(("model", "settings", "took"), RUNS)
def test_a_run_with_encoding_and_grids_takes_what_it_took(
    predict: Predict, model: str, settings: Any, took: float
) -> None:
    assert predict(model, **settings).peak / GIB == pytest.approx(took, rel=WITHIN)


def test_a_first_run_takes_no_more_in_training_than_one_with_everything_cached(predict: Predict) -> None:
    """What the autoencoder worked in (1 GiB of it) was taken once more for the step: 10.27 GiB in all."""
    found = predict("sdxl", **NO_GRIDS)
    assert found.peak == found.training
    assert found.training / GIB == pytest.approx(9.29, rel=WITHIN)


def test_training_averages_and_grids_take_what_they_hold(predict: Predict, plan_of: Callable[..., Plan]) -> None:
    averaged = predict("sd15", train={"steps": 12, "ema_decay": 0.999}, **NO_GRIDS).training
    held = averaged - predict("sd15", **NO_GRIDS).training
    assert held == pytest.approx(4 * plan_of("sd15").parameters, rel=0.02)
    plan, plain = plan_of("sdxl"), predict("sdxl", **NO_GRIDS).training
    drawn = predict("sdxl").training
    vae = plan.model.vae.network
    assert isinstance(vae, Vae)
    image, wide = 4 * 1024 * 1024, 256  # fp32; channels at full resolution
    assert drawn - plain >= 4 * vae.num_weights() + image * 4 * wide, "what a layer reads and writes, and works in"
    half = predict("sdxl", model={"vae_precision": "bf16"}).training
    assert half - plain < 0.5 * (drawn - plain)
    tiled = predict("sdxl", model={"vae_tile": 512}).training
    assert tiled - plain < 0.5 * (drawn - plain)


def test_encoding_is_most_where_text_encoders_are(predict: Predict, plan_of: Callable[..., Plan]) -> None:
    small = {"gradient": {"checkpointing": "full"}, "model": {"quantize": "fp8"}, **NO_GRIDS}
    found, text = predict("sd35-medium", **small), plan_of("sd35-medium").model.text
    weights = 2 * sum(encoder.part.network.num_weights() for encoder in text)
    assert found.peak == found.encoding > found.training
    hidden = 2 * 4096 * 10240  # bytes of T5's hidden units, of all tokens that are encoded at once
    assert weights < found.encoding < weights + 8 * hidden
    less = predict("sd35-medium", text_encoders={"precision": "fp8"}, **small).encoding
    t5 = text[-1].part.network
    assert found.encoding - less == pytest.approx(
        sum(p.out_features * p.in_features for p in t5.quantizable()), rel=0.05
    )


def test_an_older_card_takes_more_for_attention_in_a_fixed_order(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of("sdxl", data={"batch_size": 4}, **NO_GRIDS)
    more = predicted_memory(plan, RTX_3090).training - predicted_memory(plan, H100).training
    assert more > 0.9 * 2 * 4 * 10 * 4096**2, "cuDNN writes all scores down"
