"""Schema of a click log: which columns it has, in what order, and what kind each is."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.config import Config, InputError


@dataclass(frozen=True, kw_only=True)
class Schema(Config):
    """Columns of a click log in file order: an optional label, then integers, then categories of 8 hex digits."""

    label: str | None
    """Name of the label column, or None for an unlabelled log."""
    dense: tuple[str, ...]
    """Names of the integer columns."""
    sparse: tuple[str, ...]
    """Names of the category columns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.columns
        if len(set(names)) != len(names):
            raise InputError(f"schema: column names repeat in {names}")
        if not self.dense and not self.sparse:
            raise InputError("schema: no feature columns; name at least one in dense or sparse")
        if len(self.dense) + len(self.sparse) > 64:
            raise InputError(f"schema: {len(self.dense) + len(self.sparse)} feature columns, at most 64 are supported")

    @property
    def columns(self) -> tuple[str, ...]:
        """All column names in file order."""
        return ((self.label,) if self.label else ()) + self.dense + self.sparse

    def unlabelled(self) -> Schema:
        """The same log without its label."""
        return self.replace(label=None)
