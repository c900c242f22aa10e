"""Every configuration key: its type, default, bounds, unit and meaning. The only place a key exists.

The loader, its messages, `init`, `--set`, the run folder and `configs/` all read this file; none repeats it.
A field marked `free` may be changed between a run and its continuation, because the trained weights do not
depend on it; one marked `place` is a file or folder. `aka` lists the names other trainers use for the same
thing; they appear in suggestions only.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


def field(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    multiple_of: int | None = None,
    free: bool = False,
    place: bool = False,
    aka: tuple[str, ...] = (),
    later: tuple[str, ...] = (),
) -> Any:
    """A key with its default, one-line meaning, unit, inclusive (ge, le) and exclusive (gt, lt) bounds.

    A `place` is a file or folder. `later` names choices that are known but not built, so that the message can say so.
    """
    extra: dict[str, Any] = {"unit": unit, "free": free, "place": place, "aka": list(aka), "later": list(later)}
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt, "multiple_of": multiple_of}
    given: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
    return Field(default, description=doc, json_schema_extra=extra, **given)


class Section(BaseModel):
    """A table of the file. Unknown keys, NaN and infinity are refused; values are never coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """The base model, which is never changed."""

    checkpoint: str = field(
        "",
        "the base model: .safetensors file, diffusers folder or hub id; required",
        place=True,
        aka=("pretrained_model_name_or_path", "base_model", "name_or_path"),
    )
    vae: str = field(
        "",
        "another VAE to use instead of the checkpoint's own; empty: its own",
        place=True,
        aka=("pretrained_vae_model_name_or_path", "ae"),
    )
    clip_l: str = field(
        "", "CLIP-L text encoder, where the checkpoint holds none (SD3, Flux); empty: its own", place=True
    )
    clip_g: str = field("", "CLIP-G text encoder, where the checkpoint holds none (SD3); empty: its own", place=True)
    t5: str = field(
        "",
        "T5-XXL text encoder, where the checkpoint holds none (SD3, Flux); empty: its own",
        place=True,
        aka=("t5xxl",),
    )
    t5_fp8: bool = field(
        False,
        "T5 in 8 bits while captions are encoded: 5 GiB instead of 10 (SD3, Flux)",
        aka=("quantize_te", "t5xxl_dtype", "fp8_te", "text_encoder_3_precision"),
    )
    t5_vocabulary: str = field(
        "",
        "T5's spiece.model or tokenizer.json, or its folder (SD3, Flux); empty: looked for beside the encoder",
        place=True,
    )
    prediction: Literal["epsilon", "v"] = field(
        "epsilon", "what the model predicts", aka=("prediction_type", "v_parameterization")
    )
    fp8: Literal["off", "weights", "dynamic"] = field(
        "off",
        "the base model's transformer layers in 8 bits, half the memory; dynamic: products too, faster and less exact",
        aka=("fp8_base", "fp8_weights", "quantize", "qtype", "weight_dtype", "base_model_precision"),
    )
    vae_precision: Literal["fp32", "bf16"] = field(
        "fp32", "number format of the VAE; no fp16, in which SDXL's overflows"
    )


