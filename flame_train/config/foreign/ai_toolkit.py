"""ai-toolkit's jobs in YAML, whose layout EriDiffusion's jobs have too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from flame_train.errors import ConfigError

from .conversions import (
    MIN_SNR,
    SAMPLED,
    STREAMED,
    checkpoint,
    ending,
    min_snr,
    number_format,
    optimizer,
    optimizer_keys,
    prompts,
    sampled,
    sampler,
    schedule,
    sides_of,
    switched,
    to_float,
    to_number,
    unless_off,
)
from .encoders import TRAINED, trained
from .table import (
    NOTHING,
    Changed,
    Convert,
    Lost,
    Program,
    Reading,
    Row,
    Setting,
    Source,
    Tree,
    always,
    is_off,
    needless,
    never,
    part_of,
    same,
    turned,
)

_ARCHES: Final = {
    "sdxl": "sdxl",
    "sd3": "sd3",
    "flux": "flux",
    "flux_schnell": "flux",
    "flux_kontext": "flux",
    "zimage": "zimage",
    "flux2_klein_4b": "flux2",
    "flux2_klein_9b": "flux2",
    "krea2": "krea2",
    "anima": "anima",
    "chroma": "chroma",
    "qwen_image_2": "qwenimage",
    "qwen_image": "qwenimage1",
}
_FLOW: Final = tuple(dict.fromkeys(family for family in _ARCHES.values() if family != "sdxl"))
_SWITCHES: Final = {"is_xl": "sdxl", "is_v3": "sd3", "is_sd3": "sd3", "is_flux": "flux"}
_OTHERS: Final = ("is_v2", "is_pixart", "is_pixart_sigma", "is_auraflow", "is_lumina2", "is_ssd", "is_vega")


def _is_mine(tree: Tree) -> bool:
    config = tree.get("config")
    return (
        "job" in tree
        and isinstance(config, Mapping)
        and isinstance(config.get("process"), list)
        and bool(config["process"])
    )


def _read(reading: Reading) -> Source:
    config = reading.tree["config"]
    at = ("config", "process", "[0]")
    process = config["process"][0]
    if not isinstance(process, Mapping):
        raise ConfigError(f"{reading.place(at)}: config.process: expected a table of settings")
    settings = reading.flat({name: value for name, value in process.items() if name != "datasets"}, at)
    settings["name"] = Setting(config.get("name", ""), reading.place(("config", "name")))
    job = str(settings.pop("type", Setting("sd_trainer", "")).value)
    if job not in ("sd_trainer", "ui_trainer", "diffusion_trainer", "sd_trainer_xl"):
        raise ConfigError(f"{reading.place(at)}: type = {job}: expected a job that trains a LoRA (sd_trainer)")
    if "network" not in process:
        raise ConfigError(f"{reading.place(at)}: expected a LoRA (network); training of whole models is not here")
    sets = []
    for i, dataset in enumerate(process.get("datasets") or []):
        own = _with_controls(reading.flat(dataset, (*at, "datasets", f"[{i}]")))
        weight = settings.get("train.reg_weight")
        sets.append(own | {"reg_weight": weight} if weight and own.get("is_reg") else own)
    return Source(_family(reading, settings), _named(settings), sets)


def _with_controls(dataset: dict[str, Setting]) -> dict[str, Setting]:
    """A set of images whose folders of control images, numbered or not, are one list."""
    named = [name for name in ("control_path", *(f"control_path_{n}" for n in (1, 2, 3))) if name in dataset]
    values = [dataset.pop(name) for name in named]
    folders = [
        folder for one in values for folder in (one.value if isinstance(one.value, list) else [one.value]) if folder
    ]
    return dataset | ({"control_path": Setting(folders, values[0].place)} if folders else {})


def _named(settings: dict[str, Setting]) -> dict[str, Setting]:
    """Settings with [name] and [trigger] put in."""
    words = {"[name]": settings["name"].value, "[trigger]": getattr(settings.get("trigger_word"), "value", None)}

    def put(value: Any) -> Any:
        if isinstance(value, list):
            return [put(each) for each in value]
        if isinstance(value, str):
            for mark, word in words.items():
                value = value.replace(mark, str(word)) if word else value
        return value

    return {name: Setting(put(setting.value), setting.place) for name, setting in settings.items()}


def _family(reading: Reading, settings: Mapping[str, Setting]) -> str:
    arch = settings.get("model.arch")
    if arch and arch.value:
        name = str(arch.value).partition(":")[0].lower()
        if name not in _ARCHES:
            raise ConfigError(
                f"{arch.place}: arch = {arch.value}: expected one of {', '.join(_ARCHES)}; other families are not here"
            )
        return _ARCHES[name]
    for name in _OTHERS:
        if (other := settings.get(f"model.{name}")) and other.value:
            raise ConfigError(f"{other.place}: {name}: expected SDXL, SD3 or Flux; other families are not here")
    return next((family for name, family in _SWITCHES.items() if (s := settings.get(f"model.{name}")) and s.value), "")


def _kind(value: Any, source: Source) -> Any:
    kind = str(value).lower()
    if kind == "lora" and not is_off(source.get("network.conv")) and source.family == "sdxl":
        return "locon"
    return kind if kind in ("lora", "locon", "lokr", "dora") else Lost(f"no such adapter here: {kind}")


def _alpha(value: Any, source: Source) -> Any:
    """With PEFT's names, which flow models have, ai-toolkit trains with alpha = rank whatever the config says."""
    rank = source.get("network.rank") or source.get("network.linear") or 4
    if source.family in _FLOW:
        return Changed(float(rank), "ai-toolkit ignores linear_alpha for flow models and trains with the rank")
    return float(value if value is not None else source.get("network.alpha", 1.0))


