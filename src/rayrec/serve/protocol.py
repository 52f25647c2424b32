"""Protocol by which all replicas of a server change to another model: decisions of the coordinator, steps of a replica.

A change has two phases. Replicas load the next model beside the one that they serve; once all of them have, it is accepted,
and they switch to it. If one replica cannot load it, all drop it: a rejected model never answers. A replica that starts serves
only the accepted model. Everything here is immutable and pure: methods return the state after an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

from rayrec.config import InputError
from rayrec.schema import Schema


@dataclass(frozen=True)
class Source:
    """Path of a model at the time of a request. Replicas that loaded equal sources have the same model."""

    serial: int
    """Number of the request that named the path, unique also after restarts of the coordinator."""
    path: str
    """Checkpoint or export."""
    rollback: int = field(default=0, compare=False)
    """Number of the request to go back to this model. 0: it was never rolled back to."""

    @property
    def request(self) -> int:
        """Number of the newest request for this model."""
        return self.rollback or self.serial


@dataclass(frozen=True)
class Configured:
    """Models in an application's configuration, as written there."""

    model: str
    shadow: str | None = None


@dataclass(frozen=True)
class Wanted:
    """Models that all replicas should have."""

    generation: int
    """Number of the newest change."""
    model: Source
    """Accepted model, which answers requests."""
    schema: Schema | None = None
    """Columns that clients send. None until a replica serves the first model."""
    next: Source | None = None
    """Model that is accepted once all replicas have loaded it."""
    previous: Source | None = None
    """Accepted model before this one, to go back to."""
    shadow: Source | None = None
    """Shadow model. The empty path: none, by request."""
    configured: Configured | None = None
    """Newest configuration of the application."""


@dataclass(frozen=True)
class Status:
    """Models of a replica."""

    model: Source | None = None
    version: str = ""
    preprocessor: str = ""
    schema: Schema | None = None
    """Columns of the model."""
    standby: Source | None = None
    """Loaded model that does not answer: the next or the previous one."""
    shadow: Source | None = None
    shadow_version: str = ""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Causes of models that could not be loaded, by request."""


@dataclass(frozen=True)
class Change:
    """Progress of a request."""

    state: Literal["pending", "done", "failed", "lost"]
    """lost: the coordinator restarted before any replica had heard of the request; make it again."""
    cause: str = ""
    """Why it failed."""
    version: str = ""
    """Version of the requested model once all replicas have it."""


@final
@dataclass(frozen=True)
class ReplicaState:
    """Models in a replica's memory: one that answers, one on standby, and one that is being loaded."""

    wanted: Wanted | None = None
    model: Source | None = None
    standby: Source | None = None
    loading: Source | None = None
    failures: Mapping[int, str] = field(default_factory=dict)

    def hear(self, wanted: Wanted) -> ReplicaState:
        """Switch to the accepted model if it is in memory, and drop a model that is not wanted any longer."""
        model, standby = self.model, self.standby
        if standby is not None and standby == wanted.model:
            model, standby = standby, model
        if standby not in (wanted.next, wanted.previous):
            standby = None
        return replace(self, wanted=wanted, model=model, standby=standby)

    def begin(self, *, retry: bool = False) -> ReplicaState:
        """Start to load a model if one is missing, in the memory of the standby. `retry`: also an accepted one that failed."""
        wanted = self.wanted
        if wanted is None:
            return self
        for source in (wanted.model, wanted.next):
            if source is None or source in (self.model, self.standby):
                continue
            if source.request not in self.failures or (retry and wanted.next is None):
                return replace(self, loading=source, standby=None)
        return self

    def finish(self, cause: str | None) -> ReplicaState:
        """Put the model that was loading on standby, and switch to it if it is accepted. `cause`: why it could not be loaded."""
        assert self.loading is not None
        assert self.wanted is not None
        if cause is not None:
            return replace(self, loading=None).fail(self.loading, cause)
        failures = {number: text for number, text in self.failures.items() if number != self.loading.request}
        return replace(self, loading=None, standby=self.loading, failures=failures).hear(self.wanted)

    def fail(self, source: Source, cause: str) -> ReplicaState:
        """Note that a model cannot be loaded."""
        return replace(self, failures={**self.failures, source.request: cause})

    @property
    def failed(self) -> bool:
        """Whether there is no model to serve, nor one that may be accepted."""
        return bool(self.failures) and not (self.model or self.standby or self.loading or self.begin().loading)


