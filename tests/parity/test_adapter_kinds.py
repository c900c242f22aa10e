"""Every adapter kind beside LyCORIS' and PEFT's own modules: outputs, gradients, and merged weights."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.adapters.kinds import ADAPTERS
from flame_train.adapters.kinds.lokr import factorization
from flame_train.engine import nn, tensor

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
locon = pytest.importorskip("lycoris.modules.locon")
loha = pytest.importorskip("lycoris.modules.loha")
lokr = pytest.importorskip("lycoris.modules.lokr")
theirs_factored = pytest.importorskip("lycoris.functional").factorization

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

RANK, ALPHA = 4, 3.0


class Net(nn.Module):
    """A linear layer, and a convolution with a kernel."""

    def __init__(self):
        self.linear = nn.Linear(24, 30)
        self.conv = nn.Conv2d(6, 10, 3, stride=2, padding=1)


@pytest.fixture
def net():
    model = Net()
    model.init(np.random.default_rng(0))
    return model


def ours(net, layer, kind, **keys):
    """The layer with an adapter as after some training."""
    attached = attach(net, [layer], rank=RANK, alpha=ALPHA, seed=1, kind=ADAPTERS[kind](**keys))
    rng = np.random.default_rng(5)
    for p in attached.parameters():
        p.data[...] = (1.0 + 0.3 * rng.standard_normal(p.shape)) * np.where(p.data == 0, 0.4, p.data)
    return attached.adapters[layer]


def theirs(layer):
    """The same layer of PyTorch."""
    if isinstance(layer, nn.Linear):
        made = torch.nn.Linear(layer.in_features, layer.out_features)
    else:
        made = torch.nn.Conv2d(layer.in_channels, layer.out_channels, 3, stride=2, padding=1)
    made.weight.data = torch.from_numpy(layer.weight.numpy().copy())
    made.bias.data = torch.from_numpy(layer.bias.numpy().copy())
    return made


def images(layer):
    """An input for both: channels last here, first there."""
    x = np.random.default_rng(2).standard_normal((3, 5, 24) if layer == "linear" else (2, 7, 8, 6)).astype(np.float32)
    return tensor(x, requires_grad=True), torch.from_numpy(x if layer == "linear" else x.transpose(0, 3, 1, 2).copy())


def as_ours(y):
    y = y.detach().numpy()
    return y if y.ndim == 3 else y.transpose(0, 2, 3, 1)


def compare(off, net, layer, module, pairs, adapter):
    """Outputs, and the gradients of `pairs`: our parameter and their tensor."""
    x, their_x = images(layer)
    y, their_y = getattr(net, layer)(x), module(their_x)
    assert off(y, as_ours(their_y)) < 2e-6
    y.square().sum().backward()
    their_y.square().sum().backward()
    for name, (p, q) in pairs.items():
        assert off(p.grad.numpy().reshape(q.shape), q.grad.numpy()) < 2e-5, name


LYCORIS = [
    ("loha", loha.LohaModule, {}, {}),
    ("lokr", lokr.LokrModule, {}, {}),
    ("lokr", lokr.LokrModule, {"factor": 2}, {"factor": 2}),
    ("lokr", lokr.LokrModule, {"factor": 5}, {"factor": 5}),
    ("lokr", lokr.LokrModule, {"full_matrix": True}, {"full_matrix": True}),
    ("lokr", lokr.LokrModule, {"decompose_both": True}, {"decompose_both": True}),
]


@pytest.mark.parametrize("factor", [-1, 1, 2, 3, 4, 5, 8, 10, 12, 16, 25, 48, 100, 4096])
def test_a_side_is_factored_as_in_lycoris(factor):
    """Also where the factor does not divide it, as 12 does not divide SDXL's 640."""
    sides = (*range(1, 200), 320, 640, 768, 1280, 1536, 2048, 2432, 3072, 3584, 3840, 10240, 12288)
    assert [factorization(side, factor) for side in sides] == [theirs_factored(side, factor) for side in sides]


@pytest.mark.parametrize("layer", ["linear", "conv"])
@pytest.mark.parametrize(("kind", "module", "mine", "keys"), LYCORIS)
def test_loha_and_lokr_are_lycoris(off, net, layer, kind, module, mine, keys):
    adapter = ours(net, layer, kind, **mine)
    twin = module("x", theirs(getattr(net, layer)), lora_dim=RANK, alpha=ALPHA, **keys)
    names = {n for n, _ in twin.named_parameters() if "lok" in n or "hada" in n}
    assert names == set(adapter.parameters())
    for name, p in adapter.parameters().items():
        assert getattr(twin, name).shape == p.shape, name
        getattr(twin, name).data = torch.from_numpy(p.numpy().copy())
    compare(off, net, layer, twin, {n: (p, getattr(twin, n)) for n, p in adapter.parameters().items()}, adapter)
    update = twin.get_weight(twin.shape).detach().numpy()  # its get_diff_weight scales twice
    assert off(adapter.delta(), update) < 2e-6
    assert off(adapter.factors().delta(getattr(net, layer).weight.numpy()), update) < 2e-6
    written = ADAPTERS[kind].files.kohya(adapter.factors())
    for name, expected in twin.custom_state_dict().items():
        found = written.pop(f".{name}")
        np.testing.assert_array_equal(found, expected.detach().numpy())
    assert not written


