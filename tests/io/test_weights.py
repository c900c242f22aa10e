"""Files, shards and folders read alike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from flame_train.errors import ModelFileError
from flame_train.io.safetensors import save_file
from flame_train.io.weights import open_weights, sampled_digest


def write(path, **tensors):
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file({k: np.asarray(v, np.float32) for k, v in tensors.items()}, path)


def write_index(path, weight_map):
    path.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}))


def test_single_file(tmp_path):
    write(tmp_path / "x.safetensors", a=[1, 2])
    with open_weights(tmp_path / "x.safetensors") as weights:
        assert weights.shapes == {"a": (2,)}


def test_an_index_of_shards_is_opened_and_a_lone_shard_is_not(tmp_path):
    names = {n: f"model-0000{i}-of-00002.safetensors" for i, n in enumerate("ab", 1)}
    for n, file in names.items():
        write(tmp_path / file, **{n: [1]})
    write_index(tmp_path / "model.safetensors.index.json", names)
    with open_weights(tmp_path / "model.safetensors.index.json") as weights:
        assert weights.shapes == {"a": (1,), "b": (1,)}
    with pytest.raises(ModelFileError, match="one of the 2 shards of a model; name their folder"):
        open_weights(tmp_path / names["a"])


def test_several_gguf_files_in_a_folder(tmp_path):
    for name in ("t5-xxl-Q8_0", "t5-xxl-Q4_0"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"2 GGUF files \(t5-xxl-Q4_0\.gguf, .*name the one to use"):
        open_weights(tmp_path)


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "model.safetensors.index.fp16.json"])
def test_shards(tmp_path, index):
    write(tmp_path / "model-00001-of-00002.safetensors", a=[1])
    write(tmp_path / "model-00002-of-00002.safetensors", b=[2], unlisted=[3])
    write_index(tmp_path / index, {"b": "model-00002-of-00002.safetensors", "a": "model-00001-of-00002.safetensors"})
    with open_weights(tmp_path) as weights:
        assert set(weights.names) == {"a", "b"}
        assert (weights.read("a")[0], weights.read("b")[0]) == (1, 2)
        with pytest.raises(ModelFileError, match="no tensor 'unlisted'"):
            weights.read("unlisted")


@pytest.mark.parametrize(
    "index",
    [
        {"a": "../secret.safetensors"},
        {"a": "/etc/passwd"},
        {"a": "sub/x.safetensors"},
        {"a": "x.bin"},
        {"a": 5},
        {"a": "missing.safetensors"},
        {"other": "real.safetensors"},
        ["a"],
        None,
    ],
)
def test_an_index_that_cannot_be_right(tmp_path, index):
    folder = tmp_path / "model"
    write(folder / "real.safetensors", a=[1])
    write(tmp_path / "secret.safetensors", a=[1])
    write_index(folder / "model.safetensors.index.json", index)
    with pytest.raises(ModelFileError, match=r"index\.json|missing\.safetensors"):
        open_weights(folder)


def test_full_precision_is_preferred_and_a_variant_taken_when_alone(tmp_path):
    write(tmp_path / "diffusion_pytorch_model.fp16.safetensors", a=[16])
    with open_weights(tmp_path) as weights:
        assert weights.read("a")[0] == 16
    write(tmp_path / "diffusion_pytorch_model.safetensors", a=[32])
    with open_weights(tmp_path) as weights:
        assert weights.read("a")[0] == 32


def test_a_whole_diffusers_folder(tmp_path):
    write(tmp_path / "unet" / "diffusion_pytorch_model.safetensors", a=[1])
    write(tmp_path / "vae" / "diffusion_pytorch_model.fp16.safetensors", a=[2])
    write(tmp_path / "text_encoder" / "model.safetensors", a=[3])
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "model_index.json").write_text("{}")
    with open_weights(tmp_path) as weights:
        assert {name: weights.read(name)[0] for name in weights.names} == {
            "unet/a": 1,
            "vae/a": 2,
            "text_encoder/a": 3,
        }
        assert weights.info("vae/a").name == "vae/a"


def test_folders_that_do_not_say_what_to_read(tmp_path):
    with pytest.raises(ModelFileError, match="no safetensors file"):
        open_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"only pytorch_model\.bin, a pickle.*weights_only"):
        open_weights(tmp_path)
    write(tmp_path / "one.safetensors", a=[1])
    with open_weights(tmp_path) as weights:
        assert weights.names == ("a",)
    write(tmp_path / "two.safetensors", a=[1])
    with pytest.raises(ModelFileError, match=r"2 safetensors files \(one.safetensors, two.safetensors\)"):
        open_weights(tmp_path)


def sampled(path: Path, **changes: tuple[int, float]) -> str:
    """The digest of a file of three tensors; `changes` are name=(index, value)."""
    tensors = {"small": np.arange(6, dtype=np.float16), "large": np.ones(100_000, np.float32), "empty": np.ones(0)}
    for name, (index, value) in changes.items():
        tensors[name][index] = value
    save_file(path, tensors, {"changes": str(changes)})
    return sampled_digest(path)


def test_a_sample_of_bytes_tells_one_model_from_another(tmp_path: Path) -> None:
    """Wherever all of a tensor changed, and in small ones anywhere; metadata and the file's name do not matter."""
    usual = sampled(tmp_path / "a.safetensors")
    assert sampled(tmp_path / "b.safetensors", small=(0, 0)) == usual
    for changes in ({"small": (3, 9)}, {"large": (0, 2)}, {"large": (50_000, 2)}, {"large": (99_999, 2)}):
        assert sampled(tmp_path / "a.safetensors", **changes) != usual


def test_a_sample_of_bytes_is_of_every_shard_and_component(tmp_path: Path) -> None:
    folder = tmp_path / "model" / "unet"
    folder.mkdir(parents=True)
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    seen = set()
    for a, b in ((0, 0), (1, 0), (0, 1)):
        save_file(folder / "1.safetensors", {"a": np.full(3, a)})
        save_file(folder / "2.safetensors", {"b": np.full(3, b)})
        seen |= {sampled_digest(folder), sampled_digest(tmp_path / "model")}
    assert len(seen) == 6
