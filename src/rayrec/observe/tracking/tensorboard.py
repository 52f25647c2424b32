"""TensorBoard tracker: curves in TensorBoard's file format, in the run folder."""

import os
import socket
from types import SimpleNamespace
from typing import Any, Final, final

from tensorboardX.proto.event_pb2 import Event as Record
from tensorboardX.proto.event_pb2 import SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter, register_writer_factory
from tensorboardX.summary import text

from rayrec import storage
from rayrec.observe.run_summary import RunSummary
from rayrec.observe.tracking.tracker import AppendFile, scalars

_SUFFIX: Final = ".rayrec"
"""Distinguishes files written here from other files in the folder."""
_SCHEME: Final = "rayrec"
"""Path scheme that makes tensorboardX write through an AppendFile."""


@final
class TensorBoardTracker:
    """Writer of RUN/tensorboard/events.out.tfevents.*: all measures by step and time, and the
    configuration as text. Each driver rewrites all events of the run and then deletes the files of
    earlier drivers, so the folder always matches the event file. A SessionLog with status START
    makes a running TensorBoard drop the points from its step on: all points at the start, later
    only repeated steps. Uses the record writer of tensorboardX (TFRecord framing, checksums) but
    not its EventFileWriter, which hides errors of its thread, creates the file too early, and needs
    boto3 for s3:// and Google's client for gs://.
    """

    def __init__(self, folder: str, *, config: str) -> None:
        self._folder: Final = storage.join(folder, "tensorboard")
        self._config: Final = config
        self._path = ""
        self._records: RecordWriter | None = None
        self._old: list[str] | None = None
        """Remaining files of earlier drivers. None before the first lookup."""
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
            summary = Summary(
                value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            )
            self._write(Record(wall_time=time_s, step=step, summary=summary))

    def flush(self) -> None:
        if self._records is None:
            return
        if self._old is None:
            with storage.retry_timeout(0):
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
        process = f"{socket.gethostname()}.{os.getpid()}"
        name = f"events.out.tfevents.{int(time_s):010d}.{process}.{os.urandom(3).hex()}"
        self._path = storage.join(self._folder, name + _SUFFIX)
        self._records = RecordWriter(f"{_SCHEME}:{self._path}")
        self._write(Record(wall_time=time_s, file_version="brain.Event:2"))
        self._write(Record(wall_time=time_s, step=0, session_log=_START))
        # Indented text is verbatim in Markdown.
        fenced = "\n".join(f"    {line}" for line in self._config.splitlines())
        self._write(Record(wall_time=time_s, step=0, summary=text("config", fenced)))

    def _write(self, record: Record) -> None:
        assert self._records is not None
        self._records.write(record.SerializeToString())


_START: Final = SessionLog(status=SessionLog.START)


register_writer_factory(
    _SCHEME, SimpleNamespace(open=lambda path: AppendFile(path.removeprefix(f"{_SCHEME}:")))
)
