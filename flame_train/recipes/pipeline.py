"""From a config to a result: check everything, encode, load, train. The same for every family."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.adapters.lora import Attached, attach
from flame_train.adapters.targets import resolve
from flame_train.config.load import Gathered, Located, load_located
from flame_train.config.render import resolved
from flame_train.config.resume import differences
from flame_train.config.schema import Config
from flame_train.data.buckets import BucketRule
from flame_train.data.dataset import Dataset
from flame_train.data.order import Order
from flame_train.data.placed import Placed, place
from flame_train.engine import Tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype, float32
from flame_train.engine.mode import deterministic
from flame_train.errors import ConfigError
from flame_train.io.commit import Found, count
from flame_train.io.durable import write_durably
from flame_train.io.files import preflight
from flame_train.io.lora_names import LoraFamily
from flame_train.io.runfolder import RunFolder
from flame_train.io.weights import sampled_digest
from flame_train.training.batch import sender
from flame_train.training.encode import Encoded, Keys, encode, keys_of
from flame_train.training.family import Denoiser, Facts, Family, Load, base_model_path, recomputed, refuse_foreign
from flame_train.training.loader import Loader
from flame_train.training.loop import Run, forgiving, train
from flame_train.training.optimizer import build_optimizer
from flame_train.training.preview import draw, grid, write_png
from flame_train.training.result import Sources, check_sources, knows_sources, restore
from flame_train.training.step import FIGURES, Objective, State
from flame_train.training.stop import StopRequest

from .pictures import as_usual, check_sampling, drawing, picture_size, size_conditioning

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
        return Order(self.placed.buckets, self.placed.dataset.comings, c.data.batch_size, c.train.seed)

    @property
    def parameters(self) -> int:
        """The number of trained values."""
        shapes = (self.facts.layers[name] for name in self.targets)
        return sum(self.config.lora.rank * (s[0] + math.prod(s[1:])) for s in shapes)

    def predicted_memory(self) -> int:
        """Bytes on the device when they are most: in training, or before it, while the cache is filled.

        Whether it is filled already is not asked: only the digests of all networks would tell.
        """
        return max(self.encoding_memory(), self.training_memory())

    def encoding_memory(self) -> int:
        """Bytes on the device while captions are encoded, or pictures: the one follows the other.

        A caption passes by in a hundredth of what the text encoders weigh.
        """
        c, vae = self.config, self.facts.vae
        item = as_dtype(c.model.vae_precision).itemsize
        pixels = max(h * w for h, w in self.placed.buckets)
        pictures = (vae.num_weights() + pixels * vae.encoding()) * item
        room = (c.model.vae_precision == "fp32") * pixels * vae.workspace() * item
        return max(self.facts.text * as_dtype(c.train.precision).itemsize, pictures + room)

    def training_memory(self) -> int:
        """Bytes on the device in training: weights, adapters with gradients and moments, and what a step keeps.

        Where grids are drawn their decoder is there all the time, and what a step takes is not given back for a
        picture to be decoded, but for the room that large workspaces share.
        """
        c, vae = self.config, self.facts.vae
        item = as_dtype(c.train.precision).itemsize
        loads = [
            Load(bucket, c.data.batch_size, item, recomputed(c), c.train.deterministic)
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
        return self.facts.weights * item + state + decoder + step + room


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
    placed = place(dataset, rule, config.data.on_bad_image)
    _check_sides(placed, facts)
    for notice in placed.dataset.notices:
        _LOG.warning("%s", notice)
    cut = family.truncated(config, [item.caption for item in placed.dataset.items])
    if cut:
        key, tokens = family.caption_limit(config)
        _LOG.warning("%d caption(s) are longer than %s=%d; the rest is not seen", cut, key, tokens)
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
    wrong.tell()
    return facts, config, tuple(targets)


def _check_grid(config: Config, facts: Facts) -> None:
    step, grid = config.data.bucket_step, facts.side_multiple
    if step % grid:
        raise ConfigError(f"data.bucket_step: expected a multiple of {grid} for this model, got {step}")


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


def describe(plan: Plan) -> dict[str, Any]:
    """The plan as a user reads it."""
    c, order = plan.config, plan.order
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
        "predicted memory GiB": round(plan.predicted_memory() / 2**30, 2),
        "predicted memory GiB in training": round(plan.training_memory() / 2**30, 2),
        "output": c.output.dir,
    }


def run(family: Family, source: str, overrides: list[str], device: str, dry_run: bool) -> dict[str, Any]:
    """The whole of `<family>-lora`."""
    asked = load_located(source, overrides)
    with StopRequest() as stop:
        if not dry_run:
            get_backend(device)  # a missing GPU is told before anything is read
        plan = make_plan(family, asked, stop)
        if dry_run:
            look(plan, run_folder(plan))
            return describe(plan) | {"files": plan.placed.to_json()}
        return train_plan(plan, device, stop)


def fill_cache(family: Family, asked: Located, device: str, dry_run: bool) -> dict[str, Any]:
    """The whole of `cache`."""
    config = asked.config
    with StopRequest() as stop:
        if not dry_run:
            get_backend(device)
        plan = make_plan(family, asked, stop)
        keys = keys_of(plan.placed, config, family, _prompts(config))
        if dry_run:
            return {"pictures": len(keys.pictures), "captions": len(keys.captions)}
        cache = encode(plan.placed, keys, config, family, device, stop).cache
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
    closed = run_folder(plan)
    found = look(plan, closed)
    keys = keys_of(plan.placed, config, plan.family, _prompts(config))
    sources = sources_of(plan, keys)
    if found is not None:
        check_sources(found, sources)
    with closed as folder:
        found = _resume(folder, sources)
        _write_report(plan, folder)
        _notice_copies(plan)
        encoded = encode(plan.placed, keys, config, plan.family, device, stop)
        with deterministic(config.train.deterministic):
            last = _train(plan, encoded, folder, found, sources, device, stop) or folder.last()
        return {
            "lora": str(folder.lora),
            "steps": folder.step,
            "loss": last.get("loss"),
            "log": str(folder.folder / "log.jsonl"),
            "samples": str(folder.samples) if any(folder.samples.glob("*.png")) else None,
            "checkpoints": str(folder.checkpoints),
        }


def run_folder(plan: Plan) -> RunFolder:
    """The folder of a plan's run, not opened."""

    def refusal(old: str, found: Found | None) -> str | None:
        return differences(old, plan.config, moved=found is None or knows_sources(found))

    return RunFolder(Path(plan.config.output.dir), resolved(plan.config), refusal)


