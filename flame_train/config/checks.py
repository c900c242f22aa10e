"""Rules between keys, and rules a type cannot say. They join the report of everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flame_train.config.keys import keys
from flame_train.config.schema import Config


@dataclass(frozen=True, slots=True)
class Check:
    """`broken` is given a config whose `paths` are each valid; it returns what is wrong, or None.

    The problem is reported at the first of `paths` that the user wrote.
    """

    paths: tuple[str, ...]
    broken: Callable[[Config], str | None]


def _required(config: Config, path: str) -> str | None:
    section, name = path.split(".")
    doc = keys()[path].doc.removesuffix("; required")
    return None if getattr(getattr(config, section), name) else f"expected {doc}, got nothing"


def _text(config: Config, path: str) -> str | None:
    section, name = path.split(".")
    text = "".join(getattr(getattr(config, section), name))
    if "\0" in text:
        return "expected text, got a NUL character in it"
    if any("\ud800" <= c <= "\udfff" for c in text):  # neither config.toml nor the LoRA's metadata could hold it
        return "expected UTF-8 text, got a byte that is none, or half a surrogate pair"
    return None


def _warmup(config: Config) -> str | None:
    warmup, steps = config.schedule.warmup_steps, config.train.steps
    return f"expected less than train.steps ({steps}), got {warmup}" if warmup >= steps else None


def _min_lr(config: Config) -> str | None:
    low, peak = config.schedule.min_lr, config.optimizer.lr
    return f"expected at most optimizer.lr ({peak}), got {low}" if low > peak else None


def _decay(config: Config) -> str | None:
    if config.schedule.min_lr == 0.0 or config.schedule.name != "constant":
        return None
    return 'expected a schedule.name that decays with it, got "constant"'


def _cycles(config: Config) -> str | None:
    if config.schedule.cycles == 1 or config.schedule.name == "cosine_restarts":
        return None
    return f'expected schedule.name = "cosine_restarts" with it, got "{config.schedule.name}"'


def _restarts(config: Config) -> str | None:
    cycles, steps = config.schedule.cycles, config.train.steps - config.schedule.warmup_steps
    if config.schedule.name != "cosine_restarts" or cycles <= max(steps, 1):
        return None
    return f"expected at most train.steps - schedule.warmup_steps ({steps}), got {cycles}"


def _power(config: Config) -> str | None:
    if config.schedule.power == 1.0 or config.schedule.name == "polynomial":
        return None
    return f'expected schedule.name = "polynomial" with it, got "{config.schedule.name}"'


def _momentum(config: Config) -> str | None:
    if config.optimizer.momentum == 0.0 or config.optimizer.name == "sgd":
        return None
    return f'expected optimizer.name = "sgd" with it, got "{config.optimizer.name}"'


def _adamw(config: Config, name: str) -> str | None:
    usual = keys()[f"optimizer.{name}"].default
    if getattr(config.optimizer, name) == usual or config.optimizer.name == "adamw":
        return None
    return f'expected optimizer.name = "adamw" with it, got "{config.optimizer.name}"'


def _betas(config: Config) -> str | None:
    betas = config.optimizer.betas
    return None if all(0 <= beta < 1 for beta in betas) else f"expected each >= 0 and < 1, got {list(betas)}"


def _noise_decay(config: Config) -> str | None:
    usual = keys()["gradient.noise_decay"].default
    if config.gradient.noise_decay == usual or config.gradient.noise_std > 0:
        return None
    return "expected gradient.noise_std above 0 with it"


def _zero_terminal_snr(config: Config) -> str | None:
    if not config.loss.zero_terminal_snr or config.model.prediction == "v":
        return None
    return 'expected model.prediction = "v" with it: pure noise teaches an epsilon model nothing'


def _recompute(config: Config, name: str) -> str | None:
    usual = keys()[f"gradient.{name}"].default
    if config.gradient.checkpointing or getattr(config.gradient, name) == usual:
        return None
    return "expected gradient.checkpointing = true with it"


def _normal(config: Config, name: str) -> str | None:
    usual = keys()[f"loss.{name}"].default
    if getattr(config.loss, name) == usual or config.loss.timesteps in ("auto", "logit_normal", "sigmoid"):
        return None
    return f'expected loss.timesteps = "logit_normal" with it, got "{config.loss.timesteps}"'


def _mode_scale(config: Config) -> str | None:
    if config.loss.mode_scale == keys()["loss.mode_scale"].default or config.loss.timesteps == "mode":
        return None
    return f'expected loss.timesteps = "mode" with it, got "{config.loss.timesteps}"'


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
    guidance = config.sample.guidance
    return f"expected 0, the model's own, or a number >= 1, got {guidance}" if 0 < guidance < 1 else None


def _targets(config: Config) -> str | None:
    targets = config.lora.targets
    return None if targets and all(targets) else f"expected presets or globs, got {list(targets)}"


def _resolution(config: Config) -> str | None:
    step, resolution = config.data.bucket_step, config.data.resolution
    return f"expected at most data.resolution ({resolution}), got {step}" if step > resolution else None


def _caption_extension(config: Config) -> str | None:
    ending = config.data.caption_extension
    good = ending.startswith(".") and len(ending) > 1 and "/" not in ending and "\\" not in ending
    return None if good else f'expected a file name ending such as ".txt", got "{ending}"'


def _for_path(rule: Callable[[Config, str], str | None], path: str) -> Check:
    return Check((path,), lambda config: rule(config, path))


def checks() -> Iterator[Check]:
    """Every rule, in the order of the file."""
    for path, key in keys().items():
        if key.annotation in (str, tuple[str, ...]):
            yield _for_path(_text, path)
    for path in ("model.checkpoint", "data.path", "output.dir"):
        yield _for_path(_required, path)
    yield Check(("data.caption_extension",), _caption_extension)
    yield Check(("data.bucket_step", "data.resolution"), _resolution)
    yield Check(("data.min_bucket", "data.bucket_step"), lambda config: _bucket_step(config, "min_bucket"))
    yield Check(("data.max_bucket", "data.bucket_step"), lambda config: _bucket_step(config, "max_bucket"))
    yield Check(("data.min_bucket", "data.resolution"), _min_bucket)
    yield Check(("data.max_bucket", "data.resolution"), _max_bucket)
    yield Check(("lora.targets",), _targets)
    yield Check(("optimizer.betas",), _betas)
    yield Check(("optimizer.betas", "optimizer.name"), lambda config: _adamw(config, "betas"))
    yield Check(("optimizer.eps", "optimizer.name"), lambda config: _adamw(config, "eps"))
    yield Check(("optimizer.momentum", "optimizer.name"), _momentum)
    yield Check(("schedule.warmup_steps", "train.steps"), _warmup)
    yield Check(("schedule.min_lr", "optimizer.lr"), _min_lr)
    yield Check(("schedule.min_lr", "schedule.name"), _decay)
    yield Check(("schedule.cycles", "schedule.name"), _cycles)
    yield Check(("schedule.cycles", "schedule.warmup_steps", "train.steps"), _restarts)
    yield Check(("schedule.power", "schedule.name"), _power)
    yield Check(("gradient.noise_decay", "gradient.noise_std"), _noise_decay)
    yield Check(("gradient.recompute", "gradient.checkpointing"), lambda config: _recompute(config, "recompute"))
    yield Check(("gradient.recompute_only", "gradient.checkpointing"), lambda c: _recompute(c, "recompute_only"))
    yield Check(("loss.timestep_mean", "loss.timesteps"), lambda config: _normal(config, "timestep_mean"))
    yield Check(("loss.timestep_std", "loss.timesteps"), lambda config: _normal(config, "timestep_std"))
    yield Check(("loss.mode_scale", "loss.timesteps"), _mode_scale)
    yield Check(("sample.guidance",), _guidance)
    yield Check(("loss.zero_terminal_snr", "model.prediction"), _zero_terminal_snr)
