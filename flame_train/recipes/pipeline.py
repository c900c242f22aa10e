"""From a config to a result: check everything, encode, load, train. The same for every family."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.adapters.lora import Attached, attach
from flame_train.adapters.targets import resolve
from flame_train.config.load import load
from flame_train.config.render import resolved
from flame_train.config.resume import differences
from flame_train.config.schema import Config
from flame_train.data.buckets import BucketRule, Placement
from flame_train.data.dataset import Dataset
from flame_train.data.order import Order
from flame_train.data.placed import Placed, place
from flame_train.diffusion.objectives import Objective
from flame_train.diffusion.schedules import NoiseSchedule
from flame_train.engine import Tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.engine.mode import deterministic
from flame_train.errors import ConfigError
from flame_train.io.durable import write_durably
from flame_train.io.files import preflight
from flame_train.io.runfolder import RunFolder
from flame_train.training.encode import Encoded, encode, keys_of
from flame_train.training.family import Denoiser, Facts, Family
from flame_train.training.loader import Loader
from flame_train.training.loop import Run, forgiving, train
from flame_train.training.optimizer import build_optimizer
from flame_train.training.preview import Drawing, draw, grid, write_png
from flame_train.training.result import restore, write_lora
from flame_train.training.step import FIGURES, State
from flame_train.training.stop import StopRequest

_LOG = logging.getLogger(__name__)


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
        return Order(self.placed.buckets, c.data.repeats, c.data.batch_size, c.train.seed)

    @property
    def parameters(self) -> int:
        """The number of trained values."""
        shapes = (self.facts.layers[name] for name in self.targets)
        return sum(self.config.lora.rank * (s[0] + math.prod(s[1:])) for s in shapes)

    def predicted_memory(self) -> int:
        """Bytes on the device in training: weights, adapters with gradients and moments, and what a step keeps."""
        c = self.config
        item = as_dtype(c.train.precision).itemsize
        moments = 4 if c.optimizer.name == "adamw" else 3
        steps = [
            self.facts.activation_bytes(b, c.data.batch_size, item, c.gradient.checkpointing)
            for b in set(self.placed.buckets)
        ]
        return self.facts.weights * item + self.parameters * 4 * moments + max(steps)


def make_plan(family: Family, config: Config, stop: StopRequest) -> Plan:
    """Checks the model's headers, every picture and caption, the buckets and the targets. Nothing is loaded."""
    facts = family.check(config)
    rule = BucketRule(
        config.data.resolution, config.data.bucket_step, config.data.min_bucket, config.data.max_bucket,
        config.data.upscale,
    )  # fmt: skip
    if config.data.bucket_step % facts.side_multiple:
        raise ConfigError(
            f"data.bucket_step: expected a multiple of {facts.side_multiple} for this model, "
            f"got {config.data.bucket_step}"
        )
    dataset = Dataset.scan(
        Path(config.data.path), config.data.repeats, default_caption=config.data.caption or None,
        caption_endings=(config.data.caption_extension,), on_bad=config.data.on_bad_image,
        progress=lambda done, total: stop.check("stopped while reading the dataset"),
    )  # fmt: skip
    placed = place(dataset, rule, config.data.on_bad_image)
    targets = resolve(family.skeleton(config), config.lora.targets, family.presets)
    for notice in placed.dataset.notices:
        _LOG.warning("%s", notice)
    cut = family.truncated(config, [item.caption for item in placed.dataset.items])
    if cut:
        _LOG.warning(
            "%d caption(s) are longer than data.max_tokens=%d; the rest is not seen", cut, config.data.max_tokens
        )
    return Plan(config, family, facts, placed, tuple(targets))


def describe(plan: Plan) -> dict[str, Any]:
    """The plan as a user reads it."""
    c, order = plan.config, plan.order
    buckets = [f"{w}x{h}" for h, w in plan.placed.buckets]
    return {
        "family": plan.family.name,
        "pictures": len(buckets),
        "buckets": {name: buckets.count(name) for name in sorted(set(buckets))},
        "steps": c.train.steps,
        "batches per epoch": order.batches_per_epoch,
        "epochs": round(c.train.steps * c.gradient.accumulation / order.batches_per_epoch, 2),
        "adapted layers": len(plan.targets),
        "trainable parameters": plan.parameters,
        "base parameters": plan.facts.weights,
        "predicted memory GiB": round(plan.predicted_memory() / 2**30, 2),
        "output": c.output.dir,
    }


def run(family: Family, source: str, overrides: list[str], device: str, dry_run: bool) -> dict[str, Any]:
    """The whole of `<family>-lora`."""
    config = load(source, overrides)
    with StopRequest() as stop:
        if not dry_run:
            get_backend(device)  # a missing GPU is told before anything is read
        plan = make_plan(family, config, stop)
        if dry_run:
            return describe(plan) | {"files": plan.placed.to_json()}
        return train_plan(plan, device, stop)


def fill_cache(family: Family, source: str, overrides: list[str], device: str, dry_run: bool) -> dict[str, Any]:
    """The whole of `cache`."""
    config = load(source, overrides)
    with StopRequest() as stop:
        plan = make_plan(family, config, stop)
        if dry_run:
            keys = keys_of(plan.placed, config, family, _prompts(config))
            return {"pictures": len(keys.pictures), "captions": len(keys.captions)}
        encoded = encode(plan.placed, config, family, device, _prompts(config), stop)
        keys, cache = encoded.keys, encoded.cache
        return {
            "pictures": len(keys.pictures),
            "captions": len(keys.captions),
            "encoded": cache.misses,
            "kept": cache.hits,
            "cache": str(cache.folder),
        }


