"""A training run takes its seed, device and precision from its config, none from what a Python session has set."""

from __future__ import annotations

from typing import Any

import numpy as np

import flame_train.engine as flame
from flame_train.io.safetensors import SafetensorsFile
from flame_train.run.check.check_run import check
from flame_train.run.commands.stages import train_plan
from flame_train.run.plan.plan import make_plan
from flame_train.training.session import Session, StopRequest


def trained(small_config: Any, where: Any) -> dict[str, np.ndarray]:
    stop = StopRequest()
    train_plan(make_plan(check(small_config(output={"dir": str(where)})), stop), Session("cpu", stop=stop))
    found = {}
    for path in sorted(where.rglob("*.safetensors")):
        with SafetensorsFile(path) as file:
            found |= {f"{path.relative_to(where)} {name}": file.read(name) for name in file.shapes}
    assert found
    return found


def test_a_run_uses_no_ambient_setting(small_config, tmp_path) -> None:
    plain = trained(small_config, tmp_path / "plain")
    flame.manual_seed(99)
    flame.set_default_device("cuda:7")  # which is not there: whoever asked for it would fail
    flame.set_default_dtype("float16")
    changed = trained(small_config, tmp_path / "changed")
    assert plain.keys() == changed.keys()
    assert all(np.array_equal(plain[name], changed[name]) for name in plain)
