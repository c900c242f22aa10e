"""The licences of published weights: found by the names that checkpoints have, and told with their source."""

from __future__ import annotations

import pytest

from flame_train.families import FAMILY_TITLES, licence_of, licences


@pytest.mark.parametrize(
    ("family", "checkpoint", "model"),
    [
        ("flux", "models/flux1-schnell.safetensors", "FLUX.1-schnell"),
        ("flux", "C:\\models\\flux1-dev-fp8.safetensors", "FLUX.1-dev"),
        ("flux", "hf:black-forest-labs/FLUX.1-dev/flux1-dev.safetensors", "FLUX.1-dev"),
        ("flux", "/c/models--black-forest-labs--FLUX.1-Krea-dev/snapshots/0a", "FLUX.1-Krea-dev"),
        ("flux", "hf:owner/FLUX.1-dev-tuned", None),  # somebody else's, with terms of its own
        ("flux", "fluxDevMerge.safetensors", None),
        ("flux2", "flux-2-klein-base-9b.safetensors", "FLUX.2-klein-base-9B"),
        ("flux2", "hf:black-forest-labs/FLUX.2-klein-4B", "FLUX.2-klein-4B"),
        ("flux2", "flux2_dev_fp8mixed.safetensors", "FLUX.2-dev"),
        ("sdxl", "sd_xl_base_1.0_0.9vae.safetensors", "stable-diffusion-xl-base-1.0"),
        ("zimage", "z_image_turbo_bf16.safetensors", "Z-Image-Turbo"),
        ("sd3", "sd3.5_large.safetensors", "stable-diffusion-3.5-large"),
    ],
)
def test_a_licence_is_found_by_the_name_of_published_weights_alone(family, checkpoint, model):
    known = licence_of(family, checkpoint)
    assert (known and known["model"].rpartition("/")[2]) == model


@pytest.mark.parametrize("family", FAMILY_TITLES)
def test_each_family_has_a_source_with_a_date(family):
    assert licences(family)
    assert all(each.source.startswith("https://") and each.read.year >= 2026 for each in licences(family))
    assert all(each.is_of(f"hf:{each.model}") for each in licences(family))
