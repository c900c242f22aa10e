"""The library of the engine: its names are there, and one loads its module alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from flame_train.engine import functional, lazy, nn, optim

STARTS = """
import json, sys
import flame_train.engine as flame
from flame_train.engine import functional as F, nn, optim
"""
LOADED = "[m for m in sys.modules if m.startswith('flame_train.engine.library')]"


def printed(code: str) -> object:
    """What a fresh Python prints, as JSON, at the end of `code`."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_every_name_is_listed_and_leads_to_its_module() -> None:
    for owner, names in ((functional, lazy.OPS), (nn, lazy.LAYERS), (optim, lazy.OPTIMIZERS)):
        assert set(names) <= set(dir(owner)) & set(owner.__all__)
        assert all(getattr(owner, name) is lazy.attribute(names, name) for name in names)
    with pytest.raises(AttributeError, match=r"write F\.matmul"):
        _ = functional.mm


def test_a_name_loads_its_module_alone_whatever_way_it_is_asked_for() -> None:
    code = f"""{STARTS}
x = flame.tensor([3.0, 1.0])
found = []
for ask in (lambda: None, lambda: x.cumsum(0), lambda: F.softmax(x, 0), lambda: flame.relu(x), lambda: nn.ReLU()):
    ask()
    found.append(sorted({{m.rpartition(".")[2] for m in {LOADED}}}))
print(json.dumps(found))
"""
    reductions, softmax = ["library", "reductions"], ["library", "reductions", "softmax"]
    rectifiers = sorted([*softmax, "rectifiers"])
    assert printed(code) == [[], reductions, softmax, rectifiers, sorted([*rectifiers, "torch_layers"])]
