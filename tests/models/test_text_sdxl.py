"""How captions become SDXL's conditioning. The encoders' numbers are in tests/parity."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.engine import no_grad, tensor
from flame_train.text_encoders.clip.encoder import end_positions
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.clip.tokenizer import ClipTokenizer
from tests.models.clip_windows import encode_prompts

LONG = " ".join(["a red barn by the lake"] * 20)


@pytest.fixture(scope="module")
def encoders():
    made = ClipTextEncoder(ClipArch.tiny("quick_gelu")), ClipTextEncoder(ClipArch.tiny("gelu", 16))
    for i, model in enumerate(made):
        model.init(np.random.default_rng(i))
    return made


def ids(caption, windows):
    """The two tokenizers' ids for one caption, as a batch of one."""
    return tuple(ClipTokenizer(pad).chunks(caption, 3, windows).ids[None] for pad in (49407, 0))


def test_end_is_where_the_words_end_whatever_the_padding():
    for side in ids("a cat", 1):
        assert end_positions(side[0]).tolist() == [3]  # begin, a, cat, end
    for side in ids("", 1):
        assert end_positions(side[0]).tolist() == [1]
    assert end_positions(ids(LONG, 1)[1][0])[0] == 76


def test_one_window_passes_as_it_is(encoders):
    clip_l, bigg = encoders
    ids_l, ids_g = ids("a cat", 1)
    with no_grad():
        context, pooled = encode_prompts(clip_l, bigg, ids_l, ids_g)
        states_l, none = clip_l(tensor(ids_l[0]), tensor(np.array([3], np.int32)))
        states_g, expected = bigg(tensor(ids_g[0]), tensor(np.array([3], np.int32)))
    assert none is None
    np.testing.assert_array_equal(context.numpy(), np.concatenate([states_l.numpy(), states_g.numpy()], -1))
    np.testing.assert_array_equal(pooled.numpy(), expected.numpy())


def test_windows_are_joined_and_the_first_gives_the_pooled_text(encoders):
    clip_l, bigg = encoders
    ids_l, ids_g = ids(LONG, 1)
    windows = ids_l.shape[1]
    assert windows == 2
    with no_grad():
        context, pooled = encode_prompts(clip_l, bigg, ids_l, ids_g)
        each = [encode_prompts(clip_l, bigg, ids_l[:, w : w + 1], ids_g[:, w : w + 1]) for w in range(windows)]
    assert context.shape == (1, 75 * windows + 2, 64)
    first, second = (c.numpy() for c, _ in each)
    expected = np.concatenate([first[:, :76], second[:, 1:]], axis=1)
    np.testing.assert_allclose(context.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pooled.numpy(), each[0][1].numpy(), rtol=1e-5, atol=1e-6)


def test_captions_of_a_batch_do_not_mix(encoders):
    sides = [ids(caption, 2) for caption in ("a cat", LONG)]
    ids_l, ids_g = (np.concatenate(side) for side in zip(*sides, strict=True))
    with no_grad():
        context, pooled = encode_prompts(*encoders, ids_l, ids_g)
        for row, (one_l, one_g) in enumerate(sides):
            c, p = encode_prompts(*encoders, one_l, one_g)
            np.testing.assert_allclose(context.numpy()[row], c.numpy()[0], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(pooled.numpy()[row], p.numpy()[0], rtol=1e-5, atol=1e-6)
