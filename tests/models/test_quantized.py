"""Networks whose transformers are stored in fewer bits: they compute what the rounded weights would."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.adapters.attach import attach
from flame_train.engine import Frozen, Tensor, nn
from flame_train.engine import functional as F
from flame_train.engine.dtype import bfloat16, float32, float64
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.models.sdxl.unet import UNet, UNetArch
from flame_train.networks.attention_mlp import feed_forward
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder
from tests.engine.ops.test_scaled import ROUNDED, by_ml_dtypes

FP8 = nn.Storage("fp8")

NETWORKS: dict[str, Callable[[], Any]] = {
    "sdxl": lambda: UNet(UNetArch.tiny()),
    "sd3": lambda: MMDiT(MMDiTArch.tiny(dual=(0, 1))),
    "flux": lambda: Flux(FluxArch.tiny()),
}


class Host:
    """A network's weights, as from a file."""

    def __init__(self, network: nn.Module) -> None:
        self._weights = {name: w.numpy() for name, w in network.weights()}
        self.shapes = {name: w.shape for name, w in self._weights.items()}

    def read(self, name: str) -> np.ndarray:
        return self._weights[name]


@pytest.fixture(params=NETWORKS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def source(name: str) -> Host:
    network = NETWORKS[name]()
    network.init(np.random.default_rng(0))
    return Host(network)


def loaded(name: str, storage: nn.Storage | None, device: str = "cpu", dtype: Any = float64) -> Any:
    network = NETWORKS[name]()
    nn.load(network, source(name), dtype=dtype, device=device, what=name, storage=storage)
    return network


def made(network: Any, dtype: Any = float64) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The output, and every factor's gradient of a LoRA on all linear layers of the blocks."""
    names = [n for n, m in network.named_modules() if m in network.quantizable()]
    attached = attach(network, names, rank=4, alpha=2.0, seed=0)
    rng, arch = np.random.default_rng(1), network.arch
    for adapter in attached.adapters.values():
        adapter.up.data[...] = rng.standard_normal(adapter.up.shape) * 0.1
        for p in (adapter.down, adapter.up):
            p.data = p.data.astype(dtype)
    unet = isinstance(network, UNet)
    channels, pooled = (4, arch.adm_in_channels) if unet else (16, arch.pooled_dim)
    x, context, vector = (
        flame.tensor(rng.standard_normal(s), dtype)
        for s in ((2, 16, 16, channels), (2, 7, arch.context_dim), (2, pooled))
    )
    given = [x, flame.tensor(np.array([3, 700])), context, vector]
    if getattr(arch, "guidance", False):
        given.append(flame.tensor(np.ones(2), dtype))
    y = network(*given)
    y.square().mean().backward()
    return y.numpy(), {p.name: p.grad.numpy() for p in attached.parameters()}


EIGHT_BITS = [
    pytest.param(name, stored, marks=[pytest.mark.proof] * (name == "sdxl" and stored == "int8"))
    for name in NETWORKS
    for stored in ROUNDED
]
"""The UNet is the slowest of them, and asks of int8 what the others do."""


@pytest.mark.parametrize(("name", "stored"), EIGHT_BITS)
def test_weights_of_8_bits_are_the_rounded_weights(name: str, stored: str) -> None:
    """The output and all gradients of a LoRA, against the network that has rounded weights as they are."""
    plain = loaded(name, None)
    for layer in plain.quantizable():
        layer.weight = Frozen(ROUNDED[stored](layer.weight.numpy().astype(np.float32)))
    want, gradients = made(plain)
    got, found = made(loaded(name, nn.Storage(stored)))
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    assert found.keys() == gradients.keys()
    for parameter, g in gradients.items():
        np.testing.assert_allclose(found[parameter], g, rtol=1e-7, atol=1e-12, err_msg=parameter)


NEAR = {"fp8": (0.1, 0.98), "int8": (0.05, 0.99)}


@pytest.mark.parametrize(("name", "stored"), EIGHT_BITS)
def test_products_of_8_bits_point_where_the_exact_ones_do(name: str, stored: str) -> None:
    near, along = NEAR[stored]
    exact, rounded = (made(loaded(name, nn.Storage(stored, dynamic))) for dynamic in (False, True))
    assert 0 < np.linalg.norm(rounded[0] - exact[0]) < near * np.linalg.norm(exact[0])
    g, h = (np.concatenate([v.ravel() for v in found.values()]) for _, found in (exact, rounded))
    assert g @ h > along * np.linalg.norm(g) * np.linalg.norm(h)


def test_weights_of_4_bits_are_what_they_decode_to(name: str) -> None:
    """The output and all gradients of a LoRA, against the network that has decoded weights as they are."""
    packed, plain = loaded(name, nn.Storage("nf4")), loaded(name, None)
    for layer, stored in zip(plain.quantizable(), packed.quantizable(), strict=True):
        layer.weight = Frozen(stored.weight.dequantize(float64).data)
    want, gradients = made(plain)
    got, found = made(packed)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)
    for parameter, g in gradients.items():
        np.testing.assert_allclose(found[parameter], g, rtol=1e-9, atol=1e-14, err_msg=parameter)


