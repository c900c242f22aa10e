"""A LoRA file's metadata beside sd-scripts': each key that its train_network.py writes is here, or has a reason."""

from __future__ import annotations

import json
import shutil

import pytest

from flame_train.config.render import resolved
from flame_train.io.safetensors import SafetensorsFile
from flame_train.run.check.check_run import check
from flame_train.run.commands.dataset_report import report
from flame_train.run.commands.stages import train_plan
from flame_train.run.finish.sd_scripts_metadata import as_sd_scripts
from flame_train.run.plan.plan import make_plan
from flame_train.training.session import Session, StopRequest

WRITTEN = """
    adaptive_noise_scale base_model_version batch_size_per_device bucket_info bucket_no_upscale cache_latents
    caption_dropout_rate caption_tag_dropout_rate color_aug dataset_dirs debiased_estimation enable_bucket
    flip_aug fp8_base gradient_accumulation_steps huber_c huber_scale huber_schedule
    ip_noise_gamma ip_noise_gamma_random_strength keep_tokens learning_rate loss_type lr_scheduler
    lr_warmup_steps max_bucket_reso max_grad_norm max_token_length max_train_steps min_bucket_reso
    min_snr_gamma mixed_precision multires_noise_discount multires_noise_iterations network_alpha network_args
    network_dim network_dropout network_module noise_offset noise_offset_random_strength num_batches_per_epoch
    num_epochs num_reg_images num_train_images optimizer output_name prior_loss_weight random_crop
    reg_dataset_dirs resolution scale_weight_norms sd_model_name seed shuffle_caption steps tag_frequency
    text_encoder_lr total_batch_size unet_lr v2 vae_name zero_terminal_snr
""".split()
"""Without ss_; as of November 2026."""

NOT_HERE = {
    "the hour or the host": "session_id training_started_at training_finished_at",
    "sd-scripts' own switches": "sd_scripts_commit_hash lowram full_fp16 fp8_base_unet resize_interpolation",
    "a comment": "training_comment",
    "always the same here": "face_crop_aug_range caption_dropout_every_n_epochs",
    "hashes of whole files": "sd_model_hash new_sd_model_hash vae_hash new_vae_hash",
    "no weight depends on it": "num_validation_images validation_seed validation_split max_validation_steps",
    "nor on these": "validate_every_n_epochs validate_every_n_steps gradient_checkpointing",
    "ss_steps says it": "epoch",
    "each folder's settings are in the config that the file carries": "datasets",
}


def test_folders_named_for_repeats_are_kohyas_sets(small_config, small_base, drawn, tmp_path):
    """`ss_dataset_dirs` and the tags by folder, as a folder of N_name is a set there; the epoch of the report too."""
    for name, pictures in (("3_fox", sorted(drawn.glob("*.png"))[:2]), ("1_hill", sorted(drawn.glob("*.png"))[2:3])):
        for picture in pictures:
            for source in (picture, picture.with_suffix(".txt")):
                (tmp_path / "all" / name).mkdir(parents=True, exist_ok=True)
                shutil.copy(source, tmp_path / "all" / name / source.name)
    config = small_config(
        model={"checkpoint": str(small_base), "vae": str(small_base)},
        data={"path": str(tmp_path / "all"), "resolution": 64, "folder_repeats": True, "repeats": 2},
        sample={"every": 0},
    )
    plan = make_plan(check(config), StopRequest())
    found = as_sd_scripts(plan.config, plan.samples, 4, "x")
    assert json.loads(found["ss_dataset_dirs"]) == {
        "1_hill": {"n_repeats": 2, "img_count": 1},
        "3_fox": {"n_repeats": 6, "img_count": 2},
    }
    assert set(json.loads(found["ss_tag_frequency"])) == {"1_hill", "3_fox"}
    (tmp_path / "x.toml").write_text(resolved(config))
    told = report(str(tmp_path / "x.toml"), [], tmp_path / "report", False)
    assert told["samples_per_epoch"] == plan.order.samples_per_epoch == 14
    assert told["sets"][0]["repeats"] == "2 6"


@pytest.fixture
def metadata(small_config, small_base, drawn):
    """Of a run with much switched on."""
    config = small_config(
        model={"checkpoint": str(small_base), "vae": str(small_base)},
        data={"path": str(drawn), "resolution": 64, "flip": True, "repeats": 2},
        captions={"shuffle": True, "keep_tokens": 1},
        text_encoders={"train": ("clip_l",)},
        loss={"kind": "huber", "weighting": "min_snr", "snr_gamma": 5.0, "offset_noise": 0.05},
        train={"steps": 1},
        sample={"every": 0},
    )
    stop = StopRequest()
    done = train_plan(make_plan(check(config), stop), Session("cpu", stop=stop))
    with SafetensorsFile(done["lora"]) as file:
        return dict(file.metadata)


def test_each_key_is_here_or_has_a_reason(metadata, drawn):
    ours = {key.removeprefix("ss_") for key in metadata if key.startswith("ss_")}
    assert set(WRITTEN) <= ours
    assert not ours & {key for keys in NOT_HERE.values() for key in keys.split()}
    assert metadata["ss_loss_type"] == "huber"
    assert (metadata["ss_min_snr_gamma"], metadata["ss_noise_offset"]) == ("5.0", "0.05")
    assert (metadata["ss_flip_aug"], metadata["ss_random_crop"]) == ("True", "False")
    assert metadata["ss_ip_noise_gamma"] == "None"


def test_forge_can_count_images_and_sizes(metadata, drawn):
    """As its page of a LoRA does: images by bucket, and by folder with repeats."""
    images = len(list(drawn.glob("*.png")))
    buckets = json.loads(metadata["ss_bucket_info"])["buckets"].values()
    assert sum(bucket["count"] for bucket in buckets) == 2 * images
    assert all(len(bucket["resolution"]) == 2 for bucket in buckets)
    assert json.loads(metadata["ss_dataset_dirs"]) == {drawn.name: {"n_repeats": 2, "img_count": images}}
    assert json.loads(metadata["ss_reg_dataset_dirs"]) == {}
