"""What a LoRA file says of itself: kohya's and modelspec's keys, and hashes as kohya's program finds them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy

from flame_train.adapters.metadata import model_spec, network_metadata, with_hashes
from tests.adapters.test_formats import SDXL, factors_for, state_of


class TestMetadata:
    def test_minimum_keys(self):
        state = state_of("lora_kohya_sdxl", alpha=1.0)
        assert network_metadata(state, SDXL) == {
            "ss_v2": "False",
            "ss_base_model_version": "sdxl_base_v1-0",
            "ss_network_module": "networks.lora",
            "ss_network_dim": "2",
            "ss_network_alpha": "1.0",
            "ss_network_args": "{}",
        }
        state["unet"]["input_blocks.0.0"] = factors_for((5, 5), rank=3, alpha=2.0)
        assert network_metadata(state, SDXL)["ss_network_dim"] == "Dynamic"

    def test_kernels_have_arguments_of_their_own(self):
        """As kohya writes a LoCon of `conv_dim=2`, `conv_alpha=1`: its width is that of linear layers."""
        state = state_of("lora_kohya_sdxl", alpha=8.0)
        kernel = replace(factors_for((5, 5), rank=2, alpha=1.0), down=np.zeros((2, 5, 3, 3), np.float32))
        state["unet"]["input_blocks.1.0.in_layers.2"] = kernel
        found = network_metadata(state, SDXL)
        assert (found["ss_network_dim"], found["ss_network_alpha"]) == ("2", "8.0")
        assert json.loads(found["ss_network_args"]) == {"conv_dim": "2", "conv_alpha": "1"}

    def test_model_spec(self):
        assert model_spec(SDXL, "my dog", {"author": "me"}) == {
            "modelspec.sai_model_spec": "1.0.1",
            "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
            "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
            "modelspec.title": "my dog",
            "modelspec.resolution": "1024x1024",
            "modelspec.author": "me",
        }

    @pytest.mark.parametrize("size", [10, 200_000, 400_000])
    def test_hashes_over_a_file_written_by_the_package(self, size):
        tensors = {
            "a.lora_down.weight": np.arange(size, dtype=np.float32),
            "b.alpha": np.array(1, np.float16),
        }
        metadata = {"ss_v2": "False", "modelspec.title": "left out of the hashed file", "format": "pt"}
        found = with_hashes(tensors, metadata)
        raw = safetensors.numpy.save(tensors, {"ss_v2": "False"})
        begin = 8 + int.from_bytes(raw[:8], "little")
        model_hash = hashlib.sha256(raw[begin:]).hexdigest()
        assert found == metadata | {
            "sshs_model_hash": model_hash,
            "sshs_legacy_hash": hashlib.sha256(raw[0x100000:0x110000]).hexdigest()[:8],
            "modelspec.hash_sha256": f"0x{model_hash}",
        }