class DataSection(Section):
    """The pictures and their captions."""

    path: str = field(
        "",
        "the folder of images with captions or metadata.jsonl; required",
        place=True,
        aka=("train_data_dir", "instance_data_dir", "dataset", "folder_path", "image_dir"),
    )
    resolution: int = field(
        1024, "side of the square whose area a bucket may have", unit="pixels", ge=8, le=8192, multiple_of=8
    )
    batch_size: int = field(1, "images in one micro-batch", unit="images", ge=1, aka=("train_batch_size",))
    repeats: int = field(1, "how often each image comes in one epoch", ge=1, aka=("num_repeats",))
    folder_repeats: bool = field(False, "images in a folder N_name come N times as often, as kohya's trainers have it")
    caption_dropout: float = field(
        0.0, "probability that an image is seen with an empty caption", ge=0, le=1, aka=("caption_dropout_rate",)
    )
    clip_l_dropout: float = field(0.0, "probability that CLIP-L is silent, apart from captions (SD3, Flux)", ge=0, le=1)
    clip_g_dropout: float = field(0.0, "the same of CLIP-G (SD3)", ge=0, le=1)
    t5_dropout: float = field(0.0, "the same of T5 (SD3, Flux)", ge=0, le=1)
    caption: str = field(
        "",
        "caption of images that have none; empty: such an image is an error",
        aka=("instance_prompt", "class_tokens"),
    )
    caption_extension: str = field(".txt", "file name ending of a caption")
    upscale: bool = field(
        False, "enlarge images smaller than their bucket; false: take a smaller bucket", aka=("bucket_no_upscale",)
    )
    bucket_step: int = field(
        64, "bucket sides are multiples of this", unit="pixels", ge=8, multiple_of=8, aka=("bucket_reso_steps",)
    )
    min_bucket: int = field(
        0,
        "shortest bucket side; 0: a quarter of resolution, at most 256",
        unit="pixels",
        ge=0,
        multiple_of=8,
        aka=("min_bucket_reso",),
    )
    max_bucket: int = field(
        0,
        "longest bucket side; 0: twice resolution",
        unit="pixels",
        ge=0,
        le=32768,
        multiple_of=8,
        aka=("max_bucket_reso",),
    )
    max_tokens: Literal[75, 150, 225] = field(
        75, "caption length that is kept, in chunks of 75", unit="tokens", aka=("max_token_length",)
    )
    t5_tokens: Literal[0, 77, 154, 256, 512] = field(
        0,
        "caption length that T5 is given (SD3, Flux); 0: the family's own",
        unit="tokens",
        aka=("t5xxl_max_token_length", "max_sequence_length"),
    )
    on_bad_image: Literal["error", "skip"] = field(
        "error", "an unreadable image stops the run before training, or is left out with a warning"
    )
    cache: str = field(
        "",
        "folder for encoded images and captions; empty: .flame-cache inside data.path",
        free=True,
        place=True,
        aka=("cache_dir", "vae_cache_dir"),
    )


class LoraSection(Section):
    """The adapter that is trained."""

    kind: Literal["lora"] = field(
        "lora",
        "kind of adapter",
        aka=("network_module", "network_type"),
        later=("locon", "dora", "loha", "lokr"),
    )
    rank: int = field(16, "inner width of the two matrices", ge=1, le=4096, aka=("network_dim", "linear", "dim", "r"))
    alpha: float = field(
        16.0,
        "the update is scaled by alpha / rank",
        gt=0,
        le=1_000_000,
        aka=("network_alpha", "lora_alpha", "linear_alpha"),
    )
    targets: tuple[str, ...] = field(
        ("attention",),
        "presets (attention, attention+mlp, full) or globs over module names",
        aka=("target_modules",),
    )


class OptimizerSection(Section):
    """How gradients become updates."""

    name: Literal["adamw", "sgd"] = field("adamw", "optimizer", aka=("optimizer_type",))
    lr: float = field(1e-4, "peak learning rate", gt=0, le=10, aka=("learning_rate", "unet_lr", "max_lr"))
    weight_decay: float = field(
        0.01,
        "weight decay; decoupled from the gradient in adamw, added to it in sgd",
        ge=0,
        le=1,
        aka=("adam_weight_decay",),
    )
    betas: tuple[float, float] = field(
        (0.9, 0.999), "AdamW: decay of the two moments", aka=("adam_beta1", "adam_beta2")
    )
    eps: float = field(1e-8, "AdamW: added to the denominator", gt=0, le=1, aka=("adam_epsilon",))
    momentum: float = field(0.0, "SGD: momentum", ge=0, lt=1)


