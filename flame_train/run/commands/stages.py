"""The five stages in a row: check, plan, encode, train, finish; and `cache`, which is the first three."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from flame_train.config.load import load_located
from flame_train.config.located import ConfigWithSource, with_key_names
from flame_train.config.render import resolved
from flame_train.config.resume import differences
from flame_train.config.schema import Config
from flame_train.data.reading import readings
from flame_train.data.samples import Samples
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.files import preflight
from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.distributed.join import join
from flame_train.distributed.watch import Watch, ending_together
from flame_train.engine.backend import check_formats, get_backend
from flame_train.engine.mode import deterministic
from flame_train.engine.shape_run import compile_ahead, gpu_of
from flame_train.errors import OutputError
from flame_train.io.commit import STATES, Found, count
from flame_train.io.digests import Digests
from flame_train.io.foundrun import OtherSettings
from flame_train.io.hub import fetching
from flame_train.io.runfolder import RunFolder
from flame_train.io.runstatus import mend_status
from flame_train.io.weights import sampled_digest
from flame_train.models.registry import FAMILIES
from flame_train.run.check.check import encoding_formats, storage_of
from flame_train.run.check.downloads import fetch_inputs
from flame_train.run.encode.encode import encode
from flame_train.run.finish.finish import report
from flame_train.run.plan.continuation import continued, way_on
from flame_train.run.plan.dataset_record import REPORT, changed
from flame_train.run.plan.encoding import Keys, could_cache
from flame_train.run.plan.notices import notice_copies
from flame_train.run.plan.plan import Plan, planned
from flame_train.run.plan.ranks import refuse_other_checkpoint, refuse_other_files, refuse_other_settings, shared_out
from flame_train.run.train.remote_copy import mirrored
from flame_train.run.train.train import train_run
from flame_train.show.controls import write_controls
from flame_train.show.sheet import write_sheet
from flame_train.training.callbacks import SILENT, Callbacks
from flame_train.training.result import Sources, check_sources, knows_sources, micro_batches_of
from flame_train.training.stop import StopRequest
from flame_train.user_cache import user_cache

from ..memory.offloading import refuse_small_host, resolve_offload
from ..memory.prediction import PredictedMemory, predicted_memory
from ..memory.within import limited, tell, within_budget
from .describe import describe

_LOG = logging.getLogger(__name__)


def train(
    source: str | Mapping[str, Any],
    overrides: Sequence[str],
    device: str,
    dry_run: bool,
    family: str | None = None,
    callbacks: Callbacks = SILENT,
    transport: str = "auto",
    processes: int = 1,
    remote_wait: float | None = None,
) -> dict[str, Any]:
    """Trains as a config says, or continues a run; with `dry_run` it only checks and plans.

    Where a launcher started several processes, this is one of them.

    Args:
        source: a config's file, `-` for standard input, or its sections as a mapping.
        overrides: `section.key=value`, on top of it.
        device: "cuda" or "cpu".
        dry_run: whether nothing is trained or written.
        family: the one whose command was given; None: whichever the checkpoint is of.
        callbacks: hears of steps, checkpoints and samples.
        transport: by which several processes add up gradients: "nccl", "mpi" or "auto".
        processes: how many a dry run plans for; a launcher says how many there are.
        remote_wait: seconds to wait at the end until `output.remote` has everything; None: as usual.

    Returns:
        The result, or the plan of a dry run, for the report; empty in a process that does not lead the others.

    Raises:
        FlameError: any error that a user can correct; see `errors`.
    """
    lacking = FAMILIES[family].unsupported_keys() if family else ()
    file = source if isinstance(source, str) and source != "-" else None
    if dry_run:
        asked = load_located(source, overrides, lacking)
        with with_key_names(asked), _naming_the_way(file, overrides, device, asked.config):
            return _trained(asked, device, True, family, callbacks, ProcessGroup(0, processes))
    group, device = join(device, transport)
    with ending_together(group):
        with group.barrier():
            asked = load_located(source, overrides, lacking)
        refuse_other_settings(group, asked.config)
        with with_key_names(asked), _naming_the_way(file, overrides, device, asked.config):
            return _trained(asked, device, False, family, callbacks, group, remote_wait)


@contextmanager
def _naming_the_way(file: str | None, overrides: Sequence[str], device: str, config: Config) -> Iterator[None]:
    """Within, the refusal of a run with other settings ends with the command that goes on with them."""
    try:
        yield
    except OtherSettings as refused:
        refused.args = (f"{refused}{way_on(file, overrides, device, config)}",)
        raise


def _trained(
    asked: ConfigWithSource,
    device: str,
    dry_run: bool,
    family: str | None,
    callbacks: Callbacks,
    group: ProcessGroup,
    remote_wait: float | None = None,
) -> dict[str, Any]:
    with StopRequest() as stop, fetching("headers" if dry_run else "all"):
        with group.barrier():
            if not dry_run and group.leads:
                mend_status(Path(asked.config.output.dir))
            if not dry_run:
                check_device(asked.config, device)
            fetch_inputs(asked.config, not dry_run, lambda: stop.check("while files were fetched"))
            plan = planned(asked, FAMILIES[family] if family else None, stop, group.world)
        with group.barrier():
            budget = within_budget(plan, device, group, planning=dry_run)
        plan = plan if budget is None else budget.plan
        with group.barrier():
            gpu = None if device == "cpu" and not dry_run else gpu_of(device)
            plan = resolve_offload(plan, gpu, group.world)
            refuse_small_host(plan)
        if dry_run:
            if preflighted(plan, run_folder(plan, group)) is None:
                continued(plan)
            card = gpu_of(device)
            memory = predicted_memory(plan, card, group.world) if budget is None else budget.memory
            return describe(plan, memory, card, device, group.world, budget) | {"files": _files(plan)}
        if budget is not None and group.leads:
            tell(budget)
        with mirrored(plan, group, stop, callbacks, remote_wait) as heard, limited(device, budget):
            return train_plan(plan, device, stop, heard, group)


def check_device(config: Config, device: str) -> None:
    """A missing GPU, or one without a number format that is asked for, is an error before any file is read."""
    base = config.model
    check_formats(device, {"train.precision": config.train.precision, **encoding_formats(config)})
    if storage := storage_of(base.quantize, base.arithmetic):
        storage.check(device, config.train.precision)


def fill_cache(source: str, overrides: list[str], device: str, dry_run: bool) -> dict[str, Any]:
    """Encodes the images and captions of a config ahead of training. Returns counts."""
    asked = load_located(source, overrides)
    with with_key_names(asked), StopRequest() as stop, fetching("headers" if dry_run else "all"):
        if not dry_run:
            check_formats(device, encoding_formats(asked.config))
        fetch_inputs(asked.config, not dry_run, lambda: stop.check("while files were fetched"))
        plan = planned(asked, None, stop)
        budget = within_budget(plan, device, planning=dry_run)
        plan = plan if budget is None else budget.plan
        could_cache(plan.encoding.folder)
        keys = plan.keys
        counts = {"images": sum(map(len, keys.images)), "captions": len(keys.captions)}
        if beside := {key for views in keys.controls for each in views for key in each}.union(keys.shown.values()):
            counts["control_images"] = len(beside)
        counts["bytes"] = plan.cache_bytes
        if dry_run:
            return counts
        with limited(device, budget):
            cache = encode(plan.encoding, plan.everything, keys, plan.model.size_conditioning, device, stop).cache
        return counts | {"encoded": cache.misses, "kept": cache.hits, "cache": str(cache.folder)}


def train_plan(
    plan: Plan, device: str, stop: StopRequest, callbacks: Callbacks = SILENT, group: ProcessGroup = ALONE
) -> dict[str, Any]:
    """Opens the run folder, encodes missing entries, trains or continues.

    Of several processes the leading one has the folder; the others read the checkpoint that it continues from.

    Args:
        plan: the plan of the run.
        device: "cuda" or "cpu".
        stop: raises Interrupted after a signal.
        callbacks: hears of steps, checkpoints and samples.
        group: the processes that train together.

    Returns:
        All paths, for the report; nothing in a process that does not lead.
    """
    closed = run_folder(plan, group)
    with group.barrier():
        found = preflighted(plan, closed) if group.leads else None
        if group.leads and found is None:
            continued(plan)  # refused before files are hashed
        with ThreadPoolExecutor(1) as beside:  # while files are hashed, which leaves Python free
            memory = None if device == "cpu" else beside.submit(_predicted, plan, device, group.world)
            keys = plan.keys
            sources = sources_of(plan, keys)
        if found is not None:
            check_sources(found, sources, partial(_changed, plan, keys, closed))
    refuse_other_files(group, asdict(sources))
    with ExitStack() as opened:
        with group.barrier():
            if group.leads:
                opened.enter_context(closed)
        with group.barrier():
            found = _resume(plan, keys, closed, sources) if group.leads else closed.inspect(leader=True)
            before = continued(plan) if found is None else None
        refuse_other_checkpoint(group, found or before)
        with group.barrier():
            plan = shared_out(plan, found, group)
            if group.leads:
                _write_report(plan, keys, closed)
                if found is None:
                    notice_copies(plan.order, sorted({own.batch_size for own in plan.samples.sets}))
                if memory is not None:
                    _notice_memory(memory.result, get_backend(device).memory().total)
        watch = opened.enter_context(Watch(group, closed.folder))
        with watch.telling():
            encoded = encode(plan.encoding, plan.everything, keys, plan.model.size_conditioning, device, stop, group)
        with deterministic(plan.config.train.deterministic), watch.telling():
            last = train_run(plan, encoded, closed, found, before, sources, device, stop, callbacks, group)
        with group.barrier():  # the others wait for the leading process, or it would miss their signs of life
            return report(closed, plan.config, last or closed.last(), device) if group.leads else {}


def run_folder(plan: Plan, group: ProcessGroup = ALONE) -> RunFolder:
    """The folder of a plan's run, not opened."""

    def refusal(old: str, found: Found | None) -> str | None:
        shared_out = found is not None and micro_batches_of(found) == plan.config.gradient.accumulation * group.world
        moved = found is None or knows_sources(found)
        return differences(old, plan.config, moved=moved, shared_out=shared_out)

    return RunFolder(Path(plan.config.output.dir), resolved(plan.config), refusal, plan.config.output.name)


