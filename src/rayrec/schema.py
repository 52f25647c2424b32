"""Schema of a click log: the names, order and kinds of its columns."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Annotated, Any, Final, Literal, NoReturn

from annotated_types import Ge, Gt, Le

from rayrec.bounds import Count
from rayrec.config import Config, InputError, packaged_json
from rayrec.formula.program import Program, Step
from rayrec.formula.types import Type

MAX_COLUMNS = 64
"""Maximum feature columns of a log with hexadecimal tokens: its mask of missing values has 64 bits
per row.
"""


BRACKETS = "brackets"
"""`Feature.list_delimiter` of lists written as ['a', 'b'] or as JSON."""


MAX_VECTOR: Final = 4096
"""Maximum numbers of a vector."""


MAX_DELIMITER: Final = 16
"""Maximum characters of `Schema.delimiter`."""


def _is_mark(value: str) -> bool:
    return len(value) == 1 and value.isascii() and value not in '\n\r"'


def _check_mark(name: str, value: str) -> None:
    """Check a separator of one character. Raises InputError."""
    if not _is_mark(value):
        raise InputError(
            f"schema: {name} must be one ASCII character other than a quote or a line end, got "
            f"{value!r}"
        )


def _check_delimiter(value: str) -> None:
    """Check the separator of columns. Raises InputError."""
    is_printable = value.replace("\t", " ").isprintable() and '"' not in value
    if _is_mark(value) or (is_printable and 1 <= len(value) <= MAX_DELIMITER):
        return
    raise InputError(
        f"schema: delimiter must be 1 to {MAX_DELIMITER} printable characters or tabs, or one "
        f"other ASCII character, without a quote or a line end, got {value!r}"
    )


@dataclass(frozen=True, kw_only=True)
class Label(Config):
    """Label in addition to `Schema.label`, for multi-task models. The first one is the main label
    if `Schema.label` is None.
    """

    name: str
    """Column name."""
    kind: Literal["binary", "number", "count"] = "binary"
    """Label type. binary: 1 or 0; number: any finite number; count: a number of 0 or more, such as
    views; predicts its mean.
    """
    missing: Literal["fault", "allowed"] = "allowed"
    """Handling of empty values. fault: the row is invalid; allowed: the row does not train this
    label.
    """


@dataclass(frozen=True, kw_only=True)
class LabelRule(Config):
    """Rule that makes 1 and 0 of the values in `Schema.label`. Empty values stay faults."""

    at_least: float | None = None
    """Smallest number that counts as 1, such as 4 for ratings of 1 to 5. None: `positive`
    decides.
    """
    positive: tuple[str, ...] = ()
    """Values that count as 1, such as `yes`; all others count as 0. Numbers match in any form."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.at_least is None) == (not self.positive):
            raise InputError(
                "schema: label must have either at_least or positive, such as {name: rating, "
                "at_least: 4}"
            )
        if self.at_least is not None and not math.isfinite(self.at_least):
            raise InputError(
                f"schema: at_least of the label must be a finite number, got {self.at_least}"
            )


@dataclass(frozen=True, kw_only=True)
class Feature(Config):
    """Settings of one feature: a categorical column, or any column that a formula computes."""

    name: str
    """Column name, one of `Schema.sparse`, or a new one with a `formula`."""
    formula: str | None = None
    """Formula that computes the column from others, such as `log(price)`; in YAML also `from`. The
    result is an input of the model: numbers are added to `Schema.dense`, categories to
    `Schema.sparse`. None: a column of the log.
    """
    vocabulary: str | None = None
    """Name of its vocabulary and embedding table. Features with one vocabulary share ids and
    embeddings, such as an item and the items that a user clicked before. A feature's name means
    that feature's vocabulary. None: a separate vocabulary.
    """
    max_length: int | None = None
    """Maximum categories per row in a column of `Schema.lists`; the last ones are kept. None keeps
    all.
    """
    weights: str | None = None
    """Weight column for a column of `Schema.lists`: a factor for each category's embedding before
    the sum. None: 1 each.
    """
    ages: str | None = None
    """Age column for a column of `Schema.lists`, in seconds before the row's time. It has the times
    between items for networks that read them. None: unknown times.
    """
    aligned_with: str | None = None
    """List column with the items that this list describes, such as the items of earlier clicks for
    the list of their shops. In each row, both must have categories at the same positions. None:
    independent.
    """
    list_delimiter: str | None = None
    """Separator of the categories and weights in text for a column of `Schema.lists`: one ASCII
    character, with blanks around categories removed, or `brackets` for ['a', 'b'] and ["a", "b"].
    None: `Schema.list_delimiter`.
    """

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, where: str) -> Config:
        if "from" not in values:
            return super().from_values(values, where=where)
        if "formula" in values:
            raise InputError(f"{where}from: is another name of formula, which is set too")
        other_fields = {name: value for name, value in values.items() if name != "from"}
        return super().from_values({**other_fields, "formula": values["from"]}, where=where)

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed = self.weights or self.ages or self.aligned_with or self.list_delimiter
        if self.formula is not None and fixed:
            raise InputError(
                f"schema: feature {self.name} is computed, so that it has no weights, ages, "
                "aligned_with or list_delimiter"
            )
        if self.weights and self.ages:
            raise InputError(
                f"schema: feature {self.name} must have weights or ages, got both. Remove one."
            )
        if self.max_length is not None and self.max_length < 1:
            raise InputError(
                f"schema: max_length of feature {self.name} must be at least 1, got "
                f"{self.max_length}"
            )
        if self.list_delimiter not in (None, BRACKETS):
            _check_mark(f"list_delimiter of feature {self.name}", self.list_delimiter or "")

    def to_dict(self) -> dict[str, Any]:
        plain = super().to_dict()
        if self.ages is None:  # Files with a schema stay the same
            del plain["ages"]
        return plain


