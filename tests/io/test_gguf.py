"""GGUF files, written by the format's own package: numbers, shapes, names, and what is refused."""

from __future__ import annotations

import builtins

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from flame_train.errors import EnvironmentFault, ModelFileError
from flame_train.io.weights import open_weights, sampled_digest

READ = (Kind.Q8_0, Kind.Q6_K, Kind.Q5_K, Kind.Q4_K, Kind.Q5_1, Kind.Q5_0, Kind.Q4_1, Kind.Q4_0, Kind.Q3_K, Kind.Q2_K)


def blocks(kind, rows=3, columns=512, seed=0):
    """Random blocks of a type: bytes, of which the scales in fp16 are made small and finite."""
    rng = np.random.default_rng(seed)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        return quants.quantize(rng.standard_normal((rows, columns)).astype(np.float32), kind)
    except NotImplementedError:  # the package unpacks these types, and does not pack them
        raw = rng.integers(0, 256, (rows, columns // 256, size), np.uint8)
        raw.reshape(-1, size)[:] &= 0x3B  # no exponent of infinity, wherever the scales lie
        return raw.reshape(rows, -1)


def written(path, tensors, metadata=None, arch="flux"):
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (metadata or {}).items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", READ, ids=lambda k: k.name)
def test_blocks_give_the_packages_own_numbers(tmp_path, kind):
    raw = blocks(kind)
    with open_weights(written(tmp_path / "x.gguf", {"a.weight": (raw, kind)})) as file:
        info = file.info("a.weight")
        assert (info.dtype, info.shape, info.nbytes) == (kind.name, (3, 512), raw.nbytes)
        expected = quants.dequantize(raw, kind)
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(file.read("a.weight"), expected)


def test_q4_0_by_hand(tmp_path):
    """A block of 32: a scale in fp16, then halves of bytes, the low ones first, less 8."""
    raw = np.concatenate([np.array([0.5], np.float16).view(np.uint8), np.full(16, 0x3F, np.uint8)])[None]
    with open_weights(written(tmp_path / "x.gguf", {"a": (raw, Kind.Q4_0)})) as file:
        np.testing.assert_array_equal(file.read("a"), [[3.5] * 16 + [-2.5] * 16])


def test_plain_floats_stay_as_they_are(tmp_path):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    narrow = values.astype(ml_dtypes.bfloat16)
    tensors = {"a": (values, None), "b": (values.astype(np.float16), None), "c": (narrow.view(np.uint8), Kind.BF16)}
    with open_weights(written(tmp_path / "x.gguf", tensors)) as file:
        assert [file.read(n).dtype for n in "abc"] == [np.float32, np.float16, ml_dtypes.bfloat16]
        for name in "abc":
            np.testing.assert_array_equal(file.read(name).astype(np.float32), values)
        assert file.shapes == dict.fromkeys("abc", (3, 4))
        assert file.metadata["general.architecture"] == "flux"


def test_a_shape_that_was_changed_for_the_blocks_is_given_back(tmp_path):
    raw = quants.quantize(np.ones((4, 64), np.float32), Kind.Q8_0)
    path = written(tmp_path / "x.gguf", {"a": (raw, Kind.Q8_0)}, {"comfy.gguf.orig_shape.a": [16, 4, 2, 2]})
    with open_weights(path) as file:
        assert file.shapes == {"a": (16, 4, 2, 2)}
        assert file.read("a").shape == (16, 4, 2, 2)


def test_one_changed_block_changes_the_digest_and_the_name_does_not(tmp_path):
    raw = blocks(Kind.Q8_0)
    changed = raw.copy()
    changed[0, 0] ^= 1
    digests = [
        sampled_digest(written(tmp_path / f"{i}.gguf", {"a": (data, Kind.Q8_0)}))
        for i, data in enumerate((raw, raw, changed))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_type_that_is_not_read(tmp_path):
    path = written(tmp_path / "x.gguf", {"a": (np.zeros((2, 256), np.int8), None)})
    with pytest.raises(ModelFileError, match=r"x\.gguf: a is stored as I8, which is not read; get the model as Q8_0"):
        open_weights(path)


@pytest.mark.parametrize("keep", [4, 8, 20, 60, 200])
def test_a_file_that_was_cut_off(tmp_path, keep):
    whole = written(tmp_path / "x.gguf", {"a.weight": (blocks(Kind.Q8_0), Kind.Q8_0)}).read_bytes()
    (tmp_path / "x.gguf").write_bytes(whole[:keep])
    with pytest.raises(ModelFileError, match=r"x\.gguf: is damaged.*download it again"):
        open_weights(tmp_path / "x.gguf")


def test_random_damage_is_refused_or_read(tmp_path):
    """Never anything but an answer in our words."""
    whole = bytearray(written(tmp_path / "x.gguf", {"a.weight": (blocks(Kind.Q8_0), Kind.Q8_0)}).read_bytes())
    rng = np.random.default_rng(1)
    for _ in range(300):
        harmed = bytearray(whole)
        for place in rng.integers(4, 200, 3):
            harmed[place] = rng.integers(0, 256)
        (tmp_path / "x.gguf").write_bytes(harmed)
        try:
            with open_weights(tmp_path / "x.gguf") as file, np.errstate(all="ignore"):
                for name in file.names:
                    file.read(name)
        except ModelFileError:
            pass


def test_without_the_package(tmp_path, monkeypatch):
    path = written(tmp_path / "x.gguf", {"a": (np.zeros((2, 2), np.float32), None)})
    really = builtins.__import__

    def without(name, *rest, **more):
        if name.split(".")[0] == "gguf":
            raise ImportError("No module named 'gguf'")
        return really(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EnvironmentFault, match=r"pip install 'flame-train\[gguf\]'"):
        open_weights(path)
