"""Model changes of a running server: all replicas load the new model, then all switch to it, or the
change is rejected. The process that requests a change calls all replicas at once. No model answers
before every replica has loaded it. The register, an actor of the deployment, stores the accepted
state. Replicas report to it every two seconds, so that new ones catch up.
"""

from __future__ import annotations  # Evaluated ones would be pickled with Register, and need rayrec

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from rayrec import storage
from rayrec.checkpoint.discovery import resolve_source
from rayrec.cluster import connection
from rayrec.compat import ray_compat
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import stored_schema
from rayrec.data.features.lookups import swapped_tables
from rayrec.serve.counters import Snapshot
from rayrec.storage.retry import Backoff, retry_errors

if TYPE_CHECKING:
    from rayrec.schema import NamedTable, Schema

APPLICATION: Final = "rayrec"
REGISTER: Final = "register"
REPORT_TIMEOUT_S: Final = 15.0
"""Seconds without a report after which a replica counts as gone."""
CHANGE_S: Final = 600.0
"""Maximum seconds of a model change, loading included."""
CALL_S: Final = 60.0
"""Maximum seconds of a register call. Ray Serve restarts a failed register."""
_REJECT_S: Final = 5.0
"""Maximum seconds to free the memory of rejected models, and to record the cause."""
_BACKOFF: Final = Backoff(first_s=0.2, longest_s=0.2)
_MAX_FAILURES: Final = 8


@dataclass(frozen=True)
class ModelSource:
    """Path of a model, and its swapped tables, at the time of a change. Equal sources mean equal
    models.
    """

    serial: int
    """Serial of the change that introduced the source."""
    path: str
    """Folder of a checkpoint or export."""
    tables: tuple[NamedTable, ...] = ()
    """Side tables in place of those of training, with their contents."""
    origin: int | None = None
    """Serial of an earlier change that introduced the path. None: this one."""

    @property
    def weights(self) -> tuple[int, str]:
        """Key of the weights, which sources that differ in tables share."""
        serial = self.serial if self.origin is None else self.origin
        return serial, self.path

    def with_tables(self, serial: int, tables: Sequence[NamedTable]) -> ModelSource:
        """Return the source of the same weights with other swapped tables, by a change."""
        origin, path = self.weights
        return ModelSource(serial, path, tuple(tables), origin)


@dataclass(frozen=True)
class ConfiguredModels:
    """Model paths in an application's configuration, as written there."""

    model: str
    shadow: str | None = None
    tables: tuple[tuple[str, str], ...] = ()
    """Names of side tables with the files that replace them."""


@dataclass(frozen=True)
class DesiredState:
    """Desired models of all replicas. They are accepted once every replica has loaded them."""

    serial: int
    """Increasing number of the change. 0 is the initial configuration."""
    model: ModelSource
    """Model that answers requests."""
    previous: ModelSource | None = None
    """Previous model, for a rollback."""
    is_rollback: bool = False
    """Whether a rollback, not a swap, made `model` the one that answers."""
    shadow: ModelSource | None = None
    configured: ConfiguredModels | None = None
    """Newest application configuration."""
    schema: Schema | None = None
    """Schema of the requests. None until a replica serves the first model."""
    announced: bool = True
    """Whether the command that started the server has printed its address. Until then the server
    does not report to be ready.
    """

    @property
    def rank(self) -> tuple[int, bool]:
        """Sort key of states, the highest is the newest."""
        return self.serial, self.schema is not None


@dataclass(frozen=True)
class Status:
    """Actual models of a replica."""

    model: ModelSource | None = None
    version: str = ""
    schema: Schema | None = None
    """Schema of the model."""
    shadow: ModelSource | None = None
    shadow_version: str = ""
    failed: ModelSource | None = None
    """Last model that could not be loaded."""
    cause: str = ""
    """Reason for that failure."""