class ScheduleSection(Section):
    """How the learning rate moves over the run."""

    name: Literal["constant", "linear", "cosine", "cosine_restarts", "polynomial"] = field(
        "cosine", "shape after the warm-up", aka=("lr_scheduler", "lr_scheduler_type")
    )
    warmup_steps: int = field(0, "linear rise from 0", unit="steps", ge=0, aka=("lr_warmup_steps",))
    cycles: int = field(
        1, "cosine_restarts: how often it falls from the peak", ge=1, aka=("lr_scheduler_num_cycles", "lr_num_cycles")
    )
    power: float = field(1.0, "polynomial: exponent", gt=0, aka=("lr_scheduler_power",))
    min_lr: float = field(0.0, "learning rate at the end of the decay", ge=0, le=10)


class GradientSection(Section):
    """What happens to gradients before the optimizer sees them."""

    accumulation: int = field(
        1, "micro-batches in one update", ge=1, aka=("gradient_accumulation_steps", "accumulation_steps")
    )
    clip_norm: float = field(1.0, "largest total norm; 0: off", ge=0, aka=("max_grad_norm", "clip_grad_norm"))
    clip_value: float = field(0.0, "largest absolute value of an entry; 0: off", ge=0)
    noise_std: float = field(0.0, "std of Gaussian noise added at step 0; 0: off", ge=0, le=1000)
    noise_decay: float = field(0.55, "its variance falls as 1 / (1 + step)^noise_decay (arXiv 1511.06807)", ge=0)
    checkpointing: bool = field(
        False,
        "recompute activations in the backward pass: less memory, slower",
        free=True,
        aka=("gradient_checkpointing",),
    )
    recompute: Literal["blocks", "blocks_offloaded", "feed_forward"] = field(
        "blocks",
        "what checkpointing recomputes: all, its inputs kept on the device or on the host, or the widest layers alone",
        free=True,
        aka=("cpu_offload_checkpointing",),
    )
    recompute_only: tuple[str, ...] = field(
        (),
        "globs over block names (output_blocks.*, single_blocks.1?): only these are recomputed; empty: all",
        free=True,
    )


class TrainSection(Section):
    """The run."""

    steps: int = field(
        2000, "optimizer updates in the run", unit="steps", ge=1, le=10**8, aka=("max_train_steps", "max_train_epochs")
    )
    seed: int = field(42, "every random number follows from it", ge=0, le=2**63 - 1)
    precision: Literal["fp32", "bf16", "fp16"] = field(
        "bf16",
        "number format of the base model; adapters stay fp32",
        aka=("mixed_precision", "dtype"),
    )
    ema_decay: float = field(
        0.0,
        "the LoRA and the grids hold a moving average of the weights; 0: off, 0.99 to 0.9999 are usual",
        ge=0,
        lt=1,
        aka=("ema", "use_ema"),
    )
    deterministic: bool = field(True, "same seed, same bytes on the same device; false is 1 to 3 % faster on a GPU")


