"""The five stages in a row: check, plan, encode, train, finish; and `cache`, which is the first three."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from flame_train.config.keys import keys
from flame_train.config.load import load_located
from flame_train.config.located import ConfigWithSource, with_key_names
from flame_train.config.own_code import unregistered, used_code
from flame_train.config.schema import Config
from flame_train.disk.preflight import user_cache
from flame_train.distributed.group import ProcessGroup
from flame_train.distributed.join import join
from flame_train.distributed.local_memory import copies_kept
from flame_train.distributed.watch import Watch, ending_together
from flame_train.engine.backend import check_formats, get_backend
from flame_train.engine.mode import deterministic
from flame_train.engine.shape_run import gpu_of
from flame_train.errors import ConfigError, Stopped
from flame_train.io.addresses import is_address
from flame_train.io.digests import Digests
from flame_train.io.hub import Fetch, fetching
from flame_train.io.hub_upload import check_login
from flame_train.io.run_files import OtherSettings
from flame_train.io.runlog import mend_status
from flame_train.models.registry import FAMILIES, Family
from flame_train.progress import quiet as showing_nothing
from flame_train.run.check.check_run import encoding_formats, storage_of
from flame_train.run.encode.encode import encode
from flame_train.run.finish.finish import report
from flame_train.run.finish.publish import publish_at_end
from flame_train.run.plan.encoding import could_cache
from flame_train.run.plan.notices import notice_copies
from flame_train.run.plan.plan import Plan, plan_run
from flame_train.run.plan.ranks import (
    refuse_other_checkpoint,
    refuse_other_files,
    refuse_other_settings,
    split_micro_batches,
)
from flame_train.run.plan.start import (
    Start,
    changed_images,
    checkpoint_here,
    checkpoint_of_other_run,
    continue_command,
    file_rows,
    resume,
    run_folder,
    sources_of,
    weights_hashes,
    write_record,
)
from flame_train.run.train.remote_copy import with_remote_copy
from flame_train.run.train.train_run import train_run
from flame_train.training.result import check_code, check_sources, warn_of_checkpoint, warn_of_damaged
from flame_train.training.session import SILENT, Callbacks, Session, StopRequest

from ..memory.card import keeps_on_host, limit_pools, log_budget, refuse_small_host, resolve_offload, within_budget
from ..memory.kept_prediction import kept_prediction, predict_ahead
from ..memory.prediction import notice_memory
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
    accept_changed_code: bool = False,
    quiet: bool = False,
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
        accept_changed_code: whether a run goes on although a script's code for it has changed.
        quiet: whether nothing shows how far it is.

    Returns:
        The result, or the plan of a dry run, for the report; empty in a process that does not lead the others.

    Raises:
        FlameError: any error that a user can correct; see `errors`.
    """
    asked_family = FAMILIES[family] if family else None
    lacking = asked_family.unsupported_keys() if asked_family else ()
    file = source if isinstance(source, str) and source != "-" else None
    if dry_run:
        config_source = load_located(source, overrides, lacking)
        with with_key_names(config_source), _naming_the_way(file, overrides, device, config_source.config):
            session = Session(device, ProcessGroup(0, processes), accept_changed_code=accept_changed_code)
            return dry_run_of(config_source, asked_family, session)
    group, device = join(device, transport)
    with ending_together(group), showing_nothing(quiet):
        with group.barrier():
            config_source = load_located(source, overrides, lacking)
        refuse_other_settings(group, config_source.config)
        with with_key_names(config_source), _naming_the_way(file, overrides, device, config_source.config):
            stop = StopRequest()
            session = Session(device, group, stop, callbacks.heeded(stop), accept_changed_code, quiet)
            try:
                return _train(config_source, asked_family, session, remote_wait)
            except Stopped as stopped:
                return stopped.result


