"""OneTrainer's JSON: presets, and configs as its window saves them, with the concepts and samples in files beside."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from flame_train.errors import ConfigError

from .conversions import (
    SAMPLED,
    WARMUP,
    checkpoint,
    number,
    number_format,
    one_of,
    optimizer,
    optimizer_keys,
    sampled,
    schedule,
    side,
    sides_of,
    switched,
    to_float,
    to_number,
    unless_off,
)
from .table import (
    NOTHING,
    Changed,
    Lost,
    Program,
    Reading,
    Setting,
    Source,
    Tree,
    always,
    is_off,
    needless,
    never,
    same,
    turned,
)

_FAMILIES: Final = MappingProxyType(
    {
        "STABLE_DIFFUSION_XL_10_BASE": "sdxl",
        "STABLE_DIFFUSION_3": "sd3",
        "STABLE_DIFFUSION_35": "sd3",
        "FLUX_DEV_1": "flux",
    }
)
_EIGHT_BITS: Final = ("FLOAT_8", "INT_8", "FLOAT_W8A8", "INT_W8A8", "FLOAT_W8A8_COMPRESSED", "INT_W8A8_COMPRESSED")
_TEXT: Final = "text encoders are not trained here"
_OWN_NAMES: Final = ("training_method", "model_type", "output_model_destination", "lora_rank", "base_model_name")


def _is_mine(tree: Tree) -> bool:
    return sum(name in tree for name in _OWN_NAMES) >= 3 and not any(
        isinstance(tree.get(name), str) for name in ("model_family",)
    )


def _read(reading: Reading) -> Source:
    tree = dict(reading.tree)
    for name in (
        "optimizer_defaults",
        "secrets",
        "cloud",
        "quantization",
        "embedding",
        "additional_embeddings",
        "prior",
        "unconditional_transformer",
        "effnet_encoder",
        "decoder",
        "decoder_text_encoder",
        "decoder_vqgan",
    ):
        tree.pop(name, None)
    settings = reading.flat({name: value for name, value in tree.items() if name not in ("concepts", "samples")})
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
    return Source(_family(settings), settings, sets, notes)


def _list(reading: Reading, name: str, file_name: str, notes: list[str]) -> tuple[list[Any], Reading, tuple[str, ...]]:
    """The concepts or samples, in the config itself or in the file that it names."""
    own = reading.tree.get(name)
    if isinstance(own, list) and own:
        return own, reading, (name,)
    other = reading.tree.get(file_name)
    if other:
        found = reading.beside(str(other))
        if found is not None:
            items = found.tree.get("", [])
            return (items if isinstance(items, list) else []), found, ("",)
        notes.append(
            f"{reading.place((file_name,))}: {file_name} = {other!r}: no such file beside this one; what it holds is missing here"
        )
    return [], reading, ()


def _check_method(settings: Mapping[str, Setting]) -> None:
    method = settings.get("training_method")
    if method and method.value != "LORA":
        raise ConfigError(
            f"{method.place}: training_method = {method.value}: expected LORA; a LoRA alone is trained here"
        )


def _family(settings: Mapping[str, Setting]) -> str:
    kind = settings.get("model_type")
    if kind is None:
        return ""
    if kind.value not in _FAMILIES:
        raise ConfigError(
            f"{kind.place}: model_type = {kind.value}: expected SDXL, SD3 or Flux.1; other models are not here"
        )
    return _FAMILIES[kind.value]


def _weights(value: Any, source: Source) -> Any:
    if value in _EIGHT_BITS:
        return "fp8"
    if str(value).startswith(("NFLOAT", "GGUF")):
        return Changed("fp8", f"8 bits is the least here, {value} there")
    return NOTHING


def _kind(value: Any, source: Source) -> Any:
    if value == "LORA":
        return "dora" if source.get("lora_decompose") else ("locon" if _convolutions(source) else NOTHING)
    known = {"LOHA": "loha", "LOKR": "lokr"}
    return known.get(value, Lost(f"no such adapter here: {value}"))


def _convolutions(source: Source) -> bool:
    return source.family == "sdxl" and source.get("layer_filter_preset", "full") == "full"


_LAYERS: Final = MappingProxyType(
    {"attn-only": "attention", "attn-mlp": "attention+mlp", "full": "full", "blocks": "full"}
)


def _targets(value: Any, source: Source) -> Any:
    if value == "custom":
        return Lost("a filter of one's own: write the globs into lora.targets")
    if value not in _LAYERS:
        return Lost("no such preset here: write the globs into lora.targets")
    if source.family == "sdxl" and value == "attn-mlp":
        return ["attention+mlp", "*.proj_in", "*.proj_out"]
    if value == "full":
        return Changed(["full"], "without the layers outside the blocks")
    return [_LAYERS[value]]


def _rate(value: Any, source: Source) -> Any:
    """OneTrainer multiplies the rate by the root of batch size or accumulation, where its config asks for it."""
    rate, scaler = float(value), str(source.get("learning_rate_scaler", "NONE"))
    batch, accumulation = source.get("batch_size", 1), source.get("gradient_accumulation_steps", 1)
    known = {"BATCH": batch, "GRADIENT_ACCUMULATION": accumulation, "BOTH": batch * accumulation}
    factor = known.get(scaler.removeprefix("GLOBAL_"), 1)
    if factor == 1:
        return rate
    return Changed(rate * factor**0.5, f"multiplied by the root of {factor}, as learning_rate_scaler = {scaler} does")


def _own_rate(value: Any, source: Source) -> Any:
    return NOTHING if value is None else _rate(value, source)


def _warmup(value: Any, source: Source) -> Any:
    """Above 1 batches of one image each, below a share; OneTrainer counts before gradients are accumulated."""
    if is_off(value):
        return NOTHING
    if value <= 1:
        return {"schedule.warmup": min(float(value), 0.99)}
    return {"schedule.warmup_steps": max(1, int(value / source.get("gradient_accumulation_steps", 1)))}


def _weighting(value: Any, source: Source) -> Any:
    strength = float(source.get("loss_weight_strength", 5.0))
    known: dict[Any, Any] = {
        "CONSTANT": NOTHING,
        "MIN_SNR_GAMMA": {"loss.weighting": "min_snr", "loss.snr_gamma": strength},
        "P2": {"loss.weighting": "p2", "loss.p2_gamma": strength},
        "DEBIASED_ESTIMATION": {"loss.weighting": "debiased"},
        "SIGMA": Lost("loss.weighting has sigma_sqrt, and no weight by sigma itself"),
    }
    return known.get(value, Lost("no such weighting here"))


def _levels(value: Any, source: Source) -> Any:
    """The distribution of noise levels; a dynamic shift is the family's own."""
    shift = 0.0 if source.get("dynamic_timestep_shifting") else float(source.get("timestep_shift", 1.0))
    weight, bias = float(source.get("noising_weight", 0.0)), float(source.get("noising_bias", 0.0))
    if source.family == "sdxl":
        return (
            NOTHING
            if value == "UNIFORM"
            else Lost("loss.timestep_sampling has distributions for SDXL; set one by hand")
        )
    if value == "LOGIT_NORMAL":
        return sampled("logit_normal", shift, weight + 1.0) | ({"loss.logit_mean": bias} if bias else {})
    if value == "HEAVY_TAIL":
        return sampled("mode", shift) | {"loss.mode_scale": weight}
    known = {"UNIFORM": sampled("uniform", shift), "COS_MAP": sampled("cosmap", shift)}
    return known.get(value, Lost("loss.timestep_sampling has uniform, logit_normal, sigmoid, mode, cosmap and beta"))


