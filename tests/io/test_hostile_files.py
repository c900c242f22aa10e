"""Files that lie, are cut short or are something else: refused with name, reason and remedy."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from flame_train.errors import ModelFileError
from flame_train.io.safetensors import SafetensorsFile, save_file


def packed(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


GOOD = {"a": entry(), "b": entry(offsets=(8, 16))}
BODY = bytes(16)

LIES = {
    "empty": (b"", "empty"),
    "seven bytes": (b"1234567", "too few"),
    "body short": (packed(GOOD, BODY[:-1]), "incomplete.*download was cut off"),
    "no body": (packed(GOOD), "incomplete"),
    "trailing bytes": (packed(GOOD, BODY + b"x"), "1 bytes follow the last tensor"),
    "hole": (packed({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)), "'b' leaves a hole"),
    "begins late": (packed({"a": entry(offsets=(4, 12))}, bytes(12)), "'a' leaves a hole"),
    "overlap": (packed({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "overlaps"),
    "same place": (packed({"a": entry(), "b": entry()}, bytes(8)), "overlaps"),
    "wrong shape": (packed({"a": entry(shape=(3,))}, bytes(8)), r"takes 12 bytes"),
    "negative dim": (packed({"a": entry(shape=(-2,))}, bytes(8)), "whole numbers"),
    "2^124 elements": (packed({"a": entry(shape=(2**62, 2**62))}, bytes(8)), "overflows"),
    "zero times huge": (packed({"a": entry(shape=(0, 2**62, 2**62), offsets=(0, 0))}), "overflows"),
    "2^70 dim": (packed({"a": entry(shape=(2**70,))}, bytes(8)), "overflows"),
    "end before begin": (packed({"a": entry(offsets=(8, 0))}, bytes(8)), "data_offsets"),
    "three offsets": (packed({"a": entry(offsets=(0, 4, 8))}, bytes(8)), "data_offsets"),
    "header length 10^12": (packed(GOOD, BODY, length=10**12), "over the limit"),
    "header length 101 MB": (packed(GOOD, BODY, length=101_000_000), "over the limit"),
    "header past the end": (packed(GOOD, BODY, length=4096), "past the end"),
    "header too short": (packed(GOOD, BODY, length=20), "expected|header"),
    "bad JSON": (
        packed(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]', bytes(8)),
        "not valid JSON",
    ),
    "bad UTF-8": (packed(b'{"\xff\xfe":' + json.dumps(entry()).encode() + b"}", bytes(8)), "UTF-8"),
    "half a surrogate": (packed(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", bytes(8)), "UTF-8"),
    "unknown dtype": (packed({"a": entry(dtype="F31")}, bytes(8)), "dtype 'F31'"),
    "duplicate key": (
        packed(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        "'a' is listed twice",
    ),
    "two metadata": (packed(b'{"__metadata__":{},"__metadata__":{}}'), "twice"),
    "metadata key twice": (packed(b'{"__metadata__":{"a":"b","a":"c"}}'), "twice"),
    "number in metadata": (packed({"__metadata__": {"steps": 5}} | GOOD, BODY), "'steps': expected a string"),
    "nested metadata": (packed({"__metadata__": {"a": {"b": "c"}}} | GOOD, BODY), "expected a string"),
    "leading space": (packed(b" " + json.dumps(GOOD).encode(), BODY), "begin with"),
    "a list": (packed(b"[]"), "begin with"),
    "fraction": (
        packed(b'{"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}}', bytes(2)),
        "whole numbers",
    ),
    "a boolean size": (
        packed(b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', bytes(1)),
        "whole numbers",
    ),
    "dtype is a list": (packed({"a": entry() | {"dtype": ["F32"]}}, bytes(8)), "dtype"),
    "not an object": (packed(b'{"a":[1]}'), "once each, found \\[1\\]"),
    "nested shape": (packed({"a": entry() | {"shape": [[2]]}}, bytes(8)), "whole numbers"),
    "extra field": (packed({"a": entry() | {"x": 1}}, bytes(8)), "once each"),
    "missing field": (packed({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "once each"),
    "text after the brace": (packed(json.dumps(GOOD).encode() + b" x", BODY), "goes on"),
    "field names in escapes": (
        packed(b'{"a":{"d\\u0074ype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        "not written as writers of the format do",
    ),
    "1000 dimensions": (packed({"a": entry(shape=(1,) * 1000, offsets=(0, 4))}, bytes(4)), "at most 64"),
    "65 dimensions": (packed({"a": entry(shape=(1,) * 65, offsets=(0, 4))}, bytes(4)), "at most 64"),
}
OTHER_THINGS = {
    "git lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 6938078334\n",
        "Git LFS pointer.*git lfs pull",
    ),
    "web page": (b"\n<!DOCTYPE html>\n<html><head><title>401</title>", "web page"),
    "config": (b"# A LoRA for sdxl\n\n[model]  # the base\ncheckpoint = 'x'\n", "TOML text, such as a config"),
    "error list": (b'[{"error":"Repository not found"}]', "server's error message"),
    "true list": (b"[true]\n", "server's error message"),
    "error JSON": (b'{"error":"Repository not found"}', "server's error message"),
    "zip checkpoint": (b"PK\x03\x04" + bytes(100), "zip archive.*weights_only=True"),
    "pickle": (pickle.dumps({"state_dict": [1, 2, 3]}, protocol=2), "pickle.*weights_only=True"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(64), "GGUF"),
    "noise": (bytes(range(200, 256)) * 20, "over the limit.*download it again"),
}


@pytest.mark.parametrize(("content", "reason"), [*LIES.values(), *OTHER_THINGS.values()], ids=[*LIES, *OTHER_THINGS])
def test_refused_with_reason(tmp_path, content, reason):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=rf"(?s)model\.safetensors: .*({reason})") as caught:
        SafetensorsFile(path)
    assert caught.value.exit_code == 3


ODD = ("duplicate key", "metadata key twice", "extra field", "1000 dimensions", "field names in escapes")


@pytest.mark.parametrize("name", ODD)
def test_the_library_takes_what_is_refused_here(tmp_path, name):
    (tmp_path / "x.safetensors").write_bytes(LIES[name][0])
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as file:
        file.keys()


def test_names_and_texts_that_look_like_parts_of_a_header_are_read(tmp_path):
    tensors = {'"data_offsets":[': np.zeros(2), '}"shape": [1]}{': np.ones(3), "__metadata__ ": np.ones(1)}
    metadata = {'"data_offsets" : [': 'x":', '{"__metadata__":{"': '":"}', "": '\\"'}
    save_file(tmp_path / "x.safetensors", tensors, metadata)
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert (file.shapes, file.metadata) == ({name: each.shape for name, each in tensors.items()}, metadata)


def test_space_padding_and_loose_json_are_accepted(tmp_path):
    text = json.dumps(GOOD, indent=3).encode() + b" " * 50
    (tmp_path / "x.safetensors").write_bytes(packed(text, BODY))
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        assert file.names == ("a", "b")


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".pth", ".bin", ".PT"])
def test_pickles_are_refused_by_name_and_never_run(tmp_path, suffix):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    for content in (pickle.dumps(Bomb()), packed(GOOD, BODY)):
        path = tmp_path / f"model{suffix}"
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"pickles.*weights_only=True"):
            SafetensorsFile(path)
    (tmp_path / "renamed.safetensors").write_bytes(pickle.dumps(Bomb(), protocol=4))
    with pytest.raises(ModelFileError, match="pickle"):
        SafetensorsFile(tmp_path / "renamed.safetensors")
    assert not (tmp_path / "ran").exists()


def test_missing_folder_and_pipe(tmp_path):
    with pytest.raises(ModelFileError, match="no such file"):
        SafetensorsFile(tmp_path / "none.safetensors")
    with pytest.raises(ModelFileError, match="is a folder"):
        SafetensorsFile(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(ModelFileError, match="not a regular file"):
        SafetensorsFile(tmp_path / "pipe.safetensors")


def many_tensors():
    return b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(300_000))


@pytest.mark.parametrize("entry", ['"shape":[-0],"data_offsets":[0,0]', '"shape":[0],"data_offsets":[-0,0]'])
def test_minus_nought_is_refused_here_as_by_the_package(tmp_path, entry):
    path = tmp_path / "x.safetensors"
    path.write_bytes(packed(b'{"a":{"dtype":"F32",' + entry.encode() + b"}}"))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, "np").__enter__()
    with pytest.raises(ModelFileError, match="-0 is no size and no place"):
        SafetensorsFile(path)


HEADER_BOMBS = {
    "deep nesting": lambda: b'{"a":' + b"[" * 90_000_000,
    "long shape": lambda: b'{"a":{"dtype":"U8","shape":[' + b"0," * 45_000_000,
    "long complete shape": lambda: b'{"a":{"dtype":"U8","shape":[' + b"0," * 45_000_000 + b"0]}}",
    "many tensors": many_tensors,
    "many brackets in metadata": lambda: b'{"__metadata__":{"a":' + b"[]," * 30_000_000,
}
OPEN_AND_REPORT_PEAK = """
import sys
from flame_train.errors import ModelFileError
from flame_train.io.safetensors import SafetensorsFile
try:
    SafetensorsFile(sys.argv[1])
