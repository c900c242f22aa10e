"""What holds for every kind of adapter: how it begins, what a file keeps of it, and which layers it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flame_train.adapters.attach import attach, attach_factors
from flame_train.adapters.formats import from_file, to_diffusers, to_kohya
from flame_train.adapters.kinds import ADAPTERS
from flame_train.adapters.metadata import network_metadata
from flame_train.engine import nn, tensor
from flame_train.errors import ModelFileError
from flame_train.io.safetensors import save_file
from flame_train.models.flux.names import lora_family

FLUX = lora_family()
KINDS = [
    ("lora", {}),
    ("locon", {"conv_rank": 3, "conv_alpha": 6.0}),
    ("loha", {}),
    ("lokr", {}),
    ("lokr", {"factor": 2, "decompose_both": True}),
    ("lokr", {"full_matrix": True}),
    ("dora", {}),
    ("dora", {"wd_on_output": True}),
]


class Net(nn.Module):
    """Two linear layers, one without a bias, and a convolution."""

    def __init__(self):
        self.a = nn.Linear(12, 24)
        self.b = nn.Linear(24, 12, bias=False)
        self.conv = nn.Conv2d(4, 6, 3, stride=2, padding=1)


NAMES = ["a", "b", "conv"]
X = {"a": (2, 5, 12), "b": (2, 5, 24), "conv": (2, 6, 8, 4)}


@pytest.fixture
def net():
    model = Net()
    model.init(np.random.default_rng(0))
    return model


def put(net, kind, keys, trained=True, names=NAMES):
    attached = attach(net, names, rank=4, alpha=3.0, seed=1, kind=ADAPTERS[kind](**keys))
    rng = np.random.default_rng(5)
    for p in attached.parameters() if trained else ():
        p.data[...] = (1.0 + 0.3 * rng.standard_normal(p.shape)) * np.where(p.data == 0, 0.4, p.data)
    return attached


def outputs(net):
    rng = np.random.default_rng(3)
    return {n: getattr(net, n)(tensor(rng.standard_normal(X[n]).astype(np.float32))).numpy() for n in NAMES}


@pytest.mark.parametrize(("kind", "keys"), KINDS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_one_changes_no_bit(kind, keys, dtype):
    net = Net()
    net.init(np.random.default_rng(0), dtype)
    x = {n: tensor(np.random.default_rng(3).standard_normal(s).astype(np.float32)).to(dtype) for n, s in X.items()}
    before = {n: getattr(net, n)(x[n]).numpy() for n in NAMES}
    put(net, kind, keys, trained=False)
    for n in NAMES:
        np.testing.assert_array_equal(getattr(net, n)(x[n]).numpy(), before[n])


@pytest.mark.parametrize(("kind", "keys"), KINDS, ids=str)
def test_merged_weights_compute_what_the_adapter_does(net, kind, keys):
    attached = put(net, kind, keys)
    adapted = outputs(net)
    merged = dict(attached.merged())
    attached.detach()
    for name in NAMES:
        object.__setattr__(getattr(net, name), "weight", merged[f"{name}.weight"])
    for name, y in outputs(net).items():
        np.testing.assert_allclose(y, adapted[name], rtol=2e-5, atol=2e-5 * np.abs(y).max())


@pytest.mark.parametrize(("kind", "keys"), KINDS, ids=str)
def test_the_count_is_that_of_the_trained_values(net, kind, keys):
    attached, chosen = put(net, kind, keys), ADAPTERS[kind](**keys)
    for name in NAMES:
        wanted = sum(p.numpy().size for p in attached.adapters[name].parameters().values())
        shape = tuple(getattr(net, name).weight.shape)
        assert chosen.count(shape, chosen.sizes(shape, 4, 3.0)[0]) == wanted


@pytest.mark.parametrize(("kind", "keys"), KINDS, ids=str)
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_finished_factors_compute_the_update_at_any_strength(net, kind, keys, strength):
    base = {name: getattr(net, name).weight.numpy() for name in NAMES}
    attached = put(net, kind, keys)
    factors = {name: attached.adapters[name].factors() for name in NAMES}
    attached.detach()
    again = attach_factors(net, factors, strength)
    found = outputs(net)
    again.detach()
    for name in NAMES:
        weight = base[name] + factors[name].delta(base[name], strength)
        object.__setattr__(getattr(net, name), "weight", tensor(weight))
    for name, y in outputs(net).items():
        np.testing.assert_allclose(found[name], y, rtol=3e-5, atol=3e-5 * np.abs(y).max())


@pytest.mark.parametrize(("kind", "keys"), [k for k in KINDS if k[0] in ("loha", "lokr")], ids=str)
def test_a_merged_weight_that_is_made_again_gives_the_same_gradients(net, kind, keys, monkeypatch):
    def gradients():
        attached = put(net, kind, keys)
        for name in NAMES:
            x = tensor(np.random.default_rng(3).standard_normal(X[name]).astype(np.float32), requires_grad=True)
            getattr(net, name)(x).square().sum().backward()
        attached.detach()
        return [p.grad.numpy() for p in attached.parameters()]

    kept = gradients()
    monkeypatch.setattr("flame_train.adapters.merged.KEPT_BELOW", 0)
    for one, other in zip(kept, gradients(), strict=True):
        np.testing.assert_array_equal(one, other)


def flux_state(kind, keys):
    """An adapter on one of Flux' fused layers, one that diffusers cuts in two kinds of parts, and a plain one."""
    net = nn.Module()
    sizes = {
        "double_blocks.0.img_attn.qkv": (12, 36),
        "single_blocks.1.linear1": (12, 84),
        "double_blocks.0.img_attn.proj": (12, 12),
    }
    state = {}
    for name, (width, out) in sizes.items():
        net.layer = nn.Linear(width, out)
        net.init(np.random.default_rng(0))
        adapter = put(net, kind, keys, names=["layer"]).adapters["layer"]
        state[name] = adapter.factors()
    return {"transformer": state}


