"""sd-scripts' images and captions: arguments of a command, and tables of a dataset TOML.

Places are in `library/` of kohya-ss/sd-scripts.
"""

from __future__ import annotations

from typing import Any, Final

from .conversions import ending, inverted, number, side, switched, to_float, to_number, unless_off
from .sd_scripts_regular import WEIGHT, weight
from .table import NOTHING, Lost, Row, Source, is_off, needless, never, part_of, same, turned

_BUCKETS: Final = "images go into buckets of their shape"


def _masks(data: str) -> Any:
    """A folder of masks, which sd-scripts reads where the loss is masked."""

    def convert(value: Any, source: Source) -> Any:
        if is_off(value):
            return NOTHING
        if is_off(source.get("masked_loss")):
            return Lost("sd-scripts reads it with masked_loss alone")
        return {f"{data}.masks": "files", f"{data}.mask_folder": value}

    return convert


def _held_out(value: Any, source: Source) -> Any:
    """A folder that is only validated on; a share of one has no counterpart, a share of all images has."""
    if is_off(value):
        return NOTHING
    return True if value == 1 else Lost("validation.fraction is a share of all images")


def _bound(usual: int) -> Any:
    """A bound of bucket sides, which holds where images are enlarged and bucketed (train_util.py:1007)."""

    def convert(value: Any, source: Source) -> Any:
        if is_off(source.get("enable_bucket")) or not is_off(source.get("bucket_no_upscale")):
            return NOTHING
        return number(value) or usual

    return convert


def _bucketed(value: Any, source: Source) -> Any:
    if not is_off(value):
        return NOTHING
    return Lost(f"{_BUCKETS}; sd-scripts without it crops them to the square")


def _folders(value: Any, source: Source) -> Any:
    """Folders N_name: their repeats, and their name for an image without a caption (config_util.py:607)."""
    return {"set.folder_repeats": True, "set.captions.folder_name": True}


def _rate(value: Any, source: Source) -> Any:
    rate = to_float(value, source)
    return NOTHING if is_off(rate) else rate


def _of_images(data: str, captions: str) -> list[Row]:
    """Rows about captions and images; they stand in a config and in a dataset TOML."""
    return [
        turned("shuffle_caption@train_util.py:4488", f"{captions}.shuffle", switched(True)),
        turned("keep_tokens@train_util.py:4501", f"{captions}.keep_tokens", unless_off),
        turned("keep_tokens_separator@train_util.py:4507", f"{captions}.keep_separator", unless_off),
        turned("caption_separator@train_util.py:4491", f"{captions}.separator", unless_off),
        turned("caption_tag_dropout_rate@train_util.py:4659", f"{captions}.tag_dropout", _rate),
        turned("caption_prefix@train_util.py:4526", f"{captions}.prefix", unless_off),
        turned("caption_suffix@train_util.py:4532", f"{captions}.suffix", unless_off),
        turned("enable_wildcard@train_util.py:4521", f"{captions}.wildcards", switched(True)),
        turned("flip_aug@train_util.py:4541", f"{data}.flip", switched(True)),
        turned("random_crop@train_util.py:4550", f"{data}.random_crop", switched(True)),
        turned(
            "alpha_mask@train_util.py:4634",
            f"{data}.masks",
            switched("alpha"),
            say='data.masks = "alpha" is this switch',
        ),
        turned(
            "conditioning_data_dir@train_util.py:4238",
            (f"{data}.masks", f"{data}.mask_folder"),
            _masks(data),
            say='data.mask_folder is a folder of masks, with data.masks = "files"; control images are not here',
        ),
        never("caption_dropout_every_n_epochs@train_util.py:4653", "data.caption_dropout is a share of the images"),
        never("secondary_separator@train_util.py:4514", "captions.separator is the one that there is"),
        never("token_warmup_min@train_util.py:4622", "all tags are there from the first step on", usual=1),
        never("token_warmup_step@train_util.py:4628", "all tags are there from the first step on"),
        never(
            "color_aug@train_util.py:4538",
            "data.brightness, contrast, saturation and hue say how much; set them by hand",
        ),
        never("face_crop_aug_range@train_util.py:4544", "data.random_crop crops anywhere"),
        never("resize_interpolation@train_util.py:4615", "images are resized as Pillow's LANCZOS does it"),
        *(
            never(name, "captions stand in text files, metadata.jsonl, metadata.csv or meta_cap.json")
            for name in ("in_json@train_util.py:4674", "metadata_file@config_util.py:222")
        ),
        *needless("it makes reading a folder faster", "cache_info@train_util.py:4482"),
    ]


