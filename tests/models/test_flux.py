"""Flux's transformer: its architectures read back from shapes, and what recomputation, tokens and guidance change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flame_train.adapters.attach import attach
from flame_train.adapters.targets import resolve
from flame_train.engine import functional as F
from flame_train.engine import tensor
from flame_train.engine.memory_report import saved_by_op
from flame_train.errors import ModelFileError
from flame_train.models.flux.blocks import position_angles
from flame_train.models.flux.family import PRESETS
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.text_encoders.clip.network import ClipArch
from flame_train.text_encoders.t5.network import T5Arch

ARCHS = [
    FluxArch.dev(),
    replace(FluxArch.dev(), guidance=False),  # schnell
    FluxArch.tiny(),
    replace(FluxArch.tiny(guidance=False), head_dim=16, channels=4, depth=1, single_depth=3),
]


@pytest.mark.parametrize("arch", ARCHS)
def test_arch_is_read_back(arch):
    assert FluxArch.from_shapes(Flux(arch).shapes()) == arch


@pytest.mark.parametrize(("model", "weights"), [("dev", 11_901_408_320), ("schnell", 11_891_178_560)])
def test_published_sizes(model, weights):
    assert Flux(replace(FluxArch.dev(), guidance=model == "dev")).num_weights() == weights


def test_foreign_names_are_refused_with_the_name_looked_for():
    with pytest.raises(ModelFileError, match=r"img_in\.weight"):
        FluxArch.from_shapes({"input_blocks.0.0.weight": (320, 4, 3, 3)})


@pytest.mark.parametrize("features", [128, 384])
def test_relatives_that_see_a_second_image_are_refused(published, features):
    shapes = published("flux_dev_single_file") | {"img_in.weight": (3072, features)}
    with pytest.raises(ModelFileError, match=f"found {features} and 64: this is a Fill, Canny or Depth model"):
        FluxArch.from_shapes(shapes)


def test_tiny_networks_fit_together():
    assert FluxArch.tiny().context_dim == T5Arch.tiny().width
    assert FluxArch.tiny().pooled_dim == ClipArch.tiny("quick_gelu").width


@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 128])
def test_every_number_of_a_head_has_an_axis(head_dim):
    axes = replace(FluxArch.dev(), head_dim=head_dim).axes
    assert sum(axes) == head_dim
    assert all(n > 0 and n % 2 == 0 for n in axes)
    assert FluxArch.dev().axes == (16, 56, 56)


def test_text_stands_at_the_origin_and_a_token_at_its_row_and_column():
    angles = position_angles(FluxArch.dev().head_dim, 2, ((3, 4),))
    assert angles.shape == (2 + 12, 128)
    assert not angles[:3].any()  # text, and the first token
    token = angles[2 + 4 * 2 + 3]  # row 2, column 3
    assert not token[:16].any()
    np.testing.assert_allclose(token[[16, 17, 18]], [2.0, 2.0, 2.0 * 10000 ** (-2 / 56)])
    np.testing.assert_allclose(token[[72, 73, 127]], [3.0, 3.0, 3.0 * 10000 ** (-54 / 56)])


@pytest.fixture
def model():
    made = Flux(FluxArch.tiny())
    made.init(np.random.default_rng(0))
    return made


@pytest.fixture
def predict():
    rng = np.random.default_rng(1)
    latents, context, pooled = (rng.standard_normal(s, np.float32) for s in ((2, 4, 6, 16), (2, 5, 32), (2, 32)))

    def call(model, guidance=(1.0, 3.5)):
        given = None if guidance is None else tensor(np.array(guidance, np.float32))
        return model(
            tensor(latents), tensor(np.array([7.0, 640.0], np.float32)), tensor(context), tensor(pooled), given
        )

    return call


def test_guidance_is_asked_for_where_the_model_knows_it(model, predict):
    assert not np.array_equal(predict(model).numpy(), predict(model, (1.0, 1.0)).numpy())
    with pytest.raises(ValueError, match="expected a guidance for this model, got none"):
        predict(model, None)
    schnell = Flux(FluxArch.tiny(guidance=False))
    schnell.init(np.random.default_rng(0))
    assert predict(schnell, None).shape == (2, 4, 6, 16)
    with pytest.raises(ValueError, match="expected no guidance for this model, got one"):
        predict(schnell)


def gradients(model, predict, checkpointing):
    model.checkpointing = checkpointing
    attached = attach(model, resolve(model, ["full"], PRESETS), rank=2, alpha=2.0, seed=3)
    for i, adapter in enumerate(attached.adapters.values()):
        adapter.up.data[...] = np.random.default_rng(i).standard_normal(adapter.up.shape) * 0.1
    out = predict(model)
    out.square().mean().backward()
    attached.detach()
    return [out.numpy(), *(p.grad.numpy() for p in attached.parameters())]


@pytest.mark.parametrize("checkpointing", ["mlp", "full", "offload"])
def test_recomputation_changes_no_bit(model, predict, checkpointing):
    kept, again = (gradients(model, predict, how) for how in ("off", checkpointing))
    assert len(kept) == 1 + 2 * (2 * 10 + 2 * 3)
    for a, b in zip(kept, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_linear_layers_are_given_is_made_again(model, predict, monkeypatch):
    """A fifth of all that is kept, and no bit of the gradients."""

    def kept():
        attached = attach(model, resolve(model, ["attention+mlp"], PRESETS), rank=1, alpha=1.0, seed=3)
        weights = sum(w.data.nbytes for name, w in model.weights() if name.removesuffix(".weight") in attached.adapters)
        total = sum(saved_by_op(predict(model)).values()) - weights
        attached.detach()
        return total, gradients(model, predict, "off")

    less, bits = kept()
    for module in ("models.flux.blocks", "networks.attention_mlp"):
        monkeypatch.setattr(f"flame_train.{module}.rematerialize", lambda fn, *args: fn(*args))
    more, expected = kept()
    assert 0 < less < 0.8 * more
    for a, b in zip(bits, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_16_bit_weights_stay_16_bits_from_end_to_end(predict):
    model = Flux(FluxArch.tiny())
    model.init(np.random.default_rng(0), "bfloat16")
    rng = np.random.default_rng(1)
    x, context, pooled = (
        tensor(rng.standard_normal(s, np.float32), "bfloat16") for s in ((1, 4, 4, 16), (1, 5, 32), (1, 32))
    )
    out = model(x, tensor(np.array([500.0], np.float32)), context, pooled, tensor(np.array([1.0], np.float32)))
    assert out.dtype.name == "bfloat16"


def test_queries_stay_16_bits_beside_angles_of_32():
    q, scale = tensor(np.ones((1, 3, 2, 8)), "bfloat16"), tensor(np.ones(8), "bfloat16")
    cos, sin = tensor(np.ones((3, 1, 8)), "float32"), tensor(np.zeros((3, 1, 8)), "float32")
    assert F.rms_norm_rope(q, scale, cos, sin).dtype.name == "bfloat16"
