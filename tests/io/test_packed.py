"""Weights that ComfyUI packed, written here by its format's definition, and what is refused."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from flame_train.engine import nn
from flame_train.errors import ModelFileError
from flame_train.io.safetensors import save_file
from flame_train.io.weights import open_weights, sampled_digest

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((6, 256)).astype(np.float32)


def said(**settings):
    return np.frombuffer(json.dumps(settings).encode(), np.uint8)


def rounded(weight, scale):
    return np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)


def opened(tmp_path, tensors, metadata=None):
    save_file(str(tmp_path / "x.safetensors"), tensors, metadata)
    return open_weights(tmp_path / "x.safetensors")


def row_scales(weight):
    return np.abs(weight).max(1, keepdims=True) / np.float32(127)


def test_8_bits_with_a_scale_for_each_row(tmp_path):
    scale = row_scales(WEIGHT)
    tensors = {
        "a.weight": rounded(WEIGHT, scale),
        "a.weight_scale": scale,
        "a.comfy_quant": said(format="int8_tensorwise"),
    }
    with opened(tmp_path, tensors | {"a.bias": np.zeros(6, np.float32)}) as file:
        assert sorted(file.names) == ["a.bias", "a.weight"]
        assert (file.info("a.weight").dtype, file.info("a.weight").shape) == ("INT8_TENSORWISE", (6, 256))
        assert (np.abs(file.read("a.weight") - WEIGHT) <= scale * 0.5001).all()


def test_a_turned_weight_is_turned_back(tmp_path):
    """The format's matrix for 256 columns, which is its own inverse."""
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    turn = np.kron(np.kron(four, four), np.kron(four, four))
    np.testing.assert_array_equal(turn @ turn, np.eye(256))
    turned = (WEIGHT @ turn.T).astype(np.float32)
    scale = row_scales(turned)
    mark = said(format="int8_tensorwise", convrot=True, convrot_groupsize=256)
    tensors = {"a.weight": rounded(turned, scale), "a.weight_scale": scale, "a.comfy_quant": mark}
    with opened(tmp_path, tensors) as file:
        error = np.linalg.norm(file.read("a.weight") - WEIGHT) / np.linalg.norm(WEIGHT)
    assert error < 0.01


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(256, 6, bias=False)

    def quantizable(self, rotated=False):
        return {self.a: True}


@pytest.mark.parametrize(
    ("group", "storage", "kept"),
    [
        (0, "int8", True),
        (256, "int8-convrot", True),
        (64, "int8-convrot", True),
        (256, "int8", False),
        (0, "int8-convrot", False),
        (4, "int8-convrot", False),  # no kernel turns by it
    ],
)
def test_a_layer_keeps_the_codes_of_a_file_that_it_would_round_to_others(tmp_path, group, storage, kept):
    """Where it is stored as the file is; else it is rounded anew, from the file's numbers."""
    codes = RNG.integers(-100, 101, (6, 256)).astype(np.int8)
    scale = np.linspace(0.01, 0.02, 6, dtype=np.float32)[:, None]
    turn = {"convrot": True, "convrot_groupsize": group} if group else {}
    mark = said(format="int8_tensorwise", **turn)
    network = OneLayer()
    with opened(tmp_path, {"a.weight": codes, "a.weight_scale": scale, "a.comfy_quant": mark}) as file:
        numbers = file.read("a.weight")
        nn.load(network, file, dtype="float32", device="cpu", what="a file", storage=nn.Storage(storage))
    weight = network.a.weight
    assert weight.rotated == {"int8": 0, "int8-convrot": group if kept else 256}[storage]
    assert np.array_equal(weight.data.numpy(), codes) == kept
    back = weight.dequantize(np.dtype(np.float32)).numpy()
    if kept:
        np.testing.assert_array_equal(weight.scales.numpy().view(np.float32), scale[:, 0])
        np.testing.assert_allclose(back, numbers, rtol=0, atol=1e-5)
    else:
        assert 1e-3 < np.linalg.norm(back - numbers) / np.linalg.norm(numbers) < 0.012