OF_CONFIG: Final = [
    Row("enable_bucket", (), _bucketed, say=f"always on: {_BUCKETS}; remove it", at="train_util.py:4585"),
    turned("train_batch_size@train_util.py:3900", "data.batch_size", to_number),
    turned("resolution@train_util.py:4560", "data.resolution", side),
    turned(
        "bucket_no_upscale@train_util.py:4610",
        "data.upscale",
        inverted,
        say="data.upscale is the opposite switch: bucket_no_upscale = true is data.upscale = false, the default",
    ),
    turned("bucket_reso_steps@train_util.py:4604", "data.bucket_step", to_number),
    turned("min_bucket_reso@train_util.py:4590", "data.min_bucket", _bound(256)),
    turned("max_bucket_reso@train_util.py:4597", "data.max_bucket", _bound(1024)),
    turned("dataset_repeats@train_util.py:4677", "data.repeats", to_number),
    turned("caption_extension@train_util.py:4492", "data.caption_extension", ending),
    turned("caption_extention@train_util.py:5404", "data.caption_extension", ending),
    turned("caption_dropout_rate@train_util.py:4650", "data.caption_dropout", _rate),
    never("weighted_captions@custom_train_functions.py:139", "brackets in captions are taken as they are"),
    never("train_data_dir@train_network.py:521", "dataset_config has the folders, and sd-scripts reads no other"),
    never("reg_data_dir@train_util.py:4668", "a set of its own: [[data.sets]] with regularization = true"),
    *part_of("masked_loss@train_util.py:4244", "data.masks says where masks come from"),
    turned(
        "prior_loss_weight@train_util.py:4232",
        (),
        lambda v, s: NOTHING if number(v) == 1 else Lost("there are no regularization images that it could weigh"),
        say="regularization_weight of the set in [[data.sets]]",
    ),
    *_of_images("data", "captions"),
]

OF_SETS: Final = [
    turned("is_reg@config_util.py:217", "set.regularization", switched(True)),
    turned(f"{WEIGHT}@train_util.py:2172", "set.weight", weight),
    turned("validation_split@config_util.py:243", "set.validation", _held_out),
    never("validation_seed@config_util.py:242", "images are held out by the hash of each, whatever the seed"),
    turned("prior_loss_weight@config_util.py:253", "set.regularization_weight", to_float),
    same("image_dir@config_util.py:216", "set.path"),
    turned("N_name@config_util.py:607", ("set.folder_repeats", "set.captions.folder_name"), _folders),
    turned("num_repeats@config_util.py:187", "set.repeats", to_number),
    turned("resolution@config_util.py:244", "set.resolution", side),
    turned("batch_size@config_util.py:236", "set.batch_size", to_number),
    turned("class_tokens@config_util.py:211", "set.caption", unless_off),
    turned("caption_extention@train_util.py:5404", "set.caption_extension", ending),
    turned("caption_extension@config_util.py:210", "set.caption_extension", ending, absent=".caption"),
    turned("caption_dropout_rate@config_util.py:205", "set.caption_dropout", _rate),
    Row("enable_bucket", (), _bucketed, absent=False, at="config_util.py:239"),
    turned("bucket_no_upscale@config_util.py:237", "set.upscale", inverted, absent=False),
    turned("bucket_reso_steps@config_util.py:238", "set.bucket_step", to_number),
    turned("min_bucket_reso@config_util.py:241", "set.min_bucket", _bound(256), absent=256),
    turned("max_bucket_reso@config_util.py:240", "set.max_bucket", _bound(1024), absent=1024),
    never("network_multiplier@config_util.py:245", "a LoRA has its full strength on all images"),
    never("custom_attributes@config_util.py:199", "preservation.kind is for all images"),
    *_of_images("set", "set.captions"),
]
