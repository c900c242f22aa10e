"""Every op on the CUDA backend without a GPU: launchers fit their kernels, results have the references' shapes.

Values are what tests/gpu are for.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.backend.shapes.driver import H100, RTX_3090, T4
from flame_train.engine.dispatch import explain
from flame_train.engine.dtype import is_float
from flame_train.engine.gradcheck import generator
from flame_train.engine.op import REGISTRY, Op, Sample
from flame_train.engine.op_samples import materialise, tensor_arguments
from tests.engine.backend.stand_in import Card
from tests.engine.misshapen import misshapen

DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
NARROW = {T4: np.dtype(np.float16)}
"""What stands in for bf16 on a card that has none."""
CARDS = {"H100": H100, "RTX 3090": RTX_3090, "T4": T4}
OPS = sorted(n for n, op in REGISTRY.items() if op.kernels or op.kernel_formulas)


def dtypes_of(card: Card) -> list[np.dtype[Any]]:
    """fp32, and the 16-bit format that training on the card takes."""
    return [DTYPES[0], NARROW.get(card, DTYPES[1])]


def samples(op: Op) -> list[Sample]:
    found = [*op.iter_samples(), *op.iter_perf_samples()]
    if "dtype" in op.names:  # an output dtype of its own: one that kernels have
        found += [Sample(s.args[: op.names.index("dtype")], {**s.kwargs, "dtype": np.dtype(np.float16)}) for s in found]
    return found


def run(op: Op, bound: dict[str, Any], wanted: set[str]) -> tuple[list[Any], list[Any]]:
    """Shapes and dtypes of the outputs, and of the gradients of the arguments `wanted`."""
    leaves = [t.requires_grad_() for a, _, t in tensor_arguments(op, bound) if a in wanted and is_float(t.dtype)]
    result = op(**bound)
    outputs = list(result) if isinstance(result, tuple) else [result]
    roots = [o for o in outputs if o.requires_grad]
    ones = [flame.tensor(np.ones(o.shape, o.dtype), device=o.device) for o in roots]
    grads = flame.grad(roots, leaves, ones, allow_unused=True) if roots else ()
    return [(o.shape, o.dtype) for o in outputs], [None if g is None else (g.shape, g.dtype) for g in grads]


def moved(op: Op, bound: dict[str, Any], device: str) -> dict[str, Any]:
    def move(v: Any) -> Any:
        if isinstance(v, list):
            return [move(x) for x in v]
        return flame.tensor(v.numpy(), device=device) if isinstance(v, flame.Tensor) else v

    return {n: move(v) if n in op.tensor_names else v for n, v in bound.items()}


ON_THE_CPU = dict[Any, Any]()
"""Shapes and dtypes of a sample's outputs and gradients, which are the same for each card."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # zeros where values would be
@pytest.mark.parametrize(
    ("card", "dtype"),
    [pytest.param(c, d, id=f"{name}-{d.name}") for name, c in CARDS.items() for d in dtypes_of(c)],
)
@pytest.mark.parametrize("name", OPS)
def test_launches_fit_their_kernels_and_the_card(gpu: Any, name: str, dtype: Any) -> None:
    op = REGISTRY[name]
    for i, s in enumerate(samples(op)):
        host = materialise(op, s, generator(name, i), dtype)
        if sum(t.size for _, _, t in tensor_arguments(op, host)) > 300_000:
            continue
        for wanted in ({*op.differentiable}, {a for f in op.kernel_formulas for a in f.args}):
            if (key := (name, i, dtype.name, frozenset(wanted))) not in ON_THE_CPU:
                ON_THE_CPU[key] = run(op, moved(op, host, "cpu"), wanted)
            assert run(op, moved(op, host, "cuda"), wanted) == ON_THE_CPU[key], f"sample {i}"


LOOKS_AT_VALUES = (IndexError, ZeroDivisionError)
"""Raised on the CPU alone where a GPU would have to be waited for."""


def complaint(op: Op, bound: dict[str, Any]) -> tuple[str, str] | None:
    try:
        op(**bound)
    except Exception as e:
        return type(e).__name__, str(e)
    return None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_what_is_wrong_is_told_in_the_words_of_the_cpu(gpu: Any, name: str) -> None:
    """Before a library is asked, which would answer with a status, as if the device were at fault."""
    op = REGISTRY[name]
    for i, e in enumerate(op.iter_errors()):
        host = materialise(op, e.sample, generator(name, i), DTYPES[0])
        told = complaint(op, moved(op, host, "cuda"))
        if told is None:
            assert issubclass(e.error, LOOKS_AT_VALUES) or name == "binary_cross_entropy"
        else:
            assert told == complaint(op, host)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", OPS)