def _span(name: str) -> Any:
    """A noising strength between 0 and 1 as a timestep in thousandths."""

    def convert(value: Any, source: Source) -> Any:
        step = round(float(value) * 1000)
        return NOTHING if step == (0 if name == "min" else 1000) else step

    return convert


def _losses(value: Any, source: Source) -> Any:
    strengths = {
        "mse": source.get("mse_strength", 1.0),
        "l1": source.get("mae_strength", 0.0),
        "huber": source.get("huber_strength", 0.0),
    }
    strengths["log-cosh"] = source.get("log_cosh_strength", 0.0)
    used = [name for name, strength in strengths.items() if not is_off(strength)]
    if used == ["mse"] or not used:
        return NOTHING
    if len(used) == 1 and used[0] in ("l1",):
        return used[0]
    return Lost(
        f"a sum of losses ({', '.join(used)}), of which loss.kind takes one; OneTrainer's huber is no pseudo-Huber"
    )


def _interval(steps: str, unit: str, other: str = "") -> Any:
    """An interval in the unit that stands beside it: steps, epochs, or a time, which is not here."""

    def convert(value: Any, source: Source) -> Any:
        kind = str(source.get(unit, "MINUTE"))
        if kind == "NEVER" or is_off(value):
            return NOTHING
        if kind == "STEP":
            return {steps: int(value)}
        if kind == "EPOCH":
            return {f"{steps}_epochs": int(value)}
        return Lost(f"an interval in units of time ({kind.lower()}): {steps} counts steps, {steps}_epochs epochs")

    return convert


