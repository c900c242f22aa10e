"""A key that does not exist is answered with the one that was meant."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame_train.config.keys import keys
from flame_train.config.suggest import nearest


def edits(word: str) -> st.SearchStrategy[str]:
    """Every word one deletion, insertion, replacement or exchange of neighbours away."""
    letters = "abcdefghijklmnopqrstuvwxyz_"
    places = range(len(word))
    words = [word[:i] + word[i + 1 :] for i in places if len(word) > 1]
    words += [word[:i] + c + word[i + 1 :] for i in places for c in letters]
    words += [word[:i] + c + word[i:] for i in range(len(word) + 1) for c in letters]
    words += [word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in places[:-1]]
    return st.sampled_from(words)


@settings(max_examples=300)
@given(st.sampled_from(sorted(keys())).flatmap(lambda path: st.tuples(st.just(path), edits(path.partition(".")[2]))))
def test_a_typo_of_one_edit_is_told_the_key(pair: tuple[str, str]) -> None:
    path, typo = pair
    wrong = f"{path.partition('.')[0]}.{typo}"
    if wrong not in keys():
        assert path in nearest(wrong)


ELSEWHERE = {  # options of sd-scripts', diffusers' and ai-toolkit's trainers
    "pretrained_vae_model_name_or_path": "model.vae",
    "ae": "model.vae",
    "t5xxl": "text_encoders.t5",
    "t5xxl_max_token_length": "text_encoders.t5_tokens",
    "max_sequence_length": "text_encoders.t5_tokens",
    "instance_data_dir": "data.path",
    "instance_prompt": "data.caption",
    "class_tokens": "data.caption",
    "adam_weight_decay": "optimizer.weight_decay",
    "num_train_epochs": "train.epochs",
    "validation_prompt": "sample.prompts",
    "report_to": "output.tensorboard",
    "logging_dir": "output.tensorboard",
    "linear": "lora.rank",
    "linear_alpha": "lora.alpha",
    "lr_num_cycles": "schedule.cycles",
    "sigmoid_scale": "loss.logit_std",
    "timesteps": "loss.timestep_sampling",
    "timestep_mean": "loss.logit_mean",
    "timestep_type": "loss.timestep_sampling",
    "recompute_only": "gradient.checkpoint_blocks",
    "fp8": "model.quantize",
    "t5_fp8": "text_encoders.precision",
    "min_snr_gamma": "loss.snr_gamma",
    "lr_scheduler": "schedule.name",
    "optimizer_type": "optimizer.name",
    "cpu_offload_checkpointing": "gradient.checkpointing",
}


@pytest.mark.parametrize(("name", "path"), ELSEWHERE.items())
def test_options_of_other_trainers_find_their_key(name, path):
    assert path in nearest(name)
    assert path in nearest(f"train.{name}")
    assert nearest(f"{path.partition('.')[0]}.{name}")[0] == path, "whatever else is spelled like it there"
