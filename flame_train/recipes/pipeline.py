"""From a plan to a result: encode, load, train. The same for every family."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flame_train.adapters.lora import Attached, attach
from flame_train.config.load import Located, load_located
from flame_train.config.render import resolved
from flame_train.config.resume import differences
from flame_train.config.schema import Config
from flame_train.data.placed import Placed
from flame_train.engine import Tensor, nn
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.engine.mode import deterministic
from flame_train.errors import OutputError
from flame_train.io.commit import Found, count
from flame_train.io.durable import write_durably
from flame_train.io.files import preflight
from flame_train.io.hub import fetching
from flame_train.io.runfolder import RunFolder
from flame_train.io.weights import sampled_digest
from flame_train.training.batch import sender
from flame_train.training.encode import Encoded, Keys, could_cache, encode, keys_of
from flame_train.training.family import Denoiser, Family, base_model_path
from flame_train.training.loader import Loader
from flame_train.training.loop import Run, forgiving, train
from flame_train.training.optimizer import build_optimizer
from flame_train.training.preview import draw, grid, png
from flame_train.training.result import Sources, check_sources, formats, knows_sources, restore
from flame_train.training.step import FIGURES, Objective, State
from flame_train.training.stop import StopRequest

from .pictures import drawing, picture_size, size_conditioning
from .plan import Plan, describe, make_plan, warpgroups_of

_LOG = logging.getLogger(__name__)


def run(family: Family, source: str, overrides: list[str], device: str, dry_run: bool) -> dict[str, Any]:
    """The whole of `<family>-lora`."""
    asked = load_located(source, overrides)
    with StopRequest() as stop, fetching(not dry_run):
        if not dry_run:
            get_backend(device)  # a missing GPU is told before anything is read
            nn.check_fp8(asked.config.model.fp8, device, asked.config.train.precision)
        plan = make_plan(family, asked, stop)
        if dry_run:
            look(plan, run_folder(plan))
            return describe(plan, device) | {"files": plan.placed.to_json()}
        return train_plan(plan, device, stop)


def fill_cache(family: Family, asked: Located, device: str, dry_run: bool) -> dict[str, Any]:
    """The whole of `cache`."""
    config = asked.config
    with StopRequest() as stop, fetching(not dry_run):
        if not dry_run:
            get_backend(device)
        plan = make_plan(family, asked, stop)
        could_cache(config)
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
        _notice_memory(plan, device)
        encoded = encode(plan.placed, keys, config, plan.family, device, stop)
        with deterministic(config.train.deterministic):
            last = _train(plan, encoded, folder, found, sources, device, stop) or folder.last()
        return {
            "lora": str(folder.lora),
            **{f"lora_{form}": str(folder.lora_beside(form)) for form in formats(config)[1:]},
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
    could_cache(c)
    if found is not None and found.step > c.train.steps:
        raise OutputError(
            f"{folder.folder}: its run is at step {found.step}, beyond train.steps = {c.train.steps}; set train.steps "
            f"to {found.step} or more, or output.dir to another folder; LoRAs of earlier steps: {folder.checkpoints}"
        )
    if found is None or found.step < c.train.steps:
        new = c.checkpoint.keep + 1 - min(c.checkpoint.keep, count(folder.checkpoints))
        arrays = 4 + (c.train.ema_decay > 0)  # values, once more as the LoRA, two moments, and their average
        preflight(folder.folder, plan.parameters * 4 * arrays * new)
    return found


def _notice_copies(plan: Plan) -> None:
    filled, size = plan.order.filled_per_epoch, plan.config.data.batch_size
    if filled:
        seen = plan.order.batches_per_epoch * size
        _LOG.info(
            "%d of an epoch's %d samples repeat others, to fill batches of data.batch_size=%d", filled, seen, size
        )


def _notice_memory(plan: Plan, device: str) -> None:
    """Says so where more is predicted than there is: it may go well, for a prediction errs by some per cent."""
    predicted, there = plan.predicted_memory(warpgroups_of(device)), get_backend(device).memory().total
    if predicted > there:
        _LOG.warning(
            "%.1f GiB are predicted and %s has %.1f: if memory runs out, try data.batch_size=1, "
            "gradient.checkpointing=true, model.fp8=weights or a lower data.resolution",
            predicted / 2**30, "this machine" if device == "cpu" else "the GPU", there / 2**30,
        )  # fmt: skip


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
        preview = make_preview(plan, encoded, denoiser, folder.write_sample, device, stop)
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
    plan: Plan, encoded: Encoded, denoiser: Denoiser, write: Callable[[int, bytes], None], device: str,
    stop: StopRequest,
) -> Callable[[int], None]:  # fmt: skip
    """A function that draws a step's sample grid and has `write` take it, a PNG; it does nothing without prompts."""
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
        write(step, png(grid(pictures)))

    return preview


def _prompts(config: Config) -> tuple[str, ...]:
    """Every text that sampling will need beside the captions."""
    return (*config.sample.prompts, config.sample.negative) if config.sample.every else ()


def _write_report(plan: Plan, folder: RunFolder) -> None:
    """Which picture went to which bucket, beside the run."""
    raw = (json.dumps(plan.placed.to_json(), indent=1, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
    write_durably(folder.place(folder.folder / "dataset.json"), [raw], len(raw))
