"""Choices that a script registers: what is refused, a run that has them, and its continuation with and without them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import flame_train
from flame_train import cli
from flame_train.config.render import resolved
from flame_train.diffusion.losses import LossKind
from flame_train.diffusion.noise import NoiseKind
from flame_train.diffusion.weightings import Weighting
from flame_train.io.safetensors import SafetensorsFile
from flame_train.optimizers import OPTIMIZERS, OptimizerKind
from flame_train.settings import field
from tests.run_files import bytes_of

SCRIPT = """
import json, sys
import numpy as np
import flame_train
from flame_train.adapters.kinds.lora import Lora
from flame_train.diffusion.losses import LossKind
from flame_train.diffusion.noise import NoiseKind
from flame_train.diffusion.samplers.euler import Euler
from flame_train.diffusion.timestep_sampling import Stream, TimestepSampling
from flame_train.diffusion.weightings import Weighting
from flame_train.errors import FlameError
from flame_train.optimizers import OptimizerKind
from flame_train.optimizers.sgd import Sgd
from flame_train.schedules import ScheduleKind
from flame_train.schedules.linear import Linear
from flame_train.settings import field


class Cauchy(LossKind):
    name = "cauchy"
    width: float = field(1.0, "errors below it count squared", gt=0)

    def errors(self, prediction, target, level):
        return ((prediction - target) ** 2 / self.width + 1.0).log()


class Louder(NoiseKind):
    name = "louder"
    order = 9
    louder_by: float = field(0.0, "factor on the noise; 0: off", ge=0)

    @property
    def on(self):
        return self.louder_by > 0

    def changed(self, noise, latents, rng):
        return noise * self.louder_by


class Middle(TimestepSampling):
    name = "middle"

    def levels(self, rng):
        return (np.float32(0.25) + np.float32(0.5) * rng.uniform(Stream.TIMESTEPS)).astype(np.float32)


class Noisier(Weighting):
    name = "noisier"

    def of_snr(self, snr, prediction):
        return np.where(snr < 1.0, 10.0, 1.0)


class Descent(OptimizerKind):
    name = "descent"
    momentum: float = field(0.5, "decay of the momentum", ge=0, lt=1)

    def rule(self):
        return Sgd(momentum=self.momentum).rule()


class Halves(Linear):
    name = "halves"


class Small(Lora):
    name = "small"

    def initial(self, layer, rank, alpha, rng):
        return super().initial(layer, rank, alpha / 2, rng)


class Again(Euler):
    name = "again"
    aka = ()


for change in json.loads(sys.argv[1]):
    choices = dict(loss=Cauchy, noise=Louder, timestep_sampling=Middle, weighting=Noisier, optimizer=Descent)
    flame_train.register(schedule=Halves, adapter=Small, sampler=Again, **choices)  # a cell of a notebook may run twice
    stop = change.pop("stop", None)
    given = ["loss.kind=cauchy", "loss.width=0.5", "loss.louder_by=1.5", "loss.timestep_sampling=middle"]
    given += ["lora.kind=small", "sample.sampler=again", "sample.every=2", "sample.steps=2"]
    given += ["sample.width=64", "sample.height=64"]
    given += ["loss.weighting=noisier", "optimizer.name=descent", "schedule.name=halves", "optimizer.lr=0.01"]
    try:
        result = flame_train.train(
            sys.argv[2],
            overrides=[*given, f"output.dir={change.pop('dir')}"],
            device="cpu",
            on_step=lambda record: flame_train.STOP if record["step"] == stop else None,
            **change,
        )
    except FlameError as error:
        result = {"error": str(error)}
    print(json.dumps(result))
