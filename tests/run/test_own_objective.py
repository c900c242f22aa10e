"""An objective of a script: its loss, its pairs, its place in a step, and the bytes of a run that was killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flame_train.engine import tensor
from flame_train.io.commit import newest
from tests.run_files import losses_of
from tests.scripts.test_examples import EXAMPLES, example

DPO = EXAMPLES / "dpo.py"
KILLED = """
import runpy, sys
from flame_train.disk.failpoint import arm
arm("train.after_step:2")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
WRONG = """
import json, sys
import flame_train
from flame_train.diffusion.objective_kind import ObjectiveKind
from flame_train.errors import FlameError


class Objective(ObjectiveKind):
    def losses(self, prediction, target, noise, level, batch, base):
        return self.each((prediction - target).square().mean((1, 2, 3)), base())


class Reads(Objective):
    name = "reads"

    def each(self, errors, base):
        return errors if float(errors.mean()) > 0 else -errors


class OneForAll(Objective):
    name = "one_for_all"

    def each(self, errors, base):
        return errors.mean()


class Number(Objective):
    name = "number"

    def each(self, errors, base):
        return 1.0


class OfBase(Objective):
    name = "of_base"

    def each(self, errors, base):
        return base.square().mean((1, 2, 3))


class Plain(Objective):
    name = "plain"

    def each(self, errors, base):
        return errors + 0.0 * base.mean((1, 2, 3))


for kind in (Reads, OneForAll, Number, OfBase, Plain):
    flame_train.register(objective=kind)
for name, more in json.loads(sys.argv[2]):
    given = [f"loss.objective={name}", f"output.dir={sys.argv[3]}/{name}", *more]
    try:
        told = flame_train.train(sys.argv[1], overrides=given, device="cpu", quiet=True)["lora"]
    except FlameError as error:
        told = str(error)
    print(json.dumps(told))
"""


def test_the_example_s_loss_is_that_of_the_paper():
    """By the formula in NumPy, in fp64, for two pairs; and a LoRA that does nothing has ln 2."""
    rng = np.random.default_rng(2)
    prediction, base, target = rng.standard_normal((3, 4, 3, 3, 2)).astype(np.float32)
    objective = example("dpo").DiffusionDPO(dpo_beta=5.0)
    found = objective.losses(tensor(prediction), tensor(target), None, None, None, lambda: tensor(base))
    model, reference = (((x.astype(np.float64) - target) ** 2).mean((1, 2, 3)) for x in (prediction, base))
    inside = -0.5 * 5.0 * ((model[::2] - model[1::2]) - (reference[::2] - reference[1::2]))
    np.testing.assert_allclose(found.numpy(), -np.log(1 / (1 + np.exp(-inside))), rtol=1e-5)
    same = objective.losses(tensor(base), tensor(target), None, None, None, lambda: tensor(base))
    np.testing.assert_allclose(same.numpy(), [np.log(2)] * 2, rtol=1e-6)


def dpo(folder: Path, run: Path, *before: str, code: int = 0) -> None:
    settings = {"output.dir": run, "train.steps": 3, "checkpoint.every": 1, "data.batch_size": 2}
    words = [word for path, value in settings.items() for word in ("--set", f"{path}={value}")]
    command = [sys.executable, *before, str(DPO), str(folder), "--device", "cpu", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr


@pytest.mark.slow
def test_the_example_trains_the_quickstart_is_killed_and_goes_on_to_the_same_bytes(trained_base, tmp_path):
    """The quickstart's base and some of its tiles; the step is the one that a GPU captures."""
    from flame_train.quickstart.drawings import tiles, write_images

    write_images(tmp_path / "images" / "4_tiles", 4, 1, tiles)
    shutil.copy(trained_base, tmp_path / "base.safetensors")
    cut, whole = tmp_path / "cut" / "run", tmp_path / "whole" / "run"
    dpo(tmp_path, cut, "-c", KILLED, code=-9)
    assert newest(cut / "checkpoints").step == 1
    dpo(tmp_path, cut)
    dpo(tmp_path, whole)
    last = Path("checkpoints/step-000003")
    names = ["lora.safetensors", last / "optimizer.safetensors", last / "state.json"]
    assert [(cut / name).read_bytes() for name in names] == [(whole / name).read_bytes() for name in names]
    losses = losses_of(whole)
    assert losses[0] == pytest.approx(np.log(2), rel=1e-5), "the LoRA begins as the base"
    assert losses[-1] < losses[0]
    assert json.loads((cut / names[-1]).read_text())["code"][0]["name"] == "dpo"


@pytest.mark.slow
def test_what_an_objective_may_not_do_is_told_and_what_it_may_trains(small_config, tmp_path):
    from flame_train.config.render import resolved

    script, file = tmp_path / "wrong.py", tmp_path / "my.toml"
    script.write_text(WRONG)
    file.write_text(resolved(small_config(train={"precision": "fp32", "steps": 2})))
    asked = [(name, []) for name in ("reads", "one_for_all", "number", "of_base", "plain")]
    asked.append(("reads", ["loss.kind=l1", "loss.weighting=min_snr"]))
    command = [sys.executable, script, file, json.dumps(asked), tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reads, one, number, of_base, plain, idle = map(json.loads, done.stdout.splitlines())
    line = next(n for n, text in enumerate(WRONG.splitlines(), 1) if "float(" in text)
    assert f"wrong.py:{line}: a step is captured, and reads no value back to the host: no float()" in reads
    assert "expected OneForAll.losses to give a tensor of shape (1,), a loss for each sample, got shape ()" in one
    assert "got float" in number
    assert "expected the loss of OfBase to depend on its prediction" in of_base
    assert Path(plain).exists()
    assert 'loss.kind: expected "mse" with loss.objective = "reads", which does not read it, got "l1"' in idle
    assert "loss.weighting" in idle