def _prompts(value: Any, source: Source) -> Any:
    prompts = [str(one["prompt"]) for one in value if one.get("enabled", True) and one.get("prompt")]
    return Changed(prompts, "without the size and seed of single prompts") if prompts else NOTHING


def _file(value: Any, source: Source) -> Any:
    """The LoRA's file as the folder of a run and a name."""
    path, _, name = str(value).replace("\\", "/").rpartition("/")
    stem = name.removesuffix(".safetensors") or "lora"
    return {"output.dir": f"{path}/{stem}" if path else stem, "output.name": stem}


def _format(value: Any, source: Source) -> Any:
    if value in ("DIFFUSERS_LORA", "DIFFUSERS"):
        return "diffusers"
    return NOTHING


def _resolutions(value: Any, source: Source) -> Any:
    """One resolution, or several between commas, in each of which OneTrainer trains every image."""
    if "x" in str(value):
        return side(value, source)
    sides = sides_of(value)
    return sides[0] if len(sides) == 1 else Lost("several resolutions: data.sets has a list of them for each folder")


def _rounds(value: Any, source: Source) -> Any:
    return source.get("ema_decay", 0.999) if value != "OFF" else NOTHING


def _repeats(value: Any, source: Source) -> Any:
    count = float(value)
    return int(count) if count == int(count) and count >= 1 else {"set.weight": count}


def _concept_type(value: Any, source: Source) -> Any:
    if value in ("STANDARD", "", None):
        return NOTHING
    return (
        {"set.validation": True}
        if value == "VALIDATION"
        else Lost("a concept whose aim is the base model's own prediction is not here")
    )


_TEXT_PARTS: Final = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")

