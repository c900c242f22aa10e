"""sd-scripts' checkpoints, sample images, validations, logs and files, and what only makes it faster.

Places are in kohya-ss/sd-scripts, as in `sd_scripts`.
"""

from __future__ import annotations

from typing import Final

from . import sd_scripts_values as own
from .conversions import number_format, one_of, sampler, unless_off
from .table import NOTHING, Row, always, needless, never, part_of, turned

_CACHED: Final = "a caption that is encoded once is what it would be each time"
KEPT: Final = [
    turned("save_every_n_steps@train_util.py:3852", "checkpoint.every", unless_off),
    turned(
        "save_every_n_epochs@train_util.py:3846",
        "checkpoint.every_epochs",
        unless_off,
        say="checkpoint.every_epochs counts epochs, checkpoint.every steps",
    ),
    turned("save_n_epoch_ratio@train_network.py:980", "checkpoint.every_epochs", own.saved),
    turned("(checkpoints)", "checkpoint.keep", own.kept, absent="all stay"),
    *part_of(
        "save_last_n_steps@train_util.py:5796",
        "checkpoint.keep counts checkpoints; a span of steps there: divide by the interval and add 1",
    ),
    *part_of(
        "save_last_n_epochs@train_util.py:5786",
        "checkpoint.keep counts checkpoints; a span of epochs there, counted in checkpoints",
    ),
    *needless(
        "the states of the newest checkpoints are kept, from which a stopped run goes on",
        "save_state@train_util.py:3888 save_state_on_train_end@train_util.py:3893 "
        "save_last_n_epochs_state@train_util.py:3870 save_last_n_steps_state@train_util.py:3882",
    ),
    never("resume@train_util.py:3898", "a state of sd-scripts does not go on here; lora.from begins with its LoRA"),
    *(
        never(name, "a stopped run goes on by itself, where it stopped")
        for name in (
            "initial_epoch@train_network.py:1858",
            "initial_step@train_network.py:1865",
            "skip_until_initial_step@train_network.py:1853",
        )
    ),
    turned("sample_every_n_steps@train_util.py:4175", "sample.every", unless_off),
    turned(
        "sample_every_n_epochs@train_util.py:4184",
        "sample.every_epochs",
        unless_off,
        say="sample.every_epochs counts epochs, sample.every steps",
    ),
    turned("sample_prompts@train_util.py:4190", ("sample.prompt_file", "sample.prompts"), own.prompts),
    turned("(samples)", "sample.every", own.unsampled, absent="drawn when asked for"),
    turned("sample_sampler@train_util.py:4196", "sample.sampler", sampler),
    never("sample_at_first@train_util.py:4181", "grids come after steps, none before the first"),
    turned("validation_split@train_network.py:1878", "validation.fraction", unless_off),
    turned("validate_every_n_steps@train_network.py:1884", "validation.every", unless_off),
    turned("validate_every_n_epochs@train_network.py:1890", "validation.every_epochs", unless_off),
    never("validation_seed@train_network.py:1872", "images are held out by the hash of each, whatever the seed"),
    never("max_validation_steps@train_network.py:1896", "a validation measures all images that are held out"),
]

OUTPUT: Final = [
    turned(
        "output_dir@train_util.py:3795",
        "output.dir",
        lambda v, s: f"{v}/{s.get('output_name')}" if s.get("output_name") else v,
    ),
    turned("output_name@train_util.py:3798", "output.name", unless_off),
    turned(
        "save_model_as@train_network.py:1755",
        "output.format",
        one_of({"safetensors": "kohya", None: "kohya"}, "files are always safetensors here"),
    ),
    turned(
        "save_precision@train_util.py:3839",
        "output.precision",
        lambda v, s: "fp32" if v is None else number_format(v, s),
        absent="float",
    ),
    turned("metadata_title@sai_model_spec.py:589", "output.title", unless_off),
    turned("metadata_author@sai_model_spec.py:595", "output.author", unless_off),
    turned("metadata_trigger_phrase@sai_model_spec.py:637", "output.trigger", unless_off),
    never("metadata_*@sai_model_spec.py:601", "output.title, author and trigger are what metadata take of a config"),
    never(
        "training_comment@train_network.py:1817",
        "write it into output.title, which web interfaces show; there is no place for a comment of one's own",
    ),
    never("no_metadata@train_network.py:1752", "metadata are always written; they have no path and no time"),
    turned("log_with@train_util.py:4031", ("output.tensorboard", "output.wandb"), own.tracked),
    *part_of("log_tracker_name@train_util.py:4041"),
    turned("wandb_*@train_util.py:6596", (), own.of_wandb, say="not here: output.wandb names a project"),
    *needless(
        "the run's folder holds its logs",
        "logging_dir@train_util.py:4025 log_prefix@train_util.py:4038 log_tracker_config@train_util.py:4053 "
        "log_config@train_util.py:4065 console_log_level@utils.py:25 console_log_file@utils.py:32 "
        "console_log_simple@utils.py:38",
    ),
    *(
        never(name, "uploads are not here; output.wandb names a project")
        for name in (
            "huggingface_*@train_util.py:3801",
            "async_upload@train_util.py:3834",
            "save_state_to_huggingface@train_util.py:3826",
            "resume_from_huggingface@train_util.py:3829",
        )
    ),
]

