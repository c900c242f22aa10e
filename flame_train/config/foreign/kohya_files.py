"""Configs in sd-scripts' form, which its web interface and musubi-tuner write too: their files and sets of images.

Places are in kohya-ss/sd-scripts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flame_train.data.image_formats import IMAGE_ENDINGS
from flame_train.disk.roots import may_look
from flame_train.errors import ConfigError

from .conversions import number, to_float
from .table import NOTHING, Changed, Lost, Reading, Setting, Source, is_off, no_file

_OF_SETS: Final = (
    *("resolution", "enable_bucket", "bucket_no_upscale", "bucket_reso_steps", "min_bucket_reso", "max_bucket_reso"),
    *("caption_extension", "caption_dropout_rate", "shuffle_caption", "keep_tokens", "keep_tokens_separator"),
    *("caption_separator", "caption_tag_dropout_rate", "caption_prefix", "caption_suffix", "enable_wildcard"),
    *("flip_aug", "random_crop", "alpha_mask"),
)


_LISTS: Final = ("network_args", "optimizer_args", "lr_scheduler_args")


def datasets_of(reading: Reading, settings: dict[str, Setting], notes: list[str]) -> list[dict[str, Setting]]:
    """Returns the tables of the dataset TOML that --dataset_config names; a note where it is missing."""
    named = settings.pop("dataset_config", None)
    if named is None or not named.value:
        return []
    other = reading.beside(str(named.value))
    if other is None:
        notes.append(no_file("dataset_config", named, "its folders are"))
        return []
    return sets_of(other)


def source_of(
    family: str,
    settings: dict[str, Setting],
    sets: list[dict[str, Setting]],
    notes: list[str],
    folder: Path | None,
) -> Source:
    """Returns the arguments of a command, and the tables of its dataset TOML or none, as the rows read them.

    Args:
        family: the model family, or "".
        notes: files that are named and not there.
        folder: where relative folders of images are looked for, beside the working directory.
    """
    if not sets and settings.get("train_data_dir", Setting("", "")).value:
        sets = counted(_folders(settings), folder)
    if any("is_reg" in one for one in sets) and "prior_loss_weight" in settings:
        weight = settings.pop("prior_loss_weight")
        sets = [one | {"prior_loss_weight": weight} if "is_reg" in one else one for one in sets]
    filled = _filled_in(sets, settings)
    return Source(family, unpacked(settings), filled, notes)


def flat(reading: Reading, tree: Mapping[str, Any]) -> dict[str, Setting]:
    """Returns the settings without their sections, as sd-scripts takes them (train_util.py:4748)."""
    return {name.rpartition(".")[2]: setting for name, setting in reading.flat(tree).items()}


def of_config_file(reading: Reading, named: Setting) -> dict[str, Setting]:
    """Returns the TOML that a command names by --config_file, whose arguments override it (train_util.py:4700)."""
    name = str(named.value)
    name = name if name.endswith(".toml") else f"{name}.toml"
    other = reading.beside(name)
    if other is None:
        raise ConfigError(
            f"{named.place}: config_file = {name!r}: expected the file beside this one, got none; it says how to train"
        )
    return flat(other, {key: value for key, value in other.tree.items() if key not in ("general", "datasets")})


def _filled_in(sets: list[dict[str, Setting]], settings: dict[str, Setting]) -> list[dict[str, Setting]]:
    """Gives the sets, with what the config says of all images where they say nothing; it is taken out of `settings`."""
    if not sets:
        return []
    names = {"train_batch_size": "batch_size", "dataset_repeats": "num_repeats"} | {name: name for name in _OF_SETS}
    shared = {ours: settings.pop(theirs) for theirs, ours in names.items() if theirs in settings}
    return [shared | one for one in sets]


def sets_of(reading: Reading) -> list[dict[str, Setting]]:
    """Returns the subsets of a dataset TOML, each with what [general] and its dataset say."""
    sets: list[dict[str, Setting]] = []
    datasets = reading.tree.get("datasets")
    general = reading.tree.get("general", {})
    below = reading.flat(general, ("general",)) if isinstance(general, Mapping) else {}
    for i, dataset in enumerate(datasets if isinstance(datasets, list) else []):
        at = ("datasets", f"[{i}]")
        own = reading.flat({name: value for name, value in dataset.items() if name != "subsets"}, at)
        sets += counted(
            [
                below | own | reading.flat(subset, (*at, "subsets", f"[{j}]"))
                for j, subset in enumerate(dataset.get("subsets", []))
            ],
            reading.folder,
        )
    return sets


def _folders(settings: dict[str, Setting]) -> list[dict[str, Setting]]:
    """Returns the folders that train_data_dir and reg_data_dir name; with in_json one without repeats."""
    images = {"image_dir": settings.pop("train_data_dir")}
    if settings.get("in_json", Setting("", "")).value:
        return [images]
    folders = [images | {"N_name": Setting(True, images["image_dir"].place, "folders named N_name")}]
    regularization = settings.pop("reg_data_dir", None)
    if regularization and regularization.value:
        usual = {"prior_loss_weight": Setting(1.0, "")}
        marked = {
            "image_dir": regularization,
            "N_name": Setting(True, ""),
            "is_reg": Setting(True, regularization.place),
        }
        folders.append(marked | usual)
    return folders


def unpacked(settings: dict[str, Setting]) -> dict[str, Setting]:
    """network_args = ["conv_dim=8"] as network_args.conv_dim, and so on; text that spells a number as one."""
    arguments = {}
    for name, setting in settings.items():
        if name in _LISTS:
            parts = setting.value if isinstance(setting.value, list) else str(setting.value).split()
            for part in map(str, parts):
                key, _, value = part.replace('"', "").partition("=")
                arguments[f"{name}.{key.strip()}"] = Setting(_literal(value), setting.place)
        else:
            arguments[name] = setting
    return arguments


def _literal(text: str) -> Any:
    """Returns what the value of `key=value` spells: a number, true, false or text."""
    plain = text.strip(" \"'")
    return {"true": True, "false": False}.get(plain.lower(), number(plain))


WEIGHT: Final = "(regularization)"
"""The name of the setting that holds the counts of one dataset: images of training, and of regularization."""


_UNCOUNTED: Final = (
    "sd-scripts shows as many of these images as training images in an epoch, and its folders are not here to count; "
    "set the set's weight to training images / regularization images, each times its repeats"
)


def counted(sets: Sequence[dict[str, Setting]], folder: Path | None) -> list[dict[str, Setting]]:
    """The sets of one dataset, those of regularization with the counts, or None where a folder cannot be counted."""
    regular = [bool("is_reg" in one and one["is_reg"].value) for one in sets]
    if not any(regular):
        return list(sets)
    counts = [_count(one, folder) for one in sets]
    kinds = [sum(count for count, is_reg in zip(counts, regular, strict=True) if is_reg == kind) for kind in (0, 1)]
    value = tuple(kinds) if all(counts) and all(kinds) else None
    return [
        one | ({WEIGHT: Setting(value, one["is_reg"].place, one["image_dir"].written or _said(one))} if is_reg else {})
        for one, is_reg in zip(sets, regular, strict=True)
    ]


def weight(value: Any, source: Source) -> Any:
    """Converts how often the set's images come beside their repeats."""
    if value is None:
        return Lost(_UNCOUNTED)
    images, regular = value
    factor = round(images / regular, 6)
    if factor == 1:
        return NOTHING
    return Changed(factor, f"{regular} images come as often as {images} of training, as sd-scripts repeats them")


