"""Row programs that sum down the rows as well, their values included, without a GPU: see machine.cpp for how."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flame_train.engine.backend.cuda.codegen.row_tiling import row_sums_tiling
from flame_train.engine.gradcheck import generator
from flame_train.engine.op import REGISTRY, Op, Sample, sample
from flame_train.engine.op_samples import materialise
from tests.engine.backend.test_generated import DTYPES, distance, on, results

MANY_ROWS: list[tuple[str, Sample]] = [
    ("layer_norm", sample((40, 640), (640,), (640,), (640,))),
    ("layer_norm", sample((23, 1536), (1536,), (1536,), (1536,))),
    ("layer_norm", sample((1100, 8), (8,), (8,), (8,))),
    ("layer_norm", sample((90, 77), (77,), (77,), (77,))),
    ("layer_norm", sample((7, 2600), (2600,), None, (2600,))),
    ("layer_norm_modulate", sample((3, 35, 648), (3, 1, 648), (3, 1, 648))),
    ("layer_norm_modulate", sample((70, 3, 24), (70, 1, 24), (70, 1, 24))),
    ("layer_norm_modulate", sample((2, 35, 24), (2, 1, 24), (24,))),
    ("rms_norm", sample((300, 128), (128,), (128,))),
    ("rms_norm", sample((21, 3, 768), (3, 768), (3, 768))),
    ("rms_norm_rope", sample((2, 40, 5, 64), (64,), (5, 64), (5, 64))),
    ("rms_norm_rope", sample((2, 40, 5, 128), (128,), (5, 128), (5, 128), 1e-6, False)),
    ("rms_norm_rope", sample((60, 5, 24), (24,), (5, 24), (5, 24), 1e-6, False)),
]


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_blocks_that_go_through_many_rows(gpu: Any, dtype: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a norm's input, weight and bias from one pass, by so few blocks that each takes several turns."""
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    monkeypatch.setattr(gpu.kernels.row_sums, "_multiprocessors", 1)
    drawn = [(REGISTRY[n], materialise(REGISTRY[n], case, generator(n, 7), dtype)) for n, case in MANY_ROWS]

    def found(op: Op, bound: dict[str, Any], device: str, kind: Any) -> list[np.ndarray]:
        weight = generator(op.name, 57).standard_normal(bound["input"].shape).astype(dtype).astype(np.float64)
        return results(op, on(bound, op, device, kind), weight)

    for op, bound in drawn:
        found(op, bound, "cuda", dtype)
    compiled.build()
    wrong = []
    for case, (op, bound) in enumerate(drawn):
        devices = (("cuda", dtype), ("cpu", dtype), ("cpu", np.dtype(np.float64)))
        for part, (g, p, t) in enumerate(zip(*[found(op, bound, *where) for where in devices], strict=True)):
            if not distance(g, t) <= 2.0 * distance(p, t) + float(ml_dtypes.finfo(dtype).eps):
                wrong.append((*MANY_ROWS[case], part, distance(g, t)))
    assert sum("over_rows<" in text for text, _ in compiled.texts) > 10
    assert not wrong


def test_cuts_for_totals_have_room_for_a_row_in_whole_warps_and_little_shared_memory() -> None:
    for width, totals, vectors in itertools.product((1, 2, 4, 8), (1, 2), (0, 2)):
        for columns in range(2 * width, 4096 * width // (2 if width == 8 else 1), 7 * width):
            tiling = row_sums_tiling(columns, width, 2, totals, vectors)
            assert tiling.width * tiling.threads * (tiling.packets - 1) < columns <= tiling.elements
            assert tiling.block % 32 == 0
            assert tiling.block <= 1024
            apart = tiling.block // max(32, tiling.threads)
            assert apart // 2 * totals * tiling.elements * 4 <= 40 << 10
    assert [row_sums_tiling(c, 8, 2, 2, 0).threads for c in (640, 1280, 3072)] == [16, 32, 64]
