"""OneTrainer's JSON: presets, and configs as its window saves them, with the concepts and samples in files beside."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import PureWindowsPath
from types import MappingProxyType
from typing import Any, Final

from flame_train.config.foreign.read_rows import read_table
from flame_train.errors import ConfigError
from flame_train.families import named_by

from . import onetrainer_values as own
from . import sample_prompts
from .conversions import number, one_of, optimizer, to_number, unless_off
from .table import NOTHING, Changed, Convert, Lost, Program, Reading, Setting, Source, Tree, is_off, no_file

_FAMILIES: Final = named_by("OneTrainer")
_WHOLE: Final = (
    *("optimizer_defaults", "secrets", "cloud", "embedding", "prior", "unconditional_transformer"),
    *("effnet_encoder", "decoder", "decoder_text_encoder", "decoder_vqgan", "muon_adam_config"),
)
"""Tables that are of the window, or of models that are not here."""
_OWN_NAMES: Final = ("training_method", "model_type", "output_model_destination", "lora_rank", "base_model_name")


def _is_mine(tree: Tree) -> bool:
    return sum(name in tree for name in _OWN_NAMES) >= 3 and not any(
        isinstance(tree.get(name), str) for name in ("model_family",)
    )


def _read(reading: Reading) -> Source:
    tree = {name: value for name, value in reading.tree.items() if name not in ("concepts", "samples")}
    settings = reading.flat(tree, whole=_WHOLE)
    if "optimizer.optimizer" in settings:
        settings["optimizer"] = settings.pop("optimizer.optimizer")
    notes: list[str] = []
    concepts, where, at = _list(reading, "concepts", "concept_file_name", notes)
    settings.pop("concept_file_name", None)
    sets = [where.flat(one, (*at, f"[{i}]")) for i, one in enumerate(concepts) if one.get("enabled", True)]
    samples, where, at = _list(reading, "samples", "sample_definition_file_name", notes)
    settings.pop("sample_definition_file_name", None)
    if samples:
        settings["samples"] = Setting(samples, where.place(at))
    _check_method(settings)
    return Source(_family(settings), settings, sets, notes, _of_other_optimizers(settings))


_OWNERS: Final = MappingProxyType(
    {
        **dict.fromkeys(("weight_decay_by_lr", "split_groups", "split_groups_mean", "factored_fp32"), "PRODIGY_PLUS"),
        "use_schedulefree": "PRODIGY_PLUS",
        "rms_rescaling": "MUON_ADV ADAMUON_ADV",
    }
)
"""Settings that are on in every config, and the optimizers that read them (modules/util/optimizer_util.py)."""


def _of_other_optimizers(settings: dict[str, Setting]) -> dict[str, str]:
    """Takes out the settings of optimizers that are not chosen, which a saved config has all of; returns why."""
    from flame_train.config.keys import keys

    theirs = str(settings["optimizer"].value) if "optimizer" in settings else "ADAMW"
    chosen = optimizer(theirs, Source("", {}))
    ours = chosen.value if isinstance(chosen, Changed) else chosen
    idle: dict[str, str] = {}
    both = ("optimizer.beta1", "optimizer.beta2")  # a pair for most
    for name in [name for name in settings if name.startswith("optimizer.") and name not in both]:
        readers = keys()[name].only.get("optimizer.name", (ours,)) if name in keys() else (ours,)
        owners = _OWNERS.get(name.removeprefix("optimizer."), theirs)
        if isinstance(ours, str) and (ours not in readers or not any(theirs.startswith(one) for one in owners.split())):
            del settings[name]
            idle[name] = "it is of another optimizer than this config's"
    return idle


def _list(reading: Reading, name: str, file_name: str, notes: list[str]) -> tuple[list[Any], Reading, tuple[str, ...]]:
    """Returns the concepts or samples, in the config itself or in the file that it names."""
    own = reading.tree.get(name)
    if isinstance(own, list) and own:
        return own, reading, (name,)
    other = reading.tree.get(file_name)
    if other:
        other_file = reading.beside(str(other))
        if other_file is not None:
            items = other_file.tree.get("", [])
            return (items if isinstance(items, list) else []), other_file, ("",)
        notes.append(no_file(file_name, Setting(other, reading.place((file_name,))), "what it holds is"))
    return [], reading, ()


def _check_method(settings: Mapping[str, Setting]) -> None:
    method = settings.get("training_method")
    if method and method.value != "LORA":
        raise ConfigError(f"{method.place}: training_method = {method.value}: expected LORA")


def _family(settings: Mapping[str, Setting]) -> str:
    kind = settings.get("model_type")
    if kind is None:
        return ""
    if kind.value not in _FAMILIES:
        raise ConfigError(f"{kind.place}: model_type = {kind.value}: expected one of {', '.join(_FAMILIES)}")
    return _FAMILIES[kind.value]


_DECODER_TOKENS: Final = own.tokens(128, 256, 512, 1024)


def _decoder(source: Source) -> str:
    """Returns the decoder that reads captions: Qwen3, or the Mistral of a FLUX.2 that is called dev."""
    name = PureWindowsPath(str(source.get("base_model_name", ""))).name.lower()
    return "mistral" if source.family == "flux2" and "dev" in name and "klein" not in name else "qwen3"


def _decoder_tokens(value: Any, source: Source) -> Any:
    """Converts the length of captions for Qwen3 or Mistral."""
    length = _DECODER_TOKENS(value, source)
    return {f"text_encoders.{_decoder(source)}_tokens": length} if isinstance(length, int) else length


def _decoder_dropout(value: Any, source: Source) -> Any:
    return {f"text_encoders.{_decoder(source)}_dropout": float(value)} if value else NOTHING


def _guidance(value: Any, source: Source) -> Any:
    """Converts what a model with a guidance input is told; klein has none."""
    klein = source.family == "flux2" and _decoder(source) == "qwen3"
    return NOTHING if value is None or klein else float(value)


def _prediction(value: Any, source: Source) -> Any:
    """Converts the model types whose files OneTrainer reads as ones that predict velocity, whatever is in them."""
    forced = source.get("force_v_prediction") or source.get("force_epsilon_prediction")
    velocity = value in ("STABLE_DIFFUSION_20", "STABLE_DIFFUSION_21") and not forced
    return Changed("v", "what models of this type predict; those named _BASE predict epsilon") if velocity else NOTHING


_OWN: Final[Mapping[str, Convert]] = MappingProxyType(
    {
        "model_type": _prediction,
        "weights": own.weights,
        "text_weights": own.text_weights,
        "peft_type": own.kind,
        "lora_decompose_output_axis": lambda v, s: True if v and s.get("lora_decompose") else NOTHING,
        "lora_decompose_norm_epsilon": own.norm_epsilon,
        "of_lokr": lambda v, s: v if s.get("peft_type") == "LOKR" and v and v != -1 else NOTHING,
        "layer_filter_preset": own.targets,
        "own_rate": own.own_rate,
        "learning_rate": own.rate,
        "optimizer.beta1": own.beta("beta1"),
        "oft_*": lambda v, s: Lost("no such adapter here: OFT") if "OFT" in str(s.get("peft_type")) else NOTHING,
        "non_ema_sampling": lambda v, s: (
            Lost("images are drawn with the averaged weights") if v and s.get("ema", "OFF") != "OFF" else NOTHING
        ),
        "optimizer.beta2": own.beta("beta2"),
        "learning_rate_scheduler": own.scheduled,
        "learning_rate_warmup_steps": own.warmup,
        "learning_rate_min_factor": own.least,
        "clip_grad_norm": lambda v, s: 0.0 if v is None else float(v),
        "gradient_checkpointing": one_of(
            {"ON": "full", "OFF": "off", "CPU_OFFLOADED": "offload", True: "full", False: "off"},
            "expected ON, OFF or CPU_OFFLOADED",
        ),
        "layer_offload_fraction": own.streamed,
        "offloaded": own.offloaded,
        "ema": own.rounds,
        "resolution": own.resolutions,
        "loss_weight_fn": own.weighting,
        "losses": own.losses,
        "timestep_distribution": own.levels,
        "min_noising_strength": own.span("min"),
        "max_noising_strength": own.span("max"),
        "(text encoders)": own.encoders,
        "clip_skip": lambda v, s: NOTHING if is_off(v) else number(v) + 1,
        "layer_skip": lambda v, s: (
            NOTHING if is_off(v) else Lost("always the layer that these models were trained with")
        ),
        "text_encoder_2_sequence_length": own.tokens(77, 154, 256, 512),
        "decoder_tokens": _decoder_tokens,
        "decoder_dropout": _decoder_dropout,
        "guidance": _guidance,
        "t5_tokens": own.tokens(77, 154, 256, 512),
        "output_model_destination": own.file,
        "output_model_format": own.format,
        "sample_after": own.interval("sample.every", "sample_after_unit"),
        "save_every": own.interval("checkpoint.every", "save_every_unit"),
        "backup_after": own.interval("checkpoint.every", "backup_after_unit"),
        "samples": sample_prompts.of_onetrainer,
        "sample_skip_first": own.without_first,
        "with_masks": own.with_masks,
        "unmasked_probability": own.unmasked,
        "validate_after": own.validated,
        "balancing": lambda v, s: own.as_set(own.repeats(v, s)),
        "type": own.concept_type,
        "text.prompt_source": lambda v, s: (
            NOTHING
            if v == "sample"
            else Lost("captions from one file or from file names: write a text file for each image")
        ),
        "image.enable_resolution_override": own.overridden,
        "image.enable_random_brightness": own.change("brightness"),
        "image.enable_random_contrast": own.change("contrast"),
        "image.enable_random_saturation": own.change("saturation"),
        "image.enable_random_hue": own.change("hue"),
        "text.keep_tags_count": own.tags(unless_off),
        "text_variations": own.tags(to_number),
        "text.tag_dropout_enable": own.dropped_tags,
        "text.tag_dropout_special_tags*": own.of_tags,
        "text.prompt_path": lambda v, s: (
            Lost("see prompt_source") if s.get("text.prompt_source") == "concept" else NOTHING
        ),
        "loss_weight": lambda v, s: (
            NOTHING if v == 1.0 else Lost("of [[data.sets]] only those of regularization have a weight")
        ),
    }
)

PROGRAM: Final = Program(
    "OneTrainer",
    _is_mine,
    _read,
    cache(partial(read_table, "onetrainer", "OneTrainer", _OWN)),
    "https://github.com/Nerogar/OneTrainer/blob/23df383/modules/util/config/TrainConfig.py, sets in ConceptConfig.py",
)
