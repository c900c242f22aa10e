"""Weights that bitsandbytes packed are read as bitsandbytes itself gives them back."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn
from flame_train.engine.dtype import bfloat16
from flame_train.errors import ModelFileError
from flame_train.io.keymap import Source
from flame_train.io.safetensors import save_file
from flame_train.io.weights import open_weights
from flame_train.networks.files.build_parts import Native

pytestmark = pytest.mark.parity
SHAPES = [(8, 64), (5, 7), (96, 200)]


@pytest.fixture(autouse=True)
def eager():
    """Its quantizer would be compiled for each shape and dtype, which takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def array(t):
    t = t.detach().contiguous()
    return t.view(torch.uint8).numpy().view("V2") if t.dtype == torch.bfloat16 else t.numpy()


def stored(weight, kind, nested):
    data, state = bnb.quantize_4bit(weight, quant_type=kind, blocksize=64, compress_statistics=nested)
    tensors = {"a.weight": array(data)}
    tensors |= {f"a.weight.{end}": array(value) for end, value in state.as_dict(packed=True).items()}
    return tensors, bnb.dequantize_4bit(data, state)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bits(tmp_path, kind, nested, dtype, shape):
    tensors, theirs = stored(torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1)), kind, nested)
    save_file(str(tmp_path / "x.safetensors"), tensors)
    with open_weights(tmp_path / "x.safetensors") as file:
        assert file.names == ("a.weight",)
        assert (file.info("a.weight").dtype, file.info("a.weight").shape) == (kind.upper(), shape)
        ours = file.read("a.weight")
    np.testing.assert_array_equal(ours.astype(np.float32), theirs.float().numpy())


def test_8_bits(tmp_path):
    weight = torch.randn(6, 32, dtype=torch.float16, generator=torch.Generator().manual_seed(2))
    data, scales, _ = bnb.int8_vectorwise_quant(weight)
    tensors = {"a.weight": array(data), "a.SCB": array(scales.float()), "a.weight_format": np.uint8(0)}
    save_file(str(tmp_path / "x.safetensors"), tensors)
    with open_weights(tmp_path / "x.safetensors") as file:
        assert file.names == ("a.weight",)
        ours = file.read("a.weight")
    np.testing.assert_array_equal(ours, bnb.int8_vectorwise_dequant(data, scales.float()).numpy())


@pytest.mark.parametrize("shape", [(8, 64), (96, 200 * 8), (512, 512)])
def test_our_nf4_is_theirs(shape):
    """Bytes and magnitudes to the bit, but for what the processor's quantizer of 8 bits does not round to nearest.

    Where it is not sure it is off by one; its own fallback for other dtypes, which is exact, gives our bytes.
    """
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    data, absmax, nested, offset = (part.numpy() for part in F.nf4_quantize(flame.tensor(weight.numpy())))
    theirs, state = bnb.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True)
    np.testing.assert_array_equal(data, theirs.numpy().reshape(-1))
    mean = torch.from_numpy(offset.view(np.float32))
    assert abs(float(mean) - float(state.offset)) <= np.spacing(np.float32(mean)), "theirs is summed in fp32"
    plain = bnb.quantize_4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=False)[1].absmax
    codes, largest = torch.ops.bitsandbytes.quantize_blockwise((plain - mean).double(), state.state2.code, 256)
    np.testing.assert_array_equal(absmax, codes.numpy())
    np.testing.assert_array_equal(nested.view(np.float32), largest.numpy())
    assert np.abs(absmax.astype(int) - state.absmax.numpy()).max() <= 1

    state.absmax, state.offset, state.state2.absmax = torch.from_numpy(absmax), mean, largest
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        state.dtype = dtype
        parts = [flame.tensor(part) for part in (data, absmax, nested, offset)]
        ours = F.nf4_dequantize(*parts, shape, name).numpy().astype(np.float32)
        np.testing.assert_array_equal(ours, bnb.dequantize_4bit(theirs, state).float().numpy())


