"""The UNet's behaviour beyond its numbers: checkpointing, precision, memory. Its numbers are in tests/parity."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.adapters.targets import UNET_PRESETS, resolve
from flame_train.engine import Tensor, no_grad, tensor
from flame_train.engine import functional as F
from flame_train.engine.autograd.graph import Node
from flame_train.engine.checkpoint import rematerialize
from flame_train.engine.memory_report import saved_by_op
from flame_train.engine.mode import op_hooks
from flame_train.models.sdxl.unet import UNet, UNetArch, size_conditioning


def with_lora(model, targets=("full",)):
    attached = attach(model, resolve(model, targets, UNET_PRESETS), rank=2, alpha=2.0, seed=0)
    rng = np.random.default_rng(2)
    for adapter in attached.adapters.values():
        adapter.up.data[...] = 0.1 * rng.standard_normal(adapter.up.shape)
    return attached


def gradients(model, attached, predict):
    for p in attached.parameters():
        p.grad = None
    out = predict(model)
    out.square().sum().backward()
    return out.numpy(), {p.name: p.grad.numpy() for p in attached.parameters()}


@pytest.mark.parametrize("checkpointing", ["mlp", "full", "offload"])
def test_checkpointing_changes_no_bit(unet, predict, checkpointing):
    attached = with_lora(unet)
    plain, expected = gradients(unet, attached, predict)
    unet.checkpointing = checkpointing
    out, found = gradients(unet, attached, predict)
    np.testing.assert_array_equal(out, plain)
    assert found.keys() == expected.keys()
    for name, g in expected.items():
        assert np.abs(g).max() > 0, name
        np.testing.assert_array_equal(found[name], g, err_msg=name)


def make_again(monkeypatch, how):
    transformer = "models.sdxl.transformer"
    for place in ("networks.attention_mlp.remade", f"{transformer}.remade", f"{transformer}.remultiplied"):
        monkeypatch.setattr(f"flame_train.{place}", how)


@pytest.mark.parametrize(
    ("targets", "narrow", "spared"),
    [
        ("attention", 0, {32: 2 + 2, 64: 2 + 2}),  # the norms before both attentions, and what merges their heads
        ("attention", 32, {32: 4 + 8, 64: 4}),  # at the width of 32 what geglu is given as well
        ("attention+mlp", 32, {32: 5 + 8, 64: 5 + 4}),  # the third norm; at 64 what geglu makes
    ],
)
def test_what_is_cheaply_made_again_is_not_kept(unet, predict, monkeypatch, targets, narrow, spared):
    """`spared` is how often the image of each width is kept less. No bit of the gradients changes."""

    def kept():
        return sum(saved_by_op(predict(unet)).values()), gradients(unet, attached, predict)[1]

    attached = with_lora(unet, [targets])
    monkeypatch.setattr("flame_train.models.sdxl.transformer.NARROW", narrow)
    make_again(monkeypatch, rematerialize)
    less, bits = kept()
    make_again(monkeypatch, lambda fn, *args: fn(*args))
    more, expected = kept()
    for name, g in expected.items():
        np.testing.assert_array_equal(bits[name], g, err_msg=name)
    image = {32: 2 * 4 * 4 * 32, 64: 2 * 2 * 2 * 64}  # images, pixels, channels
    blocks = {32: 5 * 1, 64: 6 * 2}
    spared_numbers = sum(image[width] * blocks[width] * times for width, times in spared.items())
    assert more - less == 4 * (spared_numbers - image[32])  # nothing before the first adapter keeps the first's input


class Count:
    def __init__(self):
        self.forward = self.backward = 0

    def before(self, op, phase, arrays):
        self.forward += phase == "forward"
        self.backward += phase == "backward"

    def after(self, op, phase, arrays):
        pass


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_work_below_the_first_adapter(unet, predict, checkpointing):
    """With an adapter in the last block only, all before it runs once, without a graph."""
    unet.checkpointing = "full" if checkpointing else "off"
    attached = with_lora(unet, ["output_blocks.8.0.out_layers.3"])
    forward, backward = Count(), Count()
    with op_hooks(forward):
        loss = predict(unet).square().sum()
    with op_hooks(backward):
        loss.backward()
    assert backward.backward < 30
    assert backward.forward < 30  # what checkpointing runs again
    assert forward.forward > 10 * backward.forward
    assert all(p.grad is not None for p in attached.parameters())


def alive():
    """Tensors and graph nodes that anything still holds."""
    return sum(issubclass(type(o), (Tensor, Node)) for o in gc.get_objects())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_leaves_nothing_behind(unet, predict, checkpointing):
    """Reference counts alone free every activation: the collector is off."""
    unet.checkpointing = "full" if checkpointing else "off"
    attached = with_lora(unet)
    gradients(unet, attached, predict)
    gc.collect()
    gc.disable()
    try:
        before = alive()
        gradients(unet, attached, predict)
        assert alive() == before
    finally:
        gc.enable()


def test_bfloat16_stays_near_fp32(predict):
    arch = UNetArch.tiny(model_channels=16, context_dim=24, pooled_dim=8)
    fp32, bf16 = UNet(arch), UNet(arch)
    fp32.init(np.random.default_rng(0))
    bf16.init(np.random.default_rng(0), "bfloat16")
    for model in (fp32, bf16):
        with_lora(model)
    with no_grad():
        expected, found = predict(fp32).numpy(), predict(bf16)
    assert found.dtype.name == "bfloat16"
    error = np.abs(found.numpy().astype(np.float32) - expected).max() / np.abs(expected).max()
    assert error < 0.05


def test_attention_in_fp16_has_its_scores_in_fp32():
    """Stable Diffusion 2's are larger than any number of fp16."""
    rng = np.random.default_rng(0)
    q, k, v = ((scale * rng.standard_normal((1, 2, 5, 64))).astype(np.float16) for scale in (90, 90, 1))
    found, expected = (
        F.scaled_dot_product_attention(*(tensor(x.astype(dtype)) for x in (q, k, v))).numpy()
        for dtype in (np.float16, np.float32)
    )
    assert np.abs(q.astype(np.float32) @ k.swapaxes(-1, -2)).max() > np.finfo(np.float16).max
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_the_gradients_of_a_bfloat16_model_are_fp32(predict):
    model = UNet(UNetArch.tiny(model_channels=16, context_dim=24, pooled_dim=8))
    model.init(np.random.default_rng(0), "bfloat16")
    _, found = gradients(model, with_lora(model), predict)
    assert {g.dtype.name for g in found.values()} == {"float32"}
    assert all(np.isfinite(g).all() for g in found.values())


def test_sizes_are_embedded_each_on_its_own_in_their_order():
    sizes = np.array([[1024, 768, 0, 64, 512, 896]], np.float32)
    found = size_conditioning(tensor(sizes), "float32").numpy().reshape(6, 256)
    freqs = 10000.0 ** (-np.arange(128) / 128)
    for row, size in zip(found, sizes[0], strict=True):
        np.testing.assert_allclose(row[:128], np.cos(size * freqs), atol=2e-4)
        np.testing.assert_allclose(row[128:], np.sin(size * freqs), atol=2e-4)
