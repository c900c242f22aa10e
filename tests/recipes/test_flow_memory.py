"""What SD3 and Flux are predicted to take more where their modulations learn, held against what the graph keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from flame_train.training.family import Load

from flame_train.adapters.targets import resolve
from flame_train.engine.memory_report import saved_by_op
from flame_train.models.blocks import Recompute
from flame_train.tools import bench_models
from flame_train.tools.bench import Trial, prepare
from flame_train.training.step import batch_loss

TARGETS = [
    ("sd3-tiny", ("full",)),
    ("sd3-tiny", ("joint_blocks.[02].context_block.adaLN_modulation.1",)),
    ("sd3-tiny", ("*.x_block.adaLN_modulation.1", "attention")),
    ("sd3-tiny", ("t_embedder.mlp.0",)),
    ("flux-tiny", ("full",)),
    ("flux-tiny", ("*.img_mod.lin",)),
    ("flux-tiny", ("single_blocks.1.modulation.lin", "attention+mlp")),
    ("flux-tiny", ("vector_in.*",)),
]


@pytest.mark.parametrize("recompute", ["nothing", "feed_forward", "blocks"])
@pytest.mark.parametrize(("model", "targets"), TARGETS)
def test_what_gates_multiply_is_kept_where_they_learn(
    model: str, targets: Sequence[str], recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = bench_models.find(model)
    names = resolve(subject.build(), targets, subject.family.presets)
    monkeypatch.setattr("flame_train.tools.bench.resolve", lambda network, chosen, presets: names)
    p = prepare(Trial(model, 64, 2, 2, "fp32", recompute, "cpu"))
    s = p.state
    loss = batch_loss(s.denoise, s.sample_latents, s.objective, s.dtype, s.seed, p.batch)
    load = Load((64, 64), 2, 4, recompute, True)
    more = subject.activations(p.network, replace(load, adapted=frozenset(names)))
    kept = saved_by_op(loss).get("gated_add", 0)
    rows = sum(layer.out_features for layer, of_tokens in p.network.quantizable().items() if not of_tokens)
    assert 0 <= kept - (more - subject.activations(p.network, load)) <= 2 * rows * 4, (
        "but for the gates, a row a picture"
    )


@pytest.mark.parametrize("model", ["sd35-medium", "sd35-large", "flux-dev"])
def test_attention_and_mlp_alone_keep_nothing_for_gates(model: str) -> None:
    subject = bench_models.find(model)
    network, load = subject.build(), Load((1024, 1024), 1, 2, "nothing", True)
    found = {
        preset: subject.activations(network, replace(load, adapted=frozenset(names)))
        for preset in ("attention", "attention+mlp", "full")
        for names in [resolve(network, [preset], subject.family.presets)]
    }
    plain = subject.activations(network, load)
    assert found["attention"] == found["attention+mlp"] == plain < found["full"] < 1.2 * plain
