"""Scales from PEFT's configuration in a file's metadata: which pattern is meant, and what is not tried."""

from __future__ import annotations

import json

import pytest

from flame_train.adapters.metadata import peft_scales


def scales(patterns, **more):
    config = {"unet.lora_alpha": 8, "unet.alpha_pattern": patterns, **more}
    return peft_scales({"lora_adapter_metadata": json.dumps(config)})


@pytest.mark.parametrize(
    ("patterns", "scale"),
    [
        ({"to_q": 3}, 1.5),
        ({"attn1.to_q": 3}, 1.5),
        ({"o_q": 3}, 4),  # no part of a name
        ({"to": 3}, 4),
        ({"^to_q": 3}, 4),  # the whole path begins elsewhere
        ({"^down.0.attn1.to_q": 3}, 1.5),
        ({r"down\.\d+\..*to_[qk]": 3}, 1.5),
        ({"to_q": 3, "attn1.to_q": 4}, 1.5),  # the first that fits
        ({"attn1.to_k": 3, "attn1.to_q": 4}, 2),
        ({"to_q": "many"}, None),  # makes no sense: then nothing is said
    ],
)
def test_the_first_pattern_that_fits_a_path_or_what_follows_a_dot_in_it(patterns, scale):
    assert scales(patterns)("unet", "down.0.attn1.to_q", 2) == scale


def test_each_component_has_its_own():
    scale = scales({"to_q": 3}, **{"text_encoder.lora_alpha": 5})
    assert (scale("text_encoder", "to_q", 2), scale("text_encoder_2", "to_q", 2)) == (5 / 2, None)


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", r"(a+)+b", r"(a|a)*b", ".*.*.*.*x", "a" * 301])
def test_a_pattern_that_is_none_or_could_take_forever_is_refused(pattern):
    with pytest.raises(ValueError, match="alpha_pattern"):
        scales({pattern: 3})
