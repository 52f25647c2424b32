"""Schema of a click log: which columns it has, in what order, and what kind each is."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from rayrec.config import Config, InputError

MAX_COLUMNS = 64
"""Feature columns of a log of 8-digit tokens: one bit a column in a row's mask of missing values."""


@dataclass(frozen=True, kw_only=True)
class Label(Config):
    """A label in addition to `Schema.label`, for models that predict several; the first is the main label where there is none."""

    name: str
    """Its column."""
    kind: Literal["binary", "number", "count"] = "binary"
    """binary: 1 or 0; number: any finite number; count: a number of 0 or more, such as views, whose mean is predicted."""
    missing: Literal["fault", "allowed"] = "allowed"
    """An empty value: a faulty row, or a row that this label does not train."""


@dataclass(frozen=True, kw_only=True)
class Feature(Config):
    """Settings of a categorical feature that its place in the schema's lists of names does not give."""

    name: str
    """Its column, one of `Schema.sparse`."""
    vocabulary: str | None = None
    """Name of its vocabulary and embedding table. Features that name the same one share ids and embeddings, such as an item
    and the items that a user clicked before. The name of another feature is that feature's vocabulary; None: its own."""
    max_length: int | None = None
    """For a column of `Schema.lists`: keeps the last `max_length` categories of a row; None: keeps all."""
    weights: str | None = None
    """For a column of `Schema.lists`: the column with a number for each of its categories, which multiplies the category's
    embedding before they are summed; None: 1 each."""
    aligned_with: str | None = None
    """For a column of `Schema.lists`: the list whose items it describes, such as the items of earlier clicks for the list of
    their shops. In each row both must have categories at the same places; None: it belongs to no other list."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length is not None and self.max_length < 1:
            raise InputError(f"schema: max_length {self.max_length} of feature {self.name} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Schema(Config):
    """Columns of a click log. Files without a header hold them in the order label, dense, sparse; others are read by
    name."""

    label: str | None = "label"
    """Column that is 1 for a click and 0 for none; None: the first of `labels` takes its place, or the log is unlabelled."""
    dense: tuple[str, ...] = ()
    """Columns of numbers."""
    sparse: tuple[str, ...] = ()
    """Columns of categories."""
    tokens: Literal["hexadecimal", "any"] = "any"
    """any: categories are strings or integers, dense columns any numbers, in CSV or Parquet; hexadecimal: every category is 8
    hexadecimal digits, dense columns are integers (Criteo). Text without a header is always the latter."""
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
    features: tuple[Feature, ...] = ()
    """Settings of single columns of `sparse`: shared vocabularies, the length of lists, weights; need tokens "any"."""
    labels: tuple[Label, ...] = ()
    """Labels in addition to `label`; need tokens "any"."""
    timestamp: str | None = None
    """Column of the time of a row: a date, a timestamp, its text in ISO 8601, or seconds since 1970-01-01 00:00 UTC; needs tokens
    "any". Batches have it; no shipped model reads it."""
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
        self._check_features()
        for name in ("delimiter", "list_delimiter"):
            value = getattr(self, name)
            if len(value) != 1 or ord(value) > 127 or value in '\n\r"':
                raise InputError(f"schema: {name} {value!r} must be one ASCII character, no quote and no line end")
        if self.delimiter == self.list_delimiter:
            raise InputError(f"schema: delimiter and list_delimiter are both {self.delimiter!r}")
        if self.tokens == "any":
            return
        for name in ("lists", "weight", "integers", "features", "labels", "timestamp"):
            if getattr(self, name):
                raise InputError(f"schema: {name} needs tokens: any")
        if self.delimiter != "\t":
            raise InputError("schema: hexadecimal tokens come tab-separated; use tokens: any for other files")
        if len(self.dense) + len(self.sparse) > MAX_COLUMNS:
            raise InputError(
                f"schema: {len(self.dense) + len(self.sparse)} feature columns, at most {MAX_COLUMNS} are supported "
                "with hexadecimal tokens; use tokens: any"
            )

    def _check_features(self) -> None:
        """Raises InputError for a setting of a feature that its column cannot have."""
        given = [feature.name for feature in self.features]
        if len(set(given)) != len(given):
            raise InputError(f"schema: features names a column twice in {', '.join(given)}")
        own = {feature.name for feature in self.features if feature.vocabulary not in (None, feature.name)}
        for feature in self.features:
            if feature.name not in self.sparse:
                raise InputError(f"schema: features names {feature.name}, which sparse does not")
            if (feature.max_length or feature.weights) and feature.name not in self.lists:
                raise InputError(
                    f"schema: feature {feature.name} has max_length or weights, which only a column of lists can have"
                )
            if feature.aligned_with is not None:
                self._check_aligned(feature, self.feature(feature.aligned_with))
            if feature.vocabulary in own:
                raise InputError(
                    f"schema: feature {feature.name} has the vocabulary of {feature.vocabulary}, which has another one itself; "
                    "name that one in both"
                )
        weights = [feature.weights for feature in self.features if feature.weights]
        if len(set(weights)) != len(weights):
            raise InputError("schema: two features have the same column of weights")

    def _check_aligned(self, feature: Feature, first: Feature) -> None:
        where = f"schema: aligned_with of feature {feature.name}"
        if feature.name not in self.lists or first.name not in self.lists or first.name == feature.name:
            raise InputError(f"{where}: must be a list that names another column of lists, got {first.name}. Name one.")
        if first.aligned_with is not None:
            raise InputError(
                f"{where}: must be a list without aligned_with, got {first.name}. Name {first.aligned_with} in both."
            )
        if first.max_length != feature.max_length:
            raise InputError(
                f"{where}: must have the max_length of {first.name}, {first.max_length}, got {feature.max_length}. Set the same."
            )

    def _check_named_columns(self) -> None:
        """Raises InputError if a field names columns that the field it chooses from does not have."""
        unknown = [name for name in self.lists if name not in self.sparse]
        if unknown:
            raise InputError(f"schema: lists names {', '.join(unknown)}, which sparse does not")
        if self.group is not None and (self.group not in self.sparse or self.group in self.lists):
            raise InputError(f"schema: group names {self.group}, which is not a column of sparse with one category a row")
        for field_name, among in (("integers", self.sparse), ("optional", self.dense + self.sparse)):
            unknown = [name for name in getattr(self, field_name) if name not in among]
            if unknown:
                kind = "sparse does not" if among == self.sparse else "dense and sparse do not"
                raise InputError(f"schema: {field_name} names {', '.join(unknown)}, which {kind}")

    @property
    def columns(self) -> tuple[str, ...]:
        """All column names, in file order where the file names none."""
        named = tuple(name for name in (self.label, self.weight) if name)
        labels = tuple(label.name for label in self.labels)
        times = (self.timestamp,) if self.timestamp else ()
        return named + self.dense + self.sparse + self.list_weights + labels + times

    @cached_property
    def singles(self) -> tuple[str, ...]:
        """Those of `sparse` that have at most one category a row."""
        return tuple(name for name in self.sparse if name not in self.lists)

    @cached_property
    def places(self) -> dict[str, int]:
        """Number of each column with at most one value a row, `dense` first, then `singles`."""
        return {name: place for place, name in enumerate((*self.dense, *self.singles))}

    @property
    def list_weights(self) -> tuple[str, ...]:
        """The columns of lists' weights."""
        return tuple(feature.weights for feature in self.features if feature.weights)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of all labels, the main one first; none for an unlabelled log."""
        return (*filter(None, [self.label]), *(label.name for label in self.labels))

    def feature(self, name: str) -> Feature:
        """The settings of a column of `sparse`."""
        return next((feature for feature in self.features if feature.name == name), Feature(name=name))

    @cached_property
    def vocabularies(self) -> tuple[str, ...]:
        """The name of each sparse column's vocabulary."""
        return tuple(self.feature(name).vocabulary or name for name in self.sparse)

    @cached_property
    def vocabulary_owners(self) -> tuple[int, ...]:
        """For each sparse column, the number of the first one with the same vocabulary: itself unless it shares one."""
        return tuple(self.vocabularies.index(name) for name in self.vocabularies)

    def unshared(self) -> Schema:
        """The same columns, each with a vocabulary of its own."""
        return self.replace(features=tuple(feature.replace(vocabulary=None) for feature in self.features))

    def unlabelled(self) -> Schema:
        """The same log without its labels, and without the weights and times that only training uses."""
        return self.replace(label=None, weight=None, labels=(), timestamp=None)

    def describe(self) -> dict[str, Any]:
        """The fields that decide how a log is read, as JSON values. Fields that earlier versions did not have are left out if
        they change nothing, so that the description of an earlier schema, and its hash, stay the same."""
        plain = self.to_dict()
        del plain["group"]
        for feature in plain["features"]:
            if feature["aligned_with"] is None:
                del feature["aligned_with"]
        if self.tokens == "hexadecimal":
            del plain["category_rules"]
        return {name: value for name, value in plain.items() if name not in _ADDED or value != _ADDED[name]}

    @classmethod
    def described(cls, stored: dict[str, Any]) -> Schema:
        """The schema that `describe` described."""
        rules = stored.get("category_rules", 1 if stored.get("tokens") == "any" else 2)
        return cls(label=None, dense=("-",)).updated({"tokens": "hexadecimal", **stored, "category_rules": rules})


_ADDED: dict[str, Any] = {
    "integers": [],
    "optional": [],
    "nan": "fault",
    "features": [],
    "labels": [],
    "timestamp": None,
    "category_rules": 1,
}
"""Fields that were added later, and their values in a schema that lacks them."""


def load_schema(text: str, where: str) -> Schema:
    """The schema that YAML (or JSON) text names, such as `{label: click, dense: [age], sparse: [user, item]}`; the delimiter
    is a comma unless it says otherwise. `where` is the text's place, for messages.

    Raises InputError for text that is no such YAML and for columns that do not go together.
    """
    import yaml

    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise InputError(f"{where}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise InputError(f"{where}: a schema is a mapping, such as {{label: click, dense: [age], sparse: [user, item]}}")
    base = Schema(dense=("-",), delimiter=",")
    try:
        return base.updated({"dense": [], **values})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
