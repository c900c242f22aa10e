"""What help shows of a Tensor."""

from __future__ import annotations

import inspect

import flame_train.engine as flame


def test_every_public_member_of_a_tensor_has_a_docstring() -> None:
    members = [n for n in dir(flame.Tensor) if not n.startswith("_") and n != "data"]
    assert len(members) > 120
    without = [n for n in members if not (inspect.getdoc(inspect.getattr_static(flame.Tensor, n)) or "").strip()]
    assert not without


def test_a_method_says_what_its_op_does_and_takes() -> None:
    shown = inspect.getdoc(flame.Tensor.leaky_relu)
    assert shown is not None
    assert "negative_slope * input" in shown
    assert "negative_slope = 0.01" in shown
    assert str(inspect.signature(flame.Tensor.sum)).startswith("(self, dim")
    assert "Written into this tensor" in (inspect.getdoc(flame.Tensor.add_) or "")
