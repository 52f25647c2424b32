"""The append-only JSONL event file of a run: written by many processes, the single source of every view of the run."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, final

from rayrec import storage
from rayrec.config import InputError
from rayrec.observe.event_lines import TORN_LINE, events_in, line_of
from rayrec.observe.event_parts import CLOSE_S, EventParts, RemoteEvents, parts_folder
from rayrec.observe.run_summary import VALIDATION, RunSummary

if TYPE_CHECKING:
    import pandas

_logger = logging.getLogger(__name__)

KINDS: Final = {
    "run": "A driver started: recipe, name, config hash, versions, and the settings that a resume changed.",
    "prepared": "The data is indexed and the Preprocessor is complete: seconds, rows, faults, vocabularies.",
    "attempt": "Workers are being started: the number of the attempt and of its workers.",
    "start": "An attempt trains: the step it starts at, the goal, workers, peak speed, which checkpoint it resumes from.",
    "start_up": "How long the stages of the start took, of the driver or of a worker.",
    "warm_start": "What the run takes over from the checkpoint of `init_from`: tables, rows kept and rows that are new.",
    "step": "Progress, every `log_every` steps: loss, learning rates, rows/s, share of time blocked, seconds of each phase.",
    "data": "What data tasks did since the last such event: rows/s, CPU, waiting, for each stage.",
    "evaluate": "Metrics of an evaluation; `set` is validation or test; `counted`: whether early stopping and `plateau` use it.",
    "plateau": "Learning rates were lowered, because evaluations no longer improve.",
    "early_stop": "Training ends before its last step: the best step and its score.",
    "checkpoint": "A checkpoint is complete: path, bytes, seconds of writing, seconds for which training waited.",
    "checkpoint_late": "A save was skipped or is late: the one before is still being written, or storage fails.",
    "checkpoint_slow": "A save took longer than `failure.grace_s`: a preempted run could lose it.",
    "checkpoint_damaged": "A checkpoint was skipped on resume: its path and what is wrong with it.",
    "checkpoint_repaired": "A file that checkpoints share was written again from its source.",
    "cpu_contention": "Other processes use a worker's CPUs: its rank, node, and the share of time that a thread waited.",
    "stop": "Workers agreed to stop: at which step, why, whether the run ends, and `paused` if a later call was to resume it.",
    "failure": "An attempt failed: the cause; `last` if the run ends with it.",
    "finish": "The last step is done: what the worker measured over its attempt.",
    "samples": "Texts or images that the final model produced, for the report.",
    "profile": "Steps were recorded with torch.profiler: where the files are.",
    "profile_failed": "A requested profile could not be recorded: why.",
    "summary": "The run is finished: the content of summary.json.",
    TORN_LINE: "The line before is incomplete, because a process or the disk failed while it was written.",
}
"""What each kind of event reports."""


@final
class EventWriter:
    """Appends events to a JSONL file; any number of processes and threads may write to the same file.

    To a local file every event is one `write` to a descriptor opened with O_APPEND, so that lines never interleave (POSIX
    local file systems; NFS does not promise it). If the file ends in an incomplete line, which a crash or a full disk
    leaves, the next writer ends that line and reports it, so that `read_events` can skip it.

    To a URL RUN/events.jsonl events are uploaded in the background, as parts in RUN/events/: those of kind step within
    about two seconds, others at once. What is not uploaded is lost where the process is killed. `merge_events` makes one
    file of the parts.

    A failing disk or store never stops training: an event that cannot be kept is lost, counted in `num_lost` and warned
    about once.
    """

    def __init__(self, path: str | Path) -> None:
        url = _url(path)
        self.path: Final = url or Path(path)
        self.num_lost = 0
        self._sink: Final[EventParts | _LocalFile] = (
            EventParts(parts_folder(url), on_loss=self._lose, on_outage=self._wait) if url else _LocalFile(Path(path))
        )
        self._waited = False
        self._last_s = 0.0

    def write(self, kind: str, **fields: Any) -> None:
        """Append `{"time": <unix seconds>, "kind": kind, **fields}` as one line.

        NumPy and torch scalars and arrays become numbers and lists (a tensor on a device: a device sync), non-finite
        floats null, other objects their `str`. Values under keys that look like a password, secret, token or access key
        become "***" at any depth, and so do texts that look like a key of a well-known service. A number under a token key is a
        count and stays, and so does what is called just `tokens`: those of a text.
        """
        line = line_of({"time": self._now(), "kind": kind, **fields})
        try:
            self._sink.append(line, urgent=kind != "step")
        except OSError as error:
            self._lose(1, str(error))

    def flush(self, *, timeout_s: float = CLOSE_S) -> bool:
        """Upload the events written so far, in at most so long; whether all went. A local file has them already."""
        return self._sink.flush(timeout_s)

    def close(self) -> None:
        """Flush, for at most ten seconds, and close; may be called again. Events written later are lost."""
        self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _now(self) -> float:
        """Seconds since 1970, later than any before: two equal lines are one, read from a part and from the merged file."""
        self._last_s = max(time.time(), self._last_s + 1e-6)  # two threads may agree, but not in all they write
        return self._last_s

    def _lose(self, count: int, cause: str) -> None:
        if not self.num_lost:
            what = "an event is" if count == 1 else f"{count} events are"
            _logger.warning("%s: %s lost (%s); later losses are only counted", self.path, what, cause)
        self.num_lost += count

    def _wait(self, cause: str) -> None:
        if not self._waited:
            self._waited = True
            _logger.warning("%s: events wait in memory, as they cannot be uploaded (%s)", self.path, cause)


@final
class _LocalFile:
    """The end of a local file, fixed where it was torn."""

    def __init__(self, path: Path) -> None:
        self._path: Final = path
        self._descriptor: int | None = None
        self._closed = False

    def append(self, line: bytes, *, urgent: bool) -> None:
        """Raises OSError where the line is lost."""
        if self._closed:
            raise OSError("the event writer is closed")
        if self._descriptor is None:
            self._descriptor = self._opened()
        if _tail_is_torn(self._descriptor):
            line = b"\n" + line_of({"time": time.time(), "kind": TORN_LINE}) + line
        written = os.write(self._descriptor, line)
        # What a full disk cuts off cannot be taken back: other processes may have appended since.
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self._closed = True
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _opened(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _tail_is_torn(descriptor: int) -> bool:
    """Whether the file ends within a line. Asked before every line, as any writer may have been cut off meanwhile, or have
    fixed it. One that is at work this very moment may look torn: what fixes it then is an empty line more, and skipped."""
    size_bytes = os.fstat(descriptor).st_size
    return size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"


def read_events(path: str | Path, *, kinds: Collection[str] | None = None) -> list[dict[str, Any]]:
    """All events of the file in the order written, or those of the given kinds; of a URL with those of its parts, by time.

    An incomplete last line (its writer is at work, or died) is left out. Raises InputError for any other line that is
    not an event, naming file and line, and for a file that does not exist.
    """
    url = _url(path)
    if url:
        events = [event for _, event in RemoteEvents(url).new()]
        if not events and not storage.exists(url):
            raise _no_file(path)
        return [event for event in events if kinds is None or event["kind"] in kinds]
    try:
        with open(path, "rb") as file:
            return [event for event in events_in(file, path) if kinds is None or event["kind"] in kinds]
    except FileNotFoundError:
        raise _no_file(path) from None


def readable_events(path: str | Path) -> list[dict[str, Any]]:
    """What can be read of a file that `read_events` refuses: without lines that are no events, and, at a URL, parts that are
    unavailable; nothing of an unavailable file. For output that is better incomplete than absent."""
    url = _url(path)
    files = [str(path)]
    if url:
        with contextlib.suppress(OSError, InputError):
            files = [*(file.path for file in storage.files_in(parts_folder(url))), url]
    lines: dict[bytes, None] = {}  # a line of a part may be in the merged file as well
    for file in files:
        with contextlib.suppress(OSError, InputError):
            lines |= dict.fromkeys(storage.read_bytes(file).splitlines(keepends=True))
    events: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(InputError):
            events += events_in([line], path)
    return sorted(events, key=lambda event: event.get("time") or 0.0) if url else events


def metrics_dataframe(path: str | Path) -> pandas.DataFrame:
    """A row for each step that was logged or evaluated: step, epoch (passes over the training rows, in part too; NaN if their
    number is not known), rows, loss, rows_per_s, blocked_fraction, validation_METRIC for each metric, and time_s since
    the run began. What was not logged with a step is NaN; steps that were done again after a failure appear once, as they were
    the last time. Raises InputError as `read_events` does, and where pandas is missing."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise InputError("metrics_dataframe: pandas is not installed; `pip install pandas`") from None
    rows = RunSummary(read_events(path, kinds=("run", "prepared", "start", "step", "evaluate"))).curve()
    metrics = dict.fromkeys(name for row in rows for name in row if name.startswith(VALIDATION))
    columns = ["step", "epoch", "rows", "loss", "rows_per_s", "blocked_fraction", *metrics, "time_s"]
    return pandas.DataFrame(rows, columns=columns)


