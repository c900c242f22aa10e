"""Stage 2, plan: the dataset in its buckets, and the order of samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from flame_train.adapters.kinds import ADAPTERS
from flame_train.adapters.targets import layer_shapes
from flame_train.config.checks import broken
from flame_train.config.located import ConfigWithSource, together
from flame_train.config.prompt_notices import unread
from flame_train.config.schema import Config, DataSection
from flame_train.config.updates import LONGEST_RUN
from flame_train.data.bucketed import BucketedDataset, assign_buckets
from flame_train.data.buckets import BucketRule
from flame_train.data.control_files import Control
from flame_train.data.dataset import Dataset, DatasetError, Item
from flame_train.data.held_out import refuse_common, split
from flame_train.data.mask_files import refuse_black
from flame_train.data.order import BatchSchedule
from flame_train.data.reading import Reading, readings
from flame_train.data.samples import Samples, samples_of
from flame_train.data.seen import seen_images
from flame_train.data.sets import DataSet, image_sets
from flame_train.data.views import ViewedImage
from flame_train.disk.files import could_make_folder
from flame_train.errors import ConfigError, DataError, FlameError, ModelFileError, OutputError
from flame_train.io.digests import Digests
from flame_train.io.kept import local_place
from flame_train.models.common.model import Model
from flame_train.models.registry import Family
from flame_train.run.check.check import Checked, check
from flame_train.run.check.control_images import control_files, shown_to
from flame_train.run.plan.dataset_record import held_out_before
from flame_train.run.plan.encoding import Encoding, Keys, cache_folder
from flame_train.run.plan.notices import (
    notice_batch_size,
    notice_hidden,
    notice_long_texts,
    notice_rate,
    notice_trigger,
)
from flame_train.run.plan.preservation import Preserved
from flame_train.run.sampling import Request, requests, texts_of
from flame_train.training.stop import StopRequest
from flame_train.user_cache import user_cache

_LOG = logging.getLogger(__name__)
_LONGEST_EPOCH = 10_000_000  # samples


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A run that was checked as a whole; no network is loaded yet."""

    checked: Checked
    samples: Samples
    held_out: Samples = field(default_factory=lambda: Samples((), ()))
    """The images of validation, which are never trained on."""
    files: Mapping[str, Control] = field(default_factory=dict)
    """The control images of prompts, by the paths that the config gives."""
    text_rows: Mapping[str, int] = field(default_factory=dict)
    """The tokens of the longest text, by the array that is kept without padding."""

    @property
    def config(self) -> Config:
        """The settings."""
        return self.checked.config

    @property
    def model(self) -> Model:
        """The opened model."""
        return self.checked.model

    @property
    def everything(self) -> Samples:
        """All images that are encoded: those that are trained on, then those that are held out."""
        return self.samples.joined(self.held_out)

    @property
    def order(self) -> BatchSchedule:
        """Which sample comes when."""
        return self.samples.order(self.config.train.seed)

    @property
    def requests(self) -> tuple[Request, ...]:
        """The images of a grid; none if the config wants no grids."""
        sample = self.config.sample
        sampling_model, side = self.checked.sample_model, self.config.data.resolution
        return requests(sample, side, sampling_model, self.files) if sample.repeats else ()

    def shown_to(self, request: Request) -> tuple[ViewedImage, ...]:
        """The control images of an image of a grid."""
        return shown_to(request, self.files, self.model, self.config.data.resolution)

    @property
    def shown(self) -> tuple[ViewedImage, ...]:
        """The control images of all prompts, each once."""
        return tuple(dict.fromkeys(image for request in self.requests for image in self.shown_to(request)))

    @property
    def keys(self) -> Keys:
        """The cache keys of everything that training and sampling will read."""
        return self.encoding.keys(self.everything, self.prompts, self.shown)

    @property
    def cache_bytes(self) -> int:
        """What the cache takes on disk with everything encoded."""
        return self.encoding.bytes_of(self.everything, self.prompts, self.shown)

    @property
    def prompts(self) -> tuple[Reading, ...]:
        """What is read for sampling and preservation in addition to the captions."""
        encoding = self.encoding
        sampled = (
            encoding.reading(text, self.shown_to(request)) for request in self.requests for text in texts_of([request])
        )
        preserved = self.preserved
        rows, images = self.samples.rows, encoding.takes_images
        further = (each for row in rows for each in readings(row, preserved.texts(row), images))
        return tuple(dict.fromkeys((*sampled, *further)))

    @property
    def preserved(self) -> Preserved:
        """What examples have for preservation."""
        return Preserved.of(self.config, self.samples)

    @property
    def encoding(self) -> Encoding:
        """By what images and captions are encoded."""
        c, running = self.config, self.checked.running
        return Encoding(
            self.model.vae,
            tuple(encoder for encoder in self.model.text if encoder not in running),
            c.model.vae_precision,
            c.train.precision,
            c.text_encoders.precision,
            cache_folder(c.data),
            running,
            self.checked.streamed_text,
            c.model.vae_tile,
        )

    @property
    def parameters(self) -> int:
        """The number of trained values."""
        shapes, lora = layer_shapes(self.checked.networks), self.config.lora
        kind = ADAPTERS.chosen(lora)
        ranks = {name: own.rank for name, own in self.checked.layer_settings.items()}
        return sum(
            kind.count(shapes[n], ranks.get(n) or kind.sizes(shapes[n], lora.rank, lora.alpha)[0])
            for n in self.checked.targets
        )


