"""Sends requests to a running server: change its model, or stop."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, Final

from rayrec.cluster import connection
from rayrec.config import InputError
from rayrec.inference.model import source_of
from rayrec.serve.deployment import (
    APPLICATION,
    CoordinatorHandle,
    end_coordinator,
    end_serve,
    find_coordinator,
    quieten,
)
from rayrec.serve.protocol import Change

_CHANGE_S: Final = 600.0
"""How long a change of the model may take, the loading of it included."""


def swap(path: str, *, address: str | None) -> dict[str, Any]:
    """Gives the server of a cluster another model, a checkpoint, run or export; returns what it serves once all replicas do.

    Raises InputError where no server runs there, and where the model cannot be loaded or takes other columns: the one before
    then goes on.
    """
    return _changed(address, "swap", source_of(path))


def roll_back(*, address: str | None) -> dict[str, Any]:
    """Gives the server of a cluster back the model before. Raises InputError where there is none."""
    return _changed(address, "roll_back")


def set_shadow(path: str | None, *, address: str | None) -> dict[str, Any]:
    """Has the server of a cluster score every row with another model too, or, with None, no longer."""
    return _changed(address, "set_shadow", source_of(path) if path else None)


def stop(*, address: str | None) -> dict[str, Any]:
    """Ends the server of a cluster, also one whose own process was killed: requests in flight are answered first. Returns what
    it served."""
    from ray import serve

    with _reached(address) as coordinator:
        import ray

        found: dict[str, Any] = ray.get(coordinator.describe.remote())
        serve.delete(APPLICATION)
        end_serve(coordinator)
        end_coordinator(coordinator)
        return found


def _changed(address: str | None, method: str, *arguments: str | None) -> dict[str, Any]:
    with _reached(address) as coordinator:
        import ray

        change = request(coordinator, method, *arguments)
        if change.state == "failed":
            raise InputError(f"{change.cause} (the model before goes on)")
        if change.state != "done":
            raise InputError(f"not all replicas have changed over within {_CHANGE_S:g} s; see the server's /metrics")
        found: dict[str, Any] = ray.get(coordinator.describe.remote())
        return {"version": change.version, **found}


@contextlib.contextmanager
def _reached(address: str | None) -> Iterator[CoordinatorHandle]:
    """The coordinator of the server that runs on a cluster."""
    import ray

    joined = ray.is_initialized()
    address = address or os.environ.get("RAY_ADDRESS")
    if address in (None, "", "local") and not joined:
        raise InputError("which server? give --cluster.address, which `rayrec serve` printed when it started")
    if not joined:
        quieten()
    connection.connect(address, num_cpus=None, object_store_bytes=None, log_to_driver=False)
    try:
        coordinator = find_coordinator()
        if coordinator is None:
            raise InputError(f"{address}: no `rayrec serve` runs on this Ray cluster")
        yield coordinator
    finally:
        if not joined:
            ray.shutdown()


def request(
    coordinator: CoordinatorHandle, method: str, *arguments: str | None, timeout_s: float = _CHANGE_S
) -> Change:
    """Request a change, and wait until all replicas have made it or one cannot. A request that a restart of the coordinator lost
    is made again. Raises InputError if it is refused, or the server ended."""
    import ray

    number: int | None = None
    deadline_s = time.monotonic() + timeout_s
    while True:
        change = Change("lost")
        try:
            if number is not None:
                change = ray.get(coordinator.change.remote(number))
            if change.state == "lost":
                answer: int | str | None = ray.get(coordinator.request.remote(method, *arguments))
                if isinstance(answer, str):
                    raise InputError(answer)
                number = answer
        except ray.exceptions.ActorUnavailableError:
            pass  # Ray restarts it
        except ray.exceptions.ActorDiedError:
            raise InputError(f"{method}: the server was stopped") from None
        if change.state in ("done", "failed") or time.monotonic() > deadline_s:
            return change
        time.sleep(0.1)