def follow(
    path: str | Path, *, stop: threading.Event, poll_s: float | None = None, idle: Callable[[], None] = lambda: None
) -> Iterator[dict[str, Any]]:
    """Events as they are written, from the first; once `stop` is set, what is left in the file, then the end.

    Looks every `poll_s` seconds (None: 0.2, at a URL 2), and calls `idle` before it waits. The file need not exist yet. An
    outage of a store is waited for, but not once `stop` is set. Raises InputError as `read_events` does.
    """
    url = _url(path)
    if url:
        return _followed(url, stop=stop, poll_s=2.0 if poll_s is None else poll_s, idle=idle)
    lines = _growing_lines(Path(path), stop=stop, poll_s=0.2 if poll_s is None else poll_s, idle=idle)
    return events_in(lines, path)


def merge_events(path: str | Path) -> None:
    """Makes the parts of a URL's events the one file that they are of; nothing to do for a local one.

    For the end of a run, when its writers are closed: an event uploaded at this very moment may be lost. If it dies, or
    writers go on later, nothing is doubled: readers know events that they meet twice.
    """
    url = _url(path)
    if not url:
        return
    remote = RemoteEvents(url)
    lines = [line for line, _ in remote.new()]
    folder = parts_folder(url)
    if not storage.files_in(folder):
        return
    storage.write_bytes(url, b"".join(lines))
    if all(remote.has_read(file) for file in storage.files_in(folder)):  # else a writer is at work
        storage.remove_folder(folder)


