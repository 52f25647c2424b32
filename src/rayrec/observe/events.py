"""Append-only JSONL event file of a run, written by many processes and read by all views."""

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
from rayrec.config import InputError, packaged_json
from rayrec.observe.event_json import INCOMPLETE_LINE, encode_event, events_in
from rayrec.observe.event_upload import CLOSE_S, EventUploader, RemoteEvents, parts_folder
from rayrec.observe.run_summary import RunSummary

if TYPE_CHECKING:
    import pandas

_logger = logging.getLogger(__name__)

KINDS: Final[dict[str, str]] = packaged_json(__package__, "event_kinds.json")
"""Description of each event kind."""


@final
class EventWriter:
    """Append-only writer of a JSONL event file. Any number of processes and threads may write to the same file. Local file: each
    event is one `write` to a descriptor opened with O_APPEND, so lines never interleave on POSIX local file systems (NFS does not
    guarantee this). If a crash or full disk left an incomplete last line, the next writer ends it and adds a `torn_line` event,
    so that `read_events` skips it. URL RUN/events.jsonl: a background thread uploads the events as parts to RUN/events/, step
    events within about two seconds, others at once. Events not uploaded are lost if the process is killed. `merge_events` merges
    the parts. A failing disk or store never stops training: lost events are counted in `num_lost`, with one warning."""

    def __init__(self, path: str | Path) -> None:
        url = _url(path)
        self.path: Final = url or Path(path)
        self.num_lost = 0
        self._sink: Final[EventUploader | _LocalFile] = (
            EventUploader(parts_folder(url), on_loss=self._lose, on_outage=self._wait) if url else _LocalFile(Path(path))
        )
        self._waited = False
        self._last_s = 0.0

    def write(self, kind: str, **fields: Any) -> None:
        """Append `{"time": <unix seconds>, "kind": kind, **fields}` as one line. Converts NumPy and torch scalars and arrays to
        numbers and lists (device tensors cause a sync), non-finite floats to null and other objects to `str`. Replaces secrets
        with "***" at any depth: values of keys that look like a password, secret, token or access key, and texts that look like a
        key of a well-known service. Numbers under token keys are counts and stay, and so does the key `tokens`."""
        line = encode_event({"time": self._now(), "kind": kind, **fields})
        try:
            self._sink.append(line, urgent=kind != "step")
        except OSError as error:
            self._lose(1, str(error))

    def flush(self, *, timeout_s: float = CLOSE_S) -> bool:
        """Upload the queued events. Returns False if that takes longer than `timeout_s`. No-op for local files."""
        return self._sink.flush(timeout_s)

    def close(self) -> None:
        """Flush for at most ten seconds and close. Idempotent. Events written later are lost."""
        self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _now(self) -> float:
        """Return strictly increasing unix seconds, because readers drop equal lines as duplicates."""
        self._last_s = max(time.time(), self._last_s + 1e-6)  # Events of two threads may share a time, but not all fields.
        return self._last_s

    def _lose(self, count: int, cause: str) -> None:
        if not self.num_lost:
            _logger.warning("Lost %d event(s) of %s: %s. Later losses are only counted.", count, self.path, cause)
        self.num_lost += count

    def _wait(self, cause: str) -> None:
        if not self._waited:
            self._waited = True
            _logger.warning("Keeping events of %s in memory, because uploading failed: %s", self.path, cause)


@final
class _LocalFile:
    """Appender for a local event file that repairs an incomplete last line."""

    def __init__(self, path: Path) -> None:
        self._path: Final = path
        self._descriptor: int | None = None
        self._closed = False

    def append(self, line: bytes, *, urgent: bool) -> None:
        """Append a line. Raises OSError if it is lost."""
        if self._closed:
            raise OSError("the event writer is closed")
        if self._descriptor is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if _is_incomplete(self._descriptor):
            line = b"\n" + encode_event({"time": time.time(), "kind": INCOMPLETE_LINE}) + line
        num_bytes = os.write(self._descriptor, line)
        # Do not truncate after a full disk: other processes may have appended since.
        if num_bytes < len(line):
            raise OSError(f"wrote only {num_bytes} of {len(line)} bytes")

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self._closed = True
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _is_incomplete(descriptor: int) -> bool:
    """Return whether the file ends within a line. Checked before every line, because any writer may have been cut off or repaired
    it. A line being written at this moment may look torn. The repair then only adds an empty line, which readers skip."""
    size_bytes = os.fstat(descriptor).st_size
    return size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"


