"""Persistent state and log of a supervisor, from which its successor resumes."""

import dataclasses
import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rayrec import storage
from rayrec.cluster.restart_policy import AttemptHistory
from rayrec.config import InputError
from rayrec.storage import cache


@dataclass(frozen=True)
class State:
    """Persistent record of a run's supervision."""

    name: str
    config_hash: str
    """Hash of the training configuration. Another hash means another run, even under the same name."""
    tally: AttemptHistory = field(default_factory=AttemptHistory)
    submission_id: str | None = None
    submitted: bool = False
    """Whether the head is known to have received that job."""
    running_since: float | None = None
    """Unix time when it was first seen running."""
    seen: float | None = None
    """Unix time when it was last seen running."""
    stopping: bool = False
    """Whether a supervisor, possibly interrupted since, requested its stop."""

    @property
    def duration_s(self) -> float:
        """Seconds for which the current attempt was seen running."""
        return 0.0 if self.running_since is None or self.seen is None else max(0.0, self.seen - self.running_since)


def state_path(name: str) -> str:
    """Return the default state file of a run's supervisor, in $RAYREC_CACHE or ~/.cache/rayrec."""
    return os.path.join(cache.folder(), "supervise", f"{name}.json")


class StateFile:
    """State file and log of one supervisor, locked for exclusive use."""

    def __init__(self, path: str, *, name: str, config_hash: str, note: Callable[[str], None]) -> None:
        """Lock and read the files. Raises InputError if another supervisor uses them or the file is not a supervisor's."""
        self.path = path
        self._note = note
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self._log = open(f"{os.path.splitext(path)[0]}.log", "a", encoding="utf-8")  # noqa: SIM115  # closed by `close`
        try:
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._log.close()
            raise InputError(f"{path}: another supervisor of run {name} is running. End it, or set another --state") from None
        before = _read(path)
        same = before is not None and (before.name, before.config_hash) == (name, config_hash)
        self.state = before if before is not None and same else State(name, config_hash)

    def remember(self, **changes: Any) -> None:
        """Change the state in memory only."""
        self.state = dataclasses.replace(self.state, **changes)

    def write(self, **changes: Any) -> None:
        """Change the state in memory and, atomically, on disk."""
        self.remember(**changes)
        storage.write_json(self.path, dataclasses.asdict(self.state))

    def report(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {self.state.name}  {text}"
        self._note(line)
        self.keep(line)

    def keep(self, text: str) -> None:
        self._log.write(f"{text}\n")
        self._log.flush()

    def close(self) -> None:
        self._log.close()


def _read(path: str) -> State | None:
    if not storage.exists(path):
        return None
    try:
        fields = storage.read_json(path)
        return State(**{**fields, "tally": AttemptHistory(**fields["tally"])})
    except (TypeError, KeyError) as error:
        raise InputError(f"{path}: must be a supervisor's state file ({error}). Delete it or set another --state") from None