def _followed(url: str, *, stop: threading.Event, poll_s: float, idle: Callable[[], None]) -> Iterator[dict[str, Any]]:
    remote = RemoteEvents(url)
    while True:
        stopping = stop.is_set()  # read before the parts, so that nothing written before the stop is missed
        new: list[tuple[bytes, dict[str, Any]]] = []
        try:
            with storage.patience(0):
                new = remote.new()
        except OSError as error:  # what it holds is told once it is back
            if stopping:
                _logger.warning("%s: the last events cannot be shown (%s)", url, error)
        for _, event in new:
            yield event
        if stopping:
            return
        idle()
        stop.wait(poll_s)


def _url(path: str | Path) -> str | None:
    return str(path) if storage.is_url(str(path)) else None


def _growing_lines(path: Path, *, stop: threading.Event, poll_s: float, idle: Callable[[], None]) -> Iterator[bytes]:
    while not path.exists():
        if stop.wait(poll_s) and not path.exists():
            return
    with path.open("rb") as file:
        partial = b""
        while True:
            stopping = stop.is_set()  # read before the file, so that nothing written before the stop is missed
            for piece in file:
                partial += piece
                if partial.endswith(b"\n"):
                    yield partial
                    partial = b""
            if stopping:
                return
            idle()
            stop.wait(poll_s)


def _no_file(path: str | Path) -> InputError:
    return InputError(f"{path}: no such event file; give the events.jsonl of a run")
