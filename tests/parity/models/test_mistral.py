"""Mistral's states and token ids against transformers' and mistral-common's, as files and folders, read in turn."""

from __future__ import annotations

import base64
import json

import ml_dtypes
import numpy as np
import pytest

from flame_train.config.schema import ModelSection, TextEncodersSection
from flame_train.engine import tensor
from flame_train.errors import ModelFileError
from flame_train.io.safetensors import save_file
from flame_train.models.common.family import Opening
from flame_train.text_encoders.mistral.encoder import MistralEncoder, behind_padding
from flame_train.text_encoders.mistral.names import mistral_part
from flame_train.text_encoders.mistral.network import TAPS, Mistral, MistralArch
from flame_train.text_encoders.mistral.tekken_file import find_tekken, tekken_of
from flame_train.text_encoders.mistral.tokenizer import NAMED, WORD, TekkenTokenizer, bytes_alone, published_tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

ARCH = MistralArch(width=24, layers=30, heads=2, kv_heads=1, hidden=40, vocabulary=1256)
SAID = "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
SAID += "relationships, object\nattribution and actions without speculation."
A_LOVELY_CAT = (
    *(1, 17, 4568, 1584, 1420, 26554, 1455, 12738, 2314, 3937, 38340, 1046, 3213, 5628, 37253, 11688, 30557, 1408),
    *(3481, 14608, 1044, 3481, 1010, 2452, 5604, 1321, 10636, 3816, 67813, 1046, 18, 3, 1097, 45988, 7990, 4),
)
"""Of mistral-common."""


@pytest.fixture(scope="module")
def pair():
    model = Mistral(ARCH)
    rng = np.random.default_rng(0)
    model.init(rng, "float32")
    for name, t in model.weights():
        if "norm" in name:
            t.data[...] = rng.uniform(0.5, 1.5, t.shape)
    config = transformers.MistralConfig(
        vocab_size=ARCH.vocabulary,
        hidden_size=ARCH.width,
        num_hidden_layers=ARCH.layers + 2,
        num_attention_heads=ARCH.heads,
        num_key_value_heads=ARCH.kv_heads,
        intermediate_size=ARCH.hidden,
        head_dim=ARCH.head_dim,
        rms_norm_eps=ARCH.eps,
        rope_parameters={"rope_type": "default", "rope_theta": ARCH.theta},
        sliding_window=None,
    )
    twin = transformers.MistralModel(config).eval()
    state = {name: torch.from_numpy(np.array(t.numpy())) for name, t in model.weights()}
    left = twin.load_state_dict(state, strict=False)
    assert {name.split(".")[1] for name in left.missing_keys if name != "norm.weight"} == {"30", "31"}
    return model, twin


def encoder_of(path, folder):
    (folder / "tokenizer.json").write_text(bytes_alone())
    text = TextEncodersSection(mistral_tokens=256)
    return MistralEncoder.opened(mistral_part(path, "text_encoder_mistral"), Opening(path, ModelSection(), text, 75))


def test_token_ids_of_the_published_vocabulary():
    tokenizer = TekkenTokenizer()
    ids = tokenizer.encode(f"<s>[SYSTEM_PROMPT]{SAID}[/SYSTEM_PROMPT][INST]a lovely cat[/INST]")
    assert tuple(ids) == A_LOVELY_CAT
    assert (tokenizer.pad, tokenizer.rows) == (11, 131072)


def tekken_json(tokens=3000, special=100, listed=True):
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(published_tokens()[: tokens + 5])
    ]
    config = {"pattern": WORD, "default_vocab_size": tokens + special, "default_num_special_tokens": special}
    numbers = {number: name for name, number in NAMED.items()}
    listed_ones = [{"rank": i, "token_str": numbers.get(i, f"[{i}]"), "is_control": True} for i in range(20)]
    return {"config": config, "vocab": entries} | ({"special_tokens": listed_ones} if listed else {})