_ROWS: Final = [
    turned("base_model_name", "model.checkpoint", checkpoint),
    turned("vae.model_name", "model.vae", unless_off),
    *(
        turned(f"{part}.weight_dtype", "model.quantize", _weights, families=[f])
        for part, f in (("unet", "sdxl"), ("transformer", "sd3"), ("transformer", "flux"))
    ),
    turned("force_v_prediction", "model.prediction", switched("v")),
    *needless("it is the default", "force_epsilon_prediction"),
    turned("train_dtype", "train.precision", number_format, absent="FLOAT_16"),
    turned("peft_type", "lora.kind", _kind, absent="LORA"),
    same("lora_rank", "lora.rank"),
    turned("lora_alpha", "lora.alpha", to_float, absent=1.0),
    turned("lora_model_name", "lora.from", unless_off),
    turned(
        "lora_decompose_output_axis",
        "lora.wd_on_output",
        lambda v, s: True if v and s.get("lora_decompose") else NOTHING,
    ),
    *needless("read with peft_type", "lora_decompose lora_decompose_norm_epsilon lora_weight_dtype"),
    *(
        turned(theirs, f"lora.{ours}", lambda v, s: v if s.get("peft_type") == "LOKR" and v and v != -1 else NOTHING)
        for theirs, ours in (
            ("lokr_dim", "rank"),
            ("lokr_decompose_both", "decompose_both"),
            ("lokr_decompose_factor", "factor"),
            ("lokr_full_matrix", "full_matrix"),
        )
    ),
    turned("layer_filter_preset", "lora.targets", _targets, absent="full"),
    *needless("read with layer_filter_preset", "layer_filter layer_filter_regex"),
    *(
        turned(f"{part}.learning_rate", "optimizer.lr", _own_rate, families=[f])
        for part, f in (("unet", "sdxl"), ("transformer", "sd3"), ("transformer", "flux"))
    ),
    turned("learning_rate", "optimizer.lr", _rate, absent=3e-6),
    *needless("read with learning_rate", "learning_rate_scaler"),
    turned("optimizer", "optimizer.name", optimizer),
    *(
        turned(
            f"optimizer.{name}",
            "optimizer.betas",
            lambda v, s: (
                NOTHING
                if s.get("optimizer.beta1") is None or s.get("optimizer.beta2") is None
                else [s.get("optimizer.beta1"), s.get("optimizer.beta2")]
            ),
        )
        for name in ("beta1", "beta2")
    ),
    *optimizer_keys("optimizer."),
    turned("learning_rate_scheduler", "schedule.name", schedule, absent="CONSTANT"),
    turned("learning_rate_warmup_steps", WARMUP, _warmup, absent=200.0),
    turned(
        "learning_rate_cycles",
        "schedule.cycles",
        lambda v, s: int(v) if "RESTARTS" in str(s.get("learning_rate_scheduler", "")) else NOTHING,
    ),
    turned(
        "learning_rate_min_factor",
        "schedule.min_lr",
        lambda v, s: (
            NOTHING
            if is_off(v)
            else Changed(float(v) * float(s.get("learning_rate", 3e-6)), "a rate here, and no factor")
        ),
    ),
    never("custom_learning_rate_scheduler", "no class path stands in a config"),
    turned("epochs", "train.epochs", to_number, absent=100),
    turned("batch_size", "data.batch_size", to_number),
    turned("gradient_accumulation_steps", "gradient.accumulation", to_number),
    turned("clip_grad_norm", "gradient.clip_norm", lambda v, s: 0.0 if v is None else float(v)),
    *(
        turned(f"{part}.gradient_checkpointing", "gradient.checkpointing", switched("full"), families=[f], absent=True)
        for part, f in (("unet", "sdxl"), ("transformer", "sd3"), ("transformer", "flux"))
    ),
    turned(
        "gradient_checkpointing",
        "gradient.checkpointing",
        one_of(
            {"ON": "full", "OFF": "off", "CPU_OFFLOADED": "offload", True: "full", False: "off"},
            "expected ON, OFF or CPU_OFFLOADED",
        ),
    ),
    turned("ema", "train.ema_decay", _rounds),
    *needless("read with ema", "ema_decay"),
    turned("ema_update_interval", (), lambda v, s: NOTHING),
    turned("resolution", "data.resolution", _resolutions, absent="512"),
    always("aspect_ratio_bucketing", "images go into buckets of their shape"),
    always("latent_caching", "latents and captions are encoded once, on disk"),
    turned("loss_weight_fn", ("loss.weighting", "loss.snr_gamma", "loss.p2_gamma"), _weighting),
    *needless("read with loss_weight_fn", "loss_weight_strength"),
    turned("mse_strength", "loss.kind", _losses),
    turned("mae_strength", "loss.kind", _losses),
    turned("huber_strength", "loss.kind", _losses),
    turned("log_cosh_strength", "loss.kind", _losses),
    *needless("read with huber_strength", "huber_delta"),
    turned("timestep_distribution", (*SAMPLED, "loss.mode_scale"), _levels, absent="UNIFORM"),
    *needless(
        "read with timestep_distribution", "noising_weight noising_bias timestep_shift dynamic_timestep_shifting"
    ),
    turned("min_noising_strength", "loss.min_timestep", _span("min")),
    turned("max_noising_strength", "loss.max_timestep", _span("max")),
    turned("offset_noise_weight", "loss.offset_noise", unless_off),
    never("generalized_offset_noise", "loss.offset_noise has one strength for all noise levels"),
    turned("perturbation_noise_weight", "loss.input_perturbation", unless_off),
    turned("rescale_noise_scheduler_to_zero_terminal_snr", "loss.zero_terminal_snr", switched(True)),
    turned("transformer.guidance_scale", "loss.guidance_scale", to_float, families=["flux"]),
    *needless("Flux alone has it", "transformer.guidance_scale unet.guidance_scale"),
    turned("dropout_probability", "lora.dropout", unless_off),
    *(
        turned(f"{part}.dropout_probability", f"text_encoders.{ours}", unless_off, families=[f])
        for part, ours, f in (
            ("text_encoder", "clip_l_dropout", "sdxl"),
            ("text_encoder_2", "clip_g_dropout", "sdxl"),
            ("text_encoder", "clip_l_dropout", "sd3"),
            ("text_encoder_2", "clip_g_dropout", "sd3"),
            ("text_encoder_3", "t5_dropout", "sd3"),
            ("text_encoder", "clip_l_dropout", "flux"),
            ("text_encoder_2", "t5_dropout", "flux"),
        )
    ),
    *(never(f"{part}.train", _TEXT) for part in _TEXT_PARTS),
    *needless("they are never trained", "text_encoder.* text_encoder_2.* text_encoder_3.* text_encoder_4.*"),
    *(
        turned(
            f"{part}_layer_skip",
            (),
            lambda v, s: NOTHING if is_off(v) else Lost("always the layer that these models were trained with"),
        )
        for part in _TEXT_PARTS
    ),
    turned(
        "text_encoder_2_sequence_length",
        "text_encoders.t5_tokens",
        lambda v, s: v if s.family == "flux" and v in (77, 154, 256, 512) else NOTHING,
    ),
    *needless("one length for each family", "text_encoder_sequence_length"),
    turned("output_model_destination", ("output.dir", "output.name"), _file),
    turned("output_model_format", "output.format", _format),
    turned("output_dtype", "output.precision", number_format, absent="FLOAT_32"),
    turned("tensorboard", "output.tensorboard", switched(True)),
    turned("sample_after", ("sample.every", "sample.every_epochs"), _interval("sample.every", "sample_after_unit")),
    turned(
        "backup_after",
        ("checkpoint.every", "checkpoint.every_epochs"),
        _interval("checkpoint.every", "backup_after_unit"),
    ),
    turned(
        "save_every", ("checkpoint.every", "checkpoint.every_epochs"), _interval("checkpoint.every", "save_every_unit")
    ),
    turned("rolling_backup_count", "checkpoint.keep", lambda v, s: v if s.get("rolling_backup") else NOTHING),
    turned("samples", "sample.prompts", _prompts),
    never("masked_training", "masks are not in this version"),
    *needless(
        "read with masked_training",
        "unmasked_probability unmasked_weight normalize_masked_area_loss masked_prior_preservation_weight",
    ),
    never("validation", "validation is not in this version"),
    never("loss_scaler", "a factor on the loss changes the step size; set optimizer.lr"),
    never("multi_gpu", "a run is one process on one GPU"),
    *needless(
        "flame-train chooses it, or nothing depends on it",
        "model_type training_method vae.* unet.* transformer.* backup_after_unit sample_after_unit "
        "save_every_unit rolling_backup validate_after* tensorboard_* samples_to_tensorboard "
        "workspace_dir cache_dir debug_* only_cache clear_cache_before_training dataloader_threads "
        "train_device temp_device fallback_train_dtype enable_autocast_cache attention_mechanism "
        "continue_last_backup include_train_config prevent_overwrites async_* fused_gradient_reduce "
        "gradient_reduce_precision device_indexes compile force_circular_padding frames "
        "vb_loss_strength embedding* preserve_embedding_norm bundle_additional_embeddings oft_* "
        "lokr_* sample_* non_ema_sampling backup_before_save save_skip_first save_filename_prefix "
        "scheduler_params custom_conditioning_image huggingface_cache_dir offline_mode __version",
    ),
]

