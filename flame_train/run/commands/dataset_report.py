"""`flame-train dataset`: what a config's images are, with a contact sheet a bucket and what looks wrong."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flame_train.config.load import load_located
from flame_train.data.buckets import Size
from flame_train.data.grid import Pixels, contact_sheet, fingerprint, groups, png, sharpness, side_by_side, thumbnail
from flame_train.data.samples import Sample, Samples
from flame_train.data.sets import DataSet
from flame_train.data.views import clip_readers
from flame_train.disk.atomic_write import write_atomically
from flame_train.disk.preflight import make_folder, refuse_folder
from flame_train.errors import OutputError, shown
from flame_train.io.hub import fetching
from flame_train.run.check.check_run import check
from flame_train.run.plan.plan import make_plan
from flame_train.training.session import StopRequest

BLURRED = 50.0
"""The sharpness below which an image is named as blurred."""
_TINY = 0.5  # of the resolution's area
_ON_A_SHEET = 100  # thumbnails; the first of a bucket


@dataclass(slots=True)
class _Findings:
    """What was seen of the images, by name; each file is decoded once."""

    hashes: dict[str, object] = field(default_factory=dict)
    files: dict[str, object] = field(default_factory=dict)
    prints: dict[str, object] = field(default_factory=dict)
    blurred: dict[str, float] = field(default_factory=dict)
    tiny: list[str] = field(default_factory=list)
    sheets: dict[Size, list[Pixels]] = field(default_factory=dict)


def report(source: str, overrides: Sequence[str], output: Path, force: bool) -> dict[str, Any]:
    """Reads all images of a config, writes `report.json` and the contact sheets, and returns the report.

    Args:
        output: the folder to write into.

    Raises:
        FlameError: the config or the images are wrong, or the folder cannot be written.
    """
    if not force and output.is_dir() and any(output.iterdir()):
        raise OutputError(f"{output}: is not empty; choose another folder with --output, or say --force")
    with StopRequest() as stop, fetching("nothing"):
        plan = make_plan(check(load_located(source, overrides)), stop)
        samples = plan.samples
        looks = _look(samples, stop)
        result = _as_report(samples, looks) | {"output": str(output)}
        make_folder(output, "choose another place")
        for bucket, thumbnails in sorted(looks.sheets.items()):
            _write(output / f"bucket-{bucket[1]}x{bucket[0]}.png", [png(contact_sheet(thumbnails))])
        _write(output / "report.json", [(json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode()])
        return result


def _look(samples: Samples, stop: StopRequest) -> _Findings:
    looks, on_sheets = _Findings(), Counter[Size]()
    named, wanted = set[str](), list[tuple[str, Sample, bool]]()
    for name, row in zip(samples.names, samples.rows, strict=True):
        first, room = shown(name) not in named, on_sheets[row.placement.bucket] < _ON_A_SHEET
        on_sheets[row.placement.bucket] += room
        named.add(shown(name))
        if first or room:
            wanted.append((name, row, room))
    readers = clip_readers(row.seen(0) for _, row, _ in wanted)
    for (name, row, room), reader in zip(wanted, readers, strict=True):
        pixels = row.seen(0).picture(reader)
        if shown(name) not in looks.hashes:
            _look_at(looks, shown(name), row, pixels)
        if room:
            looks.sheets.setdefault(row.placement.bucket, []).append(_on_sheet(row, pixels))
        stop.check("while looking at images")
    return looks


def _on_sheet(row: Sample, pixels: Pixels) -> Pixels:
    """Returns a sample's thumbnail, with its control images before it."""
    beside = [thumbnail(image.pixels()) for image in row.controls_beside(0)]
    return side_by_side([*beside, thumbnail(row.views[0].pixels(pixels))])


def _look_at(looks: _Findings, name: str, row: Sample, pixels: Pixels) -> None:
    status = os.stat(row.item.path)
    looks.hashes[name], looks.files[name] = row.item.sha256, (status.st_dev, status.st_ino)
    looks.prints[name] = fingerprint(pixels)
    if (sharp := sharpness(pixels)) < BLURRED:
        looks.blurred[name] = round(sharp, 1)
    if row.item.size[0] * row.item.size[1] < _TINY * min(row.set.resolutions) ** 2:
        looks.tiny.append(name)


def _as_report(samples: Samples, looks: _Findings) -> dict[str, Any]:
    links = groups(looks.files)
    linked = {name for group in links for name in group[1:]}
    same = groups({name: digest for name, digest in looks.hashes.items() if name not in linked})
    copies = linked | {name for group in same for name in group[1:]}
    alike = groups({name: bits for name, bits in looks.prints.items() if name not in copies})
    return {
        "images": len(looks.hashes),
        "samples": len(samples.rows),
        "samples_per_epoch": samples.order(0).samples_per_epoch,
        "sets": [_set(image_set, samples) for image_set in samples.sets],
        "buckets": samples.bucket_rows(),
        "links_to_the_same_file": links,
        "duplicates": same,
        "alike": alike,
        "tiny": looks.tiny,
        "blurred": [{"file": n, "sharpness": s} for n, s in sorted(looks.blurred.items(), key=lambda pair: pair[1])],
        "notices": list(samples.notices),
        "files": samples.to_json(),
    }


def _set(image_set: DataSet, samples: Samples) -> dict[str, Any]:
    rows = [row for row in samples.rows if row.set is image_set]
    return {
        "set": shown(str(image_set.folder)),
        "samples": len(rows),
        "repeats": _repeats(rows),
        "weight": image_set.weight,
        "batch_size": image_set.batch_size,
        "resolutions": " ".join(map(str, image_set.resolutions)),
        "views": sum(len(row.views) for row in rows),
        "texts": len({text for row in rows for text in row.texts}),
        **({"control_images": sum(len(row.controls) for row in rows)} if image_set.control else {}),
        "masks": sum(row.item.mask is not None for row in rows),
        "loss_weight": image_set.loss_weight,
    }


def _repeats(rows: Sequence[Sample]) -> int | str:
    """Returns how often an image comes in an epoch: one number, or that of each kind of folder N_name."""
    numbers = sorted({row.repeats for row in rows})
    return numbers[0] if len(numbers) == 1 else " ".join(map(str, numbers))


def _write(path: Path, parts: Sequence[bytes]) -> None:
    refuse_folder(path)
    write_atomically(path, parts, sum(map(len, parts)))
