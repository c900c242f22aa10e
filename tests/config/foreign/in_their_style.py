"""A dozen configs as users of other trainers have them: each program's layout and keys, with values of our own."""

from __future__ import annotations

SD_FLAT = """\
pretrained_model_name_or_path = "/models/illustrious.safetensors"
train_data_dir = "/data/fox"
reg_data_dir = ""
output_dir = "/out"
output_name = "fox"
network_module = "networks.lora"
network_dim = 32
network_alpha = 16
unet_lr = 2e-4
text_encoder_lr = 1e-5
learning_rate = 1e-4
optimizer_type = "Prodigy"
optimizer_args = ["d_coef=0.8", "weight_decay=0.1", "betas=0.9,0.99", "decouple=True"]
lr_scheduler = "cosine_with_restarts"
lr_scheduler_num_cycles = 3
lr_warmup_steps = 0.05
max_train_epochs = 10
max_train_steps = 9999
save_every_n_epochs = 1
save_last_n_epochs = 4
train_batch_size = 4
resolution = "1024,1024"
enable_bucket = true
bucket_no_upscale = true
min_snr_gamma = 5
noise_offset = 0.0357
clip_skip = 2
mixed_precision = "bf16"
save_precision = "fp16"
caption_extension = ".txt"
shuffle_caption = true
keep_tokens = 1
cache_latents = true
xformers = true
max_data_loader_n_workers = 8
gradient_checkpointing = true
seed = 7
"""

SD_SECTIONS = """\
[model_arguments]
pretrained_model_name_or_path = "/models/noob-vpred.safetensors"
v_parameterization = true
zero_terminal_snr = true
[additional_network_arguments]
network_module = "lycoris.kohya"
network_dim = 8
network_alpha = 4
network_args = ["algo=lokr", "factor=8", "preset=attn-mlp"]
[optimizer_arguments]
learning_rate = 0.0005
optimizer_type = "AdamW8bit"
lr_scheduler = "constant_with_warmup"
lr_warmup_steps = 100
[dataset_arguments]
train_data_dir = "/data/pony"
resolution = "768,1024"
flip_aug = true
[training_arguments]
output_dir = "/out"
max_train_steps = 1500
save_every_n_steps = 300
save_last_n_steps = 900
debiased_estimation_loss = true
"""

SD_DATASET = """\
[general]
caption_extension = ".txt"
[[datasets]]
resolution = 1024
batch_size = 2
[[datasets.subsets]]
image_dir = "/data/portraits"
num_repeats = 5
class_tokens = "ohwx man"
"""

SD_COMMAND = """\
#!/bin/sh
accelerate launch --num_cpu_threads_per_process 1 flux_train_network.py \\
  --pretrained_model_name_or_path=/models/flux1-dev.safetensors \\
  --clip_l /models/clip_l.safetensors --t5xxl /models/t5xxl.safetensors --ae="/models/ae.safetensors" \\
  --dataset_config set.toml --output_dir /out --output_name portrait \\
  --network_module networks.lora_flux --network_dim 16 --network_alpha 16 \\
  --network_args "train_blocks=single" --learning_rate 1e-4 --optimizer_type adafactor \\
  --optimizer_args "relative_step=False" "scale_parameter=False" "warmup_init=False" \\
  --timestep_sampling shift --discrete_flow_shift 3.1582 --model_prediction_type raw --guidance_scale 1.0 \\
  --fp8_base --blocks_to_swap 18 --gradient_checkpointing --mixed_precision bf16 --save_precision bf16 \\
  --max_train_epochs 4
"""

