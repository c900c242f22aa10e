"""`gradcheck`: a row for every argument, and a wrong formula does not pass."""

from __future__ import annotations

import json

import pytest

from flame_train import cli
from flame_train.engine import functional
from flame_train.engine.op import REGISTRY
from flame_train.errors import ConfigError
from flame_train.tools.check_gradients import run


@pytest.fixture
def wrong_sin(monkeypatch):
    """sin with a gradient that is off by a thousandth, for the time of a test."""
    op = REGISTRY["sin"]
    (formula,) = [f for f in op.formulas if "input" in f.args]
    spoiled = type(formula)(
        **{name: getattr(formula, name) for name in formula.__slots__}
        | {"fn": lambda *a, **k: formula.fn(*a, **k) * 1.001}
    )
    monkeypatch.setattr(op, "formulas", [spoiled if f is formula else f for f in op.formulas])


def test_every_argument_of_every_op_has_a_row():
    """In fp32, which nothing else checks whole; in fp64 every op has a test of its own."""
    result = run([], "cpu", "float32")
    checked = {(row["op"], row["argument"].split("[")[0]) for row in result["rows"]}
    assert checked == {(name, argument) for name, op in REGISTRY.items() for argument in op.differentiable}
    assert result["failed"] == 0
    assert result["checked"] == len(result["rows"])
    assert all(row["verdict"] == "passed" and row["error"] < 1e-4 for row in result["rows"])


def test_only_what_was_asked_for():
    assert {row["op"] for row in run(["silu", "linear", "silu"], "cpu", "float64")["rows"]} == {"silu", "linear"}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_wrong_formula_fails(wrong_sin, dtype, capsys):
    result = run(["sin", "cos"], "cpu", dtype)
    assert result["failed"] == 1
    assert {row["op"]: row["verdict"] for row in result["rows"]} == {"sin": "FAILED", "cos": "passed"}
    assert cli.run(["gradcheck", "sin", "--device", "cpu", "--dtype", dtype]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_unknown_names_are_told_with_what_is_near():
    with pytest.raises(ConfigError, match=r"'siluu'; did you mean silu.*'zzz'"):
        run(["siluu", "exp", "zzz"], "cpu", "float64")


def test_what_has_no_gradient_is_not_checked_in_silence():
    with pytest.raises(ConfigError, match="no gradient to check in eq, one_hot"):
        run(["eq", "exp", "one_hot"], "cpu", "float64")
    assert cli.run(["gradcheck", "eq", "--device", "cpu"]) == 2


def test_dtypes_go_by_both_their_names(capsys):
    for name in ("fp32", "float32"):
        assert cli.run(["gradcheck", "exp", "--device", "cpu", "--json", "--dtype", name]) == 0
        assert json.loads(capsys.readouterr().out)["dtype"] == "float32"


def test_the_command_prints_a_table_or_json(capsys):
    assert cli.run(["gradcheck", "layer_norm", "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert all(word in table for word in ("layer_norm", "weight", "bias", "passed", "failed: 0"))
    assert cli.run(["gradcheck", "layer_norm", "--device", "cpu", "--json"]) == 0
    arguments = [row["argument"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert sorted(arguments) == ["bias", "input", "weight"]
    assert functional.layer_norm is REGISTRY["layer_norm"]
