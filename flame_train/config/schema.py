"""Every configuration key: its type, default, bounds, unit and meaning.

The loader, its messages, `init`, `--set`, the run folder and `configs/reference.toml` read this file. Sections
with a file of their own (`memory`, `outputs`, `repeated`, `updates`) join the others in `Config`. The keys of a choice,
such as an optimizer's, are declared where that choice is. They join its section by `choices`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from flame_train.adapters.kinds import ADAPTERS
from flame_train.adapters.targets import Rule
from flame_train.config.repeated import CheckpointSection, Repeated, SampleSection, ValidationSection
from flame_train.config.training_sections import (
    GradientSection,
    LogSection,
    MemorySection,
    OptimizerSection,
    OutputSection,
    ScheduleSection,
    TrainSection,
)
from flame_train.data.caption_variants import CaptionKeys
from flame_train.data.sets import DataSet, SetKeys
from flame_train.diffusion.losses import LOSSES
from flame_train.diffusion.noise import NOISE_KINDS
from flame_train.diffusion.objective_kind import OBJECTIVES
from flame_train.diffusion.preservation import PRESERVATIONS
from flame_train.diffusion.timestep_sampling import TIMESTEP_SAMPLINGS
from flame_train.diffusion.weightings import WEIGHTINGS
from flame_train.settings import Section, choices, field, one_or_several, reserved_key
from flame_train.text_encoders.encoder_keys import ENCODER_KEYS

Scale = Annotated[float, Field(gt=1, le=100)]
"""A scale of guidance."""

FORMAT = 1
"""The number that a config file may give as `format`: raised when the meaning of keys changes."""


class ModelSection(Section):
    """The base model, which is never changed."""

    checkpoint: str = field(
        "",
        "the base model: .safetensors file, diffusers folder, hf:owner/name or hf:owner/name/file; required",
        place=True,
        aka=("pretrained_model_name_or_path", "base_model", "name_or_path", "base_model_name"),
    )
    vae: str = field(
        "",
        "another VAE to use instead of the checkpoint's own; empty: its own",
        place=True,
        aka=("pretrained_vae_model_name_or_path", "ae"),
    )
    search: tuple[str, ...] = field(
        (),
        "models folders of ComfyUI or Forge, where files named by hf: and parts that no key names are looked for",
        place=True,
        free=True,
    )
    training_adapter: str = field(
        "",
        "a de-distillation adapter: a LoRA that is added to the base while it is trained, so that a distilled model "
        "does not lose its distillation; samples are drawn without it; empty: none",
        place=True,
        aka=("assistant_lora_path", "assistant_lora"),
    )
    training_adapter_strength: float = field(
        1.0, "how strongly it acts; 1: as it was trained", gt=0, le=2, aka=("assistant_lora_strength",)
    )
    train_distilled: bool = field(
        False,
        "train a distilled model as it is, and lose its few steps; a training adapter is made so",
        aka=("disable_assistant_lora",),
    )
    prediction: Literal["epsilon", "v", "flow"] = field(
        "epsilon",
        "the model's target; flow: the velocity of a rectified flow, as bigASP 2.5 and NoobAI RF do",
        aka=("prediction_type", "v_parameterization", "flow_matching", "flow_model"),
    )
    kontext: bool = field(
        False,
        "the checkpoint is FLUX.1 Kontext, which has the shapes of dev; needed with control images where neither its "
        "name nor its folder says so",
    )
    qwen_edit: Literal["auto", "2509", "2511"] = field(
        "auto",
        "which Qwen-Image-Edit the checkpoint is, which has the shapes of Qwen-Image; auto: as a tensor, its folder or "
        "its name says",
    )
    quantize: Literal["off", "fp8", "int8", "int8-convrot", "nf4"] = field(
        "off",
        "the base model's transformer layers in fewer bits: fp8 and int8 take half of bf16's memory, nf4 (as "
        "bitsandbytes) about a quarter; int8-convrot: int8 of rotated columns, for weights and inputs with outliers",
        aka=(
            *("convrot", "convrot_int8"),
            *("fp8", "fp8_base", "fp8_weights", "qtype", "weight_dtype", "base_model_precision"),
            *("int8", "nf4", "load_in_8bit", "load_in_4bit", "transformer_dtype", "quantize_base"),
        ),
    )
    arithmetic: Literal["bf16", "fp8", "int8"] = field(
        "bf16",
        "number format of their products, that of model.quantize; fp8: faster and less exact, on compute capability "
        "9.0 (H100, H200) and 12 (RTX 5090, where it has not run yet); int8, also with int8-convrot: the same on 8.0 "
        "and later (A100, RTX 3090). "
        "bf16: that of train.precision",
    )
    offload: Literal["off", "auto"] | Annotated[float, Field(gt=0, le=1)] | tuple[str, ...] = field(
        "off",
        "blocks whose weights wait in host memory, and are copied to the GPU before they run: a share of all blocks, "
        "globs over block names, or auto: as many as the GPU's memory or memory.budget asks for. They must be "
        "recomputed: gradient.checkpointing",
        free=True,
        aka=("blocks_to_swap", "layer_offload_fraction", "layer_offloading", "block_swap", "musubi_blocks_to_swap"),
    )
    vae_precision: Literal["fp32", "tf32", "bf16"] = field(
        "fp32",
        "number format of the VAE; tf32: fp32 whose products round their operands to 10 bits, on a GPU; "
        "no fp16, in which SDXL's overflows",
    )
    vae_tile: int = field(
        0,
        "side of the tiles in which the VAE works on larger images, for its memory; they overlap by a quarter. "
        "0: images whole",
        ge=0,
        le=4096,
        multiple_of=64,
        unit="pixels",
    )

    @field_validator("search", mode="before")
    @classmethod
    def _one_folder(cls, value: Any) -> Any:
        return one_or_several(value)


@choices(ENCODER_KEYS)
class TextEncodersSection(Section):
    """The text encoders, where the checkpoint holds none, and how they are used."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8", "nf4"] = field(
        "auto",
        "number format while captions are encoded; auto: train.precision; fp8, int8: T5 or Qwen3 in 8 bits, "
        "T5 in 5 GiB instead of 10; nf4: in 4 bits",
        aka=("t5_fp8", "quantize_te", "t5xxl_dtype", "fp8_te", "text_encoder_3_precision"),
    )
    train: tuple[str, ...] = field(
        (),
        "text encoders that get adapters too, by their keys here (of CLIP and T5): these run in each step; empty: none",
        aka=("train_text_encoder", "train_te"),
    )
    cache: Literal["auto", "on", "off"] = field(
        "auto",
        "captions encoded once, ahead of training: auto: by those that are not trained; off: by none, all run in "
        "each step",
        aka=("cache_text_encoder_outputs", "cache_text_embeddings"),
    )
    lr: float = field(
        0.0,
        "peak learning rate of their adapters; 0: optimizer.lr",
        ge=0,
        le=10,
        aka=("text_encoder_lr", "text_encoder_lr1", "te_lr"),
        instead_of="optimizer.lr",
    )
    rank: int = field(0, "inner width of their adapters; 0: lora.rank", ge=0, le=4096, instead_of="lora.rank")
    alpha: float = field(
        0.0, "their updates are scaled by alpha / rank; 0: lora.alpha", ge=0, le=1_000_000, instead_of="lora.alpha"
    )
    targets: tuple[str, ...] = field(
        ("attention",),
        "which of their modules get them: presets (attention, attention+mlp, full) or globs over names",
        instead_of="lora.targets",
    )