@final
@dataclass(frozen=True)
class Decisions:
    """State of the coordinator: the wanted models, and the models of the replicas that it heard of lately."""

    wanted: Wanted
    replicas: Mapping[str, Status] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)
    """Causes of models that were rejected or, if accepted, cannot be loaded by a replica. By request."""
    first: int = 1
    """Smallest number for requests, above those before a restart."""
    adopted: int = 0
    """Newest change before a restart that a replica had heard of."""
    complete: bool = True
    """Whether all replicas were heard. After a restart nothing is decided before."""

    def hear(self, replica: str, known: Wanted | None, status: Status) -> Decisions:
        """Take in a replica's status. `known`: the newest that it heard, which a restarted coordinator adopts."""
        wanted, adopted = self.wanted, self.adopted
        if known is not None and known.generation > wanted.generation:
            wanted, adopted = known, known.generation
        # The replica may have freed its standby since it reported, as it does again once it hears the answer.
        report = replace(status, standby=_kept(status, known))
        replicas = {**self.replicas, replica: report}
        failures = {**status.failures, **self.failures}
        if all(other.model == wanted.model for other in replicas.values()):
            failures.pop(wanted.model.request, None)
        state = replace(self, wanted=wanted, adopted=adopted, replicas=replicas, failures=failures)._decide()
        return replace(state, replicas={**replicas, replica: replace(report, standby=_kept(report, state.wanted))})

    def forget(self, replica: str) -> Decisions:
        """Remove a replica that was not heard of for long."""
        return replace(
            self, replicas={name: status for name, status in self.replicas.items() if name != replica}
        )._decide()

    def complete_restart(self) -> Decisions:
        """Start to decide after a restart."""
        return replace(self, complete=True)._decide()

    def configure(self, configured: Configured, *, model: str, shadow: str | None) -> Decisions:
        """Request the models of an application's configuration if it changed: a model that was swapped since then stays. `model`
        and `shadow` are the folders of its paths."""
        before, state = self.wanted.configured, self
        if configured == before:
            return self
        if (
            configured.model != (before.model if before else None)
            and model != (self.wanted.next or self.wanted.model).path
        ):
            source = Source(self._number, model)
            # Before any model is accepted there is no client to protect from this one.
            state = state._change(**{"next" if self.wanted.schema else "model": source})
        if configured.shadow != (before.shadow if before else None):
            state = state._change(shadow=Source(state._number, shadow) if shadow else None)
        return state._change(configured=configured)

    def swap(self, path: str) -> tuple[Decisions, int]:
        """Request another model, or a path's again, and return the number of the request. Joins a pending one of the path."""
        if self.wanted.next is not None and self.wanted.next.path == path:
            return self, self.wanted.next.request
        return self._change(next=Source(self._number, path)), self._number

    def roll_back(self) -> tuple[Decisions, int]:
        """Cancel a pending request, else request the previous model. Raises InputError if there is none."""
        wanted = self.wanted
        if wanted.next is not None:
            return self._change(next=None), wanted.model.request
        if wanted.previous is None:
            raise InputError("rollback: this server has had no other model since it started")
        return self._change(next=replace(wanted.previous, rollback=self._number)), self._number

    def set_shadow(self, path: str | None) -> tuple[Decisions, int]:
        """Request a shadow model, or none."""
        return self._change(shadow=Source(self._number, path or "")), self._number

    def change(self, request: int) -> Change:
        """Return the progress of a request."""
        wanted, replicas = self.wanted, self.replicas.values()
        if not self.complete or (wanted.next and wanted.next.request == request):
            return Change("pending")
        for name, source in (("model", wanted.model), ("shadow", wanted.shadow)):
            if source is not None and source.request == request:
                if not replicas or any(getattr(status, name) != source for status in replicas):
                    return Change("pending")
                status = next(iter(replicas))
                return Change("done", version=status.version if name == "model" else status.shadow_version)
        if self.adopted < request < self.first:
            return Change("lost")
        return Change("failed", cause=self.failures.get(request, "a later request replaced this one"))

    def describe(self) -> dict[str, Any]:
        """Return plain JSON values: wanted models, served models by replica, causes of failures by request."""
        wanted = self.wanted
        return {
            "model": wanted.model.path,
            "previous": wanted.previous.path if wanted.previous else None,
            "shadow": wanted.shadow.path or None if wanted.shadow else None,
            "replicas": {
                name: {"model": status.version, "shadow": status.shadow_version or None}
                for name, status in self.replicas.items()
            },
            "failures": {str(request): cause for request, cause in self.failures.items()},
        }

    @property
    def answer(self) -> Wanted | None:
        """Wanted models, for replicas. None if a replica that is still to be heard knows them."""
        return self.wanted if self.complete or self.wanted.schema else None

    @property
    def _number(self) -> int:
        return max(self.wanted.generation + 1, self.first)

    def _decide(self) -> Decisions:
        wanted, replicas = self.wanted, self.replicas.values()
        if not self.complete:
            return self
        changes: dict[str, Any] = {}
        schemas = [status.schema for status in replicas if status.model == wanted.model and status.schema]
        if wanted.schema is None and schemas:
            changes["schema"] = schemas[0]
        if wanted.next is not None and wanted.next.request in self.failures:
            changes["next"] = None
        elif wanted.next and replicas and all(wanted.next in (status.model, status.standby) for status in replicas):
            changes |= {"model": wanted.next, "previous": wanted.model, "next": None}
        if wanted.shadow is not None and wanted.shadow.request in self.failures:
            changes["shadow"] = None
        return self._change(**changes) if changes else self

    def _change(self, **changes: Any) -> Decisions:
        return replace(self, wanted=replace(self.wanted, generation=self._number, **changes))._decide()


def _kept(status: Status, wanted: Wanted | None) -> Source | None:
    """Return the standby that a replica still has once it hears what is wanted and loads what is missing."""
    state = ReplicaState(None, status.model, status.standby, failures=status.failures)
    return state.hear(wanted).begin(retry=True).standby if wanted else state.standby
