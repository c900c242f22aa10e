"""The dataset of a config: its images and captions in their buckets, those held out, and its record in a run folder."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flame_train.config.schema import Config, DataSection
from flame_train.data.bucketed import BucketedDataset, assign_buckets
from flame_train.data.buckets import BucketRule
from flame_train.data.companion_files import refuse_black
from flame_train.data.dataset import Dataset, DatasetError, Item
from flame_train.data.groups import grouped
from flame_train.data.images import decoded_images
from flame_train.data.samples import Samples, refuse_common, samples_of, split
from flame_train.data.sets import DataSet, image_sets
from flame_train.diffusion.objective_kind import OBJECTIVES
from flame_train.disk.preflight import user_cache
from flame_train.errors import ConfigError, DataError, shown
from flame_train.io.addresses import local_place
from flame_train.io.digests import Digests
from flame_train.run.plan.encoding import cache_folder
from flame_train.training.session import StopRequest

REPORT: Final = "dataset.json"
_NAMED: Final = 5
_UNREADABLE: Final = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
_LONGEST_EPOCH: Final = 10_000_000  # samples


def read_dataset(config: Config, stop: StopRequest) -> Samples:
    """Reads the images and captions of all sets, into buckets. Raises DataError with all that is wrong."""
    data = config.data
    parts: list[tuple[DataSet, BucketedDataset]] = []
    read: list[tuple[DataSet, Sequence[Item]]] = []
    problems: list[str] = []
    decoded = decoded_images(user_cache("images"), cache_folder(data))
    with Digests(user_cache("digests")) as digests:
        for image_set in image_sets(data, config.captions):
            try:
                dataset = Dataset.scan(
                    image_set.folder,
                    image_set.repeats,
                    by_folder=image_set.folder_repeats,
                    default_caption=image_set.caption or None,
                    caption_endings=(image_set.caption_extension,),
                    caption_lines=image_set.captions.lines,
                    folder_captions=image_set.captions.folder_name,
                    group=OBJECTIVES.chosen(config.loss).group,
                    masks=image_set.masks,
                    mask_folder=local_place(image_set.mask_folder) if image_set.mask_folder else None,
                    control=image_set.control_folders,
                    on_bad=data.on_bad_image,
                    clips=bool(image_set.frames),
                    progress=lambda done, total: stop.check("while reading the dataset"),
                    seen=decoded,
                    digests=digests,
                )
                read.append((image_set, dataset.items))
                parts += [
                    (image_set, assign_buckets(dataset, rule, data.on_bad_image, image_set.clip_rule))
                    for rule in bucket_rules(data, image_set.resolutions)
                ]
            except DataError as error:
                problems.append(str(error))
                read.append((image_set, error.items if isinstance(error, DatasetError) else ()))
    try:
        samples = samples_of(parts)
    except DataError as error:
        problems.append(str(error))
    if problems:
        trained, held = (
            [i for image_set, items in read if image_set.validation == by for i in items] for by in (False, True)
        )
        try:
            refuse_common(trained, held)
        except DataError as error:
            problems.append(str(error))
        raise DataError("\n".join(problems))
    return samples


def bucket_rules(data: DataSection, resolutions: Sequence[int]) -> list[BucketRule]:
    """Returns the buckets of each resolution."""
    return [BucketRule(side, data.bucket_step, data.min_bucket, data.max_bucket, data.upscale) for side in resolutions]


def split_held_out(config: Config, whole: Samples, longest_side: int) -> tuple[Samples, Samples]:
    """Splits what is trained on from what is held out, and checks both. What is trained on has its groups.

    Raises ConfigError for a share of groups, too long an epoch and a side above `longest_side`, DataError for masks
    that are black.
    """
    fraction = config.validation.fraction
    before = held_out_before(Path(config.output.dir), fraction, whole) if fraction else ()
    samples, held_out = split(whole, fraction, before)
    if endings := OBJECTIVES.chosen(config.loss).group:
        if fraction:
            raise ConfigError("validation.fraction: expected 0 with groups of images, which it would part; add a set")
        samples = grouped(samples, endings)
    _check_epoch(samples)
    _check_sides(whole, longest_side)
    masked = [(row, row.item.mask) for row in whole.rows if row.item.mask is not None and not row.set.mask_weight]
    refuse_black(mask.path for _, mask in masked if mask.blank == "black")
    return samples, held_out


def _check_epoch(samples: Samples) -> None:
    """Refuses an epoch too long for its order, which is made as a whole."""
    count = sum(row.repeats * row.set.weight for row in samples.rows)
    if count > _LONGEST_EPOCH:
        raise ConfigError(
            f"data.repeats: expected an epoch of at most {_LONGEST_EPOCH:,} samples, got {count:,.0f}; lower it: "
            "train.steps says how long a run is"
        )


def _check_sides(samples: Samples, longest_side: int) -> None:
    """Refuses buckets that the model has no positions for, before anything is encoded."""
    longest = max(max(bucket) for bucket in samples.buckets)
    if 0 < longest_side < longest:
        raise ConfigError(
            f"data.max_bucket: images go to a bucket with a side of {longest}, and this model has positions for "
            f"{longest_side}; set data.max_bucket = {longest_side} or a lower data.resolution"
        )


def changed_rows(report: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns what differs, at most five images each: gone, new, of another content, crop or caption.

    Args:
        report: `dataset.json` of the run folder, as the run has written it.
        rows: the same for the dataset as it is now.
    """
    try:
        written = json.loads(report.read_bytes())
        before = _by_name(written)
    except _UNREADABLE:
        return ""
    now = _by_name(rows)
    gone = [name for name in before if name not in now]
    new = [name for name in now if name not in before]
    there = {name: (before[name], _known(now[name], before[name])) for name in now if name in before}
    captions = [name for name, both in there.items() if _differ(*both, "captions")]
    masks = [name for name, both in there.items() if _differ(*both, "mask", "mask_cache")]
    controls = [name for name, both in there.items() if _differ(*both, "controls")]
    told = {*captions, *masks, *controls}
    others = [name for name, (was, is_now) in there.items() if name not in told and was != is_now]
    named = {"not there": gone, "new": new, "with another caption": captions, "with another mask": masks}
    named["with another control image"] = controls
    return ", ".join(filter(None, (_listed(names, what) for what, names in {**named, "changed": others}.items())))


