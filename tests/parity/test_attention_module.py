"""nn.MultiheadAttention against torch.nn.MultiheadAttention: outputs, weights, masks and gradients in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import nn

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

E, H, B, L, S = 8, 2, 3, 4, 5
RNG = np.random.default_rng(0)
BARRED = np.triu(np.ones((L, S), bool), 2)
PADDING = np.arange(S) >= np.array([[5], [3], [4]])


def pair(**options: Any) -> tuple[nn.MultiheadAttention, Any]:
    """Ours and PyTorch's with the same weights."""
    theirs = torch.nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    ours = nn.MultiheadAttention(E, H, **options)
    ours.init(np.random.default_rng(0), "float64")
    state = dict(theirs.named_parameters())
    assert set(ours.shapes()) == set(state)
    for name, module, attr, _ in ours.named_specs():
        object.__setattr__(module, attr, flame.tensor(state[name].detach().numpy(), requires_grad=True))
    return ours, theirs


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"bias": False}, {"average_attn_weights": False}),
    ({"batch_first": True}, {"need_weights": False}),
    ({"kdim": 6, "vdim": 5}, {}),
    ({}, {"attn_mask": BARRED}),
    ({}, {"attn_mask": BARRED, "need_weights": False}),
    ({"batch_first": True}, {"attn_mask": RNG.standard_normal((B * H, L, S))}),
    ({}, {"key_padding_mask": PADDING, "need_weights": False}),
    ({}, {"key_padding_mask": PADDING, "attn_mask": BARRED}),
]


@pytest.mark.parametrize(("options", "call"), CASES)
def test_equals_torch(options: dict[str, Any], call: dict[str, Any]) -> None:
    ours, theirs = pair(**options)
    first = options.get("batch_first", False)
    shapes = [(B, L, E), (B, S, options.get("kdim", E)), (B, S, options.get("vdim", E))]
    inputs = [RNG.standard_normal(s if first else (s[1], s[0], s[2])) for s in shapes]
    arrays = {k: v for k, v in call.items() if isinstance(v, np.ndarray)}
    rest = {k: v for k, v in call.items() if k not in arrays}
    mine = [flame.tensor(x, requires_grad=True) for x in inputs]
    other = [torch.tensor(x, requires_grad=True) for x in inputs]
    y, w = ours(*mine, **rest, **{k: flame.tensor(v) for k, v in arrays.items()})
    ty, tw = theirs(*other, **rest, **{k: torch.tensor(v) for k, v in arrays.items()})
    np.testing.assert_allclose(y.numpy(), ty.detach().numpy(), rtol=1e-10, atol=1e-12)
    assert (w is None) == (tw is None)
    if w is not None:
        np.testing.assert_allclose(w.numpy(), tw.detach().numpy(), rtol=1e-10, atol=1e-12)
    g = RNG.standard_normal(y.shape)
    y.backward(flame.tensor(g))
    ty.backward(torch.tensor(g))
    params = dict(theirs.named_parameters())
    pairs = [*zip(mine, other, strict=True), *((getattr(m, a), params[n]) for n, m, a, _ in ours.named_specs())]
    for a, b in pairs:
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("need_weights", [True, False])
def test_causal_and_unbatched(need_weights: bool) -> None:
    ours, theirs = pair()
    x = RNG.standard_normal((L, E))
    y, _ = ours(*[flame.tensor(x)] * 3, need_weights=need_weights, is_causal=True)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    ty, _ = theirs(*[torch.tensor(x)] * 3, attn_mask=mask)
    np.testing.assert_allclose(y.numpy(), ty.detach().numpy(), rtol=1e-10, atol=1e-12)


def test_a_mask_for_each_head_of_what_has_no_batch() -> None:
    ours, theirs = pair()
    x, mask = RNG.standard_normal((L, E)), RNG.standard_normal((H, L, L))
    y, _ = ours(*[flame.tensor(x)] * 3, attn_mask=flame.tensor(mask))
    ty, _ = theirs(*[torch.tensor(x)] * 3, attn_mask=torch.tensor(mask))
    np.testing.assert_allclose(y.numpy(), ty.detach().numpy(), rtol=1e-10, atol=1e-12)


ONE = (1, L, S)
REFUSED: list[tuple[list[tuple[int, ...]], dict[str, Any], str]] = [
    ([], {"key_padding_mask": PADDING.T}, r"key_padding_mask of shape \(3, 5\), got \(5, 3\)"),
    ([], {"key_padding_mask": PADDING[:1]}, "key_padding_mask"),
    ([], {"key_padding_mask": PADDING[0]}, "key_padding_mask"),
    ([], {"key_padding_mask": PADDING.astype(np.uint8)}, "key_padding_mask.*bool.*uint8"),
    ([], {"attn_mask": BARRED.T}, r"attn_mask of shape \(4, 5\) or \(6, 4, 5\), got \(5, 4\)"),
    ([], {"attn_mask": BARRED.astype(np.uint8)}, "attn_mask.*bool.*uint8"),
    ([], {"attn_mask": BARRED.astype(np.int64)}, "attn_mask.*bool.*int64"),
    ([], {"attn_mask": np.zeros((B, L, S), bool)}, "attn_mask"),
    ([], {"attn_mask": np.zeros((B, H, L, S), bool)}, "attn_mask"),
    ([(L, E), (S, E), (S, E)], {"key_padding_mask": PADDING}, r"key_padding_mask of shape \(5,\)"),
    ([(1, L, B, E), (1, S, B, E), (1, S, B, E)], {}, "query, key and value of 3 dims"),
    ([(L, B, E), (S, E), (S, E)], {}, "query, key and value of 3 dims"),
    ([(L, B, E + 1), (S, B, E), (S, B, E)], {}, r"query.*\(4, 3, 8\).*\(4, 3, 9\)"),
    ([(L, B, E), (S, B, E), (S, B, E + 1)], {}, "value"),
    ([(L, B, E), (S, B, E), (S + 1, B, E)], {}, "value"),
    ([(L, B, E), (S, B + 1, E), (S, B + 1, E)], {}, "key"),
]


@pytest.mark.parametrize(("shapes", "masks", "message"), REFUSED)
@pytest.mark.parametrize("need_weights", [True, False])
def test_what_torch_refuses_is_refused_by_name(
    shapes: list[tuple[int, ...]], masks: dict[str, Any], message: str, need_weights: bool
) -> None:
    ours, theirs = pair()
    given = [RNG.standard_normal(s) for s in shapes or [(L, B, E), (S, B, E), (S, B, E)]]
    with pytest.raises((AssertionError, RuntimeError)):
        theirs(*map(torch.tensor, given), need_weights=need_weights, **{n: torch.tensor(m) for n, m in masks.items()})
    with pytest.raises((ValueError, TypeError), match=message):
        ours(*map(flame.tensor, given), need_weights=need_weights, **{n: flame.tensor(m) for n, m in masks.items()})


@pytest.mark.parametrize("sizes", [(8, 0), (8, -2), (0, 2)])
def test_no_heads_and_no_channels_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        torch.nn.MultiheadAttention(*sizes)
    with pytest.raises(ValueError, match="greater than 0"):
        nn.MultiheadAttention(*sizes)
