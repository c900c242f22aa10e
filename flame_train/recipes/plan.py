"""What a config asks for, checked against its files before anything is loaded. The same for every family."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flame_train.adapters.targets import resolve
from flame_train.config.load import Gathered, Located
from flame_train.config.schema import Config
from flame_train.data.buckets import BucketRule
from flame_train.data.dataset import Dataset
from flame_train.data.order import Order
from flame_train.data.placed import Placed, place
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype, float32
from flame_train.errors import ConfigError, EnvironmentFault
from flame_train.io.lora_names import LoraFamily
from flame_train.training.family import H100, Facts, Family, Load, refuse_foreign
from flame_train.training.recompute import recomputed
from flame_train.training.stop import StopRequest

from .pictures import as_usual, check_sampling, picture_size

_LOG = logging.getLogger(__name__)
_LONGEST_EPOCH = 10_000_000  # samples


@dataclass(frozen=True, slots=True)
class Plan:
    """A config that was checked against its files: nothing is loaded yet."""

    config: Config
    family: Family
    facts: Facts
    placed: Placed
    targets: tuple[str, ...]

    @property
    def order(self) -> Order:
        """Which sample comes when."""
        c = self.config
        return Order(self.placed.buckets, self.placed.dataset.comings, c.data.batch_size, c.train.seed)

    @property
    def parameters(self) -> int:
        """The number of trained values."""
        shapes = (self.facts.layers[name] for name in self.targets)
        return sum(self.config.lora.rank * (s[0] + math.prod(s[1:])) for s in shapes)

    def predicted_memory(self, warpgroups: int = H100) -> int:
        """Bytes on the device when they are most: in training, or before it, while the cache is filled.

        `warpgroups` as in `Load`. Whether the cache is filled is not asked: only all networks' digests would tell.
        """
        return max(self.encoding_memory(), self.training_memory(warpgroups))

    def encoding_memory(self) -> int:
        """Bytes on the device while captions are encoded, or pictures: the one follows the other.

        A caption passes by in a hundredth of what the text encoders weigh.
        """
        c, vae = self.config, self.facts.vae
        item = as_dtype(c.model.vae_precision).itemsize
        pixels = max(h * w for h, w in self.placed.buckets)
        pictures = (vae.num_weights() + pixels * vae.encoding()) * item
        room = (c.model.vae_precision == "fp32") * pixels * vae.workspace() * item
        return max(self.facts.text, pictures + room)

    def training_memory(self, warpgroups: int = H100) -> int:
        """Bytes on the device in training: weights, adapters with gradients and moments, and what a step keeps.

        Where grids are drawn their decoder is there all the time, and what a step takes is not given back for a
        picture to be decoded, but for the room that large workspaces share.
        """
        c, vae = self.config, self.facts.vae
        item, adapted = as_dtype(c.train.precision).itemsize, frozenset(self.targets)
        recompute, blocks = recomputed(c, self.facts.skeleton)
        loads = [
            Load(bucket, c.data.batch_size, item, recompute, c.train.deterministic, blocks, warpgroups, adapted)
            for bucket in set(self.placed.buckets)
        ]
        draws = bool(c.sample.every and c.sample.prompts)
        pixels = math.prod(picture_size(c, self.facts))
        numbers = vae.num_weights() + pixels * vae.decoding()
        decoder = draws * numbers * as_dtype(c.model.vae_precision).itemsize
        step = max(self.facts.activation_bytes(replace(load, deterministic=False)) for load in loads)
        scores = max(map(self.facts.activation_bytes, loads)) - step
        wide = draws and c.model.vae_precision == "fp32"
        room = max(scores, wide * pixels * vae.workspace() * float32.itemsize)
        state = state_bytes(self.parameters, c.optimizer.name, c.train.ema_decay > 0)
        return self.facts.skeleton.weight_bytes(item, c.model.fp8) + state + decoder + step + room


def state_bytes(parameters: int, optimizer: str, averaged: bool = False) -> int:
    """What trained values take with their gradients, the optimizer's moments and their average, all fp32."""
    return parameters * 4 * ((4 if optimizer == "adamw" else 3) + averaged)


def make_plan(family: Family, asked: Config | Located, stop: StopRequest) -> Plan:
    """Checks the model's headers, every picture and caption, the buckets and the targets. Nothing is loaded.

    Raises ConfigError with all that does not fit the model, each where it was written if `asked` knows.
    """
    facts, config, targets = _fitting(family, asked if isinstance(asked, Located) else Located(asked))
    rule = BucketRule(
        config.data.resolution, config.data.bucket_step, config.data.min_bucket, config.data.max_bucket,
        config.data.upscale,
    )  # fmt: skip
    dataset = Dataset.scan(
        Path(config.data.path), config.data.repeats, by_folder=config.data.folder_repeats,
        default_caption=config.data.caption or None, caption_endings=(config.data.caption_extension,),
        on_bad=config.data.on_bad_image, progress=lambda done, total: stop.check("while reading the dataset"),
    )  # fmt: skip
    _check_epoch(dataset)
    placed = place(dataset, rule, config.data.on_bad_image)
    _check_sides(placed, facts)
    for notice in placed.dataset.notices:
        _LOG.warning("%s", notice)
    captions, prompts = [item.caption for item in placed.dataset.items], config.sample.prompts
    for what, texts in (("caption", captions), ("prompt", prompts if config.sample.every else ())):
        cut = family.truncated(config, texts)
        if cut:
            key, tokens = family.caption_limit(config)
            _LOG.warning("%d %s(s) are longer than %s=%d; the rest is not seen", cut, what, key, tokens)
    return Plan(config, family, facts, placed, targets)