@final
class Register:
    """Actor with the desired and actual models of all replicas, and the counters of replicas that
    are gone. After a failure Ray Serve starts another, which recovers the desired models from the
    replicas' reports. Ray Serve sends its code to processes that may not have rayrec, so it uses
    nothing of rayrec at module level.
    """

    def __init__(self, started_serve: bool = False) -> None:
        """`started_serve` is whether Ray Serve was started for this server and ends with it."""
        self._started_serve = started_serve
        self._desired: DesiredState | None = None
        self._statuses: dict[str, Status] = {}
        self._seen_s: dict[str, float] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._gone: dict[str, Snapshot] = {}
        """Counters of replicas that stopped reporting. They may come back."""
        self._failures: dict[str, str] = {}
        self._leader = ""
        """Replica that applies a new application configuration."""

    def report(
        self,
        replica: str,
        newest: DesiredState,
        status: Status,
        snapshot: Snapshot,
        configured: ConfiguredModels | None,
    ) -> tuple[DesiredState, bool]:
        """Record a replica's status and its newest known models. Returns the desired models, and
        whether this replica must apply `configured`, its application configuration, to all.
        """
        self.count(replica, snapshot)
        self._statuses[replica] = status
        self._seen_s[replica] = time.monotonic()
        self._forget()
        desired = self._desired
        if (
            desired is None
            or newest.rank > desired.rank
            or (desired.schema is None and newest.configured != desired.configured)
        ):
            desired = newest
        if desired.schema is None and status.model == desired.model:
            desired = replace(desired, schema=status.schema)
        if status.failed is not None and status.failed in (desired.model, desired.shadow):
            self.fail(status.failed, status.cause)
            if status.failed == desired.shadow:
                desired = replace(desired, shadow=None)
        elif all(one.model == desired.model for one in self._statuses.values()):
            self._failures.pop(str(desired.model.serial), None)
        self._desired = desired
        leads = configured not in (None, desired.configured) and self._leader in ("", replica)
        if leads:
            self._leader = replica
        return desired, leads

    def desired(self) -> DesiredState | None:
        """Return the accepted models, None until a replica reports that it serves one."""
        return self._desired if self._desired and self._desired.schema else None

    def accept(self, new: DesiredState, before: int) -> bool:
        """Accept a change based on the one with the serial `before`. Returns False if another
        change came since then.
        """
        if self._desired is None or self._desired.serial not in (before, new.serial):
            return False
        self._desired = new
        self._leader = ""
        return True

    def fail(self, source: ModelSource, cause: str) -> None:
        """Record why a model could not be loaded."""
        self._failures[str(source.serial)] = cause
        for serial in list(self._failures)[:-_MAX_FAILURES]:
            del self._failures[serial]

    def count(self, replica: str, snapshot: Snapshot) -> None:
        """Record the counters of a replica."""
        self._snapshots[replica] = snapshot
        self._gone.pop(replica, None)

    def collect(self, replica: str, snapshot: Snapshot) -> Snapshot:
        """Return the summed counters of all replicas, past ones included, after an update by the
        calling replica.
        """
        from rayrec.serve.counters import sum_snapshots

        self.count(replica, snapshot)
        self._forget()
        return sum_snapshots([*self._gone.values(), *self._snapshots.values()])

    def waiting(self, new: DesiredState) -> tuple[list[str], str]:
        """Return the replicas that lack the models, and the cause if one of them cannot load them,
        else an empty string.
        """
        self._forget()
        if self._desired and self._desired.serial > new.serial:  # A later change replaced this one
            return [], ""
        missing = [
            (name, status)
            for name, status in self._statuses.items()
            if (status.model, status.shadow) != (new.model, new.shadow)
        ]
        causes = [
            status.cause
            for _, status in missing
            if status.failed and status.failed in (new.model, new.shadow)
        ]
        return [name for name, _ in missing], (causes or [""])[0]

    def serving(self) -> list[str]:
        """Return the replicas that serve a model."""
        self._forget()
        return [name for name, status in self._statuses.items() if status.model]

    def schema(self) -> Schema | None:
        """Return the schema of the accepted model, None until a replica reports that it serves
        it.
        """
        self._forget()
        if self._desired is None:
            return None
        model = self._desired.model
        schemas = (each.schema for each in self._statuses.values() if each.model == model)
        return next(schemas, None)

    def describe(self) -> dict[str, Any]:
        """Return JSON values: desired models, short content hashes of the model's side tables,
        served models by replica, causes of failures by change.
        """
        schema = self.schema()
        tables = schema.tables if schema else ()
        desired = self._desired
        return {
            "model": desired.model.path if desired else None,
            "previous": desired.previous.path if desired and desired.previous else None,
            "shadow": desired.shadow.path if desired and desired.shadow else None,
            "tables": {table.name: table.short_content for table in tables},
            "replicas": {
                name: {"model": status.version, "shadow": status.shadow_version or None}
                for name, status in self._statuses.items()
            },
            "failures": dict(self._failures),
        }

    def started_serve(self) -> bool:
        return self._started_serve

    def _forget(self) -> None:
        """Remove replicas without a recent report. Their counters stay, without gauges."""
        from rayrec.serve.counters import without_gauges

        for name, seen_s in list(self._seen_s.items()):
            if time.monotonic() - seen_s > REPORT_TIMEOUT_S:
                self._gone[name] = without_gauges(self._snapshots.pop(name))
                del self._seen_s[name], self._statuses[name]
                if self._leader == name:
                    self._leader = ""


