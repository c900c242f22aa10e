"""Rules between keys, and rules a type cannot say. They join the report of everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from flame_train.adapters.kinds import ADAPTERS
from flame_train.config.key_rules import (
    address_problem,
    checkpoint_blocks_problem,
    contrastive_problem,
    contrastive_schedule_problem,
    hub_problem,
    min_rank_problem,
    objective_problem,
    offload_problem,
    rank_exponent_problem,
    spacing_problem,
    zero_terminal_snr_problem,
)
from flame_train.config.keys import keys
from flame_train.config.prompts import Prompt
from flame_train.config.schema import REPEATED, Config
from flame_train.config.training_sections import budget_problem
from flame_train.data.buckets import BucketRule
from flame_train.data.sets import DataSet, image_sets
from flame_train.diffusion.preservation import PRESERVATIONS
from flame_train.diffusion.timestep_sampling import TIMESTEP_SAMPLINGS
from flame_train.errors import ConfigError
from flame_train.optimizers import OPTIMIZERS
from flame_train.schedules import SCHEDULES
from flame_train.settings import entries_of
from flame_train.text_encoders.encoder_keys import ENCODER_KEYS


@dataclass(frozen=True, slots=True)
class Check:
    """`broken` gets a config whose `paths` are each valid, and returns the problem or None.

    The problem is reported at the first of `paths` that the user wrote.
    """

    paths: tuple[str, ...]
    broken: Callable[[Config], str | None]


def _required(config: Config, path: str) -> str | None:
    section, name = path.split(".")
    doc = keys()[path].doc.removesuffix("; required")
    return None if getattr(getattr(config, section), name) else f"expected {doc}, got nothing"


def _images(config: Config) -> str | None:
    if config.data.path and config.data.sets:
        return "expected this or tables [[data.sets]], got both; name its folder in a table of its own"
    return None if config.data.sets else _required(config, "data.path")


def _sets(config: Config) -> str | None:
    sets = config.data.sets
    lacking = [str(number) for number, one in enumerate(sets, 1) if not one.path]
    if lacking:
        return f"expected path, the folder of images, in table {', '.join(lacking)}, got none"
    if "\0" in "".join(place for one in sets for place in (one.path, *one.control)):
        return "expected paths, got a NUL character in one"
    without = [str(n) for n, one in enumerate(image_sets(config.data), 1) if not one.control]
    if 0 < len(without) < len(sets):
        return f"expected control in every table or in none, got none in table {', '.join(without)}"
    for number, one in enumerate(sets, 1):
        if one.regularization_target == "base" and not one.regularization:
            return f'expected regularization = true with regularization_target = "base" in table {number}, got false'
    return None


def _text(config: Config, path: str) -> str | None:
    section, name = path.split(".")
    value = getattr(getattr(config, section), name)
    text = "".join(f"{v.text}{v.negative or ''}" if isinstance(v, Prompt) else v for v in value)
    if "\0" in text:
        return "expected text, got a NUL character in it"
    if any("\ud800" <= c <= "\udfff" for c in text):  # neither config.toml nor the LoRA's metadata could hold it
        return "expected UTF-8 text, got a byte that is none, or half a surrogate pair"
    return None


def _warmup(config: Config) -> str | None:
    warmup, steps = config.schedule.warmup_steps, config.train.steps
    return f"expected less than train.steps ({steps}), got {warmup}" if warmup >= steps else None


def _epochs_twice(config: Config, section: str) -> str | None:
    """Returns an interval in steps beside one in epochs. Where only that is written, `load` has set this to 0."""
    every, epochs = getattr(config, section).every, getattr(config, section).every_epochs
    return (
        f"expected this or {section}.every ({every}), got both; remove one, or set it to 0"
        if every and epochs
        else None
    )


def _warmup_twice(config: Config) -> str | None:
    steps, share = config.schedule.warmup_steps, config.schedule.warmup
    return f"expected this or schedule.warmup_steps ({steps}), got both; remove one" if steps and share else None


def _averaging(config: Config) -> str | None:
    """Asks that weights are averaged once: a schedule-free optimizer does it, in place of a decay and of an EMA."""
    if not OPTIMIZERS.chosen(config.optimizer).averages:
        return None
    name, schedule = OPTIMIZERS.chosen(config.optimizer).name, SCHEDULES.chosen(config.schedule)
    if schedule.decays:
        return f'expected schedule.name = "constant" with "{name}", which needs no decay, got "{schedule.name}"'
    if config.train.ema_decay:
        return f'expected train.ema_decay = 0 with "{name}", which averages by itself, got {config.train.ema_decay}'
    return None


def _lora_plus(config: Config) -> str | None:
    if config.optimizer.lora_plus_ratio == 1.0 or ADAPTERS.chosen(config.lora).files.has_pair:
        return None
    return "expected 1: this kind of adapter has no up matrix"


def _kind_in_format(config: Config) -> str | None:
    """Returns a kind of adapter that a file of the result cannot hold."""
    kind, form = ADAPTERS.chosen(config.lora), config.output.format
    return kind.files.format_problem(form, kind) or None


def _dropout(config: Config) -> str | None:
    """Only a LoRA has inner activations to leave out."""
    kind = ADAPTERS.chosen(config.lora)
    if kind.has_dropout or not any([config.lora.dropout, *(rule.dropout for rule in config.lora.rules)]):
        return None
    return f'expected 0 with lora.kind = "{kind.name}", which has none of its own; use rank_dropout or module_dropout'


def _max_norm(config: Config) -> str | None:
    """Returns an optimizer that averages keeps values of its own, which nothing makes smaller."""
    chosen = OPTIMIZERS.chosen(config.optimizer)
    if config.lora.max_norm and chosen.averages:
        return f'expected 0 with optimizer.name = "{chosen.name}", got {config.lora.max_norm}'
    return None


def _min_lr(config: Config) -> str | None:
    low, peak = config.schedule.min_lr, config.optimizer.lr
    return f"expected at most optimizer.lr ({peak}), got {low}" if low > peak else None


def _inapplicable(config: Config, path: str) -> str | None:
    """Refuses a key of one choice where another is made, but for what `init --full` writes for the usual choice."""
    key = keys()[path]
    section = getattr(config, key.section)
    if key.name not in section.model_fields_set:
        return None
    usual = keys()[key.chosen_by].default
    if usual in key.defaults and getattr(section, key.name) == key.defaults[usual]:
        return None
    for choice, names in key.only.items():
        chosen = getattr(section, choice.split(".")[1])
        if chosen not in names:
            expected = " or ".join(f'{choice} = "{name}"' for name in names)
            return f'expected {expected} with it, got "{chosen}"; remove this key or change that one'
    return None


def _own_problem(config: Config, path: str) -> str | None:
    section, name = path.split(".")
    for entry in entries_of(getattr(config, section)):
        if name in type(entry).model_fields:
            return entry.problems(config).get(name)
    return None


def _decay(config: Config) -> str | None:
    chosen = SCHEDULES.chosen(config.schedule)
    if config.schedule.min_lr == 0.0 or chosen.decays:
        return None
    return f'expected a schedule.name that decays with it, got "{type(chosen).name}"'


def _arithmetic(config: Config) -> str | None:
    if config.model.arithmetic in ("bf16", config.model.quantize.removesuffix("-convrot")):
        return None
    expected = f'expected model.quantize = "{config.model.arithmetic}" with it, got "{config.model.quantize}"'
    why = ", whose weights are decoded to train.precision for each product" if config.model.quantize == "nf4" else ""
    return expected + why


def _noise_decay(config: Config) -> str | None:
    if config.gradient.noise_decay == keys()["gradient.noise_decay"].default or config.gradient.noise_std > 0:
        return None
    return "expected gradient.noise_std above 0 with it"


def _loss_scale(config: Config, name: str) -> str | None:
    value, usual = getattr(config.train, name), keys()[f"train.{name}"].default
    if value != usual and config.train.precision != "fp16":
        return f'expected train.precision = "fp16" with it, which alone scales its loss, got "{config.train.precision}"'
    if value != usual and name != "loss_scale" and config.train.loss_scale != "dynamic":
        return f'expected train.loss_scale = "dynamic" with it, got {config.train.loss_scale}'
    return None


def _normalize(config: Config) -> str | None:
    if config.gradient.normalize and not config.gradient.clip_norm:
        return "expected gradient.clip_norm above 0 with it: the norm that gradients are scaled to"
    return None


def _timestep_span(config: Config) -> str | None:
    low, high = config.loss.min_timestep, config.loss.max_timestep
    if low >= high:
        return f"expected less than loss.max_timestep ({high}), got {low}"
    sampling = TIMESTEP_SAMPLINGS.chosen(config.loss)
    if (low, high) == (0, 1000) or not sampling.exact:
        return None
    return f'has no effect with loss.timestep_sampling = "{sampling.name}"; remove it, or change that'


def _bucket_step(config: Config, name: str) -> str | None:
    side, step = getattr(config.data, name), config.data.bucket_step
    return f"expected a multiple of data.bucket_step ({step}), got {side}" if side % step else None


def _min_bucket(config: Config) -> str | None:
    side, resolution = config.data.min_bucket, config.data.resolution
    return f"expected at most data.resolution ({resolution}), got {side}" if side > resolution else None


def _max_bucket(config: Config) -> str | None:
    side, resolution = config.data.max_bucket, config.data.resolution
    return f"expected at least data.resolution ({resolution}), got {side}" if 0 < side < resolution else None


def _guidance(config: Config) -> str | None:
    guidance = config.sample.guidance_scale
    return f"expected 0, the model's own, or a number >= 1, got {guidance}" if 0 < guidance < 1 else None


def _targets(config: Config) -> str | None:
    targets = config.lora.targets
    return None if targets and all(targets) else f"expected presets or globs, got {list(targets)}"


def _trained_text(config: Config) -> str | None:
    text, known = config.text_encoders, list(ENCODER_KEYS)
    if wrong := [name for name in text.train if name not in known]:
        return f'expected names among {", ".join(sorted(known))}, got "{wrong[0]}"'
    if len(set(text.train)) < len(text.train):
        return f"expected each name once, got {list(text.train)}"
    if text.train and text.cache == "on":
        return (
            'expected none with text_encoders.cache = "on": captions that are encoded once cannot follow an encoder '
            'that is trained; set text_encoders.cache = "auto"'
        )
    return None


def _only_trained(config: Config, name: str) -> str | None:
    text = config.text_encoders
    if text.train or getattr(text, name) == keys()[f"text_encoders.{name}"].default:
        return None
    return "expected text_encoders.train with it, the text encoders that it is for, got none"


def _preservation_weight(config: Config) -> str | None:
    if config.preservation.weight == 1.0 or PRESERVATIONS.chosen(config.preservation).active:
        return None
    return "expected preservation.kind with it, what is kept"


def _of_sets(config: Config) -> list[tuple[str, DataSet]]:
    """Returns each set with what messages call it: nothing where `data.path` is the only one."""
    sets = image_sets(config.data, config.captions)
    return [(f" in table {n} of data.sets" if config.data.sets else "", one) for n, one in enumerate(sets, 1)]


def _resolutions(config: Config) -> str | None:
    """Resolutions for which there are no buckets, beside data.resolution, which has checks of its own."""
    data = config.data
    for where, one in _of_sets(config):
        for resolution in one.resolutions:
            try:
                BucketRule(resolution, data.bucket_step, data.min_bucket, data.max_bucket)
            except ConfigError as error:
                return None if resolution == data.resolution else f"{resolution}{where}: {error}"
    return None


def _mask_folder(config: Config) -> str | None:
    for where, one in _of_sets(config):
        if one.mask_folder and one.masks != "files":
            return f'expected data.masks = "files" with it, got "{one.masks}"{where}'
    return None


def _separator(config: Config) -> str | None:
    for where, one in _of_sets(config):
        if not one.captions.separator and (one.captions.shuffle or one.captions.tag_dropout):
            return f"expected the text between tags, such as a comma, got none{where}"
    return None


def _resolution(config: Config) -> str | None:
    step, resolution = config.data.bucket_step, config.data.resolution
    return f"expected at most data.resolution ({resolution}), got {step}" if step > resolution else None


def _caption_extension(config: Config) -> str | None:
    for where, ending in [(where, one.caption_extension) for where, one in _of_sets(config)]:
        if not ending.startswith(".") or len(ending) == 1 or "/" in ending or "\\" in ending:
            return f'expected a file name ending such as ".txt", got "{ending}"{where}'
    return None


_BUCKET_KEYS = ("data.bucket_step", "data.min_bucket", "data.max_bucket")


def _for_path(rule: Callable[[Config, str], str | None], path: str) -> Check:
    return Check((path,), lambda config: rule(config, path))


def checks() -> Iterator[Check]:
    """Yields every rule, in the order of the file."""
    for path, key in keys().items():
        if key.annotation in (str, tuple[str, ...], tuple[Prompt, ...]):
            yield _for_path(_text, path)
        if key.place or path in ("data.sets", "output.remote"):
            yield _for_path(address_problem, path)
    yield _for_path(_required, "model.checkpoint")
    yield Check(("data.path", "data.sets"), _images)
    yield Check(("data.sets",), _sets)
    yield Check(("data.resolutions", "data.sets", *_BUCKET_KEYS), _resolutions)
    yield Check(("data.mask_folder", "data.masks", "data.sets"), _mask_folder)
    yield Check(("captions.separator", "data.sets"), _separator)
    yield _for_path(_required, "output.dir")
    yield Check(("data.caption_extension", "data.sets"), _caption_extension)
    yield Check(("data.bucket_step", "data.resolution"), _resolution)
    yield Check(("data.min_bucket", "data.bucket_step"), lambda config: _bucket_step(config, "min_bucket"))
    yield Check(("data.max_bucket", "data.bucket_step"), lambda config: _bucket_step(config, "max_bucket"))
    yield Check(("data.min_bucket", "data.resolution"), _min_bucket)
    yield Check(("data.max_bucket", "data.resolution"), _max_bucket)
    yield Check(("lora.targets",), _targets)
    yield Check(("preservation.weight", "preservation.kind"), _preservation_weight)
    yield Check(("text_encoders.train", "text_encoders.cache"), _trained_text)
    for name in ("lr", "rank", "alpha", "targets"):
        yield Check((f"text_encoders.{name}", "text_encoders.train"), partial(_only_trained, name=name))
    yield Check(("output.format", "lora.kind"), _kind_in_format)
    yield Check(("lora.dropout", "lora.kind"), _dropout)
    yield Check(("lora.min_rank", "lora.kind"), min_rank_problem)
    yield Check(("lora.rank_exponent", "lora.min_rank"), rank_exponent_problem)
    yield Check(("loss.contrastive_scale", "loss.guidance_scale", "preservation.kind"), contrastive_problem)
    yield Check(("loss.contrastive_schedule", "loss.contrastive_scale"), contrastive_schedule_problem)
    for path in ("loss.kind", "loss.weighting"):
        yield Check((path,), partial(objective_problem, path=path))
    yield Check(("lora.max_norm", "optimizer.name"), _max_norm)
    for path, key in keys().items():
        yield Check((path,), partial(_own_problem, path=path))
        if key.only:
            yield Check((path, *key.only), partial(_inapplicable, path=path))
    yield Check(("schedule.warmup_steps", "train.steps"), _warmup)
    for section in REPEATED:
        paths = (f"{section}.every_epochs", f"{section}.every")
        yield Check(paths, partial(_epochs_twice, section=section))
    yield Check(("schedule.warmup", "schedule.warmup_steps"), _warmup_twice)
    yield Check(("optimizer.name", "schedule.name", "train.ema_decay"), _averaging)
    yield Check(("optimizer.lora_plus_ratio",), _lora_plus)
    yield Check(("schedule.min_lr", "optimizer.lr"), _min_lr)
    yield Check(("schedule.min_lr", "schedule.name"), _decay)
    yield Check(("gradient.noise_decay", "gradient.noise_std"), _noise_decay)
    yield Check(("gradient.normalize", "gradient.clip_norm"), _normalize)
    for name in ("loss_scale", "loss_scale_init", "loss_scale_interval"):
        yield Check((f"train.{name}", "train.precision", "train.loss_scale"), partial(_loss_scale, name=name))
    yield Check(("gradient.checkpoint_blocks", "gradient.checkpointing"), checkpoint_blocks_problem)
    yield Check(("model.offload", "gradient.checkpointing", "memory.budget"), offload_problem)
    yield Check(("model.arithmetic", "model.quantize"), _arithmetic)
    yield Check(("memory.budget",), lambda config: budget_problem(config.memory.budget))
    yield Check(("output.hub", "output.hub_public"), hub_problem)
    yield Check(("sample.guidance_scale",), _guidance)
    yield Check(("loss.zero_terminal_snr", "model.prediction"), zero_terminal_snr_problem)
    yield Check(("sample.spacing", "model.prediction"), spacing_problem)
    yield Check(("loss.min_timestep", "loss.max_timestep", "loss.timestep_sampling"), _timestep_span)


def broken(config: Config) -> list[tuple[str, str]]:
    """Returns every rule that a config of valid values breaks: the key, and the problem."""
    problems = ((check.paths[0], check.broken(config)) for check in checks())
    return [(path, message) for path, message in problems if message is not None]
