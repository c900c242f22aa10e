"""A run in the words of sd-scripts' metadata, by which web interfaces show and sort LoRA files.

Keys and forms are those of its `train_network.py`. Nothing that depends on the hour or the host is written, and no
setting that changes no weight, so that equal runs give equal bytes. A setting that differs between sets of images has
no key there, and none here.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flame_train.config.schema import Config
from flame_train.data.samples import Sample, Samples
from flame_train.data.sets import DataSet
from flame_train.io.safetensors import MAX_METADATA_VALUE
from flame_train.optimizers import OPTIMIZERS
from flame_train.schedules import SCHEDULES
from flame_train.text_encoders.clip.encoder import ClipKeys


def as_sd_scripts(config: Config, samples: Samples, batches: int, title: str) -> dict[str, str]:
    """Returns the `ss_*` keys of a run as text, but for those of the network itself; off is "None" or "False" there.

    Args:
        title: the name of a file without a name of its own.
    """
    values = _training(config, samples, batches, title) | _loss(config) | _data(config, samples)
    texts = {f"ss_{key}": value if isinstance(value, str) else repr(value) for key, value in values.items()}
    return {key: text for key, text in texts.items() if len(text.encode()) <= MAX_METADATA_VALUE}


def _training(config: Config, samples: Samples, batches: int, title: str) -> dict[str, Any]:
    train, optimizer, text = config.train, config.optimizer, config.text_encoders
    epochs = train.epochs or math.ceil(train.steps * config.gradient.accumulation / batches)
    regular = [row for row in samples.rows if row.set.regularization]
    regularizing = sum(row.repeats for row in regular)
    return {
        "output_name": config.output.name or title,
        "seed": train.seed,
        "learning_rate": optimizer.lr,
        "unet_lr": optimizer.lr,
        **({"text_encoder_lr": text.lr or optimizer.lr} if text.train else {}),
        "optimizer": OPTIMIZERS.chosen(optimizer).name,
        "lr_scheduler": SCHEDULES.chosen(config.schedule).name,
        "lr_warmup_steps": config.schedule.warmup_of(train.steps),
        "max_train_steps": train.steps,
        "num_epochs": epochs,
        "num_train_images": sum(row.repeats for row in samples.rows) - regularizing,
        "num_reg_images": regularizing,
        "num_batches_per_epoch": batches,
        "batch_size_per_device": config.data.batch_size,
        "total_batch_size": config.data.batch_size * config.gradient.accumulation,
        "gradient_accumulation_steps": config.gradient.accumulation,
        "max_grad_norm": config.gradient.clip_norm,
        "mixed_precision": train.precision,
        "network_dropout": config.lora.dropout,
        "scale_weight_norms": config.lora.max_norm or None,
        "fp8_base": config.model.quantize == "fp8",
        "clip_skip": skipped if (skipped := ClipKeys.of(text).clip_skip) != 1 else None,
        "sd_model_name": Path(config.model.checkpoint).name,
        **({"vae_name": Path(config.model.vae).name} if config.model.vae else {}),
    }


def _loss(config: Config) -> dict[str, Any]:
    loss: Any = config.loss  # most of its keys come from tables
    weighting = {"min_snr": {"min_snr_gamma": getattr(loss, "snr_gamma", None)}}.get(loss.weighting, {})
    huber = {f"huber_{name}": getattr(loss, f"huber_{name}") for name in ("c", "schedule", "scale")}
    return {
        "loss_type": {"mse": "l2"}.get(loss.kind, loss.kind),
        **(huber if loss.kind in ("huber", "smooth_l1") else {}),
        "min_snr_gamma": None,
        **weighting,
        "debiased_estimation": loss.weighting == "debiased",
        "zero_terminal_snr": loss.zero_terminal_snr,
        "noise_offset": loss.offset_noise or None,
        "noise_offset_random_strength": loss.offset_noise_random,
        "adaptive_noise_scale": loss.offset_noise_adaptive or None,
        "multires_noise_iterations": loss.pyramid_noise or None,
        "multires_noise_discount": loss.pyramid_noise_discount,
        "ip_noise_gamma": loss.input_perturbation or None,
        "ip_noise_gamma_random_strength": loss.input_perturbation_random,
    }


_OF_SETS: dict[str, Callable[[DataSet], Any]] = {
    "caption_dropout_rate": lambda own: own.caption_dropout,
    "caption_tag_dropout_rate": lambda own: own.captions.tag_dropout,
    "shuffle_caption": lambda own: own.captions.shuffle,
    "keep_tokens": lambda own: own.captions.keep_tokens,
    "flip_aug": lambda own: own.flip,
    "random_crop": lambda own: own.random_crop,
    "color_aug": lambda own: any((own.brightness, own.contrast, own.saturation, own.hue)),
    "prior_loss_weight": lambda own: own.loss_weight,
}


def _data(config: Config, samples: Samples) -> dict[str, Any]:
    data, main = config.data, [image_set for image_set in samples.sets if not image_set.regularization]
    values: dict[str, Any] = {"prior_loss_weight": 1.0}
    for key, read in _OF_SETS.items():
        numbers = [
            read(image_set) for image_set in samples.sets if image_set.regularization or key != "prior_loss_weight"
        ]
        if numbers and all(one == numbers[0] for one in numbers):
            values[key] = numbers[0]
    return {
        **values,
        "resolution": f"({data.resolution}, {data.resolution})",
        "max_token_length": data.max_tokens,
        "enable_bucket": True,
        "bucket_no_upscale": not data.upscale,
        "min_bucket_reso": data.min_bucket or None,
        "max_bucket_reso": data.max_bucket or None,
        "cache_latents": True,
        "bucket_info": json.dumps({"buckets": _buckets(samples.rows)}),
        "dataset_dirs": json.dumps(_folders(samples, main)),
        "reg_dataset_dirs": json.dumps(
            _folders(samples, [image_set for image_set in samples.sets if image_set.regularization])
        ),
        "tag_frequency": _tag_frequency(samples),
    }


def _buckets(rows: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Returns each bucket as [width, height], and how many images it has with their repeats."""
    counts = Counter[tuple[int, int]]()
    for row in rows:
        counts[row.placement.bucket] += row.repeats
    return {
        str(number): {"resolution": [width, height], "count": counts[height, width]}
        for number, (height, width) in enumerate(sorted(counts))
    }


