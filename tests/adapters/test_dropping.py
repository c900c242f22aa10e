"""What a training step leaves out of adapters: how much, which parts together, and nothing outside a step."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.adapters.dropping import Chances
from flame_train.adapters.kinds import ADAPTERS
from flame_train.engine import checkpoint, nn, tensor
from flame_train.engine.random import Rng

KINDS = ["lora", "loha", "lokr", "dora"]
OUT, WIDTH, RANK = 32, 16, 8


def rng(step, samples=4):
    return Rng(np, 11, step, np.arange(samples))


@pytest.fixture(params=["linear", "conv"])
def layer(request):
    net = nn.Module()
    net.layer = nn.Linear(WIDTH, OUT) if request.param == "linear" else nn.Conv2d(WIDTH, OUT, 3, padding=1)
    net.init(np.random.default_rng(0))
    return net


def put(net, kind, **chances):
    attached = attach(net, ["layer"], rank=RANK, alpha=RANK, seed=1, kind=ADAPTERS[kind](), chances=Chances(**chances))
    for p in attached.parameters():
        p.data[...] = np.where(p.data == 0, 0.3 * np.random.default_rng(2).standard_normal(p.shape), p.data)
    return attached


def images(net):
    shape = (4, 6, WIDTH) if isinstance(net.layer, nn.Linear) else (4, 5, 6, WIDTH)
    return tensor(np.random.default_rng(3).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_out_outside_a_step(layer, kind):
    x = images(layer)
    attached = put(layer, kind)
    whole = layer.layer(x).numpy()
    attached.detach()
    attached = put(layer, kind, rank=0.5, module=0.5)
    np.testing.assert_array_equal(layer.layer(x).numpy(), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_with_next_to_no_chance_a_step_computes_the_same(layer, kind):
    """The unfused way of a step that leaves out parts, none of which it does."""
    x = images(layer)
    attached = put(layer, kind, rank=1e-7, module=1e-7)
    whole = layer.layer(x).numpy()
    with attached.drops.during(rng(0)):
        np.testing.assert_allclose(layer.layer(x).numpy(), whole, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_left_out_whole_and_as_often_as_asked(layer, kind):
    x = images(layer)
    bare = layer.layer(x).numpy()
    attached = put(layer, kind, module=0.3)
    whole = layer.layer(x).numpy()
    left_out = 0
    for step in range(200):
        with attached.drops.during(rng(step)):
            y = layer.layer(x).numpy()
        out = np.allclose(y, bare, rtol=1e-4, atol=1e-5)
        assert out or np.allclose(y, whole, rtol=2e-4, atol=2e-5)
        left_out += out
    assert 35 < left_out < 85


def test_numbers_ranks_and_the_rest_as_in_sd_scripts():
    """With down the identity, what is left of the inner activations shows in the output."""
    net = nn.Module()
    net.layer = nn.Linear(RANK, RANK, bias=False)
    net.init(np.random.default_rng(0))
    x = tensor(np.ones((2000, 3, RANK), np.float32))
    bare = net.layer(x).numpy()
    for chances, alike in (({"dropout": 0.25}, False), ({"rank": 0.25}, True)):
        attached = attach(net, ["layer"], rank=RANK, alpha=RANK, seed=1, chances=Chances(**chances))
        down, up = attached.parameters()
        down.data[...], up.data[...] = np.eye(RANK), np.eye(RANK)
        with attached.drops.during(rng(0, 2000)):
            kept = net.layer(x).numpy() - bare
        attached.detach()
        np.testing.assert_allclose(np.unique(kept.round(3)), [0.0, 1.333])
        np.testing.assert_allclose((kept == 0).mean(), 0.25, atol=0.01)
        assert (np.ptp(kept, axis=1) < 1e-3).all() == alike, "a rank is left out for a whole image"
        assert np.ptp(kept, axis=2).max() > 1


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_rows_of_a_product_are_left_out_as_in_lycoris(layer, kind):
    x = images(layer)
    bare = layer.layer(x).numpy()
    attached = put(layer, kind, rank=0.5)
    whole = layer.layer(x).numpy()
    with attached.drops.during(rng(1)):
        y = layer.layer(x).numpy()
    out = np.isclose(y, bare, rtol=1e-4, atol=1e-5).reshape(-1, OUT).all(0)
    stays = np.isclose(y, whole, rtol=1e-4, atol=1e-5).reshape(-1, OUT).all(0)
    assert (out ^ stays).all()
    assert 6 < out.sum() < 26


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputed_block_leaves_out_the_same(layer, kind):
    gradients = []
    for recompute in (False, True):
        attached = put(layer, kind, rank=0.4, module=0.2, dropout=0.3 if kind == "lora" else 0.0)
        x = images(layer)
        x.requires_grad_()
        with attached.drops.during(rng(5)):
            y = checkpoint(layer.layer, x) if recompute else layer.layer(x)
            y.square().sum().backward()
        gradients.append([p.grad.numpy() for p in attached.parameters()])
        attached.detach()
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_update_is_held_to_the_largest_norm(layer, kind):
    attached = put(layer, kind)
    adapter = attached.adapters["layer"]
    update = adapter.lora.delta if kind == "dora" else adapter.delta
    before = update().numpy()
    norm = np.linalg.norm(before)
    attached.limit(2 * norm)
    np.testing.assert_array_equal(update().numpy(), before)
    attached.limit(norm / 3)
    np.testing.assert_allclose(update().numpy(), before / 3, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_of_rslora_is_alpha_over_the_root(layer, kind):
    attached = attach(layer, ["layer"], rank=2, alpha=2.0, seed=1, kind=ADAPTERS[kind](), scale="sqrt_rank")
    assert attached.adapters["layer"].factors().alpha == pytest.approx(2.0 * 2**0.5)


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_the_noise_level_says_how_many_ranks_act(layer, exponent):
    """T-LoRA: as PyTorch computes it for each image by itself, its last ranks cut off, forward and backward."""
    torch = pytest.importorskip("torch")
    x, levels, least = images(layer), np.array([0.0, 0.3, 0.74, 1.0], np.float32), 2
    attached = put(layer, "lora", min_rank=least, rank_exponent=exponent)
    down, up = attached.parameters()
    plain = layer.layer(x).numpy()
    with attached.drops.during(rng(0), levels=tensor(levels)):
        y = layer.layer(x)
        (y * y).sum().backward()
    attached.detach()
    base = torch.from_numpy(layer.layer(x).numpy())
    a, b = (torch.from_numpy(p.numpy()).requires_grad_() for p in (down, up))
    rows = []
    for each, level in zip(torch.from_numpy(x.numpy()), levels, strict=True):
        acting = int((1 - level) ** exponent * (RANK - least)) + least
        if isinstance(layer.layer, nn.Linear):
            low = torch.nn.functional.linear(each, a[:acting])
        else:
            low = torch.nn.functional.conv2d(each.permute(2, 0, 1), a[:acting], padding=1).permute(1, 2, 0)
        rows.append(low @ b.reshape(OUT, RANK)[:, :acting].T)
    theirs = base + torch.stack(rows)
    theirs.square().sum().backward()
    np.testing.assert_allclose(y.numpy(), theirs.detach().numpy(), rtol=1e-4, atol=1e-5)
    for ours, grad in ((down, a.grad), (up, b.grad)):
        np.testing.assert_allclose(ours.grad.numpy(), grad.numpy(), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(y.numpy()[0], plain[0], rtol=1e-4, atol=1e-5)
    assert not np.allclose(y.numpy()[3], plain[3], atol=1e-3)
