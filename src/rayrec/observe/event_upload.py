"""Events in an object store, which cannot append: uploaded in the background as small objects."""

import atexit
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, final

from rayrec import storage
from rayrec.config import InputError
from rayrec.observe.event_json import lines_and_events

PART_BYTES: Final = 256 << 10
"""Size above which the next event starts a new part."""
_INTERVAL_S: Final = 2.0
"""Seconds between two uploads of a growing part, unless an event is urgent. Each upload sends the full part."""
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 10.0
"""Maximum seconds between two attempts during a store outage."""
_WAITING_BYTES: Final = 16 << 20
"""Maximum bytes of events waiting during a store outage (about 100,000 events). Later events are lost."""
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


@final
class EventUploader:
    """Background uploader of one writer's lines, as objects FOLDER/WRITER-000001.jsonl, ... `append` never waits for the store.
    Calls `on_loss(count, cause)` when closing drops lines, and `on_outage(cause)` for each failed upload, which is retried."""

    def __init__(self, folder: str, *, on_loss: Callable[[int, str], None], on_outage: Callable[[str], None]) -> None:
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
        self._changed = threading.Condition()
        self._urgent = False
        self._num_flushing = 0
        self._thread: threading.Thread | None = None

    def append(self, line: bytes, *, urgent: bool) -> None:
        """Queue a line for upload: at once if urgent, else within about two seconds. Raises OSError if the line is lost."""
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
        changed, failure_wait_s, next_s = self._changed, 0.0, 0.0
        while True:
            with changed:
                changed.wait_for(lambda: self._closed or self._num_waiting())
                if failure_wait_s:
                    pause_s = failure_wait_s
                    changed.wait_for(lambda: self._closed or self._num_flushing, pause_s - _FIRST_WAIT_S)
                    changed.wait_for(lambda: self._closed, _FIRST_WAIT_S)
                else:
                    pause_s = max(next_s - time.monotonic(), 0.0)
                    changed.wait_for(lambda: self._closed or self._urgent or self._num_flushing, pause_s)
                if self._closed:
                    return
                self._urgent = False
                waiting = [
                    (part, bytes(part.lines), part.num_waiting, part.waiting_bytes) for part in self._parts if part.num_waiting
                ]
            try:
                for part, lines, count, size_bytes in waiting:
                    with storage.retry_timeout(0):
                        storage.write_bytes(storage.join(self._folder, f"{self._writer}-{part.number:06d}.jsonl"), lines)
                    with changed:
                        part.num_waiting -= count
                        part.waiting_bytes -= size_bytes
                        while len(self._parts) > 1 and not self._parts[0].num_waiting:
                            self._parts.popleft()
                        changed.notify_all()
                failure_wait_s = 0.0
                next_s = time.monotonic() + _INTERVAL_S
            except (OSError, InputError) as error:  # Retry permission errors too: credentials may be renewed.
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
        """Return the new (line, event) pairs, sorted by time. The events of each writer keep their order."""
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
        """Yield the new and changed files, the merged file last: it contains the events of parts deleted in the meantime."""
        for file in storage.files_in(parts_folder(self._url)):
            if not self.has_read(file):
                yield file.path
        size_bytes = storage.size_of(self._url)
        if size_bytes is not None and self._sizes.get(self._url) != size_bytes:
            yield self._url
