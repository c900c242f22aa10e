"""Programs that show a run while it goes on. A tracker that fails is given up with one warning; the run goes on.

Weights & Biases is sent curves, sample images and the config: no code, no console, no facts about the machine.
WANDB_MODE=offline keeps it all in the run folder, from which `wandb sync` sends it later.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from flame_train.config.keys import keys
from flame_train.data.grid import places
from flame_train.disk.atomic_write import write_atomically

_LOG = logging.getLogger(__name__)
_GIB: Final = 2**30
_CLIP_SIDE: Final = 480  # pixels: the longer side of a clip, whose GIF is large


class Tracker(ABC):
    """A program that shows a run.

    Attributes:
        says: the subject and verb of a warning, such as "TensorBoard events are".
        extra: the extra of the package that installs it.
    """

    says: ClassVar[str]
    extra: ClassVar[str]

    @abstractmethod
    def write(self, record: Mapping[str, Any]) -> None:
        """Adds a point to each curve, from a line of the log."""

    @abstractmethod
    def show(self, step: int, images: Mapping[str, bytes]) -> None:
        """Shows sample images, PNGs or GIFs by their names."""

    @abstractmethod
    def close(self) -> None:
        """Writes what is left."""


class Trackers:
    """The trackers of a run, each opened by a function, by its class."""

    def __init__(self, openers: Mapping[type[Tracker], Callable[[], Tracker]]) -> None:
        self._open: list[Tracker] = []
        for kind, opener in openers.items():
            try:
                self._open.append(opener())
            except ImportError:
                _LOG.warning("%s not written: pip install 'flame-train[%s]'", kind.says, kind.extra)
            except Exception as e:  # besides the disk's errors: a library of another version raises others
                _LOG.warning("%s not written: %s", kind.says, e)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._each(lambda tracker: tracker.close())

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds a point to each curve."""
        self._each(lambda tracker: tracker.write(record))

    def show(self, step: int, grid: Path, prompts: Sequence[str]) -> None:
        """Shows the images of a sample grid."""
        if self._open and grid.exists():
            self._each(lambda tracker: tracker.show(step, images_of(grid, prompts)))

    def _each(self, work: Callable[[Tracker], None]) -> None:
        for tracker in list(self._open):
            try:
                work(tracker)
            except Exception as e:
                _LOG.warning("%s no longer written: %s", tracker.says, e)
                self._open.remove(tracker)
                with contextlib.suppress(Exception):  # it may try once more what has failed
                    tracker.close()


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a line of the log, by the name of their curve."""
    values = {name: float(record[name]) for name in ("loss", "lr", "grad_norm", "loss_scale", "images_per_s")}
    if record.get("memory") is not None:
        values["memory_gib"] = record["memory"] / _GIB
    values |= {f"gradients/{block}": float(norm) for block, norm in record.get("gradients", {}).items()}
    if "validation" in record:
        measured = record["validation"]
        values["validation/loss"] = float(measured["loss"])
        values |= {f"validation/{band}": float(loss) for band, loss in measured["bands"].items()}
    return values


def images_of(grid: Path, prompts: Sequence[str]) -> dict[str, bytes]:
    """Cuts a sample grid into PNGs, by number and prompt; the whole grid if its images have several sizes.

    Clips become animated GIFs, shrunk to `_CLIP_SIDE`.
    """
    from PIL import Image, ImageSequence

    with Image.open(grid) as image:
        whole, clip = (0, 0, image.height, image.width), getattr(image, "n_frames", 1) > 1
        boxes = places(whole[2:], len(prompts))
        parts = [list[Image.Image]() for _ in boxes or (whole,)]
        times = []
        for frame in ImageSequence.Iterator(image):
            sheet = frame.convert("RGB")  # a WebP's frame has its time once it is decoded
            times.append(sheet.info.get("duration", 0))
            for part, (top, left, height, width) in zip(parts, boxes or (whole,), strict=True):
                part.append(sheet.crop((left, top, left + width, top + height)))
                if clip:
                    part[-1].thumbnail((_CLIP_SIDE, _CLIP_SIDE))
    names = [f"samples/{i:02} {prompt}" for i, prompt in enumerate(prompts, 1)] if boxes else ["samples"]
    return {name: _as_file(part, times) for name, part in zip(names, parts, strict=True)}


def _as_file(frames: Sequence[Any], times: Sequence[int]) -> bytes:
    buffer = io.BytesIO()
    first, *more = frames
    animated = {"append_images": more, "save_all": True, "duration": list(times), "loop": 0} if more else {}
    first.save(buffer, "GIF" if more else "PNG", **animated)
    return buffer.getvalue()


_FLUSHED_EVERY_S: Final = 10.0  # it waits for the disk


class TensorBoard(Tracker):
    """Writes events at once.

    tensorboardX's own SummaryWriter writes on a thread, which a full disk ends, and then waits for it forever.
    """

    says = "TensorBoard events are"
    extra = "tensorboard"

    def __init__(self, folder: Path, done: int, config: str = "") -> None:
        """Makes an event file in `folder`.

        `done` is the last step before the run continues: TensorBoard drops later events of earlier processes.
        `config` is the text of the run's config.
        """
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer: Any = RecordWriter(str(folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"))
        self._flushed = -math.inf
        self._add(file_version="brain.Event:2")
        self._add(step=done + 1, session_log=SessionLog(status=SessionLog.START))
        if config:
            self._add_text("config", config)

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds a point to each curve."""
        from tensorboardX.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in curves(record).items()]
        self._add(step=record["step"], summary=Summary(value=points))
        now = time.monotonic()
        if now - self._flushed >= _FLUSHED_EVERY_S:
            self._flushed = now
            self._writer.flush()

    def show(self, step: int, images: Mapping[str, bytes]) -> None:
        """Shows sample images."""
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, image=_image(raw)) for tag, raw in images.items()]
        self._add(step=step, summary=Summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()

    def _add_text(self, tag: str, text: str) -> None:
        """Adds a text by TensorBoard's text plugin, which shows Markdown: indented lines stay as they are."""
        from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboardX.proto.tensor_pb2 import TensorProto
        from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

        markdown = "\n".join(f"    {line}" for line in text.splitlines())
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()], tensor_shape=shape)
        plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._add(summary=Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=plugin, tensor=tensor)]))

    def _add(self, **parts: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=time.time(), **parts).SerializeToString())


