"""Heads in two parts: all of them, none twice, in no more rounds of blocks than together, and no smaller halves."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame_train.engine.backend.cuda.tuning import SM_90
from flame_train.engine.mode import deterministic
from flame_train.engine.ops.attention import kernels as head_split
from flame_train.engine.ops.attention.kernels import head_parts, larger_part

LARGE = 512 << 20


def rounds(batch: int, heads: int, keys: int, multiprocessors: int) -> int:
    return ceil(batch * heads * ceil(keys / 128) / multiprocessors)


@given(st.integers(1, 9), st.integers(1, 64), st.integers(1, 9000), st.sampled_from([78, 114, 132]))
def test_two_parts_cost_no_round(batch: int, heads: int, length: int, multiprocessors: int) -> None:
    first = larger_part(batch, heads, length, length, 2, multiprocessors)
    whole = rounds(batch, heads, length, multiprocessors)
    if batch * heads * length**2 * 2 < LARGE:
        assert first == heads
        return
    taking = [
        max(n, heads - n)
        for n in range(heads + 1)
        if sum(rounds(batch, part, length, multiprocessors) for part in (n, heads - n)) <= whole
    ]
    assert first == min(taking)


def query(capability: str) -> SimpleNamespace:
    return SimpleNamespace(shape=(1, 24, 4608, 128), itemsize=2, device=SimpleNamespace(compute_capability=capability))


def parts(capability: str, keys: int = 24) -> list[range]:
    key = SimpleNamespace(shape=(1, keys, 4608, 128))
    split = head_parts(query(capability), key, 132)
    of_queries, of_keys = ([range(n)[part[1 + i]] for part in split] for i, n in enumerate((24, keys)))
    assert [[h * keys // 24 for h in part[:: 24 // keys]] for part in of_queries] == [list(part) for part in of_keys]
    return of_queries


def test_every_head_is_in_one_part() -> None:
    assert parts("90") == [range(13), range(13, 24)]


@pytest.mark.parametrize(
    ("shape", "keys"), [((4, 30, 4608, 128), 30), ((2, 32, 16384, 128), 8), ((1, 24, 4608, 128), 24)]
)
def test_gradients_with_a_mask_are_asked_for_below_two_to_the_31_scores(shape, keys):
    device = SimpleNamespace(compute_capability="80")
    split = head_parts(
        SimpleNamespace(shape=shape, itemsize=2, device=device),
        SimpleNamespace(shape=(shape[0], keys, shape[2], 128)),
        132,
        masked=True,
    )
    covered = []
    for samples, heads, groups in split:
        of_samples, of_heads, of_groups = range(shape[0])[samples], range(shape[1])[heads], range(keys)[groups]
        assert len(of_samples) * len(of_heads) * shape[2] ** 2 < 2**31
        assert [h * keys // shape[1] for h in of_heads][:: shape[1] // keys] == list(of_groups)
        covered += [(sample, head) for sample in of_samples for head in of_heads]
    assert covered == [(sample, head) for sample in range(shape[0]) for head in range(shape[1])]


def test_heads_that_share_keys_stay_together() -> None:
    assert parts("90", 12) == [range(14), range(14, 24)]
    assert parts("90", 6) == [range(24)]  # 12 and 12, or 16 and 8, would cost a round


def test_one_part_where_sums_may_be_in_any_order_or_rounds_are_not_known() -> None:
    assert parts("89") == [range(24)]
    with deterministic(False):
        assert parts("90") == [range(24)]


def test_one_part_where_scores_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_split, "SM_90", replace(SM_90, head_split_bytes=1 << 40))
    assert parts("90") == [range(24)]
