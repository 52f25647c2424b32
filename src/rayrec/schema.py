"""Schema of a click log: which columns it has, in what order, and what kind each is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

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
    integers: tuple[str, ...] = ()
    """Those of `sparse` whose text is read as a whole number: 7, 07, +7 and 7.0 are one category, other text is a fault;
    needs tokens "any". In other columns such texts are different categories."""
    optional: tuple[str, ...] = ()
    """Those of `dense` and `sparse` that a file with named columns may lack: its rows have a missing value there."""
    nan: Literal["fault", "missing"] = "fault"
    """NaN in a dense column: a faulty row, or a missing value."""
    group: str | None = field(default=None, compare=False)
    """One of `sparse`, such as the user: evaluations also tell how well rows are ordered within its values (gauc). It changes
    neither what is trained nor a Preprocessor."""
    category_rules: Literal[1, 2] = field(default=2, compare=False)
    """Version of the rules that read categories of text; a Preprocessor keeps the version it was built with. 2: `true` and
    `false` are the integers 1 and 0, and blanks around an unquoted CSV field do not belong to it. 1: both are plain text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.columns
        if len(set(names)) != len(names):
            raise InputError(f"schema: column names repeat in {names}")
        if not self.dense and not self.sparse:
            raise InputError("schema: no feature columns; name at least one in dense or sparse")
        self._check_named_columns()
        for name in ("delimiter", "list_delimiter"):
            value = getattr(self, name)
            if len(value) != 1 or ord(value) > 127 or value in '\n\r"':
                raise InputError(f"schema: {name} {value!r} must be one ASCII character, no quote and no line end")
        if self.delimiter == self.list_delimiter:
            raise InputError(f"schema: delimiter and list_delimiter are both {self.delimiter!r}")
        if self.tokens == "any":
            return
        if self.lists or self.weight or self.integers:
            raise InputError("schema: lists, weight and integers need tokens: any")
        if self.delimiter != "\t":
            raise InputError("schema: hexadecimal tokens come tab-separated; use tokens: any for other files")
        if len(self.dense) + len(self.sparse) > MAX_COLUMNS:
            raise InputError(
                f"schema: {len(self.dense) + len(self.sparse)} feature columns, at most {MAX_COLUMNS} are supported "
                "with hexadecimal tokens; use tokens: any"
            )

    def _check_named_columns(self) -> None:
        """Raises InputError if a field names columns that the field it chooses from does not have."""
        unknown = [name for name in self.lists if name not in self.sparse]
        if unknown:
            raise InputError(f"schema: lists names {', '.join(unknown)}, which sparse does not")
        if self.group is not None and (self.group not in self.sparse or self.group in self.lists):
            raise InputError(
                f"schema: group names {self.group}, which is not a column of sparse with one category a row"
            )
        for field_name, among in (("integers", self.sparse), ("optional", self.dense + self.sparse)):
            unknown = [name for name in getattr(self, field_name) if name not in among]
            if unknown:
                kind = "sparse does not" if among == self.sparse else "dense and sparse do not"
                raise InputError(f"schema: {field_name} names {', '.join(unknown)}, which {kind}")

    @property
    def columns(self) -> tuple[str, ...]:
        """All column names, in file order where the file names none."""
        named = tuple(name for name in (self.label, self.weight) if name)
        return named + self.dense + self.sparse

    def unlabelled(self) -> Schema:
        """The same log without its label (and the weights that only training uses)."""
        return self.replace(label=None, weight=None)

    def describe(self) -> dict[str, Any]:
        """The fields that decide how a log is read, as JSON values. Fields that earlier versions did not have are left out if
        they change nothing, so that the description of an earlier schema, and its hash, stay the same."""
        plain = self.to_dict()
        del plain["group"]
        if self.tokens == "hexadecimal":
            del plain["category_rules"]
        return {name: value for name, value in plain.items() if name not in _ADDED or value != _ADDED[name]}

    @classmethod
    def described(cls, stored: dict[str, Any]) -> Schema:
        """The schema that `describe` described."""
        rules = stored.get("category_rules", 1 if stored.get("tokens") == "any" else 2)
        return cls(label=None, dense=("-",)).updated({**stored, "category_rules": rules})


_ADDED: dict[str, Any] = {"integers": [], "optional": [], "nan": "fault", "category_rules": 1}
"""Fields that were added later, and their values in a schema that lacks them."""


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