def look(plan: Plan, folder: RunFolder) -> Found | None:
    """The checkpoint to continue from, with nothing written yet. Raises OutputError if the run could not go on here."""
    found, c = folder.look(), plan.config
    if found is None or found.step < c.train.steps:
        new = c.checkpoint.keep + 1 - min(c.checkpoint.keep, count(folder.checkpoints))
        preflight(folder.folder, plan.parameters * 4 * 4 * new)
    return found


def _notice_copies(plan: Plan) -> None:
    filled, size = plan.order.filled_per_epoch, plan.config.data.batch_size
    if filled:
        seen = plan.order.batches_per_epoch * size
        _LOG.info(
            "%d of an epoch's %d samples repeat others, to fill batches of data.batch_size=%d", filled, seen, size
        )


def _resume(folder: RunFolder, sources: Sources) -> Found | None:
    """The checkpoint to continue from, the log cut back to it. It may be newer than the one that was looked at."""
    found = folder.resume()
    if found is not None:
        for reason in found.skipped:
            _LOG.warning("a newer checkpoint is damaged and was passed over: %s", reason)
        check_sources(found, sources)
        _LOG.info("continuing after step %d from %s", found.step, found.path)
    return found


def _train(
    plan: Plan, encoded: Encoded, folder: RunFolder, found: Found | None, sources: Sources, device: str,
    stop: StopRequest,
) -> dict[str, Any]:  # fmt: skip
    config, family = plan.config, plan.family
    denoiser = family.denoiser(config, device)
    attached = attach(
        denoiser.model, plan.targets, rank=config.lora.rank, alpha=config.lora.alpha, seed=config.train.seed
    )
    state = make_state(denoiser, attached, family.objective(config, device), config, device)
    first = restore(found, state.optimizer) if found else 0
    if first >= config.train.steps:
        _LOG.info("all %d steps are done already", config.train.steps)
    with Loader(
        plan.order, encoded.example, [item.key for item in plan.placed.dataset.items],
        first=first * config.gradient.accumulation, accumulation=config.gradient.accumulation,
        caption_dropout=config.data.caption_dropout, seed=config.train.seed,
        encoder_dropout={name: getattr(config.data, f"{name}_dropout") for name in family.arrays_of},
        send=sender(get_backend(device), state.dtype),
    ) as loader:  # fmt: skip
        preview = make_preview(plan, encoded, denoiser, folder.sample, device, stop)
        return train(
            Run(config, device, folder, denoiser, attached, family.lora_names(config), state, loader, sources, first,
                forgiving(preview), stop)
        )  # fmt: skip


