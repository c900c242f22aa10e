"""Rules of keys that no bound says: addresses, what is recomputed and waits in host memory, ranks, and guidance."""

from __future__ import annotations

from typing import Final

from flame_train.adapters.kinds import ADAPTERS
from flame_train.config.keys import keys
from flame_train.config.schema import Config
from flame_train.diffusion.objective_kind import OBJECTIVES, Denoising
from flame_train.diffusion.preservation import PRESERVATIONS
from flame_train.errors import ConfigError
from flame_train.io.addresses import is_address, is_hub_name, problem_of
from flame_train.io.hub_upload import hub_name

_HERE = ("output.dir", "data.cache", "train.continue_from")
"""Places that a run writes to, or whose run it continues: folders of this machine."""

_OF_MODELS = ("model.", "text_encoders.", "lora.from", "sample.model")
"""The keys, by how they begin, that may name what lies on the Hugging Face hub."""
_NOT_OF_MODELS = "expected a path of this machine, got a name on the hub, which only models and LoRAs may have"


def address_problem(config: Config, path: str) -> str | None:
    """Returns a place that is an address must be a good one, and without credentials; `output.remote` must be one."""
    section, name = path.split(".")
    value = getattr(getattr(config, section), name)
    if isinstance(value, tuple):
        places = [place for one in value for place in ((one.path, *one.control) if path == "data.sets" else (one,))]
        wrong = [problem_of(place) for place in places if is_address(place)]
        wrong += [_NOT_OF_MODELS for place in places if is_hub_name(place)]
        return next((problem for problem in wrong if problem), None)
    if is_hub_name(value):
        return None if path.startswith(_OF_MODELS) else _NOT_OF_MODELS
    if not value or (path != "output.remote" and not is_address(value)):
        return None
    if path in _HERE:
        return "expected a folder of this machine, got an address" + (
            "; output.remote takes one, to which the folder is copied" if path == "output.dir" else ""
        )
    return problem_of(value)


def hub_problem(config: Config) -> str | None:
    """Says what is wrong with output.hub and output.hub_public."""
    output = config.output
    if not output.hub:
        return (
            "expected a repository on the Hugging Face hub with output.hub_public, got none" * output.hub_public or None
        )
    try:
        hub_name(output.hub)
    except ConfigError as error:
        return str(error)
    return None


def checkpoint_blocks_problem(config: Config) -> str | None:
    """Says what is wrong with gradient.checkpoint_blocks."""
    if not config.gradient.checkpoint_blocks or config.gradient.checkpointing != "off":
        return None
    return 'expected gradient.checkpointing = "full", "offload" or "mlp" with it, got "off"'


def offload_problem(config: Config) -> str | None:
    """Says what is wrong with model.offload."""
    offload, checkpointing = config.model.offload, config.gradient.checkpointing
    chosen = offload == "auto" and config.memory.budget  # the budget chooses only what may be streamed
    if offload == "off" or chosen or checkpointing in ("full", "offload"):
        return None
    return (
        f'expected gradient.checkpointing = "full" or "offload" with it, got "{checkpointing}": '
        "a block's weights are gone when its gradient is wanted, unless the block is recomputed"
    )


def min_rank_problem(config: Config) -> str | None:
    """Says what is wrong with lora.min_rank: only some kinds can leave out ranks, and they have to have as many."""
    least, kind = config.lora.min_rank, ADAPTERS.chosen(config.lora)
    if least and not kind.has_dropout:
        able = " or ".join(f'"{name}"' for name, each in ADAPTERS.items() if each.has_dropout)
        return f'expected 0 with lora.kind = "{kind.name}", whose ranks cannot be left out one by one; {able} can'
    return f"expected at most lora.rank ({config.lora.rank}), got {least}" if least > config.lora.rank else None


def rank_exponent_problem(config: Config) -> str | None:
    """Says what is wrong with lora.rank_exponent."""
    unused = config.lora.rank_exponent != 1.0 and not config.lora.min_rank
    return "expected lora.min_rank with it, got 0, with which all ranks act at every level" if unused else None


def contrastive_problem(config: Config) -> str | None:
    """Says what is wrong with the scale of contrastive guidance."""
    scale, told = config.loss.contrastive_scale, config.loss.guidance_scale
    if scale == "off":
        return None
    if isinstance(scale, tuple) and scale[0] > scale[1]:
        return f"expected the lower scale first, got {list(scale)}"
    if PRESERVATIONS.chosen(config.preservation).instead:
        return '"off" is expected with preservation.kind = "slider", which trains no image'
    in_place = 'expected "off" with loss.guidance_scale, in whose place the network is told this scale'
    return in_place if told != 1.0 else None


def objective_problem(config: Config, path: str) -> str | None:
    """Says what is wrong with a key that a registered objective does not read; it makes the loss itself."""
    own = OBJECTIVES.chosen(config.loss)
    value, usual = getattr(config.loss, path.partition(".")[2]), keys()[path].default
    if isinstance(own, Denoising) or value == usual:
        return None
    return f'expected "{usual}" with loss.objective = "{own.name}", which does not read it, got "{value}"'


def contrastive_schedule_problem(config: Config) -> str | None:
    """Says what is wrong with loss.contrastive_schedule."""
    idle = config.loss.contrastive_schedule != "constant" and config.loss.contrastive_scale == "off"
    return "expected loss.contrastive_scale with it, which is off" if idle else None


_NO_SCHEDULE: Final = 'means nothing with model.prediction = "flow", which has no noise schedule; remove it'


def zero_terminal_snr_problem(config: Config) -> str | None:
    """Says what is wrong with loss.zero_terminal_snr."""
    if not config.loss.zero_terminal_snr or config.model.prediction == "v":
        return None
    if config.model.prediction == "flow":
        return _NO_SCHEDULE
    return 'expected model.prediction = "v" with it: an epsilon model learns nothing from pure noise'


def spacing_problem(config: Config) -> str | None:
    """Says what is wrong with sample.spacing."""
    return _NO_SCHEDULE if config.sample.spacing != "auto" and config.model.prediction == "flow" else None
