"""What layers take by position is what torch.nn's take there; the rest has to be named."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from flame_train.engine import nn, tensor

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

LAYERS = [
    "Linear",
    "Conv2d",
    "ConvTranspose2d",
    "LayerNorm",
    "RMSNorm",
    "GroupNorm",
    "Embedding",
    "MultiheadAttention",
    "ModuleList",
    "BatchNorm1d",
    "BatchNorm2d",
]
SAME = {"dim": "normalized_shape"}  # one size here, a shape there


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_given_by_position_has_pytorchs_place(name: str) -> None:
    theirs = list(inspect.signature(getattr(torch.nn, name).__init__).parameters)
    ours = inspect.signature(getattr(nn, name).__init__).parameters.values()
    places = [p.name for p in ours if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert [SAME.get(n, n) for n in places] == theirs[: len(places)]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("Conv2d", (3, 3, (3, 3, 3)), r"Conv2d: expected an int kernel_size, or two, got \(3, 3, 3\)"),
        ("Conv2d", (3, 3, (3, 3.0)), "Conv2d: expected an int kernel_size, got 3.0"),
        ("Conv2d", (3.0, 3, 3), "Conv2d: expected an int in_channels, got 3.0"),
        ("LayerNorm", ((4, 2.0),), "LayerNorm: expected an int dim, got 2.0"),
        ("LayerNorm", ("4",), "LayerNorm: expected an int dim, got '4'"),
        ("RMSNorm", ((4,),), r"RMSNorm: expected an int dim, got \(4,\)"),
        ("GroupNorm", (2, 4.0), "GroupNorm: expected an int num_channels, got 4.0"),
        ("Linear", (4, 2.0), "Linear: expected an int out_features, got 2.0"),
        ("Embedding", (4, "2"), "Embedding: expected an int embedding_dim, got '2'"),
    ],
)
def test_a_size_that_is_no_number_is_refused_by_name(name: str, given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        getattr(nn, name)(*given)


def test_groups_that_do_not_divide_the_channels_are_refused() -> None:
    for layer in (nn.GroupNorm, torch.nn.GroupNorm):
        with pytest.raises(ValueError, match="divisible"):
            layer(3, 4)
    for name in ("Conv2d", "ConvTranspose2d"):
        for layer in (getattr(nn, name), getattr(torch.nn, name)):
            for channels in ((4, 6), (6, 4)):
                with pytest.raises(ValueError, match="divisible"):
                    layer(*channels, 3, groups=3)
            with pytest.raises(ValueError, match="groups"):
                layer(4, 4, 3, groups=0)


def test_numpys_whole_numbers_are_numbers() -> None:
    assert nn.Linear(np.int64(3), np.int32(2)).shapes() == {"weight": (2, 3), "bias": (2,)}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("Conv2d", ((3, 1),)),
        ("Conv2d", ((2, 3), (2, 1), (1, 0))),
        ("Conv2d", (3, 1, "same")),
        ("Conv2d", ((3, 3), 2, "valid")),
        ("Conv2d", (3, 1, 2, 2)),
        ("Conv2d", (3, 1, 1, (1, 2), 2)),
        ("ConvTranspose2d", (4, 2, 1)),
        ("ConvTranspose2d", ((2, 3), (2, 3), (0, 1), (1, 0), 2)),
    ],
)
def test_convolutions_compute_what_pytorchs_do(name: str, given: tuple[Any, ...]) -> None:
    theirs = getattr(torch.nn, name)(2, 4, *given)
    ours = getattr(nn, name)(2, 4, *given)
    assert ours.shapes() == {n: tuple(p.shape) for n, p in theirs.named_parameters()}
    ours.weight, ours.bias = (tensor(p.detach().numpy()) for p in theirs.parameters())
    assert ours.kernel_size == theirs.kernel_size
    x = np.random.default_rng(0).standard_normal((2, 2, 6, 7)).astype(np.float32)
    y = ours(tensor(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    np.testing.assert_allclose(y.numpy(), theirs(torch.tensor(x)).detach().numpy(), rtol=1e-4, atol=1e-5)
