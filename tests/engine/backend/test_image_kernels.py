"""Images whose channels come first, products by names of dims, and sums over dims apart: values without a GPU.

Kernels run as in test_generated.py, under the same rule. cuDNN's part is computed by the references.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine.dispatch import explain, explain_gradients
from flame_train.engine.gradcheck import generator
from flame_train.engine.namespace import NUMPY
from flame_train.engine.op import REGISTRY, Op, Sample, sample
from flame_train.engine.op_samples import materialise
from flame_train.engine.ops.conv import conv
from flame_train.engine.ops.conv.geometry import Conv
from tests.engine.backend import test_generated
from tests.engine.backend.test_generated import CI_AND_PROOF, DTYPES, distance, first, results

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiler")]

FP64 = np.dtype(np.float64)

OPS: dict[str, list[Sample]] = {
    "conv2d": [sample((2, 33, 5, 7), (20, 33, 3, 3), (20,), 1, 1), sample((1, 8, 6, 9), (16, 8, 1, 1), (16,))],
    "conv1d": [sample((2, 24, 37), (18, 24, 3), (18,), padding=1)],
    "conv_transpose2d": [
        sample((2, 5, 7, 9), (5, 6, 2, 2), (6,), 2),
        sample((1, 6, 4, 20), (6, 3, 1, 3), None, (1, 3)),
        sample((1, 6, 4, 5), (6, 3, 3, 3), (3,), 2, 1, 1),
    ],
    "group_norm": [
        sample((2, 6, 5, 7), 3, (6,), (6,)),
        sample((3, 4, 31), 4, (4,), None),
        sample((1, 2, 150, 120), 2, (2,), (2,)),
    ],
    "interpolate": [
        sample((1, 2, 9, 5), (31, 18)),
        sample((1, 2, 31, 18), (9, 5), None, "nearest-exact"),
        sample((1, 2, 9, 5), (4, 15), None, "bilinear"),
        sample((1, 5, 6, 3), (13, 6), None, "bilinear", layout="NHWC"),
        sample((1, 2, 3, 4, 5), (1, 9, 5)),
        sample((2, 1, 1, 7), (3, 1), None, "bilinear", True),
    ],
    "unfold": [sample((2, 3, 9, 16), 3, padding=1), sample((1, 2, 11, 7), (2, 3), (3, 2), (2, 1), (1, 2))],
    "fold": [
        sample((2, 18, 40), (5, 8), 3, padding=1),
        sample((1, 8, 49), (9, 9), 2, 2),
        sample((1, 75, 9), (10, 10), 5, 1, 1, 3),
    ],
    "prelu": [sample((3, 5, 9, 7), (5,)), sample((2, 3, 4, 4100), (3,)), sample((2, 3, 40), (1,))],
    "addcmul": [sample((2, 3, 4, 5), (1, 3, 1, 5), (2, 1, 4, 1))],
    "expand": [sample((3, 1, 1, 5, 1), (2, 3, 4, 30, 5, 7)), sample((1, 6), (3, 6))],
    "repeat": [sample((3, 5), (2, 4, 3)), sample((3, 5), (2, 1, 2))],
    "repeat_interleave": [sample((3, 5, 4), 3, 1), sample((3, 5), 11), sample((3, 5), 2, -1)],
    "einsum": [sample("bij,bjk->kbi", [(2, 3, 4), (2, 4, 5)])],
    "instance_norm": [sample((2, 3, 9, 8), None, None, (3,), (3,)), sample((2, 3, 121))],
}


class Plans:
    """cuDNN's convolutions, by the references in fp64."""

    @staticmethod
    def _wide(*arrays: Any) -> list[Any]:
        return [np.asarray(a).astype(np.float64) for a in arrays]

    def conv_forward(self, x: Any, w: Any, bias: Any, out: Any, steps: Any) -> None:
        given = [*self._wide(x, w), None if bias is None else self._wide(bias)[0]]
        out[...] = conv.conv2d.fn(NUMPY, *given, *steps, 1, "NHWC")

    def conv_input_gradient(self, g_out: Any, w: Any, dx: Any, steps: Any) -> None:
        dx[...] = conv.input_gradient(NUMPY, *self._moved(g_out, dx.shape, w), Conv(*steps, 1, "NHWC"))

    def _moved(self, g: Any, shape: Any, w: Any) -> tuple[Any, ...]:
        return self._wide(g)[0], shape, self._wide(w)[0]

    def conv_weight_gradient(self, x: Any, g_out: Any, dw: Any, steps: Any) -> None:
        dw[...] = conv.weight_gradient(NUMPY, *self._wide(g_out, x), dw.shape, Conv(*steps, 1, "NHWC"))


def on(bound: dict[str, Any], op: Op, device: str, dtype: Any) -> dict[str, Any]:
    """The arguments on a device, lists of tensors among them."""
    lists = {n: [flame.tensor(t.numpy(), dtype, device) for t in bound[n]] for n in op.list_names}
    return test_generated.on(bound, op, device, dtype) | lists


def cases(name: str) -> list[tuple[Op, int, Sample]]:
    op = REGISTRY[name]
    found = enumerate([*op.iter_samples(), *op.iter_perf_samples(), *OPS[name]])
    # Group norms whose channels come last have kernels of their own: test_generated.py.
    return [(op, i, s) for i, s in found if (name, s.kwargs.get("layout")) != ("group_norm", "NHWC")]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the first run computes with what memory holds
@pytest.mark.parametrize("dtype", CI_AND_PROOF, ids=lambda d: d.name)
def test_values_and_gradients(gpu: Any, dtype: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    gpu.kernels.cudnn = Plans()
    asked = [case for name in OPS for case in cases(name)]
    drawn = [(op, i, materialise(op, s, generator(op.name, i), dtype)) for op, i, s in asked]
    weights = []
    for op, i, bound in drawn:
        made = first(op(**on(bound, op, "cpu", FP64)))
        weights.append(generator(op.name, i + 50).standard_normal(made.shape).astype(dtype).astype(np.float64))
        results(op, on(bound, op, "cuda", dtype), weights[-1])
    compiled.build()
    wrong = []
    for (op, i, bound), weight in zip(drawn, weights, strict=True):
        truth, plain, got = (
            results(op, on(bound, op, device, kind), weight)
            for device, kind in (("cpu", FP64), ("cpu", dtype), ("cuda", dtype))
        )
        for part, (g, p, t) in enumerate(zip(got, plain, truth, strict=True)):
            if not distance(g, t) <= 2.0 * distance(p, t) + float(ml_dtypes.finfo(dtype).eps):
                wrong.append((op.name, i, part, distance(g, t), distance(p, t)))
    assert not wrong


@pytest.mark.parametrize("name", [n for n in OPS if not REGISTRY[n].composite])
def test_a_kernel_is_chosen_forwards_and_backwards(gpu: Any, name: str) -> None:
    for op, i, s in cases(name)[-len(OPS[name]) :]:
        bound = on(materialise(op, s, generator(name, i), DTYPES[1]), op, "cuda", DTYPES[1])
        forwards = [explain(op, **bound)] if op.kernels else []
        for verdicts in (*forwards, *explain_gradients(op, **bound).values()):
            assert [impl for impl, why in verdicts if why == "chosen"] != ["reference"], i
