"""The actor that decides which model the replicas of a server load, and collects their status and counters."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, final

from rayrec.config import InputError
from rayrec.serve.counters import Snapshot, summed, without_gauges
from rayrec.serve.replica_models import Configured, Source, Status, Wanted

GONE_S: Final = 15.0
"""A replica that has not been heard of for so long is gone."""
ALONE_S: Final = 120.0
"""A coordinator that nobody has called for so long ends: its server was removed. A replica that needs one starts another."""


@dataclass
class _Replica:
    seen_s: float
    status: Status
    snapshot: Snapshot


@dataclass(frozen=True)
class Change:
    """How far a wish for a model has come."""

    state: Literal["pending", "done", "failed"]
    cause: str = ""
    """Why it failed."""
    version: str = ""
    """Of the model, where it is served."""


@final
class CoordinatorState:
    """What the coordinator knows, and what it decides; times are passed in. A model that any replica cannot change over to is not
    wanted any longer: all go back to the one before, so that all answer alike. One that all have served is not given up where
    a replica started later, which serves none yet, fails at it."""

    def __init__(self, path: str) -> None:
        self.wanted = Wanted(0, Source(0, path))
        self._replicas: dict[str, _Replica] = {}
        self._gone: dict[str, Snapshot] = {}
        """What replicas counted that are not heard of; they may come back."""
        self._failures: dict[int, str] = {}
        self._settled: set[int] = set()
        """Serials of models that all replicas had at one time."""
        self._earlier: Source | None = None
        """What was there to go back to before the newest change."""

    def exchange(
        self, replica: str, known: Wanted | None, status: Status, snapshot: Snapshot, *, now_s: float
    ) -> Wanted:
        """One replica tells, and hears what is wanted. `known`: what it heard last; after a restart of the coordinator, which
        remembers nothing, the newest of these is what is wanted."""
        if known and known.generation > self.wanted.generation:
            self.wanted = known
        self._replicas[replica] = _Replica(now_s, status, snapshot)
        self._gone.pop(replica, None)
        self._forget(now_s)
        self._judge(status)
        wanted = self.wanted
        if wanted.model.serial in self._failures and wanted.previous:
            self._change(model=wanted.previous, previous=self._earlier)
        if wanted.shadow and wanted.shadow.serial in self._failures:
            self._change(shadow=None)
        return self.wanted

    def _judge(self, told: Status) -> None:
        for serial, cause in told.failures.items():
            # A replica with another model fails to roll back, and does not retry; one without a model was restarted.
            if serial not in self._settled or told.model:
                self._failures.setdefault(serial, cause)
        model = self.wanted.model
        if all(replica.status.model == model for replica in self._replicas.values()):
            self._settled.add(model.serial)
            self._failures.pop(model.serial, None)

    def configure(self, configured: Configured, *, model: str, shadow: str | None) -> None:
        """Wants the models that the application's configuration names, unless it named the same before: a model that was swapped
        since then stays. `model` and `shadow` are the folders that its paths stand for."""
        before = self.wanted.configured
        if configured == before:
            return
        if configured.model != (before.model if before else None) and model != self.wanted.model.path:
            self.swap(model)
        if configured.shadow != (before.shadow if before else None):
            self.shadow(shadow)
        self._change(configured=configured)

    def swap(self, path: str) -> int:
        """Wants another model, or the same path's again; returns its serial."""
        source = Source(self.wanted.generation + 1, path)
        self._earlier = self.wanted.previous
        self._change(model=source, previous=self.wanted.model)
        return source.serial

    def roll_back(self) -> int:
        """Wants the model before this one; returns its serial. Raises InputError where there is none."""
        if self.wanted.previous is None:
            raise InputError("rollback: this server has had no other model since it started (or went back already)")
        self._change(model=self.wanted.previous, previous=self.wanted.model)
        return self.wanted.model.serial

    def shadow(self, path: str | None) -> int | None:
        """Wants every row scored with another model, too, and returns its serial; None: no longer."""
        source = Source(self.wanted.generation + 1, path) if path else None
        self._change(shadow=source)
        return source.serial if source else None

    def change(self, serial: int) -> Change:
        """How far the wish for a model has come."""
        if serial in self._failures:
            return Change("failed", cause=self._failures[serial])
        statuses = [replica.status for replica in self._replicas.values()]
        for status in statuses:
            as_model = status.model and status.model.serial == serial
            as_shadow = status.shadow and status.shadow.serial == serial
            if not (as_model or as_shadow):
                return Change("pending")
        if not statuses:
            return Change("pending")
        last = statuses[-1]
        return Change(
            "done", version=last.version if last.model and last.model.serial == serial else last.shadow_version
        )

    def collect(self) -> Snapshot:
        """What all replicas have counted, also those that are gone."""
        return summed([*self._gone.values(), *(replica.snapshot for replica in self._replicas.values())])

    def describe(self) -> dict[str, Any]:
        """Plain JSON values: what is wanted, what each replica serves, and by serial why models were not taken."""
        wanted = self.wanted
        return {
            "model": wanted.model.path,
            "previous": wanted.previous.path if wanted.previous else None,
            "shadow": wanted.shadow.path if wanted.shadow else None,
            "replicas": {
                name: {"model": replica.status.version, "shadow": replica.status.shadow_version or None}
                for name, replica in self._replicas.items()
            },
            "failures": {str(serial): cause for serial, cause in self._failures.items()},
        }

    def _change(self, **changes: Any) -> None:
        self.wanted = replace(self.wanted, generation=self.wanted.generation + 1, **changes)

    def _forget(self, now_s: float) -> None:
        for name, replica in list(self._replicas.items()):
            if now_s - replica.seen_s > GONE_S:
                self._gone[name] = without_gauges(replica.snapshot)
                del self._replicas[name]


