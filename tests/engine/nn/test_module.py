"""Modules: weights declared, joined and dropped."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flame_train.engine import nn, tensor
from flame_train.models.sdxl.unet import UNet, UNetArch


def test_joined_weights_lie_side_by_side_and_say_the_same() -> None:
    unet = UNet(UNetArch.tiny(16))
    unet.init(np.random.default_rng(0))
    before = {name: w.numpy().copy() for name, w in unet.weights()}
    unet.pack_contiguous()
    for name, w in unet.weights():
        np.testing.assert_array_equal(w.numpy(), before[name], err_msg=name)
    for layers in unet.fusable_groups():
        places = [layer.weight.data.__array_interface__["data"][0] for layer in layers]
        assert {b - a for a, b in itertools.pairwise(places)} <= {layers[0].weight.data.nbytes}


def test_a_weight_is_there_only_while_it_is_loaded() -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match=r"Linear\.weight is declared but not loaded"):
        _ = layer.weight
    layer.init(np.random.default_rng(0))
    assert layer(tensor(np.ones((1, 3), np.float32))).shape == (1, 2)
    layer.unload()
    with pytest.raises(RuntimeError, match="call load"):
        _ = layer.weight
    assert layer.num_weights() == 8
    with pytest.raises(AttributeError, match="Linear has no attribute 'weigth'"):
        _ = layer.weigth
    with pytest.raises(NotImplementedError, match="Module"):
        nn.Module()()
