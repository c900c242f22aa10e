"""Where a run starts: at a checkpoint of its own folder, with that of another run, or anew, and of which files.

A run that `train.continue_from` names gives its newest checkpoint, checked against the plan before anything loads.
Carried over are the LoRA in fp32, the state of the optimizer's rule with its count of updates, and a moving average.
What begins anew: the step, the schedule with its warm-up, the order of samples, the random numbers of a step, the loss
scale, the log. Every setting may differ but the optimizer's name and the sizes and scales of the adapters' matrices.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flame_train.config.compatibility import differences, incompatible_settings
from flame_train.config.own_code import used_code
from flame_train.config.render import resolved
from flame_train.config.schema import Config
from flame_train.data.samples import Samples, encoder_inputs
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.preflight import preflight, reading, user_cache
from flame_train.distributed.group import ALONE, ProcessGroup
from flame_train.engine import nn
from flame_train.errors import ConfigError, OutputError, counted
from flame_train.io.commit import STATES, Checkpoint, count, newest
from flame_train.io.digests import Digests
from flame_train.io.runfolder import RunFolder
from flame_train.io.weights import sampled_digest
from flame_train.models.common.training_adapter import AdaptedPart
from flame_train.networks.block_network import BlockNetwork
from flame_train.run.check.check_run import storage_of
from flame_train.run.plan.encoding import Keys, could_cache
from flame_train.run.plan.plan import Plan
from flame_train.run.plan.read_dataset import REPORT, changed_rows
from flame_train.show.trained_images import write_controls, write_sheet
from flame_train.training.result import (
    Sources,
    check_sources,
    earlier_updates,
    knows_sources,
    micro_batches_of,
    updates_done,
    value_shapes,
    warn_of_checkpoint,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """What a run starts with.

    Attributes:
        checkpoint: the checkpoint to continue from; None: a fresh run.
        before: the checkpoint of another run that a fresh run begins with; None: it begins with nothing.
        sources: the digests of the files that the run is made from.
    """

    checkpoint: Checkpoint | None
    before: Checkpoint | None
    sources: Sources

    def count_earlier_updates(self) -> int:
        """Reads how many updates the optimizer's state has seen before this run."""
        if self.checkpoint is not None:
            return earlier_updates(self.checkpoint)
        return updates_done(self.before) if self.before is not None else 0


def checkpoint_of_other_run(plan: Plan) -> Checkpoint | None:
    """Returns the checkpoint that a new run begins with; None where the config names no other run.

    Raises ConfigError where there is none, or its state does not fit, OutputError where it cannot be read.
    """
    c = plan.config
    if not c.train.continue_from:
        return None
    run = Path(c.train.continue_from)
    if getattr(c.lora, "from"):
        raise ConfigError("train.continue_from: it begins with a LoRA, and lora.from with another; empty one of them")
    settings = run / "config.toml"
    if not settings.is_file():
        raise ConfigError(f"train.continue_from: expected the folder of a run, got {run}, which has no config.toml")
    checkpoint = newest(run / "checkpoints")
    if checkpoint is None:
        raise ConfigError(f"train.continue_from: {run} has no checkpoint; train it for checkpoint.every steps or more")
    with reading(settings):
        old = settings.read_text(errors="replace")
    wrong = incompatible_settings(old, c) or _other_layers(plan, value_shapes(checkpoint))
    if wrong:
        raise ConfigError(
            f"train.continue_from: the optimizer's state of {checkpoint.path} does not fit this config:\n{wrong}\n"
            f'set them as they were there, or begin with the LoRA alone, by lora.from = "{_lora_of(checkpoint)}"'
        )
    return checkpoint


def continue_command(source: str | None, overrides: Sequence[str], device: str, config: Config) -> str:
    """Returns the command, a line, that goes on from the run of a config in a new folder; empty where none can.

    Args:
        source: the config's file; None: it is none.
    """
    run = Path(config.output.dir)
    try:
        unfit = newest(run / "checkpoints") is None or incompatible_settings((run / "config.toml").read_text(), config)
    except (OSError, OutputError):
        return ""
    if unfit:
        return ""
    free = next(place for n in itertools.count(2) if not (place := run.with_name(f"{run.name}-{n}")).exists())
    if source is None:
        return f'\nto go on from it with these settings: train.continue_from = "{run}", output.dir = "{free}"'
    taken = ("output.dir", "train.continue_from")
    words = [word for each in overrides if each.partition("=")[0].strip() not in taken for word in ("--set", each)]
    words += ["--device", device] if device != "cuda" else []
    command = ["flame-train", "train", source, *words, "--continue-from", str(run), "-o", str(free)]
    return f"\nto go on from it with these settings: {shlex.join(command)}"


