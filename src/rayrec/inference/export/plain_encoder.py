"""Encoder of raw click log rows as inputs of the model in this folder. Needs only NumPy.

    encoder = Encoder("preprocessor")
    dense, ids = encoder.encode([{"age": 3, "user": "u1", "tags": ["a", "b"]}, {"age": None}])

This file is part of a rayrec export and needs no rayrec.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np

from rayrec.data.encoding.rules import (
    EPOCH_UNITS,
    TIME_FORMATS,
    DenseColumn,
    SparseColumn,
    age_gaps,
    bracket_items,
    bucket_tokens,
    expand_bag,
    seconds_of,
)
from rayrec.data.features.definitions import (
    DECIMAL_TEXT,
    INT64_TEXT,
    TRUE_AND_FALSE,
    category_token,
    value_of,
)
from rayrec.hashing import key_tokens, xxh64

Ids = np.ndarray | tuple[np.ndarray, ...]
"""Ids: int64 [rows], int64 [rows, ids per row], or for lists the concatenated ids and the number of
ids in each row. Lists with weights have the weight of each id too, float32. Lists with ages have
the seconds from each id to the next one, from the last one to the row's time.
"""

_HEXADECIMAL = re.compile(r"[0-9a-fA-F]{8}")
_INTEGER = re.compile(r"([+-]?[0-9]+)(\.0*)?")
_LIMIT = 10**18
_STORED = {
    "version",
    "profile",
    "schema",
    "dense",
    "sparse",
    "integer_buckets",
    "file_minimum",
    "multi_hot",
    "constants",
    "formulas",
    "names",
    "hash",
}
_SCHEMA = {
    *(
        "label",
        "dense",
        "sparse",
        "tokens",
        "lists",
        "weight",
        "delimiter",
        "list_delimiter",
        "integers",
        "optional",
    ),
    *(
        "features",
        "tables",
        "vectors",
        "fitted",
        "labels",
        "timestamp",
        "sequence",
        "split",
        "nan",
        "category_rules",
        "label_rule",
        "missing",
        "encoding",
        "escape",
        "header",
    ),
    *("header_row", "dropped", "format"),
}
_FEATURE = {
    *(
        "name",
        "formula",
        "vocabulary",
        "max_length",
        "weights",
        "ages",
        "aligned_with",
        "list_delimiter",
    )
}


class Encoder:
    """Preprocessor of an export. `folder` is its folder `preprocessor`."""

    def __init__(self, folder: str) -> None:
        """Load the Preprocessor. Raises ValueError for settings that are unknown to this version of
        the file.
        """
        with open(os.path.join(folder, "preprocessor.json"), encoding="utf-8") as file:
            stored = json.load(file)
        tokens = np.load(os.path.join(folder, "tokens.npy"), allow_pickle=False)
        _reject_unknown(stored, _STORED, "the file")
        self.schema: dict[str, Any] = stored["schema"]
        _reject_unknown(self.schema, _SCHEMA, "schema")
        self._features = _by_name(self.schema.get("features", ()))
        self._vectors = _by_name(self.schema.get("vectors", ()))
        for name, feature in self._features.items():
            _reject_unknown(feature, _FEATURE, f"feature {name}")
        self._hexadecimal = self.schema["tokens"] == "hexadecimal"
        self._booleans = self.schema.get("category_rules", 1) >= 2
        # Checked trees, so that the parser and the types of formulas are not needed here
        no_formulas: dict[str, Any] = {"inputs": {}, "steps": []}
        self._formulas = stored.get("formulas", no_formulas)
        self._computed = {step["name"] for step in self._formulas["steps"]}
        self._tables = _open_tables(folder, self.schema.get("tables", ()))
        self._scored = self._columns_of_log()
        self._missing = set(self.schema.get("missing", ()))
        numbers = [_marker_number(marker) for marker in self._missing]
        self._missing_numbers = {number for number in numbers if number is not None}
        self._missing_tokens = {
            int(number) % 2**64 for number in self._missing_numbers if _is_integral(number)
        }
        self._buckets: bool = stored["integer_buckets"]
        minimum = stored["file_minimum"]
        self._least = None if minimum is None else minimum[""]
        self._multi_hot: dict[str, Any] | None = stored["multi_hot"]
        if self._multi_hot is not None:
            _reject_unknown(self._multi_hot, {"sizes", "distribution", "seed"}, "multi_hot")
        self._dense = [_column(DenseColumn, "dense", values) for values in stored["dense"]]
        self._sparse: list[tuple[SparseColumn, Callable[[np.ndarray], np.ndarray]]] = []
        names = [
            *(self.schema["dense"] if self._buckets else ()),
            *self.schema["sparse"],
        ]
        first = 0
        vocabularies = {}
        for name, values in zip(names, stored["sparse"], strict=True):
            column = _column(SparseColumn, name, values)
            vocabulary = self._features.get(name, {}).get("vocabulary") or name
            if vocabulary not in vocabularies:  # The first column that uses it
                vocabularies[vocabulary] = tokens[first : first + (column.num_tokens or 0)]
                first += len(vocabularies[vocabulary])
            self._sparse.append((column, _make_lookup(vocabularies[vocabulary], column)))

    def _columns_of_log(self) -> set[str]:
        """Return the columns of the log that rows need."""
        settings = self._features.values()
        numbers = [feature.get("weights") or feature.get("ages") for feature in settings]
        features = {*self.schema["dense"], *self.schema["sparse"]}
        read = features - self._computed
        return {*read, *self._formulas["inputs"], *filter(None, numbers)}

    def parse(self, lines: Iterable[str]) -> list[dict[str, str]]:
        """Parse lines of the log without a header, labelled or not, into rows for `encode`. Their
        columns have the order of the training log. For files with a header use csv.DictReader, and
        strip blanks around values. Raises ValueError for a line with a wrong number of columns or a
        wrong quote, and if the training log had no order.
        """
        forms = {len(form): form for form in self._line_forms()}
        rows = []
        for number, values in enumerate(self._split_lines(lines, forms)):
            if len(values) not in forms:
                needed = " or ".join(map(str, sorted(forms)))
                raise ValueError(f"row {number} must have {needed} columns, got {len(values)}")
            row = dict(zip(forms[len(values)], values, strict=True))
            rows.append({name: value for name, value in row.items() if name in self._scored})
        return rows

    def _line_forms(self) -> list[list[str]]:
        """Return the columns of a line: all, and those without label, weight and time."""
        schema = self.schema
        full = schema.get("header")
        if full is None and self._hexadecimal:
            full = [
                *([schema["label"]] if schema.get("label") else ()),
                *schema["dense"],
                *schema["sparse"],
            ]
        if not full:
            raise ValueError(
                "lines have no known order of columns, since the training log had none; give rows "
                "with names"
            )
        labels = [label["name"] for label in schema.get("labels", ())]
        unused = {
            schema.get("label"),
            schema.get("weight"),
            schema.get("timestamp"),
            *labels,
        } - self._scored
        return [full, [name for name in full if name not in unused]]

    def _split_lines(self, lines: Iterable[str], widths: Collection[int]) -> list[list[str]]:
        """Return the fields of each row, by the rules for the training log. `widths`: possible
        numbers of fields.
        """
        if self._hexadecimal:
            return [line.rstrip("\r\n").split("\t") for line in lines]
        mark = self.schema["delimiter"]
        escape = self.schema.get("escape")
        inner = r'(?:[^"]|"")*+'
        if escape:
            inner = rf'(?:[^"{re.escape(escape)}]|""|{re.escape(escape)}.)*+'
        text = "\n".join(line.rstrip("\r\n") for line in lines)
        # The default, in place of which files may have others
        for other in ("\t", ",", ";", "::") if mark == "\t" else ():
            first = _row_pattern(other, inner).search(text)
            if first and len(self._fields(first[0], other, inner)) in widths:
                mark = other
                break
        split = []
        for number, row in enumerate(_row_pattern(mark, inner).finditer(text)):
            values = self._fields(row[0], mark, inner)
            if None in values:
                raise ValueError(
                    f"row {number} has an unmatched quote, or text after a closing quote"
                )
            split.append([value for value in values if value is not None])
        return split

    def _fields(self, row: str, mark: str, inner: str) -> list[str | None]:
        """Return the fields of a row, None for one with a wrong quote."""
        end = re.escape(mark)
        plain_text = _plain_text(mark)
        values: list[str | None] = []
        for match in re.finditer(
            rf'(?:^|{end})(?:"({inner})"[ \t]*?(?={end}|\Z)|({plain_text}))',
            row,
            re.DOTALL,
        ):
            quoted = match[1]
            plain = match[2]
            if quoted is not None:
                escape = re.escape(self.schema.get("escape") or '"')
                values.append(
                    re.sub(
                        rf'"(")|{escape}(["{escape}])',
                        lambda pair: pair[1] or pair[2],
                        quoted,
                    )
                )
            elif plain.startswith('"'):
                values.append(None)
            else:
                values.append(plain.strip(" \t") if self._booleans else plain)
        return values

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, list[Ids]]:
        """Encode rows. Returns dense features, float32 [rows, dense columns + indicators], and the
        ids of each sparse column. An indicator is 1 if the number of its column is missing.
        `manifest.json` names them after the dense columns.

        A value that is absent, None, empty or in the schema's missing is missing. Categories are
        text, integers or dates. Lists are lists of categories, or text with their list_delimiter. A
        date or time in a column of numbers, or its ISO 8601 text, becomes its seconds since 1970.

        Raises ValueError with row and column for anything else.
        """
        rows = [self._with_formulas(values, row) for row, values in enumerate(rows)]
        names = self.schema["dense"]
        numbers = [self._numbers(rows, name) for name in names]
        categories = [self._categories(rows, name) for name in self.schema["sparse"]]
        if self._buckets:
            categories = [
                *(
                    (bucket_tokens(values), missing | (values == 0), ())
                    for values, missing in numbers
                ),
                *categories,
            ]
            numbers = []
        indicators = [index for index, column in enumerate(self._dense) if column.indicator]
        dense = np.empty((len(rows), len(numbers) + len(indicators)), np.float32)
        for index, (column, values) in enumerate(zip(self._dense, numbers, strict=True)):
            dense[:, index] = column.encode(*values)
        for position, index in enumerate(indicators, start=len(numbers)):
            dense[:, position] = numbers[index][1]
        ids: list[Ids] = []
        for (rule, lookup), (tokens, missing, list_parts) in zip(
            self._sparse,
            categories,
            strict=True,
        ):
            encoded = rule.encode(tokens, missing, lookup, np.dtype(np.int64))
            ids.append((encoded, *list_parts) if list_parts else encoded)
        return dense, self._expanded(ids)

    def _with_formulas(self, values: Mapping[str, Any], row: int) -> Mapping[str, Any]:
        """Return a row with the columns that formulas compute."""
        if not self._computed:
            return values
        columns = {
            name: self._formula_input(values.get(name), name, kind, row)
            for name, kind in self._formulas["inputs"].items()
        }
        time = self._time_of(values, row)

        def lookup(table: str, keys: list[Any], column: str, kind: Mapping[str, Any]) -> Any:
            return self._tables[table].value(keys, time, column_key(column, kind))

        for step in self._formulas["steps"]:
            columns[step["name"]] = value_of(step["node"], columns, lookup)
        return {**values, **{name: columns[name] for name in self._computed}}

    def _time_of(self, values: Mapping[str, Any], row: int) -> int | None:
        """Return the time of a row in microseconds, None if no side table depends on it."""
        if all(table.times is None for table in self._tables.values()):
            return None
        name = self.schema["timestamp"]
        value = _plain(values.get(name))
        return _microseconds(value, f"row {row}: {name} must be a time, got {value!r}")

    def _formula_input(self, value: Any, name: str, kind: Mapping[str, Any], row: int) -> Any:
        """Return a value as formulas take it: a number, text or microseconds, None if missing, or a
        list of these, empty if missing.
        """
        value = _plain(value)
        if not kind["is_list"]:
            return self._formula_item(value, name, kind, row)
        if value is None:
            return []
        items = self._split(value, name) if isinstance(value, str) else value
        if not isinstance(items, (list, tuple, np.ndarray)):
            raise ValueError(f"row {row}: {name} must be a list, got {items!r}")
        read = [self._formula_item(_plain(item), name, kind, row) for item in items]
        present = [item for item in read if item is not None]
        length = self._vectors[name]["length"] if name in self._vectors else len(present)
        if present and len(present) != length:
            raise ValueError(f"row {row}: {name} must have {length} numbers, got {len(present)}")
        return present

    def _formula_item(
        self,
        value: Any,
        name: str,
        kind: Mapping[str, Any],
        row: int,
    ) -> Any:
        """Return a value, or an item of a list, as formulas take it."""
        if value is None or value == "":
            return None
        if isinstance(value, float) and np.isnan(value):
            return None
        if isinstance(value, str) and value in self._missing:
            return None
        if kind["kind"] == "number":
            number = self._number(value, name, row)
            return None if number is None or np.isnan(number) else float(number)
        if kind["kind"] == "time":
            return _microseconds(value, f"row {row}: {name} must be a time, got {value!r}")
        return self._formula_text(value, name, row)

    def _formula_text(self, value: Any, name: str, row: int) -> str | None:
        """Return a category's text, which is that of its integer if it is one."""
        if name in self.schema.get("integers", ()):
            token = self._token(value, name, row)
            if token is None:
                return None
            is_negative = token >= 2**63  # Two's complement
            return str(token - 2**64 if is_negative else token)
        text = _category_text(
            value,
            f"row {row}: {name} must be text or an integer, got {value!r}",
        )
        is_integer = INT64_TEXT.fullmatch(text) is not None
        if is_integer and int(text) % 2**64 in self._missing_tokens:
            return None
        return text

    def _numbers(
        self,
        rows: Sequence[Mapping[str, Any]],
        name: str,
    ) -> tuple[np.ndarray, np.ndarray]:
        parsed = _read_values(rows, name, self._number)
        missing = np.array([value is None for value in parsed], bool)
        dtype = np.int64 if self._hexadecimal else np.float64
        values = np.array([0 if value is None else value for value in parsed], dtype)
        if self._least is not None:
            return values - self._least, np.zeros(len(rows), bool)
        return values, missing

    def _number(self, value: Any, name: str, row: int) -> float | int | None:
        if isinstance(value, str) and (value in self._missing or not value.strip(" \t")):
            return None
        number = _log_integer(value) if self._hexadecimal else _log_number(value)
        if number is None:
            return None
        if isinstance(number, float) and np.isnan(number) and self.schema.get("nan") == "missing":
            return None
        if name in self._computed:
            # No input can be so large, and no row is at fault. Markers are values of files.
            return number if -_LIMIT <= number <= _LIMIT else None
        kinds = int if self._hexadecimal else (int, float)
        if not isinstance(number, kinds) or not -_LIMIT <= number <= _LIMIT:
            raise ValueError(f"row {row}: {name} must be a number of this column, got {number!r}")
        return None if number in self._missing_numbers else number

    def _categories(
        self,
        rows: Sequence[Mapping[str, Any]],
        name: str,
    ) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
        """Return tokens, a mask of missing ones, and for lists the number of tokens in each row and
        their weights, or the seconds between them, if they have some.
        """
        list_parts: tuple[np.ndarray, ...] = ()
        if name in self.schema["lists"]:
            feature = self._features.get(name, {})
            lists = self._aligned_lists(rows, name)
            # The last ones that are not missing
            max_length = feature.get("max_length") or 0
            positions = [_positions(row_list)[-max_length:] for row_list in lists]
            tokens: list[int | None] = []
            for row_list, row_positions in zip(lists, positions, strict=True):
                tokens += [row_list[position] for position in row_positions] or [None]
            list_parts = (np.array([max(1, len(each)) for each in positions], np.int64),)
            if feature.get("weights"):
                numbers = self._list_numbers(rows, name, lists, feature["weights"])
                weights = _selected(numbers, positions, 1.0)
                list_parts += (weights.astype(np.float32),)
            elif feature.get("ages"):
                numbers = self._list_numbers(rows, name, lists, feature["ages"])
                ages = _selected(numbers, positions, 0.0)
                list_parts += (age_gaps(ages, list_parts[0]),)
        else:
            tokens = _read_values(rows, name, self._token)
        missing = np.array([token is None for token in tokens], bool)
        dtype = np.uint32 if self._hexadecimal else np.uint64
        return (
            np.array([token or 0 for token in tokens], dtype),
            missing,
            list_parts,
        )

    def _list_numbers(
        self,
        rows: Sequence[Mapping[str, Any]],
        name: str,
        lists: Sequence[Sequence[int | None]],
        column: str,
    ) -> list[list[float | None]]:
        """Return the weights or ages of each row's list, None for those that are not numbers.
        Raises ValueError for another number of them than categories, and for a category without
        one. A row may have no ages, which are then 0.
        """
        may_lack = column == self._features[name].get("ages")
        all_numbers = []
        for row, (values, tokens) in enumerate(zip(rows, lists, strict=True)):
            items = _plain(values.get(column))
            if isinstance(items, str):
                items = self._split(items, name)
            numbers = [_weight(_plain(item)) for item in (() if items is None else items)]
            has_none = not any(number is not None for number in numbers)
            if has_none and may_lack:
                numbers = [0.0] * len(tokens)
            elif has_none and not _positions(tokens):
                numbers = [None] * len(tokens)
            if len(numbers) != len(tokens):
                raise ValueError(
                    f"row {row}: {column} must have a number for each category of {name}"
                )
            for position in _positions(tokens):
                if numbers[position] is None:
                    raise ValueError(f"row {row}: {column} must be finite numbers")
            all_numbers.append(numbers)
        return all_numbers

    def _aligned_lists(
        self,
        rows: Sequence[Mapping[str, Any]],
        name: str,
    ) -> list[list[int | None]]:
        """Return the tokens of each row's list, None if missing. Raises ValueError if the feature's
        `aligned_with` has its tokens at other positions.
        """
        lists = self._lists(rows, name)
        other = self._features.get(name, {}).get("aligned_with")
        if other:
            for row, (tokens, other_tokens) in enumerate(
                zip(lists, self._lists(rows, other), strict=True)
            ):
                if _positions(tokens) != _positions(other_tokens):
                    raise ValueError(
                        f"row {row}: categories of {name} are not aligned with {other}"
                    )
        return lists

    def _lists(self, rows: Sequence[Mapping[str, Any]], name: str) -> list[list[int | None]]:
        """Return the tokens of each row's list, None if missing."""
        lists = []
        for row, values in enumerate(rows):
            items = _plain(values.get(name))
            if isinstance(items, str):
                items = self._split(items, name)
            if not isinstance(items, (list, tuple, np.ndarray, type(None))):
                raise ValueError(f"row {row}: {name} must be a list, got {items!r}")
            lists.append(
                [self._token(_plain(item), name, row) for item in (() if items is None else items)]
            )
        return lists

    def _split(self, text: str, name: str) -> list[str] | str:
        """Split a list in text. Text that is not a list in brackets is returned unchanged."""
        settings = self._features.get(name) or self._vectors.get(name, {})
        mark = settings.get("list_delimiter")
        if text in self._missing:
            return []
        if mark == "brackets":
            items = bracket_items(text)
            return text if items is None else items
        if mark is not None:
            return [item.strip(" \t") for item in text.split(mark)]
        return text.split(self.schema["list_delimiter"])

    def _token(self, value: Any, name: str, row: int) -> int | None:
        if value is None or value == "" or (isinstance(value, float) and np.isnan(value)):
            return None
        is_computed = name in self._computed
        if isinstance(value, str) and value in self._missing and not is_computed:
            return None
        if self._hexadecimal:
            if not (isinstance(value, str) and _HEXADECIMAL.fullmatch(value)):
                raise ValueError(
                    f"row {row}: {name} must be 8 hexadecimal digits as text, got {value!r}"
                )
            token: int | None = int(value, 16)
        else:
            token = self._category_token(value, name, row)
        return None if token in self._missing_tokens and not is_computed else token

    def _category_token(self, value: Any, name: str, row: int) -> int | None:
        if isinstance(value, date) and not isinstance(value, datetime):
            return _text_token(value.isoformat(), self._booleans)
        if isinstance(value, Decimal):
            if value.is_nan():
                return None
            if _is_integer(value):
                value = str(int(value))  # Of any size, as the digits in a file
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if isinstance(value, int) and -(2**63) <= value < 2**64:  # Includes True and False
            return _text_token(str(int(value)), self._booleans)
        if not isinstance(value, str):
            raise ValueError(f"row {row}: {name} must be text or a 64-bit integer, got {value!r}")
        if name in self.schema.get("integers", ()):
            return _integer_token(value, f"row {row}: {name} must be an integer, got {value!r}")
        return _text_token(value, self._booleans)

    def _expanded(self, ids: list[Ids]) -> list[Ids]:
        if self._multi_hot is None:
            return ids
        seed = self._multi_hot["seed"]
        pareto = self._multi_hot["distribution"] == "pareto"
        return [
            column_ids
            if size == 1 or isinstance(column_ids, tuple)
            else expand_bag(
                column_ids,
                size,
                rule.num_embeddings,
                column=number,
                seed=seed,
                pareto=pareto,
            )
            for number, (column_ids, size, (rule, _)) in enumerate(
                zip(ids, self._multi_hot["sizes"], self._sparse, strict=True)
            )
        ]