except ModelFileError:
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
else:
    raise SystemExit("accepted")
"""


@pytest.mark.parametrize("name", HEADER_BOMBS)
def test_a_header_made_to_eat_memory_is_refused_within_300_mb(tmp_path, name):
    path = tmp_path / "bomb.safetensors"
    path.write_bytes(packed(HEADER_BOMBS[name]()))
    command = [sys.executable, "-c", OPEN_AND_REPORT_PEAK, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])
    assert int(done.stdout) < 300_000  # KiB, the mapped file's pages included


@pytest.fixture(scope="module")
def valid_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("valid") / "x.safetensors"
    tensors = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "alpha": np.array(4.0, np.float16)}
    save_file(path, tensors, {"ss_v2": "False"})
    return path.read_bytes()


@settings(max_examples=400)
@given(data=st.data())
def test_any_mutation_is_refused_cleanly_or_agrees_with_the_package(tmp_path_factory, valid_bytes, data):
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    content = bytearray(valid_bytes)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        action = data.draw(st.sampled_from(["set", "cut", "insert", "delete"]))
        if action == "set":
            content[place] = data.draw(st.integers(0, 255))
        elif action == "cut":
            content = content[: place + 1]
        elif action == "insert":
            content[place:place] = data.draw(st.binary(min_size=1, max_size=8))
        elif len(content) > 1:
            del content[place]
    path.write_bytes(bytes(content))
    try:
        with SafetensorsFile(path) as ours:
            infos = {name: ours.info(name) for name in ours.names}
            values = {name: ours.read(name).tobytes() for name in ours.names}
    except ModelFileError:
        return
    with safetensors.safe_open(path, "np") as theirs:  # what we accept, the package accepts
        assert set(theirs.keys()) == set(infos)
        for name, info in infos.items():
            part = theirs.get_slice(name)
            assert (part.get_dtype(), tuple(part.get_shape())) == (info.dtype, info.shape)
            if info.dtype in ("F32", "F16"):
                assert theirs.get_tensor(name).tobytes() == values[name]
