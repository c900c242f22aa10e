"""Rules over layers: the last that matches holds, and one that means nothing is told with what comes near."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.adapters.kinds import ADAPTERS
from flame_train.adapters.targets import LayerSettings, Rule, apply_rules, rates
from flame_train.config.compatibility import differences
from flame_train.config.load import from_options
from flame_train.config.render import resolved
from flame_train.engine import nn
from flame_train.engine.backend import get_backend
from flame_train.errors import ConfigError
from flame_train.run.train.step_state import build_optimizer

NAMES = ["blocks.0.attn.to_q", "blocks.0.attn.to_k", "blocks.1.attn.to_q", "blocks.1.mlp"]


def test_the_last_rule_that_matches_holds_whole():
    rules = [
        Rule(match=("*.attn.*",), rank=8, lr=1e-3),
        Rule(match=("*.to_q",), alpha=2.0),
        Rule(match=("*.1.mlp",), off=True),
    ]
    assert apply_rules(NAMES, rules, {}) == {
        "blocks.0.attn.to_q": LayerSettings(alpha=2.0),
        "blocks.0.attn.to_k": LayerSettings(rank=8, lr=1e-3),
        "blocks.1.attn.to_q": LayerSettings(alpha=2.0),
    }
    back = apply_rules(NAMES, [*rules, Rule(match=("*.mlp",), dropout=0.1)], {})
    assert back["blocks.1.mlp"] == LayerSettings(dropout=0.1)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Rule(match=("block.*.to_qq",), rank=2), r"'block\.\*\.to_qq'; near it: \*\.to_q"),
        (Rule(match=("*.to_v",), rank=2), r"by match in rule 1:\n  '\*.to_v'; near it: .*to_q"),
        (Rule(rank=2), "expected match in rule 1"),
        (Rule(match=("*",)), "expected rank, alpha, lr, dropout or off in rule 1, got none"),
        (Rule(match=("*",), off=True), "expected a layer to adapt, got off = true for all"),
    ],
)
def test_rules_that_mean_nothing(rule, words):
    with pytest.raises(ConfigError, match=f"(?s)lora.rules: .*{words}"):
        apply_rules(NAMES, [rule], {})


@pytest.fixture
def net():
    model = nn.Module()
    model.a, model.b, model.conv = nn.Linear(4, 6), nn.Linear(4, 6), nn.Conv2d(4, 6, 3)
    model.init(np.random.default_rng(0))
    return model


def test_layers_get_sizes_of_their_own(net):
    own = {"b": LayerSettings(rank=3, alpha=6.0), "conv": LayerSettings(rank=1)}
    kind = ADAPTERS["locon"](conv_rank=5, conv_alpha=2.0)
    adapters = attach(net, ["a", "b", "conv"], rank=2, alpha=4.0, seed=1, kind=kind, settings=own).adapters
    assert {n: (a.rank, a.alpha) for n, a in adapters.items()} == {"a": (2, 4.0), "b": (3, 6.0), "conv": (1, 2.0)}


def test_a_layer_with_a_rate_of_its_own_moves_by_it(net):
    """The first update of AdamW is the rate in every entry that has a gradient; LoRA+ multiplies it."""
    attached = attach(net, ["a", "b"], rank=2, alpha=4.0, seed=1)
    config = from_options(
        optimizer={"lr": 1e-3, "weight_decay": 0.0, "lora_plus_ratio": 4.0},
        schedule={"name": "constant", "warmup_steps": 0},
        gradient={"clip_norm": 0.0},
        train={"precision": "fp32"},
    )
    factors = {p.name: 5.0 for p in attached.adapters["b"].parameters().values()}
    assert rates({"b": LayerSettings(lr=5e-3), "a": LayerSettings()}, 1e-3) == pytest.approx({"b": 5.0})
    optimizer = build_optimizer(
        attached.parameters(),
        config.train,
        config.optimizer,
        config.schedule,
        config.gradient,
        get_backend("cpu"),
        attached.faster,
        factors,
    )
    before = {p.name: p.numpy().copy() for p in attached.parameters()}
    for p in attached.parameters():
        p.grad.data[...] = 1.0
    optimizer.step()
    moved = {p.name: float((before[p.name] - p.numpy()).mean()) for p in attached.parameters()}
    assert moved == pytest.approx(
        {
            "a.lora_down.weight": 1e-3,
            "a.lora_up.weight": 4e-3,
            "b.lora_down.weight": 5e-3,
            "b.lora_up.weight": 2e-2,
        },
        rel=1e-3,
    )


def test_a_run_is_continued_with_its_own_rules_alone():
    def with_rules(*rules):
        return from_options(lora={"rules": rules})

    one = with_rules({"match": ("*.to_q",), "rank": 8, "lr": 1e-4}, {"match": ("*",), "off": False, "alpha": 2.0})
    assert differences(resolved(one), one) is None
    said = differences(resolved(one), with_rules({"match": ("*.to_q",), "rank": 9}))
    assert 'lora.rules  [{match = ["*.to_q"], rank = 8' in said