@pytest.mark.parametrize(("kind", "keys"), [k for k in KINDS if k[0] != "locon"], ids=str)
def test_kohyas_file_gives_every_array_back(tmp_path, kind, keys):
    state = flux_state(kind, keys)
    save_file(tmp_path / "x.safetensors", to_kohya(state, FLUX), network_metadata(state, FLUX))
    found = from_file(tmp_path / "x.safetensors", FLUX).state["transformer"]
    assert found.keys() == state["transformer"].keys()
    for name, factors in state["transformer"].items():
        assert (found[name].kind, found[name].alpha) == (factors.kind, factors.alpha)
        for which, array in factors.arrays.items():
            np.testing.assert_array_equal(found[name].arrays[which], array)


def test_dora_on_output_is_cut_up_for_diffusers_and_comes_back(tmp_path):
    state = flux_state("dora", {"wd_on_output": True})
    tensors, record = to_diffusers(state, FLUX)
    assert tensors["transformer.transformer_blocks.0.attn.to_k.lora_magnitude_vector"].shape == (12,)
    assert tensors["transformer.single_transformer_blocks.1.proj_mlp.lora_magnitude_vector"].shape == (48,)
    save_file(tmp_path / "x.safetensors", tensors, record)
    found = from_file(tmp_path / "x.safetensors", FLUX).state["transformer"]
    rng = np.random.default_rng(8)
    for name, factors in state["transformer"].items():
        weight = rng.standard_normal(factors.weight_shape).astype(np.float32)
        np.testing.assert_allclose(found[name].delta(weight), factors.delta(weight), rtol=1e-5, atol=1e-6)


def test_parts_of_a_layer_that_are_of_several_kinds_are_refused(tmp_path):
    tensors, record = to_diffusers(flux_state("dora", {"wd_on_output": True}), FLUX)
    del tensors["transformer.transformer_blocks.0.attn.to_k.lora_magnitude_vector"]
    save_file(tmp_path / "x.safetensors", tensors, record)
    with pytest.raises(ModelFileError, match=r"img_attn.qkv do not fit together: they are of kinds dora and lora"):
        from_file(tmp_path / "x.safetensors", FLUX)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("loha", 'of kind "loha", which diffusers does not read'), ("dora", "norms of input columns, which files of")],
)
def test_what_diffusers_does_not_read_is_not_written(kind, words):
    with pytest.raises(ModelFileError, match=f"{words}.*only kohya's format holds it"):
        to_diffusers(flux_state(kind, {}), FLUX)


