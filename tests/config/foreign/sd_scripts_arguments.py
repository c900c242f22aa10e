"""The arguments of sd-scripts' trainers of LoRAs, by the file that declares them (kohya-ss/sd-scripts@48d368f)."""

from __future__ import annotations

ARGUMENTS: dict[str, str] = {
    "train_util.py": """
        v2 v_parameterization pretrained_model_name_or_path tokenizer_cache_dir optimizer_type use_8bit_adam
        use_lion_optimizer learning_rate max_grad_norm optimizer_args lr_scheduler_type lr_scheduler_args
        lr_scheduler lr_warmup_steps lr_decay_steps lr_scheduler_num_cycles lr_scheduler_power
        fused_backward_pass lr_scheduler_timescale lr_scheduler_min_lr_ratio output_dir output_name
        huggingface_repo_id huggingface_repo_type huggingface_path_in_repo huggingface_token
        huggingface_repo_visibility save_state_to_huggingface resume_from_huggingface async_upload
        save_precision save_every_n_epochs save_every_n_steps save_n_epoch_ratio save_last_n_epochs
        save_last_n_epochs_state save_last_n_steps save_last_n_steps_state save_state save_state_on_train_end
        resume train_batch_size max_token_length mem_eff_attn torch_compile dynamo_backend xformers sdpa vae
        max_train_steps max_train_epochs max_data_loader_n_workers persistent_data_loader_workers seed
        gradient_checkpointing gradient_accumulation_steps mixed_precision full_fp16 full_bf16 fp8_base
        ddp_timeout ddp_gradient_as_bucket_view ddp_static_graph clip_skip logging_dir log_with log_prefix
        log_tracker_name wandb_run_name log_tracker_config wandb_api_key log_config noise_offset
        noise_offset_random_strength multires_noise_iterations ip_noise_gamma ip_noise_gamma_random_strength
        multires_noise_discount adaptive_noise_scale zero_terminal_snr min_timestep max_timestep loss_type
        huber_schedule huber_c huber_scale lowram highvram sample_every_n_steps sample_at_first
        sample_every_n_epochs sample_prompts sample_sampler config_file output_config prior_loss_weight
        conditioning_data_dir masked_loss cache_text_encoder_outputs cache_text_encoder_outputs_to_disk
        text_encoder_batch_size disable_mmap_load_safetensors weighting_scheme logit_mean logit_std mode_scale
        blocks_to_swap train_data_dir cache_info shuffle_caption caption_separator caption_extension
        caption_extention keep_tokens keep_tokens_separator secondary_separator enable_wildcard caption_prefix
        caption_suffix color_aug flip_aug face_crop_aug_range random_crop debug_dataset resolution cache_latents
        vae_batch_size cache_latents_to_disk skip_cache_check enable_bucket min_bucket_reso max_bucket_reso
        bucket_reso_steps bucket_no_upscale resize_interpolation token_warmup_min token_warmup_step alpha_mask
        dataset_class caption_dropout_rate caption_dropout_every_n_epochs caption_tag_dropout_rate reg_data_dir
        in_json dataset_repeats save_model_as use_safetensors
    """,
    "sd3_train_utils.py": """
        clip_l clip_g t5xxl save_clip save_t5xxl t5xxl_device t5xxl_dtype t5xxl_max_token_length
        apply_lg_attn_mask apply_t5_attn_mask clip_l_dropout_rate clip_g_dropout_rate t5_dropout_rate
        pos_emb_random_crop_rate enable_scaled_pos_embed training_shift
    """,
    "flux_train_utils.py": """
        ae controlnet_model_name_or_path guidance_scale timestep_sampling sigmoid_scale model_prediction_type
        discrete_flow_shift model_type
    """,
    "anima_train_utils.py": """
        qwen3 llm_adapter_path llm_adapter_lr self_attn_lr cross_attn_lr mlp_lr mod_lr t5_tokenizer_path
        qwen3_max_token_length t5_max_token_length attn_mode split_attn vae_chunk_size vae_disable_cache
    """,
    "config_util.py": """
        dataset_config
    """,
    "custom_train_functions.py": """
        min_snr_gamma scale_v_pred_loss_like_noise_pred v_pred_like_loss debiased_estimation_loss
        weighted_captions
    """,
    "deepspeed_utils.py": """
        deepspeed zero_stage offload_optimizer_device offload_optimizer_nvme_path offload_param_device
        offload_param_nvme_path zero3_init_flag zero3_save_16bit_model fp16_master_weights_and_gradients
    """,
    "sai_model_spec.py": """
        metadata_title metadata_author metadata_description metadata_license metadata_tags metadata_usage_hint
        metadata_thumbnail metadata_merged_from metadata_trigger_phrase metadata_preprocessor
        metadata_is_negative_embedding
    """,
    "utils.py": """
        console_log_level console_log_file console_log_simple
    """,
    "train_network.py": """
        cpu_offload_checkpointing no_metadata unet_lr text_encoder_lr fp8_base_unet network_weights
        network_module network_dim network_alpha network_dropout network_args network_train_unet_only
        network_train_text_encoder_only training_comment dim_from_weights scale_weight_norms base_weights
        base_weights_multiplier no_half_vae skip_until_initial_step initial_epoch initial_step validation_seed
        validation_split validate_every_n_steps validate_every_n_epochs max_validation_steps
    """,
    "flux_train_network.py": """
        split_mode
    """,
    "anima_train_network.py": """
        unsloth_offload_checkpointing
    """,
}