AI_TOOLKIT = """\
---
job: extension
config:
  name: "tile_v1"
  process:
    - type: 'sd_trainer'
      training_folder: "output"
      device: cuda:0
      trigger_word: "t1le"
      network: {type: "lora", linear: 32, linear_alpha: 8}
      save: {dtype: bf16, save_every: 200, max_step_saves_to_keep: 3, push_to_hub: false}
      datasets:
        - folder_path: "/data/tiles"
          caption_ext: "txt"
          caption_dropout_rate: 0.05
          shuffle_tokens: true
          cache_latents_to_disk: true
          resolution: [512, 768, 1024]
      train:
        batch_size: 2
        steps: 1800
        gradient_accumulation_steps: 1
        train_unet: true
        train_text_encoder: false
        gradient_checkpointing: true
        noise_scheduler: "flowmatch"
        optimizer: "adamw8bit"
        optimizer_params: {weight_decay: 1e-4}
        lr: 1e-4
        ema_config: {use_ema: true, ema_decay: 0.99}
        diff_output_preservation: true
        dtype: bf16
      model: {name_or_path: "black-forest-labs/FLUX.1-dev", is_flux: true, quantize: true,
        attn_masking: true, layer_offloading: true}
      sample:
        sampler: "flowmatch"
        sample_every: 200
        width: 1024
        height: 1024
        prompts:
          - "[trigger] on a wall"
        neg: ""
        seed: 42
        walk_seed: true
        guidance_scale: 4
        sample_steps: 20
meta: {name: "[name]", version: '1.0'}
"""

AI_TOOLKIT_SDXL = """\
job: extension
config:
  name: style
  process:
    - type: diffusion_trainer
      training_folder: out
      network: {type: lokr, lokr_full_rank: true, lokr_factor: 8}
      save: {dtype: float16, save_every: 250}
      datasets: [{folder_path: /data/style, resolution: 1024, num_repeats: 2}]
      train:
        {batch_size: 4, steps: 3000, optimizer: automagic, lr: 1e-6, noise_offset: 0.05, min_snr_gamma: 5, dtype: bf16}
      model: {name_or_path: /models/sdxl.safetensors, arch: sdxl}
      sample:
        {sample_every: 250, samples: [{prompt: a house, seed: 3}, {prompt: a boat}], neg: blurry, guidance_scale: 7}
"""

ONETRAINER_PRESET = """\
{
    "base_model_name": "stabilityai/stable-diffusion-3.5-medium",
    "model_type": "STABLE_DIFFUSION_35",
    "training_method": "LORA",
    "batch_size": 4,
    "learning_rate": 0.0003,
    "resolution": "1024",
    "output_model_destination": "models/medium.safetensors",
    "transformer": {"train": true, "weight_dtype": "NFLOAT_4"},
    "text_encoder_3": {"train": false, "weight_dtype": "FLOAT_8"},
    "timestep_distribution": "LOGIT_NORMAL",
    "timestep_shift": 3.0
}
"""

ONETRAINER_CONFIG = """\
{
    "__version": 10,
    "training_method": "LORA",
    "model_type": "STABLE_DIFFUSION_XL_10_BASE",
    "base_model_name": "/models/sdxl.safetensors",
    "output_model_destination": "models/knight.safetensors",
    "output_dtype": "BFLOAT_16",
    "concepts": [
        {"__version": 2, "path": "/data/knight", "enabled": true, "balancing": 3.0, "type": "STANDARD",
         "text": {"prompt_source": "sample"}},
        {"path": "/data/off", "enabled": false}
    ],
    "samples": [{"enabled": true, "prompt": "a knight", "seed": 4, "width": 832, "height": 1216, "cfg_scale": 6.0}],
    "sample_after": 2, "sample_after_unit": "EPOCH",
    "save_every": 500, "save_every_unit": "STEP",
    "backup_after": 30, "backup_after_unit": "MINUTE",
    "learning_rate_scheduler": "REX",
    "learning_rate": 0.0001,
    "learning_rate_scaler": "BATCH",
    "learning_rate_warmup_steps": 100.0,
    "epochs": 20,
    "batch_size": 4,
    "resolution": "1024",
    "train_dtype": "BFLOAT_16",
    "gradient_checkpointing": "CPU_OFFLOADED", "layer_offload_fraction": 0.7,
    "ema": "GPU", "ema_decay": 0.995,
    "loss_weight_fn": "MIN_SNR_GAMMA", "loss_weight_strength": 3.0,
    "max_noising_strength": 0.9,
    "lora_rank": 16, "lora_alpha": 4.0, "peft_type": "LORA", "lora_decompose": true,
    "layer_filter_preset": "attn-only",
    "optimizer": {"optimizer": "PRODIGY", "beta1": 0.9, "beta2": 0.99, "d_coef": 0.8, "fused": false},
    "text_encoder": {"train": true},
    "unet": {"learning_rate": null, "weight_dtype": "FLOAT_8"},
    "masked_training": false,
    "dataloader_threads": 4
}
"""