def test_half_the_bytes_and_only_the_blocks(name: str) -> None:
    """Embeddings, convolutions, norms and what modulates a stream are given as they are."""
    plain, packed = loaded(name, None, dtype=float32), loaded(name, nn.Storage("fp8", dynamic=True), dtype=float32)
    layers = packed.quantizable()
    whole = dict(plain.weights())
    for weight_name, w in packed.weights():
        if isinstance(w, nn.ScaledWeight):
            assert w.nbytes == whole[weight_name].size + 4 * w.shape[0]
            assert w.shape == whole[weight_name].shape
            assert w.dynamic == (not any(part in weight_name for part in ("_mod.", "modulation")))
        else:
            assert isinstance(w, Tensor)
            np.testing.assert_array_equal(w.numpy(), whole[weight_name].numpy())
    assert {m for m in layers if isinstance(m.weight, nn.ScaledWeight)} == set(layers)
    names = [n for n, m in packed.named_modules() if m in layers]
    inside = re.compile(r".*(transformer_blocks\.\d+\.|proj_(in|out)$)|(joint|double|single)_blocks\.\d+\.")
    assert names
    assert all(inside.match(n) for n in names)


def test_they_are_never_trained(name: str) -> None:
    with pytest.raises(TypeError, match="quantized weights are never trained"):
        loaded(name, FP8).requires_grad_()


def test_a_loras_merged_weights_are_those_given_back_and_its_update(name: str) -> None:
    network = loaded(name, FP8, dtype=float32)
    layer_name, _ = next((n, m) for n, m in network.named_modules() if m in network.quantizable())
    attached = attach(network, [layer_name], rank=2, alpha=2.0, seed=0)
    attached.adapters[layer_name].up.data[...] = 0.1
    [(merged_name, merged)] = attached.merged()
    plain = loaded(name, None, dtype=float32)
    original = dict(plain.weights())[merged_name].numpy()
    want = by_ml_dtypes(original) + attached.adapters[layer_name].delta().numpy()
    np.testing.assert_allclose(merged.numpy(), want, rtol=1e-6)


def test_a_t5_in_8_bits_is_that_of_rounded_weights() -> None:
    """Its residual stream is wider than what the layers make, so they cannot take it along."""
    plain, packed = (T5Encoder(T5Arch.tiny()) for _ in range(2))
    plain.init(np.random.default_rng(0))
    nn.load(packed, Host(plain), dtype="bfloat16", device="cpu", what="T5", storage=FP8)
    for name, module, attr, _ in plain.named_specs():
        values = getattr(module, attr).numpy()
        values = (by_ml_dtypes(values) if module in plain.quantizable() else values).astype(bfloat16)
        assert np.isfinite(values.astype(np.float32)).all(), name
        setattr(module, attr, Frozen(values))
    ids = flame.tensor(np.arange(12).reshape(2, 6))
    want, got = (network(ids).numpy().astype(np.float32) for network in (plain, packed))
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)  # sums in bf16 are rounded once more, or once less
    assert np.linalg.norm(got - want) < 0.004 * np.linalg.norm(want)


def test_the_files_own_values_are_rounded_and_once() -> None:
    """What lies near the middle of two codes would fall to the other side if bf16 came between."""
    row = np.float32([[1.75, 1.0625 + 2**-12, 1.0625 - 2**-12, 1.1875 - 2**-12, 1.3125 + 2**-12]])

    class Lone(nn.Module):
        def __init__(self) -> None:
            self.layer = nn.Linear(5, 1, bias=False)

        def quantizable(self, rotated: bool = False) -> dict[nn.Linear, bool]:
            return {self.layer: True}

    origin = Lone()
    origin.layer.weight = Frozen(row)
    for dtype in ("float32", "bfloat16", "float16"):
        lone = Lone()
        nn.load(lone, Host(origin), dtype=dtype, device="cpu", what="a layer", storage=FP8)
        np.testing.assert_array_equal(lone.layer.weight.dequantize(float64).numpy(), by_ml_dtypes(row))
    with pytest.raises(ValueError, match=r"Storage: expected one of fp8, int8.*, got 'yes'"):
        nn.Storage("yes")
    with pytest.raises(TypeError, match="this one is stored in fewer bits already"):
        lone.layer.quantize(FP8)
    lone.requires_grad_(False)
    assert isinstance(lone.layer.weight, nn.ScaledWeight)
    origin.requires_grad_()
    with pytest.raises(TypeError, match="this one is trained"):
        origin.layer.quantize(FP8)


def test_what_is_stored_in_two_ways_is_not_joined() -> None:
    unet = loaded("sdxl", FP8, dtype=float32)
    q, k, v = next(group for group in unet.fusable_groups() if len(group) == 3)
    k.weight = Frozen(k.weight.dequantize(float32).data)
    v.weight = nn.ScaledWeight(v.weight.data, v.weight.scales, dynamic=True)
    unet.pack_contiguous()
    names = [n for n, m in unet.named_modules() if m in (q, k, v)]
    attach(unet, names, rank=2, alpha=2.0, seed=0)
    x = flame.tensor(np.random.default_rng(0).standard_normal((3, q.in_features), np.float32))
    for together, alone in zip(nn.grouped_linear([q, k, v], x), (q(x), k(x), v(x)), strict=True):
        np.testing.assert_array_equal(together.numpy(), alone.numpy())


def test_a_feed_forward_network_stored_in_two_ways_is_its_two_layers() -> None:
    rng, layers = np.random.default_rng(0), [nn.Linear(8, 12), nn.Linear(12, 8)]
    for layer in layers:
        layer.init(rng, float64)
    x = flame.tensor(rng.standard_normal((3, 8)))
    layers[1].quantize(FP8)
    want = layers[1](F.gelu(layers[0](x), approximate="tanh")).numpy()
    np.testing.assert_array_equal(feed_forward(*layers, x).numpy(), want)
    layers[0].quantize(nn.Storage("fp8", dynamic=True))
    want = layers[1](F.gelu(layers[0](x), approximate="tanh")).numpy()
    np.testing.assert_array_equal(feed_forward(*layers, x).numpy(), want)