@dataclass(frozen=True, kw_only=True)
class TableSource(Config):
    """Table in addition to the log, such as the columns of each item."""

    path: str
    """File, folder or URL of any format that a log may have."""
    key: str | tuple[str, ...]
    """Column with the key of each row, or two columns whose values are one key together. They are
    compared with columns of the log as categories are: 5, "5" and 5.0 are one key.
    """
    time: str | None = None
    """Column with the time from which a row is valid. A row of the log takes the newest one that is
    not after its own time. None: one row per key.
    """
    format: str | None = field(default=None, compare=False)
    """Format of its files, as `Schema.format`. None: found from the content of each file."""
    delimiter: str | None = field(default=None, compare=False)
    """Separator of columns in text, as `Schema.delimiter`. None: a tab, a comma, a semicolon or
    `::`, as found.
    """
    header: tuple[str, ...] | None = field(default=None, compare=False)
    """Column names of files without a header row, in file order. None: files have one."""
    encoding: str | None = field(default=None, compare=False)
    """Encoding of text files, such as latin-1. None: UTF-8."""
    escape: str | None = field(default=None, compare=False)
    """Character before a quote inside a quoted CSV field, such as a backslash. None: quotes are
    doubled.
    """
    missing: tuple[str, ...] = field(default=(), compare=False)
    """Values of text that mean a missing one, such as NA. Empty text and null are always
    missing.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.keys) not in (1, 2):
            raise InputError(
                f"schema: tables: {self.path}: key must be one column or two, got {len(self.keys)}"
            )
        if not self.path or not all(self.keys) or self.time == "":
            raise InputError("schema: tables: path, key and time must not be empty")
        if self.time in self.keys:
            raise InputError(
                f"schema: tables: {self.path}: key and time must differ, got {self.time} for both"
            )
        if len({*self.keys}) < len(self.keys):
            raise InputError(
                f"schema: tables: {self.path}: the columns of key must differ, got "
                f"{self.keys[0]} twice"
            )
        try:
            self.form()
        except InputError as error:
            text = str(error).removeprefix("schema: ")
            raise InputError(f"schema: tables: {self.path}: {text}") from None

    def form(self, *, integers: tuple[str, ...] = ()) -> Schema:
        """Return the schema of its files, with the key in `sparse` and the time in `timestamp`.
        `integers`: columns of the key that are parsed as integers. Raises InputError.
        """
        delimiter = "\t" if self.delimiter is None else self.delimiter
        return Schema(
            label=None,
            sparse=self.keys,
            timestamp=self.time,
            integers=integers,
            format=self.format,
            delimiter=delimiter,
            # Unused: a lookup splits text by that of the log's schema.
            list_delimiter=";" if delimiter == "|" else "|",
            header=self.header,
            encoding=self.encoding,
            escape=self.escape,
            missing=self.missing,
        )

    def to_dict(self) -> dict[str, Any]:
        plain = super().to_dict()
        # Files with a table stay the same if it has none of these.
        return {name: value for name, value in plain.items() if value or name not in _FORM}

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns of the key, in the order of a lookup's keys."""
        return (self.key,) if isinstance(self.key, str) else self.key


_FORM: Final = ("format", "delimiter", "header", "encoding", "escape", "missing")
"""Fields of a TableSource for the form of its files."""


@dataclass(frozen=True, kw_only=True)
class NamedTable(TableSource):
    """Side table of a schema."""

    name: str
    """Name in formulas, such as items."""
    content: str | None = None
    """Hash of the rows that a model was trained with. Set by rayrec; another content is rejected.
    """

    @property
    def short_content(self) -> str:
        """First 8 hex digits of `content`, to show."""
        return (self.content or "")[:8]


@dataclass(frozen=True, kw_only=True)
class Vector(Config):
    """Column of lists with equally many numbers, such as a pretrained embedding. Each number is an
    input of the model, a column such as `text[0]`.
    """

    name: str
    """Column name."""
    length: int | None = None
    """Numbers per row. None: as many as in the log's first row with a list."""
    list_delimiter: str | None = None
    """Separator of the numbers in text: one ASCII character, or `brackets` for [0.1, 0.2]. None:
    `Schema.list_delimiter`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is not None and not 1 <= self.length <= MAX_VECTOR:
            raise InputError(
                f"schema: length of vector {self.name} must be 1 to {MAX_VECTOR}, got {self.length}"
            )
        if self.list_delimiter not in (None, BRACKETS):
            _check_mark(f"list_delimiter of vector {self.name}", self.list_delimiter or "")

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of its numbers. None without a length."""
        return tuple(f"{self.name}[{index}]" for index in range(self.length or 0))


@dataclass(frozen=True, kw_only=True)
class FittedFunction(Config):
    """Constants of a function in a formula, such as the edges of `quantile`."""

    feature: str
    """Name of the feature with the formula."""
    number: int
    """Number of the function among the fitted ones of the formula, from 0; inner ones come
    first.
    """
    constants: tuple[float, ...]
    """Lowest number of each bin but the first for `quantile`, mean and deviation for `zscore`."""


@dataclass(frozen=True, kw_only=True)
class RowSample(Config):
    """Sample of the training rows with one label."""

    label: Literal[0, 1]
    """Label of the rows that are sampled: 0 or 1. All rows with the other one are kept."""
    keep: Annotated[float, Gt(0), Le(1)]
    """Share of these rows that is kept, by a hash of each row's position in its file."""

    # Label 0: the odds p / (1 - p) of a click become p / (keep (1 - p)). This is the "prior
    # correction" of King & Zeng, "Logistic Regression in Rare Events Data", Political Analysis
    # 2001.
    @property
    def logit_offset(self) -> float:
        """Logit of label 1 among the kept rows, minus that among all rows."""
        logarithm = math.log(self.keep)
        return logarithm if self.label else -logarithm


TARGET: Final = "target"
"""Column of built lists with the held-out items of a row."""
SEEN: Final = "seen"
"""Column of built lists with all items before the held-out ones."""
AGE: Final = "age"
"""Column of built lists with the age of each item, in seconds before the row's time."""


