"""What every family's table of names is held to: total, bijective, and with the values of diffusers' converter."""

from __future__ import annotations

import numpy as np

from flame_train.io.resolve import native_shapes


def shapes_of(module):
    """Names and shapes of a PyTorch module."""
    return {name: tuple(t.shape) for name, t in module.state_dict().items()}


def check_bijective(table, ours, theirs):
    """Each of our names has one of theirs and the other way round, with the same shapes."""
    there, back = table.pull(ours), table.inverse.pull(theirs)
    assert there.unknown == back.unknown == ()
    assert native_shapes(there.sources, ours) == theirs
    assert native_shapes(back.sources, theirs) == ours


class _Arrays:
    def __init__(self, arrays):
        self.arrays = arrays

    def read(self, name):
        return self.arrays[name]


def _through(table, arrays):
    return {name: source.read(_Arrays(arrays)) for name, source in table.pull(arrays).sources.items()}


def check_values(model, convert, table):
    """Arrays through the table are what diffusers' `convert` makes of them, and come back as they were."""
    import torch

    model.init(np.random.default_rng(0), "float32")
    rng = np.random.default_rng(1)
    own = {name: rng.standard_normal(t.shape).astype(np.float32) for name, t in model.weights()}
    converted = convert({f"model.diffusion_model.{name}": torch.from_numpy(a) for name, a in own.items()})
    made = _through(table, own)
    assert made.keys() == converted.keys()
    for name, array in made.items():
        np.testing.assert_array_equal(array, converted[name].numpy(), err_msg=name)
    back = _through(table.inverse, made)
    assert back.keys() == own.keys()
    for name, array in back.items():
        np.testing.assert_array_equal(array, own[name], err_msg=name)