# -- changes of the desired models


def swap_model(
    desired: DesiredState, path: str, tables: tuple[NamedTable, ...] = ()
) -> DesiredState:
    """Return the desired models after a swap of the main model.

    Args:
        desired: Models before.
        path: Folder of a checkpoint or export.
        tables: Side tables instead of the trained ones, by name, with their contents.
    """
    return _with_model(desired, ModelSource(_next(desired), path, tables))


def swap_tables(desired: DesiredState, tables: Sequence[NamedTable]) -> DesiredState:
    """Return the desired models after a swap of side tables of the main model. Its weights, and
    other swapped tables, stay.
    """
    swapped = {table.name: table for table in (*desired.model.tables, *tables)}
    model = desired.model.with_tables(_next(desired), tuple(swapped.values()))
    return _with_model(desired, model)


def follow_model(desired: DesiredState, path: str) -> DesiredState:
    """Return the desired models after a swap to a checkpoint of a followed run. Side tables that
    were swapped under a checkpoint of the same run stay.
    """
    run = storage.parent_folder(path)
    if run != storage.parent_folder(desired.model.path):
        return swap_model(desired, path)
    return swap_model(desired, path, desired.model.tables)


def _with_model(desired: DesiredState, model: ModelSource) -> DesiredState:
    """Return the desired models with another main model, introduced by this change."""
    return replace(
        desired,
        serial=model.serial,
        model=model,
        previous=desired.model,
        is_rollback=False,
    )


def revert_model(desired: DesiredState) -> DesiredState:
    """Return the desired models with the previous main model. Raises InputError without one."""
    if desired.previous is None:
        raise InputError("rollback: this server has had no other model since it started")
    return replace(
        desired,
        serial=_next(desired),
        model=desired.previous,
        previous=desired.model,
        is_rollback=True,
    )


def change_shadow(desired: DesiredState, path: str | None) -> DesiredState:
    """Return the desired models with another shadow model, or without one."""
    serial = _next(desired)
    return replace(desired, serial=serial, shadow=ModelSource(serial, path) if path else None)


def apply_configuration(desired: DesiredState, configured: ConfiguredModels) -> DesiredState:
    """Return the desired models after a change of the application's configuration. Unchanged fields
    keep swapped models.
    """
    before = desired.configured or ConfiguredModels("")
    new = replace(desired, serial=_next(desired), configured=configured)
    if configured.model != before.model:
        path = resolve_source(configured.model)
        tables = configured_tables(path, configured)
        if path != desired.model.path or tables != desired.model.tables:
            new = swap_model(new, path, tables)
    elif configured.tables != before.tables:
        tables = configured_tables(desired.model.path, configured)
        new = _with_model(new, desired.model.with_tables(_next(new), tables))
    if configured.shadow != before.shadow:
        new = change_shadow(new, resolve_source(configured.shadow) if configured.shadow else None)
    return new


def configured_tables(path: str, configured: ConfiguredModels) -> tuple[NamedTable, ...]:
    """Return the configured side tables of a model with their contents now, built. Raises
    InputError for one that the model cannot look up.
    """
    if not configured.tables:
        return ()
    return swapped_tables(stored_schema(path), dict(configured.tables))


def announce(desired: DesiredState) -> DesiredState:
    """Return the same models of a server that reports to be ready from now on."""
    return replace(desired, serial=_next(desired), announced=True)


def keep_models(desired: DesiredState, configured: ConfiguredModels) -> DesiredState:
    """Return the desired models after loading a new application configuration failed."""
    return replace(desired, serial=_next(desired), configured=configured)


def _next(desired: DesiredState) -> int:
    """Return a new serial, which grows also if a restart of the register lost a change."""
    return max(time.time_ns(), desired.serial + 1)


# -- a running server