def _targets(value: Any, source: Source) -> Any:
    if source.family == "sdxl":
        return ["full"] if not is_off(source.get("network.conv")) else ["attention+mlp", "*.proj_in", "*.proj_out"]
    return ["full"]


def _lokr_full(value: Any, source: Source) -> Any:
    return value if str(source.get("network.type", "")).lower() == "lokr" else NOTHING


def _levels(value: Any, source: Source) -> Any:
    """timestep_type; sigmoid is a logit-normal without a shift, shift has the model's."""
    if source.family == "sdxl":
        return NOTHING
    known = {"sigmoid": sampled("sigmoid", 1.0), "linear": sampled("uniform", 1.0), "shift": sampled("uniform", 0.0)}
    return known.get(value, Lost("expected sigmoid, linear or shift; the others are ai-toolkit's own"))


def _ema(value: Any, source: Source) -> Any:
    return source.get("train.ema_config.ema_decay", 0.999) if value else NOTHING


def _seed(value: Any, source: Source) -> Any:
    return NOTHING if value in (None, -1) else value


def _negative(value: Any, source: Source) -> Any:
    if is_off(value):
        return NOTHING
    return Lost("Flux has no negative prompt") if source.family == "flux" else value


def _prompts(value: Any, source: Source) -> Any:
    """A list of texts, or of tables; a seed of -1 is none."""
    return prompts([_prompt(each) for each in value or []])


