"""Append-only event file of a run, written by many processes and read by all views: JSON lines in a
file, or, in an object store, which cannot append, small objects uploaded in the background.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, final

from rayrec import storage
from rayrec.config import InputError, packaged_json
from rayrec.observe.event_json import INCOMPLETE_LINE, encode_event, events_in, lines_and_events
from rayrec.observe.run_summary import RunSummary

if TYPE_CHECKING:
    import pandas

PART_BYTES: Final = 256 << 10
"""Size above which the next event starts a new part."""
_INTERVAL_S: Final = 2.0
"""Seconds between two uploads of a growing part, unless an event is urgent. Each upload sends the
full part.
"""
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 10.0
"""Maximum seconds between two attempts during a store outage."""
_WAITING_BYTES: Final = 16 << 20
"""Maximum bytes of events waiting during a store outage (about 100,000 events). Later events are
lost.
"""
CLOSE_S: Final = 10.0
"""Maximum seconds to wait for uploads when closing."""


def parts_folder(url: str) -> str:
    """Return the folder with the parts of RUN/events.jsonl: RUN/events."""
    return url.removesuffix(".jsonl")


@dataclass
class _Part:
    number: int
    lines: bytearray = field(default_factory=bytearray)
    num_waiting: int = 0
    waiting_bytes: int = 0


# Lines on their way to a store, which cannot append. `_changed` guards all fields below it:
#
#   append    adds a line to the last part; starts the thread at the first line
#   thread    waits for lines, then for _INTERVAL_S or an urgent line, and writes each changed part
#             as one object; a failed write is repeated after a growing wait
#   flush     makes the thread skip its waits, until nothing waits
#   close     flushes within CLOSE_S, then drops and reports the rest
#
# A part is closed at PART_BYTES and never written again, so that a run of weeks rewrites little.
@final
class EventUploader:
    """Background uploader of one writer's lines, as objects FOLDER/WRITER-000001.jsonl, ...
    `append` never waits for the store. Calls `on_loss(count, cause)` when closing drops lines, and
    `on_outage(cause)` for each failed upload, which is retried.
    """

    def __init__(
        self, folder: str, *, on_loss: Callable[[int, str], None], on_outage: Callable[[str], None]
    ) -> None:
        self._folder: Final = folder
        self._on_loss: Final = on_loss
        self._on_outage: Final = on_outage
        self._closed = False
        self._begin()
        atexit.register(self.close)

    def _begin(self) -> None:
        self._process = os.getpid()
        self._writer = uuid.uuid4().hex[:12]
        self._parts = deque([_Part(1)])
        # A Condition instead of a queue: the thread, `flush` and `close` wait for different
        # changes.
        self._changed = threading.Condition()
        self._urgent = False
        self._num_flushing = 0
        self._thread: threading.Thread | None = None

    def append(self, line: bytes, *, urgent: bool) -> None:
        """Queue a line for upload: at once if urgent, else within about two seconds. Raises OSError
        if the line is lost.
        """
        if self._process != os.getpid():
            self._begin()  # After a fork: the previous lines and the thread belong to the parent.
        with self._changed:
            if self._closed:
                raise OSError("the event writer is closed")
            if sum(part.waiting_bytes for part in self._parts) + len(line) > _WAITING_BYTES:
                raise OSError("too many events waiting for upload")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="events", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # Thread limit reached, or interpreter shutdown.
                    raise OSError(str(error)) from None
                self._thread = thread
            if len(self._parts[-1].lines) > PART_BYTES:
                self._parts.append(_Part(self._parts[-1].number + 1))
            part = self._parts[-1]
            part.lines += line
            part.num_waiting += 1
            part.waiting_bytes += len(line)
            self._urgent |= urgent
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Upload all queued lines. Returns False if that takes longer than `timeout_s`."""
        if self._process != os.getpid():
            return True
        with self._changed:
            self._num_flushing += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._num_waiting(), timeout_s)
            finally:
                self._num_flushing -= 1

    def close(self) -> None:
        """Flush for at most `CLOSE_S` seconds and drop the remaining lines. Idempotent."""
        atexit.unregister(self.close)
        if self._closed:
            return
        self.flush(CLOSE_S)
        with self._changed:
            self._closed = True
            num_lost = self._num_waiting() if self._process == os.getpid() else 0
            self._changed.notify_all()
        if num_lost:
            self._on_loss(num_lost, f"store unavailable for the last {CLOSE_S:.0f} s")

    def _num_waiting(self) -> int:
        return sum(part.num_waiting for part in self._parts)

    def _run(self) -> None:
        changed = self._changed
        failure_wait_s = 0.0
        next_s = 0.0
        # Waits outlast any outage, because events are worth keeping as long as the process lives.
        while True:
            with changed:
                changed.wait_for(lambda: self._closed or self._num_waiting())
                if failure_wait_s:
                    pause_s = failure_wait_s
                    changed.wait_for(
                        lambda: self._closed or self._num_flushing, pause_s - _FIRST_WAIT_S
                    )
                    changed.wait_for(lambda: self._closed, _FIRST_WAIT_S)
                else:
                    pause_s = max(next_s - time.monotonic(), 0.0)
                    changed.wait_for(
                        lambda: self._closed or self._urgent or self._num_flushing, pause_s
                    )
                if self._closed:
                    return
                self._urgent = False
                # Copies, since lines are appended while they are written, without the lock.
                waiting = [
                    (part, bytes(part.lines), part.num_waiting, part.waiting_bytes)
                    for part in self._parts
                    if part.num_waiting
                ]
            try:
                for part, lines, count, size_bytes in waiting:
                    with storage.retry_timeout(0):
                        storage.write_bytes(
                            storage.join(self._folder, f"{self._writer}-{part.number:06d}.jsonl"),
                            lines,
                        )
                    with changed:
                        part.num_waiting -= count
                        part.waiting_bytes -= size_bytes
                        while len(self._parts) > 1 and not self._parts[0].num_waiting:
                            self._parts.popleft()
                        changed.notify_all()
                failure_wait_s = 0.0
                next_s = time.monotonic() + _INTERVAL_S
            except (
                OSError,
                InputError,
            ) as error:  # Retry permission errors too: credentials may be renewed.
                self._on_outage(str(error))
                failure_wait_s = min(max(2 * failure_wait_s, _FIRST_WAIT_S), _LONGEST_WAIT_S)


