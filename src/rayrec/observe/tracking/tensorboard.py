"""Curves of a run for TensorBoard, as files of its own format in the run's folder."""

import os
import socket
from typing import Any, Final, final

from tensorboardX.proto.event_pb2 import Event as Record
from tensorboardX.proto.event_pb2 import SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter, register_writer_factory
from tensorboardX.summary import text

from rayrec import storage
from rayrec.observe.run_summary import RunSummary
from rayrec.observe.tracking.tracker import ViewFile, scalars

_SUFFIX: Final = ".rayrec"
"""Tells the files made here from others in the folder."""
_SCHEME: Final = "rayrec"
"""Paths of this scheme are opened by tensorboardX as a ViewFile."""


@final
class TensorBoardTracker:
    """Writes RUN/tensorboard/events.out.tfevents.*: every measure at its step and time, and the configuration as text.

    Each driver writes all events of the run again, and then removes the files of earlier drivers: the folder shows the
    content of the event file, no less and no more. A SessionLog of status START makes a running TensorBoard drop the points
    from its step on: all of them at the start, later those of steps that are repeated.

    tensorboardX writes the records (TFRecord framing, checksums) but not the file: its EventFileWriter reports no error of
    its thread, creates the file before there is anything to show, and needs boto3 for s3:// and Google's client for gs://.
    """

    def __init__(self, folder: str, *, config: str) -> None:
        self._folder: Final = storage.join(folder, "tensorboard")
        self._config: Final = config
        self._path = ""
        self._records: RecordWriter | None = None
        self._old: list[str] | None = None
        """Files of earlier drivers that are still there; None: nobody has looked yet."""
        self._last_step = -1

    def update(self, event: dict[str, Any], run: RunSummary) -> None:
        time_s = event["time"]
        if self._records is None:
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
        if self._records is None:
            return
        if self._old is None:
            with storage.patience(0):
                files = [file.path for file in storage.files_in(self._folder)]
            self._old = [path for path in files if path.endswith(_SUFFIX) and path != self._path]
        self._records.flush()
        while self._old:
            storage.remove_file(self._old.pop())

    def close(self) -> None:
        self.flush()
        if self._records is not None:
            self._records.close()

    def _begin(self, time_s: float) -> None:
        name = f"events.out.tfevents.{int(time_s):010d}.{socket.gethostname()}.{os.getpid()}.{os.urandom(3).hex()}"
        self._path = storage.join(self._folder, name + _SUFFIX)
        self._records = RecordWriter(f"{_SCHEME}:{self._path}")
        self._write(Record(wall_time=time_s, file_version="brain.Event:2"))
        self._write(Record(wall_time=time_s, step=0, session_log=_START))
        # Markdown's way of leaving text as it is
        fenced = "\n".join(f"    {line}" for line in self._config.splitlines())
        self._write(Record(wall_time=time_s, step=0, summary=text("config", fenced)))

    def _write(self, record: Record) -> None:
        assert self._records is not None
        self._records.write(record.SerializeToString())


_START: Final = SessionLog(status=SessionLog.START)


class _ViewFiles:
    """Opens files for tensorboardX (`register_writer_factory`)."""

    def open(self, path: str) -> ViewFile:
        return ViewFile(path.removeprefix(f"{_SCHEME}:"))


register_writer_factory(_SCHEME, _ViewFiles())