def _image(raw: bytes) -> Any:
    from PIL import Image
    from tensorboardX.proto.summary_pb2 import Summary

    width, height = Image.open(io.BytesIO(raw)).size
    return Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=raw)


_ID: Final = "run-id.txt"


class WeightsAndBiases(Tracker):
    """A run at Weights & Biases. A continued run goes on with the same one."""

    says = "Weights & Biases is"
    extra = "wandb"

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any], name: str) -> None:
        """Begins a run with this name.

        Args:
            folder: the run folder, in which `wandb/` is made.
            project: the project's name.

        Raises:
            RuntimeError: nobody is logged in: the library would ask, and a run waits for nobody.
        """
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        known = wandb.setup().settings  # with what the environment and the user's files say
        if known.mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("nobody is logged in; run `wandb login`, or set WANDB_MODE=offline")
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            symlink=False,
            x_disable_machine_info=True,
            x_disable_meta=True,
        )
        (folder / "wandb").mkdir(exist_ok=True)
        self._run: Any = wandb.init(
            project=project,
            name=name,
            id=_run_id(folder / "wandb" / _ID),
            resume="allow",
            config=_without_folders(config),
            dir=str(folder),
            settings=settings,
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds a point to each curve."""
        self._run.log(curves(record), step=record["step"])

    def show(self, step: int, images: Mapping[str, bytes]) -> None:
        """Shows sample images; those of step 0 come before the first point."""
        import wandb
        from PIL import Image

        def shown(name: str, raw: bytes) -> Any:
            if raw.startswith(b"GIF"):
                return wandb.Video(io.BytesIO(raw), caption=name, format="gif")
            return wandb.Image(Image.open(io.BytesIO(raw)), caption=name)

        self._run.log({name: shown(name, raw) for name, raw in images.items()}, step=step)

    def close(self) -> None:
        """Sends what is left; offline it says nothing of it."""
        self._run.finish()


def _without_folders(config: Mapping[str, Any]) -> dict[str, Any]:
    """Lists the values by section and key; files and folders by their last name alone."""
    return {
        f"{section}.{name}": keys()[f"{section}.{name}"].with_places(value, lambda place: Path(place).name)
        for section, values in config.items()
        if isinstance(values, Mapping)
        for name, value in values.items()
    }


def _run_id(file: Path) -> str:
    """Reads the name by which the service knows the run: made once, and kept in its folder."""
    if not file.exists():
        raw = secrets.token_hex(8).encode()
        write_atomically(file, [raw], len(raw))
    return file.read_text(encoding="ascii").strip()