# A change of the served models, by a command or a leading replica. Two phases, so that all replicas
# serve one model or keep the old one:
#
#   step       register                      replicas
#   desired    returns the accepted state    -
#   load       -                             load the new models as standby; any failure rejects
#   accept     stores the state, if its      -
#              serial is still the former
#   (raced)    returns False: begin again on top of the other change
#   switch     -                             standby becomes serving, without a gap
#   waiting    lists replicas that lag       report at each health check, and switch by themselves
#   drop,fail  records the cause             free the models that were rejected
#
# Replicas that start meanwhile load the accepted state. A register that restarts gets it from their
# reports, newest first. Serials only grow, so a lost change cannot return.
@final
class Control:
    """Client of a running server's register and replicas."""

    def __init__(self, application: str, find_register: Callable[[], Any] | None = None) -> None:
        """`find_register` returns the register's actor or raises ValueError. None searches the
        cluster.
        """
        self._application = application
        self._register = None
        self._find = find_register or partial(
            ray_compat.find_shared_actor, application, APPLICATION, REGISTER
        )

    def call_register(self, method: str, *arguments: Any, timeout_s: float = CALL_S) -> Any:
        """Call a method of the register, and retry while Ray Serve restarts it. Raises InputError
        if the server was stopped.
        """
        import ray
        from ray import serve

        deadline_s = time.monotonic() + timeout_s

        def call() -> Any:
            self._register = self._register or self._find()
            reply = getattr(self._register, method).remote(*arguments)
            return ray.get(reply, timeout=max(0.0, deadline_s - time.monotonic()))

        # Ray Serve restarts a lost register within seconds. The application's absence is the only
        # sign of a stopped server, since both look the same to a call.
        def forget_register(error: Exception) -> None:
            self._register = None
            if self._application not in serve.status().applications:
                raise InputError(f"{method}: the server was stopped") from None

        return retry_errors(
            call,
            (ValueError, ray.exceptions.RayActorError),
            limit_s=timeout_s,
            backoff=_BACKOFF,
            on_failure=forget_register,
            wait=time.sleep,
        )

    def change(
        self, changed: Callable[[DesiredState], DesiredState], *, timeout_s: float = CHANGE_S
    ) -> dict[str, Any]:
        """Change the models from the current to the state that `changed` returns. Returns
        `describe` after all have switched. Raises InputError if a replica cannot load a new model.
        All replicas keep their models then.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            # The first model is being loaded, or the register restarts
            while (desired := self.call_register("desired")) is None:
                _wait(deadline_s, timeout_s)
            new = changed(desired)
            try:
                self._load(new, deadline_s, timeout_s)
                # Compare and set: the register takes the state only if nobody changed it since
                # `desired` was read.
                if self.call_register("accept", new, desired.serial):
                    break
            except BaseException as error:
                rejected = new.shadow if new.model == desired.model else new.model
                self._reject(
                    new, rejected, cause=str(error) if isinstance(error, InputError) else ""
                )
                if isinstance(error, InputError):
                    raise InputError(f"{error} (the current model stays)") from None
                raise
            _wait(deadline_s, timeout_s)  # Another change was faster, so retry on top of it
        self._call("switch", new, deadline_s=deadline_s)
        # The call itself is lost with a replica that restarts. So this asks for the state instead
        # of trusting the answers.
        while True:
            missing, cause = self.call_register("waiting", new)
            if cause:
                raise InputError(f"not all replicas have switched: {cause}")
            if not missing:
                return _without_other_failures(self.call_register("describe"), new)
            _wait(deadline_s, timeout_s)

    def schema(self, *, timeout_s: float = CHANGE_S) -> Schema:
        """Return the schema of the accepted model, with its side tables."""
        deadline_s = time.monotonic() + timeout_s
        while (schema := self.call_register("schema")) is None:
            _wait(deadline_s, timeout_s)  # Replicas switch to it
        return schema

    def _reject(self, new: DesiredState, rejected: ModelSource | None, *, cause: str) -> None:
        """Free the memory of models that are not accepted and record the cause, if any. Ignores
        errors: the caller raises the error of the change, which such an error, often its
        consequence, must neither hide nor delay.
        """
        with contextlib.suppress(Exception):
            self._call("drop", new, deadline_s=time.monotonic() + _REJECT_S)
        if cause:
            with contextlib.suppress(Exception):
                self.call_register("fail", rejected, cause, timeout_s=_REJECT_S)

    def _load(self, new: DesiredState, deadline_s: float, timeout_s: float) -> None:
        """Make every replica load the models. Repeats the call until it has reached all serving
        replicas.
        """
        # A replica that has begun to serve since the call may have missed it.
        while True:
            results = self._call("load", new, deadline_s=deadline_s)
            if causes := [cause for _, cause in results if cause]:
                raise InputError(causes[0])
            if not set(self.call_register("serving")) - {name for name, _ in results}:
                return
            _wait(deadline_s, timeout_s)

    def _call(
        self, method: str, desired: DesiredState, *, deadline_s: float
    ) -> list[tuple[str, str]]:
        """Call a method of all running replicas. Returns (replica name, cause of failure or empty).
        Ignores failed replicas: Ray Serve starts new ones, which load the accepted models.
        """
        import ray
        from ray import serve

        server = serve.get_app_handle(self._application)
        results = ray_compat.call_replicas(
            server, method, desired, timeout_s=max(0.0, deadline_s - time.monotonic())
        )
        for result in results:
            if isinstance(result, TimeoutError):
                raise InputError(
                    f"{method}: a replica did not answer in time. See the server's /metrics."
                )
            if isinstance(result, BaseException) and not isinstance(
                result, ray.exceptions.RayActorError
            ):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]


def _without_other_failures(description: dict[str, Any], new: DesiredState) -> dict[str, Any]:
    """Return the description with failures to load the models of one change only, not of earlier
    ones.
    """
    serials = {str(source.serial) for source in (new.model, new.shadow) if source is not None}
    failures = {
        serial: cause for serial, cause in description["failures"].items() if serial in serials
    }
    return {**description, "failures": failures}


def _wait(deadline_s: float, timeout_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise InputError(
            f"not all replicas have switched within {timeout_s:g} s. See the server's /metrics."
        )
    time.sleep(0.1)


# -- commands for a running server


def swap(
    path: str, *, tables: Mapping[str, str] | None = None, address: str | None
) -> dict[str, Any]:
    """Switch the server of a cluster to another checkpoint, run or export, with its side tables or,
    by name, those of other files. Returns what it serves once all replicas do. Raises InputError if
    no server runs, or if the model cannot be loaded or has other columns. The old model stays then.
    """
    source = resolve_source(path)
    swapped = swapped_tables(stored_schema(source), tables) if tables else ()
    return _changed(address, lambda desired: swap_model(desired, source, swapped))


def swap_table_files(tables: Mapping[str, str], *, address: str | None) -> dict[str, Any]:
    """Switch the server of a cluster to side tables of other files, by name, under the same model.
    They are built before. Returns what it serves once all replicas do. Raises InputError if no
    server runs, or if the model cannot look up a table. The old tables stay then.
    """
    with _reached(address) as server:

        def changed(desired: DesiredState) -> DesiredState:
            return swap_tables(desired, swapped_tables(server.schema(), tables))

        return _with_version(server.change(changed))


def roll_back(*, address: str | None) -> dict[str, Any]:
    """Switch the server of a cluster back to the previous model. Raises InputError without one."""
    return _changed(address, revert_model)


def set_shadow(path: str | None, *, address: str | None) -> dict[str, Any]:
    """Set or, with None, remove the shadow model of a cluster's server, which scores every row
    too.
    """
    source = resolve_source(path) if path else None
    return _changed(address, lambda desired: change_shadow(desired, source), version="shadow")


def stop(*, address: str | None) -> dict[str, Any]:
    """Stop a cluster's server after it has answered its requests, even if its own process was
    killed. Returns what it served.
    """
    with _reached(address) as server:
        description = dict(server.call_register("describe"))
        end(started_serve=server.call_register("started_serve"))
        return description


def end(*, started_serve: bool) -> None:
    """Stop the application, and Ray Serve if it was started for it and runs nothing else."""
    from ray import serve

    serve.delete(APPLICATION)
    if started_serve and not serve.status().applications:
        serve.shutdown()


def _changed(
    address: str | None, changed: Callable[[DesiredState], DesiredState], *, version: str = "model"
) -> dict[str, Any]:
    with _reached(address) as server:
        return _with_version(server.change(changed), version)


def _with_version(description: dict[str, Any], name: str = "model") -> dict[str, Any]:
    """Return a description with the version of a replica's model."""
    replicas = description["replicas"].values()
    versions = [replica[name] or "" for replica in replicas]
    return {"version": versions[0] if versions else "", **description}


@contextlib.contextmanager
def _reached(address: str | None) -> Iterator[Control]:
    """Connect to the server on a cluster."""
    import ray
    from ray import serve

    was_connected = ray.is_initialized()
    address = address or os.environ.get("RAY_ADDRESS")
    if address in (None, "", "local") and not was_connected:
        raise InputError(
            "cluster.address: needed to find the server. Use the address that `rayrec serve` "
            "printed."
        )
    if not was_connected:
        silence_serve_logs()
    connection.connect(address, uses_data=False)
    try:
        if APPLICATION not in serve.status().applications:
            raise InputError(f"{address}: `rayrec serve` not found on this Ray cluster")
        yield Control(APPLICATION)
    finally:
        if not was_connected:
            ray.shutdown()


def silence_serve_logs() -> None:
    """Send Ray Serve's logs to its files only. Call it before Ray starts, whose processes inherit
    the setting.
    """
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