def _other_layers(plan: Plan, shapes: dict[str, tuple[int, ...]]) -> str:
    """Says how the matrices of a checkpoint are those of other layers; empty if they are not."""
    targets = set(plan.checked.targets)
    layers = {name: next((n for n in _prefixes(name) if n in targets), "") for name in shapes}
    strange = [name for name, layer in layers.items() if not layer]
    missing = [name for name in plan.checked.targets if name not in set(layers.values())]
    if strange:
        return f"  it adapts layers that lora.targets leave out, such as that of {strange[0]}"
    if missing:
        return f"  it has nothing for {counted(len(missing), 'layer')} that lora.targets choose, such as {missing[0]}"
    if (there := sum(math.prod(shape) for shape in shapes.values())) != plan.parameters:
        return f"  it has {there:,} trained values, and this config {plan.parameters:,}: another base model"
    return ""


def _prefixes(name: str) -> list[str]:
    """Lists every name that a dotted name begins with, the longest first."""
    return [*itertools.accumulate(name.split("."), "{}.{}".format)][::-1]


def _lora_of(checkpoint: Checkpoint) -> Path:
    files = sorted(checkpoint.path.glob("*.safetensors"))
    return next(path for path in files if path.name != "optimizer.safetensors")


def run_folder(plan: Plan, group: ProcessGroup = ALONE) -> RunFolder:
    """Returns the folder of a plan's run, not opened."""

    def refusal(old: str, checkpoint: Checkpoint | None) -> str | None:
        same_batches = (
            checkpoint is not None and micro_batches_of(checkpoint) == plan.config.gradient.accumulation * group.world
        )
        moved = checkpoint is None or knows_sources(checkpoint, bool(plan.config.model.training_adapter))
        return differences(old, plan.config, moved=moved, shared_out=same_batches)

    return RunFolder(Path(plan.config.output.dir), resolved(plan.config), refusal, plan.config.output.name)


def checkpoint_here(plan: Plan, folder: RunFolder) -> Checkpoint | None:
    """Finds the checkpoint to continue from; this writes no file. Raises OutputError if the run could not go on."""
    checkpoint, c = folder.inspect(), plan.config
    could_cache(plan.encoding.folder)
    if checkpoint is not None and checkpoint.step > c.train.steps:
        raise OutputError(
            f"{folder.folder}: its run is at step {checkpoint.step}, beyond train.steps = {c.train.steps}; set "
            f"train.steps to {checkpoint.step} or more, or output.dir to another folder; LoRAs of earlier steps: "
            f"{folder.checkpoints}"
        )
    if checkpoint is None or checkpoint.step < c.train.steps:
        preflight(folder.folder, checkpoint_bytes(plan, count(folder.checkpoints)))
    return checkpoint


def checkpoint_bytes(plan: Plan, there: int = 0) -> int:
    """Counts what the checkpoints of a run take on disk at most, beside those that are there already."""
    c = plan.config
    staying = (c.checkpoint.keep or STATES) + (c.validation.repeats and bool(plan.held_out.rows))
    arrays = 4 + (c.train.ema_decay > 0)  # values, once more as the LoRA, two moments, and their average
    return plan.parameters * 4 * arrays * (staying + 1 - min(staying, there))


def resume(plan: Plan, keys: Keys, folder: RunFolder, sources: Sources) -> Checkpoint | None:
    """Gives the checkpoint to continue from, the log cut back to it. It may be newer than the one that was checked."""
    checkpoint = folder.resume()
    if checkpoint is not None:
        hashes = asdict(sources)
        check_sources(checkpoint, hashes, partial(changed_images, plan, keys, folder))
        _LOG.info("continuing after step %d from %s", checkpoint.step, checkpoint.path)
        warn_of_checkpoint(checkpoint, hashes)
    return checkpoint