@dataclass(frozen=True, kw_only=True)
class SequenceColumns(Config):
    """Columns of events, whose items become one list per user."""

    user: str
    """Column of the user."""
    item: str
    """Column of the item."""
    time: str | None = None
    """Column of the time, with the values of `Schema.timestamp`. None: events are in the order of
    the files.
    """
    with_columns: tuple[str, ...] = ()
    """Further columns of categories, as lists aligned with the items. In YAML also `with`."""
    max_length: Count = 50
    """Maximum items of a history; the newest ones are kept. A training row has one more to
    predict.
    """
    min_length: Annotated[int, Ge(2)] = 2
    """Minimum training items of a user. Users with fewer do not train."""
    user_input: bool = False
    """Whether the user is an input too, for models with a vector of each user."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [*self.listed, *filter(None, [self.time])]
        if len({*names}) < len(names) or not all(names):
            raise InputError(
                "schema: sequence: user, item, time and with must name different columns, got "
                f"{', '.join(names)}"
            )
        reserved = [name for name in self.columns if name in (TARGET, SEEN, AGE)]
        if reserved:
            raise InputError(
                f"schema: sequence: {reserved[0]} is a column of built lists, so that no column of "
                "events may have its name; rename it in the log"
            )

    @property
    def listed(self) -> tuple[str, ...]:
        """Columns of categories in events: user, item and `with_columns`."""
        return (self.user, self.item, *self.with_columns)

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of events."""
        return (*self.listed, *filter(None, [self.time]))

    def features(self) -> tuple[Feature, ...]:
        """Return the features of the built lists, the items first."""
        longest = self.max_length + 1
        aligned = (
            Feature(name=name, max_length=longest, aligned_with=self.item)
            for name in self.with_columns
        )
        targets = (Feature(name=name, vocabulary=self.item) for name in (TARGET, SEEN))
        return (Feature(name=self.item, max_length=longest), *aligned, *targets)

    def to_dict(self) -> dict[str, Any]:
        plain = super().to_dict()
        # Files with a schema stay the same without it.
        if not self.user_input:
            del plain["user_input"]
        return plain

    def built(self) -> dict[str, Any]:
        """Return the settings that decide how lists are built, as JSON values."""
        return self.replace(user_input=False).to_dict()