@final
class RemoteEvents:
    """Reader of the events at a URL and in its parts. Returns each event once."""

    def __init__(self, url: str) -> None:
        self._url: Final = url
        self._sizes: dict[str, int] = {}
        self._seen: set[int] = set()

    def has_read(self, file: storage.File) -> bool:
        return self._sizes.get(file.path) == file.size_bytes

    def new(self) -> list[tuple[bytes, dict[str, Any]]]:
        """Return the new (line, event) pairs, sorted by time. The events of each writer keep their
        order.
        """
        new_events: list[tuple[float, bytes, dict[str, Any]]] = []
        sizes: dict[str, int] = {}
        seen: set[int] = set()
        for path in self._changed():
            try:
                data = storage.read_bytes(path)
            except InputError:
                if storage.exists(path):
                    raise
                continue  # Merged in the meantime.
            sizes[path] = len(data)
            latest_s = 0.0
            for line, event in lines_and_events(data.splitlines(keepends=True), path):
                latest_s = max(latest_s, event.get("time") or 0.0)
                # Hashes take 60 MB per million events. One in 10**7 such runs has a collision.
                number = hash(line)
                if number not in self._seen and number not in seen:
                    seen.add(number)
                    new_events.append((latest_s, line, event))
        self._sizes |= sizes  # Only now, so that an outage during the loop loses no events.
        self._seen |= seen
        new_events.sort(key=lambda item: item[0])
        return [(line, event) for _, line, event in new_events]

    def _changed(self) -> Iterator[str]:
        """Yield the new and changed files, the merged file last: it contains the events of parts
        deleted in the meantime.
        """
        for file in storage.files_in(parts_folder(self._url)):
            if not self.has_read(file):
                yield file.path
        size_bytes = storage.size_of(self._url)
        if size_bytes is not None and self._sizes.get(self._url) != size_bytes:
            yield self._url


