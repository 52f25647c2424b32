"""Schema of a click log: which columns it has, in what order, and what kind each is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayrec.config import Config, InputError

MAX_COLUMNS = 64
"""Feature columns of a log of 8-digit tokens: one bit a column in a row's mask of missing values."""


@dataclass(frozen=True, kw_only=True)
class Schema(Config):
    """Columns of a click log. Files without a header hold them in the order label, dense, sparse; others are read by
    name."""

    label: str | None = "label"
    """Column that is 1 for a click and 0 for none; None: an unlabelled log."""
    dense: tuple[str, ...] = ()
    """Columns of numbers."""
    sparse: tuple[str, ...] = ()
    """Columns of categories."""
    tokens: Literal["hexadecimal", "any"] = "hexadecimal"
    """hexadecimal: every category is 8 hexadecimal digits, dense columns are integers (Criteo); any: categories are
    strings or integers, dense columns any numbers."""
    lists: tuple[str, ...] = ()
    """Those of `sparse` that hold any number of categories a row (multi-hot); needs tokens "any"."""
    weight: str | None = None
    """Column of the row's weight in the training loss, a number of 0 or more; needs tokens "any"."""
    delimiter: str = "\t"
    """Between the columns of a text file."""
    list_delimiter: str = "|"
    """Between the categories of a list in a text file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.columns
        if len(set(names)) != len(names):
            raise InputError(f"schema: column names repeat in {names}")
        if not self.dense and not self.sparse:
            raise InputError("schema: no feature columns; name at least one in dense or sparse")
        unknown = [name for name in self.lists if name not in self.sparse]
        if unknown:
            raise InputError(f"schema: lists names {', '.join(unknown)}, which sparse does not")
        for name in ("delimiter", "list_delimiter"):
            value = getattr(self, name)
            if len(value) != 1 or ord(value) > 127 or value in '\n\r"':
                raise InputError(f"schema: {name} {value!r} must be one ASCII character, no quote and no line end")
        if self.delimiter == self.list_delimiter:
            raise InputError(f"schema: delimiter and list_delimiter are both {self.delimiter!r}")
        if self.tokens == "any":
            return
        if self.lists or self.weight:
            raise InputError("schema: lists and weight need tokens: any")
        if self.delimiter != "\t":
            raise InputError("schema: hexadecimal tokens come tab-separated; use tokens: any for other files")
        if len(self.dense) + len(self.sparse) > MAX_COLUMNS:
            raise InputError(
                f"schema: {len(self.dense) + len(self.sparse)} feature columns, at most {MAX_COLUMNS} are supported "
                "with hexadecimal tokens; use tokens: any"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """All column names, in file order where the file names none."""
        named = tuple(name for name in (self.label, self.weight) if name)
        return named + self.dense + self.sparse

    def unlabelled(self) -> Schema:
        """The same log without its label (and the weights that only training uses)."""
        return self.replace(label=None, weight=None)


def load_schema(text: str, where: str) -> Schema:
    """The schema that YAML (or JSON) text names, such as `{label: click, dense: [age], sparse: [user, item]}`; tokens are
    "any" and the delimiter a comma unless it says otherwise. `where` is the text's place, for messages.

    Raises InputError for text that is no such YAML and for columns that do not go together.
    """
    import yaml

    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise InputError(f"{where}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise InputError(
            f"{where}: a schema is a mapping, such as {{label: click, dense: [age], sparse: [user, item]}}"
        )
    base = Schema(dense=("-",), tokens="any", delimiter=",")
    try:
        return base.updated({"dense": [], **values})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
