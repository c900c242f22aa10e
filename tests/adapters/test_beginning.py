"""A run begins with a finished adapter: the same update, whatever alpha and rank it has now, or a refusal."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.initial_lora import require_fit_for_start, start_from
from flame_train.adapters.kinds import ADAPTERS
from flame_train.engine import nn
from flame_train.errors import ConfigError

KINDS = [
    ("lora", {}),
    ("loha", {}),
    ("lokr", {}),
    ("lokr", {"full_matrix": True}),
    ("dora", {}),
    ("dora", {"wd_on_output": True}),
]
SHAPES = {"a": (10, 12), "conv": (6, 4, 3, 3)}


@pytest.fixture
def net():
    model = nn.Module()
    model.a, model.conv = nn.Linear(12, 10), nn.Conv2d(4, 6, 3)
    model.init(np.random.default_rng(0))
    return model


def put(net, kind="lora", rank=2, alpha=3.0, seed=1, **keys):
    return attach(net, list(SHAPES), rank=rank, alpha=alpha, seed=seed, kind=ADAPTERS[kind](**keys))


def finished(net, *args, **how):
    attached = put(net, *args, **how)
    for i, p in enumerate(attached.parameters()):
        p.data[...] = p.data + 0.3 * np.random.default_rng(i).standard_normal(p.shape)
    found = {name: adapter.factors() for name, adapter in attached.adapters.items()}
    updates = {name: adapter.delta().numpy() for name, adapter in attached.adapters.items()}
    attached.detach()
    return found, updates


@pytest.mark.parametrize(("kind", "keys"), KINDS, ids=str)
@pytest.mark.parametrize("alpha", [3.0, 0.5])
def test_the_update_is_the_same_with_another_alpha(net, kind, keys, alpha):
    found, updates = finished(net, kind, **keys)
    attached = put(net, kind, alpha=alpha, seed=9, **keys)
    start_from(attached, found)
    for name, adapter in attached.adapters.items():
        np.testing.assert_allclose(adapter.delta().numpy(), updates[name], rtol=1e-4, atol=1e-5)


def test_a_larger_rank_computes_the_same_and_can_learn_more(net):
    found, updates = finished(net, rank=2)
    attached = put(net, rank=5, seed=9)
    start_from(attached, found)
    for name, adapter in attached.adapters.items():
        np.testing.assert_allclose(adapter.delta().numpy(), updates[name], rtol=1e-4, atol=1e-5)
        assert (np.linalg.norm(adapter.down.numpy().reshape(5, -1), axis=1) > 0).all()


def test_a_smaller_rank_keeps_the_largest_singular_values(net):
    found, updates = finished(net, rank=5)
    attached = put(net, rank=2, seed=9)
    start_from(attached, found)
    for name, adapter in attached.adapters.items():
        matrix = updates[name].reshape(len(updates[name]), -1).astype(np.float64)
        u, s, vt = np.linalg.svd(matrix, full_matrices=False)
        nearest = (u[:, :2] * s[:2]) @ vt[:2]
        np.testing.assert_allclose(adapter.delta().numpy().reshape(matrix.shape), nearest, rtol=1e-4, atol=1e-5)


def test_matrices_of_other_shapes_are_refused(net):
    found, _ = finished(net, "lokr")
    with pytest.raises(
        ConfigError, match=r"lora.from: the matrices of a are of other shapes; set the keys of its kind"
    ):
        start_from(put(net, "lokr", factor=2), found)


def lora(rank=2, shape=(10, 12)):
    return LoraFactors(np.zeros((rank, shape[1]), np.float32), np.zeros((shape[0], rank), np.float32), 1.0)


@pytest.mark.parametrize(
    ("found", "kind", "resize", "words"),
    [
        ({"a": lora(), "b": lora()}, "lora", True, "adapts 1 layer that lora.targets leave out, such as b"),
        ({"a": lora(), "z": lora()}, "lora", True, "adapts 1 layer that the model lacks, such as z: another base"),
        (
            {},
            "lora",
            False,
            "has nothing for 1 layer that lora.targets choose, such as a; .*lora.from_resize = true",
        ),
        ({"a": lora(shape=(9, 12))}, "lora", True, r"a is \(9, 12\) there and \(10, 12\) in the model: another base"),
        ({"a": lora()}, "loha", True, 'expected a file of kind "loha", as lora.kind says, got "lora"'),
        ({"a": lora(3)}, "lora", False, "a is of rank 3 there and 2 here; set lora.rank to it or set lora.from_resize"),
    ],
)
def test_a_file_that_does_not_fit_is_told(found, kind, resize, words):
    with pytest.raises(ConfigError, match=f"lora.from: .*{words}"):
        require_fit_for_start(found, kind, {"a": 2}, SHAPES | {"b": (3, 4)}, resize)


def test_ranks_and_layers_may_differ_where_it_is_resized():
    assert require_fit_for_start({"a": lora(3)}, "lora", {"a": 2, "conv": 2}, SHAPES, True) is None
