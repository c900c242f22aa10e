"""convert and merge on Flux files of the true structure, shrunk; merge against NumPy in fp64, place by place."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import safetensors.numpy

from flame_train.errors import ModelFileError
from flame_train.families import FAMILY_TITLES
from flame_train.io.safetensors import save_file
from flame_train.models.flux.names import transformer_to_diffusers
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.tools.lora_files import convert
from flame_train.tools.merge import merge
from tests.keymaps import through

D = 64
TARGETS = {  # native module: rows, columns
    "double_blocks.1.img_attn.qkv": (3 * D, D),
    "double_blocks.0.txt_attn.proj": (D, D),
    "single_blocks.1.linear1": (7 * D, D),
    "single_blocks.0.linear2": (D, 5 * D),
    "final_layer.adaLN_modulation.1": (2 * D, D),
}


@pytest.fixture(scope="module")
def base():
    model = Flux(FluxArch.tiny())
    model.init(np.random.default_rng(0))
    return {name: weight.numpy() for name, weight in model.weights()}


@pytest.fixture(scope="module")
def lora(lora_over):
    return lora_over(TARGETS)


@pytest.fixture
def in_diffusers():
    return partial(through, transformer_to_diffusers())


@pytest.mark.parametrize("layout", ["single-file", "diffusers", "prefixed"])
@pytest.mark.parametrize("form", ["kohya", "native", "diffusers"])
def test_merging(base, lora, layout, form, in_diffusers, check_merging):
    check_merging(base, lora, layout, form, in_diffusers)


def test_kohya_files_survive_convert_there_and_back(tmp_path, lora, kohya):
    metadata = {"ss_network_dim": "2", "ss_network_module": "networks.lora_flux", "ss_tag": "x"}
    halves = {name: np.asarray(x, np.float16) for name, x in kohya(lora).items()}
    save_file(tmp_path / "a.safetensors", halves, metadata)
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "diffusers")
    convert(tmp_path / "b.safetensors", tmp_path / "c.safetensors", "kohya")
    found = safetensors.numpy.load_file(tmp_path / "c.safetensors")
    assert found.keys() == halves.keys()
    assert all(found[n].dtype == x.dtype and found[n].tobytes() == x.tobytes() for n, x in halves.items())


def test_a_flux_lora_and_an_sdxl_base(tmp_path, base, lora, kohya):
    save_file(tmp_path / "lora.safetensors", kohya(lora))
    save_file(tmp_path / "base.safetensors", {"input_blocks.0.0.weight": np.zeros((4, 4, 3, 3))})
    with pytest.raises(ModelFileError, match=f"merged into {', '.join(FAMILY_TITLES.values())} only"):
        merge(tmp_path / "base.safetensors", tmp_path / "lora.safetensors", tmp_path / "out.safetensors")


def test_a_lora_for_dev_goes_into_fill_where_shapes_fit(tmp_path, base, lora, kohya, expected):
    """The two differ in what a token is made of: a LoRA on that layer is of one of them alone."""
    fill = base | {"img_in.weight": np.zeros((D, 384), np.float32)}
    save_file(tmp_path / "fill.safetensors", fill)
    save_file(tmp_path / "lora.safetensors", kohya(lora))
    merge(tmp_path / "fill.safetensors", tmp_path / "lora.safetensors", tmp_path / "out.safetensors")
    found = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    for name, values in expected(fill, lora, 1.5).items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5, err_msg=name)
    outer = lora | {"img_in": (np.ones((2, 64), np.float32), np.ones((D, 2), np.float32))}
    save_file(tmp_path / "outer.safetensors", kohya(outer))
    with pytest.raises(ModelFileError, match=r"transformer img_in is \(64, 64\) in the LoRA, \(64, 384\) in the base"):
        merge(tmp_path / "fill.safetensors", tmp_path / "outer.safetensors", tmp_path / "no.safetensors")


def test_blocks_that_the_base_does_not_have(tmp_path, base, lora, kohya):
    deeper = lora | {"double_blocks.5.img_attn.proj": lora["double_blocks.0.txt_attn.proj"]}
    save_file(tmp_path / "base.safetensors", base)
    save_file(tmp_path / "lora.safetensors", kohya(deeper))
    with pytest.raises(ModelFileError, match=r"transformer double_blocks\.5\.img_attn\.proj is not in the base"):
        merge(tmp_path / "base.safetensors", tmp_path / "lora.safetensors", tmp_path / "out.safetensors")