def _folders(samples: Samples, sets: Sequence[DataSet]) -> dict[str, dict[str, int]]:
    """Counts by the folder's own name how often its images are repeated and how many it has."""
    folders = {
        image_set.folder.name: {"n_repeats": image_set.repeats, "img_count": 0}
        for image_set in sets
        if not image_set.folder_repeats
    }
    for row in samples.rows:
        if any(row.set is image_set for image_set in sets):
            folder = folders.setdefault(_folder(row), {"n_repeats": row.repeats, "img_count": 0})
            folder["img_count"] += 1
    return folders


def _folder(row: Sample) -> str:
    """Names the folder that kohya would have as a set: N_name, where such folders have repeats of their own."""
    if row.set.folder_repeats:
        first, below, _ = row.item.key.partition("/")
        if below and re.match(r"\d+_", first):
            return first
    return row.set.folder.name


def _tag_frequency(samples: Samples) -> str:
    """Counts each tag, between commas of a caption: {folder: {tag: count}} as JSON, the rarest left out."""
    counts: dict[str, Counter[str]] = {}
    for row in samples.rows:
        counter = counts.setdefault(_folder(row), Counter())
        counter.update(tag.strip() for tag in row.item.caption.split(",") if tag.strip())
    frequent = {folder: counter.most_common() for folder, counter in counts.items()}
    while len(text := json.dumps({f: dict(tags) for f, tags in frequent.items()}).encode()) > MAX_METADATA_VALUE:
        frequent = {folder: tags[: len(tags) * 3 // 4] for folder, tags in frequent.items()}
    return text.decode()
