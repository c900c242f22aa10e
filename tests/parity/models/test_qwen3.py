"""Qwen3's hidden states against transformers', at every tap, with padding and without; as files and as folders."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.io.safetensors import save_file
from flame_train.text_encoders.qwen3.encoder import THINKING, WITHOUT_THINKING
from flame_train.text_encoders.qwen3.names import qwen3_part
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from flame_train.text_encoders.qwen3.tokenizer import QwenTokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

ARCH = Qwen3Arch(width=40, layers=4, heads=6, kv_heads=2, hidden=72, vocabulary=151936, head_dim=16)
OTHER = Qwen3Arch(width=32, layers=2, heads=4, kv_heads=4, hidden=48, vocabulary=90, head_dim=8, theta=1e4, eps=1e-5)
CAPTIONS = ("", "a photo of a cat", "屋根の上の猫、夕焼け", "кошка на крыше " * 20)


def twin_of(model):
    arch = model.arch
    config = transformers.Qwen3Config(
        vocab_size=arch.vocabulary,
        hidden_size=arch.width,
        num_hidden_layers=arch.layers,
        num_attention_heads=arch.heads,
        num_key_value_heads=arch.kv_heads,
        intermediate_size=arch.hidden,
        head_dim=arch.head_dim,
        rms_norm_eps=arch.eps,
        rope_parameters={"rope_type": "default", "rope_theta": arch.theta},
    )
    twin = transformers.Qwen3ForCausalLM(config).eval()
    weights = {f"model.{name}": torch.from_numpy(t.numpy().astype(np.float32)) for name, t in model.weights()}
    assert set(twin.load_state_dict(weights, strict=False).missing_keys) <= {"lm_head.weight"}
    return twin


@pytest.fixture(scope="module")
def pair():
    model = Qwen3(ARCH)
    model.init(np.random.default_rng(0), "float32")
    for name, t in model.weights():
        if "norm" in name:
            t.data[...] = np.random.default_rng(1).uniform(0.5, 1.5, t.shape)
    return model, twin_of(model)


def states(twin, ids, mask):
    with torch.no_grad():
        out = twin(
            input_ids=torch.from_numpy(ids.astype(np.int64)),
            attention_mask=torch.from_numpy(mask.astype(np.int64)),
            output_hidden_states=True,
        )
    return [state.numpy() for state in out.hidden_states]


@pytest.mark.parametrize("template", [THINKING, WITHOUT_THINKING], ids=["z-image", "klein"])
def test_every_tap_of_captions_with_padding(pair, off, template):
    model, twin = pair
    rows = [QwenTokenizer().row(template.around(text), 48) for text in CAPTIONS]
    ids, mask = np.stack([row.ids for row in rows]), np.stack([row.mask for row in rows])
    assert mask.all(1).sum() == 1
    expected = states(twin, ids, mask)
    taps = range(ARCH.layers + 1)
    for tap, found in zip(taps, model(tensor(ids), tensor(mask), taps), strict=True):
        assert off(found, expected[tap]) < 1e-5, tap
    (second_last,) = model(tensor(ids), None, (-2,))  # tokens see those before them alone
    assert off(second_last.numpy()[mask], expected[-2][mask]) < 1e-5


def test_other_heads_base_and_epsilon(off):
    model = Qwen3(OTHER)
    model.init(np.random.default_rng(2), "float32")
    ids = np.random.default_rng(3).integers(0, 90, (2, 300)).astype(np.int32)
    (found,) = model(tensor(ids))
    assert off(found, states(twin_of(model), ids, np.ones_like(ids))[-1]) < 1e-5


def test_qwen2_5_of_a_vision_model(off, tmp_path):
    """Biases instead of norms; read from the folder that transformers saves."""
    arch = Qwen3Arch(32, 2, heads=4, kv_heads=2, hidden=48, vocabulary=90, head_dim=8, biases=True, sections=(1, 1, 2))
    model = Qwen3(arch)
    rng = np.random.default_rng(4)
    model.init(rng, "float32")
    for _, t in model.weights():
        if t.ndim == 1:
            t.data[...] = rng.uniform(0.5, 1.5, t.shape)
    text = {
        "vocab_size": 90,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
    }
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    twin = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    ).eval()
    state = {name: torch.from_numpy(np.array(t.numpy())) for name, t in model.weights()}
    twin.model.language_model.load_state_dict(state)
    ids = rng.integers(0, 90, (2, 40)).astype(np.int32)
    mask = np.arange(40)[None] < np.array([[40], [29]])
    (found,) = model(tensor(ids))
    assert off(found.numpy()[mask], states(twin, ids, mask)[-1][mask]) < 1e-5
    twin.save_pretrained(tmp_path / "text_encoder")
    same(qwen3_part(tmp_path), model)


def same(part, model):
    loaded = part.load(device="cpu", dtype="float32")
    assert loaded.arch == model.arch
    for (name, t), (_, own) in zip(sorted(loaded.weights()), sorted(model.weights()), strict=True):
        np.testing.assert_array_equal(t.numpy(), own.numpy(), err_msg=name)


def test_what_transformers_saves_is_read(pair, tmp_path):
    """One file, shards, and the folder of a pipeline, with the numbers of config.json; the head is left."""
    model = Qwen3(OTHER)
    model.init(np.random.default_rng(2), "float32")
    twin = twin_of(model)
    twin.save_pretrained(tmp_path / "whole")
    same(qwen3_part(tmp_path / "whole"), model)
    twin.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    same(qwen3_part(tmp_path / "shards"), model)
    twin.save_pretrained(tmp_path / "pipe" / "text_encoder")
    same(qwen3_part(tmp_path / "pipe"), model)

    state = {name: t.numpy() for name, t in model.weights()}
    published = 1e6, 1e-6
    for prefix in ("", "model.", "model.language_model.", "text_encoders.qwen3_4b.transformer.model."):
        save_file(tmp_path / "one.safetensors", {prefix + name: array for name, array in state.items()})
        part = qwen3_part(tmp_path / "one.safetensors")
        assert (part.network.arch.theta, part.network.arch.eps) == published


def test_scaled_fp8(tmp_path):
    model = Qwen3(OTHER)
    model.init(np.random.default_rng(2), "float32")
    state = {f"model.{name}": t.numpy() for name, t in model.weights()}
    name = "model.layers.1.mlp.up_proj"
    stored = (4 * state[f"{name}.weight"]).astype(ml_dtypes.float8_e4m3fn)
    scaled = state | {f"{name}.weight": stored, f"{name}.scale_weight": np.array(0.25, np.float32)}
    save_file(tmp_path / "x.safetensors", scaled | {"scaled_fp8": np.zeros(0, ml_dtypes.float8_e4m3fn)})
    loaded = dict(qwen3_part(tmp_path / "x.safetensors").load(device="cpu", dtype="float32").weights())
    np.testing.assert_array_equal(loaded["layers.1.mlp.up_proj.weight"].numpy(), stored.astype(np.float32) / 4)


def test_what_the_folder_states_and_this_code_cannot_do_is_refused(tmp_path):
    from flame_train.errors import ModelFileError

    model = Qwen3(OTHER)
    model.init(np.random.default_rng(2), "float32")
    twin_of(model).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for change, words in [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ({"num_attention_heads": 2, "num_key_value_heads": 1}, "num_attention_heads is 2, expected 4; num_key_value"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a positive number"),
    ]:
        path.write_text(json.dumps(config | change))
        with pytest.raises(ModelFileError, match=words):
            qwen3_part(tmp_path)
    path.write_text("[")
    with pytest.raises(ModelFileError, match="cannot be read as JSON"):
        qwen3_part(tmp_path)
