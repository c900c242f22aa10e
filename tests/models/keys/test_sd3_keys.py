"""SD3's names against the lists of the published files: total, one to one, and the networks' own."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.io.resolve import fit, native_shapes
from flame_train.models.sd3 import names as sd3
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.models.sd3.names import mmdit_to_diffusers
from flame_train.networks.vae.vae import Vae, VaeArch
from tests.keymaps import through

MODELS = {
    "sd3_medium": MMDiTArch.sd3_medium(),
    "sd35_medium": MMDiTArch.sd35_medium(),
    "sd35_large": MMDiTArch.sd35_large(),
}


@pytest.fixture(params=MODELS)
def model(request):
    return request.param


def parts_of(shapes):
    """The file's components: native names and shapes."""
    found = sd3.SD3_FILES.resolve(shapes)
    assert found.unknown == ()
    return found, {name: native_shapes(sources, shapes) for name, sources in found.sources.items()}


def test_the_published_file_is_the_networks(published, model):
    shapes = published(f"{model}_single_file")
    found, parts = parts_of(shapes)
    arch = MODELS[model]
    assert MMDiTArch.from_shapes(parts["transformer"]) == arch
    assert parts["transformer"] == MMDiT(arch).shapes()
    vae = VaeArch.from_shapes(parts["vae"], VaeArch.sd3())
    assert vae == VaeArch.sd3()
    fitted = fit(found.sources["vae"], shapes, Vae(vae).shapes())
    assert {n: s.shape or parts["vae"][n] for n, s in fitted.sources.items()} == Vae(vae).shapes()


def test_a_diffusers_folder_is_the_same_network(published, model):
    folder = {f"transformer/{name}": shape for name, shape in published(f"{model}_diffusers_transformer").items()}
    _, parts = parts_of(folder)
    assert parts["transformer"] == MMDiT(MODELS[model]).shapes()


def test_the_table_goes_there_and_back_bit_for_bit(published, model):
    depth = MODELS[model].depth
    to_diffusers = mmdit_to_diffusers(depth)
    native = MMDiT(MODELS[model]).shapes()
    rng = np.random.default_rng(0)
    small = {
        n: rng.standard_normal([max(d // 64, 1) * 6 if i == 0 else 2 for i, d in enumerate(s)])
        for n, s in native.items()
    }
    there = through(to_diffusers, small)
    assert there.keys() == published(f"{model}_diffusers_transformer").keys()
    back = through(to_diffusers.inverse, there)
    assert back.keys() == small.keys()
    for name, values in small.items():
        np.testing.assert_array_equal(back[name], values, err_msg=name)


def test_text_encoders_inside_the_file_are_found(published):
    shapes = published("sd35_medium_single_file")
    prefix = "text_encoders.{}.transformer."
    shapes |= {prefix.format("clip_l") + n: s for n, s in published("clip_l").items()}
    shapes |= {prefix.format("clip_g") + n: s for n, s in published("sdxl_diffusers_text_encoder_2").items()}
    shapes |= {prefix.format("t5xxl") + n: s for n, s in published("t5xxl_encoder").items()}
    shapes["text_encoders.clip_l.logit_scale"] = ()
    found, parts = parts_of(shapes)
    assert {name: len(names) for name, names in parts.items()} == {
        "transformer": 665,
        "vae": 244,
        "text_encoder": 196,
        "text_encoder_2": 517,
        "text_encoder_3": 219,
    }
    assert found.ignored == ("text_encoders.clip_l.logit_scale",)