@final
class Coordinator:
    """The coordinator_state as a Ray actor."""

    def __init__(self, path: str, *, started_serve: bool = False, alone_s: float = ALONE_S) -> None:
        """`started_serve`: whether Ray Serve was started for this server, and ends with it."""
        self._state, self._started_serve, self._alone_s = CoordinatorState(path), started_serve, alone_s
        self._heard_s = time.monotonic()
        threading.Thread(target=self._end_alone, name="alone", daemon=True).start()

    def _end_alone(self) -> None:
        import ray

        while time.monotonic() - self._heard_s < self._alone_s:
            time.sleep(self._alone_s / 10)
        ray.kill(ray.get_runtime_context().current_actor)

    def configure(self, configured: Configured, model: str, shadow: str | None) -> None:
        self._heard_s = time.monotonic()
        self._state.configure(configured, model=model, shadow=shadow)

    def started_serve(self) -> bool:
        return self._started_serve

    def exchange(self, replica: str, known: Wanted | None, status: Status, snapshot: Snapshot) -> Wanted:
        self._heard_s = time.monotonic()
        return self._state.exchange(replica, known, status, snapshot, now_s=self._heard_s)

    def collect(self, replica: str, known: Wanted | None, status: Status, snapshot: Snapshot) -> Snapshot:
        """What all have counted; first takes in what is newer of the replica that asks."""
        self.exchange(replica, known, status, snapshot)
        return self._state.collect()

    def swap(self, path: str) -> int:
        return self._state.swap(path)

    def roll_back(self) -> int | str:
        """The serial, or why not."""
        try:
            return self._state.roll_back()
        except InputError as error:
            return str(error)

    def shadow(self, path: str | None) -> int | None:
        return self._state.shadow(path)

    def change(self, serial: int) -> Change:
        return self._state.change(serial)

    def describe(self) -> dict[str, Any]:
        self._heard_s = time.monotonic()
        return self._state.describe()