def test_a_file_in_nf4_has_the_same_codes_again(tmp_path):
    """With `model.quantize = "nf4"`; magnitudes are rounded once more, to the file's dtype and to 8 bits."""
    tensors, theirs = stored(torch.randn(96, 640, generator=torch.Generator().manual_seed(5)).bfloat16(), "nf4", True)
    save_file(str(tmp_path / "x.safetensors"), tensors)
    with open_weights(tmp_path / "x.safetensors") as file:
        parts = F.nf4_quantize(flame.tensor(file.read("a.weight").astype(np.float32)))
    np.testing.assert_array_equal(parts[0].numpy(), tensors["a.weight"].reshape(-1))
    ours, theirs = F.nf4_dequantize(*parts, (96, 640), "float32").numpy(), theirs.float().numpy()
    assert np.linalg.norm(ours - theirs) < 0.01 * np.linalg.norm(theirs)


def loaded(file, shape, quantize="nf4"):
    """A layer of these weights, as `model.quantize` wants it."""

    class Network(nn.Module):
        def __init__(self):
            self.a = nn.Linear(shape[1], shape[0], bias=False)

        def quantizable(self, rotated=False):
            return {self.a: True}

    with open_weights(file) as weights:
        native = Native(weights, {"a.weight": Source(("a.weight",))}, {"a.weight": shape})
        network = Network()
        storage = nn.Storage(quantize)
        nn.load(network, native, dtype="bf16", device="cpu", what="a network", storage=storage)
    return network.a.weight


@pytest.mark.parametrize("shape", [(8, 64), (96, 200), (512, 128)])
def test_a_file_in_nf4_keeps_its_bytes(tmp_path, shape):
    """And is decoded as bitsandbytes decodes it."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    tensors, theirs = stored(weight, "nf4", True)
    save_file(str(tmp_path / "x.safetensors"), tensors)
    found = loaded(tmp_path / "x.safetensors", shape)
    np.testing.assert_array_equal(found.data.numpy(), tensors["a.weight"].reshape(-1))
    np.testing.assert_array_equal(found.absmax.numpy(), tensors["a.weight.absmax"].reshape(-1))
    np.testing.assert_array_equal(found.nested.numpy().view(np.float32), tensors["a.weight.nested_absmax"])
    ours = found.dequantize(bfloat16).numpy().astype(np.float32)
    np.testing.assert_array_equal(ours, theirs.float().numpy())


def test_other_formats_are_packed_anew(tmp_path):
    """Blocks of another size, plain magnitudes, another map of numbers, and a base that is wanted in 8 bits."""
    weight, shape = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)).bfloat16(), (64, 256)
    data, state = bnb.quantize_4bit(weight, quant_type="nf4", blocksize=128, compress_statistics=True)
    wide = {"a.weight": array(data)} | {f"a.weight.{e}": array(v) for e, v in state.as_dict(packed=True).items()}
    plain, fp4, nf4 = (stored(weight, *how)[0] for how in (("nf4", False), ("fp4", True), ("nf4", True)))
    file = tmp_path / "x.safetensors"
    for tensors, quantize in ((wide, "nf4"), (plain, "nf4"), (fp4, "nf4"), (nf4, "int8")):
        save_file(str(file), tensors)
        with open_weights(file) as weights:
            numbers = flame.tensor(weights.read("a.weight").astype(np.float32))
        found, expected = loaded(file, shape, quantize), nn.QuantizedWeight.of(numbers, nn.Storage(quantize))
        for a, b in zip(found.stored, expected.stored, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_kept_magnitudes_that_are_no_numbers(tmp_path):
    tensors, _ = stored(torch.randn(8, 64), "nf4", True)
    tensors["a.weight.nested_absmax"] = np.full(1, np.nan, np.float32)
    save_file(str(tmp_path / "x.safetensors"), tensors)
    with pytest.raises(ModelFileError, match=r"NaN or infinity in 1 tensor \(a\.weight\)"):
        loaded(tmp_path / "x.safetensors", (8, 64))


def test_a_part_that_is_missing(tmp_path):
    tensors, _ = stored(torch.randn(8, 64), "nf4", True)
    del tensors["a.weight.nested_absmax"]
    save_file(str(tmp_path / "x.safetensors"), tensors)
    with pytest.raises(ModelFileError, match=r"a\.weight: packed in 4 bits, without its a\.weight\.nested_absmax"):
        open_weights(tmp_path / "x.safetensors")