def column_key(column: str, kind: Mapping[str, Any]) -> str:
    """Return the beginning of the names of a column's arrays in a side table."""
    return f"{column} {kind['kind']} {'list' if kind['is_list'] else 'value'}"


class _Table:
    """Side table of an export."""

    def __init__(self, path: str) -> None:
        with np.load(path, allow_pickle=False) as stored:
            self._arrays = dict(stored)
        self.times = self._arrays.get("times")

    def value(self, keys: Sequence[str | None], time: int | None, column: str) -> Any:
        """Return the value in the row of one or two keys, the newest that is not after `time` in a
        table with times. None without one.
        """
        present = [key for key in keys if key is not None]
        if len(present) < len(keys):
            return None
        tokens = self._arrays["tokens"]
        token = _key_token(present)
        first = int(np.searchsorted(tokens, token, "left"))
        stop = int(np.searchsorted(tokens, token, "right"))
        if self.times is not None and time is not None:
            earlier = np.searchsorted(self.times[first:stop], time, "right")
            stop = first + int(earlier)
        if first == stop:
            return None
        row = int(self._arrays["rows"][stop - 1])
        ends = self._arrays.get(f"{column} list ends")
        if ends is None:
            return self._item(row, column)
        if self._arrays[f"{column} no list"][row]:
            return None
        start = int(ends[row - 1]) if row else 0
        return [self._item(item, column) for item in range(start, int(ends[row]))]

    def _item(self, row: int, column: str) -> Any:
        if self._arrays[f"{column} missing"][row]:
            return None
        if f"{column} values" in self._arrays:
            return self._arrays[f"{column} values"][row].item()
        ends = self._arrays[f"{column} ends"]
        start = int(ends[row - 1]) if row else 0
        return self._arrays[f"{column} text"][start : int(ends[row])].tobytes().decode()


