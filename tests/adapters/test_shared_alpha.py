"""Several alphas in kohya's naming: one in the file where diffusers would lose some, and the same factors when read."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.formats import from_file, to_kohya
from flame_train.adapters.kinds.dora import DoraFactors
from flame_train.adapters.kinds.loha import LohaFactors
from flame_train.adapters.shared_alpha import for_kohya, misread
from flame_train.io.safetensors import save_file
from flame_train.models.flux.names import lora_family as flux_family
from flame_train.models.sdxl.names import lora_family

SDXL = lora_family()
UNET = SDXL.components[0]
ATTENTION = tuple(f"input_blocks.4.1.transformer_blocks.0.attn1.to_{part}" for part in ("q", "k", "v"))
CONVOLUTIONS = tuple(f"input_blocks.{i}.0.in_layers.2" for i in (1, 2, 4, 5))


def factors(alpha, seed=0, dtype=np.float32, kernel=()):
    rng = np.random.default_rng(seed)
    down = rng.standard_normal((2, 5, *kernel)).astype(dtype)
    return LoraFactors(down, rng.standard_normal((6, 2, *[1] * len(kernel))).astype(dtype), alpha)


def state(of_attention, of_convolutions, dtype=np.float32):
    found = {
        name: factors(alpha, i, dtype) for i, (name, alpha) in enumerate(zip(ATTENTION, of_attention, strict=True))
    }
    found |= {name: factors(of_convolutions, 9 + i, dtype, (3, 3)) for i, name in enumerate(CONVOLUTIONS)}
    return {"unet": found}


@pytest.mark.parametrize("of_attention", [(4.0, 4.0, 4.0), (4.0, 2.0, 4.0), (8.0, 8.0, 4.0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_file_has_one_alpha_and_the_same_updates_and_reading_gives_the_same_factors(tmp_path, of_attention, dtype):
    before = state(of_attention, 8.0, dtype)
    written, record = for_kohya(before, SDXL)
    assert len({f.alpha for f in written["unet"].values()}) == 1
    for name, f in before["unet"].items():
        np.testing.assert_array_equal(written["unet"][name].delta(), f.delta())
        assert written["unet"][name].up.dtype == dtype
    save_file(tmp_path / "x.safetensors", to_kohya(written, SDXL), record)
    for name, found in from_file(tmp_path / "x.safetensors", SDXL).state["unet"].items():
        f = before["unet"][name]
        assert found.alpha == f.alpha
        assert found.up.tobytes() == f.up.tobytes()


def test_a_ratio_that_is_no_power_of_two_is_folded_in_fp32_and_comes_back(tmp_path):
    before = state((3.0, 3.0, 3.0), 8.0, np.float16)
    written, record = for_kohya(before, SDXL)
    assert {f.up.dtype for n, f in written["unet"].items() if n in CONVOLUTIONS} == {np.dtype(np.float32)}
    save_file(tmp_path / "x.safetensors", to_kohya(written, SDXL), record)
    found = from_file(tmp_path / "x.safetensors", SDXL).state["unet"]
    assert all(found[n].alpha == f.alpha and found[n].up.tobytes() == f.up.tobytes() for n, f in before["unet"].items())


@pytest.mark.parametrize(
    ("of_attention", "of_convolutions"),
    [((8.0, 8.0, 8.0), 8.0), ((8.0, 8.0, 8.0), 4.0)],
    ids=["one alpha", "attention has the commonest"],
)
def test_a_file_that_diffusers_reads_rightly_stays_as_it_is(of_attention, of_convolutions):
    before = state(of_attention, of_convolutions)
    if of_convolutions == 4.0:
        before["unet"] = dict(list(before["unet"].items())[:5])  # three of attention, two others
    after, record = for_kohya(before, SDXL)
    assert after is before
    assert record == {}


def test_a_tie_counts_as_lost():
    alphas = {ATTENTION[0]: 4.0, CONVOLUTIONS[0]: 8.0}
    assert misread(UNET, alphas) == (ATTENTION[0],)


def test_zero_is_never_the_alpha_of_a_file():
    written, _ = for_kohya(state((0.0, 0.0, 0.0), 8.0), SDXL)
    assert {f.alpha for f in written["unet"].values()} == {8.0}
    assert not any(written["unet"][name].up.any() for name in ATTENTION)


def test_a_dora_keeps_its_magnitudes_and_a_loha_its_alpha():
    plain = state((4.0, 4.0, 4.0), 8.0)["unet"]
    doras = {name: DoraFactors(f, np.ones((1, 5), np.float32)) for name, f in plain.items() if name in ATTENTION}
    lohas = {
        name: LohaFactors(dict.fromkeys(("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), np.ones((2, 2))), 8.0)
        for name in CONVOLUTIONS
    }
    written, _ = for_kohya({"unet": doras | lohas}, SDXL)
    assert all(written["unet"][name] is loha for name, loha in lohas.items())
    base = np.random.default_rng(1).standard_normal((6, 5)).astype(np.float32)
    for name, dora in doras.items():
        np.testing.assert_array_equal(written["unet"][name].delta(base), dora.delta(base))


def test_other_families_are_left_alone():
    """diffusers multiplies their alphas in, layer by layer."""
    blocks = {f"double_blocks.{i}.img_attn.proj": factors(float(2 + i)) for i in range(3)}
    assert for_kohya({"transformer": blocks}, flux_family())[1] == {}
