"""Tags by a WD14-style tagger in ONNX: a folder with model.onnx and selected_tags.csv, as its author publishes it."""

from __future__ import annotations

import asyncio
import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from PIL import Image

from flame_train.data.caption_formats import decode_text
from flame_train.data.clips import load_still
from flame_train.data.file_reading import read_bytes
from flame_train.errors import DataError, EnvironmentFault, ModelFileError, shown
from flame_train.tools.captions.captioner import Answer

MODEL, TAGS = "model.onnx", "selected_tags.csv"
GENERAL, CHARACTER = "0", "4"  # categories of the list; 9 is a rating, which no caption has
_MOST: Final = 64 << 20  # bytes of the list
_WHITE: Final = 255
_FACE: Final = re.compile(r"\W*[^\W_]?\W*_\W*[^\W_]?\W*")  # such as ^_^ and (o)_(o): a letter or none on each side


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The probability from which a tag is taken, by its category."""

    general: float = 0.35
    character: float = 0.35


class Tagger:
    """A captioner that runs a tagger on the CPU."""

    def __init__(self, folder: Path, thresholds: Thresholds) -> None:
        """Reads the list of tags. Raises ModelFileError if a file is not there or not what it should be."""
        self._model, self._thresholds = folder / MODEL, thresholds
        for file in (self._model, folder / TAGS):
            if not file.is_file():
                raise ModelFileError(
                    f"{shown(file)}: expected a tagger's folder with {MODEL} and {TAGS}; there is no such file"
                )
        self._tags = read_tags(folder / TAGS)

    async def __aenter__(self) -> Self:
        """Loads the network. Raises EnvironmentFault without onnxruntime, ModelFileError for another network."""
        self._session = _session(self._model)
        (given,) = self._session.get_inputs()[:1]
        self._input, shape = given.name, given.shape
        if len(shape) != 4 or shape[3] != 3 or shape[1] != shape[2] or not isinstance(shape[1], int):
            raise ModelFileError(
                f"{shown(self._model)}: expected an input (N, side, side, 3) of a WD14 tagger, {shape}"
            )
        self._side = shape[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Frees the network."""
        del self._session

    async def caption(self, image: Path, name: str) -> Answer:
        """Returns the tags of an image, the likeliest first. Raises DataError."""
        return Answer(await asyncio.to_thread(self._tagged, image, name))

    def _tagged(self, image: Path, name: str) -> str:
        pixels = load_still(image, name=name, middle=True)
        likely = self._session.run(None, {self._input: network_input(pixels, self._side)})[0][0]
        if len(likely) != len(self._tags):
            raise ModelFileError(
                f"{shown(self._model)}: gives {len(likely)} values, and {TAGS} lists {len(self._tags)} tags; both must "
                "be of one tagger"
            )
        least = {GENERAL: self._thresholds.general, CHARACTER: self._thresholds.character}
        chosen = [i for i, (_, kind) in enumerate(self._tags) if kind in least and likely[i] >= least[kind]]
        chosen.sort(key=lambda i: (self._tags[i][1] != CHARACTER, -likely[i]))
        return ", ".join(self._tags[i][0] for i in chosen)


def network_input(pixels: np.ndarray[Any, Any], side: int) -> np.ndarray[Any, Any]:
    """Returns uint8 (H, W, 3) as a tagger takes it: fp32 (1, side, side, 3) of 0 to 255, in BGR, padded by white."""
    height, width = pixels.shape[:2]
    longest = max(height, width)
    square = np.full((longest, longest, 3), _WHITE, np.uint8)
    top, left = (longest - height) // 2, (longest - width) // 2
    square[top : top + height, left : left + width] = pixels
    resized = Image.fromarray(square).resize((side, side), Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(resized)[None, :, :, ::-1], np.float32)


def read_tags(file: Path) -> Sequence[tuple[str, str]]:
    """Returns the tags of a list with their categories, in the order of the network's values. Raises ModelFileError."""
    try:
        text = decode_text(read_bytes(file, limit=_MOST), shown(file))
        rows = csv.DictReader(io.StringIO(text), strict=True)
        return [(_readable(row["name"]), row["category"].strip()) for row in rows]
    except DataError as error:
        raise ModelFileError(str(error)) from None
    except (csv.Error, KeyError, AttributeError, TypeError):
        raise ModelFileError(f"{shown(file)}: expected CSV with the columns name and category") from None


def _readable(tag: str) -> str:
    """Returns a tag with spaces for underscores, but in emoticons."""
    return tag if _FACE.fullmatch(tag) else tag.replace("_", " ")


def _session(model: Path) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise EnvironmentFault(
            "--tagger needs onnxruntime, which is not installed; install it with: pip install 'flame-train[tagger]'"
        ) from None
    onnxruntime.disable_telemetry_events()
    try:
        return onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    except Exception as error:  # the library's own classes, one for each status
        raise ModelFileError(
            f"{shown(model)}: onnxruntime cannot read it ({shown(error)}); download it again"
        ) from None
