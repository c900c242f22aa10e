"""A new optimizer, schedule, loss, weighting, timestep sampling, sampler, or adapter kind is one file, no more.

Each file is put into a copy of the package. The command line then knows it, `init` writes its keys, and a run trains by
it. A family is a folder, and a line in the list.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flame_train
from flame_train.models.registry import FAMILIES

pytestmark = pytest.mark.slow

SIGNUM = '''
"""The sign of the momentum (arXiv 1802.04434)."""
from dataclasses import dataclass
from typing import ClassVar
import numpy as np
from flame_train.settings import field
from flame_train.optimizers import OptimizerKind

@dataclass(frozen=True)
class SignumRule:
    beta: float
    name: str = "signum"
    elementwise: ClassVar[bool] = True

    def init(self, arena):
        return {"momentum": arena.backend.xp.zeros(arena.size, np.float32)}

    def numbers(self, state, step):
        return {}

    def update(self, g, state, step):
        m = self.beta * state["momentum"] + (1.0 - self.beta) * g
        return step.xp.sign(m), {"momentum": m}

class Signum(OptimizerKind):
    name = "signum"
    beta: float = field(0.9, "decay of the momentum", ge=0, lt=1)

    def rule(self):
        return SignumRule(self.beta)
'''
HALVES = '''
"""Half the rate in the second half."""
from flame_train.engine.optim import Schedule
from flame_train.schedules import ScheduleKind

class Halves(ScheduleKind):
    name = "halves"

    def build(self, total, warmup, min_lr):
        return Schedule(lambda xp, progress: xp.where(progress < 0.5, 1.0, 0.5), total, warmup, min_lr=min_lr)
'''
CAUCHY = '''
"""The logarithm of 1 and the squared error."""
from flame_train.diffusion.losses import LossKind

class Cauchy(LossKind):
    name = "cauchy"

    def errors(self, prediction, target, level):
        return ((prediction - target) ** 2 + 1.0).log()
'''
EVEN = '''
"""Ten times as much for the noisier half, in both kinds of models."""
import numpy as np
from flame_train.settings import field
from flame_train.diffusion.weightings import Weighting

class Noisier(Weighting):
    name = "noisier"
    noisier_by: float = field(10.0, "factor", gt=0)

    def of_snr(self, snr, prediction):
        return np.where(snr < 1.0, self.noisier_by, 1.0)

    def of_flow(self, sigma):
        return (sigma > 0.5) * np.float32(self.noisier_by) + np.float32(1.0)
'''
MIDDLE = '''
"""Noise levels near the middle."""
import numpy as np
from flame_train.diffusion.timestep_sampling import Stream, TimestepSampling

class Middle(TimestepSampling):
    name = "middle"

    def levels(self, rng):
        return (np.float32(0.25) + np.float32(0.5) * rng.uniform(Stream.TIMESTEPS)).astype(np.float32)
'''
MIDPOINT = '''
"""Euler's method with the slope of the step before, Adams and Bashforth's of order 2."""
from flame_train.engine import no_grad
from flame_train.diffusion.samplers import Sampler

class AdamsBashforth(Sampler):
    name = "adams_bashforth"
    usual_name = "Adams-Bashforth"
    flow = True

    def sample(self, denoise, noise, cond, path, fresh):
        with no_grad():
            x, before = path.begin(noise), None
            for i in range(len(path.levels) - 1):
                slope = path.slope(denoise, x, i, cond)
                used = slope if before is None else slope * 1.5 - before * 0.5
                x, before = x + used * (path.levels[i + 1] - path.levels[i]), slope
        return x
'''
GAIN = '''
"""A gain for each output of a layer: W' = (1 + gain) W, after (IA)^3 (arXiv 2205.05638)."""
from dataclasses import dataclass
import numpy as np
from flame_train.adapters.file_form import FileForm
from .kind import AdapterKind

@dataclass(frozen=True)
class GainFactors:
    gain: np.ndarray
    kind: str = "gain"
    rank: int = 1
    alpha: float = 1.0

    @property
    def arrays(self):
        return {"gain": self.gain}

    @property
    def weight_shape(self):
        return (len(self.gain),)