def test_the_vocabulary_of_a_tekken_json(tmp_path):
    """Beside the encoder, or as bytes in its file, which comes first; transformers' converter makes the same ids."""
    from transformers.integrations.mistral.tokenizer import MistralConverter

    beside, inside, encoder = tmp_path / "tekken.json", tmp_path / "inside.json", tmp_path / "x.safetensors"
    beside.write_text(json.dumps(tekken_json()))
    inside.write_text(json.dumps(tekken_json(2000, 30)))
    save_file(encoder, {"model.norm.weight": np.zeros(2, np.float32)})
    texts = (SAID, "кошка на крыше, 猫が屋根の上に\n\n  1234 ", "[INST]a[/INST]<pad>", "")
    for file, rows in ((beside, 3100), (inside, 2030)):
        if file is inside:
            tensor = np.frombuffer(file.read_bytes(), np.uint8)
            save_file(encoder, {"model.norm.weight": np.zeros(2, np.float32), "text_encoders.tekken_model": tensor})
        twin, found = MistralConverter(str(file)).converted(), find_tekken(encoder, [encoder], rows)
        assert [found.encode(text) for text in texts] == [twin.encode(text).ids for text in texts]
        assert (found.rows, found.pad) == (rows, 11)
        assert found.fingerprint != TekkenTokenizer().fingerprint
        with pytest.raises(ModelFileError, match=rf"has {rows} tokens, more than the {rows - 1} rows of the encoder"):
            find_tekken(encoder, [encoder], rows - 1)


def test_the_published_vocabulary_as_a_file_is_the_published_one():
    """An old version, which does not list its special tokens: caches keep the name they have."""
    read = tekken_of(json.dumps(tekken_json(130072, 1000, listed=False)).encode(), "tekken.json")
    assert type(read) is TekkenTokenizer


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda raw: raw[:-30], "it has no config"),
        (lambda raw: b"[]", "it has no config"),
        (lambda raw: raw.replace(b'"default_vocab_size": 3100', b'"default_vocab_size": 3200'), "it has 3005 tokens, "),
        (lambda raw: raw.replace(b'"rank": 300,', b'"rank": 301,'), "of rank 300 at its place"),
        (lambda raw: raw.replace(b'"AQ=="', b'"A?=="'), "base64"),
        (lambda raw: raw.replace(b'"AQ=="', b'"AA=="'), "a token is there twice"),
        (lambda raw: raw.replace(b'"[/INST]"', b'"[/inst]"'), r"it has no place of its own for \[/INST\]"),
        (lambda raw: raw.replace(b'"pattern": "', b'"pattern": "('), "."),
    ],
)
def test_a_damaged_vocabulary_is_refused_by_name(tmp_path, change, reason):
    raw, encoder = change(json.dumps(tekken_json()).encode()), tmp_path / "x.safetensors"
    (tmp_path / "tekken.json").write_bytes(raw)
    with pytest.raises(ModelFileError, match=rf"tekken\.json: not a tekken\.json of Mistral \(.*({reason})"):
        find_tekken(encoder, [encoder], 131072)
    save_file(encoder, {"tekken_model": np.frombuffer(raw, np.uint8)})
    with pytest.raises(ModelFileError, match=rf"x\.safetensors: tekken_model: not a .*({reason})"):
        find_tekken(encoder, [encoder], 131072)
    save_file(encoder, {"tekken_model": np.zeros(3, np.float32)})
    with pytest.raises(ModelFileError, match=r"x\.safetensors: tekken_model: expected at most .* found 12 of F32"):
        find_tekken(encoder, [encoder], 131072)


def test_captions_with_padding_before_them_as_the_denoiser_sees_it(pair, off, tmp_path):
    """transformers pads on the left; here a caption comes first, one state of padding stands for all."""
    model, twin = pair
    save_file(tmp_path / "x.safetensors", {f"model.{name}": t.numpy() for name, t in model.weights()})
    encoder = encoder_of(tmp_path / "x.safetensors", tmp_path)
    length = encoder.length
    inputs = [encoder.inputs(text) for text in ("", "a [IMG]cat", "кошка на крыше", "long " * 99)]
    ids = np.stack([row["ids"] for row in inputs])
    own = [int(row["mask"].sum()) for row in inputs]
    assert own[0] + 5 == own[1] < own[2] < own[3] == length
    left = np.full((4, length), encoder.tokenizer.pad)
    for row, (i, n) in zip(left, zip(ids, own, strict=True), strict=True):
        row[length - n :] = i[:n]
    mask = np.arange(length) >= length - np.array(own)[:, None]
    with torch.no_grad():
        states = twin(torch.from_numpy(left), torch.from_numpy(mask.astype(np.int64)), output_hidden_states=True)
    expected = torch.cat([states.hidden_states[tap] for tap in TAPS], dim=-1).numpy()
    network = encoder.load(device="cpu", dtype="fp32", precision="auto")
    made = encoder.encode(network, {name: tensor(np.stack([row[name] for row in inputs])) for name in inputs[0]})
    assert made["mistral_rows"].numpy().tolist() == [n + 1 for n in own]
    kept = encoder.without_padding(inputs[1], {"mistral": made["mistral"].numpy()[1]})["mistral"]
    assert len(kept) == own[1] + 1
    assert off(behind_padding(made["mistral"], made["mistral_rows"], length), expected) < 1e-5
    alone = behind_padding(tensor(kept[None]), tensor(np.array([len(kept)], np.int32)), length)
    np.testing.assert_array_equal(
        alone.numpy()[0], behind_padding(made["mistral"], made["mistral_rows"], length).numpy()[1]
    )