def read_events(path: str | Path, *, kinds: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Read the events of a file in written order, or of a URL and its parts by time, optionally of some kinds only. Skips an
    incomplete last line. Raises InputError for any other invalid line, and for a missing file."""
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
    """Read events leniently, for output that is better incomplete than absent: skip invalid lines and unavailable files."""
    url = _url(path)
    files = [str(path)]
    if url:
        with contextlib.suppress(OSError, InputError):
            files = [*(file.path for file in storage.files_in(parts_folder(url))), url]
    lines: dict[bytes, None] = {}  # The merged file may repeat lines of a part.
    for file in files:
        with contextlib.suppress(OSError, InputError):
            lines |= dict.fromkeys(storage.read_bytes(file).splitlines(keepends=True))
    events: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(InputError):
            events += events_in([line], path)
    return sorted(events, key=lambda event: event.get("time") or 0.0) if url else events


def metrics_dataframe(path: str | Path) -> pandas.DataFrame:
    """Return a DataFrame with one row per logged or evaluated step. Columns: step, epoch (fractional, NaN if unknown), rows,
    loss, rows_per_s, blocked_fraction, loss_worker_N if logged, validation_METRIC for each metric, and time_s since the run
    began. Missing values are NaN. Steps repeated after a failure appear once, with their last values. Raises InputError as
    `read_events` does, and if pandas is missing."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise InputError("metrics_dataframe: pandas is not installed. Run `pip install pandas`.") from None
    rows = RunSummary(read_events(path, kinds=("run", "prepared", "start", "step", "evaluate"))).curve()
    columns = ["step", "epoch", "rows", "loss", "rows_per_s", "blocked_fraction"]
    extra = dict.fromkeys(name for row in rows for name in row if name not in (*columns, "time_s"))
    return pandas.DataFrame(rows, columns=[*columns, *extra, "time_s"])


def follow(
    path: str | Path, *, stop: threading.Event, poll_s: float | None = None, idle: Callable[[], None] = lambda: None
) -> Iterator[dict[str, Any]]:
    """Yield events as they arrive, from the first. After `stop` is set, yield the rest of the file and return. Polls every
    `poll_s` seconds (None: 0.2, or 2 for URLs) and calls `idle` before each wait. Waits for a missing file to appear, and through
    store outages until `stop` is set. Raises InputError as `read_events` does."""
    url = _url(path)
    if url:
        return _follow_url(url, stop=stop, poll_s=2.0 if poll_s is None else poll_s, idle=idle)
    return events_in(_growing_lines(Path(path), stop=stop, poll_s=0.2 if poll_s is None else poll_s, idle=idle), path)


def merge_events(path: str | Path) -> None:
    """Merge the event parts at a URL into one file. No-op for local files. Call it after all writers are closed: events uploaded
    at the same time may be lost. An interrupted merge or later writers cause no duplicates, as readers drop them."""
    url = _url(path)
    if not url:
        return
    remote = RemoteEvents(url)
    lines = [line for line, _ in remote.new()]
    folder = parts_folder(url)
    if not storage.files_in(folder):
        return
    storage.write_bytes(url, b"".join(lines))
    if all(remote.has_read(file) for file in storage.files_in(folder)):  # Otherwise a writer is active.
        storage.remove_folder(folder)


def _follow_url(url: str, *, stop: threading.Event, poll_s: float, idle: Callable[[], None]) -> Iterator[dict[str, Any]]:
    remote = RemoteEvents(url)
    while True:
        stopping = stop.is_set()  # Read before the parts, so that nothing written before the stop is missed.
        new: list[tuple[bytes, dict[str, Any]]] = []
        try:
            with storage.retry_timeout(0):
                new = remote.new()
        except OSError as error:  # Events follow after the outage.
            if stopping:
                _logger.warning("Cannot show the last events of %s: %s", url, error)
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
            stopping = stop.is_set()  # Read before the file, so that nothing written before the stop is missed.
            for chunk in file:
                partial += chunk
                if partial.endswith(b"\n"):
                    yield partial
                    partial = b""
            if stopping:
                return
            idle()
            stop.wait(poll_s)


def _no_file(path: str | Path) -> InputError:
    return InputError(f"{path}: event file not found. Set the events.jsonl of a run.")
