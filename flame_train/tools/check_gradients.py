"""`flame-train gradcheck`: the gradient of every differentiable op against finite differences."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from flame_train.config.suggest import did_you_mean
from flame_train.engine import functional, lazy
from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import as_dtype
from flame_train.engine.gradcheck import Verdict, gradcheck_all
from flame_train.engine.op import REGISTRY
from flame_train.errors import ConfigError


def run(ops: Sequence[str], device: str, dtype: str) -> dict[str, Any]:
    """Checks `ops` (all, if none are named) with their formulas run on `device` in `dtype`, fp64 or fp32.

    Returns `rows`, one for each argument of each op with the worst error over the op's samples, and how many
    of them `failed`. Raises ConfigError naming every op that does not exist, with the nearest that do, and those in
    which there is no gradient to check.
    """
    lazy.load_ops()
    unknown = [name for name in ops if name not in functional.__all__ or name not in REGISTRY]
    if unknown:
        hints = (f"{name!r}{did_you_mean(difflib.get_close_matches(name, REGISTRY, n=3))}" for name in unknown)
        raise ConfigError(f"gradcheck: expected names of ops, got {'; '.join(hints)}")
    without = [name for name in ops if not REGISTRY[name].differentiable]
    if without:
        raise ConfigError(f"gradcheck: there is no gradient to check in {', '.join(without)}")
    get_backend(device)
    worst: dict[tuple[str, str], Verdict] = {}
    for verdict in gradcheck_all(list(dict.fromkeys(ops)), device, as_dtype(dtype)):
        key = verdict.op, verdict.argument
        if key not in worst or not verdict.error <= worst[key].error:  # so that NaN counts as the worst
            worst[key] = verdict
    rows = [
        {"op": v.op, "argument": v.argument, "error": v.error, "verdict": "passed" if v.passed else "FAILED"}
        for v in worst.values()
    ]
    failed = sum(not v.passed for v in worst.values())
    return {"rows": rows, "device": device, "dtype": as_dtype(dtype).name, "checked": len(rows), "failed": failed}
