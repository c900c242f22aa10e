"""What SD3 and Flux are predicted to take more where their modulations learn, held against what the graph keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from flame_train.engine.report import saved_by_op

from flame_train.adapters.targets import resolve
from flame_train.models.common.blocks import Checkpointing
from flame_train.tools import bench_models
from flame_train.tools.bench import Trial, prepare
from flame_train.training.memory import MemoryQuery
from flame_train.training.step import batch_loss

TARGETS = [
    ("sd3-tiny", ("full",)),
    ("sd3-tiny", ("joint_blocks.[01].context_block.adaLN_modulation.1",)),
    ("sd3-tiny", ("*.x_block.adaLN_modulation.1", "attention")),
    ("sd3-tiny", ("t_embedder.mlp.0",)),
    ("flux-tiny", ("full",)),
    ("flux-tiny", ("*.img_mod.lin",)),
    ("flux-tiny", ("single_blocks.1.modulation.lin", "attention+mlp")),
    ("flux-tiny", ("vector_in.*",)),
]


@pytest.mark.parametrize("checkpointing", ["off", "mlp", "full"])
@pytest.mark.parametrize(("model", "targets"), TARGETS)
def test_what_gates_multiply_is_kept_where_they_learn(
    model: str, targets: Sequence[str], checkpointing: Checkpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, declared = bench_models.find(model)
    names = resolve(declared.network, targets, declared.presets)
    monkeypatch.setattr("flame_train.tools.bench.resolve", lambda network, chosen, presets: names)
    p = prepare(Trial(model, 64, 2, 2, "fp32", checkpointing, "cpu"))
    s = p.state
    loss = batch_loss(s.denoiser, s.objective, s.dtype, s.seed, p.batch)
    query = MemoryQuery((64, 64), 2, 4, checkpointing, True)
    more = declared.activation_bytes(replace(query, adapted=frozenset(names)))
    kept = saved_by_op(loss).get("gated_add", 0)
    rows = sum(layer.out_features for layer, of_tokens in p.network.packable().items() if not of_tokens)
    assert 0 <= kept - (more - declared.activation_bytes(query)) <= 2 * rows * 4, "but for the gates, a row an image"


@pytest.mark.parametrize("model", ["sd35-medium", "sd35-large", "flux-dev"])
def test_attention_and_mlp_alone_keep_nothing_for_gates(model: str) -> None:
    _, declared = bench_models.find(model)
    query = MemoryQuery((1024, 1024), 1, 2, "off", True)
    found = {
        preset: declared.activation_bytes(replace(query, adapted=frozenset(names)))
        for preset in ("attention", "attention+mlp", "full")
        for names in [resolve(declared.network, [preset], declared.presets)]
    }
    plain = declared.activation_bytes(query)
    assert found["attention"] == found["attention+mlp"] == plain < found["full"] < 1.2 * plain