def _key_token(keys: Sequence[str]) -> np.uint64:
    """Return the token of one key, or of two together."""
    columns = [np.array([_text_token(key, True)], np.uint64) for key in keys]
    return np.uint64(key_tokens(columns)[0])


def _open_tables(folder: str, tables: Sequence[Mapping[str, Any]]) -> dict[str, _Table]:
    """Open the side tables of an export, by name."""
    return {
        table["name"]: _Table(os.path.join(folder, "tables", f"{number}.npz"))
        for number, table in enumerate(tables)
    }


def _read_values(
    rows: Sequence[Mapping[str, Any]], name: str, read: Callable[[Any, str, int], Any]
) -> list[Any]:
    """Return what `read` returns for a column's value, its name and the row, for each row. Equal
    texts are read once, as most columns repeat theirs.
    """
    by_text: dict[str, Any] = {}
    results = []
    for row, values in enumerate(rows):
        value = _plain(values.get(name))
        if not isinstance(value, str):
            results.append(read(value, name, row))
            continue
        if value not in by_text:
            by_text[value] = read(value, name, row)
        results.append(by_text[value])
    return results


def _weight(value: Any) -> float | None:
    """Return a weight; None if it is no finite number."""
    if isinstance(value, str):
        text = value.strip(" \t")
        value = float(text) if DECIMAL_TEXT.fullmatch(text) else None
    if not isinstance(value, (int, float, Decimal)):
        return None
    number = float(value)
    return number if -_LIMIT <= number <= _LIMIT else None