def _prompt(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        return {"text": str(item)}
    found = {ours: item.get(theirs) for theirs, ours in _PROMPT.items()}
    shown = [file for name in _SHOWN if (file := item.get(name))]
    found |= {"control": shown} if shown else {}
    return found | {"seed": None if found["seed"] == -1 else found["seed"]}


_SHOWN: Final = ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")
_PROMPT: Final = {
    "prompt": "text",
    "neg": "negative",
    "width": "width",
    "height": "height",
    "seed": "seed",
    "guidance_scale": "guidance_scale",
    "sample_steps": "steps",
    "network_multiplier": "strength",
}


def _trigger(value: Any, source: Source) -> Any:
    return NOTHING if is_off(value) else {"captions.trigger": value, "output.trigger": value}


def _walk(value: Any, source: Source) -> Any:
    return NOTHING if value else Lost("each image of a grid has the next seed")


def _every(value: Any, source: Source) -> Any:
    return 0 if source.get("train.disable_sampling") else value


def _quantized(value: Any, source: Source) -> Any:
    if not value:
        return NOTHING
    kind = str(source.get("model.qtype", "qfloat8"))
    if "8" in kind:
        return "int8" if "int8" in kind else "fp8"
    return Changed("nf4", f"fewer than 8 bits are nf4 here, {kind} there")


def _offloaded(value: Any, source: Source) -> Any:
    share = float(source.get("model.layer_offloading_transformer_percent", 1.0))
    if not value or not share:
        return NOTHING
    found: dict[str, Any] = {"model.offload": share}
    if not source.get("train.gradient_checkpointing", True):
        found["gradient.checkpointing"] = "full"
    return Changed(found, "whole blocks, spread over the network")


def _resolutions(value: Any, source: Source) -> Any:
    sides = sides_of(value)
    if len(sides) < 2 or not isinstance(value, list):
        return {"set.resolution": sides[0]} if sides else Lost("expected a number of pixels")
    return {"set.resolutions": sides}


def _encoders(value: Any, source: Source) -> Any:
    """One switch for all text encoders; which of Flux's and SD3's it means is not told there."""
    if is_off(value):
        return NOTHING
    if source.family not in ("sdxl", "sd3", "flux"):
        return Lost("this family's text encoder gets no adapters here")
    if source.family != "sdxl":
        return Lost("one switch for all of them there; text_encoders.train names those that are trained")
    denoiser = source.get("train.unet_lr") or source.get("train.lr")
    rate = source.get("train.text_encoder_lr") or source.get("train.lr")
    return trained({"clip_l": rate, "clip_g": rate}, denoiser, "attention+mlp")


def _kept(kind: str, prefix: str) -> Convert:
    """The switch of a preservation, with its weight, and the class of the trigger if it has one."""

    def convert(value: Any, source: Source) -> Any:
        if is_off(value):
            return NOTHING
        found = {"preservation.kind": kind, "preservation.weight": float(source.get(f"{prefix}_multiplier", 1.0))}
        if kind == "class":
            found["preservation.class_word"] = str(source.get(f"{prefix}_class", "person"))
        return found

    return convert


_DIFFERENTIAL, _BLANK = "train.diff_output_preservation", "train.blank_prompt_preservation"
_KEPT: Final = ("preservation.kind", "preservation.weight", "preservation.class_word")

_ROWS: Final = [
    turned("training_folder", "output.dir", lambda v, s: f"{v}/{s.get('name')}" if s.get("name") else v),
    turned("name", "output.name", unless_off),
    turned("trigger_word", ("captions.trigger", "output.trigger"), _trigger),
    turned("network.type", "lora.kind", _kind, absent="lora"),
    *(turned(f"network.{name}", "lora.rank", to_number) for name in ("rank", "linear")),
    turned("(network.linear)", "lora.rank", to_number, absent=4),
    turned("network.linear_alpha", "lora.alpha", _alpha, absent=1.0),
    turned("network.alpha", "lora.alpha", _alpha),
    turned("network.conv", "lora.conv_rank", lambda v, s: v if s.family == "sdxl" and v else NOTHING),
    turned("network.conv_alpha", "lora.conv_alpha", lambda v, s: float(v) if s.family == "sdxl" and v else NOTHING),
    turned("(layers)", "lora.targets", _targets, absent="all"),
    turned("network.lokr_full_rank", "lora.full_matrix", _lokr_full, absent=True),
    turned("network.lokr_factor", "lora.factor", lambda v, s: v if v and v > 0 else NOTHING),
    turned("network.dropout", "lora.dropout", unless_off),
    turned("network.pretrained_lora_path", "lora.from", unless_off),
    *(
        never(f"network.network_kwargs.{name}", "lora.targets takes globs; write them by hand")
        for name in ("only_if_contains", "ignore_if_contains")
    ),
    turned("save.dtype", "output.precision", number_format, absent="float16"),
    same("save.save_every", "checkpoint.every"),
    same("save.max_step_saves_to_keep", "checkpoint.keep"),
    turned("save.save_format", "output.format", lambda v, s: "diffusers" if v == "diffusers" else NOTHING),
    *(never(f"save.{name}", "uploads to the hub are not here") for name in ("push_to_hub", "hf_repo_id", "hf_private")),
    turned("train.batch_size", "data.batch_size", to_number),
    turned("train.steps", "train.steps", to_number, absent=1000),
    *(
        turned(f"train.{name}", "gradient.accumulation", lambda v, s: v if v and v > 1 else NOTHING)
        for name in ("gradient_accumulation_steps", "gradient_accumulation")
    ),
    always("train.train_unet", "the denoiser is what is trained"),
    turned("train.train_text_encoder", TRAINED, _encoders),
    *part_of("train.text_encoder_lr"),
    turned("train.gradient_checkpointing", "gradient.checkpointing", switched("full"), absent=True),
    *needless("it follows from the model", "train.noise_scheduler"),
    turned("train.optimizer", "optimizer.name", optimizer, absent="adamw"),
    *(turned(f"train.{name}", "optimizer.lr", to_float) for name in ("unet_lr", "lr")),
    *optimizer_keys("train.optimizer_params."),
    turned("train.lr_scheduler", "schedule.name", schedule, absent="constant"),
    never("train.lr_scheduler_params.*", "the schedule's own keys stand in [schedule]; write them by hand"),
    turned("train.max_grad_norm", "gradient.clip_norm", to_float),
    turned("train.ema_config.use_ema", "train.ema_decay", _ema),
    *part_of("train.ema_config.ema_decay"),
    turned("train.dtype", "train.precision", number_format, absent="fp32"),
    *(turned(f"train.{name}", MIN_SNR, min_snr) for name in ("min_snr_gamma", "snr_gamma")),
    turned("train.noise_offset", "loss.offset_noise", unless_off),
    turned(
        "train.optimal_noise_pairing_samples",
        "loss.immiscible_noise",
        lambda v, s: NOTHING if not v or v == 1 else Changed(True, "pairs within a batch"),
    ),
    turned(
        "train.loss_type",
        "loss.kind",
        lambda v, s: {"mse": NOTHING, "mae": "l1"}.get(v, Lost("loss.kind has mse, l1, huber and smooth_l1")),
    ),
    turned("train.timestep_type", SAMPLED, _levels, absent="sigmoid", families=_FLOW),
    turned("train.timestep_type", SAMPLED, _levels),
    turned("train.min_denoising_steps", "loss.min_timestep", unless_off),
    turned("train.max_denoising_steps", "loss.max_timestep", lambda v, s: NOTHING if v >= 999 else v + 1),
    turned("train.prompt_dropout_prob", "data.caption_dropout", unless_off),
    *needless(
        "flame-train chooses it",
        "train.skip_first_sample train.disable_sampling train.xformers train.sdp "
        "train.attention_backend train.unload_text_encoder train.cache_text_embeddings "
        "train.switch_boundary_every train.force_first_sample performance_log_every device "
        "sqlite_db_path log_dir logging.* model.low_vram model.is_* model.compile "
        "model.qtype model.model_kwargs network.transformer_only "
        "network.old_lokr_format sample.format sample.fps sample.num_frames "
        "train.bypass_guidance_embedding",
    ),
    never("train.linear_timesteps*", "a weight of noise levels that is ai-toolkit's own"),
    never("train.content_or_style*", "loss.timestep_sampling has the distributions of noise levels"),
    *part_of("train.reg_weight"),
    turned(_DIFFERENTIAL, _KEPT, _kept("class", _DIFFERENTIAL)),
    turned(_BLANK, _KEPT, _kept("blank", _BLANK)),
    *part_of(f"{_DIFFERENTIAL}_multiplier {_DIFFERENTIAL}_class {_BLANK}_multiplier"),
    *(
        never(f"train.{name}", "preservation.kind has class, blank and slider")
        for name in (
            "inverted_mask_prior*",
            "do_differential_guidance",
            "do_guidance_loss*",
            "differential_guidance_scale",
        )
    ),
    turned("model.arch", "model.kontext", lambda v, s: True if v == "flux_kontext" else NOTHING),
    turned("model.name_or_path", "model.checkpoint", checkpoint),
    turned("model.vae_path", "model.vae", unless_off),
    turned("model.attn_masking", "text_encoders.t5_padding", switched("zeros"), families=["flux"]),
    *needless("Flux alone has it", "model.attn_masking"),
    turned("model.is_v_pred", "model.prediction", switched("v")),
    turned("model.quantize", "model.quantize", _quantized),
    turned("model.quantize_te", "text_encoders.precision", lambda v, s: "fp8" if v and s.family != "sdxl" else NOTHING),
    *part_of("model.qtype_te"),
    turned("model.assistant_lora_path", "model.training_adapter", unless_off),
    never(
        "model.lora_path",
        "lora.from begins with a LoRA and trains it; merge this one into the base with `flame-train merge`",
    ),
    turned(
        "model.layer_offloading",
        ("model.offload", "gradient.checkpointing"),
        _offloaded,
        say=STREAMED,
    ),
    *part_of("model.layer_offloading_transformer_percent"),
    never("model.layer_offloading_text_encoder_percent", "text encoders are loaded whole, before the denoiser"),
    turned("sample.sample_every", "sample.every", _every, absent=100),
    turned("sample.sampler", "sample.sampler", sampler),
    same("sample.width", "sample.width"),
    same("sample.height", "sample.height"),
    turned("sample.prompts", "sample.prompts", _prompts),
    turned("sample.samples", "sample.prompts", _prompts),
    turned("sample.neg", "sample.negative", _negative),
    turned("sample.seed", "sample.seed", _seed),
    Row("sample.walk_seed", (), _walk),
    turned("sample.guidance_scale", "sample.guidance_scale", to_float),
    turned("sample.sample_steps", "sample.steps", to_number),
    *needless("the first grid follows sample.every", "sample.sample_start_step"),
    *(
        never(pattern, "ai-toolkit's own, and off by default there")
        for pattern in ("train.*", "model.*", "network.*", "sample.*", "adapter.*", "slider.*", "embedding.*", "save.*")
    ),
]

_SET_ROWS: Final = [
    turned("shuffle_tokens", "set.captions.shuffle", switched(True)),
    turned("keep_tokens", "set.captions.keep_tokens", unless_off),
    turned("token_dropout_rate", "set.captions.tag_dropout", unless_off),
    turned("trigger_word", "set.captions.trigger", unless_off),
    turned("flip_x", "set.flip", switched(True)),
    never("flip_y", "images are mirrored left to right alone"),
    *(
        never(name, "data.random_crop, brightness, contrast, saturation and hue are what there is")
        for name in ("augmentations", "augments", "random_scale")
    ),
    turned("random_crop", "set.random_crop", switched(True)),
    turned("alpha_mask", "set.masks", switched("alpha")),
    turned(
        "mask_path",
        ("set.masks", "set.mask_folder"),
        lambda v, s: NOTHING if is_off(v) else {"set.masks": "files", "set.mask_folder": v},
    ),
    turned("mask_min_value", "set.mask_weight", unless_off),
    never("invert_mask", "white is where an image counts"),
    turned("is_reg", "set.regularization", switched(True)),
    turned("reg_weight", "set.regularization_weight", to_float),
    turned(
        "prior_reg",
        ("set.regularization", "set.regularization_target"),
        lambda v, s: NOTHING if is_off(v) else {"set.regularization": True, "set.regularization_target": "base"},
    ),
    turned("control_path", "set.control", unless_off),
    same("folder_path", "set.path"),
    same("dataset_path", "set.path"),
    turned("caption_ext", "set.caption_extension", ending),
    turned("caption_type", "set.caption_extension", ending),
    turned("caption_dropout_rate", "set.caption_dropout", unless_off),
    turned("resolution", ("set.resolution", "set.resolutions"), _resolutions, absent=512),
    turned("num_repeats", "set.repeats", to_number),
    turned("default_caption", "set.caption", unless_off),
    *(
        always(name, "latents and captions are encoded once, on disk")
        for name in ("cache_latents", "cache_latents_to_disk", "cache_text_embeddings")
    ),
    always("buckets", "images go into buckets of their shape"),
    *needless(
        "flame-train chooses it",
        "num_workers prefetch_factor type num_frames shrink_video_to_frames do_i2v fps controls enabled",
    ),
    turned("network_weight", (), lambda v, s: NOTHING if v == 1 else Lost("each image has the weight of all others")),
]

PROGRAM: Final = Program("ai-toolkit", _is_mine, _read, _ROWS, _SET_ROWS)