def _renamed_with(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `sequence` with `with_columns` for `with`, a word of Python. Raises
    InputError for both.
    """
    fields = dict(values)
    if "with" in fields:
        if "with_columns" in fields:
            raise InputError("sequence.with: is another name of with_columns, which is set too")
        fields["with_columns"] = fields.pop("with")
    return fields


_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
"""Seconds of a duration's unit."""


def _microseconds(duration: int | str) -> int | None:
    """Return a duration such as 60d in microseconds; None for other text. 0 needs no unit."""
    parts = re.fullmatch(r"(\d{1,9})([smhdw])", str(duration))
    if parts is None:
        return 0 if str(duration) == "0" else None
    return int(parts[1]) * _SECONDS[parts[2]] * 1_000_000


def _millionths(percent: int | str) -> int | None:
    """Return a percentage below 100, such as 5%, in millionths; None for other text. 0 needs no
    sign.
    """
    parts = re.fullmatch(r"(\d{1,2}(?:\.\d{1,4})?)%", str(percent))
    if parts is None:
        return 0 if str(percent) == "0" else None
    return round(float(parts[1]) * 10_000)


@dataclass(frozen=True, kw_only=True)
class SequenceSplit(Config):
    """Events that are held out of the lists of training."""

    kind: Literal["last_items", "time", "files"] = "last_items"
    """Method. last_items: the last items of each user. time: the latest events of all users. files:
    those of files whose names begin with valid and test.
    """
    validation: int | str = 1
    """Held-out items for validation, before those of the test. For time a duration, such as 7d or
    12h. For files a random part of the other files' events, such as 5%, or 0.
    """
    test: int | str = 1
    """Held-out items for the test; for time a duration before the last event; for files 1. 0: no
    test.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("validation", "test"):
            value = getattr(self, name)
            size = self._size(name)
            least = 1 if name == "validation" and self.kind != "files" else 0
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                form = {
                    "last_items": "a number of items",
                    "time": "a duration such as 60d, 12h or 30m",
                    "files": "a percentage such as 5%" if name == "validation" else "1",
                }[self.kind]
                raise InputError(
                    f"schema: split {self.kind}: {name} must be {form}"
                    f"{'' if least else ', or 0'}, got {value!r}"
                )

    def _size(self, name: Literal["validation", "test"]) -> int | str | None:
        """Return the size of a part as in `sizes`, None or text if invalid."""
        value: int | str = getattr(self, name)
        if self.kind == "time":
            return _microseconds(value)
        return _millionths(value) if (self.kind, name) == ("files", "validation") else value

    @property
    def sizes(self) -> tuple[int, int]:
        """Size of validation and test: items, microseconds for time, or for files millionths of the
        events and a number above 0 for a test.
        """
        return int(self._size("validation") or 0), int(self._size("test") or 0)


# Columns of a log by their use. A column has one use, but for those that a rule repeats:
#
#   label, labels        what to learn; `label_rule` makes clicks of other values
#   dense                numbers
#   sparse               categories, one per row; `lists`: any number per row
#   weight, timestamp    of the row, for training and splits
#   group                of the row, for ranking metrics; one of the sparse columns
@lru_cache(maxsize=4096)
def _default_feature(name: str) -> Feature:
    """Return the settings of a column that has none. To validate them takes longer than to parse
    thousands of its values.
    """
    return Feature(name=name)


@dataclass(frozen=True, kw_only=True)
class Schema(Config):
    """Columns of a click log, in the order label, dense, sparse without a header; otherwise they
    are found by name.
    """

    label: str | None = "label"
    """Column with 1 for a click and 0 for no click. None: the first of `labels` is the main label,
    or the log is unlabelled. In YAML also a mapping with `label_rule`: {name: rating, at_least: 4}
    or {name: answer, positive: [yes]}.
    """
    label_rule: LabelRule | None = None
    """Rule for a label with other values than 1 and 0. None: the column has 1 and 0. Needs tokens
    "any".
    """
    dense: tuple[str, ...] = ()
    """Numeric columns."""
    sparse: tuple[str, ...] = ()
    """Categorical columns."""
    tokens: Literal["hexadecimal", "any"] = "any"
    """Category format. any: categories are strings or integers, dense columns any numbers, in CSV
    or Parquet; hexadecimal: every category has 8 hexadecimal digits, dense columns are integers
    (Criteo). Text without a header is always hexadecimal.
    """
    lists: tuple[str, ...] = ()
    """Columns of `sparse` with any number of categories per row (multi-hot). Needs tokens "any"."""
    weight: str | None = None
    """Column with the row's weight in the training loss, a number of 0 or more. Needs tokens
    "any".
    """
    delimiter: str = "\t"
    """Separator of columns in a text file: one or more characters, such as `::`. If the first row
    has no tab, the default, then a comma, a semicolon or `::` replaces it, whichever divides the
    rows.
    """
    list_delimiter: str = "|"
    """Separator of the categories of a list in a text file."""
    integers: tuple[str, ...] = ()
    """Columns of `sparse` whose text is parsed as an integer: 7, 07, +7 and 7.0 are one category,
    other text is a fault. In other columns, these are different categories. Needs tokens "any".
    """
    optional: tuple[str, ...] = ()
    """Columns of `dense` and `sparse` that files with named columns may lack. Their values are then
    missing.
    """
    features: tuple[Feature, ...] = ()
    """Settings of single columns of `sparse`: shared vocabularies, list lengths, weights; and
    columns that formulas compute. Needs tokens "any".
    """
    tables: tuple[NamedTable, ...] = ()
    """Tables that formulas look up. In YAML also a mapping of names to their other settings. Needs
    tokens "any".
    """
    vectors: tuple[Vector, ...] = ()
    """Columns of lists with equally many numbers, which become columns of `dense`. In YAML names,
    or mappings. Needs tokens "any".
    """
    fitted: tuple[FittedFunction, ...] = field(default=(), compare=False)
    """Constants that formulas have from the training rows. Set by rayrec."""
    labels: tuple[Label, ...] = ()
    """Labels in addition to `label`. Needs tokens "any"."""
    timestamp: str | None = None
    """Column with the time of each row: a date, a timestamp, text (ISO 8601, 2026/01/31 10:00,
    31.01.2026, 1/31/2026 9:05:00 PM), or seconds, milliseconds or microseconds since 1970-01-01
    00:00 UTC. Batches contain it; no built-in model uses it, unless it is in `dense` or `sparse`
    too. Needs tokens "any".
    """
    nan: Literal["fault", "missing"] = "fault"
    """Handling of NaN in dense columns. fault: the row is invalid; missing: the value is
    missing.
    """
    missing: tuple[str, ...] = ()
    """Values that mean a missing number or category, such as NA, in files and requests. In dense
    columns, numbers match in any form. Empty text and null are always missing. Needs tokens
    "any".
    """
    format: str | None = field(default=None, compare=False)
    """Format of the files: csv, parquet, jsonl, libsvm, libffm, vw, slot_value, user_items,
    npz, or FILE.py:CLASS for your own. None: found from the content of each file.
    """
    sample: RowSample | None = field(default=None, compare=False)
    """Share of the rows with one label that training reads, such as {label: 0, keep: 0.1}.
    Predictions stay those of all rows. Evaluations use all rows. None: all rows train.
    """
    sequence: SequenceColumns | None = None
    """Columns of events, for lists of items. The schema is then that of the built lists, and
    `events` that of the log. Needs tokens "any", and no other columns.
    """
    split: SequenceSplit | None = None
    """Events that the lists of training leave out. None with `sequence`: the last item of each user
    for the test, the one before it for validation.
    """
    group: str | None = field(default=None, compare=False)
    """Column of `sparse`, such as the user, within whose values evaluations measure ranking too
    (gauc). Not used to train.
    """
    encoding: str | None = field(default=None, compare=False)
    """Encoding of text files, such as latin-1 or cp1252: any of Python's. None: UTF-8. Needs tokens
    "any".
    """
    escape: str | None = field(default=None, compare=False)
    """Character before a quote, or before itself, inside a quoted CSV field, such as a backslash in
    files of Spark and Hive. None: quotes are doubled. Needs tokens "any".
    """
    header: tuple[str, ...] | None = field(default=None, compare=False)
    """Column names of a file without a header row, in file order, unused columns included. Files
    with a header row are read by it. A Preprocessor stores the order of its log here: lines without
    a header have this order, in files and requests. Empty: the log has no order, such as a
    DataFrame. None: unknown; then only hexadecimal text may lack a header.
    """
    header_row: bool = field(default=False, compare=False)
    """Whether `header` was found in the log's own header row instead of being declared. Set by
    rayrec.
    """
    dropped: tuple[str, ...] = field(default=(), compare=False)
    """Columns that lines without a header may have in addition, such as the label of rows to score.
    Set by `unlabelled`.
    """
    category_rules: Literal[1, 2] = field(default=2, compare=False)
    """Version of the parsing rules for text categories, stored in a Preprocessor. 2: `true` and
    `false` are the integers 1 and 0, and blanks around an unquoted CSV field are removed. 1: both
    are plain text.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._add_sequence()
        self._add_derived()
        self._check_computed()
        names = (*self.columns, *self.derived)
        if len(set(names)) != len(names):
            raise InputError(f"schema: column names must be unique, got {names}")
        if not self.dense and not self.sparse and not self.vectors:
            raise InputError("schema: no feature columns; name at least one in dense or sparse")
        self._check_named_columns()
        self._check_features()
        if self.label_rule is not None and self.label is None:
            raise InputError("schema: label must name a column with at_least or positive")
        self._check_sample()
        _check_delimiter(self.delimiter)
        _check_mark("list_delimiter", self.list_delimiter)
        if self.delimiter == self.list_delimiter:
            raise InputError(
                f"schema: delimiter and list_delimiter must differ, got {self.delimiter!r} for both"
            )
        self._check_text()
        if self.tokens == "any":
            return
        text_fields = ("label_rule", "missing", "encoding", "escape")
        for name in (
            "lists",
            "weight",
            "integers",
            "features",
            "tables",
            "vectors",
            "labels",
            "timestamp",
            "sequence",
            *text_fields,
        ):
            if getattr(self, name):
                raise InputError(f"schema: {name} needs tokens: any")
        if self.delimiter != "\t":
            raise InputError(
                "schema: hexadecimal tokens come tab-separated; use tokens: any for other files"
            )
        if len(self.dense) + len(self.sparse) > MAX_COLUMNS:
            raise InputError(
                f"schema: {len(self.dense) + len(self.sparse)} feature columns, at most "
                f"{MAX_COLUMNS} are supported with hexadecimal tokens; use tokens: any"
            )

    def _add_sequence(self) -> None:
        """Add the features of the lists that are built of events, unless they are there. Raises
        InputError for other columns.
        """
        if self.sequence is None:
            if self.split is not None:
                raise InputError("schema: split needs sequence, with the columns of the events")
            return
        features = self.sequence.features()
        self._check_only(features)
        names = tuple(feature.name for feature in features)
        integers = self.integers
        if self.sequence.item in integers:
            integers = tuple(dict.fromkeys((*integers, TARGET, SEEN)))
        declared = {feature.name: feature for feature in self.features}
        user = (self.sequence.user,) if self.sequence.user_input else ()
        values = {
            "sparse": (*names, *user),
            "lists": names,
            "optional": (TARGET, SEEN),
            "integers": integers,
            "features": tuple(declared.get(each.name, each) for each in features),
            "split": self.split or SequenceSplit(),
        }
        for field_name, value in values.items():
            # Frozen: this is still the construction
            object.__setattr__(self, field_name, value)

    def _check_only(self, features: tuple[Feature, ...]) -> None:
        """Check that a schema with `sequence` has the columns of the built lists, or none. Raises
        InputError.
        """
        assert self.sequence is not None
        for name in (*_NOT_OF_EVENTS, "label"):
            if getattr(self, name):
                fix = " Set label: null." if name == "label" else ""
                raise InputError(
                    f"schema: {name} must be empty with sequence, whose lists have its columns "
                    f"only, got {_shown(getattr(self, name))}.{fix}"
                )
        if self.split is not None and self.split.kind == "time" and self.sequence.time is None:
            raise InputError("schema: split time: sequence has no time; name its column in time")
        if self.split is not None and self.split.kind == "files" and self.sequence.time is not None:
            raise InputError(
                f"schema: split files: sequence must have no time, got {self.sequence.time}; its "
                "events are in the order of the files"
            )
        self._check_listed(features)

    def _check_listed(self, features: tuple[Feature, ...]) -> None:
        """Check that declared columns and their settings are those of the built lists. Raises
        InputError.
        """
        names = [feature.name for feature in features]
        assert self.sequence is not None
        user = [self.sequence.user] if self.sequence.user_input else []
        for field_name in ("sparse", "lists", "optional"):
            for name in getattr(self, field_name):
                if name not in names and (field_name, [name]) != ("sparse", user):
                    raise InputError(
                        f"schema: {field_name} names {name}, which sequence does not have; name "
                        "it in `with` of sequence, or leave it out"
                    )
        lengths = {feature.name: feature.max_length for feature in features}
        for feature in self.features:
            if feature.name not in lengths or feature.max_length != lengths[feature.name]:
                raise InputError(
                    f"schema: features names {feature.name}, whose settings follow from sequence; "
                    "leave it out, and set max_length of sequence"
                )

    @cached_property
    def events(self) -> Schema:
        """Schema of the events' own files, of a schema with `sequence`."""
        assert self.sequence is not None
        columns = self.sequence
        return self.replace(
            sequence=None,
            split=None,
            sparse=columns.listed,
            lists=(),
            optional=(),
            features=(),
            integers=tuple(name for name in self.integers if name in columns.listed),
            timestamp=columns.time,
            header=None if self.header_row else self.header,
            header_row=False,
        )

    def _add_derived(self) -> None:
        """Add the columns of formulas to `dense`, `sparse` and `lists` by their types, unless they
        are there. Raises InputError if a formula is invalid, or computes no input.
        """
        roles: dict[str, list[str]] = {"dense": [], "sparse": [], "lists": []}
        for step in self.program.steps:
            role = self._role_of(step)
            if step.name in getattr(self, role):
                continue
            roles[role].append(step.name)
            if step.type.is_list:
                roles["lists"].append(step.name)
        for field_name, names in roles.items():
            # Frozen: this is still the construction
            object.__setattr__(self, field_name, (*getattr(self, field_name), *names))
        self._check_inputs()

    def _role_of(self, step: Step) -> Literal["dense", "sparse"]:
        """Return the field that has a computed column. Raises InputError if its type is none of an
        input, or if the column is in other fields.
        """
        prefix = f"schema: feature {step.name}"
        if step.type.kind == "time":
            raise InputError(
                f"{prefix}: a time is no input of a model; use hour, weekday or age on it"
            )
        if step.type == Type("number", is_list=True):
            raise InputError(f"{prefix}: a list of numbers is no input of a model; aggregate it")
        role: Literal["dense", "sparse"] = "dense" if step.type.kind == "number" else "sparse"
        is_declared = step.name in self.dense + self.sparse
        if is_declared and step.name not in getattr(self, role):
            raise InputError(f"{prefix}: its formula makes a column of {role}, not another one")
        if step.name in self.sparse and step.type.is_list != (step.name in self.lists):
            raise InputError(f"{prefix}: must be in lists exactly if its formula makes lists")
        return role

    # Computed columns are inputs, of rows to score too, which have none of these.
    def _check_computed(self) -> None:
        """Check that no label, weight or time is a computed column. Raises InputError."""
        uses = {
            "label": (self.label,),
            "labels": tuple(label.name for label in self.labels),
            "weight": (self.weight,),
            "timestamp": (self.timestamp,),
            "weights or ages of a feature": self.list_numbers,
        }
        for field_name, names in uses.items():
            computed = [name for name in names if name in self.derived]
            if computed:
                raise InputError(
                    f"schema: {field_name} names {computed[0]}, which a formula computes as an "
                    "input of the model; name a column of the log, and compute it before ingest"
                )

    def _check_inputs(self) -> None:
        """Check that all looked up tables are declared, once each. Formulas must read nothing that
        rows to score lack. Raises InputError.
        """
        weights = () if self.weight is None else (self.weight,)
        targets = (*self.label_names, *weights)
        unscored = [name for name in targets if name in self.program.inputs]
        if unscored:
            raise InputError(
                f"schema: formulas read {', '.join(unscored)}, which rows to score lack; use other "
                "columns"
            )
        if len(set(self.table_names)) < len(self.tables):
            raise InputError("schema: tables must have different names")
        for node in self.program.lookup_nodes:
            if node.table not in self.table_names:
                raise InputError(f"schema: formulas look up {node.table}, which must be in tables")
            if self.table(node.table).time is not None and self.timestamp is None:
                raise InputError(
                    f"schema: table {node.table} has a time, so that rows of the log need one; "
                    "name its column in timestamp"
                )
            keys = self.table(node.table).keys
            if len(node.keys) != len(keys):
                numbers = {1: "one key", 2: "two keys"}
                raise InputError(
                    f"schema: lookup: table {node.table} has {numbers[len(keys)]}, "
                    f"{' and '.join(keys)}, got {numbers[len(node.keys)]}; give a column of the "
                    "log for each, or change `key` of the table"
                )

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of the side tables."""
        return tuple(table.name for table in self.tables)

    def table(self, name: str) -> NamedTable:
        """Return the side table with a name."""
        return next(table for table in self.tables if table.name == name)

    @property
    def has_timed_tables(self) -> bool:
        """True if a lookup depends on the time of the log's row."""
        return any(table.time is not None for table in self.tables)

    @cached_property
    def program(self) -> Program:
        """Formulas of all computed columns."""
        formulas = {each.name: each.formula for each in self.features if each.formula is not None}
        constants: dict[str, dict[int, tuple[float, ...]]] = {}
        for function in self.fitted:
            if function.feature not in formulas:
                raise InputError(f"schema: fitted names {function.feature}, which has no formula")
            constants.setdefault(function.feature, {})[function.number] = function.constants
        return Program.from_columns(
            formulas,
            dense=self.dense,
            sparse=self.sparse,
            lists=self.lists,
            vectors={each.name: each.columns for each in self.vectors},
            timestamp=self.timestamp,
            constants=constants,
        )

    @cached_property
    def derived(self) -> tuple[str, ...]:
        """Columns that formulas compute, which no file has."""
        return tuple(step.name for step in self.program.steps)

    @cached_property
    def list_columns(self) -> tuple[str, ...]:
        """Columns of the log that are lists, of categories or numbers, but for weights."""
        read = tuple(name for name in self.lists if name not in self.derived)
        sources = self.program.sources.items()
        return (*read, *(name for name, kind in sources if kind.is_list))

    def _check_text(self) -> None:
        """Check the escape character and the encoding of text. Raises InputError."""
        if self.escape is not None and (
            len(self.escape) != 1
            or ord(self.escape) > 127
            or self.escape in f'\n\r" {self.delimiter}{self.list_delimiter}'
        ):
            raise InputError(
                "schema: escape must be one ASCII character other than a quote, a blank, a "
                f"delimiter or a line end, such as a backslash, got {self.escape!r}"
            )
        if self.encoding is not None:
            try:
                "text".encode(self.encoding)
            # ValueError: Python's codec `undefined`, or a null character
            except (LookupError, ValueError):
                raise InputError(
                    "schema: encoding must be one of Python's, such as latin-1 or cp1252, got "
                    f"{self.encoding!r}"
                ) from None

    @property
    def is_utf8(self) -> bool:
        """True if text is UTF-8."""
        return self.encoding is None or codecs.lookup(self.encoding).name == "utf-8"

    def _check_features(self) -> None:
        """Check the settings of all features. Raises InputError."""
        names = [feature.name for feature in self.features]
        if len(set(names)) != len(names):
            raise InputError(f"schema: features must name each column once, got {', '.join(names)}")
        separate = {
            feature.name
            for feature in self.features
            if feature.vocabulary not in (None, feature.name)
        }
        for feature in self.features:
            if feature.name not in self.sparse and feature.formula is None:
                raise InputError(f"schema: features names {feature.name}, which must be in sparse")
            options = (
                feature.max_length,
                feature.weights,
                feature.ages,
                feature.list_delimiter,
            )
            if any(options) and feature.name not in self.lists:
                raise InputError(
                    f"schema: feature {feature.name} has max_length, weights, ages or "
                    "list_delimiter, which need a column of lists"
                )
            if feature.aligned_with is not None:
                self._check_aligned(feature, self.feature(feature.aligned_with))
            if feature.vocabulary in separate:
                raise InputError(
                    f"schema: {feature.name} has the vocabulary of {feature.vocabulary}, which "
                    "has another; name that one in both"
                )
        weights = [feature.weights for feature in self.features if feature.weights]
        if len(set(weights)) != len(weights):
            raise InputError("schema: features must have different columns of weights")

    def _check_aligned(self, feature: Feature, first: Feature) -> None:
        field_name = f"schema: aligned_with of feature {feature.name}"
        if (
            feature.name not in self.lists
            or first.name not in self.lists
            or first.name == feature.name
        ):
            raise InputError(
                f"{field_name}: must be a list that names another column of lists, got "
                f"{first.name}. Name one."
            )
        if first.aligned_with is not None:
            raise InputError(
                f"{field_name}: must be a list without aligned_with, got {first.name}. Name "
                f"{first.aligned_with} in both."
            )
        if first.max_length != feature.max_length:
            raise InputError(
                f"{field_name}: must have the max_length of {first.name}, {first.max_length}, got "
                f"{feature.max_length}."
            )

    def _check_named_columns(self) -> None:
        """Check that lists, group, integers and optional name known columns. Raises InputError."""
        for field_name, among in (
            ("lists", self.sparse),
            ("integers", self.sparse),
            ("optional", self.dense + self.sparse),
        ):
            if self.sequence is not None and field_name == "integers":
                among = (*among, self.sequence.user)
            unknown = [name for name in getattr(self, field_name) if name not in among]
            if unknown:
                kind = "dense or sparse" if field_name == "optional" else "sparse"
                raise InputError(
                    f"schema: {field_name} names {', '.join(unknown)}, which must be in {kind}"
                )
        vectors = [vector.name for vector in self.vectors]
        if len({*vectors}) < len(vectors) or self.timestamp in vectors:
            raise InputError(
                f"schema: vectors must name each column once, and no other use, got {vectors}"
            )
        if self.timestamp in self.lists:
            raise InputError(
                f"schema: timestamp must not be a column of lists, got {self.timestamp}"
            )
        if self.group is not None and (self.group not in self.sparse or self.group in self.lists):
            raise InputError(
                "schema: group must be a column of sparse with one category per row, got "
                f"{self.group}"
            )

    def _check_sample(self) -> None:
        """Check that rows are sampled by their only label. Raises InputError."""
        if self.sample is None:
            return
        if self.label is None:
            raise InputError(
                "schema: sample needs a label of 0 and 1, got none. Name its column in label"
            )
        if self.labels:
            raise InputError(
                f"schema: sample needs a log with one label, got also {self.label_names[1]}, which "
                "would be learned from the kept rows alone. Leave out labels or sample"
            )

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """All columns of the log, in the order of files without a header."""
        named = tuple(name for name in (self.label, self.weight) if name)
        labels = tuple(label.name for label in self.labels)
        features = tuple(name for name in self.dense + self.sparse if name not in self.derived)
        times = (self.timestamp,) if self.timestamp and self.timestamp not in features else ()
        columns = named + features + self.list_numbers + labels + times
        return columns + tuple(name for name in self.program.sources if name not in columns)

    @cached_property
    def singles(self) -> tuple[str, ...]:
        """Columns of `sparse` with at most one category per row."""
        return tuple(name for name in self.sparse if name not in self.lists)

    @cached_property
    def positions(self) -> dict[str, int]:
        """Index of each column with at most one value per row: `dense` first, then `singles`."""
        return {name: index for index, name in enumerate((*self.dense, *self.singles))}

    @property
    def list_weights(self) -> tuple[str, ...]:
        """Weight columns of lists."""
        return tuple(feature.weights for feature in self.features if feature.weights)

    @property
    def list_numbers(self) -> tuple[str, ...]:
        """Columns with a number for each category of a list: weights and ages."""
        named = (feature.weights or feature.ages for feature in self.features)
        return tuple(filter(None, named))

    @property
    def aged(self) -> tuple[str, ...]:
        """Columns of lists with `Feature.ages`."""
        return tuple(feature.name for feature in self.features if feature.ages)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of all labels, the main one first. Empty for an unlabelled log."""
        return (*filter(None, [self.label]), *(label.name for label in self.labels))

    def feature(self, name: str) -> Feature:
        """Return the settings of a column of `sparse` or `vectors`."""
        for feature in self.features:
            if feature.name == name:
                return feature
        for vector in self.vectors:
            if vector.name == name:
                return Feature(name=name, list_delimiter=vector.list_delimiter)
        return _default_feature(name)

    def vector_length(self, name: str) -> int | None:
        """Return the numbers per row of a column of `vectors`, None for another column."""
        return next((each.length for each in self.vectors if each.name == name), None)

    def list_mark(self, name: str) -> str:
        """Return the separator in text of a column of `lists`, or BRACKETS."""
        return self.feature(name).list_delimiter or self.list_delimiter

    @cached_property
    def vocabularies(self) -> tuple[str, ...]:
        """Vocabulary name of each column of `sparse`."""
        return tuple(self.feature(name).vocabulary or name for name in self.sparse)

    @cached_property
    def vocabulary_owners(self) -> tuple[int, ...]:
        """Index of the first sparse column with the same vocabulary, for each sparse column."""
        return tuple(self.vocabularies.index(name) for name in self.vocabularies)

    def difference(self, other: Schema) -> str:
        """Return how another schema differs, for messages: in its columns, else in the first
        setting, such as `tables.items.content`.
        """
        settings = self._settings()
        stored = other._settings()
        name = next(name for name in settings | stored if settings.get(name) != stored.get(name))
        return f"{name} must match {settings.get(name)}, got {stored.get(name)}"

    def _settings(self) -> dict[str, object]:
        """Return the columns and fields as JSON values, those of features, tables and labels by
        their names.
        """
        settings = {"columns": self.columns} | self.to_dict()
        for kind in ("features", "tables", "labels"):
            for item in settings.pop(kind):
                settings |= {f"{kind}.{item['name']}.{key}": item[key] for key in item}
        return settings

    def computed(self) -> Schema:
        """Return the schema of rows whose formulas were computed: all inputs are plain columns."""
        if not self.derived:
            return self
        features = tuple(
            feature.replace(formula=None)
            for feature in self.features
            if feature.name in self.sparse
        )
        return self.replace(features=features, tables=(), vectors=(), fitted=())

    def unshared(self) -> Schema:
        """Return the same columns with a separate vocabulary each."""
        return self.replace(
            features=tuple(feature.replace(vocabulary=None) for feature in self.features)
        )

    def with_ages(self, *, reads_ages: bool) -> Schema:
        """Return the schema with the ages of items that were built of events with times, if
        `reads_ages`, else without any ages.
        """
        ages: dict[str, str | None] = {}
        if reads_ages:
            if self.sequence is not None and self.sequence.time is not None:
                ages[self.sequence.item] = AGE
            ages |= {feature.name: feature.ages for feature in self.features if feature.ages}
        return self._with_ages(ages)

    def with_ages_of(self, other: Schema) -> Schema:
        """Return the schema with the columns of ages that another schema has for these features."""
        return self._with_ages({feature.name: feature.ages for feature in other.features})

    def _with_ages(self, ages: Mapping[str, str | None]) -> Schema:
        features = tuple(feature.replace(ages=ages.get(feature.name)) for feature in self.features)
        return self if features == self.features else self.replace(features=features)

    def unlabelled(self) -> Schema:
        """Return the schema without labels, weight and timestamp, which only training uses."""
        return self.replace(
            label=None,
            label_rule=None,
            weight=None,
            labels=(),
            sample=None,
            timestamp=self.timestamp if self.has_timed_tables else None,
            dropped=self._not_scored,
        )

    def expanded(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the changes with a label's mapping divided into name and rule. Another label has
        no rule unless it is given.
        """
        changes = dict(changes)
        tables = changes.get("tables")
        if isinstance(tables, Mapping):
            changes["tables"] = [
                {"name": name, **(settings or {})} for name, settings in tables.items()
            ]
        vectors = changes.get("vectors")
        if isinstance(vectors, list):
            changes["vectors"] = [
                {"name": each} if isinstance(each, str) else each for each in vectors
            ]
        sample = changes.get("sample")
        if isinstance(sample, Mapping) and self.sample is None:
            changes["sample"] = RowSample.from_values(sample, where="sample.")
        self._expand_sequence(changes)
        label = changes.get("label")
        if isinstance(label, Mapping):
            fields = dict(label)
            changes["label"] = fields.pop("name", None)
            changes["label_rule"] = fields or None
        elif "label" in changes and label != self.label:
            changes.setdefault("label_rule", None)
        rule = changes.get("label_rule")
        if isinstance(rule, Mapping):
            changes["label_rule"] = LabelRule.from_values(rule, where="label.")
        return changes

    def _expand_sequence(self, changes: dict[str, Any]) -> None:
        """Build `sequence` and `split` of plain values, and leave out the columns of other lists.
        Raises InputError.
        """
        sequence = changes.get("sequence")
        if isinstance(sequence, Mapping):
            fields = _renamed_with(sequence)
            changes["sequence"] = (
                SequenceColumns.from_values(fields, where="sequence.")
                if self.sequence is None
                else fields
            )
        if self.sequence is not None and "sequence" in changes:
            for name in ("sparse", "lists", "optional", "features"):
                changes.setdefault(name, ())
        split = changes.get("split")
        if isinstance(split, Mapping) and self.split is None:
            changes["split"] = SequenceSplit.from_values(split, where="split.")

    @property
    def _not_scored(self) -> tuple[str, ...]:
        """Columns that lines to score may lack."""
        read = (*self.dense, *self.sparse, *self.program.inputs)
        is_read = self.timestamp in read or self.has_timed_tables
        times = (self.timestamp,) if self.timestamp and not is_read else ()
        return (*self.dropped, *self.label_names, *((self.weight,) if self.weight else ()), *times)

    @cached_property
    def line_forms(self) -> tuple[tuple[str, ...], ...]:
        """Column names of a line without a header: all columns of the log's file, and those without
        labels, weight and timestamp. Empty if the order is unknown. In hexadecimal text it is that
        of the schema, unless the log had another.
        """
        full = self.header
        if full is None:
            full = (*self.dropped, *self.columns) if self.tokens == "hexadecimal" else ()
        bare = tuple(name for name in full if name not in self._not_scored)
        return tuple(dict.fromkeys(form for form in (full, bare) if form))

    def line_columns(self, num_fields: int) -> tuple[str, ...] | None:
        """Return the column names of a line with `num_fields` fields and no header, None if no line
        has as many.
        """
        return next((form for form in self.line_forms if len(form) == num_fields), None)

    def to_dict(self) -> dict[str, Any]:
        plain = super().to_dict()
        # Files with a schema stay the same if they have none of these.
        return {name: value for name, value in plain.items() if value or name not in _NEWEST}

    def describe(self) -> dict[str, Any]:
        """Return the fields that decide how a log is read, as JSON values, without newer ones of no
        effect, to keep hashes.
        """
        plain = self.to_dict()
        for name in ("group", "sample"):
            plain.pop(name, None)
        # Stored names of files would be code to run.
        if ":" in (self.format or ""):
            del plain["format"]
        for table in plain["tables"]:
            if ":" in table.get("format", ""):
                del table["format"]
        for feature in plain["features"]:
            for name in ("aligned_with", "list_delimiter", "formula"):
                if feature[name] is None:
                    del feature[name]
        if self.tokens == "hexadecimal":
            del plain["category_rules"]
        return {
            name: value
            for name, value in plain.items()
            if name not in _ADDED or value != _ADDED[name]
        }

    @classmethod
    def described(cls, stored: dict[str, Any]) -> Schema:
        """Return the schema of a description from `describe`."""
        rules = stored.get("category_rules", 1 if stored.get("tokens") == "any" else 2)
        return cls(label=None, dense=("-",)).updated(
            {"tokens": "hexadecimal", **stored, "category_rules": rules}
        )


@dataclass(frozen=True, kw_only=True)
class PlaceholderSchema(Schema):
    """Example columns of a recipe for your own log, which training does not accept. Its copies with
    changes are real schemas, and its plain values are empty, so that a file of the recipe's fields
    does not declare the example as the log's columns.
    """

    @property
    def example(self) -> str:
        """The columns as text of a schema file."""
        plain = super().to_dict()
        default = Schema(dense=("-",)).to_dict()
        shown = {
            name: value
            for name, value in plain.items()
            if name == "label" or value not in (default.get(name), [])
        }
        if self.features:
            features = [
                {name: value for name, value in feature.items() if value is not None}
                for feature in plain["features"]
            ]
            shown["features"] = features
        return json.dumps(shown).replace('"', "")

    def reject(self, path: str) -> NoReturn:
        """Raise InputError for the log at a path, whose columns the user has to name."""
        raise InputError(
            "schema: the recipe needs the columns of your log, got none. Pass --schema FILE with "
            f"the like of {self.example}. `rayrec schema {path} --out FILE` drafts it."
        )

    def to_dict(self) -> dict[str, Any]:
        return {}

    def updated(  # type: ignore[override]
        self, changes: Mapping[str, Any], *, where: str = ""
    ) -> Schema:
        if not changes:
            return self
        values = {field.name: getattr(self, field.name) for field in fields(Schema)}
        return Schema(**values).updated(changes, where=where)


_ADDED: dict[str, Any] = packaged_json(__package__, "added_schema_fields.json")
"""Fields added in later versions, with their values in older schemas."""


_NEWEST: Final = ("vectors", "fitted", "sample", "sequence", "split")
"""Fields that `Schema.to_dict` leaves out if they are empty."""


_NOT_OF_EVENTS: Final = (
    "labels",
    "dense",
    "weight",
    "tables",
    "vectors",
    "sample",
    "group",
    "timestamp",
)
"""Fields that a schema with `sequence` must not have."""


def _shown(value: Any) -> str:
    """Return a field's value as text, such as the names of its items."""
    if isinstance(value, tuple):
        return ", ".join(str(getattr(each, "name", each)) for each in value)
    return str(value.to_dict() if isinstance(value, Config) else value)


_SYNONYMS = {
    "target": "label",
    "numerical": "dense",
    "numeric": "dense",
    "continuous": "dense",
    "categorical": "sparse",
}
"""Names of other tools for fields of a schema."""


def _take_items_as_text(node: Any, *, nested: bool) -> None:
    """Convert the items of a YAML list to text. `nested`: the items of all lists inside a node."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return
    for each in node.value:
        if isinstance(node, yaml.SequenceNode) and isinstance(each, yaml.ScalarNode):
            each.tag = "tag:yaml.org,2002:str"
        elif nested:
            inner = each[1] if isinstance(node, yaml.MappingNode) else each
            _take_items_as_text(inner, nested=True)


def _safe_load(text: str) -> Any:
    """Parse YAML. Items of lists, also inside `label`, `tables` and `sequence`, are text as
    written: `no` and `null` are values and names.
    """
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            _take_items_as_text(value, nested=key.value in ("label", "tables", "sequence"))
        return loader.construct_document(node)
    finally:
        loader.dispose()


def load_schema(text: str, where: str) -> Schema:
    """Parse a schema from YAML (or JSON) text, such as `{label: click, dense: [age], sparse: [user,
    item]}`. `where` is the text's source, for messages. Raises InputError for invalid YAML or
    columns.
    """
    import yaml

    try:
        values = _safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise InputError(f"{where}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise InputError(
            f"{where}: must be a mapping, such as {{label: click, dense: [age], sparse: [user, "
            f"item]}}"
        )
    other = {name: _SYNONYMS[name] for name in values if name in _SYNONYMS}
    if other:
        raise InputError(
            f"{where}: has fields {', '.join(other)}; name them {', '.join(other.values())}"
        )
    try:
        return Schema(dense=("-",)).updated({"dense": [], **values})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