def preflighted(plan: Plan, folder: RunFolder) -> Found | None:
    """The checkpoint to continue from; this writes no file. Raises OutputError if the run could not go on here."""
    found, c = folder.inspect(), plan.config
    could_cache(plan.encoding.folder)
    if found is not None and found.step > c.train.steps:
        raise OutputError(
            f"{folder.folder}: its run is at step {found.step}, beyond train.steps = {c.train.steps}; set train.steps "
            f"to {found.step} or more, or output.dir to another folder; LoRAs of earlier steps: {folder.checkpoints}"
        )
    if found is None or found.step < c.train.steps:
        kept = (c.checkpoint.keep or STATES) + (c.validation.repeats and bool(plan.held_out.rows))
        new = kept + 1 - min(kept, count(folder.checkpoints))
        arrays = 4 + (c.train.ema_decay > 0)  # values, once more as the LoRA, two moments, and their average
        preflight(folder.folder, plan.parameters * 4 * arrays * new)
    return found


def sources_of(plan: Plan, keys: Keys) -> Sources:
    """Digests of the files on which a plan's weights depend."""
    with Digests(user_cache("digests")) as digests:
        base = sampled_digest(plan.checked.base, digests)
    return Sources(keys.networks["image"], keys.networks["caption"], base, dataset_digest(plan.samples, keys))


