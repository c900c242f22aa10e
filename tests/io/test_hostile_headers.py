"""Headers that promise more than their file has: refused with the tensor's name, or read in no more than the file."""

from __future__ import annotations

import json
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from flame_train.errors import ModelFileError
from flame_train.io.safetensors import save_file
from flame_train.io.weights import open_weights

HUGE = 10**400
WEIGHT = {"a.weight": np.zeros((6, 256), np.int8), "a.weight_scale": np.ones(1, np.float32)}


def text(value):
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def read_all(path, tensors, metadata=None):
    save_file(path, tensors, metadata)
    with open_weights(path) as file:
        return {name: file.read(name) for name in file.names}


# ---- bitsandbytes ------------------------------------------------------------------------------------------

STATE = {"blocksize": 64, "shape": [32, 32], "dtype": "bfloat16", "quant_type": "nf4"}
NESTED = STATE | {"nested_blocksize": 256, "nested_offset": 0.5, "nested_dtype": "float32"}


def packed(state, **parts):
    """A tensor of bitsandbytes, with these parts in place of its own."""
    nested = "nested_blocksize" in state
    ours = {
        "": np.zeros((512, 1), np.uint8),
        ".absmax": np.zeros(16, np.uint8) if nested else np.ones(16, np.float32),
        ".quant_map": np.linspace(-1, 1, 16, dtype=np.float32),
        ".quant_state.bitsandbytes__nf4": text(state),
    }
    ours |= {".nested_absmax": np.ones(1, np.float32), ".nested_quant_map": np.ones(256, np.float32)} if nested else {}
    return {f"x.weight{end}": array for end, array in (ours | parts).items()}