class LossSection(Section):
    """What is minimised."""

    kind: Literal["mse"] = field("mse", "loss function", aka=("loss_type",))
    snr_gamma: float = field(
        0.0, "min-SNR weighting (arXiv 2303.09556); 5 is usual; 0: off", ge=0, aka=("min_snr_gamma",)
    )
    offset_noise: float = field(
        0.0, "strength of a constant added to each channel's noise; 0: off", ge=0, le=1, aka=("noise_offset",)
    )
    timesteps: Literal["auto", "uniform", "logit_normal", "sigmoid", "mode", "cosmap"] = field(
        "auto",
        "how noise levels are drawn (SD3, Flux); auto: the family's own",
        aka=("timestep_sampling", "timestep_type", "weighting_scheme"),
    )
    timestep_mean: float = field(
        0.0,
        "mean of logit-normal noise levels, above 0: more noise; logit_mean elsewhere, with the other sign (SD3, Flux)",
        ge=-10,
        le=10,
        aka=("logit_mean",),
    )
    timestep_std: float = field(
        1.0, "std of logit-normal noise levels (SD3, Flux)", gt=0, le=10, aka=("logit_std", "sigmoid_scale")
    )
    mode_scale: float = field(1.29, "how far mode sampling is from uniform (SD3, Flux)", ge=0, le=1.75)
    shift: float = field(
        0.0,
        "shift of noise levels towards more noise (SD3, Flux); 1: none; 0: the family's own",
        ge=0,
        le=100,
        aka=("discrete_flow_shift", "training_shift"),
    )
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = field(
        "none", "weight of a noise level in the loss (SD3, Flux)"
    )
    guidance: float = field(
        1.0, "guidance that the model is told in training (Flux dev)", ge=0, le=1000, aka=("guidance_scale",)
    )
    zero_terminal_snr: bool = field(
        False,
        "last timestep is pure noise (arXiv 2305.08891); needs prediction v",
        aka=("rescale_betas_zero_snr", "zsnr"),
    )


class CheckpointSection(Section):
    """What a stopped run continues from."""

    every: int = field(
        500,
        "interval between checkpoints; 0: only at the end and when stopped",
        unit="steps",
        ge=0,
        free=True,
        aka=("save_every_n_steps", "save_every_n_epochs", "checkpointing_steps", "save_every"),
    )
    keep: int = field(
        3,
        "newest checkpoints that stay",
        ge=1,
        free=True,
        aka=("checkpoints_total_limit", "save_last_n_steps", "max_step_saves_to_keep"),
    )


class SampleSection(Section):
    """Pictures made during the run."""

    every: int = field(
        250,
        "interval between grids; 0: none",
        unit="steps",
        ge=0,
        free=True,
        aka=("sample_every_n_steps", "sample_every", "validation_epochs"),
    )
    prompts: tuple[str, ...] = field(
        (), "one picture each; empty: no grids", free=True, aka=("sample_prompts", "validation_prompt")
    )
    negative: str = field("", "negative prompt; needs classifier-free guidance", free=True, aka=("negative_prompt",))
    steps: int = field(
        0, "sampler steps; 0: the model's own", ge=0, le=1000, free=True, aka=("num_inference_steps", "sample_steps")
    )
    guidance: float = field(
        0.0,
        "scale of classifier-free guidance, 1: off; for Flux dev what the model is told; 0: the model's own",
        ge=0,
        le=1000,
        free=True,
        aka=("cfg_scale", "guidance_scale"),
    )
    sampler: Literal["euler", "ddim"] = field("euler", "sampler", free=True, aka=("sample_sampler",))
    seed: int = field(42, "seed of the first picture; the next has the next", ge=0, le=2**63 - 1, free=True)
    width: int = field(0, "picture width; 0: data.resolution", unit="pixels", ge=0, le=8192, multiple_of=8, free=True)
    height: int = field(0, "picture height; 0: data.resolution", unit="pixels", ge=0, le=8192, multiple_of=8, free=True)


class OutputSection(Section):
    """Where the run is kept."""

    dir: str = field("", "the run folder; required", free=True, place=True, aka=("output_dir", "training_folder"))
    format: Literal["kohya", "diffusers", "both"] = field(
        "kohya",
        "names in lora.safetensors; both: kohya's there, diffusers' in lora.diffusers.safetensors beside it",
        free=True,
        aka=("save_model_as",),
    )
    tensorboard: bool = field(
        False, "also write TensorBoard events", free=True, aka=("log_with", "report_to", "logging_dir")
    )


class Config(Section):
    """A training run as described by one file."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    lora: LoraSection = LoraSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    gradient: GradientSection = GradientSection()
    train: TrainSection = TrainSection()
    loss: LossSection = LossSection()
    checkpoint: CheckpointSection = CheckpointSection()
    sample: SampleSection = SampleSection()
    output: OutputSection = OutputSection()
