"""Desired and actual models of a server's replicas. Imports no torch, which only replicas need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayrec.schema import NamedTable, Schema


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