class GainAdapter:
    def __init__(self, gain):
        self.gain = gain

    def parameters(self):
        return {"on_output": self.gain}

    def __call__(self, layer, x, residual=None):
        layer.adapter = None
        try:
            y = layer(x)
        finally:
            layer.adapter = self
        y = y * (self.gain.compute_copy.to(x.dtype) + 1.0)
        return y if residual is None else y + residual

    def apply_grouped(self, layers, x):
        return None

    def factors(self):
        return GainFactors(self.gain.numpy())

class Gain(AdapterKind):
    name = "gain"
    files = FileForm("gain", {".on_output": "gain"}, lambda arrays, alpha: GainFactors(**arrays), lambda arrays: "")

    def initial(self, layer, rank, alpha, rng):
        return GainFactors(np.zeros(layer.weight.shape[0], np.float32))

    def from_factors(self, layer, factors, strength, make):
        return GainAdapter(make("on_output", factors.gain))

    def count(self, weight_shape, rank):
        return weight_shape[0]
'''
TWIN = {
    "__init__.py": '"""A family like Flux, under another name."""\n',
    "names.py": '''
"""The names of Flux.1, and what Twin's LoRAs say of themselves."""
from dataclasses import replace
from flame_train.models.flux import names as flux
from flame_train.networks.files.marks import Marks

def lora_family():
    return replace(flux.lora_family(), name="twin", base_version="twin", architecture="twin/lora")

MARKS = Marks(
    names={"twin": "Twin"}, networks=(), loras=(), written={"twin": "twin"}, also_reads={"twin": ("flux",)}
)
''',
    "family.py": '''
"""Twin."""
from dataclasses import replace
from flame_train.models.common.small import QuickstartSpec
from flame_train.models.flux.family import FluxFamily
from flame_train.models.twin.names import lora_family

class Twin(FluxFamily):
    name = "twin"
    published = {"twin-tiny": FluxFamily.published["flux-tiny"]}
    small = "twin-tiny"
    lesson = QuickstartSpec("a twin of the small Flux", steps=6, batch_size=1)

    def assemble(self, parts, opening):
        return replace(super().assemble(parts, opening), lora_names=lora_family())

    lora_names = staticmethod(lora_family)