def planned(asked: ConfigWithSource, family: Family | None, stop: StopRequest, processes: int = 1) -> Plan:
    """`check`, then `make_plan`. Where one fails, one report has all that is wrong: images and run folder too.

    Raises what these raise, and ConfigError for problems of several kinds.
    """
    folder = partial(could_make_folder, Path(asked.config.output.dir))
    try:
        checked = check(asked, family)
    except (ConfigError, ModelFileError) as error:
        raise _with_more(error, asked, (partial(_read, asked.config, stop), folder)) from error
    try:
        return make_plan(checked, stop, processes)
    except (ConfigError, DataError) as error:
        raise _with_more(error, asked, (folder,)) from error


def _with_more(error: FlameError, asked: ConfigWithSource, looks: Iterable[Callable[[], object]]) -> FlameError:
    """An error with those of further looks, but for what is told when these are mended."""
    found = [error]
    for look in looks:
        try:
            look()
        except (DataError, OutputError) as further:
            found.append(further)
        except FlameError:
            continue
    return error if len(found) == 1 else together(found, asked)


def make_plan(checked: Checked, stop: StopRequest, processes: int = 1) -> Plan:
    """Reads every image and caption, and gives each its bucket. `processes` share the micro-batches of an epoch.

    Raises DataError for what cannot be trained on, ConfigError for settings that do not fit the dataset.
    """
    config, model = checked.config, checked.model
    whole = _read(config, stop)
    fraction = config.validation.fraction
    before = held_out_before(Path(config.output.dir), fraction, whole) if fraction else ()
    samples, held_out = split(whole, fraction, before)
    _check_epoch(samples)
    _check_sides(whole, model.longest_side)
    masked = [(row, row.item.mask) for row in whole.rows if row.item.mask is not None and not row.set.mask_weight]
    refuse_black(mask.path for _, mask in masked if mask.blank == "black")
    for notice in whole.notices:
        _LOG.warning("%s", notice)
    notice_rate(config.optimizer)
    notice_trigger(config, whole)
    notice_hidden(image_sets(config.data, config.captions))
    files = control_files(Plan(checked, samples, held_out).requests, checked.sample_model, config.data.resolution)
    plan = _with_steps(Plan(checked, samples, held_out, files), processes)
    notice_batch_size(plan.order)
    encoding = plan.encoding
    captions = (encoding.reading(text, row.seen_beside(0)) for row in whole.rows for text in row.texts)
    notice_long_texts(model, "caption", list(dict.fromkeys(captions)))
    prompts = [encoding.reading(request.text, plan.shown_to(request)) for request in plan.requests]
    notice_long_texts(model, "prompt", prompts)
    if told := unread(request.text for request in plan.requests):
        _LOG.warning("%s", told)
    return replace(plan, text_rows=encoding.longest({*encoding.readings(plan.everything), *plan.prompts}))


