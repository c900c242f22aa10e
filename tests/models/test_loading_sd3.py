"""SD3's transformer as it is published: plain, and in fp8 with a factor beside each weight."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flame_train.errors import ModelFileError
from flame_train.io.safetensors import save_file
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.models.sd3.names import SD3_FILES

FP8 = ml_dtypes.float8_e4m3fn


@pytest.fixture(scope="module")
def arrays():
    """Random weights that fp8 can hold, in fp16."""
    network = MMDiT(MMDiTArch.tiny())
    network.init(np.random.default_rng(0), "float32")
    return {n: w.numpy().astype(FP8).astype(np.float16) for n, w in network.weights()}


def loaded(path):
    return {n: w.numpy() for n, w in SD3_FILES.load(path, "transformer", device="cpu", dtype="float32").weights()}


@pytest.mark.parametrize("which", [("qkv.weight", "fc1.weight"), ("weight",)], ids=["some", "every layer"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_scaled_fp8_transformer(arrays, tmp_path, prefix, which):
    linear = [name for name in arrays if name.endswith(which)]
    tensors = arrays | {name: (4 * arrays[name].astype(np.float32)).astype(FP8) for name in linear}
    scales = {name.replace(".weight", ".scale_weight"): np.array(0.25, np.float32) for name in linear}
    inputs = {name.replace(".weight", ".scale_input"): np.array(1.0, np.float32) for name in linear}
    everything = tensors | scales | inputs | {"scaled_fp8": np.zeros(0, FP8)}
    save_file(tmp_path / "sd3.5_fp8_scaled.safetensors", {prefix + name: x for name, x in everything.items()})
    found = loaded(tmp_path / "sd3.5_fp8_scaled.safetensors")
    assert found.keys() == arrays.keys()
    for name, weight in found.items():
        expected = tensors[name].astype(np.float32) / (4 if name in linear else 1)
        np.testing.assert_array_equal(weight, expected, err_msg=name)


def test_what_has_no_place_is_still_named(arrays, tmp_path):
    save_file(tmp_path / "odd.safetensors", arrays | {"joint_blocks.0.x_block.odd.weight": np.zeros(3, np.float16)})
    with pytest.raises(ModelFileError, match=r"unexpected: 1\n    joint_blocks\.0\.x_block\.odd\.weight"):
        loaded(tmp_path / "odd.safetensors")
