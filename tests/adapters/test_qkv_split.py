"""LoRAs of modules that diffusers cuts up: effect by the formula, bits on every way there and back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.qkv_split import check_splittable, join, split
from flame_train.io.keymap import Op, Source

QKV = {path: Source(("qkv",), Op.ROWS, i, 3) for i, path in enumerate("qkv")}
LINEAR1 = {
    "q": Source(("linear1",), Op.ROWS, 0, 7),
    "k": Source(("linear1",), Op.ROWS, 1, 7),
    "v": Source(("linear1",), Op.ROWS, 2, 7),
    "mlp": Source(("linear1",), Op.ROWS, 3, 7, 4),
}
ROWS = {"q": 2, "k": 2, "v": 2, "mlp": 8}
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]


def lora(rows, rank=2, alpha=3.0, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    down, up = rng.standard_normal((rank, 5)), rng.standard_normal((rows, rank))
    return LoraFactors(down.astype(dtype), up.astype(dtype), alpha)


def same_bits(a, b):
    pairs = [(a.down, b.down), (a.up, b.up)]
    return a.alpha == b.alpha and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs
    )


def same(a, b):
    return a.keys() == b.keys() and all(same_bits(a[path], b[path]) for path in a)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("paths", [QKV, LINEAR1], ids=["qkv", "linear1"])
def test_a_whole_one_is_cut_by_rows_and_comes_back(paths, dtype):
    whole = lora(6 if paths is QKV else 14, dtype=dtype)
    parts = split(whole, paths)
    assert list(parts) == list(paths)
    np.testing.assert_allclose(np.concatenate([f.delta() for f in parts.values()]), whole.delta(), rtol=1e-6)
    assert same_bits(join(parts, paths), whole)


@pytest.mark.parametrize("alpha", [1.0, 2.0, 1.3, 1 / 3, 16.0])
@pytest.mark.parametrize("present", ["q k v mlp", "q k v", "q v", "mlp", "k mlp"])
def test_parts_trained_apart_are_stacked_and_come_back(present, alpha):
    parts = {path: lora(ROWS[path], alpha=alpha, seed=i) for i, path in enumerate(present.split())}
    whole = join(parts, LINEAR1)
    zero = {path: np.zeros((rows, 5)) for path, rows in ROWS.items()}
    expected = np.concatenate([parts[p].delta() if p in parts else zero[p] for p in LINEAR1])
    np.testing.assert_allclose(whole.delta(), expected, rtol=1e-5, atol=1e-6)
    assert whole.rank == 2 * len(parts)
    assert same(split(whole, LINEAR1), parts)


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(["zero", "minus zero", "random", "block"]), min_size=4, max_size=4),
    st.integers(1, 6),
    st.floats(0.01, 100),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_any_whole_one_comes_back_bit_for_bit(kinds, rank, alpha, dtype, equal_downs):
    rng = np.random.default_rng(rank)
    blocks = []
    for i, (path, kind) in enumerate(zip(LINEAR1, kinds, strict=True)):
        block = rng.standard_normal((ROWS[path], rank)) * {"zero": 0.0, "minus zero": -0.0}.get(kind, 1.0)
        if kind == "block":
            block[:, np.arange(rank) % 4 != i] = 0.0
        blocks.append(block)
    down = np.ones((rank, 5)) if equal_downs else rng.standard_normal((rank, 5))
    whole = LoraFactors(down.astype(dtype), np.concatenate(blocks).astype(dtype), alpha)
    again = join(split(whole, LINEAR1), LINEAR1)
    assert again.down.tobytes() == whole.down.tobytes()
    assert again.up.tobytes() == whole.up.tobytes()
    assert again.alpha == whole.alpha


def test_ranks_and_scales_that_differ():
    parts = {"q": lora(2, 1, 4.0, 0), "k": lora(2, 3, 1.0, 1), "v": lora(2, 2, 2.0, 2)}
    whole = join(parts, QKV)
    np.testing.assert_allclose(whole.delta(), np.concatenate([f.delta() for f in parts.values()]), rtol=1e-5, atol=1e-6)
    halves = join({"q": lora(2, 1, 0.5), "k": lora(2, 3, 1.5), "v": lora(2, 2, 1.0)}, QKV)
    assert (halves.rank, halves.alpha) == (6, 3.0)  # one scale: nothing is multiplied


def test_exchanged_halves():
    paths = {"norm_out.linear": Source(("adaLN",), Op.SWAP)}
    whole = lora(6)
    parts = split(whole, paths)
    np.testing.assert_array_equal(parts["norm_out.linear"].up, whole.up[[3, 4, 5, 0, 1, 2]])
    assert same_bits(join(parts, paths), whole)


@pytest.mark.parametrize("other", [lora(4), lora(3), LoraFactors(np.ones((2, 6)), np.ones((2, 2)), 1.0)])
def test_parts_of_different_weights(other):
    with pytest.raises(ValueError, match=r"q is \(2, 5\), mlp is"):
        join({"q": lora(2), "mlp": other}, LINEAR1)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("dtypes", [(np.float16, ml_dtypes.bfloat16), (ml_dtypes.bfloat16, np.float32, np.float16)])
def test_parts_stored_in_formats_that_hold_not_each_others_numbers(dtypes, alike):
    """Files are merged from others: then queries may be in bf16 and keys in fp16."""
    parts = {path: lora(2, dtype=dtype, seed=i) for i, (path, dtype) in enumerate(zip("qkv", dtypes, strict=False))}
    if alike:
        parts = {path: LoraFactors(parts["q"].down, f.up, f.alpha) for path, f in parts.items()}
    whole = join(parts, QKV)
    expected = np.concatenate([parts[p].delta() if p in parts else np.zeros((2, 5), np.float32) for p in "qkv"])
    np.testing.assert_allclose(whole.delta(), expected, rtol=1e-6, atol=1e-6)
    assert whole.up.dtype == np.float32  # exact for all


@pytest.mark.parametrize(
    ("rows", "paths", "parts"), [(13, LINEAR1, 7), (8, QKV, 3), (5, {"norm_out": Source(("adaLN",), Op.SWAP)}, 2)]
)
def test_rows_that_cannot_be_shared_out(rows, paths, parts):
    assert check_splittable(lora(parts * 2), paths).rank == 2
    with pytest.raises(ValueError, match=f"{rows} rows, which is no multiple of {parts}"):
        check_splittable(lora(rows), paths)
    if len(paths) == 1:
        with pytest.raises(ValueError, match=f"{rows} rows"):
            join({"norm_out": lora(rows)}, paths)
