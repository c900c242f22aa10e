"""Predictions of earlier starts: a run that is started again takes as much memory, and wants the same kernels.

Predictions lie in the user's cache folder. The hash that names one covers settings, files of the networks, shapes of
the samples, the GPU, and the code. A file that is damaged says nothing, and is written anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from flame_train.config.own_code import used_code
from flame_train.data.samples import Samples
from flame_train.disk.preflight import user_cache
from flame_train.engine.backend.cupy_calls import CupyCall, Pattern
from flame_train.engine.shape_run import Gpu, KernelRequests, compile_ahead, gpu_of
from flame_train.errors import OutputError
from flame_train.io.json_values import read_checked, write_checked
from flame_train.models.common.model import Model
from flame_train.networks.files.part import JoinedPart, Part
from flame_train.run.plan.plan import Plan
from flame_train.version import __version__

from .prediction import PredictedMemory, predicted_memory

_MOST: Final = 32  # predictions in the folder; the one unused for longest goes first
_UNRELATED: Final[Any] = {
    **{"output": True, "checkpoint": True, "data": {"path"}, "model": {"checkpoint"}},
    **{"optimizer": {"lr"}, "train": {"steps", "epochs", "seed"}},
}
"""What decides where a run reads and writes, how long it is and how far a step goes, and no shape.

The length stands in one kernel of the schedule: a run of another length compiles that one later.
"""


def predict_ahead(plan: Plan, device: str, processes: int) -> PredictedMemory:
    """Predicts what the run will take. Its kernels are compiled from now on, while files are read."""
    predicted = kept_prediction(plan, gpu_of(device), processes)
    compile_ahead(predicted.kernels)
    return predicted


def kept_prediction(plan: Plan, gpu: Gpu, processes: int) -> PredictedMemory:
    """Returns `predicted_memory`, which an earlier start of such a run may have kept; keeps it if none has."""
    folder = user_cache("predictions")
    if folder is None:
        return predicted_memory(plan, gpu, processes)
    file = folder / f"{_identity(plan, gpu, processes)}.json"
    known = _from_json(read_checked(file))
    if known is not None:
        with contextlib.suppress(OSError):
            os.utime(file)
        return known
    predicted = predicted_memory(plan, gpu, processes)
    with contextlib.suppress(OutputError, OSError):  # a full disk costs the next start its time
        folder.mkdir(parents=True, exist_ok=True)
        write_checked(file, _to_json(predicted))
        _remove_oldest(folder)
    return predicted


def _remove_oldest(folder: Path) -> None:
    by_age = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    for file in by_age[:-_MOST]:
        file.unlink(missing_ok=True)


# ---- what decides a prediction ------------------------------------------------------------------------


def _identity(plan: Plan, gpu: Gpu, processes: int) -> str:
    checked = plan.checked
    decisive = {
        "code": [*_code(), used_code(plan.config)],
        "gpu": gpu,
        "processes": processes,
        "config": plan.config.model_dump(mode="json", exclude=_UNRELATED),
        "files": sorted(set(_files(checked.model)) | set(_files(checked.sample_model))),
        "layers": [[name, repr(checked.layer_settings.get(name))] for name in checked.targets],
        "streamed": [sorted(checked.streamed), sorted(checked.checkpointed), checked.streamed_text],
        "samples": [_shapes(plan.samples), _shapes(plan.held_out)],
        "text_rows": sorted(plan.text_rows.items()),
        "prompts": _distinct(_buckets(prompt.images) for prompt in plan.prompts),
        "grids": [
            [*each.size, each.steps, each.guidance_scale, each.sampler, each.strength, *_buckets(each.images)]
            for each in plan.requests
        ],
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()


def _code() -> list[Any]:
    """Returns the state of every file of this package, and the versions of the libraries whose rules it follows."""
    root = Path(__file__).parents[2]
    states = [
        f"{path.relative_to(root)} {status.st_size} {status.st_mtime_ns}"
        for path in sorted(root.rglob("*"))
        if path.suffix in (".py", ".cu", ".cuh", ".toml", ".json")
        for status in [path.stat()]
    ]
    return [__version__, np.__version__, hashlib.sha256("\n".join(states).encode()).hexdigest()]


def _files(model: Model) -> Iterator[tuple[Any, ...]]:
    """Yields path, size and times of every file that holds a network of the model, and what a folder states of it."""
    for part in (model.denoiser, model.vae.part, *(part for encoder in model.text for part in encoder.parts)):
        for path in _paths(part):
            for file in [path, *path.rglob("*.*")] if path.is_dir() else [path]:
                status = file.stat()
                yield str(file), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _paths(part: Part) -> Iterator[Path]:
    yield part.path
    for each in part.parts.values() if isinstance(part, JoinedPart) else ():
        yield from _paths(each)


def _shapes(samples: Samples) -> list[Any]:
    """Returns the shapes that samples come in, by batch size."""
    weights = samples.loss_weight_shape((1, 1, 1))
    rows = _distinct([row.set.batch_size, *row.shape] for row in samples.rows)
    return [samples.masked, weights, rows]


def _buckets(images: Iterable[Any]) -> list[int]:
    return [side for image in images for side in image.view.placement.shape]


def _distinct(values: Iterable[Sequence[int]]) -> list[Any]:
    return sorted(set(map(tuple, values)))


# ---- the file -----------------------------------------------------------------------------------------


def _to_json(predicted: PredictedMemory) -> dict[str, Any]:
    kernels = predicted.kernels
    return {
        **{name: value for name, value in asdict(predicted).items() if name != "kernels"},
        "files": [[file, kernel, dtype.name, shared] for file, kernel, dtype, shared in kernels.files],
        "sm90": [[text, kernel, dtype.name, shared] for text, kernel, dtype, shared in kernels.sm90],
        "texts": kernels.texts,
        "calls": [
            [call.name, [_operand(each) for each in call.operands], call.dtype and call.dtype.name]
            for call in kernels.calls
        ],
    }


def _from_json(content: Any) -> PredictedMemory | None:
    """Returns what `_to_json` wrote; None of anything else."""
    try:
        kernels = KernelRequests(
            tuple((file, kernel, np.dtype(dtype), shared) for file, kernel, dtype, shared in content.pop("files")),
            tuple((text, kernel) for text, kernel in content.pop("texts")),
            tuple((text, kernel, np.dtype(dtype), shared) for text, kernel, dtype, shared in content.pop("sm90")),
            tuple(
                CupyCall(name, tuple(map(_read_operand, operands)), np.dtype(dtype) if dtype else None)
                for name, operands, dtype in content.pop("calls")
            ),
        )
        return PredictedMemory(kernels=kernels, **content)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _operand(given: Any) -> list[Any]:
    if isinstance(given, Pattern):
        return [given.dtype.name, given.sizes, given.strides]
    return [type(given).__name__, given.item() if isinstance(given, np.generic) else given]


def _read_operand(written: list[Any]) -> Any:
    name, *rest = written
    if len(rest) == 2:
        return Pattern(np.dtype(name), tuple(rest[0]), tuple(rest[1]))
    plain = {"bool": bool, "int": int, "float": float}
    return plain[name](rest[0]) if name in plain else np.dtype(name).type(rest[0])
