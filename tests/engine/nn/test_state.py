"""A module's tensors as a whole: by name to a file and back, to other dtypes, printed; buffers; Sequential."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn, optim
from flame_train.engine.dtype import bfloat16, float32, int64
from flame_train.errors import ModelFileError, OutputError, ShapeError


def net(seed: int = 0) -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, layout="NCHW"), nn.BatchNorm2d(4, layout="NCHW"), F.relu, nn.LayerNorm((4, 5, 6))
    )
    model.init(np.random.default_rng(seed))
    return model


def theirs() -> Any:
    torch = pytest.importorskip("torch")
    t = torch.nn
    return t.Sequential(t.Conv2d(3, 4, 3, padding=1), t.BatchNorm2d(4), t.ReLU(), t.LayerNorm((4, 5, 6)))


@pytest.mark.parity
def test_a_network_of_pytorchs_goes_on_here() -> None:
    """Weights and buffers under the same names; forward, gradients and running statistics in training and after."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    other, model = theirs(), net()
    model.requires_grad_()
    model.load_state_dict({name: t.numpy() for name, t in other.state_dict().items()})
    assert list(model.state_dict()) == list(other.state_dict())
    for training in (True, True, False):
        model.train(training)
        other.train(training)
        x = np.random.default_rng(training).normal(size=(2, 3, 5, 6)).astype(np.float32)
        ours, want = model(flame.tensor(x)), other(torch.from_numpy(x))
        np.testing.assert_allclose(ours.numpy(), want.detach().numpy(), rtol=2e-5, atol=2e-5)
        flame.backward(ours.square().sum())
        want.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        np.testing.assert_allclose(p.grad.numpy(), q.grad.numpy(), rtol=1e-3, atol=1e-3, err_msg=name)
    for name, t in other.state_dict().items():
        np.testing.assert_allclose(model.state_dict()[name].numpy(), t.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parity
@pytest.mark.parametrize("shape", [(6, 4), (3, 4, 5)])
def test_batch_norm_of_vectors_and_sequences(shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    other, ours = torch.nn.BatchNorm1d(4, momentum=0.3), nn.BatchNorm1d(4, momentum=0.3)
    ours.init(np.random.default_rng(0))
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    want = other(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(ours(flame.tensor(x)).numpy(), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.running_var.numpy(), other.running_var.numpy(), rtol=1e-6)
    assert ours.num_batches_tracked.item() == 1


def test_layouts_are_the_same_numbers_turned() -> None:
    x = flame.tensor(np.random.default_rng(0).normal(size=(2, 5, 6, 4)).astype(np.float32))
    for make in (
        lambda layout: nn.Conv2d(4, 8, 3, layout=layout),
        lambda layout: nn.ConvTranspose2d(4, 8, 3, layout=layout),
        lambda layout: nn.GroupNorm(2, 4, layout=layout),
        lambda layout: nn.GroupNorm(2, 4, silu=True, layout=layout),
        lambda layout: nn.BatchNorm2d(4, layout=layout),
    ):
        last, first = make("NHWC"), make("NCHW")
        for layer in (last, first):
            layer.init(np.random.default_rng(0))
        np.testing.assert_allclose(
            first(x.permute(0, 3, 1, 2)).numpy(), last(x).permute(0, 3, 1, 2).numpy(), rtol=1e-5, atol=1e-5
        )
        with pytest.raises(ShapeError, match="expected layout 'NCHW' or 'NHWC', got 'HWC'"):
            make("HWC")


def test_buffers_are_kept_but_never_trained() -> None:
    model = net()
    model.requires_grad_()
    trained = dict(model.named_parameters())
    assert "1.running_mean" not in trained
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} < set(model.state_dict())
    assert model.state_dict()["1.num_batches_tracked"].dtype == int64
    x = flame.tensor(np.random.default_rng(0).normal(size=(2, 3, 5, 6)).astype(np.float32), requires_grad=True)
    flame.checkpoint(lambda t: model(t), x).sum().backward()
    assert model.state_dict()["1.num_batches_tracked"].item() == 1  # not again when recomputed


def test_weights_go_to_a_file_and_back(tmp_path: Path) -> None:
    model, path = net(0), tmp_path / "net.safetensors"
    model(flame.tensor(np.ones((2, 3, 5, 6), np.float32)))
    flame.save(model.state_dict(), path)
    for other in (net(1), net(1).requires_grad_()):
        found = other.load_state_dict(flame.load(path))
        assert found == ([], [])
        for name, t in other.state_dict().items():
            assert np.array_equal(t.numpy(), model.state_dict()[name].numpy()), name
    fresh = nn.Linear(2, 3)
    fresh.load_state_dict({"weight": np.ones((3, 2), np.float32), "bias": np.zeros(3, np.float32)})
    assert fresh(flame.ones(1, 2)).tolist() == [[2.0, 2.0, 2.0]]
    with pytest.raises(TypeError, match=r"save: expected tensors by name, such as model.state_dict\(\)"):
        flame.save(model, path)
    with pytest.raises(TypeError, match="save: expected a Tensor or a NumPy array for a, got int"):
        flame.save({"a": 3}, path)
    with pytest.raises(OutputError, match=r"net\.pt: a file of this ending.*end it in \.safetensors"):
        flame.save(model.state_dict(), tmp_path / "net.pt")
    (tmp_path / "net.pt").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="refused"):
        flame.load(tmp_path / "net.pt")


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    layer = nn.Linear(2, 3)
    layer.init(np.random.default_rng(0))
    before = layer.weight.numpy().copy()
    for state, match in (
        ({"weight": np.zeros((3, 2))}, "missing: 1\n.*bias"),
        ({"weight": np.zeros((3, 2)), "bias": np.zeros(4)}, r"mis-shaped: 1\n.*bias: expected \(3,\), found \(4,\)"),
        ({"weight": np.zeros((3, 2)), "bias": np.zeros(3), "b": np.zeros(1)}, "unexpected: 1"),
    ):
        with pytest.raises(ModelFileError, match=match):
            layer.load_state_dict(state)
        assert np.array_equal(layer.weight.numpy(), before)
    left = layer.load_state_dict({"weight": np.zeros((3, 2)), "other": np.zeros(1)}, strict=False)
    assert left == (["bias"], ["other"])
    assert not layer.weight.numpy().any()
    with pytest.raises(TypeError, match="expected a Tensor or a NumPy array for bias, got float"):
        layer.load_state_dict({"weight": np.zeros((3, 2)), "bias": 1.0})


def test_compute_copies_follow_a_loaded_state() -> None:
    layer = nn.Linear(2, 3)
    layer.init(np.random.default_rng(0))
    layer.requires_grad_()
    optim.FlatParameters(layer.named_parameters(), compute_dtype="bfloat16")
    layer.load_state_dict({"weight": np.full((3, 2), 2.0), "bias": np.zeros(3)})
    assert layer(flame.ones(1, 2, dtype="bfloat16")).tolist() == [[4.0, 4.0, 4.0]]
    with pytest.raises(TypeError, match="weight is trained, in fp32; cast before requires_grad_"):
        layer.to("bfloat16")


def test_casting_a_module() -> None:
    model = net()
    layout = model[0].weight.data.strides
    assert model.to("cpu", "bfloat16") is model
    assert model[0].weight.dtype == bfloat16
    assert model[0].weight.data.strides == tuple(s // 2 for s in layout)  # still channels last
    assert model[1].running_mean.dtype == float32
    assert model.eval()(flame.ones(1, 3, 5, 6, dtype="bfloat16")).dtype == bfloat16
    with pytest.raises(TypeError, match="expected a floating dtype for a module, got int64"):
        model.to("int64")


def test_a_module_shows_its_parts() -> None:
    assert repr(net()) == (
        "Sequential(\n"
        "  (0): Conv2d(kernel_size=(3, 3), in_channels=3, out_channels=4, groups=1, stride=1, padding=1, dilation=1, "
        "layout=NCHW, weight (4, 3, 3, 3), bias (4,))\n"
        "  (1): BatchNorm2d(num_features=4, eps=1e-05, momentum=0.1, affine=True, layout=NCHW, "
        "weight (4,), bias (4,), running_mean (4,), running_var (4,), num_batches_tracked ())\n"
        "  (2): <op relu>\n"
        "  (3): LayerNorm(dims=(4, 5, 6), eps=1e-05, weight (4, 5, 6), bias (4, 5, 6))\n"
        ")"
    )
    with pytest.raises(TypeError, match="Sequential: expected modules and functions, got int"):
        nn.Sequential(nn.Linear(1, 2), 3)


def test_batch_norm_says_what_it_wants() -> None:
    layer = nn.BatchNorm2d(4)
    layer.init(np.random.default_rng(0))
    with pytest.raises(
        ShapeError, match=r"expected an input of 4 dims, NHWC, with 4 channels, got shape \(2, 4, 5, 6\)"
    ):
        layer(flame.ones(2, 4, 5, 6))
