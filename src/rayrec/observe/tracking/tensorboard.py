"""Curves of a run for TensorBoard, as files of its own format in the run's folder."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any, Final, final

from tensorboardX.proto.event_pb2 import Event as Record
from tensorboardX.proto.event_pb2 import SessionLog
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboardX.record_writer import masked_crc32c

from rayrec import storage
from rayrec.observe.tracking.scalars import scalars
from rayrec.observe.tracking.view_file import ViewFile

_SUFFIX: Final = ".rayrec"
"""Tells the files made here from others in the folder."""
_DT_STRING: Final = 7
"""Of TensorFlow's DataType."""


@final
class TensorBoardTracker:
    """Writes RUN/tensorboard/events.out.tfevents.*: every measure at its step and time, and the configuration as text.

    Each driver writes all of the run's events anew, and then removes what an earlier driver wrote: the folder shows what
    the event file tells, never less or more. A TensorBoard that looks on is told to forget what came before, and what
    was logged of steps that are done again (a SessionLog of status START, whose step it purges from).
    """

    def __init__(self, folder: str, *, config: str) -> None:
        self._folder: Final = storage.join(folder, "tensorboard")
        self._config: Final = config
        self._file: ViewFile | None = None
        self._old: list[str] | None = None
        """Files of earlier drivers that are still there; None: nobody has looked yet."""
        self._last_step = -1

    def update(self, event: dict[str, Any]) -> None:
        time_s = event["time"]
        if self._file is None:
            self._begin(time_s)
        if event["kind"] == "start" and event["step"] < self._last_step:
            self._write(Record(wall_time=time_s, step=event["step"] + 1, session_log=_START))
            self._last_step = event["step"]
        values = scalars(event)
        if values:
            step = event.get("step", max(self._last_step, 0))
            self._last_step = max(self._last_step, step)
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
            self._write(Record(wall_time=time_s, step=step, summary=summary))

    def flush(self) -> None:
        if self._file is None:
            return
        if self._old is None:
            with storage.patience(0):
                files = [file.path for file in storage.files_in(self._folder)]
            self._old = [path for path in files if path.endswith(_SUFFIX) and path != self._file.path]
        self._file.flush()
        while self._old:
            storage.remove_file(self._old.pop())

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()

    def _begin(self, time_s: float) -> None:
        name = f"events.out.tfevents.{int(time_s):010d}.{socket.gethostname()}.{os.getpid()}.{os.urandom(3).hex()}"
        self._file = ViewFile(storage.join(self._folder, name + _SUFFIX))
        self._write(Record(wall_time=time_s, file_version="brain.Event:2"))
        self._write(Record(wall_time=time_s, step=0, session_log=_START))
        fenced = "\n".join(
            f"    {line}" for line in self._config.splitlines()
        )  # Markdown's way of leaving text as it is
        text = Summary.Value(
            tag="config/text_summary",
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(
                dtype=_DT_STRING,
                string_val=[fenced.encode()],
                tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
            ),
        )
        self._write(Record(wall_time=time_s, step=0, summary=Summary(value=[text])))

    def _write(self, record: Record) -> None:
        assert self._file is not None
        data = record.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.append(length + _checksum(length) + data + _checksum(data))


_START: Final = SessionLog(status=SessionLog.START)


def _checksum(data: bytes) -> bytes:
    """Of the TFRecord format: CRC-32C, rotated and shifted."""
    return struct.pack("<I", masked_crc32c(data))
