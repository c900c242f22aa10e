"""Arrays of more than 2^31 elements, whose places no 32-bit number holds: what stands last must come out right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import bfloat16

pytestmark = pytest.mark.gpu

ROWS, WIDTH, EDGE = (1 << 21) + 3, 1024, 5
NEEDED = 90 << 30  # bytes: operand, result, gradients, what a reference copies, 72 GiB; and processes beside this one


def weight(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape) / 8


def images(x: Any) -> Any:
    """As a batch of one: rows are pixels."""
    return x.reshape(1, x.shape[0], 1, x.shape[1])


def factor(a: np.ndarray, x: Any) -> Any:
    return flame.tensor(a, x.dtype, x.device)


BY_ROWS: dict[str, Callable[[Any], Any]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "square": lambda x: x * x,
    "plus": lambda x: x + 1.5,
    "with a row": lambda x: x * factor(weight(WIDTH), x),
    "converted": lambda x: x.float(),
    "halves": lambda x: F.cat([x[:, WIDTH // 2 :], x[:, : WIDTH // 2]], 1),
    "joined": lambda x: F.cat([x, x[:, :8]], 1),
    "geglu": lambda x: F.geglu(x),
    "swiglu": lambda x: F.swiglu(x),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), factor(weight(WIDTH), x), factor(weight(WIDTH), x)),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,), factor(weight(WIDTH), x)),
    "linear": lambda x: F.linear(x, factor(weight(64, WIDTH), x)),
    "sum": lambda x: x.sum(-1),
    "amax": lambda x: x.amax(-1),
    "var": lambda x: x.var(-1),
    "flipped": lambda x: x.flip(1),
    "gathered": lambda x: F.index_select(x, 1, flame.tensor(np.arange(7, WIDTH, 9), device=x.device)),
    "filled": lambda x: F.masked_fill(x, x > 0, 0.25),
    "pooled": lambda x: F.max_pool2d(images(x), (1, 1), layout="NHWC").reshape(*x.shape),
}


@pytest.fixture
def edges() -> np.ndarray:
    """The first rows and the last; between them all is zero."""
    return np.random.default_rng(0).standard_normal((2 * EDGE, WIDTH)).astype(bfloat16)


def large(edges: np.ndarray) -> flame.Tensor:
    backend = get_backend("cuda")
    data = backend.xp.zeros((ROWS, WIDTH), bfloat16)
    data[:EDGE], data[-EDGE:] = backend.to_device(edges[:EDGE]), backend.to_device(edges[EDGE:])
    return flame.Tensor(data, requires_grad=True)


def cut(t: flame.Tensor) -> np.ndarray:
    return np.concatenate([flame.Tensor(t.data[part]).numpy() for part in (slice(EDGE), slice(-EDGE, None))])


def differences(fn: Callable[[Any], Any], edges: np.ndarray) -> float:
    """The largest difference of outputs and gradients from those of the edges alone, of the largest value."""
    leaves = large(edges), flame.tensor(edges, device="cuda", requires_grad=True)
    made = [fn(leaf) for leaf in leaves]
    for result in made:
        result.backward(flame.Tensor(result.backend.xp.ones(result.shape, result.dtype)))
    pairs = [(cut(made[0]), made[1].numpy()), (cut(leaves[0].grad), leaves[1].grad.numpy())]
    wide = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs]
    return max(float(np.abs(a - b).max() / max(1.0, np.abs(b).max())) for a, b in wide)


def test_the_last_rows_are_as_right_as_those_of_a_small_array(edges: np.ndarray) -> None:
    """One after the other: such arrays have no room beside each other."""
    total = get_backend("cuda").memory().total
    if total < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of memory on the device, which has {total >> 30}")
    found: dict[str, Any] = {}
    for name, fn in BY_ROWS.items():
        try:
            found[name] = differences(fn, edges)
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"
    for dim in (None, 0):
        got, wanted = large(edges).float().sum(dim).numpy(), edges.astype(np.float64).sum(dim)
        found[f"sum over {dim}"] = float(np.abs(got - wanted).max())
    wrong = {name: worst for name, worst in found.items() if isinstance(worst, str) or not worst < 0.02}
    assert not wrong, wrong