''',
    "family.toml": """
loaded_by = ["ComfyUI"]
[other_trainers]
ai-toolkit = ["twin_1"]
[presets.style]
source = "nobody"
keys = { "lora.rank" = 7 }
""",
}
ELSEWHERE = """
job: extension
config:
  name: a
  process:
  - type: sd_trainer
    network: {type: lora, linear: 8, linear_alpha: 8}
    model: {name_or_path: base.safetensors, arch: twin_1}
    datasets: [{folder_path: images, resolution: [512]}]
    train: {steps: 10, lr: 1.0e-4}
"""
FILES = {
    "optimizers/signum.py": SIGNUM,
    "schedules/halves.py": HALVES,
    "diffusion/losses/cauchy.py": CAUCHY,
    "diffusion/weightings/noisier.py": EVEN,
    "diffusion/timestep_sampling/middle.py": MIDDLE,
    "diffusion/samplers/midpoint.py": MIDPOINT,
    "adapters/kinds/gain.py": GAIN,
}


SEVERAL = """
import contextlib, io, json, sys
from flame_train import cli
from flame_train.quickstart import first_run
first_run._HELD_OUT = {"new": 4, "known": 4}
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(line)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


class Copy:
    """A copy of the package, with new files in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        half_written = shutil.ignore_patterns("*.pyc.*")  # what Python has compiled comes along
        shutil.copytree(Path(flame_train.__file__).parent, folder / "flame_train", ignore=half_written)
        for path, text in FILES.items():
            (folder / "flame_train" / path).write_text(text)

    def __call__(self, *lines: list[str], code: int = 0) -> list[Any]:
        """What each command line prints, as JSON if it is asked to; one process runs them, as imports take seconds."""
        environment = os.environ | {"PYTHONPATH": str(self.folder), "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SEVERAL, json.dumps(lines)],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        ended = [json.loads(answer) for answer in done.stdout.splitlines()]
        for found, out, err in ended:
            assert found == code, out + err
        if code:
            return [err for _, _, err in ended]
        return [json.loads(out) if "--json" in line else out for line, (_, out, _) in zip(lines, ended, strict=True)]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("seams"))


CHOICES = {
    "optimizer.name": "signum",
    "schedule.name": "halves",
    "loss.kind": "cauchy",
    "loss.timestep_sampling": "middle",
    "loss.weighting": "noisier",
    "lora.kind": "gain",
    "sample.sampler": "adams_bashforth",
}


GRIDS = {"sample.every": "2", "sample.steps": "3", "sample.prompts": "a tile"}


def settings(**changes: str) -> list[str]:
    return [part for path, value in changes.items() for part in ("--set", f"{path}={value}")]


def test_a_run_trains_by_what_one_file_each_adds(copy: Copy, tmp_path: Path) -> None:
    lines = []
    for family in ("sdxl", "flux"):
        (tmp_path / family).mkdir()
        FAMILIES[family].write_small_base(tmp_path / family, 3)
        train = ["train", "--config", base_config(tmp_path / family), "--device", "cpu", "--json"]
        chosen = settings(**CHOICES, **{"output.dir": f"{family}-chosen"})
        lines += [
            [*train, *settings(**{"output.dir": f"{family}-plain"})],
            [*train, "--dry-run", *chosen],
            [*train, *chosen],
            [*train, *chosen, *settings(**GRIDS)],
        ]
    ended = copy(*lines)
    for plain, plan, result, again in (ended[:4], ended[4:]):
        assert result["steps"] == plain["steps"] == 2
        assert result["last_step_loss"] != plain["last_step_loss"]
        assert plan["trainable_parameters"] > 0
        assert again["steps"] == 2, "its state is read back"
        assert again["samples"], "its sampler draws the grid that is lacking"


def base_config(folder: Path) -> str:
    from flame_train.quickstart.drawings import tiles, write_images

    write_images(folder / "images", 8, 1, tiles)
    path = folder / "config.toml"
    path.write_text(
        f'[model]\ncheckpoint = "{folder / "base.safetensors"}"\n[data]\npath = "{folder / "images"}"\n'
        "resolution = 64\nbucket_step = 32\n[lora]\nrank = 2\n[optimizer]\nlr = 1e-3\n[schedule]\nwarmup_steps = 0\n"
        '[train]\nsteps = 2\nprecision = "fp32"\n[output]\ndir = "run"\n'
    )
    return str(path)


def test_messages_and_templates_know_them(copy: Copy, tmp_path: Path) -> None:
    (text,) = copy(["init", "sdxl"])
    for path, value in CHOICES.items():
        line = next(line for line in text.splitlines() if line.startswith(f"{path.split('.')[1]} = ") and value in line)
        assert value in line
    config = tmp_path / "bad.toml"
    config.write_text('[optimizer]\nname = "signun"\n[loss]\nnoisier_by = 2.0\n')
    (said,) = copy(["train", "--config", str(config), "--device", "cpu"], code=2)
    assert 'did you mean "signum"?' in said
    assert 'loss.noisier_by: expected loss.weighting = "noisier" with it, got "none"' in said


def test_a_family_is_a_folder_and_a_line(tmp_path: Path) -> None:
    """All else asks the list of families, or the folder: commands, presets, what a file is, other trainers' configs."""
    copy = Copy(tmp_path)
    folder = tmp_path / "flame_train" / "models" / "twin"
    folder.mkdir()
    for name, text in TWIN.items():
        (folder / name).write_text(text)
    families = tmp_path / "flame_train" / "families.py"
    families.write_text(families.read_text().replace('"flux": "Flux.1",', '"flux": "Flux.1",\n        "twin": "Twin",'))
    (tmp_path / "theirs.yaml").write_text(ELSEWHERE)
    lora = str(tmp_path / "q" / "run" / "lora.safetensors")
    commands, template, preset, trained, inspected, measured, imported = copy(
        ["--help"],
        ["init", "twin"],
        ["init", "twin", "--preset", "style"],
        ["quickstart", str(tmp_path / "q"), "--family", "twin", "--device", "cpu", "--json"],
        ["inspect", lora, "--json"],
        ["bench", "step", "--model", "twin-tiny", "--resolution", "64", "--device", "cpu", "--json"],
        ["import", "theirs.yaml", "-o", "ours.toml", "--json"],
    )
    assert "twin-lora" in commands
    assert "A LoRA for Twin" in template
    assert "rank = 7" in preset
    assert (trained["steps"], trained["lora"]) == (6, lora)
    assert inspected["identity"]["family"] == "twin"
    assert measured["eager_ms"]
    assert imported["family"] == "twin"
