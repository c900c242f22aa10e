"""The text encoders against transformers, and a caption's conditioning against its rules, spelt out."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.text_encoders.clip.encoder import end_positions
from flame_train.text_encoders.clip.names import clip_from_bare_transformers
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from tests.models.clip_windows import encode_prompts, encode_windows

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

BOS, EOS = 49406, 49407
CLIP_L = ClipArch(width=48, layers=3, heads=4, hidden=96, activation="quick_gelu", projection=None)
BIGG = ClipArch(width=40, layers=4, heads=2, hidden=160, activation="gelu", projection=24)


def transformers_encoder(arch):
    config = transformers.CLIPTextConfig(
        vocab_size=arch.vocabulary,
        hidden_size=arch.width,
        intermediate_size=arch.hidden,
        num_hidden_layers=arch.layers,
        num_attention_heads=arch.heads,
        max_position_embeddings=arch.positions,
        hidden_act=arch.activation,
        projection_dim=arch.projection or 16,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    plain = arch.projection is None
    return (transformers.CLIPTextModel if plain else transformers.CLIPTextModelWithProjection)(config)


def to_names_of(twin):
    """The table to the twin's names, None if they are ours: newer plain text models drop `text_model.`."""
    native = any(name.startswith("text_model.") for name in twin.state_dict())
    return None if native else clip_from_bare_transformers().inverse


@pytest.fixture
def pair(dtype, fill, scrambled):
    def make(arch, seed):
        model = scrambled(ClipTextEncoder(arch), dtype, seed)
        for _, t in model.weights():
            if t.shape[0] in (arch.vocabulary, arch.positions):
                t.data[...] *= 20.0  # embeddings of a size that the attention can tell apart
        twin = transformers_encoder(arch)
        return model, fill(model, twin, to_names_of(twin))

    return make


def rows(pad, lengths, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.full((len(lengths), 77), pad, np.int32)
    for row, n in zip(ids, lengths, strict=True):
        row[: n + 2] = [BOS, *rng.integers(300, 40000, n), EOS]
    return ids


@pytest.mark.parametrize(("arch", "pad"), [(CLIP_L, EOS), (BIGG, 0)], ids=["clip_l", "bigg"])
def test_hidden_state_and_pooled_text(pair, bound, off, arch, pad):
    model, twin = pair(arch, 1)
    ids = rows(pad, [0, 9, 75])
    states, pooled = model(tensor(ids), tensor(end_positions(ids)))
    with torch.no_grad():
        expected = twin(input_ids=torch.from_numpy(ids.astype(np.int64)), output_hidden_states=True)
    assert off(states, expected.hidden_states[-2]) < bound
    if arch.projection is None:
        assert pooled is None
    else:
        assert off(pooled, expected.text_embeds) < bound


def test_the_padding_after_the_end_token_changes_nothing_before_it(pair):
    model, _ = pair(BIGG, 2)
    with_zeros, with_ends = rows(0, [5]), rows(EOS, [5])
    (a, pooled_a), (b, pooled_b) = (model(tensor(i), tensor(end_positions(i))) for i in (with_zeros, with_ends))
    np.testing.assert_array_equal(a.numpy()[:, :7], b.numpy()[:, :7])
    np.testing.assert_array_equal(pooled_a.numpy(), pooled_b.numpy())


def test_fluxs_pooled_text(pair, bound, off):
    """What FluxPipeline calls pooled_prompt_embeds: normalised, at the end token, not projected."""
    model, twin = pair(CLIP_L, 1)
    ids = rows(EOS, [0, 9, 75])
    with torch.no_grad():
        expected = twin(input_ids=torch.from_numpy(ids.astype(np.int64))).pooler_output
    assert off(encode_windows(model, ids[:, None], unprojected=True)[1], expected) < bound


@pytest.mark.parametrize("windows", [1, 2, 3])
def test_context_of_long_captions(pair, bound, off, windows):
    """Window by window through transformers, laid in a row without the inner begin and end tokens."""
    model_l, twin_l = pair(CLIP_L, 1)
    model_g, twin_g = pair(BIGG, 2)
    lengths = [75] * (windows - 1) + [20]
    ids_l, ids_g = (np.stack([rows(pad, lengths, seed) for seed in (0, 1)]) for pad in (EOS, 0))
    context, pooled = encode_prompts(model_l, model_g, ids_l, ids_g)

    joined, first_pooled = [], []
    for caption in range(2):
        sides = []
        for twin, ids in ((twin_l, ids_l), (twin_g, ids_g)):
            with torch.no_grad():
                out = twin(input_ids=torch.from_numpy(ids[caption].astype(np.int64)), output_hidden_states=True)
            state = out.hidden_states[-2].numpy()
            words = [state[w, 1:76] for w in range(windows)]
            sides.append(np.concatenate([state[0, :1], *words, state[-1, 76:]]))
        joined.append(np.concatenate(sides, axis=-1))
        first_pooled.append(out.text_embeds[0].numpy())
    assert context.shape == (2, 75 * windows + 2, CLIP_L.width + BIGG.width)
    assert off(context, np.stack(joined)) < bound
    assert off(pooled, np.stack(first_pooled)) < bound