def test_another_shape_is_refused_as_on_the_cpu(gpu: Any, name: str) -> None:
    """No kernel is given what does not fit: it would read beyond an array's end."""
    op = REGISTRY[name]
    for what, given in misshapen(op, materialise(op, next(iter(op.iter_samples())), generator(name, 0), DTYPES[1])):
        here, there = complaint(op, given), complaint(op, moved(op, given, "cuda"))
        if here and here[0] not in {e.__name__ for e in LOOKS_AT_VALUES}:
            assert there, f"{what}: {here}"
            assert there[0] == here[0], what


@pytest.mark.parametrize("name", OPS)
def test_every_kernel_is_chosen_for_some_sample(gpu: Any, name: str) -> None:
    op, chosen = REGISTRY[name], set()
    for dtype in DTYPES:
        for i, s in enumerate(samples(op)):
            bound = moved(op, materialise(op, s, generator(name, i), dtype), "cuda")
            chosen |= {impl for impl, why in explain(op, **bound) if why == "chosen"}
    assert chosen >= {k.impl for k in op.kernels}


@pytest.mark.parametrize("working", [np.float32, ml_dtypes.bfloat16])
def test_an_optimizer_step(gpu: Any, working: Any) -> None:
    leaves = [flame.tensor(np.ones(n, np.float32), device="cuda", requires_grad=True) for n in (3, 70)]
    arena = flame.optim.FlatParameters(leaves, compute_dtype=np.dtype(working), lr_scale={"1": 0.5})
    optimizer = flame.optim.Optimizer(arena, [flame.optim.ClipNorm(1.0), flame.optim.AdamWRule()], lr=1e-3)
    (leaves[0].sum() + (leaves[1] * 2.0).sum()).backward()
    told: list[str] = []
    with gpu.kernels.launch_hooks.hooked(lambda name, _: told.append(name) or True):
        optimizer.step()
    assert told == ["squares", "scalars", "adamw"]


def test_a_sum_hands_its_gradient_on(gpu: Any) -> None:
    x, y = (flame.tensor(np.ones((2, 3), np.float32), device="cuda", requires_grad=True) for _ in range(2))
    g = flame.tensor(np.ones((2, 3), np.float32), device="cuda")
    assert all(found is not None and found.data is g.data for found in flame.grad([x + y], [x, y], [g]))


@pytest.mark.parametrize(("capability", "chosen"), [("75", "reference"), ("80", "ops/norm/group_norm.cu")])
def test_group_norms_on_older_cards(gpu: Any, capability: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = (flame.tensor(np.ones(shape, np.float32), device="cuda") for shape in ((1, 4, 4, 16), (16,)))
    monkeypatch.setattr(type(x.data).device, "compute_capability", capability)
    found = explain(REGISTRY["group_norm"], x, 4, w, w, layout="NHWC")
    assert [impl for impl, why in found if why == "chosen"] == [chosen]
    assert F.group_norm(x, 4, w, w, layout="NHWC").shape == x.shape


def test_a_call_that_does_not_fit_is_noticed(gpu: Any) -> None:
    x = gpu.empty((4, 8), np.dtype(np.float32))
    rows, launch = (np.int32(4), np.int32(8)), gpu.kernels.launch
    launch("ops/attention/tiled_64.cu", "attention_drop", x.dtype, (1,), 128, (x, x, x, *rows))
    with pytest.raises(AssertionError, match="4 arguments for 5"):
        launch("ops/attention/tiled_64.cu", "attention_drop", x.dtype, (1,), 128, (x, x, x, rows[0]))
    with pytest.raises(AssertionError, match=r"argument 3: .* for int"):
        launch("ops/attention/tiled_64.cu", "attention_drop", x.dtype, (1,), 128, (x, x, x, np.int64(4), rows[1]))
    with pytest.raises(AssertionError, match="argument 0: float32 for __half"):
        launch("ops/attention/tiled_64.cu", "attention_drop", np.dtype(np.float16), (1,), 128, (x, x, x, *rows))