class _Folders(Section):
    """The first keys of `[data]`."""

    path: str = field(
        "",
        "the folder of images with captions or metadata.jsonl; required",
        place=True,
        aka=("train_data_dir", "instance_data_dir", "dataset", "folder_path", "image_dir"),
    )
    sets: tuple[DataSet, ...] = field(
        (), "tables [[data.sets]] in place of path: several folders, each with settings of its own"
    )
    resolution: int = field(
        1024, "resolution: side of the square whose area a bucket may have", unit="pixels", ge=8, le=8192, multiple_of=8
    )


class DataSection(SetKeys, _Folders):
    """The images and their captions."""

    upscale: bool = field(False, "enlarge images smaller than their bucket; false: take a smaller bucket")
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
    on_bad_image: Literal["error", "skip"] = field(
        "error", "an unreadable image stops the run before training, or is left out with a warning"
    )
    cache: str = field(
        "",
        "folder for encoded images and captions; empty: .flame-cache inside data.path, or inside the first set's",
        free=True,
        place=True,
        aka=("cache_dir", "vae_cache_dir"),
    )


@choices(ADAPTERS)
@reserved_key(
    "from",
    str,
    field(
        "",
        "file of a finished LoRA that a new run begins with, in any naming; empty: none",
        place=True,
        aka=("network_weights", "init_lora", "pretrained_lora_path", "lora_model_name"),
    ),
)
class LoraSection(Section):
    """The adapter that is trained."""

    rank: int = field(
        16,
        "rank of the LoRA (network_dim); more is larger and learns more",
        ge=1,
        le=4096,
        aka=("network_dim", "linear", "dim", "r"),
    )
    alpha: float = field(
        16.0,
        "the update is scaled by alpha / rank",
        gt=0,
        le=1_000_000,
        aka=("network_alpha", "lora_alpha", "linear_alpha"),
    )
    targets: tuple[str, ...] = field(
        ("attention",),
        "which layers get adapters: presets (attention, attention+mlp, full) or globs over module names",
        aka=("target_modules",),
    )
    scale: Literal["rank", "sqrt_rank"] = field(
        "rank",
        "what alpha is divided by; sqrt_rank: rsLoRA (arXiv 2312.03732), steadier at high ranks",
        aka=("rs_lora", "use_rslora"),
    )
    dropout: float = field(
        0.0,
        "share of the inner activations that a step leaves out",
        ge=0,
        lt=1,
        aka=("network_dropout", "lora_dropout"),
    )
    rank_dropout: float = field(0.0, "share of the ranks that a step leaves out for an image", ge=0, lt=1)
    module_dropout: float = field(0.0, "share of the layers whose update a step leaves out", ge=0, lt=1)
    min_rank: int = field(
        0,
        "T-LoRA (arXiv 2507.05964): so many ranks act at the noisiest level, all near the image, as its noise level "
        "says of each sample; the file is an ordinary LoRA. 0: all act at every level",
        ge=0,
        le=4096,
        aka=("tlora_min_rank",),
    )
    rank_exponent: float = field(
        1.0, "how the ranks rise from lora.min_rank to all: by (1 - noise level) to this power", gt=0, le=10
    )
    max_norm: float = field(
        0.0,
        "largest norm of a layer's update: it is made smaller after a step; 0: off",
        ge=0,
        aka=("scale_weight_norms",),
    )
    from_resize: bool = field(
        False, "cut or pad the ranks of lora.from by SVD; layers it lacks begin fresh", aka=("dim_from_weights",)
    )
    rules: tuple[Rule, ...] = field(
        (), "tables [[lora.rules]]: layers with a rank, alpha, lr or dropout of their own, or off"
    )