_AUGMENTED: Final = ("image.enable_random_*", "image.enable_fixed_*", "image.enable_crop_jitter")

_SET_ROWS: Final = [
    same("path", "set.path"),
    turned("balancing", ("set.repeats", "set.weight"), lambda v, s: _as_set(_repeats(v, s))),
    turned("type", "set.validation", _concept_type),
    turned("validation_concept", "set.validation", switched(True)),
    turned(
        "text.prompt_source",
        "set.caption",
        lambda v, s: (
            NOTHING
            if v == "sample"
            else Lost("captions from one file or from file names: write a text file for each image")
        ),
    ),
    turned("image.resolution_override", (), lambda v, s: NOTHING),
    never("image.enable_resolution_override", "one resolution for all folders in this version"),
    *(never(name, "changes of images are not in this version") for name in _AUGMENTED if "jitter" not in name),
    turned("image.enable_crop_jitter", (), lambda v, s: NOTHING if not v else Lost("crops are centred")),
    never("text.enable_tag_shuffling", "shuffled tags are not in this version"),
    never("text.tag_dropout_enable", "dropped tags are not in this version"),
    never("text.caps_randomize_enable", "captions keep their capitals"),
    turned("loss_weight", "set.loss_weight", lambda v, s: NOTHING if v == 1.0 else v),
    turned("include_subdirectories", (), lambda v, s: NOTHING),
    *needless(
        "nothing here depends on it",
        "name seed enabled image_variations text_variations balancing_strategy concept_stats "
        "concept_stats.* image.* text.* __version",
    ),
]


def _as_set(answer: Any) -> Any:
    return answer if isinstance(answer, Mapping) else {"set.repeats": number(answer)}


PROGRAM: Final = Program("OneTrainer", _is_mine, _read, _ROWS, _SET_ROWS)