_logger = logging.getLogger(__name__)

KINDS: Final[dict[str, str]] = packaged_json(__package__, "event_kinds.json")
"""Description of each event kind."""


@final
class EventWriter:
    """Append-only writer of a JSONL event file. Any number of processes and threads may write to
    the same file. Local file: each event is one `write` to a descriptor opened with O_APPEND, so
    lines never interleave on POSIX local file systems (NFS does not guarantee this). If a crash or
    full disk left an incomplete last line, the next writer ends it and adds a `torn_line` event, so
    that `read_events` skips it. URL RUN/events.jsonl: a background thread uploads the events as
    parts to RUN/events/, step events within about two seconds, others at once. Events not uploaded
    are lost if the process is killed. `merge_events` merges the parts. A failing disk or store
    never stops training: lost events are counted in `num_lost`, with one warning.
    """

    def __init__(self, path: str | Path) -> None:
        url = _url(path)
        self.path: Final = url or Path(path)
        self.num_lost = 0
        self._sink: Final[EventUploader | _LocalFile] = (
            EventUploader(parts_folder(url), on_loss=self._lose, on_outage=self._wait)
            if url
            else _LocalFile(Path(path))
        )
        self._waited = False
        self._last_s = 0.0

    def write(self, kind: str, **fields: Any) -> None:
        """Append `{"time": <unix seconds>, "kind": kind, **fields}` as one line. Converts NumPy and
        torch scalars and arrays to numbers and lists (device tensors cause a sync), non-finite
        floats to null and other objects to `str`. Replaces secrets with "***" at any depth: values
        of keys that look like a password, secret, token or access key, and texts that look like a
        key of a well-known service. Numbers under token keys are counts and stay, and so does the
        key `tokens`.
        """
        line = encode_event({"time": self._now(), "kind": kind, **fields})
        try:
            self._sink.append(line, urgent=kind != "step")
        except OSError as error:
            self._lose(1, str(error))

    def flush(self, *, timeout_s: float = CLOSE_S) -> bool:
        """Upload the queued events. Returns False if that takes longer than `timeout_s`. No-op for
        local files.
        """
        return self._sink.flush(timeout_s)

    def close(self) -> None:
        """Flush for at most ten seconds and close. Idempotent. Events written later are lost."""
        self._sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _now(self) -> float:
        """Return strictly increasing unix seconds, because readers drop equal lines as
        duplicates.
        """
        # Events of two threads may share a time, but not all fields.
        self._last_s = max(time.time(), self._last_s + 1e-6)
        return self._last_s

    def _lose(self, count: int, cause: str) -> None:
        if not self.num_lost:
            _logger.warning(
                "Lost %d event(s) of %s: %s. Later losses are only counted.",
                count,
                self.path,
                cause,
            )
        self.num_lost += count

    def _wait(self, cause: str) -> None:
        if not self._waited:
            self._waited = True
            _logger.warning(
                "Keeping events of %s in memory, because uploading failed: %s", self.path, cause
            )


@final
class _LocalFile:
    """Appender for a local event file that repairs an incomplete last line."""

    def __init__(self, path: Path) -> None:
        self._path: Final = path
        self._descriptor: int | None = None
        self._closed = False
        # Two threads' first lines must open the file once, and no line may go to a descriptor that
        # `close` has freed.
        self._lock = threading.Lock()

    def append(self, line: bytes, *, urgent: bool) -> None:
        """Append a line. Raises OSError if it is lost."""
        with self._lock:
            if self._closed:
                raise OSError("the event writer is closed")
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(
                    self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
                )
            if _is_incomplete(self._descriptor):
                line = b"\n" + encode_event({"time": time.time(), "kind": INCOMPLETE_LINE}) + line
            num_bytes = os.write(self._descriptor, line)
        # Do not truncate after a full disk: other processes may have appended since.
        if num_bytes < len(line):
            raise OSError(f"wrote only {num_bytes} of {len(line)} bytes")

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


