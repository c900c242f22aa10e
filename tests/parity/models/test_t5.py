"""The T5 encoder against transformers' T5EncoderModel, with and without masks, and where fp16 overflows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder, position_buckets

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

WIDE = T5Arch(width=40, layers=3, heads=4, head_dim=16, hidden=96, vocabulary=120, buckets=32)  # heads over the width
NARROW = T5Arch(width=48, layers=2, heads=3, head_dim=8, hidden=64, vocabulary=90, buckets=16)
UMT5 = replace(WIDE, own_biases=True)


def transformers_encoder(arch):
    kind = "UMT5" if arch.own_biases else "T5"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=arch.vocabulary,
        d_model=arch.width,
        d_kv=arch.head_dim,
        d_ff=arch.hidden,
        num_layers=arch.layers,
        num_heads=arch.heads,
        relative_attention_num_buckets=arch.buckets,
        feed_forward_proj="gated-gelu",
    )
    return getattr(transformers, f"{kind}EncoderModel")(config)


@pytest.fixture(autouse=True)
def norms_in_fp64(monkeypatch):
    """transformers takes the mean square in fp32 whatever the input is, which would hide what is measured here."""

    def forward(self, x):
        return self.weight * (x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    for kind in (transformers.models.t5.modeling_t5.T5LayerNorm, transformers.models.umt5.modeling_umt5.UMT5LayerNorm):
        monkeypatch.setattr(kind, "forward", forward)


def named_twice(arrays):
    """The twin has the embedding under both of its names."""
    return arrays | {"encoder.embed_tokens.weight": arrays["shared.weight"]}


@pytest.fixture
def pair(dtype, scrambled):
    def make(arch, seed=0):
        model = scrambled(T5Encoder(arch), dtype, seed)
        for name, t in model.weights():
            if name.endswith(("shared.weight", "relative_attention_bias.weight")):
                t.data[...] *= 50.0  # of a size that the attention can tell apart
        arrays = {name: torch.from_numpy(t.numpy().astype(np.float64)) for name, t in model.weights()}
        twin = transformers_encoder(arch).double().eval()
        twin.load_state_dict(named_twice(arrays), strict=True)
        return model, twin

    return make


def batch(arch, length, seed=1):
    return np.random.default_rng(seed).integers(0, arch.vocabulary, (2, length)).astype(np.int32)


@pytest.mark.parametrize("length", [1, 7, 77, 300])
@pytest.mark.parametrize("arch", [WIDE, NARROW, UMT5], ids=["wide", "narrow", "umt5"])
def test_hidden_state(pair, bound, off, arch, length):
    model, twin = pair(arch)
    ids = batch(arch, length)
    with torch.no_grad():
        expected = twin(input_ids=torch.from_numpy(ids.astype(np.int64))).last_hidden_state
    assert off(model(tensor(ids)), expected) < bound


@pytest.mark.parametrize("arch", [WIDE, UMT5], ids=["t5", "umt5"])
def test_masked_padding(pair, bound, off, arch):
    model, twin = pair(arch)
    ids = batch(WIDE, 20)
    mask = np.arange(20)[None] < np.array([[5], [20]])
    with torch.no_grad():
        expected = twin(
            input_ids=torch.from_numpy(ids.astype(np.int64)), attention_mask=torch.from_numpy(mask.astype(np.int64))
        ).last_hidden_state
    found = model(tensor(ids), tensor(mask))
    assert off(found, expected) < bound
    other = np.where(mask, ids, 3).astype(np.int32)
    np.testing.assert_array_equal(found.numpy()[0, :5], model(tensor(other), tensor(mask)).numpy()[0, :5])


@pytest.mark.parametrize("buckets", [8, 16, 32, 64])
def test_buckets_of_every_distance(buckets):
    attention = transformers.models.t5.modeling_t5.T5Attention
    distance = torch.arange(1024)[None, :] - torch.arange(1024)[:, None]
    expected = attention._relative_position_bucket(distance, bidirectional=True, num_buckets=buckets)
    np.testing.assert_array_equal(position_buckets(1024, buckets), expected.numpy())


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_sums_and_products_beyond_fp16(half, scrambled):
    """Residuals and gated products of several 100,000, as in T5-XXL, against transformers in fp64."""
    model = scrambled(T5Encoder(WIDE), "float32")
    for name, t in model.weights():
        gain = {"wi_0.weight": 30.0, "wi_1.weight": 60.0, "wo.weight": 200.0, "SelfAttention.o.weight": 30.0}
        t.data[...] *= next((g for end, g in gain.items() if name.endswith(end)), 1.0)
    rounded = {name: t.data.astype(tensor(0.0, half).dtype) for name, t in model.weights()}
    twin = transformers_encoder(WIDE).double().eval()
    twin.load_state_dict(named_twice({n: torch.from_numpy(a.astype(np.float64)) for n, a in rounded.items()}))
    ids = batch(WIDE, 12)
    with torch.no_grad():
        out = twin(input_ids=torch.from_numpy(ids.astype(np.int64)), output_hidden_states=True)
    assert max(h.abs().max() for h in out.hidden_states) > 3 * 65504

    for _, module, attr, _ in model.named_specs():
        weight = getattr(module, attr)
        object.__setattr__(module, attr, tensor(weight.data.astype(tensor(0.0, half).dtype)))
    found = model(tensor(ids)).numpy().astype(np.float64)
    expected = out.last_hidden_state.numpy()
    assert np.abs(found - expected).max() < {"float16": 3e-3, "bfloat16": 3e-2}[half] * np.abs(expected).max()