def test_fp8_with_one_scale_as_the_header_says(tmp_path):
    stored = (WEIGHT * 100).astype(ml_dtypes.float8_e4m3fn)
    tensors = {"a.weight": stored, "a.weight_scale": np.float32(0.01), "a.input_scale": np.float32(3)}
    layers = {"layers": {"a": {"format": "float8_e4m3fn"}}}
    with opened(tmp_path, tensors, {"_quantization_metadata": json.dumps(layers)}) as file:
        assert file.names == ("a.weight",)
        np.testing.assert_array_equal(file.read("a.weight"), stored.astype(np.float32) * np.float32(0.01))


def test_a_scale_for_each_block(tmp_path):
    weight = RNG.integers(-127, 128, (4, 8)).astype(np.int8)
    scale = np.arange(1, 5, dtype=np.float32).reshape(2, 2)
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.comfy_quant": said(format="int8_blockwise")}
    with opened(tmp_path, tensors) as file:
        np.testing.assert_array_equal(file.read("a.weight"), weight * np.kron(scale, np.ones((2, 4), np.float32)))


def test_a_scale_changes_the_digest(tmp_path):
    tensors = {"a.weight": WEIGHT.astype(np.int8), "a.comfy_quant": said(format="int8_tensorwise")}
    digests = set()
    for scale in (1.0, 2.0):
        opened(tmp_path, tensors | {"a.weight_scale": np.float32(scale)}).close()
        digests.add(sampled_digest(tmp_path / "x.safetensors"))
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"a.weight_scale": None}, "without its a.weight_scale"),
        ({"a.weight_scale": np.ones(5, np.float32)}, r"scales of shape \(5,\) do not fit a weight of shape \(6, 256\)"),
        ({"a.weight_scale": np.ones((6, 2), np.float32)}, r"scales of shape \(6, 2\) do not fit"),  # blocks
        ({"a.weight_scale": np.ones(6, np.int32)}, r"a\.weight_scale: expected floats, got I32"),
        ({"a.weight": WEIGHT}, "expected I8 for int8_tensorwise, got F32"),
        ({"a.comfy_quant": said(format="float8_e4m3fn")}, "expected F8_E4M3 for float8_e4m3fn, got I8"),
        (
            {"a.comfy_quant": said(format="int8_tensorwise", convrot=True, convrot_groupsize=100)},
            "groups of 100 columns",
        ),
        ({"a.comfy_quant": np.frombuffer(b"{", np.uint8)}, "expected a JSON text that says a weight's format"),
    ],
)
def test_parts_that_do_not_belong_together(tmp_path, changed, words):
    tensors = {
        "a.weight": WEIGHT.astype(np.int8),
        "a.weight_scale": np.float32(1),
        "a.comfy_quant": said(format="int8_tensorwise"),
    } | changed
    with pytest.raises(ModelFileError, match=rf"x\.safetensors: .*{words}.*get another copy"):
        opened(tmp_path, {name: array for name, array in tensors.items() if array is not None})


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_numbers_that_are_no_scales_are_refused(tmp_path, wrong):
    tensors = {"a.weight": WEIGHT.astype(np.int8), "a.comfy_quant": said(format="int8_tensorwise")}
    with opened(tmp_path, tensors | {"a.weight_scale": np.float32([1, 0, 1, 1, wrong, 1])}) as file:
        for read in (file.read, file.as_kept):
            with pytest.raises(ModelFileError, match=r"a\.weight_scale: holds NaN, infinity or negative numbers"):
                read("a.weight")


def test_another_format_is_left_to_be_named(tmp_path):
    tensors = {"a.weight": np.zeros((6, 128), np.uint8), "a.comfy_quant": said(format="nvfp4")}
    with opened(tmp_path, tensors) as file:
        assert "a.comfy_quant" in file.names


def test_8_bits_of_bitsandbytes_are_read_row_by_row_alone(tmp_path):
    """Its other formats are orders of a GPU's tiles: the same bytes at other places."""
    stored = np.arange(-8, 8, dtype=np.int8).reshape(4, 4)
    tensors = {"a.weight": stored, "a.SCB": np.full(4, 127.0, np.float32)}
    with opened(tmp_path, tensors | {"a.weight_format": np.array(0, np.uint8)}) as weights:
        np.testing.assert_array_equal(weights.read("a.weight"), stored)
    with pytest.raises(ModelFileError, match=r"a\.weight: its 8 bits lie as a GPU's format 2 has them, not row by row"):
        opened(tmp_path, tensors | {"a.weight_format": np.array(2, np.uint8)})
