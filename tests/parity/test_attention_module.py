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
    for name, module, attr, _ in ours.named_slots():
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
    pairs = [*zip(mine, other, strict=True), *((getattr(m, a), params[n]) for n, m, a, _ in ours.named_slots())]
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
