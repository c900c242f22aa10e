"""The boxes of kohya's web interface: their defaults, their names in sd-scripts, and the models they are for.

A box without a row here has sd-scripts' name, and is off by default. Places are in bmaltais/kohya_ss, `kohya_gui/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

BOXES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "LyCORIS_preset": "full",  # lora_gui.py:2745
        "bucket_reso_steps": 64,  # class_advanced_training.py:372
        "clip_skip": 1,  # class_advanced_training.py:232
        "discrete_flow_shift": 3.0,  # class_flux1.py:114
        "dynamo_backend": "no",  # class_accelerate_launch.py:54
        "dynamo_mode": "default",  # class_accelerate_launch.py:74
        "factor": -1,  # lora_gui.py:2856
        "ggpo_beta": 0.01,  # lora_gui.py:3023
        "ggpo_sigma": 0.03,  # lora_gui.py:3017
        "gradient_accumulation_steps": 1,  # class_advanced_training.py:81
        "guidance_scale": 3.5,  # class_flux1.py:175
        "huber_c": 0.1,  # class_advanced_training.py:163
        "huber_scale": 1.0,  # class_advanced_training.py:171
        "huber_schedule": "snr",  # class_advanced_training.py:153
        "logit_std": 1.0,  # class_sd3.py:85
        "loss_type": "l2",  # class_advanced_training.py:147
        "lr_scheduler_num_cycles": 1,  # class_basic_training.py:357
        "lr_scheduler_power": 1.0,  # class_basic_training.py:366
        "max_grad_norm": 1.0,  # class_basic_training.py:234
        "max_timestep": 1000,  # class_advanced_training.py:400
        "max_token_length": 75,  # class_advanced_training.py:239
        "min_bucket_reso": 256,  # class_basic_training.py:399
        "mode_scale": 1.29,  # class_sd3.py:90
        "model_list": "custom",  # common_gui.py:388
        "model_prediction_type": "sigma_scaled",  # class_flux1.py:123
        "multires_noise_discount": 0.3,  # class_advanced_training.py:452
        "network_alpha": 1,  # lora_gui.py:2940
        "noise_offset_type": "Original",  # class_advanced_training.py:410
        "num_cpu_threads_per_process": 2,  # class_accelerate_launch.py:43
        "num_machines": 1,  # class_accelerate_launch.py:35
        "num_processes": 1,  # class_accelerate_launch.py:27
        "prior_loss_weight": 1.0,  # class_advanced_training.py:94
        "save_model_as": "safetensors",  # class_source_model.py:451
        "show_timesteps_resolution": 1024,  # class_advanced_training.py:519
        "t5xxl_dtype": "bf16",  # class_sd3.py:170
        "timestep_sampling": "sigma",  # class_flux1.py:131
        "train_batch_size": 1,  # class_basic_training.py:89
        "train_blocks": "all",  # class_flux1.py:150
        "train_double_block_indices": "all",  # class_flux1.py:282
        "train_on_input": True,  # lora_gui.py:2925
        "train_single_block_indices": "all",  # class_flux1.py:290
        "training_preset": "none",  # lora_gui.py:2710
        "unit": 1,  # lora_gui.py:3000
        "xformers": "xformers",  # class_advanced_training.py:325
        "anima_attn_mode": "torch",  # class_anima.py:156
        "anima_compile_backend": "inductor",  # class_anima.py:237
        "anima_compile_dynamic": "auto",  # class_anima.py:255
        "anima_compile_mode": "default",  # class_anima.py:243
        "anima_discrete_flow_shift": 1.0,  # class_anima.py:112
        "anima_qwen3_max_token_length": 512,  # class_anima.py:138
        "anima_sigmoid_scale": 1.0,  # class_anima.py:127
        "anima_t5_max_token_length": 512,  # class_anima.py:147
        "anima_timestep_sampling": "sigmoid",  # class_anima.py:121
    }
)
"""Defaults with which sd-scripts, and flame-train with it, do what they do without the box."""

DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "LoRA_type": "Standard",  # lora_gui.py:2719
        "bucket_no_upscale": True,  # class_advanced_training.py:368
        "conv_alpha": 1,  # lora_gui.py:2958
        "conv_dim": 1,  # lora_gui.py:2951
        "caption_extension": ".txt",  # class_basic_training.py:124
        "enable_bucket": True,  # class_basic_training.py:394
        "epoch": 1,  # class_basic_training.py:97
        "learning_rate": 1e-4,  # lora_gui.py:2779
        "lr_scheduler": "cosine",  # lora_gui.py:2780
        "lr_warmup": 10,  # lora_gui.py:2781
        "max_bucket_reso": 2048,  # class_basic_training.py:408
        "max_resolution": "512,512",  # class_basic_training.py:380
        "mixed_precision": "fp16",  # class_accelerate_launch.py:21
        "network_dim": 8,  # lora_gui.py:2932
        "optimizer": "AdamW",  # common_gui.py:382
        "sample_sampler": "euler_a",  # class_sample_images.py:140
        "save_every_n_epochs": 1,  # class_basic_training.py:118
        "save_precision": "fp16",  # class_source_model.py:456
        "text_encoder_lr": 1e-4,  # lora_gui.py:2802
        "unet_lr": 1e-4,  # lora_gui.py:2818
    }
)
"""Defaults that sd-scripts does not share, for a file that lacks the box."""

RENAMED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "max_resolution": "resolution",  # lora_gui.py:2311
        "optimizer": "optimizer_type",  # lora_gui.py:2294
        "lora_network_weights": "network_weights",  # common_gui.py:504
        "sdxl_no_half_vae": "no_half_vae",
        "sdxl_cache_text_encoder_outputs": "cache_text_encoder_outputs",
        "sd3_text_encoder_batch_size": "text_encoder_batch_size",
        "sd3_fused_backward_pass": "fused_backward_pass",
        "sd3_clip_l": "clip_l",
        "sd3_t5xxl": "t5xxl",
        **{f"sd3_{name}": name for name in ("clip_l_dropout_rate", "t5_dropout_rate", "disable_mmap_load_safetensors")},
        "sd3_enable_scaled_pos_embed": "enable_scaled_pos_embed",
        **{
            f"{model}_{name}": name
            for model in ("flux1", "sd3", "anima")
            for name in ("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk")
        },
        **{
            f"anima_{name}": name
            for name in (
                *("qwen3", "vae", "llm_adapter_path", "t5_tokenizer_path", "discrete_flow_shift", "timestep_sampling"),
                *("sigmoid_scale", "qwen3_max_token_length", "t5_max_token_length", "attn_mode", "split_attn"),
                *("vae_chunk_size", "vae_disable_cache", "unsloth_offload_checkpointing", "torch_compile"),
            )
        },
    }
)
"""Names in sd-scripts (lora_gui.py:2147)."""

_FLUX: Final = ("flux", "chroma")
OF_MODELS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "sdxl_": ("sdxl",),
        "flux1_cache": _FLUX,
        "sd3_": ("sd3",),
        "anima_": ("anima",),
        "hunyuan_": ("none",),
        "lumina_": ("none",),
        **dict.fromkeys(("ae", "discrete_flow_shift", "model_prediction_type", "timestep_sampling"), _FLUX),
        **dict.fromkeys(("split_mode", "t5xxl_max_token_length", "guidance_scale", "mem_eff_save"), _FLUX),
        **dict.fromkeys(("apply_t5_attn_mask", "cpu_offload_checkpointing", "fp8_base_unet", "model_type"), _FLUX),
        **dict.fromkeys(("single_blocks_to_swap", "double_blocks_to_swap", "t5xxl", "clip_l"), _FLUX),
        **dict.fromkeys(("clip_g", "clip_g_dropout_rate", "logit_mean", "logit_std", "mode_scale"), ("sd3",)),
        **dict.fromkeys(("pos_emb_random_crop_rate", "save_clip", "save_t5xxl", "t5xxl_device"), ("sd3",)),
        **dict.fromkeys(("t5xxl_dtype", "weighting_scheme"), ("sd3",)),
        "blocks_to_swap": ("flux", "chroma", "sd3", "anima"),
        "max_token_length": ("sdxl", "sd3"),
        "clip_skip": ("sdxl", "flux", "chroma", "sd3"),
    }
)
"""Boxes, or how their names begin, that the interface reads for some models alone (lora_gui.py:2147)."""