def held_out_before(folder: Path, fraction: float, samples: Samples) -> frozenset[str]:
    """Returns the SHA-256 of the images that the run in a folder holds out; none where it has others, or another
    fraction.

    So a run that an earlier version began, which chose them in another way, continues with the same ones.
    """
    try:
        before = _by_name(json.loads((folder / REPORT).read_bytes()))
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        same = config["validation"]["fraction"] == fraction
    except _UNREADABLE:
        return frozenset()
    hashes = {
        next(iter(_by_name([row]))): sample.item.sha256
        for row, sample in zip(samples.to_json(), samples.rows, strict=True)
    }
    if not same or before.keys() != hashes.keys():
        return frozenset()
    return frozenset(hashes[name] for name, rows in before.items() if any(row.get("validation") for row in rows))


def _by_name(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Groups the rows of each image; it has one for each resolution."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        name = f"{row['set']}/{row['file']}" if "set" in row else str(row["file"])
        by_name.setdefault(name, []).append(row)
    return by_name


def _known(rows: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns rows without what an older version did not record, if the rows `before` are of one."""
    old = any("mask" in row and "mask_cache" not in row for row in before)
    return [{key: value for key, value in row.items() if not (old and key == "mask_cache")} for row in rows]


def _differ(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]], *keys: str) -> bool:
    return [[row.get(key) for key in keys] for row in before] != [[row.get(key) for key in keys] for row in now]


def _listed(names: Sequence[str], what: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    one = len(names) == 1
    return f"{', '.join(map(shown, names[:_NAMED]))}{more} {'is' if one else 'are'} {what}"
