"""A step leaves its numbers on the device: a NumPy that refuses to hand them out stands for a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from flame_train.engine import Parameter, Tensor
from flame_train.engine.backend import get_backend
from flame_train.engine.optim import (
    EMA,
    AdamWRule,
    ClipNorm,
    ClipValue,
    FlatParameters,
    GradientNoise,
    LossScaler,
    Optimizer,
    Schedule,
    SGDRule,
)


def refuse(self: Any, *_: Any) -> NoReturn:
    raise AssertionError("a value was read back to the host")


class OnDevice(np.ndarray):
    """An array whose results are arrays too, 0-d ones included, and whose values cannot become Python's."""

    __bool__ = __float__ = __int__ = __index__ = __complex__ = item = tolist = refuse

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, out: Any = (), **kwargs: Any) -> Any:
        if out:
            kwargs["out"] = tuple(bare(o) for o in out)
        result = getattr(ufunc, method)(*(bare(a) for a in args), **kwargs)
        return out[0] if out else wrap(result)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return wrap(func(*bare(args), **bare(kwargs)))

    def __setitem__(self, key: Any, value: Any) -> None:
        bare(self)[key] = bare(value)

    def astype(self, *args: Any, **kwargs: Any) -> Any:
        return wrap(bare(self).astype(*args, **kwargs))

    def copy(self, *args: Any) -> Any:
        return wrap(bare(self).copy(*args))

    def all(self, *args: Any, **kwargs: Any) -> Any:
        return wrap(bare(self).all(*args, **kwargs))


def bare(x: Any) -> Any:
    if isinstance(x, OnDevice):
        return x.view(np.ndarray)
    if isinstance(x, (list, tuple)):
        return type(x)(bare(v) for v in x)
    return {k: bare(v) for k, v in x.items()} if isinstance(x, dict) else x


def wrap(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(wrap(v) for v in x)
    return np.asarray(x).view(OnDevice) if isinstance(x, (np.ndarray, np.generic)) else x


class DeviceNumpy:
    """numpy's functions, with results that stay on the device."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        return (lambda *a, **k: wrap(found(*bare(a), **bare(k)))) if callable(found) else found


def backend() -> Any:
    cpu = get_backend("cpu")
    return SimpleNamespace(
        name="cpu", kernels=None, xp=DeviceNumpy(), to_device=lambda h: wrap(cpu.to_device(h)), to_host=bare
    )


def test_the_stand_in_refuses() -> None:
    a = backend().xp.ones(())
    for read in (bool, float, int, lambda v: v.item(), lambda v: 3 if v + 1 > 0 else 4):
        with pytest.raises(AssertionError, match="read back"):
            read(a * 2)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "cosine_restarts", "polynomial"])
@pytest.mark.parametrize("scaler", [None, LossScaler(interval=2)])
@pytest.mark.parametrize("rule", [AdamWRule(), SGDRule(0.9, weight_decay=0.1)])
def test_a_step_reads_nothing_back_and_computes_what_it_does_elsewhere(
    schedule: Any, scaler: LossScaler | None, rule: Any
) -> None:
    results = []
    for where in (backend(), get_backend("cpu")):
        ps = [Parameter(np.full(n, 0.5, np.float32), str(n)) for n in (5, 100)]
        links = [ClipNorm(1.0), ClipValue(0.2), GradientNoise(0.1, seed=1), rule]
        curve = Schedule(schedule, total=10, warmup=2, cycles=2, power=2.0)
        o = Optimizer(
            FlatParameters(ps, where), links, lr=0.1, schedule=curve, scaler=scaler, accumulation=2, average=EMA(0.9)
        )
        for i in range(5):
            o.zero_grad()
            o.arena.grads[...] = np.nan if i == 3 and scaler else 0.1 * i
            o.step(Tensor(where.to_device(np.ones(2, np.float32))))
        results.append({**o.arena.state(), **o.state_dict()})
    for name, value in results[0].items():
        np.testing.assert_array_equal(bare(value), results[1][name], err_msg=name)
