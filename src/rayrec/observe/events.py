"""The append-only JSONL event file of a run: written by many processes, the single source of every view of the run."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, final

from rayrec.config import Config, InputError

_logger = logging.getLogger(__name__)

_TORN_LINE: Final = "torn_line"  # kind of the event that follows, and excuses, a line that a crash left incomplete
_SECRET: Final = re.compile(r"password|passwd|secret|accesskey|apikey|credential")
_TOKEN: Final = re.compile(r"token(_|$)|tokens$")  # hf_token, token_file; not tokenizer, tokens_per_s


@final
class EventWriter:
    """Appends events to a local JSONL file; any number of processes and threads may write to the same file.

    Every event is one `write` to a descriptor opened with O_APPEND, so that lines never interleave (POSIX local file
    systems; NFS does not promise it). A failing disk never stops training: the event is lost, counted in `num_lost` and
    warned about once. If the file ends in an incomplete line, which a crash or a full disk leaves, the writer ends that
    line and says so, so that `read_events` can skip it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path: Final = Path(path)
        self.num_lost = 0
        self._descriptor: int | None = None
        self._closed = False
        self._tail_is_torn = False

    def write(self, kind: str, **fields: Any) -> None:
        """Append `{"time": <unix seconds>, "kind": kind, **fields}` as one line.

        NumPy and torch scalars and arrays become numbers and lists (a tensor on a device: a device sync), non-finite
        floats null, other objects their `str`. Values under keys that look like a password, secret, token or access key
        become "***" at any depth; a number under a token key is a count and stays.
        """
        line = _line({"time": time.time(), "kind": kind, **fields})
        try:
            if self._closed:
                raise OSError("the event writer is closed")
            if self._descriptor is None:
                self._descriptor = self._opened()
            if self._tail_is_torn:
                line = b"\n" + _line({"time": time.time(), "kind": _TORN_LINE}) + line
            written = os.write(self._descriptor, line)
            # What a full disk cuts off cannot be taken back: other processes may have appended since.
            self._tail_is_torn = written < len(line)
            if self._tail_is_torn:
                raise OSError(f"only {written} of {len(line)} bytes were written")
        except OSError as error:
            self.num_lost += 1
            if self.num_lost == 1:
                _logger.warning("%s: an event is lost (%s); later losses are only counted", self.path, error)

    def close(self) -> None:
        """Close the file; may be called again. Events written later are lost."""
        self._closed = True
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(descriptor).st_size
        self._tail_is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        return descriptor


def read_events(path: str | Path, *, kinds: Collection[str] | None = None) -> list[dict[str, Any]]:
    """All events of the file in the order written, or those of the given kinds.

    An incomplete last line (its writer is at work, or died) is left out. Raises InputError for any other line that is
    not an event, naming file and line, and for a file that does not exist.
    """
    try:
        with open(path, "rb") as file:
            return [event for event in _events(file, path) if kinds is None or event["kind"] in kinds]
    except FileNotFoundError:
        raise InputError(f"{path}: no such event file; give the events.jsonl of a run") from None


def follow(path: str | Path, *, stop: threading.Event, poll_s: float = 0.2) -> Iterator[dict[str, Any]]:
    """Events as they are written, from the first; once `stop` is set, what is left in the file, then the end.

    The file need not exist yet. Raises InputError as `read_events` does.
    """
    return _events(_growing_lines(Path(path), stop=stop, poll_s=poll_s), path)


def _growing_lines(path: Path, *, stop: threading.Event, poll_s: float) -> Iterator[bytes]:
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
            stop.wait(poll_s)


def _events(lines: Iterable[bytes], path: str | Path) -> Iterator[dict[str, Any]]:
    torn: int | None = None  # number of the first line that is no event and that nothing has excused yet
    line = b""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue  # two writers may end the same torn line
        event = _parsed(line)
        if event is None:
            torn = torn or number
        elif event["kind"] == _TORN_LINE:
            torn = None
        elif torn is not None:
            raise _not_an_event(path, torn)
        else:
            yield event
    if torn is not None and line.endswith(b"\n"):
        raise _not_an_event(path, torn)


def _not_an_event(path: str | Path, number: int) -> InputError:
    return InputError(f"{path}, line {number}: not an event; delete the line, or restore the file from its origin")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None


def _line(event: Mapping[str, Any]) -> bytes:
    # ASCII and no newline inside: a torn line is never a different valid one.
    return json.dumps(_plain(event), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    """What JSON can hold, with secrets removed; never raises for a strange value."""
    if isinstance(value, float):  # np.float64 is one, too
        return float(value) if math.isfinite(value) else None
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, Config):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): "***" if _is_secret(str(key), item) else _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "detach"):  # a torch tensor, not importing torch
        value = value.detach()
    if hasattr(value, "tolist"):  # NumPy scalar or array, torch tensor
        return _plain(value.tolist())
    return str(value)


def _is_secret(key: str, value: Any) -> bool:
    if value is None:
        return False  # that no password is set is worth knowing
    words = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower())  # authToken: auth_token
    is_number = isinstance(value, int | float) or hasattr(value, "tolist")
    return bool(_SECRET.search(words.replace("_", "")) or (_TOKEN.search(words) and not is_number))
