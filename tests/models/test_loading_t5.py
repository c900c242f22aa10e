"""Loading small T5 encoders from every kind of file they come in, and refusing what is not one."""

from __future__ import annotations

import json
import tracemalloc

import gguf
import ml_dtypes
import numpy as np
import pytest

from flame_train.engine.backend.cpu import CpuBackend
from flame_train.errors import ModelFileError
from flame_train.io.safetensors import save_file
from flame_train.text_encoders.t5.names import llama_cpp_table, t5_part
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder

ARCH = T5Arch.tiny(vocabulary=50)
FP8 = ml_dtypes.float8_e4m3fn


@pytest.fixture(scope="module")
def arrays():
    """Random weights that fp8 can hold, as fp16."""
    model = T5Encoder(ARCH)
    model.init(np.random.default_rng(0), "float32")
    return {name: t.numpy().astype(FP8).astype(np.float16) for name, t in model.weights()}


def same(model, arrays, dtype="float32"):
    assert model.arch == ARCH
    for name, t in model.weights():
        assert t.dtype.name == dtype
        np.testing.assert_array_equal(t.numpy().astype(np.float32), arrays[name].astype(np.float32), err_msg=name)


def below(prefix, arrays):
    return {prefix + name: array for name, array in arrays.items()}


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32, FP8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_of_its_own(arrays, tmp_path, stored, dtype):
    path = tmp_path / "t5xxl.safetensors"
    tensors = {name: array.astype(stored) for name, array in arrays.items()}
    save_file(path, tensors | {"encoder.embed_tokens.weight": tensors["shared.weight"]})
    same(t5_part(path).load(device="cpu", dtype=dtype), arrays, dtype)
    assert t5_part(path).network.shapes() == T5Encoder(ARCH).shapes()


LLAMA_CPP = {
    "shared.weight": "token_embd.weight",
    "encoder.final_layer_norm.weight": "enc.output_norm.weight",
    "encoder.block.": "enc.blk.",
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
    "layer.0.SelfAttention.": "attn_",
    "layer.0.layer_norm": "attn_norm",
    "layer.1.layer_norm": "ffn_norm",
    "layer.1.DenseReluDense.wi_0": "ffn_gate",
    "layer.1.DenseReluDense.wi_1": "ffn_up",
    "layer.1.DenseReluDense.wo": "ffn_down",
}
"""Parts of names, and what llama.cpp's converter (gguf-py's `tensor_mapping`, architecture T5ENCODER) makes of them."""


def test_a_gguf_file(arrays, tmp_path):
    path = tmp_path / "t5xxl.gguf"
    writer = gguf.GGUFWriter(path, "t5encoder")
    for name, array in arrays.items():
        for ours, theirs in LLAMA_CPP.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    same(t5_part(path).load(device="cpu", dtype="float32"), arrays)