def dataset_digest(samples: Samples, keys: Keys) -> str:
    """A hash of everything the samples of a run depend on: images, captions, placements, networks, order.

    Of captions that are not cached the text counts; the text encoders have a hash of their own.
    """
    images = any(reading.images for reading in keys.captions)
    texts = ([keys.captions.get(each, each.text) for each in readings(row, row.texts, images)] for row in samples.rows)
    beside = ([key for view in views for key in view] for views in keys.controls)
    parts = zip(samples.names, keys.images, texts, keys.masks, beside, strict=False)
    rows = (  # what is held out comes last among the keys, and does not count
        (name, *images, *captions, *masks, *controls) for name, images, captions, masks, controls in parts
    )
    return hashlib.sha256("\n".join("\t".join(row) for row in rows).encode("utf-8", "surrogateescape")).hexdigest()


def _files(plan: Plan) -> list[dict[str, Any]]:
    """Each image's bucket and crop, and of those that are held out that they are."""
    held_out = len(plan.samples.rows)
    rows = plan.everything.to_json()
    return [*rows[:held_out], *(row | {"validation": True} for row in rows[held_out:])]


def _cached(plan: Plan, keys: Keys) -> list[dict[str, Any]]:
    """`_files`, with the names of each image's entries in the cache, which follow from its content."""
    rows = zip(_files(plan), keys.images, keys.controls, strict=True)
    return [row | _controls_cached(row, beside) | {"cache": list(entries)} for row, entries, beside in rows]


