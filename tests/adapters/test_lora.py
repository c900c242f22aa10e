"""LoRA adapters in their slots: what they compute, how they begin, and that they leave no trace."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.adapters.kinds.lora import Lora
from flame_train.engine import Parameter, nn, tensor
from flame_train.engine import functional as F


class Net(nn.Module):
    """A convolution of each kind and two linear layers."""

    def __init__(self):
        self.wide = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.point = nn.Conv2d(6, 4, 1)
        self.body = nn.ModuleList([nn.Linear(4, 8), None, nn.Linear(8, 5, bias=False)])

    def forward(self, x):
        return self.body[2](F.silu(self.body[0](self.point(F.silu(self.wide(x))))))


NAMES = ["wide", "point", "body.0", "body.2"]


@pytest.fixture
def net():
    model = Net()
    model.init(np.random.default_rng(0))
    return model


@pytest.fixture
def x():
    return tensor(np.random.default_rng(1).standard_normal((2, 6, 8, 3)).astype(np.float32))


def trained(attached, seed=3):
    """As after some training: up is not zero."""
    rng = np.random.default_rng(seed)
    for adapter in attached.adapters.values():
        adapter.up.data[...] = rng.standard_normal(adapter.up.shape)
    return attached


@pytest.mark.parametrize("how", [{"groups": 2}, {"dilation": 2}, {"dilation": (1, 2)}])
def test_convolutions_that_no_lora_is_computed_for_are_refused(how):
    model = Net()
    model.wide = nn.Conv2d(4, 6, 3, **how)
    model.init(np.random.default_rng(0))
    with pytest.raises(ValueError, match="dilated or in groups, such as wide"):
        attach(model, ["point", "wide"], rank=2, alpha=1.0, seed=7)
    assert model.point.adapter is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_adapter_changes_no_value(x, dtype):
    model = Net()
    model.init(np.random.default_rng(0), dtype)
    x = x.to(dtype)
    before = model(x).numpy()
    attach(model, NAMES, rank=2, alpha=1.0, seed=7)
    np.testing.assert_array_equal(model(x).numpy(), before)


def test_detached_it_leaves_no_trace(net, x):
    before = net(x).numpy()
    attached = trained(attach(net, NAMES, rank=2, alpha=1.0, seed=7))
    assert not np.array_equal(net(x).numpy(), before)
    attached.detach()
    np.testing.assert_array_equal(net(x).numpy(), before)


def test_merged_weights_compute_what_the_adapters_do(net, x):
    attached = trained(attach(net, NAMES, rank=2, alpha=3.0, seed=7))
    adapted = net(x).numpy()
    merged = dict(attached.merged())
    assert list(merged) == [f"{name}.weight" for name in NAMES]
    attached.detach()
    for name, module, attr, _ in net.named_specs():
        if name in merged:
            object.__setattr__(module, attr, merged[name])
    np.testing.assert_allclose(net(x).numpy(), adapted, rtol=2e-5, atol=2e-5)


def test_the_update_is_scaled_by_alpha_over_rank(net):
    adapter = trained(attach(net, ["body.0"], rank=4, alpha=2.0, seed=7)).adapters["body.0"]
    np.testing.assert_allclose(adapter.delta().numpy(), 0.5 * adapter.up.numpy() @ adapter.down.numpy(), rtol=1e-6)


def test_merging_bfloat16_rounds_once(x):
    model = Net()
    model.init(np.random.default_rng(0), "bfloat16")
    attached = trained(attach(model, ["body.0"], rank=2, alpha=0.01, seed=7))
    [(_, found)] = attached.merged()
    base = model.body[0].weight.numpy().astype(np.float64)
    exact = base + attached.adapters["body.0"].delta().numpy()
    np.testing.assert_array_equal(found.numpy(), exact.astype(np.float32).astype(found.dtype))


def test_gradients_reach_both_matrices_and_no_frozen_weight(net, x):
    attached = trained(attach(net, NAMES, rank=2, alpha=1.0, seed=7))
    net(x).square().sum().backward()
    for p in attached.parameters():
        assert np.abs(p.grad.numpy()).max() > 0, p.name
    assert not any(t.requires_grad for _, t in net.weights())


def test_parameters_are_named_and_shaped_as_in_lora_files(net):
    attached = attach(net, NAMES, rank=2, alpha=1.0, seed=7)
    shapes = {p.name: p.shape for p in attached.parameters()}
    assert shapes == {
        "wide.lora_down.weight": (2, 3, 3, 3),
        "wide.lora_up.weight": (6, 2, 1, 1),
        "point.lora_down.weight": (2, 6, 1, 1),
        "point.lora_up.weight": (4, 2, 1, 1),
        "body.0.lora_down.weight": (2, 4),
        "body.0.lora_up.weight": (8, 2),
        "body.2.lora_down.weight": (2, 8),
        "body.2.lora_up.weight": (5, 2),
    }
    assert {p.dtype.name for p in attached.parameters()} == {"float32"}


def test_the_start_depends_on_seed_and_name_alone(net):
    whole = attach(net, NAMES, rank=2, alpha=1.0, seed=7)
    whole.detach()
    alone = attach(net, ["body.2"], rank=2, alpha=1.0, seed=7)
    np.testing.assert_array_equal(alone.adapters["body.2"].down.numpy(), whole.adapters["body.2"].down.numpy())
    alone.detach()
    other = attach(net, ["body.2"], rank=2, alpha=1.0, seed=8)
    assert not np.array_equal(alone.adapters["body.2"].down.numpy(), other.adapters["body.2"].down.numpy())
    alike = nn.Sequential(nn.Linear(8, 5), nn.Linear(8, 5))
    alike.init(np.random.default_rng(0))
    first, second = attach(alike, ["0", "1"], rank=2, alpha=1.0, seed=7).adapters.values()
    assert not np.array_equal(first.down.numpy(), second.down.numpy())


def test_the_start_has_the_reference_implementations_distribution():
    """Kaiming uniform with a = sqrt 5 has the standard deviation 1 / sqrt(3 fan_in)."""
    layer = nn.Conv2d(40, 64, 3)
    layer.init(np.random.default_rng(0))
    made = Lora().initial(layer, 128, 1.0, np.random.default_rng(0))
    bound = 1 / np.sqrt(40 * 9)
    assert np.abs(made.down).max() <= bound
    np.testing.assert_allclose([made.down.mean(), made.down.std()], [0.0, bound / np.sqrt(3)], atol=0.02 * bound)
    assert not made.up.any()


def test_the_caller_may_make_the_parameters(net):
    made = []

    def make(name, values, device):
        made.append((name, device))
        return Parameter(values.astype(np.float64), name)

    attached = attach(net, ["body.0"], rank=2, alpha=1.0, seed=7, make_parameter=make)
    assert made == [("body.0.lora_down.weight", "cpu"), ("body.0.lora_up.weight", "cpu")]
    assert {p.dtype.name for p in attached.parameters()} == {"float64"}


def test_a_layer_takes_one_adapter(net):
    first = attach(net, ["body.0"], rank=2, alpha=1.0, seed=7)
    with pytest.raises(ValueError, match=r"body\.0; detach first"):
        attach(net, NAMES, rank=2, alpha=1.0, seed=7)
    assert net.wide.adapter is None
    first.detach()
    attach(net, NAMES, rank=2, alpha=1.0, seed=7)