def sources_of(plan: Plan, keys: Keys) -> Sources:
    """Returns digests of the files on which a plan's weights depend."""
    with Digests(user_cache("digests")) as digests:
        base = sampled_digest(plan.checked.base, digests)
    dataset = dataset_digest(plan.samples, keys)
    networks = keys.networks
    return Sources(
        networks["image"], networks["caption"], base, dataset, code=used_code(plan.config), **weights_hashes(plan)
    )


def weights_hashes(plan: Plan) -> dict[str, str]:
    """Returns of `Sources` what says how a plan changes the base's weights: the only files read are adapters."""
    storage = storage_of(plan.config.model.quantize, plan.config.model.arithmetic)
    denoiser = plan.checked.model.denoiser
    return {
        "rounded": "" if storage is None else rounding(plan.model.network, storage),
        "adapter": denoiser.adapter_digest() if isinstance(denoiser, AdaptedPart) else "",
    }


def rounding(network: BlockNetwork, storage: nn.Storage) -> str:
    """Returns a hash of how the layers of a network are stored that are stored in fewer bits."""
    names = {layer: name for name, layer in network.named_modules()}
    said = (
        f"{names[layer]} {storage.format} {storage.group_of(layer.in_features)} {storage.of_layer(inputs).dynamic}"
        for layer, inputs in network.quantizable(storage.rotated).items()
    )
    return hashlib.sha256("\n".join(sorted(said)).encode()).hexdigest()


def dataset_digest(samples: Samples, keys: Keys, first: int = 0) -> str:
    """Returns a hash of everything the samples of a run depend on: images, captions, placements, networks, order.

    Of captions that are not cached the text counts; the text encoders have a hash of their own. The samples' keys begin
    with the `first`.
    """
    images = any(reading.images for reading in keys.captions)
    texts = (
        [keys.captions.get(each, each.text) for each in encoder_inputs(row, row.texts, images)] for row in samples.rows
    )
    beside = ([key for view in views for key in view] for views in keys.controls[first:])
    parts = zip(samples.names, keys.images[first:], texts, keys.masks[first:], beside, strict=False)
    rows = (  # what is held out comes last among the keys, and does not count
        (name, *images, *captions, *masks, *controls) for name, images, captions, masks, controls in parts
    )
    return hashlib.sha256("\n".join("\t".join(row) for row in rows).encode("utf-8", "surrogateescape")).hexdigest()


def file_rows(plan: Plan) -> list[dict[str, Any]]:
    """Returns each image's bucket and crop, and of those that are held out that they are."""
    held_out = len(plan.samples.rows)
    rows = plan.everything.to_json()
    return [*rows[:held_out], *(row | {"validation": True} for row in rows[held_out:])]


def _rows_with_cache(plan: Plan, keys: Keys) -> list[dict[str, Any]]:
    """Adds to `file_rows` the names of each image's entries in the cache, which follow from its content."""
    rows = zip(file_rows(plan), keys.images, keys.controls, keys.masks, strict=True)
    return [
        row
        | _controls_with_cache(row, beside)
        | {"cache": list(entries)}
        | ({"mask_cache": list(masks)} if masks else {})
        for row, entries, beside, masks in rows
    ]


def _controls_with_cache(row: dict[str, Any], views: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Returns what a row says of control images, with the names of their entries in the cache, one a view."""
    if not views:
        return {}
    each = zip(*views, strict=True)
    return {"controls": [control | {"cache": list(keys)} for control, keys in zip(row["controls"], each, strict=True)]}


def changed_images(plan: Plan, keys: Keys, folder: RunFolder) -> str:
    """Returns which images are others than those that the run folder lists."""
    return changed_rows(folder.folder / REPORT, _rows_with_cache(plan, keys))


def write_record(plan: Plan, keys: Keys, folder: RunFolder) -> None:
    """Writes each sample's captions, bucket, crop and mask into the run folder, one a line, and small images."""
    lines = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in _rows_with_cache(plan, keys))
    raw = f"[\n {lines}\n]\n".encode("utf-8", "backslashreplace")
    write_atomically(folder.place(folder.folder / REPORT), [raw], len(raw))
    write_sheet(folder, plan.everything.rows)
    write_controls(folder, [[image.path for image in request.images] for request in plan.requests])