def test_metadata_say_which_kind_it_is():
    found = {kind: network_metadata(flux_state(kind, {}), FLUX) for kind in ("lora", "loha", "lokr", "dora")}
    assert found["lora"]["ss_network_module"] == FLUX.network_module
    assert {m["ss_network_module"] for k, m in found.items() if k != "lora"} == {"lycoris.kohya"}
    assert '"algo": "lokr"' in found["lokr"]["ss_network_args"]
    assert '"dora_wd": "True", "wd_on_output": "False"' in found["dora"]["ss_network_args"]


def test_locon_has_a_rank_of_its_own_on_kernels_alone():
    net = Net()
    net.point = nn.Conv2d(4, 6, 1)
    net.init(np.random.default_rng(0))
    adapters = put(net, "locon", {"conv_rank": 3, "conv_alpha": 6.0}, names=["a", "conv", "point"]).adapters
    assert {n: (a.rank, a.alpha) for n, a in adapters.items()} == {"a": (4, 3.0), "conv": (3, 6.0), "point": (4, 3.0)}


def test_layers_that_do_not_suit_a_kind_are_named():
    shapes = {"a": (24, 12), "b": (30, 12, 3, 3)}
    assert ADAPTERS["lokr"](factor=4).shape_problem(shapes) is None
    assert ADAPTERS["lokr"](factor=0).shape_problem(shapes) == ("factor", "expected -1 or at least 1, got 0")
    key, words = ADAPTERS["locon"]().shape_problem({"a": (24, 12)})
    assert key == "kind"
    assert words.startswith('expected lora.targets that name convolutions with "locon", got none larger than 1x1')
    assert ADAPTERS["locon"]().shape_problem(shapes) is None


@pytest.mark.parametrize("wd_on_output", [False, True])
def test_dora_on_a_layer_of_one_output_has_the_magnitude_of_its_row(wd_on_output):
    """ComfyUI takes the magnitudes of such a layer for those of rows, however many there are."""
    layer = nn.Linear(3, 1, bias=False)
    net = nn.ModuleList([layer])
    net.init(np.random.default_rng(0))
    attached = attach(net, ["0"], rank=2, alpha=2.0, seed=1, kind=ADAPTERS["dora"](wd_on_output=wd_on_output))
    x = np.random.default_rng(3).standard_normal((5, 3)).astype(np.float32)
    np.testing.assert_array_equal(layer(tensor(x)).numpy(), layer.bare(tensor(x)).numpy())
    parameters = attached.adapters["0"].parameters()
    assert parameters["dora_scale"].shape == (1, 1)
    for p in parameters.values():
        p.data[...] = np.random.default_rng(p.size).standard_normal(p.shape)
    down, up, magnitude = (parameters[name].numpy() for name in ("lora_down.weight", "lora_up.weight", "dora_scale"))
    total = layer.weight.numpy() + up @ down
    expected = x @ (magnitude * total / np.linalg.norm(total)).T
    np.testing.assert_allclose(layer(tensor(x)).numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wd_on_output", [False, True])
def test_a_layer_of_one_output_does_not_decide_what_a_file_of_dora_says(wd_on_output):
    """Its magnitude is its row's by either setting; the other layers' are what `wd_on_output` speaks of."""
    net = nn.ModuleList([nn.Linear(3, 1, bias=False), nn.Linear(3, 5, bias=False)])
    net.init(np.random.default_rng(0))
    attached = attach(net, ["0", "1"], rank=2, alpha=2.0, seed=1, kind=ADAPTERS["dora"](wd_on_output=wd_on_output))
    state = {"transformer": {name: adapter.factors() for name, adapter in attached.adapters.items()}}
    metadata = network_metadata(state, FLUX)
    assert json.loads(metadata["ss_network_args"])["wd_on_output"] == str(wd_on_output)