def _said(one: Mapping[str, Setting]) -> str:
    return f"regularization images in {one['image_dir'].value}" if "image_dir" in one else "regularization images"


def _count(one: Mapping[str, Setting], folder: Path | None) -> int:
    """Returns the images of a set, times their repeats; 0 where its folder is not there or has none."""
    named = str(one["image_dir"].value) if "image_dir" in one else ""
    places = [base / Path(named).expanduser() for base in (folder, Path()) if base is not None and named]
    place = next((place for place in places if may_look(place) and place.is_dir()), None)
    if place is None:
        return 0
    if "N_name" in one:
        repeats = ((own, own.name.partition("_")[0]) for own in place.iterdir() if own.is_dir())
        return sum(int(times) * _images(own) for own, times in repeats if times.isdecimal())
    return int(number(one["num_repeats"].value) if "num_repeats" in one else 1) * _images(place)


def _images(folder: Path) -> int:
    return sum(file.suffix.lower() in IMAGE_ENDINGS for file in folder.iterdir())


_BUCKETS: Final = "images go into buckets of their shape"


def masks(data: str) -> Any:
    """Returns a folder of masks, which sd-scripts reads where the loss is masked."""

    def convert(value: Any, source: Source) -> Any:
        if is_off(value):
            return NOTHING
        if is_off(source.get("masked_loss")):
            return Lost("sd-scripts reads it with masked_loss alone")
        return {f"{data}.masks": "files", f"{data}.mask_folder": value}

    return convert


def held_out(value: Any, source: Source) -> Any:
    """Converts a folder that is only validated on; a share of one has no counterpart, a share of all images has."""
    if is_off(value):
        return NOTHING
    return True if value == 1 else Lost("validation.fraction is a share of all images")


def bucket_bound(usual: int) -> Any:
    """Returns a bound of bucket sides, which holds where images are enlarged and bucketed (train_util.py:1007)."""

    def convert(value: Any, source: Source) -> Any:
        if is_off(source.get("enable_bucket")) or not is_off(source.get("bucket_no_upscale")):
            return NOTHING
        return number(value) or usual

    return convert


def bucketed(value: Any, source: Source) -> Any:
    if not is_off(value):
        return NOTHING
    return Lost(f"{_BUCKETS}; sd-scripts without it crops them to the square")


def named_folders(value: Any, source: Source) -> Any:
    """Folders N_name: their repeats, and their name for an image without a caption (config_util.py:607)."""
    return {"set.folder_repeats": True, "set.captions.folder_name": True}


def dropout(value: Any, source: Source) -> Any:
    rate = to_float(value, source)
    return NOTHING if is_off(rate) else rate
