"""The actor that decides which model the replicas of a server load, and collects their status and counters."""

from __future__ import annotations

import threading
import time
from typing import Any, Final, Literal, final

from rayrec.config import InputError
from rayrec.serve.counters import Snapshot, summed, without_gauges
from rayrec.serve.protocol import Change, Configured, Decisions, Source, Status, Wanted

GONE_S: Final = 15.0
"""A replica that has not been heard of for so long is gone."""
ALONE_S: Final = 120.0
"""A coordinator that nobody has called for so long ends: its server was removed. A replica that needs one starts another."""


@final
class CoordinatorState:
    """Decisions about models, and the counters of replicas, also of those that are gone. Times are arguments."""

    def __init__(self, path: str, *, restart: int = 0, now_s: float = 0.0) -> None:
        """`restart`: smallest number for requests after a restart. Nothing is decided then until every replica has reported, or
        is gone. 0: a new server."""
        self.decisions = Decisions(Wanted(0, Source(0, path)), first=max(1, restart), complete=not restart)
        self._complete_s = now_s + GONE_S
        self._seen_s: dict[str, float] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._gone: dict[str, Snapshot] = {}
        """Counters of replicas that are not heard of. They may come back."""

    def exchange(
        self, replica: str, known: Wanted | None, status: Status, snapshot: Snapshot, *, now_s: float
    ) -> Wanted | None:
        """Take in a replica's status, and return the wanted models, or None if they are not known yet after a restart."""
        self.count(replica, snapshot)
        self._seen_s[replica] = now_s
        self.decisions = self.decisions.hear(replica, known, status)
        self._pass_time(now_s)
        return self.decisions.answer

    def count(self, replica: str, snapshot: Snapshot) -> None:
        """Take in the counters of a replica."""
        self._snapshots[replica] = snapshot
        self._gone.pop(replica, None)

    def configure(self, configured: Configured, *, model: str, shadow: str | None, now_s: float) -> bool:
        """Request the models of an application's configuration. Returns False if it must be called again later."""
        self._pass_time(now_s)
        if self.decisions.complete:
            self.decisions = self.decisions.configure(configured, model=model, shadow=shadow)
        return self.decisions.complete

    def request(self, method: Literal["swap", "roll_back", "set_shadow"], *arguments: Any) -> int | str | None:
        """Call a method of the decisions. Returns the number of the request, the cause if it is refused, or None if it must be
        made again later: no replica serves a model yet, or not all are known after a restart."""
        if not self.decisions.complete or self.decisions.wanted.schema is None:
            return None
        try:
            self.decisions, number = getattr(self.decisions, method)(*arguments)
        except InputError as error:
            return str(error)
        return int(number)

    def collect(self) -> Snapshot:
        """Return the counters of all replicas, also of those that are gone."""
        return summed([*self._gone.values(), *self._snapshots.values()])

    def _pass_time(self, now_s: float) -> None:
        for name, seen_s in list(self._seen_s.items()):
            if now_s - seen_s > GONE_S:
                self._gone[name] = without_gauges(self._snapshots.pop(name))
                del self._seen_s[name]
                self.decisions = self.decisions.forget(name)
        if not self.decisions.complete and now_s > self._complete_s:
            self.decisions = self.decisions.complete_restart()


@final
class Coordinator:
    """The coordinator_state as a Ray actor."""

    def __init__(
        self, path: str, *, started_serve: bool = False, restarted: bool = False, alone_s: float = ALONE_S
    ) -> None:
        """`started_serve`: whether Ray Serve was started for this server, and ends with it. `restarted`: whether replicas may
        know more than this actor, also if Ray did not restart it."""
        import ray

        restarted = restarted or ray.get_runtime_context().was_current_actor_reconstructed
        self._heard_s = time.monotonic()
        restart = time.time_ns() // 1_000_000 if restarted else 0
        self._state = CoordinatorState(path, restart=restart, now_s=self._heard_s)
        self._started_serve, self._alone_s = started_serve, alone_s
        threading.Thread(target=self._end_alone, name="alone", daemon=True).start()

    def _end_alone(self) -> None:
        import ray

        while time.monotonic() - self._heard_s < self._alone_s:
            time.sleep(self._alone_s / 10)
        ray.kill(ray.get_runtime_context().current_actor)

    def configure(self, configured: Configured, model: str, shadow: str | None) -> bool:
        self._heard_s = time.monotonic()
        return self._state.configure(configured, model=model, shadow=shadow, now_s=self._heard_s)

    def started_serve(self) -> bool:
        return self._started_serve

    def exchange(self, replica: str, known: Wanted | None, status: Status, snapshot: Snapshot) -> Wanted | None:
        self._heard_s = time.monotonic()
        return self._state.exchange(replica, known, status, snapshot, now_s=self._heard_s)

    def collect(self, replica: str, snapshot: Snapshot) -> Snapshot:
        """Return the counters of all replicas, with newer ones of the replica that asks."""
        self._state.count(replica, snapshot)
        return self._state.collect()

    def request(self, method: Literal["swap", "roll_back", "set_shadow"], *arguments: Any) -> int | str | None:
        return self._state.request(method, *arguments)

    def change(self, request: int) -> Change:
        return self._state.decisions.change(request)

    def describe(self) -> dict[str, Any]:
        self._heard_s = time.monotonic()
        return self._state.decisions.describe()