SIMPLETUNER = """\
{
    "--model_family": "sd3",
    "--model_type": "lora",
    "--lora_type": "standard",
    "--lora_rank": 64,
    "--pretrained_model_name_or_path": "/models/sd35",
    "--data_backend_config": "config/backends.json",
    "--output_dir": "output/sd3",
    "--learning_rate": 8e-5,
    "--optimizer": "adamw_bf16",
    "--lr_scheduler": "polynomial",
    "--lr_warmup_steps": 50,
    "--max_train_steps": 2000,
    "--num_train_epochs": 0,
    "--train_batch_size": 2,
    "--max_grad_norm": 1.0,
    "--grad_clip_method": "norm",
    "--flow_schedule_shift": 3,
    "--base_model_precision": "int8-quanto",
    "--checkpointing_steps": 250,
    "--checkpoints_total_limit": 2,
    "--validation_prompt": "a lighthouse",
    "--validation_resolution": "1024x768",
    "--validation_steps": 100,
    "--push_to_hub": true
}
"""

SIMPLETUNER_BACKENDS = """\
[
  {"id": "light", "type": "local", "instance_data_dir": "/data/lights", "resolution": 1.0,
   "resolution_type": "area", "crop": false, "repeats": 4, "caption_strategy": "textfile"},
  {"id": "text", "type": "local", "dataset_type": "text_embeds", "cache_dir": "cache/text"}
]
"""

DIFFUSION_PIPE = """\
output_dir = '/out/flux'
dataset = 'dataset.toml'
epochs = 60
micro_batch_size_per_gpu = 2
gradient_accumulation_steps = 4
gradient_clipping = 1.0
warmup_steps = 20
pipeline_stages = 1
save_every_n_epochs = 5
checkpoint_every_n_minutes = 120
activation_checkpointing = true
save_dtype = 'bfloat16'
[model]
type = 'flux'
diffusers_path = '/models/FLUX.1-dev'
dtype = 'bfloat16'
transformer_dtype = 'float8'
flux_shift = true
[adapter]
type = 'lora'
rank = 32
dtype = 'bfloat16'
[optimizer]
type = 'adamw_optimi'
lr = 2e-5
betas = [0.9, 0.99]
weight_decay = 0.01
eps = 1e-8
"""

DIFFUSION_PIPE_DATASET = """\
resolutions = [512]
enable_ar_bucket = true
min_ar = 0.5
[[directory]]
path = '/data/gray'
num_repeats = 3
"""

ERIDIFFUSION = """\
model_kind: sd3
bf16_params: true
steps: 1200
batch_size: 1
grad_accum_steps: 2
lr: 0.0001
optimizer: adamw
sd35_model_path: "/models/sd35.safetensors"
sd35_vae_path: "/models/vae.safetensors"
sd35_clip_l_path: "/models/clip_l.safetensors"
sd35_clip_g_path: "/models/clip_g.safetensors"
sd35_t5_path: "/models/t5.safetensors"
sd35_clip_l_tokenizer: "/models/clip_l.json"
"""