def _fitting(family: Family, asked: Located) -> tuple[Facts, Config, tuple[str, ...]]:
    """What the model's headers tell, the config with what it leaves to the model filled in, and the layers to adapt.

    Raises ConfigError with all that does not fit family or model.
    """
    config, wrong = asked.config, Gathered(asked)
    with wrong:
        refuse_foreign(family, config)
    with wrong:
        _check_places(config)
    facts = None
    with wrong:
        facts = family.check(config)
    if facts is None:
        wrong.tell()
    assert facts is not None
    config = as_usual(config, family)
    with wrong:
        _check_grid(config, facts)
    if config.sample.every and config.sample.prompts:
        with wrong:
            check_sampling(config, family, facts)
    targets: list[str] = []
    with wrong:
        targets = resolve(facts.skeleton, config.lora.targets, family.presets)
        _check_names(family.lora_names(config), targets)
    with wrong:
        recomputed(config, facts.skeleton)
    wrong.tell()
    return facts, config, tuple(targets)


def _check_grid(config: Config, facts: Facts) -> None:
    step, grid = config.data.bucket_step, facts.side_multiple
    if step % grid:
        raise ConfigError(f"data.bucket_step: expected a multiple of {grid} for this model, got {step}")


def _check_epoch(dataset: Dataset) -> None:
    """An epoch's order is made as a whole."""
    samples = sum(dataset.comings)
    if samples > _LONGEST_EPOCH:
        raise ConfigError(
            f"data.repeats: expected an epoch of at most {_LONGEST_EPOCH:,} samples, got {samples:,}; lower it: "
            "train.steps says how long a run is"
        )


def _check_sides(placed: Placed, facts: Facts) -> None:
    """Buckets that the model has no positions for would be met when everything is encoded."""
    longest = max(max(bucket) for bucket in placed.buckets)
    if 0 < facts.longest_side < longest:
        raise ConfigError(
            f"data.max_bucket: pictures go to a bucket with a side of {longest}, and this model has positions for "
            f"{facts.longest_side}; set data.max_bucket = {facts.longest_side} or a lower data.resolution"
        )


def _check_places(config: Config) -> None:
    """A run beside its own pictures would take its sample grids for more of them. Hidden folders are never read."""
    out, pictures = Path(config.output.dir).resolve(), Path(config.data.path).resolve()
    if out.is_relative_to(pictures) and not any(p.startswith(".") for p in out.relative_to(pictures).parts):
        raise ConfigError(
            f"output.dir: {out} lies inside data.path, where its sample grids would be taken for pictures to train "
            "on; name a folder elsewhere"
        )


def _check_names(names: LoraFamily, targets: Sequence[str]) -> None:
    """Every adapted layer must have a name in LoRA files, which are written long after it was chosen."""
    named = {module for component in names.components for module in component.modules}
    nameless = [target for target in targets if target not in named]
    if nameless:
        raise ConfigError(
            f"lora.targets: {len(nameless)} of the chosen layers have no name in LoRA files of {names.name}, such as "
            f"{nameless[0]}: no program could load them; choose other layers, or a model of the usual depth"
        )


def warpgroups_of(device: str) -> int:
    """What `Load` calls warpgroups, of this machine's GPU; an H100's where there is none, or none is asked for."""
    if device == "cpu":
        return H100
    try:
        k = get_backend("cuda").kernels
    except EnvironmentFault:
        return H100
    return int(k.multiprocessors) if k.compute_capability == 90 else 0


def describe(plan: Plan, device: str) -> dict[str, Any]:
    """The plan as a user reads it, for this machine's GPU, or one of compute capability 9.0 where there is none."""
    c, order, warpgroups = plan.config, plan.order, warpgroups_of(device)
    _, blocks = recomputed(c, plan.facts.skeleton)
    return {
        "family": plan.family.name,
        "pictures": len(plan.placed.placements),
        "buckets": plan.placed.bucket_rows(),
        "steps": c.train.steps,
        "batches per epoch": order.batches_per_epoch,
        "repeated to fill batches, per epoch": order.filled_per_epoch,
        "epochs": round(c.train.steps * c.gradient.accumulation / order.batches_per_epoch, 2),
        "adapted layers": len(plan.targets),
        "trainable parameters": plan.parameters,
        "base parameters": plan.facts.weights,
        "recomputed blocks": f"{len(blocks)} of {len(plan.facts.skeleton.blocks())}",
        "predicted memory GiB": round(plan.predicted_memory(warpgroups) / 2**30, 2),
        "predicted memory GiB in training": round(plan.training_memory(warpgroups) / 2**30, 2),
        "output": c.output.dir,
    }