@pytest.mark.parametrize(("kind", "module", "mine", "keys"), LYCORIS)
def test_first_values_are_spread_as_in_lycoris(kind, module, mine, keys):
    model = Net()
    model.linear = nn.Linear(96, 128)
    model.init(np.random.default_rng(0))
    attached = attach(model, ["linear"], rank=RANK, alpha=ALPHA, seed=1, kind=ADAPTERS[kind](**mine))
    torch.manual_seed(0)
    twin = module("x", torch.nn.Linear(96, 128), lora_dim=RANK, alpha=ALPHA, **keys)
    for name, p in attached.adapters["linear"].parameters().items():
        mine_std, their_std = p.numpy().std(), float(getattr(twin, name).std())
        assert (mine_std == 0) == (their_std == 0), name
        if p.numpy().size > 64:  # fewer numbers have no spread to speak of
            np.testing.assert_allclose(mine_std, their_std, rtol=0.25, err_msg=name)


def test_locon_is_lycoris(off, net):
    adapter = ours(net, "conv", "locon", conv_rank=3, conv_alpha=2.0)
    twin = locon.LoConModule("x", theirs(net.conv), lora_dim=3, alpha=2.0)
    twin.lora_down.weight.data = torch.from_numpy(adapter.down.numpy().copy())
    twin.lora_up.weight.data = torch.from_numpy(adapter.up.numpy().copy())
    pairs = {"down": (adapter.down, twin.lora_down.weight), "up": (adapter.up, twin.lora_up.weight)}
    compare(off, net, "conv", twin, pairs, adapter)
    assert off(adapter.delta(), twin.get_diff_weight()[0].detach().numpy()) < 2e-6


@pytest.mark.parametrize("on_output", [False, True])
@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_dora_is_lycoris_but_for_the_gradient_through_the_norm(off, net, layer, on_output):
    adapter = ours(net, layer, "dora", wd_on_output=on_output)
    twin = locon.LoConModule(
        "x", theirs(getattr(net, layer)), lora_dim=RANK, alpha=ALPHA, weight_decompose=True, wd_on_out=on_output
    )
    twin.lora_down.weight.data = torch.from_numpy(adapter.lora.down.numpy().copy())
    twin.lora_up.weight.data = torch.from_numpy(adapter.lora.up.numpy().copy())
    assert twin.dora_scale.shape == adapter.magnitude.shape
    twin.dora_scale.data = torch.from_numpy(adapter.magnitude.numpy().copy())
    x, their_x = images(layer)
    y, their_y = getattr(net, layer)(x), twin(their_x)
    assert off(y, as_ours(their_y)) < 4e-6
    y.square().sum().backward()
    their_y.square().sum().backward()
    assert off(adapter.magnitude.grad, twin.dora_scale.grad) < 2e-5
    base = getattr(net, layer).weight.numpy()
    merged = twin.get_merged_weight()[0].detach().numpy()
    assert off(base + adapter.delta().numpy(), merged) < 2e-6
    assert off(base + adapter.factors().delta(base), merged) < 2e-6


@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_dora_on_output_is_peft(off, net, layer):
    adapter = ours(net, layer, "dora", wd_on_output=True)
    holder = torch.nn.ModuleDict({"layer": theirs(getattr(net, layer))})
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["layer"], use_dora=True)
    twin = peft.get_peft_model(holder, config).base_model.model["layer"]
    down, up = twin.lora_A["default"].weight, twin.lora_B["default"].weight
    vector = twin.lora_magnitude_vector["default"].weight
    down.data, up.data = (torch.from_numpy(p.numpy().copy()) for p in (adapter.lora.down, adapter.lora.up))
    vector.data = torch.from_numpy(adapter.magnitude.numpy().reshape(vector.shape).copy())
    pairs = {
        "down": (adapter.lora.down, down),
        "up": (adapter.lora.up, up),
        "magnitude": (adapter.magnitude, vector),
    }
    compare(off, net, layer, twin, pairs, adapter)
    twin.merge()
    merged = twin.base_layer.weight.detach().numpy()
    assert off(getattr(net, layer).weight.numpy() + adapter.delta().numpy(), merged) < 2e-6
    written = ADAPTERS["dora"].files.kohya(adapter.factors())
    assert written[".dora_scale"].shape == (adapter.magnitude.shape[0], *[1] * (adapter.magnitude.ndim - 1))
