"""`bench`: what it counts, what it refuses. What it times is this machine's and is not asserted."""

from __future__ import annotations

import json
import math

import pytest

from flame_train import cli
from flame_train.engine.check import generator
from flame_train.engine.op import REGISTRY, sample
from flame_train.engine.sample import materialise
from flame_train.errors import ConfigError
from flame_train.models.unet_sdxl import UNet, UNetArch
from flame_train.tools import bench, bench_memory, bench_ops


def test_step_reports_a_finite_whole_step(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "step", "--model", "sdxl-tiny", "--resolution", "64", "--precision", "fp32"]
    argv += ["--rank", "2", "--device", "cpu", "--json"]
    assert cli.run(argv) == 0
    result = json.loads(capsys.readouterr().out)
    assert math.isfinite(result["figures"]["loss"])
    assert result["figures"]["grad_norm"] > 0
    assert result["figures"]["healthy"] == 1
    assert result["adapted_layers"] == 8 * 17  # eight attention projections in each of the tiny UNet's blocks
    assert "captured_ms" not in result


def test_step_refuses_an_unknown_model() -> None:
    with pytest.raises(ConfigError, match="expected a model among sdxl"):
        bench.prepare(bench.Trial("sd1", device="cpu"))


def test_ops_names_the_choice_and_why_others_declined(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "ops", "softmax", "--precision", "fp32", "--device", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["ops"]
    assert {r["op"] for r in rows} == {"softmax"}
    assert all(r["implementation"] == "reference" and r["us"] > 0 and r["unit"] == "TB/s" for r in rows)


def test_ops_refuses_an_unknown_op_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*softmax"):
        bench_ops.run(["sofmax"], "cpu", "fp32", None)


@pytest.mark.parametrize(
    ("name", "s", "multiply_adds"),
    [
        ("linear", sample((2, 5, 7), (3, 7), (3,)), 2 * 5 * 7 * 3),
        ("matmul", sample((4, 5, 6), (4, 6, 7)), 4 * 5 * 6 * 7),
        ("conv2d", sample((2, 8, 8, 3), (4, 3, 3, 3), None, 1, 1, layout="NHWC"), 2 * 8 * 8 * 4 * 3 * 9),
        ("scaled_dot_product_attention", sample((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4)), 2 * 2 * 3 * 5 * 6 * 4),
    ],
)
def test_arithmetic_is_counted_as_two_for_each_multiply_add(name: str, s: object, multiply_adds: int) -> None:
    bound = materialise(REGISTRY[name], s, generator(name, 0))
    assert bench_ops._flops(name, bound) == 2.0 * multiply_adds


def test_memory_adds_up_and_checkpointing_keeps_less() -> None:
    plain, less = (
        bench_memory.run(bench.Trial("sdxl-tiny", 64, 1, 2, "fp32", checkpointing, "cpu"))
        for checkpointing in (False, True)
    )
    assert plain["weights"] == 4 * UNet(UNetArch.tiny()).num_weights()
    assert sum(plain["kept by op"].values()) == plain["kept"]
    assert less["kept"] < plain["kept"] / 2
    assert plain["peak of what ops make"] == sum(r["at peak"] for r in plain["by op"])
    assert {r["phase"] for r in plain["by op"]} == {"forward", "backward"}
    assert "kept for the backward pass" in bench_memory.table(plain)