def train_plan(plan: Plan, device: str, stop: StopRequest) -> dict[str, Any]:
    """Opens the run folder, encodes what is missing, trains or continues, and returns where everything is."""
    config = plan.config
    out = Path(config.output.dir)
    preflight(out, plan.parameters * 4 * 4 * (config.checkpoint.keep + 1))
    with RunFolder(out, resolved(config), lambda old: differences(old, config)) as folder:
        _write_report(plan, folder)
        with deterministic(config.train.deterministic):
            encoded = encode(plan.placed, config, plan.family, device, _prompts(config), stop)
            last = _train(plan, encoded, folder, device, stop)
        return {
            "lora": str(folder.lora),
            "steps": folder.step,
            "loss": last.get("loss"),
            "log": str(out / "log.jsonl"),
            "samples": str(folder.samples),
            "checkpoints": str(folder.checkpoints),
        }


def _train(plan: Plan, encoded: Encoded, folder: RunFolder, device: str, stop: StopRequest) -> dict[str, Any]:
    config, family = plan.config, plan.family
    denoiser = family.denoiser(config, device)
    attached = attach(
        denoiser.model, plan.targets, rank=config.lora.rank, alpha=config.lora.alpha, seed=config.train.seed
    )
    state = make_state(denoiser, attached, config, device)
    dataset = dataset_digest(encoded)
    found = folder.resume()
    for reason in found.skipped if found else ():
        _LOG.warning("a newer checkpoint is damaged and was passed over: %s", reason)
    first = restore(found, state.optimizer, dataset) if found else 0
    if found:
        _LOG.info("continuing after step %d from %s", first, found.path)
    if first >= config.train.steps:
        if not folder.lora.exists():
            write_lora(folder.lora, attached, denoiser.component, family.lora_names(), config, first)
        _LOG.info("all %d steps are done already", config.train.steps)
        return {}
    with Loader(
        plan.order, encoded.example, [item.key for item in plan.placed.dataset.items],
        first=first * config.gradient.accumulation, accumulation=config.gradient.accumulation,
        caption_dropout=config.data.caption_dropout, seed=config.train.seed,
    ) as loader:  # fmt: skip
        preview = make_preview(plan, encoded, denoiser, folder.samples, device, stop)
        return train(
            Run(config, device, folder, denoiser, attached, family.lora_names(), state, loader, dataset, first,
                forgiving(preview), stop)
        )  # fmt: skip


def make_state(denoiser: Denoiser, attached: Attached, config: Config, device: str) -> State:
    """The device state of a fresh run."""
    backend = get_backend(device)
    optimizer = build_optimizer(attached.parameters(), config, backend)
    return State(
        denoise=denoiser.denoise,
        sample_latents=denoiser.sample_latents,
        objective=Objective(
            noise_schedule(config), config.model.prediction, snr_gamma=config.loss.snr_gamma,
            offset_noise=config.loss.offset_noise, device=device,
        ),
        optimizer=optimizer,
        dtype=as_dtype(config.train.precision),
        seed=config.train.seed,
        loss=Tensor(backend.xp.zeros((), np.float32)),
        figures=backend.xp.zeros(len(FIGURES), np.float64),
    )  # fmt: skip


def noise_schedule(config: Config) -> NoiseSchedule:
    """The model's noise schedule, with zero terminal SNR if asked for."""
    schedule = NoiseSchedule.scaled_linear()
    return schedule.zero_terminal_snr() if config.loss.zero_terminal_snr else schedule


def dataset_digest(encoded: Encoded) -> str:
    """A hash of everything the samples of a run depend on: pictures, captions, placements, networks, order."""
    names = [item.key for item in encoded.placed.dataset.items]
    captions = [encoded.keys.captions[item.caption] for item in encoded.placed.dataset.items]
    rows = zip(names, encoded.keys.pictures, captions, strict=True)
    return hashlib.sha256("\n".join("\t".join(row) for row in rows).encode("utf-8", "surrogateescape")).hexdigest()


def make_preview(
    plan: Plan, encoded: Encoded, denoiser: Denoiser, folder: Path, device: str, stop: StopRequest
) -> Callable[[int], None]:
    """A function that writes the sample grid of a step; one that does nothing where no prompts are given."""
    s, config, family = plan.config.sample, plan.config, plan.family
    if not s.prompts or not s.every:
        return lambda step: None
    size = (s.height or config.data.resolution, s.width or config.data.resolution)
    sizes = family.placement(Placement(size, size, size, 0, 0))
    prompts = [encoded.caption(p) | sizes for p in s.prompts]
    negative = encoded.caption(s.negative) | sizes
    drawing = Drawing(
        s.sampler, s.steps, s.guidance, s.seed, noise_schedule(config), config.model.prediction,
        family.latent_shape(config, size), device, as_dtype(config.train.precision),
    )  # fmt: skip
    decode = family.decoder(config, device)

    def preview(step: int) -> None:
        pictures = draw(drawing, denoiser, decode, prompts, negative, stop)
        write_png(folder / f"step-{step:06d}.png", grid(pictures))

    return preview


def _prompts(config: Config) -> tuple[str, ...]:
    """Every text that sampling will need beside the captions."""
    return (*config.sample.prompts, config.sample.negative) if config.sample.every else ()


def _write_report(plan: Plan, folder: RunFolder) -> None:
    """Which picture went to which bucket, beside the run."""
    raw = (json.dumps(plan.placed.to_json(), indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
    write_durably(folder.folder / "dataset.json", [raw], len(raw))
