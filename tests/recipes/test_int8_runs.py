"""Runs of 500 steps on a base in int8, with products in int8: the LoRA is as good as that of the base in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flame_train.config.load import load
from flame_train.models.registry import FAMILIES
from flame_train.quickstart import first_run as quickstart
from flame_train.run.check.check_run import check
from flame_train.run.commands.stages import train_plan
from flame_train.run.plan.plan import make_plan
from flame_train.training.session import Session, StopRequest

STEPS = 500
NEAR = 0.01  # of the held-out loss in bf16


def trained(folder: Path, family: str, model: dict[str, str]) -> dict[str, float]:
    """The loss on images that were never trained on, of the base in bf16 with the LoRA of a run with `model`'s keys."""
    source = quickstart.lay(folder, "cpu", FAMILIES[family])
    config = load(str(source))
    changed: dict[str, dict[str, Any]] = {
        "train": {"steps": STEPS, "precision": "bf16"},
        "sample": {"every": 0, "prompts": ()},
        "validation": {"every": 0},
        "checkpoint": {"every": STEPS},
        "output": {"dir": str(folder / "-".join(["run", *model.values()]))},
    }
    config = config.model_copy(update={k: getattr(config, k).model_copy(update=v) for k, v in changed.items()})
    base, session = make_plan(check(config, FAMILIES[family]), StopRequest()), Session("cpu")
    with session.stop:
        ours = config.model_copy(update={"model": config.model.model_copy(update=model)})
        lora = train_plan(make_plan(check(ours, FAMILIES[family]), session.stop), session)["lora"]
        found = quickstart.held_out_losses(base, folder / quickstart.HELD_OUT, Path(lora), session)
    return {f"{kind} {when}": loss for kind, losses in found.items() for when, loss in losses.items()}


@pytest.mark.timeout(1800)
@pytest.mark.proof  # the layers' products and gradients are held to references by faster ones; here they add up
@pytest.mark.parametrize("family", ["sdxl", "zimage"])
def test_500_steps_in_int8_end_within_a_per_cent_of_bf16(tmp_path: Path, family: str) -> None:
    exact = trained(tmp_path / family, family, {})
    assert exact["new after"] < exact["new before"]
    for storage in ("int8", "int8-convrot"):
        found = trained(tmp_path / family, family, {"quantize": storage, "arithmetic": "int8"})
        assert found["new after"] == pytest.approx(exact["new after"], rel=NEAR), storage
