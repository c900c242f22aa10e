"""The T5 encoder's names against the list of the published file, under every prefix, total and one to one."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from flame_train.io.resolve import fit, native_shapes, resolve
from flame_train.text_encoders.t5 import names as t5
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder


@pytest.fixture(scope="module")
def list_of(published):
    return published("t5xxl_encoder")


def resolved(names):
    return resolve([t5.component("t5", (t5.prefix_of(names),))], names)


def test_the_published_list_is_the_network_s(list_of):
    assert T5Arch.from_shapes(list_of) == T5Arch.xxl()
    assert T5Encoder(T5Arch.xxl()).shapes() == list_of
    assert sum(math.prod(shape) for shape in list_of.values()) == 4_762_310_656


@pytest.mark.parametrize("prefix", ["", t5.SINGLE_FILE_PREFIX, "text_encoder_3/", "text_encoder_2/", "te.t5."])
@pytest.mark.parametrize("held", ["once", "twice", "under the other name"])
def test_every_tensor_is_found_under_every_prefix_and_none_left(list_of, prefix, held):
    shapes = {prefix + name: shape for name, shape in list_of.items()}
    again = prefix + "encoder.embed_tokens.weight"
    if held == "twice":  # 220 tensors, as the stand-alone files have
        shapes[again] = shapes[prefix + "shared.weight"]
    elif held != "once":
        shapes[again] = shapes.pop(prefix + "shared.weight")
    found = resolved(shapes)
    assert found.unknown == ()
    assert found.ignored == ((again,) if held == "twice" else ())
    assert sorted(n for s in found.sources["t5"].values() for n in s.names) == sorted({*shapes} - {*found.ignored})
    fitted = fit(found.sources["t5"], shapes, list_of)
    assert (fitted.missing, fitted.unexpected, fitted.misshaped) == ((), (), ())


def test_the_table_reads_backwards(list_of):
    there = t5.t5_table().inverse.pull(list_of)
    assert there.unknown == ()
    assert {name: source.names for name, source in there.sources.items()} == {name: (name,) for name in list_of}


def test_nothing_of_a_decoder_and_nothing_unknown(list_of):
    extra = ["decoder.block.0.layer.0.SelfAttention.q.weight", "lm_head.weight", "encoder.block.3.layer.2.odd.weight"]
    found = resolved([*list_of, *extra])
    assert set(found.ignored) == set(extra[:2])
    assert found.unknown == (extra[2],)
    assert t5.prefix_of(["text_model.encoder.layers.0.self_attn.q_proj.weight"]) is None


def test_scaled_tensors_are_those_with_a_factor(list_of):
    linear = re.compile(r".*(SelfAttention\.[qkvo]|DenseReluDense\.w\w+)\.weight")
    stems = [name.removesuffix(".weight") for name in list_of if linear.fullmatch(name)]
    shapes = (
        list_of | {f"{stem}.scale_weight": () for stem in stems} | {"scaled_fp8": (0,), f"{stems[0]}.scale_input": ()}
    )
    found = resolved(shapes)
    assert found.unknown == ()
    assert set(found.ignored) == {"scaled_fp8", f"{stems[0]}.scale_input"}
    assert native_shapes(found.sources["t5"], shapes) == list_of
    assert {name for name, source in found.sources["t5"].items() if len(source.names) == 2} == {
        f"{s}.weight" for s in stems
    }
    source = found.sources["t5"][f"{stems[0]}.weight"]
    np.testing.assert_array_equal(source.apply([np.array([[1, 3]], np.float16), np.array([0.25])]), [[0.25, 0.75]])
    with pytest.raises(ValueError, match="no inverse"):
        t5.t5_table(shapes).inverse  # noqa: B018


def test_a_factor_without_its_tensor_is_unknown(list_of):
    name = "encoder.block.0.layer.0.SelfAttention.k.weight"
    shapes = {n: s for n, s in list_of.items() if n != name} | {name.replace(".weight", ".scale_weight"): ()}
    assert resolved(shapes).unknown == (name.replace(".weight", ".scale_weight"),)