@pytest.mark.parametrize("nested", [False, True])
def test_a_huge_block_takes_no_more_than_the_tensor(tmp_path, nested):
    state = (
        (NESTED if nested else STATE) | {"blocksize": 2**31 - 1} | ({"nested_blocksize": 2**31 - 1} if nested else {})
    )
    one = {".absmax": np.zeros(1, np.uint8) if nested else np.full(1, 2.0, np.float32)}
    tracemalloc.start()
    found = read_all(tmp_path / "x.safetensors", packed(state, **one))["x.weight"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.shape == (32, 32)
    assert peak < 1 << 20


@pytest.mark.filterwarnings("error")
def test_numbers_beyond_a_float_are_read_without_a_warning(tmp_path):
    largest = np.finfo(np.float32).max
    parts = {".absmax": np.full(16, largest), ".quant_map": np.full(16, 2.0, np.float32)}
    assert np.isinf(read_all(tmp_path / "x.safetensors", packed(STATE, **parts))["x.weight"].astype(np.float32)).all()


@pytest.mark.parametrize(
    ("state", "parts"),
    [
        (NESTED | {"nested_offset": HUGE}, {}),
        (NESTED | {"nested_offset": "x"}, {}),
        ({key: value for key, value in NESTED.items() if key != "nested_offset"}, {}),
        (STATE | {"shape": [1] * 102}, {}),
        (STATE | {"dtype": ["float32"]}, {}),
        (STATE | {"blocksize": None}, {}),
        ([], {}),
        (STATE, {"": np.zeros((512, 1), np.float32)}),
        (STATE, {"": np.zeros((512, 1), np.int16)}),
        (STATE, {"": np.zeros((512, 1), ml_dtypes.bfloat16)}),
        (NESTED, {".absmax": np.zeros(16, np.float32)}),
        (NESTED, {".absmax": np.zeros(16, np.int16)}),
        (STATE, {".quant_map": np.zeros(16, np.int32)}),
        (STATE, {".quant_state.bitsandbytes__nf4.quant_state.bitsandbytes__nf4": text(STATE)}),
    ],
)
def test_a_state_that_bitsandbytes_does_not_write_is_refused(tmp_path, state, parts):
    with pytest.raises(ModelFileError, match=r"x\.weight"):
        read_all(tmp_path / "x.safetensors", packed(state, **parts))


# ---- ComfyUI -----------------------------------------------------------------------------------------------

SAID = [
    {"format": ["int8_tensorwise"]},
    {"format": {}},
    {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": -4},
    {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": "256"},
    {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": [256]},
    {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": float("inf")},
    {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 4**200},
]


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("in_metadata", [False, True])
def test_a_format_that_comfyui_does_not_write_is_refused(tmp_path, said, in_metadata):
    metadata = {"_quantization_metadata": json.dumps({"layers": {"a": said}})} if in_metadata else {}
    tensors = WEIGHT if in_metadata else WEIGHT | {"a.comfy_quant": text(said)}
    with pytest.raises(ModelFileError, match=": a"):
        read_all(tmp_path / "x.safetensors", tensors, metadata)


def test_a_mark_that_is_a_scalar_or_long_is_refused(tmp_path):
    for mark in (np.array(3.0, np.float32), np.zeros(2 << 20, np.uint8)):
        with pytest.raises(ModelFileError, match=r"a\.comfy_quant"):
            read_all(tmp_path / "x.safetensors", WEIGHT | {"a.comfy_quant": mark})


# ---- GGUF --------------------------------------------------------------------------------------------------


def string(value):
    return struct.pack("<Q", len(value)) + value


def gguf(pairs=b"", count=0, tensors=b"", number=0):
    return b"GGUF" + struct.pack("<IQQ", 3, number, count) + pairs + tensors


def tensor(name, dims, begin, kind=0):
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, begin)


def list_of(kind, count, raw=b""):
    return string(b"k") + struct.pack("<IIQ", 9, kind, count) + raw


SHAPED = string(b"comfy.gguf.orig_shape.a") + struct.pack("<IIQ2q", 9, 11, 2, -2, -2)
FILES = {
    "2^60 numbers": gguf(list_of(6, 1 << 60), 1),
    "2^60 texts": gguf(list_of(8, 1 << 60), 1),
    "nested lists": gguf(list_of(9, 1) + struct.pack("<IQ", 9, 1) * 5000, 1),
    "a text of 2^63": gguf(struct.pack("<Q", 1 << 63), 1),
    "3,000,000 empty texts": gguf(list_of(8, 3_000_000, bytes(24_000_000)), 1),
    "2^60 keys": gguf(b"", 1 << 60),
    "2^60 tensors": gguf(b"", 0, b"", 1 << 60),
    "a key twice": gguf((string(b"k") + struct.pack("<IB", 0, 1)) * 2, 2),
    "an unknown type": gguf(string(b"k") + struct.pack("<I", 99), 1),
    "a negative shape": gguf(SHAPED, 1, tensor(b"a", (4,), 0), 1) + bytes(64),
    "overlapping tensors": gguf(b"", 0, tensor(b"a", (8,), 0) + tensor(b"b", (8,), 16), 2) + bytes(128),
    "a tensor beyond the end": gguf(b"", 0, tensor(b"a", (1 << 40, 1 << 20), 0), 1) + bytes(64),
    "two of a name": gguf(b"", 0, tensor(b"a", (1,), 0) + tensor(b"a", (1,), 32), 2) + bytes(128),
    "many dims": gguf(b"", 0, tensor(b"a", (1,) * 100, 0), 1) + bytes(64),
    "an alignment of 0": gguf(string(b"general.alignment") + struct.pack("<II", 4, 0), 1, tensor(b"a", (1,), 0), 1),
    "another byte order": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
}


@pytest.mark.parametrize("about", FILES)
def test_a_gguf_that_promises_more_than_it_has_is_refused(tmp_path, about):
    (tmp_path / "x.gguf").write_bytes(FILES[about])
    with pytest.raises(ModelFileError, match=r"x\.gguf: is damaged"):
        open_weights(tmp_path / "x.gguf")


def test_a_name_that_steers_a_terminal_is_shown_escaped(tmp_path):
    steers = "x\x1b[2J"
    (tmp_path / "x.gguf").write_bytes(gguf(b"", 0, tensor(steers.encode(), (1,), 0, 99), 1) + bytes(64))
    with pytest.raises(ModelFileError, match=r"x\\x1b\[2J is of the unknown type"):
        open_weights(tmp_path / "x.gguf")
    tensors = {name.replace("x.weight", steers): each for name, each in packed(STATE | {"shape": 5}).items()}
    with pytest.raises(ModelFileError, match=r": x\\x1b\[2J: x\\x1b\[2J\.quant_state"):
        read_all(tmp_path / "x.safetensors", tensors)


def test_lists_of_a_gguf_take_no_memory(tmp_path):
    (tmp_path / "x.gguf").write_bytes(gguf(list_of(8, 200_000, bytes(1_600_000)), 1))
    tracemalloc.start()
    with open_weights(tmp_path / "x.gguf") as file:
        assert file.names == ()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