def _is_incomplete(descriptor: int) -> bool:
    """Return whether the file ends within a line. Checked before every line, because any writer may
    have been cut off or repaired it. A line being written at this moment may look torn. The repair
    then only adds an empty line, which readers skip.
    """
    size_bytes = os.fstat(descriptor).st_size
    return size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"


def read_events(path: str | Path, *, kinds: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Read the events of a file in written order, or of a URL and its parts by time, optionally of
    some kinds only. Skips an incomplete last line. Raises InputError for any other invalid line,
    and for a missing file.
    """
    url = _url(path)
    if url:
        events = [event for _, event in RemoteEvents(url).new()]
        if not events and not storage.exists(url):
            raise _no_file(path)
        return [event for event in events if kinds is None or event["kind"] in kinds]
    try:
        with open(path, "rb") as file:
            return [
                event for event in events_in(file, path) if kinds is None or event["kind"] in kinds
            ]
    except FileNotFoundError:
        raise _no_file(path) from None


def readable_events(path: str | Path) -> list[dict[str, Any]]:
    """Read events leniently, for output that is better incomplete than absent: skip invalid lines
    and unavailable files.
    """
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
    """Return a DataFrame with one row per logged or evaluated step. Columns: step, epoch
    (fractional, NaN if unknown), rows, loss, rows_per_s, blocked_fraction, loss_worker_N if logged,
    validation_METRIC for each metric, and time_s since the run began. Missing values are NaN. Steps
    repeated after a failure appear once, with their last values. Raises InputError as `read_events`
    does, and if pandas is missing.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        raise InputError(
            "metrics_dataframe: pandas is not installed. Run `pip install pandas`."
        ) from None
    rows = RunSummary(
        read_events(path, kinds=("run", "prepared", "start", "step", "evaluate"))
    ).curve()
    columns = ["step", "epoch", "rows", "loss", "rows_per_s", "blocked_fraction"]
    extra = dict.fromkeys(name for row in rows for name in row if name not in (*columns, "time_s"))
    return pandas.DataFrame(rows, columns=[*columns, *extra, "time_s"])


def follow(
    path: str | Path,
    *,
    stop: threading.Event,
    poll_s: float | None = None,
    idle: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """Yield events as they arrive, from the first. After `stop` is set, yield the rest of the file
    and return. Polls every `poll_s` seconds (None: 0.2, or 2 for URLs) and calls `idle` before each
    wait. Waits for a missing file to appear, and through store outages until `stop` is set. Raises
    InputError as `read_events` does.
    """
    url = _url(path)
    if url:
        return _follow_url(url, stop=stop, poll_s=2.0 if poll_s is None else poll_s, idle=idle)
    return events_in(
        _growing_lines(Path(path), stop=stop, poll_s=0.2 if poll_s is None else poll_s, idle=idle),
        path,
    )


def merge_events(path: str | Path) -> None:
    """Merge the event parts at a URL into one file. No-op for local files. Call it after all
    writers are closed: events uploaded at the same time may be lost. An interrupted merge or later
    writers cause no duplicates, as readers drop them.
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
    # Otherwise a writer is active.
    if all(remote.has_read(file) for file in storage.files_in(folder)):
        storage.remove_folder(folder)


def _follow_url(
    url: str, *, stop: threading.Event, poll_s: float, idle: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    remote = RemoteEvents(url)
    while True:
        # Read before the parts, so that nothing written before the stop is missed.
        stopping = stop.is_set()
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


def _growing_lines(
    path: Path, *, stop: threading.Event, poll_s: float, idle: Callable[[], None]
) -> Iterator[bytes]:
    while not path.exists():
        if stop.wait(poll_s) and not path.exists():
            return
    with path.open("rb") as file:
        partial = b""
        while True:
            # Read before the file, so that nothing written before the stop is missed.
            stopping = stop.is_set()
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
