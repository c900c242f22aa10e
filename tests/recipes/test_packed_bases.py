"""Bases in fewer bits train what a file of the same numbers trains: GGUF and ComfyUI's 8 bits."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from flame_train.io.safetensors import save_file
from flame_train.tools.inspect import inspect_file
from tests.run_files import arrays_of


def is_matrix(array):
    return array.ndim == 2 and array.shape[1] % 32 == 0


def as_gguf(base, path):
    """The file in Q8_0, and the numbers that this leaves."""
    left = {}
    writer = gguf.GGUFWriter(path, "flux")
    for name, array in arrays_of(base).items():
        packed = quants.quantize(array.astype(np.float32), Kind.Q8_0) if is_matrix(array) else None
        left[name] = array if packed is None else quants.dequantize(packed, Kind.Q8_0)
        writer.add_tensor(
            name,
            array.astype(np.float32) if packed is None else packed,
            raw_dtype=None if packed is None else Kind.Q8_0,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return left


def as_int8(base, path):
    stored, left = {}, {}
    for name, array in arrays_of(base).items():
        stored[name] = left[name] = array
        if is_matrix(array) and name.endswith(".weight") and "embedding" not in name:
            layer, scale = name.removesuffix(".weight"), np.abs(array).max(1, keepdims=True).astype(np.float32) / 127
            scale = np.maximum(scale, 1e-12)
            stored[name] = np.rint(array.astype(np.float32) / scale).astype(np.int8)
            left[name] = stored[name] * scale
            stored[f"{layer}.weight_scale"] = scale
            text = json.dumps({"format": "int8_tensorwise"}).encode()
            stored[f"{layer}.comfy_quant"] = np.frombuffer(text, np.uint8)
    save_file(str(path), stored)
    return left


@pytest.mark.parametrize(
    ("family", "write", "end"),
    [
        ("sdxl", as_gguf, "gguf"),
        pytest.param("sd3", as_gguf, "gguf", marks=pytest.mark.proof),
        ("flux", as_gguf, "gguf"),
        ("flux", as_int8, "safetensors"),
    ],
)
def test_a_packed_base_trains_as_its_numbers_do(train_small, tmp_path, family, write, end):
    assert train_small(family, "--set", f"output.dir={tmp_path / 'none'}", "--dry-run") == 0  # writes the base

    base = tmp_path / family / "base.safetensors"
    packed, plain = base.with_name(f"packed.{end}"), base.with_name("left.safetensors")
    left = write(base, packed)
    save_file(str(plain), left)
    runs = []
    for name, checkpoint in (("packed", packed), ("left", plain)):
        settings = (
            f"model.checkpoint={checkpoint}",
            f"output.dir={tmp_path / name}",
            f"data.cache={tmp_path / name}.c",
        )
        assert train_small(family, *(word for setting in settings for word in ("--set", setting))) == 0
        runs.append(arrays_of(tmp_path / name / "lora.safetensors"))
    assert runs[0].keys() == runs[1].keys()
    for name, array in runs[0].items():
        np.testing.assert_array_equal(array, runs[1][name])
    assert inspect_file(packed).identity.kind == "checkpoint"
