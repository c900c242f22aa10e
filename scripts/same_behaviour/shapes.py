"""`--dry-run` at published size on the described H100: what is launched, which kernels, how much memory."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from unittest import mock

from runs import toml
from world import KINDS, PUBLISHED, World, digest, program

WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "fp8, checkpointing": {"model.quantize": "fp8", "gradient.checkpointing": "full"},
    "nf4, offload": {"model.quantize": "nf4", "gradient.checkpointing": "full", "model.offload": 0.5},
    "text in the step": {"text_encoders.cache": "off"},
}
"""For the kind lora, beside each kind as it is."""
BUDGET: Final = {"memory.budget": "12 GiB"}
SOUGHT: Final = ("sdxl", "sd3", "flux", "zimage")
"""Families for which the choices of a budget are sought, which takes minutes for larger ones."""
TASKS: Final = [f"{family}/{kind}" for family in PUBLISHED for kind in KINDS]


class Launches:
    """Every launch of the described GPU in their order, as a hash, and how many by name."""

    def __init__(self) -> None:
        self._hash, self.names, self.runs = hashlib.sha256(), Counter[str](), list[Any]()

    def note(self, name: str, *what: Any) -> None:
        self.names[name] += 1
        self._hash.update(f"{name} {' '.join(map(_described, what))}\n".encode())

    def as_dict(self) -> dict[str, Any]:
        return {"hash": self._hash.hexdigest()[:32], "names": dict(sorted(self.names.items()))}


def _described(argument: Any) -> str:
    shape = getattr(argument, "shape", ())
    return f"{shape}{argument.dtype}" if shape else repr(argument) if isinstance(argument, (int, float)) else ""


@contextmanager
def watched(launches: Launches) -> Iterator[None]:
    """Inside, the engine's runs on shapes are noted: the names of its private parts are here alone."""
    from flame_train.engine.backend.cuda.described import Traffic
    from flame_train.engine.backend.cuda.launcher import LaunchHooks
    from flame_train.engine.shape_run import ShapeRun

    begin, launched, multiplied = ShapeRun.__init__, Traffic.launched, LaunchHooks.multiplied

    def begun(run: Any, *arguments: Any) -> None:
        begin(run, *arguments)
        launches.runs.append(run)

    def launch(traffic: Any, args: Sequence[Any] = ()) -> None:
        launches.note("launch", *args)
        launched(traffic, args)

    def product(hooks: Any, kind: str, flops: int) -> None:
        launches.note(kind, flops)
        multiplied(hooks, kind, flops)

    with (
        mock.patch.object(ShapeRun, "__init__", begun),
        mock.patch.object(Traffic, "launched", launch),
        mock.patch.object(LaunchHooks, "multiplied", product),
    ):
        yield


def cases(world: World, task: str) -> dict[str, Callable[[], Any]]:
    family, kind = task.split("/")
    ways = {"as it is": {}, **(WAYS if kind == "lora" else {})}
    if kind == "lora" and family in SOUGHT:
        ways["budget"] = BUDGET
    return {f"{task}/{way}": partial(planned, world, family, kind, own) for way, own in ways.items()}


def planned(world: World, family: str, kind: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """A dry run."""
    given = {
        "model.checkpoint": str(world.published(family)),
        "data.path": str(world.images),
        "data.upscale": True,
        "data.cache": str(world.own / "cache"),
        "lora.kind": kind,
        "lora.targets": ["full" if kind == "locon" else "attention"],  # it wants convolutions
        "sample.prompts": ["a red circle"],
        "validation.fraction": 0.3,
        "output.dir": str(world.own / "run"),
    }
    file, launches = world.own / "config.toml", Launches()
    file.write_text(toml(given | own))
    with watched(launches):
        found = program(world, "train", str(file), "--device", "cpu", "--dry-run", "--json")
    return found | {"launches": launches.as_dict(), "runs": [_run(run) for run in launches.runs]}


def _run(run: Any) -> dict[str, Any]:
    """What a run on shapes took, and the kernels that it requested, in their order."""
    requests, traffic = run.kernel_requests, run.traffic
    kernels = {
        "files": [f"{file} {kernel} {dtype} {shared}" for file, kernel, dtype, shared in requests.files],
        "texts": [f"{kernel} {digest(text.encode())}" for text, kernel in requests.texts],
        "sm90": [f"{kernel} {digest(text.encode())} {dtype} {shared}" for text, kernel, dtype, shared in requests.sm90],
        "calls": digest(repr(requests.calls).encode()),
    }
    return {
        "peak": run.peak_bytes,
        "host": run.host_bytes,
        "flops": [dict(sorted(counts.items())) for counts in (run.flops.once, run.flops.again)],
        "traffic": [traffic.launches, traffic.operands, traffic.copied, traffic.narrow],
        "kernels": kernels,
    }
