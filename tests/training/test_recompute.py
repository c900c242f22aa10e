"""Blocks chosen to be run again: the same bits, less memory the more there are, and patterns that mean none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from flame_train.training.family import Load
from hypothesis import given, settings
from hypothesis import strategies as st

from flame_train.engine.memory_report import saved_by_op
from flame_train.errors import ConfigError
from flame_train.models.blocks import Recompute
from flame_train.run.checkpointing import blocks_named
from flame_train.tools.bench import Prepared, Trial, prepare
from flame_train.tools.bench_models import SUBJECTS, find
from flame_train.training.step import batch_loss

KINDS: tuple[Recompute, ...] = ("feed_forward", "blocks", "blocks_offloaded")
MIDDLE = {
    "sdxl-tiny": ("input_blocks.[57].*", "middle_block.*", "output_blocks.1.1.transformer_blocks.1"),
    "sd3-tiny": ("joint_blocks.1",),
    "flux-tiny": ("double_blocks.1", "single_blocks.[0]"),
}
"""Of each small network some blocks between others."""


def prepared(model: str, recompute: Recompute, only: Sequence[str] = ()) -> Prepared:
    return prepare(Trial(model, 64, 2, 2, "fp32", recompute, "cpu", recompute_only=only))


def loss_of(p: Prepared) -> Any:
    s = p.state
    return batch_loss(s.denoise, s.sample_latents, s.objective, s.dtype, s.seed, p.batch)


def stepped(p: Prepared) -> tuple[int, bytes, np.ndarray[Any, Any]]:
    """What the graph kept, the loss to the bit, and the gradients."""
    loss = loss_of(p)
    kept = sum(saved_by_op(loss).values())
    loss.backward()
    arena = p.state.optimizer.arena
    arena.collect_grads()
    return kept, loss.numpy().tobytes(), arena.grads.copy()


@pytest.mark.parametrize("recompute", KINDS)
@pytest.mark.parametrize("model", MIDDLE)
def test_no_choice_of_blocks_changes_a_bit(model: str, recompute: Recompute) -> None:
    only = [glob for glob in MIDDLE[model] if recompute != "feed_forward" or not glob.startswith("single")]
    plain, loss, expected = stepped(prepared(model, "nothing"))
    some, found_loss, found = stepped(prepared(model, recompute, only))
    every, _, _ = stepped(prepared(model, recompute))
    assert found_loss == loss
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(found, expected)
    assert every < some < plain


@pytest.mark.parametrize("recompute", ["blocks", "blocks_offloaded"])
@pytest.mark.parametrize("model", MIDDLE)
def test_the_chosen_blocks_alone_run_twice(model: str, recompute: Recompute) -> None:
    p = prepared(model, recompute, MIDDLE[model])
    calls: Counter[str] = Counter()

    def counted(name: str, forward: Any) -> Any:
        def call(*inputs: Any) -> Any:
            calls[name] += 1
            return forward(*inputs)

        return call

    blocks = p.network.blocks()
    for name, block in blocks.items():
        block.forward = counted(name, block.forward)
    loss_of(p).backward()
    twice = {name for name, n in calls.items() if n == 2}
    assert calls.keys() == blocks.keys()
    assert twice == {name for name in blocks if any(_means(glob, name) for glob in MIDDLE[model])}
    assert 0 < len(twice) < len(blocks)


def _means(glob: str, name: str) -> bool:
    return re.fullmatch(glob.replace(".", r"\.").replace("*", ".*"), name) is not None


@pytest.mark.parametrize(
    ("model", "what", "count", "some"),
    [
        ("sdxl", "blocks", 17 + 70, {"middle_block.0", "output_blocks.5.1.transformer_blocks.1"}),
        ("sdxl", "feed_forward", 70, {"input_blocks.8.1.transformer_blocks.9"}),
        ("sd35-large", "blocks", 38, {"joint_blocks.37"}),
        ("flux-dev", "blocks_offloaded", 19 + 38, {"double_blocks.18", "single_blocks.37"}),
        ("flux-dev", "feed_forward", 19, {"double_blocks.0"}),
        ("flux-dev", "nothing", 0, set()),
    ],
)
def test_blocks_have_the_names_of_the_published_files(model: str, what: Recompute, count: int, some: set[str]) -> None:
    found = blocks_named(find(model).build(), what, (), "key")
    assert len(found) == count
    assert some <= found


@pytest.mark.parametrize(
    ("model", "what", "globs", "message"),
    [
        ("sdxl", "blocks", ["middle_block.*", "up_blocks.*"], "'up_blocks.*'; near it: output_blocks.*"),
        ("sdxl", "feed_forward", ["*.0.0"], "such as 'input_blocks.4.1.transformer_blocks.0', 'middle_block.1."),
        ("sdxl", "blocks", ["*.attn1"], "such as 'input_blocks.1.0', 'middle_block.0', 'output_blocks.0.0'."),
        ("flux-dev", "feed_forward", ["single_blocks.*"], 'no block of the model that "feed_forward" recomputes'),
        ("sd35-large", "blocks", ["joint_block.3"], "near it: joint_blocks.3"),
        ("sd35-large", "blocks", [""], "''"),
    ],
)
def test_a_pattern_that_means_no_block_is_refused(model: str, what: Recompute, globs: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        blocks_named(find(model).build(), what, globs, "gradient.recompute_only")
    assert str(refused.value).startswith("gradient.recompute_only: no block of the model that ")
    assert message in str(refused.value)


@pytest.mark.parametrize("recompute", KINDS)
@pytest.mark.parametrize("model", SUBJECTS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_the_prediction_never_grows_with_the_blocks(model: str, recompute: Recompute, data: st.DataObject) -> None:
    """One block more at a time, in any order: from what nothing recomputed takes to what all of them do."""
    subject = find(model)
    network = subject.build()
    order = data.draw(st.permutations(list(network.blocks(recompute))))
    batch, item = data.draw(st.sampled_from((1, 4, 16))), data.draw(st.sampled_from((2, 4)))
    deterministic, bucket = data.draw(st.booleans()), data.draw(st.sampled_from(((1024, 1024), (64, 128))))

    def predicted(how: Recompute, blocks: Sequence[str] | None = None) -> int:
        return subject.activations(network, Load(bucket, batch, item, how, deterministic, blocks))

    figures = [predicted(recompute, order[:n]) for n in range(len(order) + 1)]
    assert figures == sorted(figures, reverse=True)
    assert figures[0] == predicted("nothing")
    assert figures[-1] == predicted(recompute)


def test_all_blocks_take_their_inputs_and_what_passes_of_one() -> None:
    """Flux dev at 1024 x 1024, in images: each block's input, what one makes, and what passes with its gradients."""
    subject = find("flux-dev")
    network = subject.build()
    load = Load((1024, 1024), 1, 2, "blocks", False, network.blocks())
    assert subject.activations(network, load) == (19 + 38 + 11 + 30) * (64 * 64 + 512) * 3072 * 2
