"""Stage 2, plan: the dataset in its buckets, the order of samples, and what is to be encoded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flame_train.adapters.kinds import ADAPTERS
from flame_train.adapters.targets import layer_shapes
from flame_train.config.checks import broken
from flame_train.config.located import ConfigWithSource, together
from flame_train.config.prompts import unread
from flame_train.config.schema import Config
from flame_train.config.training_sections import LONGEST_RUN
from flame_train.data.order import BatchSchedule
from flame_train.data.padding import Paddings
from flame_train.data.samples import EncoderInput, Sample, Samples, encoder_inputs
from flame_train.data.sets import image_sets
from flame_train.data.views import ViewedImage
from flame_train.diffusion.contrast import NO_PROMPT, Contrast
from flame_train.diffusion.preservation import PRESERVATIONS, Preservation
from flame_train.disk.preflight import could_make_folder
from flame_train.errors import ConfigError, DataError, FlameError, ModelFileError, OutputError
from flame_train.models.common.model import Example, Model
from flame_train.models.registry import Family
from flame_train.run.check.check_run import Checked, check
from flame_train.run.plan.encoding import Encoding, Keys
from flame_train.run.plan.notices import (
    notice_batch_size,
    notice_hidden,
    notice_long_texts,
    notice_packed,
    notice_rate,
    notice_trigger,
)
from flame_train.run.plan.read_dataset import read_dataset, split_held_out
from flame_train.run.sampling.requests import Request, read_requests, texts_of
from flame_train.training.batch import BASE_IS_TARGET, EXTRA_CAPTION
from flame_train.training.session import StopRequest

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Plan:
    """A run that was checked as a whole; no network is loaded yet.

    Attributes:
        checked: the settings and the opened model.
        samples: what is trained on.
        held_out: the images of validation, which are never trained on.
        requests: the images of a grid; none if the config wants no grids.
        base_requests: those of the grid that the base itself draws at step 0, beside that of another model.
        prompts: what is read for sampling and preservation in addition to the captions.
        text_rows: the tokens of the longest text, by the array that is kept without padding.
    """

    checked: Checked
    samples: Samples
    held_out: Samples = field(default_factory=lambda: Samples((), ()))
    requests: tuple[Request, ...] = ()
    base_requests: tuple[Request, ...] = ()
    prompts: tuple[EncoderInput, ...] = ()
    text_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """The settings."""
        return self.checked.config

    @property
    def model(self) -> Model:
        """The opened model."""
        return self.checked.model

    @cached_property
    def everything(self) -> Samples:
        """All images that are encoded: those that are trained on, then those that are held out."""
        return self.samples.joined(self.held_out)

    @cached_property
    def order(self) -> BatchSchedule:
        """Which sample comes when."""
        return self.samples.order(self.config.train.seed)

    @cached_property
    def encoding(self) -> Encoding:
        """By what images and captions are encoded."""
        return Encoding.of(self.checked)

    @cached_property
    def preserved(self) -> Preserved:
        """What examples have for preservation."""
        return Preserved.of(self.config, self.samples)

    @cached_property
    def shown(self) -> tuple[ViewedImage, ...]:
        """The control images of all prompts, each once."""
        every = (*self.requests, *self.base_requests)
        return tuple(dict.fromkeys(image for request in every for image in request.images))

    def cache_keys(self) -> Keys:
        """Hashes the networks that encode, and returns the cache keys of all that training and sampling will read."""
        return self.encoding.keys(self.everything, self.prompts, self.shown)

    def cache_bytes(self) -> int:
        """Counts what the cache takes on disk with everything encoded."""
        return self.encoding.bytes_of(self.everything, self.prompts, self.shown)

    @cached_property
    def parameters(self) -> int:
        """The number of trained values."""
        shapes, lora = layer_shapes(self.checked.networks), self.config.lora
        kind = ADAPTERS.chosen(lora)
        ranks = {name: settings.rank for name, settings in self.checked.layer_settings.items()}
        return sum(
            kind.count(shapes[n], ranks.get(n) or kind.sizes(shapes[n], lora.rank, lora.alpha)[0])
            for n in self.checked.targets
        )


def plan_run(config_source: ConfigWithSource, family: Family | None, stop: StopRequest, processes: int = 1) -> Plan:
    """Does `check`, then `make_plan`. Where one fails, one report has all that is wrong: images and run folder too.

    Raises what these raise, and ConfigError for problems of several kinds.
    """
    folder = partial(could_make_folder, Path(config_source.config.output.dir))
    try:
        checked = check(config_source, family)
    except (ConfigError, ModelFileError) as error:
        raise _with_more(error, config_source, (partial(read_dataset, config_source.config, stop), folder)) from error
    try:
        return make_plan(checked, stop, processes)
    except (ConfigError, DataError) as error:
        raise _with_more(error, config_source, (folder,)) from error


def _with_more(error: FlameError, config_source: ConfigWithSource, looks: Iterable[Callable[[], object]]) -> FlameError:
    """Joins an error with those of further looks, but for what is told when these are mended."""
    errors = [error]
    for look in looks:
        try:
            look()
        except (DataError, OutputError) as further:
            errors.append(further)
        except FlameError:
            continue
    return error if len(errors) == 1 else together(errors, config_source)


def make_plan(checked: Checked, stop: StopRequest, processes: int = 1) -> Plan:
    """Reads every image and caption, and gives each its bucket. `processes` share the micro-batches of an epoch.

    Raises DataError for what cannot be trained on, ConfigError for settings that do not fit the dataset.
    """
    config, model = checked.config, checked.model
    whole = read_dataset(config, stop)
    samples, held_out = split_held_out(config, whole, model.longest_side)
    for notice in whole.notices:
        _LOG.warning("%s", notice)
    notice_packed(model.denoiser, config.model.quantize)
    notice_rate(config.optimizer)
    notice_trigger(config, whole)
    notice_hidden(image_sets(config.data, config.captions))
    grids = config.sample.repeats > 0
    requests = read_requests(config.sample, config.data.resolution, checked.sample_model) if grids else ()
    of_base = checked.sample_of_base
    base_requests = read_requests(of_base, config.data.resolution, model) if grids and of_base else ()
    order = samples.order(config.train.seed)
    checked = _with_steps(checked, order.batches_per_epoch, processes)
    notice_batch_size(order)
    encoding, preserved = Encoding.of(checked), Preserved.of(config, samples)
    captions = (encoding.reading(text, row.controls_beside(0)) for row in whole.rows for text in row.texts)
    notice_long_texts(model, "caption", list(dict.fromkeys(captions)))
    notice_long_texts(model, "prompt", [encoding.reading(request.text, request.images) for request in requests])
    if warning := unread(request.text for request in requests):
        _LOG.warning("%s", warning)
    prompts = _prompts(encoding, (*requests, *base_requests), samples.rows, preserved)
    rows = encoding.longest({*encoding.encoder_inputs(samples.joined(held_out)), *prompts})
    return Plan(checked, samples, held_out, requests, base_requests, prompts, rows)


def _prompts(
    encoding: Encoding, requests: Sequence[Request], rows: Sequence[Sample], preserved: Preserved
) -> tuple[EncoderInput, ...]:
    """Lists what is read for sampling and preservation, each once."""
    sampled = (encoding.reading(text, request.images) for request in requests for text in texts_of([request]))
    further = (each for row in rows for each in encoder_inputs(row, preserved.texts(row), encoding.takes_images))
    return tuple(dict.fromkeys((*sampled, *further)))


def _with_steps(checked: Checked, batches_per_epoch: int, processes: int) -> Checked:
    """Sets the steps of `train.epochs`. Raises ConfigError for other steps, or a key that does not fit them."""
    c = checked.config
    if not c.train.epochs:
        return checked
    steps = -(-c.train.epochs * batches_per_epoch // (c.gradient.accumulation * processes))
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
    return replace(checked, config=config)


if TYPE_CHECKING:
    from flame_train.data.order import Choice


@dataclass(frozen=True, slots=True)
class Preserved:
    """What the examples of a run have for preservation, and for contrastive guidance.

    Attributes:
        kind: which further captions there are.
        base_is_target: whether the base model teaches any sample.
        contrasted: whether the empty caption is one of them.
    """

    kind: Preservation
    base_is_target: bool
    contrasted: bool = False

    @classmethod
    def of(cls, config: Config, samples: Samples) -> Preserved:
        """Takes them of a config, for samples that are trained on."""
        return cls(
            PRESERVATIONS.chosen(config.preservation),
            any(image_set.base_is_target for image_set in samples.sets),
            Contrast.of(config.loss.contrastive_scale, config.loss.contrastive_schedule) is not None,
        )

    def texts(self, row: Sample) -> tuple[str, ...]:
        """Returns every further caption of a sample, each once."""
        every = (
            further for text in ("", *row.texts) for further in self.kind.texts(text, row.set.captions.trigger).values()
        )
        return tuple(dict.fromkeys(every))

    def arrays(self, row: Sample, choice: Choice, captions: Callable[[str], Example]) -> Example:
        """Returns the arrays of a sample that is seen with `choice`; `captions` gives those of a caption."""
        text = "" if choice.drop_caption else row.text(choice.text)
        further = self.kind.texts(text, row.set.captions.trigger)
        example = {
            f"{name}{EXTRA_CAPTION}{n}": a for name, caption in further.items() for n, a in captions(caption).items()
        }
        example |= self.unprompted(captions)
        return example | (
            {BASE_IS_TARGET: np.full((1, 1, 1), row.set.base_is_target, np.float32)} if self.base_is_target else {}
        )

    def unprompted(self, captions: Callable[[str], Example]) -> Example:
        """Returns the arrays of the empty caption for contrastive guidance; none without it."""
        return {f"{NO_PROMPT}{EXTRA_CAPTION}{n}": a for n, a in captions("").items()} if self.contrasted else {}

    def paddings(self, own: Paddings) -> Paddings:
        """Returns how arrays of different lengths are filled up: those of further captions as the own are."""
        names = (*self.kind.texts("", ""), *((NO_PROMPT,) if self.contrasted else ()))
        return dict(own) | {
            f"{name}{EXTRA_CAPTION}{n}": replace(p, rows=f"{name}{EXTRA_CAPTION}{p.rows}" if p.rows else "")
            for name in names
            for n, p in own.items()
        }