def test_the_names_in_gguf_files_are_those_of_the_format():
    """By the format's own table from transformers' names."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, 24)
    for rule in llama_cpp_table(()).rules:
        (theirs,), (ours,) = rule.source, rule.target
        assert names.get_name(ours.replace("{i}", "7"), try_suffixes=(".weight",)) == theirs.replace("{i}", "7")


def test_scaled_fp8(arrays, tmp_path):
    path = tmp_path / "t5xxl_fp8_e4m3fn_scaled.safetensors"
    linear = {name: array for name, array in arrays.items() if "SelfAttention." in name and "bias" not in name}
    tensors = arrays | {name: (4 * array.astype(np.float32)).astype(FP8) for name, array in linear.items()}
    scales = {name.replace(".weight", ".scale_weight"): np.array(0.25, np.float32) for name in linear}
    save_file(path, tensors | scales | {"scaled_fp8": np.zeros(0, FP8)})
    expected = arrays | {name: tensors[name].astype(np.float32) / 4 for name in linear}
    same(t5_part(path).load(device="cpu", dtype="float32"), expected)


def test_packed_weights_are_named(arrays, tmp_path):
    """bitsandbytes packs two weights in a byte: the shapes it leaves would only puzzle."""
    name = next(n for n in arrays if n.endswith("wo.weight"))
    packed = {name: np.zeros((arrays[name].size // 2, 1), np.uint8), f"{name}.absmax": np.zeros(4, np.float32)}
    save_file(tmp_path / "t5.safetensors", arrays | packed)
    said = r"packed in bitsandbytes' 4 bits .*; use its bf16, fp16, fp8, int8, NF4 or GGUF file"
    with pytest.raises(ModelFileError, match=said):
        t5_part(tmp_path / "t5.safetensors").load(device="cpu", dtype="float32")


def test_no_fp8_array_reaches_the_device(arrays, tmp_path, monkeypatch):
    """CuPy has no such type."""
    put, seen = CpuBackend.to_device, list[str]()
    monkeypatch.setattr(CpuBackend, "to_device", lambda self, host: (seen.append(host.dtype.name), put(self, host))[1])
    path = tmp_path / "t5.safetensors"
    save_file(path, {name: array.astype(FP8) for name, array in arrays.items()})
    same(t5_part(path).load(device="cpu", dtype="bfloat16"), arrays, "bfloat16")
    assert {n for n in seen if "float" in n} == {"bfloat16"}


@pytest.mark.parametrize("family", ["sd3", "flux", "all-in-one", "the folder itself"])
def test_inside_something_larger(arrays, tmp_path, family):
    other = {"encoder.layers.0.x": np.zeros(3, np.float16)}
    if family == "all-in-one":
        path = tmp_path / "sd3_medium_incl_clips_t5xxl.safetensors"
        save_file(path, below("text_encoders.t5xxl.transformer.", arrays) | below("text_encoders.clip_l.", other))
    else:
        names = sorted(arrays)
        parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        folder = tmp_path / ("text_encoder_3" if family == "sd3" else "text_encoder_2")
        folder.mkdir()
        for file, held in parts.items():
            save_file(folder / file, {name: arrays[name] for name in held})
        weight_map = {name: file for file, held in parts.items() for name in held}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for component in ["text_encoder", "text_encoder_2"] if family == "sd3" else ["text_encoder"]:
            (tmp_path / component).mkdir()
            save_file(tmp_path / component / "model.safetensors", other)
        path = folder if family == "the folder itself" else tmp_path
    same(t5_part(path).load(device="cpu", dtype="float32"), arrays)


def test_all_faults_in_one_message(arrays, tmp_path):
    path = tmp_path / "broken.safetensors"
    bad = {n: a for n, a in arrays.items() if n != "encoder.final_layer_norm.weight"}
    bad["encoder.block.1.layer.0.SelfAttention.k.weight"] = np.zeros((3, 3), np.float16)
    save_file(path, bad | {"encoder.block.1.layer.0.SelfAttention.k.strange": np.zeros((), np.float32)})
    with pytest.raises(ModelFileError) as caught:
        t5_part(path).load(device="cpu", dtype="float32")
    text = str(caught.value)
    assert "missing: 1\n    encoder.final_layer_norm.weight" in text
    assert "unexpected: 1\n    encoder.block.1.layer.0.SelfAttention.k.strange" in text
    assert "SelfAttention.k.weight: expected (32, 32), found (3, 3)" in text


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"text_model.embeddings.token_embedding.weight": (49408, 768)}, "found CLIP-L"),
        ({"anything": (3,)}, "not a model that is known"),
        (
            {"encoder.block.0.layer.0.SelfAttention.q.weight": (8, 8)},
            r"a tensor shared\.weight of 2 dimensions, found none",
        ),
    ],
)
def test_not_a_t5_encoder(tmp_path, tensors, found):
    path = tmp_path / "other.safetensors"
    save_file(path, {name: np.zeros(shape, np.uint8) for name, shape in tensors.items()})
    with pytest.raises(ModelFileError, match=found):
        t5_part(path).load(device="cpu", dtype="float32")


def test_the_digest_is_of_what_is_read(arrays, tmp_path):
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    save_file(paths[0], arrays)
    save_file(paths[1], arrays | {"decoder.final_layer_norm.weight": np.ones(4, np.float16)})
    changed = arrays["shared.weight"].copy()
    changed[3, 4] += 1.0
    save_file(paths[2], arrays | {"shared.weight": changed})
    first, with_decoder, other = (t5_part(path).digest() for path in paths)
    assert first == with_decoder != other


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, FP8])
def test_the_host_holds_one_tensor_beyond_the_model(tmp_path, stored):
    """48 tensors of 2 MiB: what is allocated at any time, besides the model, stays below two of them in fp32."""
    arch = T5Arch(width=1024, layers=6, heads=16, head_dim=64, hidden=1024, vocabulary=1024, buckets=32)
    shapes = T5Encoder(arch).shapes()
    path = tmp_path / "t5.safetensors"
    save_file(path, {name: np.ones(shape, stored) for name, shape in shapes.items()})
    tracemalloc.start()
    try:
        model = t5_part(path).load(device="cpu", dtype="bfloat16")
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    held = sum(t.data.nbytes for _, t in model.weights())
    assert held > 40 * 2 * 2**20
    assert kept >= held
    assert peak - held < 2 * 4 * 2**20
