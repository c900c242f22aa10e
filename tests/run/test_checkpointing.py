"""Blocks chosen for checkpointing: the same bits, less memory the more there are, and patterns that mean none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from flame_train.engine.memory_report import saved_by_op
from flame_train.errors import ConfigError
from flame_train.networks.block_network import Checkpointing
from flame_train.run.check.adapted_layers import blocks_named
from flame_train.tools.bench import BenchCase, Prepared, prepare
from flame_train.tools.bench.models import find
from flame_train.training.step import batch_losses

KINDS: tuple[Checkpointing, ...] = ("mlp", "full", "offload")
MIDDLE = {
    "sdxl-tiny": ("input_blocks.[57].*", "middle_block.*", "output_blocks.1.1.transformer_blocks.1"),
    "sd3-tiny": ("joint_blocks.1",),
    "flux-tiny": ("double_blocks.1", "single_blocks.[0]"),
}
"""Of each small network some blocks between others."""


def prepared(model: str, checkpointing: Checkpointing, only: Sequence[str] = ()) -> Prepared:
    return prepare(BenchCase(model, 64, 2, 2, "fp32", checkpointing, "cpu", checkpoint_blocks=only))


def loss_of(p: Prepared) -> Any:
    s = p.state
    return batch_losses(s.denoiser, s.objective, s.dtype, s.seed, p.batch)[0].mean()


def stepped(p: Prepared) -> tuple[int, bytes, np.ndarray[Any, Any]]:
    """What the graph kept, the loss to the bit, and the gradients."""
    loss = loss_of(p)
    kept = sum(saved_by_op(loss).values())
    loss.backward()
    arena = p.state.optimizer.arena
    arena.collect_grads()
    return kept, loss.numpy().tobytes(), arena.grads.copy()


@pytest.mark.parametrize("checkpointing", KINDS)
@pytest.mark.parametrize("model", MIDDLE)
def test_no_choice_of_blocks_changes_a_bit(model: str, checkpointing: Checkpointing) -> None:
    only = [glob for glob in MIDDLE[model] if checkpointing != "mlp" or not glob.startswith("single")]
    plain, loss, expected = stepped(prepared(model, "off"))
    some, found_loss, found = stepped(prepared(model, checkpointing, only))
    every, _, _ = stepped(prepared(model, checkpointing))
    assert found_loss == loss
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(found, expected)
    assert every < some < plain


@pytest.mark.parametrize("checkpointing", ["full", "offload"])
@pytest.mark.parametrize("model", MIDDLE)
def test_the_chosen_blocks_alone_run_twice(model: str, checkpointing: Checkpointing) -> None:
    p = prepared(model, checkpointing, MIDDLE[model])
    calls: Counter[str] = Counter()

    def counted(name: str, forward: Any) -> Any:
        def call(*inputs: Any) -> Any:
            calls[name] += 1
            return forward(*inputs)

        return call

    blocks = p.network.named_blocks()
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
        ("sdxl", "full", 17 + 70, {"middle_block.0", "output_blocks.5.1.transformer_blocks.1"}),
        ("sdxl", "mlp", 70, {"input_blocks.8.1.transformer_blocks.9"}),
        ("sd35-large", "full", 38, {"joint_blocks.37"}),
        ("flux-dev", "offload", 19 + 38, {"double_blocks.18", "single_blocks.37"}),
        ("flux-dev", "mlp", 19, {"double_blocks.0"}),
        ("flux-dev", "off", 0, set()),
    ],
)
def test_blocks_have_the_names_of_the_published_files(
    model: str, what: Checkpointing, count: int, some: set[str]
) -> None:
    found = blocks_named(find(model)[1].network, what, (), "key")
    assert len(found) == count
    assert some <= found


@pytest.mark.parametrize(
    ("model", "what", "globs", "message"),
    [
        ("sdxl", "full", ["middle_block.*", "up_blocks.*"], "'up_blocks.*'; near it: output_blocks.*"),
        ("sdxl", "mlp", ["*.0.0"], "such as 'input_blocks.4.1.transformer_blocks.0', 'middle_block.1."),
        ("sdxl", "full", ["*.attn1"], "such as 'input_blocks.1.0', 'middle_block.0', 'output_blocks.0.0'."),
        ("flux-dev", "mlp", ["single_blocks.*"], 'no block of the model that "mlp" recomputes'),
        ("sd35-large", "full", ["joint_block.3"], "near it: joint_blocks.3"),
        ("sd35-large", "full", [""], "''"),
    ],
)
def test_a_pattern_that_means_no_block_is_refused(
    model: str, what: Checkpointing, globs: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        blocks_named(find(model)[1].network, what, globs, "gradient.checkpoint_blocks")
    assert str(refused.value).startswith("gradient.checkpoint_blocks: no block of the model that ")
    assert message in str(refused.value)