@choices(NOISE_KINDS, LOSSES, WEIGHTINGS, TIMESTEP_SAMPLINGS, OBJECTIVES)
class LossSection(Section):
    """The loss, the noise levels and the noise."""

    shift: float = field(
        0.0,
        "shift of noise levels towards more noise (models of flow); 1: none; 0: the family's own",
        ge=0,
        le=100,
        aka=("discrete_flow_shift", "training_shift"),
    )
    guidance_scale: float = field(
        1.0, "guidance scale that the model gets in training (Flux dev)", ge=0, le=1000, aka=("guidance",)
    )
    contrastive_scale: Literal["off"] | Scale | tuple[Scale, Scale] = field(
        "off",
        "contrastive guidance, for a guidance-distilled model: the scale that it was distilled with, often 3 to 4, or "
        "two, between which each sample gets its own; costs a forward pass without a prompt",
        aka=("guidance_loss_target", "training_cfg_scale", "do_guidance_loss", "h3_guidance_loss_scale"),
    )
    contrastive_schedule: Literal["constant", "sigma"] = field(
        "constant",
        "that scale by noise level; sigma: 1 near the image, all of it in pure noise",
        aka=("guidance_loss_schedule",),
    )
    min_timestep: int = field(0, "least timestep that is trained, of 1000; 0 is the image", ge=0, le=999)
    max_timestep: int = field(1000, "the timesteps below this are trained; 1000 is pure noise", ge=1, le=1000)
    zero_terminal_snr: bool = field(
        False,
        "last timestep is pure noise (arXiv 2305.08891); needs prediction v",
        aka=("rescale_betas_zero_snr", "zsnr"),
    )


@choices(PRESERVATIONS)
class PreservationSection(Section):
    """What the model keeps as the base has it, while it learns."""

    weight: float = field(
        1.0,
        "factor on the loss of what is kept; of a slider, on its loss",
        gt=0,
        le=1000,
        aka=("diff_output_preservation_multiplier", "blank_prompt_preservation_multiplier"),
    )


class Config(Section):
    """A training run as described by one file."""

    model: ModelSection = Field(default=ModelSection(), description="The base model, which is never changed.")
    text_encoders: TextEncodersSection = Field(
        default=TextEncodersSection(),
        description="The text encoders, where the checkpoint holds none, and how they are used.",
    )
    data: DataSection = Field(default=DataSection(), description="The images and their captions.")
    captions: CaptionKeys = Field(default=CaptionKeys(), description="How captions are read and varied.")
    lora: LoraSection = Field(default=LoraSection(), description="The adapter that is trained.")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="How gradients become updates.")
    schedule: ScheduleSection = Field(
        default=ScheduleSection(), description="How the learning rate moves over the run."
    )
    gradient: GradientSection = Field(
        default=GradientSection(), description="Changes of gradients before the optimizer gets them."
    )
    memory: MemorySection = Field(default=MemorySection(), description="The memory of the GPU that a run may take.")
    train: TrainSection = Field(default=TrainSection(), description="The run.")
    loss: LossSection = Field(default=LossSection(), description="The loss, the noise levels and the noise.")
    preservation: PreservationSection = Field(
        default=PreservationSection(), description="What the model keeps as the base has it, while it learns."
    )
    checkpoint: CheckpointSection = Field(
        default=CheckpointSection(), description="The checkpoints from which a stopped run continues."
    )
    log: LogSection = Field(default=LogSection(), description="Further values in the log.")
    sample: SampleSection = Field(default=SampleSection(), description="Images made during the run.")
    validation: ValidationSection = Field(
        default=ValidationSection(),
        description="The loss on images that are held out: sets with `validation = true`, or a share of all.",
    )
    output: OutputSection = Field(default=OutputSection(), description="Where the run is kept.")


REPEATED: tuple[str, ...] = tuple(
    name
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Repeated)
)
"""The sections of what is done again and again."""
