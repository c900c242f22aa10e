"""What a run is made from: digests of its files, and the record of its images in the run folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from flame_train.data.samples import Samples, encoder_inputs
from flame_train.disk.atomic_write import write_atomically
from flame_train.io.digests import Digests
from flame_train.io.runfolder import RunFolder
from flame_train.io.weights import sampled_digest
from flame_train.run.plan.dataset import REPORT, changed
from flame_train.run.plan.encoding import Keys
from flame_train.run.plan.plan import Plan
from flame_train.show.controls import write_controls
from flame_train.show.sheet import write_sheet
from flame_train.training.result import Sources
from flame_train.user_cache import user_cache


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
    texts = (
        [keys.captions.get(each, each.text) for each in encoder_inputs(row, row.texts, images)] for row in samples.rows
    )
    beside = ([key for view in views for key in view] for views in keys.controls)
    parts = zip(samples.names, keys.images, texts, keys.masks, beside, strict=False)
    rows = (  # what is held out comes last among the keys, and does not count
        (name, *images, *captions, *masks, *controls) for name, images, captions, masks, controls in parts
    )
    return hashlib.sha256("\n".join("\t".join(row) for row in rows).encode("utf-8", "surrogateescape")).hexdigest()


def file_rows(plan: Plan) -> list[dict[str, Any]]:
    """Each image's bucket and crop, and of those that are held out that they are."""
    held_out = len(plan.samples.rows)
    rows = plan.everything.to_json()
    return [*rows[:held_out], *(row | {"validation": True} for row in rows[held_out:])]


def _cached(plan: Plan, keys: Keys) -> list[dict[str, Any]]:
    """`_files`, with the names of each image's entries in the cache, which follow from its content."""
    rows = zip(file_rows(plan), keys.images, keys.controls, strict=True)
    return [row | _controls_cached(row, beside) | {"cache": list(entries)} for row, entries, beside in rows]


def _controls_cached(row: dict[str, Any], views: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What a row says of control images, with the names of their entries in the cache, one a view."""
    if not views:
        return {}
    each = zip(*views, strict=True)
    return {"controls": [own | {"cache": list(keys)} for own, keys in zip(row["controls"], each, strict=True)]}


def changed_images(plan: Plan, keys: Keys, folder: RunFolder) -> str:
    """Which images are others than those that the run folder lists."""
    return changed(folder.folder / REPORT, _cached(plan, keys))


def write_record(plan: Plan, keys: Keys, folder: RunFolder) -> None:
    """Writes each sample's captions, bucket, crop and mask into the run folder, one a line, and small images."""
    lines = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in _cached(plan, keys))
    raw = f"[\n {lines}\n]\n".encode("utf-8", "backslashreplace")
    write_atomically(folder.place(folder.folder / REPORT), [raw], len(raw))
    write_sheet(folder, plan.everything.rows)
    write_controls(folder, [[image.path for image in request.images] for request in plan.requests])