def _selected(
    numbers: Sequence[Sequence[float | None]],
    positions: Sequence[Sequence[int]],
    missing: float,
) -> np.ndarray:
    """Return the numbers at some positions of each row, `missing` for the missing category of an
    empty list.
    """
    flat: list[float] = []
    for row_numbers, row_positions in zip(numbers, positions, strict=True):
        flat += [row_numbers[position] or 0.0 for position in row_positions] or [missing]
    return np.array(flat, np.float64)


def _positions(tokens: Sequence[int | None]) -> list[int]:
    return [index for index, token in enumerate(tokens) if token is not None]


def _plain_text(mark: str) -> str:
    """Return the pattern of text up to the next delimiter or line end."""
    end = re.escape(mark)
    return rf"[^\r\n{end}]*+" if len(mark) == 1 else rf"(?:(?!{end})[^\r\n])*+"


def _row_pattern(mark: str, inner: str) -> re.Pattern[str]:
    """Return the pattern of a row that is not empty, up to its line end outside quotes."""
    field = rf'(?:"{inner}")?+{_plain_text(mark)}'
    return re.compile(rf"(?=[^\r\n]){field}(?:{re.escape(mark)}{field})*+", re.DOTALL)


def _marker_number(marker: str) -> float | None:
    """Return the number that a marker of missing values stands for. None for other text."""
    text = marker.strip(" \t")
    if text in TRUE_AND_FALSE:
        return float(TRUE_AND_FALSE[text])
    return float(text) if DECIMAL_TEXT.fullmatch(text) else None