HOW: Final = [
    *(
        Row(name, (), lambda v, s: NOTHING, say=f"always on: {_CACHED}; remove it", at=at, inert=_CACHED)
        for name, at in (
            ("cache_text_encoder_outputs", "train_util.py:4253"),
            ("cache_text_encoder_outputs_to_disk", "train_util.py:4256"),
        )
    ),
    *(
        always(name, "latents are encoded once, on disk")
        for name in (
            "cache_latents@train_util.py:4566",
            "cache_latents_to_disk@train_util.py:4574",
        )
    ),
    *needless(
        "flame-train chooses it",
        "xformers@train_util.py:3939 sdpa@train_util.py:3940 mem_eff_attn@train_util.py:3908 "
        "attn_mode@anima_train_utils.py:113 split_attn@anima_train_utils.py:120 "
        "lowram@train_util.py:4163 highvram@train_util.py:4168 torch_compile@train_util.py:3913 "
        "dynamo_backend@train_util.py:3916 max_data_loader_n_workers@train_util.py:3959 "
        "persistent_data_loader_workers@train_util.py:3965 vae_batch_size@train_util.py:4571 "
        "text_encoder_batch_size@train_util.py:4261 disable_mmap_load_safetensors@train_util.py:4270 "
        "skip_cache_check@train_util.py:4579 t5xxl_device@sd3_train_utils.py:174 "
        "vae_chunk_size@anima_train_utils.py:125 vae_disable_cache@anima_train_utils.py:132 "
        "split_mode@flux_train_network.py:528 num_cpu_threads_per_process@class_accelerate_launch.py:43 "
        "no_half_vae@train_network.py:1848",
    ),
    *needless(
        "tokenizers are here", "tokenizer_cache_dir@train_util.py:3655 t5_tokenizer_path@anima_train_utils.py:76"
    ),
    *needless(
        "sd-scripts does not use it for a LoRA",
        "use_safetensors@train_util.py:4693 save_clip@sd3_train_utils.py:163 save_t5xxl@sd3_train_utils.py:168 "
        "fused_backward_pass@train_util.py:3772 v2@sdxl_train_util.py:349",
    ),
    *needless(
        "sd-scripts has no such argument; its web interface writes it",
        "epoch@lora_gui.py:2201 noise_offset_type@lora_gui.py:2291 stop_text_encoder_training@lora_gui.py:2339 "
        "mem_eff_save@lora_gui.py:2398 single_blocks_to_swap@lora_gui.py:2412 double_blocks_to_swap@lora_gui.py:2413",
    ),
    *needless("its settings are read", "config_file@train_util.py:4221"),
    never("debug_dataset@train_network.py:567", "`flame-train dataset` shows what is trained on"),
    never("output_config@train_util.py:4227", "the run is not written out, but trained"),
    never("dataset_class@train_util.py:4640", "no class of Python is loaded"),
    *(
        never(name, "the length is 512 tokens")
        for name in ("qwen3_max_token_length@anima_train_utils.py:82", "t5_max_token_length@anima_train_utils.py:88")
    ),
    *(
        never(name, "docs/several-gpus.md says how several GPUs are used")
        for name in (
            "deepspeed@deepspeed_utils.py:18",
            "fp16_master_weights_and_gradients@deepspeed_utils.py:57",
            "ddp_*@train_util.py:4003",
            "zero*@deepspeed_utils.py:19",
            "offload_*@deepspeed_utils.py:20",
        )
    ),
]
