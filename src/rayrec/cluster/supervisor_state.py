"""What a supervisor is told, and what it remembers and writes down, so that a new one resumes where it stopped."""

import dataclasses
import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rayrec import storage
from rayrec.cluster.restart_policy import Tally
from rayrec.config import InputError
from rayrec.storage import cache


@dataclass(frozen=True)
class State:
    """What a supervisor remembers of a run."""

    name: str
    config_hash: str
    """Of what is trained; another one is another run, for all that the name is the same."""
    tally: Tally = field(default_factory=Tally)
    submission_id: str | None = None
    """The job of the current attempt; None between attempts."""
    submitted: bool = False
    """False while it is not known whether the head has got that job."""
    running_since: float | None = None
    """Unix time when it was first seen to run."""
    seen: float | None = None
    """Unix time when it was last seen to."""
    stopping: bool = False
    """Whether it was told to stop by a supervisor that may have been cut short before it had."""

    @property
    def lived_s(self) -> float:
        """For how long the current attempt was seen to run."""
        return 0.0 if self.running_since is None or self.seen is None else max(0.0, self.seen - self.running_since)


def state_path(name: str) -> str:
    """Where a run's supervisor remembers: in $RAYREC_CACHE, else in ~/.cache/rayrec."""
    return os.path.join(cache.folder(), "supervise", f"{name}.json")


class Notebook:
    """The state file and the log of one supervisor, which it holds alone."""

    def __init__(self, path: str, *, name: str, config_hash: str, note: Callable[[str], None]) -> None:
        """Raises InputError where another supervisor holds it or the file is not one of a supervisor's."""
        self.path = path
        self._note = note
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self._log = open(f"{os.path.splitext(path)[0]}.log", "a", encoding="utf-8")  # noqa: SIM115  # closed by `close`
        try:
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._log.close()
            raise InputError(f"{path}: another supervisor of run {name} is at work; end it, or name another --state") from None
        before = _read(path)
        same = before is not None and (before.name, before.config_hash) == (name, config_hash)
        self.state = before if before is not None and same else State(name, config_hash)

    def remember(self, **changes: Any) -> None:
        """Changes the state, in memory alone."""
        self.state = dataclasses.replace(self.state, **changes)

    def write(self, **changes: Any) -> None:
        """Changes the state, also on disk, where it is the old one or the new one."""
        self.remember(**changes)
        storage.write_json(self.path, dataclasses.asdict(self.state))

    def say(self, text: str) -> None:
        """One event: a line for the user and in the log."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {self.state.name}  {text}"
        self._note(line)
        self.keep(line)

    def keep(self, text: str) -> None:
        """In the log alone."""
        self._log.write(f"{text}\n")
        self._log.flush()

    def close(self) -> None:
        self._log.close()


def _read(path: str) -> State | None:
    if not storage.exists(path):
        return None
    try:
        fields = storage.read_json(path)
        return State(**{**fields, "tally": Tally(**fields["tally"])})
    except (TypeError, KeyError) as error:
        raise InputError(f"{path}: not a supervisor's file ({error}); remove it or name another --state") from None
