"""The wheel `flame-train-kernels`: kernels of the usual runs, compiled for several GPUs. Needs no GPU.

    python scripts/kernels_wheel.py DIST [--architectures 80 86 89 90 100 120] [--models sdxl flux-dev ...]

Runs each model on shapes, as a run does to predict its memory, for a GPU of each architecture, in all `SETTINGS`.
What these runs launch is compiled by the installed NVRTC, on all cores, and packed. Who has the same NVRTC and the
wheel compiles nothing of it. NVRTC comes with the extra cuda12 or cuda13.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from card_table import prepared
from random_checkpoint import MODELS

from flame_train.config.load import load_located
from flame_train.engine.backend.cuda.cubin import ARCHITECTURE, compiled
from flame_train.engine.backend.cuda.nvrtc import TEXT_OPTIONS, file_text, included, options
from flame_train.engine.backend.cuda.prebuilt import PACKAGE, compiler_version, kernel_path
from flame_train.engine.shape_run import Gpu, KernelRequests
from flame_train.run.memory.prediction import predicted_memory
from flame_train.run.plan.plan import plan_run
from flame_train.training.session import StopRequest

SETTINGS: Final = (
    (),
    ("gradient.checkpointing=full",),
    ("gradient.checkpointing=full", "model.quantize=fp8"),
    ("data.batch_size=4",),
)
"""Of the runs whose kernels are packed, each on top of a family's defaults."""
GPUS: Final = {
    "80": Gpu("80", 108, 163 << 10, 80 << 30),
    "86": Gpu("86", 82, 99 << 10, 80 << 30),
    "89": Gpu("89", 128, 99 << 10, 80 << 30),
    "90": Gpu("90", 132, 227 << 10, 80 << 30),
    "100": Gpu("100", 148, 227 << 10, 80 << 30),
    "120": Gpu("120", 170, 99 << 10, 80 << 30),
}
"""One of each architecture, with memory for every run."""
FLUSHED: Final = ("-ftz=true",)
"""What CuPy adds to the options of the kernels that it compiles."""
PROJECT: Final = """\
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "flame-train-kernels"
version = "{version}"
description = "Compiled kernels of flame-train, of NVRTC {nvrtc}, for compute capability {capabilities}"
requires-python = ">=3.11"
dependencies = ["flame-train=={version}"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a kernel is compiled from, and the file that it becomes."""

    text: str
    options: tuple[str, ...]
    more: tuple[str, ...]
    architecture: str


def requested(model: str, gpu: Gpu, settings: Sequence[str], folder: Path) -> KernelRequests:
    """What a run of the model launches there, on an empty checkpoint in `folder`."""
    asked = load_located(str(prepared(folder, model)), [*settings, f"output.dir={folder / 'run'}"])
    return predicted_memory(plan_run(asked, None, StopRequest()), gpu).kernels


def kernels(requests: KernelRequests, architecture: str) -> Iterable[Kernel]:
    """The kernels of requests. Files and texts may name a kernel twice."""
    for text, _, dtype, _ in requests.sm90:
        yield Kernel(text, options(dtype), (), ARCHITECTURE)
    for file, _, dtype, _ in requests.files:
        yield Kernel(file_text(file), options(dtype), FLUSHED, architecture)
    for text, _ in requests.texts:
        yield Kernel(included(text), TEXT_OPTIONS, FLUSHED, architecture)


def build(folder: Path, wanted: Sequence[Kernel], cupy: Any) -> int:
    """Compiles the kernels into the package's folder, and says how many bytes they take."""
    nvrtc, asked = cupy.cuda.nvrtc, compiler_version(cupy)

    def one(kernel: Kernel) -> int:
        path = kernel_path(folder, asked, kernel.architecture, kernel.text, kernel.options)
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = (*kernel.options, *kernel.more, f"-arch={kernel.architecture}")
        return path.write_bytes(compiled(nvrtc, kernel.text, flags))

    with ThreadPoolExecutor() as pool:
        return sum(pool.map(one, wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--architectures", nargs="+", choices=[*GPUS], default=[*GPUS])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    args = parser.parse_args()
    import cupy

    found = dict[Kernel, None]()
    with tempfile.TemporaryDirectory() as work:
        for model in args.models:
            for capability in args.architectures:
                for settings in SETTINGS:
                    asked = requested(model, GPUS[capability], settings, Path(work))
                    found |= dict.fromkeys(kernels(asked, f"sm_{capability}"))
            print(f"{model}: {len(found)} kernels so far", flush=True)
        project, own = Path(work) / "project", version("flame-train")
        package = project / PACKAGE
        package.mkdir(parents=True)
        (package / "__init__.py").write_text('"""Compiled kernels of flame-train."""\n')
        size = build(package, [*found], cupy)
        text = PROJECT.format(
            version=own, nvrtc=compiler_version(cupy), capabilities=", ".join(args.architectures), package=PACKAGE
        )
        (project / "pyproject.toml").write_text(text)
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(args.dist), str(project)]
        subprocess.run(command, check=True)
    print(f"{len(found)} kernels, {size / 2**20:.1f} MiB, in {args.dist}")


if __name__ == "__main__":
    main()
