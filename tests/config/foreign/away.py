"""Values away from the default for settings that no usual value stands for, and the settings that make them count."""

from __future__ import annotations

from typing import Any

AWAY: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "ai-toolkit": {
        "save.hf_repo_id": ("a/b", {"save.push_to_hub": True}),
        "save.hf_private": (False, {"save.push_to_hub": True, "save.hf_repo_id": "a/b"}),
        "logging.project_name": ("zz", {"logging.use_wandb": True}),
        **{
            f"train.{name}": (0.7, {f"train.{switch}": True})
            for name, switch in (
                ("inverted_mask_prior_multiplier", "inverted_mask_prior"),
                ("differential_guidance_scale", "do_differential_guidance"),
                ("guidance_loss_target", "do_guidance_loss"),
                ("unconditional_prompt", "do_guidance_loss"),
                ("ema_config.*", "ema_config.use_ema"),
                ("batch_noise_correction_scale", "do_batch_noise_correction"),
                ("signal_amplification_strength", "do_signal_amplification"),
                ("signal_correction_noise_scale", "do_signal_correction_noise"),
                ("correct_pred_norm_multiplier", "correct_pred_norm"),
                ("target_norm_std_value", "target_norm_std"),
                ("paramiter_swapping_factor", "do_paramiter_swapping"),
                ("latent_feature_loss_weight", "latent_feature_extractor_path"),
                ("merge_network_on_save_strength", "merge_network_on_save"),
            )
        },
        "train.guidance_loss_schedule": ("sigma", {"train.do_guidance_loss": True}),
        "train.noise_scheduler": ("flowmatch", {}),
        "set.mask_min_value": (0.2, {"mask_path": "zz"}),
        "train.reg_weight": (0.5, {"is_reg": True}),
        "train.lr_scheduler_params.num_warmup_steps": (9, {"train.lr_scheduler": "constant_with_warmup"}),
        **{
            f"train.lr_scheduler_params.{name}_factor": (0.5, {"train.lr_scheduler": "linear"})
            for name in ("start", "end")
        },
        "model.arch": ("flux_kontext", {}),
        "model.layer_offloading_text_encoder_percent": (0.5, {"model.layer_offloading": True}),
        "model.qtype_te": ("uint4", {"model.quantize_te": True}),
        "network.lokr_full_rank": (False, {"network.type": "lokr", "network.linear": 8}),
        "save.save_format": ("diffusers", {}),
        "train.text_encoder_lr": (1e-5, {"train.train_text_encoder": True, "train.lr": 1e-4}),
        "train.ema_config.ema_decay": (0.9, {"train.ema_config.use_ema": True}),
        "train.diff_output_preservation_multiplier": (0.5, {"train.diff_output_preservation": True}),
        "train.diff_output_preservation_class": ("cat", {"train.diff_output_preservation": True}),
        "train.blank_prompt_preservation_multiplier": (0.5, {"train.blank_prompt_preservation": True}),
        "sample.fps": (12, {"sample.num_frames": 33}),
        "set.fps": (12, {"num_frames": 33, "shrink_video_to_frames": False}),
        "set.shrink_video_to_frames": (False, {"num_frames": 33}),
        "model.qtype": ("uint4", {"model.quantize": True}),
        "model.layer_offloading_transformer_percent": (0.5, {"model.layer_offloading": True}),
    },
    "musubi-tuner": {
        "weighting_scheme": ("cosmap", {}),
        "model_version": ("edit-2511", {}),
        "set.target_frames": ([33], {"video_directory": "/v"}),
        "set.frame_extraction": ("chunk", {"video_directory": "/v"}),
        "set.frame_stride": (9, {"video_directory": "/v", "frame_extraction": "slide"}),
        "set.frame_sample": (1, {"video_directory": "/v", "frame_extraction": "uniform", "frame_sample": 2}),
        "set.source_fps": (30.0, {"video_directory": "/v"}),
    },
    "SimpleTuner": {
        "framerate": (12, {"validation_num_video_frames": 33}),
        "assistant_lora_weight_name": (
            "zz.safetensors",
            {"assistant_lora_path": "a/b", "model_flavour": "schnell"},
        ),
        "huber_schedule": ("exponential", {"loss_type": "huber"}),
        "huber_c": (0.3, {"loss_type": "huber"}),
        "hub_model_id": ("a/b", {"push_to_hub": True}),
        "model_card_private": (False, {"push_to_hub": True, "hub_model_id": "a/b"}),
        "tracker_project_name": ("zz", {"report_to": "wandb"}),
        "model_flavour": ("kontext", {}),
        "ema_update_interval": (9, {"use_ema": True}),
        "noise_offset_probability": (0.5, {"offset_noise": True}),
        **{f"flow_beta_schedule_{name}": (3.0, {"flow_use_beta_schedule": True}) for name in ("alpha", "beta")},
        **{f"flux_guidance_{name}": (2.0, {"flux_guidance_mode": "random-range"}) for name in ("min", "max")},
        "resolution_type": ("pixel", {"resolution": 768}),
        "set.resolution_type": ("pixel", {"resolution": 768}),
        "set.caption_shuffle.count": (4, {"caption_shuffle.enable": True}),
        "set.crop_aspect": ("preserve", {"crop": True}),
        "set.crop_style": ("center", {"crop": True, "crop_aspect": "preserve"}),
        "set.probability": (0, {}),
        "lycoris.factor": (8, {"lycoris.algo": "lokr", "lora_type": "lycoris"}),
        "lycoris.algo": ("loha", {"lora_type": "lycoris"}),
        "lr_num_cycles": (3, {"lr_scheduler": "cosine_with_hard_restarts"}),
        "lr_power": (0.5, {"lr_scheduler": "polynomial"}),
        "lr_end": (1e-6, {"lr_scheduler": "polynomial"}),
        "ema_decay": (0.9, {"use_ema": True}),
        "use_soft_min_snr": (True, {"snr_gamma": 5}),
        "noise_offset": (0.05, {"offset_noise": True}),
        "lora_format": ("comfyui", {}),
        "validation_on_startup": (True, {"validation_prompt": "zz"}),
    },
    "OneTrainer": {
        "oft_*": (32, {"peft_type": "OFT_2"}),
        "non_ema_sampling": (True, {"ema": "GPU"}),
        "learning_rate_min_factor": (0.1, {"learning_rate_scheduler": "COSINE", "learning_rate": 1e-4}),
        "set.image.enable_resolution_override": (True, {"image.resolution_override": "768"}),
        "validate_after": (5, {"validation": True, "validate_after_unit": "STEP"}),
        "ema_update_step_interval": (2, {"ema": "GPU"}),
        "huber_delta": (0.5, {"huber_strength": 1.0, "mse_strength": 0.0}),
        "layer_filter_regex": (True, {"layer_filter_preset": "custom", "layer_filter": "zz"}),
        "lora_decompose_norm_epsilon": (False, {"lora_decompose": True}),
        **{
            f"{name}_unit": ("STEP", {name: 5, "validation": True})
            for name in ("validate_after", "save_every", "backup_after", "sample_after")
        },
        "validation": (True, {"validate_after": 5, "validate_after_unit": "STEP"}),
        "rolling_backup": (True, {"rolling_backup_count": 9}),
        "set.text.tag_dropout_probability": (0.5, {"text.tag_dropout_enable": True, "text.tag_dropout_mode": "RANDOM"}),
        "set.text.tag_dropout_mode": ("RANDOM", {"text.tag_dropout_enable": True, "text.tag_dropout_probability": 0.5}),
        "set.text.tag_dropout_enable": (True, {"text.tag_dropout_mode": "RANDOM", "text.tag_dropout_probability": 0.5}),
        **{f"set.text.tag_dropout_{name}": ("zz", {"text.tag_dropout_enable": True}) for name in ("special_tags*",)},
        **{f"set.text.caps_randomize_{name}": ("zz", {"text.caps_randomize_enable": True}) for name in ("*",)},
        "set.text.prompt_path": ("zz", {"text.prompt_source": "concept"}),
        "set.balancing_strategy": ("SAMPLES", {"balancing": 3.0}),
        "set.image_variations": (3, {"image.enable_crop_jitter": True}),
        "set.text_variations": (3, {"text.enable_tag_shuffling": True}),
        "set.text.keep_tags_count": (3, {"text.enable_tag_shuffling": True}),
        "set.image.resolution_override": ("768", {"image.enable_resolution_override": True}),
        **{
            f"set.image.random_{name}_{what}": (0.5, {f"image.enable_random_{name}": True})
            for name, what in (
                ("rotate", "max_angle"),
                *((each, "max_strength") for each in ("brightness", "contrast", "saturation", "hue")),
            )
        },
        "unet.weight_dtype": ("NFLOAT_4", {}),
        "transformer.weight_dtype": ("NFLOAT_4", {}),
        "weight_dtype": ("NFLOAT_4", {}),
        "lora_decompose_output_axis": (True, {"lora_decompose": True}),
        **{
            f"lokr_{name}": (value, {"peft_type": "LOKR"})
            for name, value in (("dim", 3), ("decompose_both", True), ("decompose_factor", 8), ("full_matrix", True))
        },
        "layer_filter": ("zz", {"layer_filter_preset": "custom"}),
        "learning_rate_scaler": ("BATCH", {"batch_size": 4, "learning_rate": 1e-4}),
        "learning_rate_cycles": (3, {"learning_rate_scheduler": "COSINE_WITH_RESTARTS"}),
        "layer_offload_fraction": (0.5, {"gradient_checkpointing": "CPU_OFFLOADED"}),
        "ema_decay": (0.9, {"ema": "GPU"}),
        "loss_weight_strength": (3.0, {"loss_weight_fn": "MIN_SNR_GAMMA"}),
        "mse_strength": (0.0, {"mae_strength": 1.0}),
        "text_encoder_2_sequence_length": (256, {}),
        **{f"{part}.offload_fraction": (0.5, {}) for part in ("unet", "transformer")},
        "vae.weight_dtype": ("BFLOAT_16", {}),
        **{f"{part}.weight_dtype": ("NFLOAT_4", {}) for part in ("text_encoder", "text_encoder_2", "text_encoder_3")},
        **{
            f"{part}.train": (True, {"learning_rate": 1e-4})
            for part in ("text_encoder", "text_encoder_2", "text_encoder_3")
        },
        **{
            f"{part}.learning_rate": (1e-5, {f"{part}.train": True})
            for part in ("text_encoder", "text_encoder_2", "text_encoder_3")
        },
        **{
            f"{part}.stop_training_after{unit}": (
                value,
                {f"{part}.train": True, f"{part}.stop_training_after{other}": end},
            )
            for part in ("text_encoder", "text_encoder_2", "text_encoder_3")
            for unit, value, other, end in (("", 3, "_unit", "EPOCH"), ("_unit", "EPOCH", "", 3))
        },
        "output_model_format": ("DIFFUSERS", {}),
        "rolling_backup_count": (9, {"rolling_backup": True}),
        "samples": ([{"prompt": "zz"}], {}),
        "unmasked_probability": (0.5, {"masked_training": True}),
        "unmasked_weight": (0.5, {"masked_training": True}),
        "normalize_masked_area_loss": (True, {"masked_training": True}),
    },
    "diffusion-pipe": {
        "video_clip_mode": ("single_middle", {"frame_buckets": [33]}),
        "model.diffusion_model_dtype": ("float8", {}),
        "eval_every_n_examples": (8, {"eval_datasets": [{"name": "zz"}]}),
        "eval_datasets": ([{"name": "zz"}], {"eval_every_n_steps": 2}),
        "model.transformer_dtype": ("float8", {}),
        "eval_every_n_epochs": (2, {"eval_datasets": [{"name": "zz"}]}),
        "eval_every_n_steps": (2, {"eval_datasets": [{"name": "zz"}]}),
        "monitoring.enable_wandb": (True, {"monitoring.wandb_tracker_name": "zz"}),
        "monitoring.wandb_tracker_name": ("zz", {"monitoring.enable_wandb": True}),
    },
    "sd-scripts": {
        "huggingface_repo_visibility": ("public", {"huggingface_repo_id": "a/b"}),
        "network_args.algo": ("loha", {"network_module": "lycoris.kohya"}),
        "network_args.preset": ("attn-mlp", {"network_module": "lycoris.kohya"}),
        "network_args.dora_wd": (True, {"network_module": "lycoris.kohya"}),
        "network_args.wd_on_output": (False, {"network_module": "lycoris.kohya", "network_args.dora_wd": True}),
        "network_args.conv_alpha": (2, {"network_module": "networks.lora", "network_args.conv_dim": 4}),
        **{
            f"network_args.{name}": (value, {"network_module": "networks.lora_flux"})
            for name, value in (
                *((f"{part}_dim", 2) for part in ("img_attn", "txt_attn", "img_mlp", "txt_mlp", "img_mod", "txt_mod")),
                *((f"{part}_dim", 0) for part in ("single", "single_mod")),
                *((f"train_{part}_block_indices", "0-3,7") for part in ("double", "single")),
                ("train_blocks", "single"),
            )
        },
        "base_weights_multiplier": (0.5, {"base_weights": "zz.safetensors"}),
        "lr_scheduler_num_cycles": (3, {"lr_scheduler": "cosine_with_restarts"}),
        "lr_scheduler_power": (0.5, {"lr_scheduler": "polynomial"}),
        "lr_scheduler_timescale": (9, {"lr_scheduler": "inverse_sqrt"}),
        "lr_decay_steps": (0.5, {"lr_scheduler": "warmup_stable_decay"}),
        "lr_scheduler_min_lr_ratio": (0.1, {"lr_scheduler": "cosine_with_min_lr", "learning_rate": 1e-4}),
        "optimizer_args.decouple": (False, {"optimizer_args.weight_decay": 0.1}),
        "cpu_offload_checkpointing": (True, {"gradient_checkpointing": True}),
        **{
            name: (value, {"loss_type": "huber"})
            for name, value in (("huber_c", 0.3), ("huber_scale", 0.3), ("huber_schedule", "constant"))
        },
        "logit_mean": (0.5, {"weighting_scheme": "logit_normal"}),
        "logit_std": (0.5, {"weighting_scheme": "logit_normal"}),
        "mode_scale": (0.5, {"weighting_scheme": "mode"}),
        "multires_noise_discount": (0.5, {"multires_noise_iterations": 6}),
        "log_with": ("wandb", {}),
        "wandb_*": ("zz", {"log_with": "wandb"}),
        "log_tracker_name": ("zz", {"log_with": "wandb"}),
        "save_last_n_epochs": (2, {"save_every_n_epochs": 1}),
        "save_last_n_steps": (20, {"save_every_n_steps": 10}),
        "text_encoder_lr3": (1e-5, {"network_args.train_t5xxl": True}),
        "masked_loss": (True, {"conditioning_data_dir": "zz"}),
        "conditioning_data_dir": ("zz", {"masked_loss": True}),
        "sample_at_first": (True, {"sample_prompts": "zz"}),
        "set.conditioning_data_dir": ("zz", {"masked_loss": True}),
        **{
            f"{of}{which}_bucket_reso": (512, {"enable_bucket": True})
            for of in ("", "set.")
            for which in ("min", "max")
        },
    },
}
"""Program -> setting -> its value, where None tries the usual ones, and the settings beside it."""
AWAY["kohya's GUI"] = AWAY["sd-scripts"]  # it makes arguments of sd-scripts
AWAY["musubi-tuner"] = AWAY["sd-scripts"] | AWAY["musubi-tuner"]
