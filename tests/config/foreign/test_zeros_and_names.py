"""Numbers that are text, zeros that are values, samplers of prompts, and paths whose folders name other models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flame_train.tools.import_config import import_config

from .test_clips import PIPE, imported

_COMMAND = (
    "accelerate launch src/musubi_tuner/zimage_train_network.py --dit /d.safetensors --vae /v --text_encoder /t "
    "--network_module networks.lora_zimage --network_dim 16 --learning_rate 1e-4 --max_train_steps 100 "
)


def test_a_zero_of_a_command_is_off(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(f"{_COMMAND} --blocks_to_swap 0 --sample_every_n_steps 0\n")
    carried = import_config(str(tmp_path / "train.sh"), None)["carried"]
    assert not {"model.offload", "gradient.checkpointing"} & carried.keys()
    assert carried["sample.every"]["value"] == 0


@pytest.mark.parametrize("zero", [0, "0"])
def test_simpletuners_numbers_are_text_or_not(tmp_path: Path, zero: int | str) -> None:
    """An interval of 0 is never there, and here it is a value: 250 and 500 steps are usual."""
    told = {"model_type": "lora", "model_family": "flux", "snr_gamma": zero, "musubi_blocks_to_swap": zero}
    told |= {"checkpoint_step_interval": zero, "validation_step_interval": zero, "num_validation_images": type(zero)(1)}
    written, _, listed = imported(tmp_path, "config.json", json.dumps(told))
    assert (written["checkpoint"]["every"], written["sample"]["every"]) == (0, 0)
    assert "weighting" not in written["loss"]
    assert "offload" not in written["model"]
    assert not listed
    written, _, _ = imported(
        tmp_path, "config.json", json.dumps(told | {"checkpointing_steps": 70, "validation_steps": 70})
    )
    assert (written["checkpoint"]["every"], written["sample"]["every"]) == (70, 0)  # validation.py:2780, trainer.py:951
    never = {"checkpoint_step_interval": "None", "validation_step_interval": "None"}
    written, _, listed = imported(tmp_path, "config.json", json.dumps(told | never))
    assert "every" not in {**written["checkpoint"], **written.get("sample", {})}
    assert not listed


@pytest.mark.parametrize("batch", ["2", "[[512, 2], [1024, 1]]"])
def test_diffusion_pipe_counts_examples_by_the_first_batch_size(tmp_path: Path, batch: str) -> None:
    """That of images is another (train.py:420, 632)."""
    mode = "image_micro_batch_size_per_gpu = 4\nsave_every_n_examples = 100\ngradient_accumulation_steps = 5"
    text = PIPE.format(mode=mode).replace("micro_batch_size_per_gpu = 2", f"micro_batch_size_per_gpu = {batch}", 1)
    written, _, _ = imported(tmp_path, "pipe.toml", text)
    assert written["checkpoint"]["every"] == 10


@pytest.mark.parametrize(("theirs", "cycles"), [(2.0, 2), (1.75, 2), ("3", 3)])
def test_onetrainers_cycles_are_whole_here(tmp_path: Path, theirs: float | str, cycles: int) -> None:
    """They are a float there (modules/util/lr_scheduler_util.py:72)."""
    told = {"training_method": "LORA", "model_type": "FLUX_DEV_1", "base_model_name": "/m"}
    told |= {"learning_rate_scheduler": "COSINE_WITH_HARD_RESTARTS", "learning_rate_cycles": theirs}
    written, _, listed = imported(tmp_path, "config.json", json.dumps(told))
    assert written["schedule"]["cycles"] == cycles
    assert ("learning_rate_cycles = 1.75: cycles are whole here" in listed) == (theirs == 1.75)


@pytest.mark.parametrize(
    ("model", "theirs", "sampler", "lost"),
    [
        ("STABLE_DIFFUSION_XL_10_BASE", "EULER_A", "euler_ancestral", ""),
        ("STABLE_DIFFUSION_XL_10_BASE", "UNIPC_KARRAS", None, "noise_scheduler = UNIPC_KARRAS of the prompt 'a fox'"),
        ("FLUX_DEV_1", "UNIPC_KARRAS", None, ""),
    ],
)
def test_onetrainers_schedulers_of_samples(
    tmp_path: Path, model: str, theirs: str, sampler: str | None, lost: str
) -> None:
    """Samplers of flow models do not read it (modules/modelSampler/FluxSampler.py:66)."""
    sample = {"enabled": True, "prompt": "a fox", "noise_scheduler": theirs}
    told = {"training_method": "LORA", "model_type": model, "base_model_name": "/m", "samples": [sample]}
    written, _, listed = imported(tmp_path, "config.json", json.dumps(told))
    (prompt,) = written["sample"]["prompts"]
    assert ({} if isinstance(prompt, str) else prompt).get("sampler") == sampler
    assert lost in listed
    assert ("noise_scheduler" in listed) == bool(lost)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/models/mistral/qwen_3_4b.safetensors", "qwen3"),
        ("/models/qwen3/mistral_3_small.safetensors", "mistral"),
        ("/models/mistral/model.safetensors", "mistral"),
        ("/models/model.safetensors", "qwen3"),
    ],
)
def test_the_innermost_name_says_which_decoder_a_file_has(tmp_path: Path, path: str, key: str) -> None:
    text = (
        'output_dir = "/o"\n[model]\ntype = "flux2"\ndtype = "bfloat16"\ndiffusion_model = "/m.safetensors"\n'
        f'vae = "/v.safetensors"\ntext_encoders = [{{path = "{path}", type = "flux2"}}]\n'
        '[adapter]\ntype = "lora"\nrank = 8\n[optimizer]\ntype = "adamw"\nlr = 1e-4\n'
    )
    written, _, _ = imported(tmp_path, "pipe.toml", text)
    assert written["text_encoders"] == {key: path}


@pytest.mark.parametrize(
    ("path", "month"),
    [("/2511/Qwen-Image-Edit-2509", "2509"), ("/2509/Qwen-Image-Edit-2511", "2511"), ("/m", "2509")],
)
def test_the_innermost_name_says_which_month_a_model_is_of(tmp_path: Path, path: str, month: str) -> None:
    process: dict[str, Any] = {
        "type": "sd_trainer",
        "training_folder": "/o",
        "network": {"type": "lora", "linear": 8, "linear_alpha": 8},
        "datasets": [{"folder_path": "/d", "resolution": [512]}],
        "train": {"batch_size": 1, "steps": 10, "lr": 1e-4, "optimizer": "adamw8bit"},
        "model": {"name_or_path": path, "arch": "qwen_image_edit_plus"},
    }
    told = {"job": "extension", "config": {"name": "x", "process": [process]}}
    written, _, _ = imported(tmp_path, "job.yaml", json.dumps(told))
    assert written["model"]["qwen_edit"] == month


@pytest.mark.parametrize(
    ("rates", "listed"),
    [
        ("llm_adapter_lr = 0", []),
        ("", ["llm_adapter_lr"]),
        ("llm_adapter_lr = 0\nself_attn_lr = 1e-4", []),
        ("llm_adapter_lr = 0\nself_attn_lr = 0", ["self_attn_lr"]),
        ("llm_adapter_lr = 1e-5\nmlp_lr = 5e-5", ["llm_adapter_lr", "mlp_lr"]),
    ],
)
def test_layers_of_anima_in_diffusion_pipe(tmp_path: Path, rates: str, listed: list[str]) -> None:
    """A rate of 0 freezes them, and the text's adapter is trained unless it has one (models/cosmos_predict2.py:480)."""
    text = PIPE.format(mode="").replace('"wan"', '"anima"').replace('ckpt_path = "/wan"', rates)
    _, _, lost = imported(tmp_path, "pipe.toml", text)
    names = ("llm_adapter_lr", "self_attn_lr", "mlp_lr")
    assert [name for name in names if name in lost] == listed