@contextmanager
def _naming_the_way(file: str | None, overrides: Sequence[str], device: str, config: Config) -> Iterator[None]:
    """Adds the script that a refused run wants, or the command that goes on with other settings."""
    try:
        yield
    except OtherSettings as refused:
        if scripts := dict.fromkeys(unregistered(Path(config.output.dir)).values()):
            refused.args = ("\n".join((str(refused), *scripts)),)
            raise
        source = None if used_code(config) else file  # no command registers a script's code
        refused.args = (f"{refused}{continue_command(source, overrides, device, config)}",)
        raise


def dry_run_of(
    config_source: ConfigWithSource, family: Family | None, session: Session, fetch: Fetch = "headers"
) -> dict[str, Any]:
    """Checks and plans a run, and describes what was planned."""
    with session.stop, fetching(fetch):
        fetch_inputs(config_source.config, False, session.stop)
        plan = plan_run(config_source, family, session.stop, session.group.world)
        budget = within_budget(plan, session, planning=True)
        card, processes = gpu_of(session.device), session.group.world
        plan = resolve_offload(plan if budget is None else budget.plan, card, processes)
        refuse_small_host(plan)
        checkpoint = checkpoint_here(plan, run_folder(plan, session.group))
        before = checkpoint_of_other_run(plan) if checkpoint is None else None
        if before is not None:
            warn_of_damaged(before)
        if checkpoint is not None:
            hashes = weights_hashes(plan)
            check_sources(checkpoint, hashes)
            check_code(checkpoint, used_code(plan.config), session.accept_changed_code)
            warn_of_checkpoint(checkpoint, hashes)
            plan = split_micro_batches(plan, checkpoint, session.group)
        memory = kept_prediction(plan, card, processes) if budget is None else budget.memory
        after = None if checkpoint is None else checkpoint.step
        return describe(plan, memory, card, session.device, processes, budget, after) | {"files": file_rows(plan)}


def _train(
    config_source: ConfigWithSource, family: Family | None, session: Session, remote_wait: float | None
) -> dict[str, Any]:
    """Checks, plans and trains a run, each part in step with the other processes."""
    config, device, group = config_source.config, session.device, session.group
    with session.stop, fetching("all"):
        with group.barrier():
            if group.leads:
                mend_status(Path(config.output.dir))
            check_device(config, device)
            if config.output.hub and group.leads:
                check_login()
            fetch_inputs(config, True, session.stop)
            plan = plan_run(config_source, family, session.stop, group.world)
        with group.barrier():
            budget = within_budget(plan, session)
        plan = plan if budget is None else budget.plan
        with group.barrier():
            plan = resolve_offload(plan, None if device == "cpu" else gpu_of(device), group.world)
        copies = copies_kept(group) if keeps_on_host(plan) else 1
        with group.barrier():
            refuse_small_host(plan, copies)
        if budget is not None and group.leads:
            log_budget(budget)
        with with_remote_copy(plan, session, remote_wait) as session, limit_pools(device, budget):
            result = train_plan(plan, session)
    return result | publish_at_end(config) if group.leads else result


def fetch_inputs(config: Config, bring: bool, stop: StopRequest) -> None:
    """Fetches every file and folder that an address names; with `bring` false it only looks whether all are there.

    A signal ends it between parts. Raises RemoteError for what does not come, ConfigError for what is not there.
    """
    named = dict(_addresses(config))
    if not named:
        return
    from flame_train.remote.fetch import fetch, is_kept

    if not bring:
        missing = [f"{key}: {address} was not fetched yet" for address, key in named.items() if not is_kept(address)]
        if missing:
            raise ConfigError("\n".join(missing) + "\nonly a command that works with it fetches it: no --dry-run")
        return
    with Digests(user_cache("digests")) as digests:
        for address in named:
            fetch(address, digests, lambda: stop.check("while files were fetched"))


def _addresses(config: Config) -> Iterator[tuple[str, str]]:
    """Yields each address that the run reads from, with its key."""
    for path, key in keys().items():
        value = getattr(getattr(config, key.section), key.name)
        for each in (value if isinstance(value, tuple) else [value]) if key.place else []:
            if isinstance(each, str) and is_address(each):
                yield each, path
    for number, one in enumerate(config.data.sets, 1):
        for each in filter(is_address, (one.path, *one.control)):
            yield each, f"data.sets {number}"