def _is_integral(number: float) -> bool:
    return number.is_integer() and abs(number) < 2**53


def _category_text(value: Any, error: str) -> str:
    """Return a category's text, which is that of the integer if it is one."""
    if isinstance(value, date) and not isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, str):
        return str(TRUE_AND_FALSE[value]) if value in TRUE_AND_FALSE else value
    if isinstance(value, Decimal) and _is_integer(value):
        return str(int(value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if isinstance(value, int):
        return str(int(value))
    raise ValueError(error)


def _microseconds(value: Any, error: str) -> int:
    """Return a time in microseconds since 1970-01-01 00:00 UTC."""
    if isinstance(value, str) and DECIMAL_TEXT.fullmatch(value):
        value = float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        scale = next(scale for limit, scale in EPOCH_UNITS if abs(value) < limit)
        return round(value / scale * 1e6)
    seconds = seconds_of(value) if isinstance(value, (str, date)) else None
    if seconds is not None:
        return round(seconds * 1e6)
    for form in TIME_FORMATS if isinstance(value, str) else ():
        try:
            time = datetime.strptime(value, form).replace(tzinfo=UTC)
        except ValueError:
            continue
        return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    raise ValueError(error)


def _plain(value: Any) -> Any:
    """Convert a value to its JSON type. Dates and decimal numbers stay as they are."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        return value.decode()
    return value


def _log_integer(value: Any) -> Any:
    """Convert a value to an integer if it is one. Others are returned as they are."""
    if isinstance(value, Decimal):
        value = int(value) if _is_integer(value) else float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch("-?[0-9]+", value.strip(" \t")):
        return int(value)
    return value


def _log_number(value: Any) -> Any:
    """Convert a value to a number, dates and times to seconds. Others are returned as they are."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, date):
        return seconds_of(value)
    if not isinstance(value, str):
        return value
    text = value.strip(" \t")
    if text in TRUE_AND_FALSE:
        return TRUE_AND_FALSE[text]
    if text in ("nan", "NaN", "NAN") or DECIMAL_TEXT.fullmatch(text):
        return float(text)
    seconds = seconds_of(text)
    return value if seconds is None else seconds


def _is_integer(value: Decimal) -> bool:
    return value.is_finite() and value == value.to_integral_value()


def _by_name(items: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in items}


def _reject_unknown(stored: Mapping[str, Any], allowed: set[str], location: str) -> None:
    unknown = sorted(stored.keys() - allowed)
    if unknown:
        raise ValueError(
            f"preprocessor.json: unknown setting {unknown[0]} in {location}; use the encode.py of "
            "the same export"
        )


def _column(cls: Any, name: str, values: dict[str, Any]) -> Any:
    _reject_unknown(values, {field.name for field in fields(cls)}, f"column {name}")
    return cls(**values)


def _make_lookup(
    vocabulary: np.ndarray,
    column: SparseColumn,
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from tokens to ids. `vocabulary` has the vocabulary's tokens in the order
    of their ids.
    """
    order = np.argsort(vocabulary)
    ordered = vocabulary[order]
    ids = column.ids()[order] if len(vocabulary) else order

    def lookup(tokens: np.ndarray) -> np.ndarray:
        if not len(ordered):
            return np.full(len(tokens), column.unknown_id, np.int64)
        positions = np.minimum(np.searchsorted(ordered, tokens), len(ordered) - 1)
        return np.where(ordered[positions] == tokens, ids[positions], column.unknown_id)

    return lookup


def _integer_token(text: str, error: str) -> int | None:
    text = text.strip(" \t")
    if text == "" or text.lower() == "nan":
        return None
    if text in TRUE_AND_FALSE:
        return TRUE_AND_FALSE[text]
    match = _INTEGER.fullmatch(text)
    if match is None or not -(2**63) <= int(match[1]) < 2**63:
        raise ValueError(error)
    return int(match[1]) % 2**64


@lru_cache(maxsize=1 << 20)
def _text_token(text: str, booleans: bool) -> int:
    if text in TRUE_AND_FALSE and not booleans:
        return xxh64(text.encode())
    return category_token(text)