def _controls_cached(row: dict[str, Any], views: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What a row says of control images, with the names of their entries in the cache, one a view."""
    if not views:
        return {}
    each = zip(*views, strict=True)
    return {"controls": [own | {"cache": list(keys)} for own, keys in zip(row["controls"], each, strict=True)]}


def _changed(plan: Plan, keys: Keys, folder: RunFolder) -> str:
    """Which images are others than those that the run folder lists."""
    return changed(folder.folder / REPORT, _cached(plan, keys))


def _predicted(plan: Plan, device: str, processes: int) -> PredictedMemory:
    """What the run will take. Its kernels, which that showed, are compiled from now on, while files are read."""
    predicted = predicted_memory(plan, gpu_of(device), processes)
    compile_ahead(predicted.kernels)
    return predicted


def _notice_memory(predicted: Callable[[], PredictedMemory], total: int) -> None:
    """Says so where more is predicted than there is: it may go well, for a prediction errs by some per cent.

    A prediction that fails is reported too, and does not stop the run.
    """
    try:
        peak = predicted().peak
    except Exception as e:
        _LOG.warning("the memory of this run could not be predicted: %s: %s", type(e).__name__, e)
        return
    if peak > total:
        _LOG.warning(
            "%.1f GiB are predicted and the GPU has %.1f: if memory runs out, try data.batch_size=1, "
            "gradient.checkpointing=full, model.quantize=fp8 or a lower data.resolution",
            peak / 2**30,
            total / 2**30,
        )


def _resume(plan: Plan, keys: Keys, folder: RunFolder, sources: Sources) -> Found | None:
    """The checkpoint to continue from, the log cut back to it. It may be newer than the one that was checked."""
    found = folder.resume()
    if found is not None:
        for reason in found.skipped:
            _LOG.warning("a newer checkpoint is damaged and was passed over: %s", reason)
        check_sources(found, sources, partial(_changed, plan, keys, folder))
        _LOG.info("continuing after step %d from %s", found.step, found.path)
    return found


def _write_report(plan: Plan, keys: Keys, folder: RunFolder) -> None:
    """Writes each sample's captions, bucket, crop and mask into the run folder, one a line, and small images."""
    lines = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in _cached(plan, keys))
    raw = f"[\n {lines}\n]\n".encode("utf-8", "backslashreplace")
    write_atomically(folder.place(folder.folder / REPORT), [raw], len(raw))
    write_sheet(folder, plan.everything.rows)
    write_controls(folder, [[plan.files[path] for path in request.control] for request in plan.requests])
