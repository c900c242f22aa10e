"""What every family's table of names is held to: total, bijective, and with the values of diffusers' converter.

And what its files are: each name sorted into its component, the family told, and every layer known in LoRA files.
"""

from __future__ import annotations

import numpy as np

from flame_train.adapters.dialects import spellings
from flame_train.io.resolve import native_shapes
from flame_train.networks.files.identify import identify
from tests.keymaps import through

NATIVE = ("diffusion_model.", str)
KOHYA = ("lora_unet_", lambda path: path.replace(".", "_"))
DIFFUSERS = ("transformer.", None)
"""Spellings of a layer in a LoRA file: what stands before it, and its native path as spelled; None: diffusers' path."""


def shapes_of(module):
    """Names and shapes of a PyTorch module."""
    return {name: tuple(t.shape) for name, t in module.state_dict().items()}


def on_meta(make, **arguments):
    """Names and shapes of a PyTorch module that is made without memory."""
    import torch

    with torch.device("meta"):
        return shapes_of(make(**arguments))


def below(networks):
    """One file's names: those of each network below its prefix."""
    return {f"{prefix}{name}": shape for prefix, shapes in networks.items() for name, shape in shapes.items()}


def linear_layers(shapes):
    """The paths of the weights with two dimensions."""
    return {n.removesuffix(".weight") for n, shape in shapes.items() if len(shape) == 2 and n.endswith("weight")}


def qwen3_vl_shapes(network, width, hidden):
    """Names and shapes of Qwen3-VL as this class of transformers has it, with a small half for images."""
    import transformers

    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": 151936,
            "hidden_size": width,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": hidden,
            "head_dim": 128,
        },
        vision_config={"depth": 1, "out_hidden_size": width, "deepstack_visual_indexes": [0]},
    )
    return on_meta(getattr(transformers, network), config=config)


def check_bijective(table, ours, theirs):
    """Each of our names has one of theirs and the other way round, with the same shapes."""
    there, back = table.pull(ours), table.inverse.pull(theirs)
    assert there.unknown == back.unknown == ()
    assert native_shapes(there.sources, ours) == theirs
    assert native_shapes(back.sources, theirs) == ours


def check_values(shapes, convert, table, prefix="model.diffusion_model."):
    """Arrays of these names through the table are what diffusers' `convert` makes of them, and come back as they were.

    The converter finds them below `prefix`.
    """
    import torch

    rng = np.random.default_rng(1)
    own = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    converted = convert({f"{prefix}{name}": torch.from_numpy(a.copy()) for name, a in own.items()})
    made = through(table, own)
    assert made.keys() == converted.keys()
    for name, array in made.items():
        np.testing.assert_array_equal(array, converted[name].numpy(), err_msg=name)
    back = through(table.inverse, made)
    assert back.keys() == own.keys()
    for name, array in back.items():
        np.testing.assert_array_equal(array, own[name], err_msg=name)


def check_told(names, kind, family):
    """A file with these names is of this kind and family."""
    found = identify(names)
    assert (found.kind, found.family) == (kind, family)


def check_checkpoint(resolve, names, family, components, left=()):
    """A whole checkpoint is told, and each of its names goes to its component, but for those that begin with `left`.

    `components` have the native shapes of each.
    """
    found = resolve(names)
    for component, shapes in components.items():
        assert native_shapes(found.sources[component], names) == shapes, component
    assert [name for name in found.unknown if not name.startswith(left)] == []
    check_told(names, "checkpoint", family)


def check_denoiser(family, ours, theirs):
    """The denoiser's file is told in native names, bare or below ComfyUI's prefix, and in diffusers' names."""
    for names in (ours, {f"diffusion_model.{name}": shape for name, shape in ours.items()}, theirs):
        check_told(names, "transformer", family)


def lora_names(paths, shapes, prefix, spell=None):
    """The names and shapes of a LoRA of rank 4 on the layers at `paths`, of these shapes, in a spelling."""
    down, up = ("lora_down", "lora_up") if prefix == "lora_unet_" else ("lora_A", "lora_B")
    names = {}
    for path in sorted(paths):
        rows, width = shapes[f"{path}.weight"]
        spelled = prefix + (spell(path) if spell else path)
        names |= {f"{spelled}.{down}.weight": (4, width), f"{spelled}.{up}.weight": (rows, 4)}
    return names


def spelled_loras(lora_family, ours, theirs, prefix, spell):
    """A LoRA on every linear layer of the transformer in a spelling; diffusers' paths are those that the family has."""
    if spell:
        return lora_names(linear_layers(ours), ours, prefix, spell)
    modules = lora_family.components[0].modules
    return lora_names({path for native in linear_layers(ours) for path in modules[native]}, theirs, prefix)


def check_lora(names, lora_family):
    """A LoRA file with these names is told, and each of them known."""
    check_told(names, "lora", lora_family.name)
    known = spellings(lora_family)
    assert [name for name in names if name.rsplit(".", 2)[0] not in known] == []
