"""What every family's table of names is held to: total, bijective, and with the values of diffusers' converter."""

from __future__ import annotations

import numpy as np

from flame_train.io.resolve import native_shapes


def shapes_of(module):
    """Names and shapes of a PyTorch module."""
    return {name: tuple(t.shape) for name, t in module.state_dict().items()}


def qwen3_vl_shapes(network, width, hidden):
    """Names and shapes of Qwen3-VL as this class of transformers has it, with a small half for images."""
    import torch
    import transformers

    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": 151936, "hidden_size": width, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": hidden, "head_dim": 128,
        },
        vision_config={"depth": 1, "out_hidden_size": width, "deepstack_visual_indexes": [0]},
    )  # fmt: skip
    with torch.device("meta"):
        return shapes_of(getattr(transformers, network)(config))


def lora_shapes(family, linear, ours, theirs, prefix, spell):
    """Names and shapes of a LoRA on every linear layer, in one of the spellings.

    `linear` are our paths. `spell` makes a path of one of ours; None: a path is diffusers'.
    """
    (component,) = family.components
    paths = linear if spell else {path for module in component.modules.values() for path in module}
    down, up = ("lora_down", "lora_up") if prefix == "lora_unet_" else ("lora_A", "lora_B")
    names = {}
    for path in sorted(paths):
        rows, width = (ours if spell else theirs)[f"{path}.weight"]
        spelled = prefix + (spell(path) if spell else path)
        names |= {f"{spelled}.{down}.weight": (4, width), f"{spelled}.{up}.weight": (rows, 4)}
    return names


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