def _read(config: Config, stop: StopRequest) -> Samples:
    """The images and captions of all sets, each in its buckets. Raises DataError with all that is wrong."""
    data = config.data
    parts: list[tuple[DataSet, BucketedDataset]] = []
    read: list[tuple[DataSet, Sequence[Item]]] = []
    problems: list[str] = []
    seen = seen_images(cache_folder(data))
    with Digests(user_cache("digests")) as digests:
        for own in image_sets(data, config.captions):
            try:
                dataset = Dataset.scan(
                    own.folder,
                    own.repeats,
                    by_folder=own.folder_repeats,
                    default_caption=own.caption or None,
                    caption_endings=(own.caption_extension,),
                    caption_lines=own.captions.lines,
                    folder_captions=own.captions.folder_name,
                    masks=own.masks,
                    mask_folder=local_place(own.mask_folder) if own.mask_folder else None,
                    control=own.control_folders,
                    on_bad=data.on_bad_image,
                    progress=lambda done, total: stop.check("while reading the dataset"),
                    seen=seen,
                    digests=digests,
                )
                read.append((own, dataset.items))
                parts += [
                    (own, assign_buckets(dataset, rule, data.on_bad_image)) for rule in _rules(data, own.resolutions)
                ]
            except DataError as error:
                problems.append(str(error))
                read.append((own, error.items if isinstance(error, DatasetError) else ()))
    try:
        samples = samples_of(parts)
    except DataError as error:
        problems.append(str(error))
    if problems:
        trained, held = ([i for own, items in read if own.validation == by for i in items] for by in (False, True))
        try:
            refuse_common(trained, held)
        except DataError as error:
            problems.append(str(error))
        raise DataError("\n".join(problems))
    return samples


def _rules(data: DataSection, resolutions: Sequence[int]) -> list[BucketRule]:
    return [BucketRule(side, data.bucket_step, data.min_bucket, data.max_bucket, data.upscale) for side in resolutions]


def _with_steps(plan: Plan, processes: int) -> Plan:
    """The plan with the steps of `train.epochs`, if the config counts in epochs: as many as the last one needs.

    Raises ConfigError if it counts in steps too, and these are others; or if a key does not fit the steps.
    """
    c = plan.config
    if not c.train.epochs:
        return plan
    steps = -(-c.train.epochs * plan.order.batches_per_epoch // (c.gradient.accumulation * processes))
    if c.train.steps not in (steps, LONGEST_RUN):
        raise ConfigError(
            f"train.epochs: expected this or train.steps ({c.train.steps}), got both, and {c.train.epochs} epochs are "
            f"{steps} steps here; remove train.steps, or set train.epochs = 0"
        )
    if steps > LONGEST_RUN:
        raise ConfigError(f"train.epochs: expected at most {LONGEST_RUN:,} steps, got {steps:,}; lower it")
    config = c.model_copy(update={"train": c.train.model_copy(update={"steps": steps})})
    if wrong := broken(config):
        raise ConfigError("\n".join(f"{path}: {message}" for path, message in wrong))
    return replace(plan, checked=replace(plan.checked, config=config))


def _check_epoch(samples: Samples) -> None:
    """An epoch's order is made as a whole."""
    count = sum(row.repeats * row.set.weight for row in samples.rows)
    if count > _LONGEST_EPOCH:
        raise ConfigError(
            f"data.repeats: expected an epoch of at most {_LONGEST_EPOCH:,} samples, got {count:,.0f}; lower it: "
            "train.steps says how long a run is"
        )


def _check_sides(samples: Samples, longest_side: int) -> None:
    """Buckets that the model has no positions for would be met when everything is encoded."""
    longest = max(max(bucket) for bucket in samples.buckets)
    if 0 < longest_side < longest:
        raise ConfigError(
            f"data.max_bucket: images go to a bucket with a side of {longest}, and this model has positions for "
            f"{longest_side}; set data.max_bucket = {longest_side} or a lower data.resolution"
        )