def make_state(denoiser: Denoiser, attached: Attached, objective: Objective, config: Config, device: str) -> State:
    """The device state of a fresh run."""
    backend = get_backend(device)
    optimizer = build_optimizer(attached.parameters(), config, backend)
    return State(
        denoise=denoiser.denoise,
        sample_latents=denoiser.sample_latents,
        objective=objective,
        optimizer=optimizer,
        dtype=as_dtype(config.train.precision),
        seed=config.train.seed,
        loss=Tensor(backend.xp.zeros((), np.float32)),
        figures=backend.xp.zeros(len(FIGURES), np.float64),
    )  # fmt: skip


def sources_of(plan: Plan, keys: Keys) -> Sources:
    """What a plan's weights will follow from, told by the contents of files."""
    base = sampled_digest(base_model_path(plan.config))
    return Sources(keys.networks["picture"], keys.networks["caption"], base, dataset_digest(plan.placed, keys))


def dataset_digest(placed: Placed, keys: Keys) -> str:
    """A hash of everything the samples of a run depend on: pictures, captions, placements, networks, order."""
    names = [item.key for item in placed.dataset.items]
    captions = [keys.captions[item.caption] for item in placed.dataset.items]
    rows = zip(names, keys.pictures, captions, strict=True)
    return hashlib.sha256("\n".join("\t".join(row) for row in rows).encode("utf-8", "surrogateescape")).hexdigest()


def make_preview(
    plan: Plan, encoded: Encoded, denoiser: Denoiser, place: Callable[[int], Path], device: str, stop: StopRequest
) -> Callable[[int], None]:
    """A function that writes the sample grid of a step where `place` says; one that does nothing without prompts."""
    s, config, family = plan.config.sample, plan.config, plan.family
    if not s.prompts or not s.every:
        return lambda step: None
    size = picture_size(config, plan.facts)
    sizes = size_conditioning(family, size)
    prompts = [encoded.caption(p) | sizes for p in s.prompts]
    negative = encoded.caption(s.negative) | sizes
    how = drawing(config, family, size, device)
    decode = family.decoder(config, device)

    def preview(step: int) -> None:
        # Choices are measured for what recurs thousands of times, and what training may vary in must not show here.
        with deterministic(True):
            pictures = draw(how, denoiser, decode, prompts, negative, stop)
        write_png(place(step), grid(pictures))

    return preview


def _prompts(config: Config) -> tuple[str, ...]:
    """Every text that sampling will need beside the captions."""
    return (*config.sample.prompts, config.sample.negative) if config.sample.every else ()


def _write_report(plan: Plan, folder: RunFolder) -> None:
    """Which picture went to which bucket, beside the run."""
    raw = (json.dumps(plan.placed.to_json(), indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
    write_durably(folder.folder / "dataset.json", [raw], len(raw))