def check_device(config: Config, device: str) -> None:
    """Refuses a missing GPU, or one without a number format that is asked for, before any file is read."""
    base = config.model
    check_formats(device, {"train.precision": config.train.precision, **encoding_formats(config)})
    if storage := storage_of(base.quantize, base.arithmetic):
        storage.check(device, config.train.precision)


def fill_cache(source: str, overrides: list[str], device: str, dry_run: bool) -> dict[str, Any]:
    """Encodes the images and captions of a config ahead of training. Returns counts."""
    config_source, session = load_located(source, overrides), Session(device)
    with with_key_names(config_source), session.stop, fetching("headers" if dry_run else "all"):
        if not dry_run:
            check_formats(device, encoding_formats(config_source.config))
        fetch_inputs(config_source.config, not dry_run, session.stop)
        plan = plan_run(config_source, None, session.stop)
        budget = within_budget(plan, session, planning=dry_run)
        plan = plan if budget is None else budget.plan
        could_cache(plan.encoding.folder)
        keys = plan.cache_keys()
        counts = {"images": sum(map(len, keys.images)), "captions": len(keys.captions)}
        if beside := {key for views in keys.controls for each in views for key in each}.union(keys.shown.values()):
            counts["control_images"] = len(beside)
        counts["bytes"] = plan.cache_bytes()
        if dry_run:
            return counts
        with limit_pools(device, budget):
            cache = encode(plan, keys, session).cache
        return counts | {"encoded": cache.misses, "kept": cache.hits, "cache": str(cache.folder)}


def train_plan(plan: Plan, session: Session) -> dict[str, Any]:
    """Opens the run folder, encodes missing entries, trains or continues.

    Of several processes the leading one has the folder; the others read the checkpoint that it continues from. Returns
    all paths, for the report; nothing in a process that does not lead.
    """
    device, group, folder = session.device, session.group, run_folder(plan, session.group)
    with group.barrier():
        checkpoint = checkpoint_here(plan, folder) if group.leads else None
        if group.leads and checkpoint is None:
            checkpoint_of_other_run(plan)  # refused before files are hashed
        with ThreadPoolExecutor(1) as beside:  # while files are hashed, which leaves Python free
            memory = None if device == "cpu" else beside.submit(predict_ahead, plan, device, group.world)
            keys = plan.cache_keys()
            sources = sources_of(plan, keys)
        if checkpoint is not None:
            check_sources(checkpoint, asdict(sources), partial(changed_images, plan, keys, folder))
            check_code(checkpoint, sources.code, session.accept_changed_code)
    refuse_other_files(group, {name: str(value) for name, value in asdict(sources).items()})
    with ExitStack() as opened:
        with group.barrier():
            if group.leads:
                opened.enter_context(folder)
        with group.barrier():
            checkpoint = resume(plan, keys, folder, sources) if group.leads else folder.inspect(leader=True)
            before = checkpoint_of_other_run(plan) if checkpoint is None else None
        refuse_other_checkpoint(group, checkpoint or before)
        with group.barrier():
            plan = split_micro_batches(plan, checkpoint, group)
            if group.leads:
                write_record(plan, keys, folder)
                if checkpoint is None:
                    notice_copies(plan.order, sorted({image_set.batch_size for image_set in plan.samples.sets}))
                if memory is not None:
                    notice_memory(memory.result, get_backend(device).memory().total)
        watch = opened.enter_context(Watch(group, folder.folder))
        with watch.telling():
            encoded = encode(plan, keys, session)
        with deterministic(plan.config.train.deterministic), watch.telling():
            try:
                last = train_run(plan, encoded, folder, Start(checkpoint, before, sources), session)
            except Stopped as stopped:
                if group.leads:
                    stopped.result = report(folder, plan.config, plan.model.name, folder.last(), device, stopped=True)
                raise
        with group.barrier():  # the others wait for the leading process, or it would miss their signs of life
            return report(folder, plan.config, plan.model.name, last or folder.last(), device) if group.leads else {}
