"""TensorBoard's event files: curves, sample images and the config of a run."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .trackers import Tracker, curves

_FLUSHED_EVERY_S: Final = 10.0  # it waits for the disk


class TensorBoard(Tracker):
    """Writes events at once.

    tensorboardX's own SummaryWriter writes on a thread, which a full disk ends, and then waits for it forever.
    """

    says = "TensorBoard events are"
    extra = "tensorboard"

    def __init__(self, folder: Path, done: int, config: str = "") -> None:
        """A new event file in `folder`.

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
        """A point on each curve."""
        from tensorboardX.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=name, simple_value=value) for name, value in curves(record).items()]
        self._add(step=record["step"], summary=Summary(value=points))
        now = time.monotonic()
        if now - self._flushed >= _FLUSHED_EVERY_S:
            self._flushed = now
            self._writer.flush()

    def show(self, step: int, images: Mapping[str, bytes]) -> None:
        """Sample images."""
        from tensorboardX.proto.summary_pb2 import Summary

        shown = [Summary.Value(tag=tag, image=_image(raw)) for tag, raw in images.items()]
        self._add(step=step, summary=Summary(value=shown))
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()

    def _add_text(self, tag: str, text: str) -> None:
        """A text of TensorBoard's text plugin, which shows Markdown: indented lines stay as they are."""
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
    import io

    from PIL import Image
    from tensorboardX.proto.summary_pb2 import Summary

    width, height = Image.open(io.BytesIO(raw)).size
    return Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=raw)