def test_only_what_is_used_is_read(pair, tmp_path):
    """A folder of transformers in one file and in shards, whole pipelines, single files: layers behind are left."""
    model, twin = pair
    twin.save_pretrained(tmp_path / "text_encoder", max_shard_size="40KB")
    assert len(list((tmp_path / "text_encoder").glob("*.safetensors"))) > 1
    same(mistral_part(tmp_path / "text_encoder"), model)
    config = (tmp_path / "text_encoder" / "config.json").read_text()
    state = {name: t.numpy() for name, t in model.weights()}
    behind = {"layers.30.mlp.up_proj.weight": np.zeros(2, np.float32), "norm.weight": np.zeros(2, np.float32)}
    for prefix in ("", "model.", "model.language_model.", "language_model.model."):
        file = tmp_path / f"alone{prefix}" / "model.safetensors"
        file.parent.mkdir(exist_ok=True)
        (file.parent / "config.json").write_text(config)
        others = {"tekken_model": np.zeros(3, np.uint8), "vision_tower.x.weight": np.zeros(2, np.float32)}
        save_file(file, {prefix + name: array for name, array in (state | behind).items()} | (others if prefix else {}))
        same(mistral_part(file.parent), model)


def same(part, model):
    assert part.network.arch == model.arch
    loaded = part.load(device="cpu", dtype="float32")
    for (name, t), (_, own) in zip(sorted(loaded.weights()), sorted(model.weights()), strict=True):
        np.testing.assert_array_equal(t.numpy(), own.numpy(), err_msg=name)


def test_one_layer_is_held_at_a_time(pair, off, tmp_path):
    """From scaled fp8, which is unpacked layer by layer."""
    model, _ = pair
    state = {f"model.{name}": t.numpy() for name, t in model.weights()}
    name = "model.layers.7.mlp.up_proj"
    scaled = state | {
        f"{name}.weight": (4 * state[f"{name}.weight"]).astype(ml_dtypes.float8_e4m3fn),
        f"{name}.scale_weight": np.array(0.25, np.float32),
        "scaled_fp8": np.zeros(0, ml_dtypes.float8_e4m3fn),
    }
    save_file(tmp_path / "x.safetensors", scaled)
    part = mistral_part(tmp_path / "x.safetensors")
    whole, in_turn = part.load(device="cpu", dtype="float32"), part.load_in_turn(device="cpu", dtype="float32")
    held = []

    def holding(block):
        held.append(sum("weight" in layer.self_attn.q_proj.__dict__ for layer in in_turn.layers))

    read = in_turn.layers[0].weight_policy.ready
    in_turn.layers[0].weight_policy.ready = lambda block: (read(block), holding(block))
    ids, own = tensor(np.arange(12, dtype=np.int32)[None]), tensor(np.arange(12)[None] < 9)
    for _ in range(2):
        np.testing.assert_array_equal(in_turn(ids, own).numpy(), whole(ids, own).numpy())
    assert held == [1] * 60


def test_a_file_with_too_few_layers_is_refused(pair, tmp_path):
    model, _ = pair
    state = {name: t.numpy() for name, t in model.weights() if ".29." not in name}
    save_file(tmp_path / "x.safetensors", state)
    with pytest.raises(ModelFileError, match="expected a Mistral Small with 30 layers or more, found 29"):
        mistral_part(tmp_path / "x.safetensors")