"""


def ran(script, config, *changes):
    done = subprocess.run(
        [sys.executable, script, json.dumps(changes), config], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_run_has_what_a_script_registered_and_goes_on_with_it_alone(small_config, tmp_path, capsys):
    script, file = tmp_path / "mine.py", tmp_path / "my.toml"
    script.write_text(SCRIPT)
    file.write_text(resolved(small_config(train={"precision": "fp32", "steps": 4}, sample={"prompts": ("a fox",)})))
    cut, whole = str(tmp_path / "cut"), str(tmp_path / "whole")
    first, whole_result = ran(script, file, {"dir": cut, "stop": 1}, {"dir": whole})
    assert (first["stopped"], first["steps"], Path(first["lora"]).exists()) == (True, 2, True)
    with SafetensorsFile(Path(first["lora"])) as lora:
        recorded = json.loads(lora.metadata["flame_train_code"])
    assert [(one["kind"], one["name"], one["script"]) for one in recorded] == [
        ("optimizer", "descent", "mine.py"),
        ("loss", "cauchy", "mine.py"),
        ("weighting", "noisier", "mine.py"),
        ("timestep_sampling", "middle", "mine.py"),
        ("noise", "louder", "mine.py"),
        ("schedule", "halves", "mine.py"),
        ("adapter", "small", "mine.py"),
        ("sampler", "again", "mine.py"),
    ]

    assert cli.run(["train", str(file), "--set", f"output.dir={cut}", "--device", "cpu"]) == 6
    assert f'{cut} uses the optimizer "descent" of mine.py: run that script' in capsys.readouterr().err
    assert cli.run(["train", f"{cut}/config.toml", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert 'got "cauchy"; ' + f'{cut} uses the loss "cauchy" of mine.py: run that script' in said
    assert f'loss.louder_by: unknown key; {cut} uses the noise "louder" of mine.py' in " ".join(said.split())

    script.write_text(f"{SCRIPT}# another end\n")
    refused, accepted = ran(script, file, {"dir": cut}, {"dir": cut, "accept_changed_code": True, "quiet": True})
    assert "mine.py, which has the optimizer" in refused["error"]
    assert "accept_changed_code=True" in refused["error"]
    assert bytes_of(accepted["lora"]) == bytes_of(whole_result["lora"])


class Taken(OptimizerKind):
    name = "lion"

    def rule(self):
        raise NotImplementedError


class Unnamed(OptimizerKind):
    def rule(self):
        raise NotImplementedError


class Dashed(Unnamed):
    name = "my-optimizer"


class Empty(LossKind):
    name = "empty"


class OtherMethod(LossKind):
    name = "other_method"

    def errors(self, prediction):
        return prediction


class OtherKey(Weighting):
    name = "other_key"
    huber_c: int = field(3, "a key of the loss huber")


class KeyOfSection(Weighting):
    name = "key_of_section"
    shift: float = field(3.0, "a key of the section")


class BareKey(Weighting):
    name = "bare_key"
    gain: float = 1.0


class OddKey(Weighting):
    name = "odd_key"
    gain: dict = field({}, "a table")


class WrongDefault(Weighting):
    name = "wrong_default"
    gain: float = field(-1.0, "a factor", gt=0)


@pytest.mark.parametrize(
    ("kind", "entry", "words"),
    [
        ("optimizer", Taken, 'optimizer: the name "lion" is taken, flame-train has one'),
        ("optimizer", Unnamed, "expected Unnamed.name, an identifier .*, got none"),
        ("optimizer", Dashed, "expected Dashed.name, an identifier .*, got 'my-optimizer'"),
        ("optimizer", Empty, r"derived from flame_train\.optimizers\.OptimizerKind, got Empty"),
        ("optimizer", "signum", "derived from .*, got str"),
        ("weighting", OtherKey(), "got an instance of"),
        ("loss", Empty, "loss: Empty lacks errors of LossKind"),
        ("loss", OtherMethod, r"expected OtherMethod\.errors\(self, prediction, target, level\), got \(self, predict"),
        ("weighting", OtherKey, "the key huber_c is taken"),
        ("weighting", KeyOfSection, "the key shift is taken"),
        ("weighting", BareKey, r"expected gain to be declared by flame_train\.settings\.field"),
        ("weighting", OddKey, "expected gain to be a bool, int"),
        ("weighting", WrongDefault, "the default of gain does not fit: input should be greater than 0"),
        ("noise", NoiseKind, "expected NoiseKind.name"),
    ],
)
def test_what_does_not_fit_is_refused(kind, entry, words):
    with pytest.raises((TypeError, ValueError), match=f"flame_train.register: {kind}.*{words}|{words}"):
        flame_train.register(**{kind: entry})
    assert OPTIMIZERS["lion"].script is None


def test_nothing_is_no_kind():
    with pytest.raises(TypeError, match="expected a class, such as loss=MyLoss, got none"):
        flame_train.register()
    with pytest.raises(TypeError, match="optimiser"):
        flame_train.register(optimiser=Taken)
