"""Parser of Arrow tables to raw columns: numbers, categories and lists of many types, counting
invalid rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rayrec.data.encoded_rows import JaggedIds, expand_ranges
from rayrec.data.encoding.rules import age_gaps
from rayrec.data.formats.row_faults import (
    FAULT,
    MALFORMED,
    TOO_FEW,
    TOO_MANY,
    TRAILING,
    UNMATCHED,
)
from rayrec.data.logs.column_values import (
    EMPTY,
    LIMIT,
    REJECTED,
    VALUE,
    Markers,
    Text,
    category_tokens,
    decimal_tokens,
    float_tokens,
    integer_tokens,
    is_list,
    is_text,
    parse_integers,
    parse_numbers,
    parse_times,
    plain_array,
    resolved,
    split_lists,
    type_error,
)
from rayrec.data.logs.faults import (
    LABEL_FAULT,
    TRAILING_FAULT,
    UTF8_FAULT,
    Fault,
    Faults,
    distinct_labels,
)
from rayrec.data.raw_block import (
    RawBlock,
    category_type,
    number_type,
    packed_bits,
)
from rayrec.native import call
from rayrec.schema import Feature, Label, LabelRule, Schema

_KINDS = (
    "label is missing",
    LABEL_FAULT,
    "weight is not a number of 0 or more",
    "not a finite number",
    "beyond 10^18",
    "not an integer",
    "not 8 hexadecimal digits",
    UTF8_FAULT,
    "too few columns",
    "too many columns",
    "unmatched quote",
    "not a whole number in range",
    "weights are not as many numbers as categories",
    "not a time",
    "categories are not at the places of the list that it is aligned with",
    "not a number of 0 or more",
    "not a list in brackets",
    TRAILING_FAULT,
    "not a row of the file's format",
    "not as many numbers as its vector has",
    "a value is missing",
    "ages are not as many numbers as categories",
)
(
    NO_LABEL,
    LABEL,
    WEIGHT,
    NOT_FINITE,
    TOO_LARGE,
    NOT_AN_INTEGER,
    NOT_HEXADECIMAL,
    NOT_UTF8,
    FEW,
    MANY,
    QUOTE,
    NOT_INTEGRAL,
    LIST_WEIGHTS,
    TIME,
    LIST_POSITIONS,
    NEGATIVE,
    BRACKET,
    TRAIL,
    FORM,
    LENGTH,
    MISSING,
    LIST_AGES,
) = range(len(_KINDS))
_FULL_ROW = -1
_MAX_JOINED_VALUES = 1 << 15
"""Most values of columns that are parsed together. Of more, the copy is no longer cheap."""
_POSITION_BITS = 32
"""Low bits for a list item's position in its row, below the row number."""


def _are_in_range(values: np.ndarray, status: np.ndarray) -> bool:
    """Return whether all values are numbers in range or missing."""
    # No comparison is true for NaN
    return bool(status.max(initial=VALUE) <= EMPTY and np.abs(values).max(initial=0.0) <= LIMIT)


# A row is valid if no column rejects it. Columns are parsed in the schema's order, and the first
# fault of a row counts. Thus a row has one fault, and counts of faults add up to invalid rows.
#
#   status of a value    effect
#   VALUE                taken
#   EMPTY                missing: a default, or a fault for a required label
#   REJECTED             fault of its row
class ColumnParser:
    """Parser of one table's columns, with the first fault of each row in schema order. With
    `finds_faults`, values that cannot be a fault are not computed.
    """

    def __init__(
        self,
        table: pa.Table,
        schema: Schema,
        path: str,
        *,
        finds_faults: bool = False,
    ) -> None:
        self.table = table
        self.names = frozenset(table.column_names)
        self.computed: Mapping[str, pa.Array] = {}
        self.schema = schema
        self.path = path
        self.finds_faults = finds_faults
        self.type_error = type_error(table.schema, path)
        self.columns = (*schema.columns, *schema.derived)
        self.markers = Markers.from_texts(schema.missing)
        rule = schema.label_rule
        self.label_markers = Markers.from_label(
            schema.missing,
            rule.positive if rule is not None else (),
        )
        self.fault_kinds = np.full(table.num_rows, -1, np.int8)
        self.fault_columns = np.zeros(table.num_rows, np.int16)
        self.labels: dict[str, list[str]] = {}

    @cached_property
    def _aligned(self) -> frozenset[str]:
        """Lists whose categories are at the places of another one's."""
        names = set()
        for feature in self.schema.features:
            if feature.aligned_with is not None:
                names |= {feature.name, feature.aligned_with}
        return frozenset(names)

    def parse(self) -> RawBlock:
        """Return the valid rows."""
        block = self.parse_all()
        keep = np.flatnonzero(self.fault_kinds < 0)
        block = block if len(keep) == block.rows else block.take(keep)
        return replace(block, files=((self.path, 0, block.rows),))

    def parse_all(self) -> RawBlock:
        """Return all rows, and record the faults of invalid ones."""
        schema = self.schema
        table = self.table
        if FAULT in table.column_names:
            fault = table.column(FAULT).to_numpy()
            for value, kind in (
                (TOO_FEW, FEW),
                (TOO_MANY, MANY),
                (UNMATCHED, QUOTE),
                (TRAILING, TRAIL),
                (MALFORMED, FORM),
            ):
                self.reject(fault == value, kind, _FULL_ROW)
        labels: dict[str, np.ndarray] = {}
        weights = None
        if schema.label is not None:
            labels[schema.label] = self.clicks(schema.label)
        if schema.weight is not None:
            values, status = self._numbers(schema.weight)
            good = (status == VALUE) & (values >= 0) & (values <= LIMIT)
            self.reject(~good, WEIGHT, schema.weight)
            weights = np.where(good, values, 0).astype(np.float32)
        rows = table.num_rows
        hexadecimal = schema.tokens == "hexadecimal"
        # Kernels for hexadecimal tokens read by row, all others by column.
        order: Literal["C", "F"] = "C" if hexadecimal else "F"
        block = RawBlock(
            schema,
            np.empty((rows, len(schema.dense)), number_type(schema), order),
            np.empty((rows, len(schema.singles)), category_type(schema), order),
            np.zeros((rows, len(schema.dense) + len(schema.singles)), bool, "F"),
        )
        self._fill_numbers(block)
        lists = self._fill_categories(block)
        return replace(
            block,
            missing=packed_bits(block.missing) if hexadecimal else block.missing,
            lists=lists,
            labels=labels | {label.name: self._label(label) for label in schema.labels},
            weights=weights,
            times=None if schema.timestamp is None else self.times(schema.timestamp),
        )

    def faults(self, first_row: int) -> Faults:
        rows = np.flatnonzero(self.fault_kinds >= 0)
        counts = np.bincount(self.fault_kinds[rows], minlength=len(_KINDS)).tolist()
        names = [*self.columns, ""]  # The last one for _FULL_ROW
        first = [
            Fault(
                self.path,
                None,
                _KINDS[self.fault_kinds[row]],
                names[self.fault_columns[row]],
                first_row + row,
            )
            for row in rows[: Faults.keep].tolist()
        ]
        return Faults(
            {kind: count for kind, count in zip(_KINDS, counts, strict=True) if count},
            first,
            labels=self.labels,
        )

    def reject(self, bad: np.ndarray, kind: int, column: str | int) -> None:
        """Record a fault of the rows `bad`, bool [rows], in a column, or _FULL_ROW."""
        if bad.any():
            new = bad & (self.fault_kinds < 0)
            self.fault_kinds[new] = kind
            self.fault_columns[new] = (
                column if isinstance(column, int) else self.columns.index(column)
            )

    def compute(self, columns: Mapping[str, pa.Array]) -> None:
        """Add columns to the table. They replace equal names."""
        self.computed = columns
        self.names |= columns.keys()

    def integers(self, array: pa.Array, name: str) -> pa.Array:
        """Return the values of a column of `Schema.integers` as int64, null if missing or rejected,
        and record the faults. Lists are returned unchanged.
        """
        if name in self.schema.lists:
            return array
        tokens = np.zeros(len(array), np.uint64)
        status, kind = self._categories(array, name, tokens)
        self.reject(status == REJECTED, kind, name)
        return pa.array(tokens.view(np.int64), mask=status != VALUE)

    def _markers_of(self, name: str) -> Markers:
        """Return the markers of missing values in a column. What formulas compute has none."""
        return Markers.from_texts(()) if name in self.schema.derived else self.markers

    def _reject_labels(self, bad: np.ndarray, name: str) -> None:
        """Record labels other than 0 and 1."""
        self.reject(bad, LABEL, name)
        if bad.any():
            values = pc.unique(self.array(name).drop_null())
            values = values if is_text(values.type) else pc.cast(values, pa.string())
            self.labels[name] = distinct_labels(
                text.decode("utf-8", "replace") for text in pc.cast(values, pa.binary()).to_pylist()
            )

    def array(self, name: str) -> pa.Array:
        if name in self.computed:
            return self.computed[name]
        if name not in self.names:
            return pa.nulls(self.table.num_rows)
        return plain_array(self.table.column(name))

    def categories(self, name: str) -> pa.Array:
        """Return a column of single categories, which may be a dictionary of text."""
        arrays = self._category_arrays(name)
        return arrays[0] if len(arrays) == 1 else self.array(name)

    def _category_arrays(self, name: str) -> list[pa.Array]:
        """Return a column of single categories: its chunks if they are dictionaries of text, which
        may differ, else one array.
        """
        if self.schema.tokens == "any" and name in self.names and name not in self.computed:
            column = self.table.column(name)
            if types.is_dictionary(column.type) and is_text(column.type.value_type):
                return column.chunks
        return [self.array(name)]

    def _numbers(self, name: str, *, times: bool = False) -> tuple[np.ndarray, np.ndarray]:
        return parse_numbers(self.array(name), name, self.type_error, times=times)

    def _label_numbers(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        return parse_numbers(self.label_markers.to_null(self.array(name)), name, self.type_error)

    # Of a request's few rows, a call for each column would take longer than all values. So columns
    # of one type are parsed as one long column. If that has a fault, they are parsed one by one,
    # which finds the first fault of each row.

    def _joined(self, names: Sequence[str]) -> pa.Array | None:
        """Return columns one behind the other if they are of one type, and short. None if not, and
        for logs of hexadecimal tokens.
        """
        is_short = len(names) * self.table.num_rows <= _MAX_JOINED_VALUES
        if self.schema.tokens == "hexadecimal" or self.finds_faults or not is_short:
            return None
        if len(names) < 2 or not self.names.issuperset(names):
            return None
        columns = [self.table.column(name) for name in names]
        kind = columns[0].type
        if any(column.type != kind or column.num_chunks != 1 for column in columns):
            return None
        return pa.concat_arrays([column.chunk(0) for column in columns])

    def _fill_numbers(self, block: RawBlock) -> None:
        """Fill the block's numbers and their missing mask."""
        dense = self.schema.dense
        names = [name for name in dense if name not in self.computed]
        done = set(names) if self._fill_joined_numbers(block, names) else set[str]()
        for index, name in enumerate(dense):
            if name in done or (self.finds_faults and self._accepts_numbers(name)):
                continue
            block.numbers[:, index], block.missing[:, index] = self._dense(name)

    def _fill_joined_numbers(self, block: RawBlock, names: Sequence[str]) -> bool:
        """Fill the block's numbers of these columns if that is possible at once, and none has a
        fault.
        """
        array = self._joined(names)
        if array is None or not (is_text(array.type) or types.is_floating(array.type)):
            return False
        values, status = self._dense_values(array, names[0])
        if not _are_in_range(values, status):
            return False
        missing = (status == EMPTY).reshape(len(names), block.rows)
        positions = [self.schema.positions[name] for name in names]
        block.numbers[:, positions] = np.where(missing, 0.0, values.reshape(missing.shape)).T
        block.missing[:, positions] = missing.T
        return True

    def _fill_joined_singles(self, block: RawBlock, names: Sequence[str]) -> bool:
        """Fill the block's categories of these columns, which are all of `Schema.integers` or none
        is, if that is possible at once, and none has a fault.
        """
        array = self._joined(names)
        if array is None or not is_text(array.type):
            return False
        tokens = np.empty(len(array), np.uint64)
        status, _ = self._categories(array, names[0], tokens)
        if status.max(initial=VALUE) > EMPTY:
            return False
        missing = (status == EMPTY).reshape(len(names), block.rows)
        positions = np.array([self.schema.positions[name] for name in names])
        block.categories[:, positions - len(self.schema.dense)] = tokens.reshape(missing.shape).T
        block.missing[:, positions] = missing.T
        return True

    def _dense(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of a dense column, `number_type`, 0 if missing or rejected, and which
        are missing.
        """
        if self.schema.tokens == "hexadecimal":
            values, status = parse_integers(self.array(name), name, self.type_error)
            self.reject(status == REJECTED, NOT_AN_INTEGER, name)
            return values, status == EMPTY
        if name in self.computed:
            # Float64 without NaN but for null. No input can be so large, and no row is at fault.
            values = self.array(name).to_numpy(zero_copy_only=False)
            good = np.abs(values) <= LIMIT
            if not good.all():
                values = np.where(good, values, 0.0)
            return values, ~good
        values, status = self._dense_values(self.array(name), name)
        if _are_in_range(values, status):  # Those of most columns
            missing = status == EMPTY
            return np.where(missing, 0.0, values) if missing.any() else values, missing
        finite = np.isfinite(values)
        self.reject((status == REJECTED) | ~finite, NOT_FINITE, name)
        self.reject(np.abs(values) > LIMIT, TOO_LARGE, name)
        good = finite & (status == VALUE)
        return values if good.all() else np.where(good, values, 0.0), status == EMPTY

    def _dense_values(self, array: pa.Array, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (float64, status) of values of dense columns."""
        values, status = parse_numbers(
            self.markers.to_null(array), name, self.type_error, times=True
        )
        status = self.markers.mark_numbers(values, status)
        if self.schema.nan == "missing":
            status = np.where(np.isnan(values), EMPTY, status)
            values = np.where(status == EMPTY, 0.0, values)
        return values, status

    def clicks(self, name: str) -> np.ndarray:
        """Return `Schema.label`, float32 [rows]."""
        if self.schema.label_rule is not None:
            return self._ruled_clicks(name, self.schema.label_rule)
        values, status = self._label_numbers(name)
        self.reject(status == EMPTY, NO_LABEL, name)
        self._reject_labels(
            (status != EMPTY) & ((status != VALUE) | ((values != 0) & (values != 1))),
            name,
        )
        return (values == 1).astype(np.float32)

    def _ruled_clicks(self, name: str, rule: LabelRule) -> np.ndarray:
        """Return `Schema.label` by its rule, float32 [rows]."""
        array = self.label_markers.to_null(self.array(name))
        values, status = parse_numbers(array, name, self.type_error)
        self.reject((status == EMPTY) | np.isnan(values), NO_LABEL, name)
        if rule.at_least is not None:
            self.reject((status == REJECTED) | ~np.isfinite(values), NOT_FINITE, name)
            return ((status == VALUE) & (values >= rule.at_least)).astype(np.float32)
        positive = Markers.from_texts(rule.positive)
        is_positive = (status == VALUE) & np.isin(values, positive.numbers)
        if is_text(array.type):
            texts = pc.is_in(pc.cast(array, pa.large_binary()), value_set=positive.texts)
            is_positive |= texts.to_numpy(zero_copy_only=False)
        return is_positive.astype(np.float32)

    def _label(self, label: Label) -> np.ndarray:
        """Return an additional label, NaN if missing (the missing number of pandas), float32
        [rows].
        """
        values, status = self._label_numbers(label.name)
        missing = (status == EMPTY) | np.isnan(values)
        if label.missing == "fault":
            self.reject(missing, NO_LABEL, label.name)
        if label.kind == "binary":
            self._reject_labels(
                ~missing & ((status != VALUE) | ((values != 0) & (values != 1))),
                label.name,
            )
        else:
            self.reject(
                ~missing & ((status != VALUE) | ~np.isfinite(values)),
                NOT_FINITE,
                label.name,
            )
            self.reject(~missing & (np.abs(values) > LIMIT), TOO_LARGE, label.name)
            if label.kind == "count":
                self.reject(~missing & (values < 0), NEGATIVE, label.name)
        return np.where(missing, np.nan, values).astype(np.float32)

    def times(self, name: str) -> np.ndarray:
        """Return microseconds since 1970-01-01 00:00 UTC, int64 [rows]."""
        values, status = parse_times(self.array(name), name, self.type_error)
        self.reject(status != VALUE, TIME, name)
        return values

    def _fill_categories(self, block: RawBlock) -> tuple[JaggedIds, ...]:
        """Fill the block's categories and their missing mask; return the list columns."""
        schema = self.schema
        lists = []
        positions = dict[str, np.ndarray]()
        done = set[str]()
        for are_integers in (False, True):
            names = [
                name
                for name in schema.singles
                if name not in schema.derived and (name in schema.integers) == are_integers
            ]
            if self._fill_joined_singles(block, names):
                done.update(names)
        for name in schema.sparse:
            if name in done:
                continue
            if name in schema.lists:
                column, bad, kind, positions[name] = self._lists(self.array(name), name)
                lists.append(column)
                self.reject(bad, kind, name)
            else:
                self._fill_singles(block, name)
        for name in schema.sparse:
            other = schema.feature(name).aligned_with
            if other is not None:
                bad = np.zeros(block.rows, bool)
                bad[
                    np.setxor1d(positions[name], positions[other], assume_unique=True)
                    >> _POSITION_BITS
                ] = True
                self.reject(bad, LIST_POSITIONS, name)
        return tuple(lists)

    def _fill_singles(self, block: RawBlock, name: str) -> None:
        """Fill the block's categories of one column, and their missing mask."""
        arrays = self._category_arrays(name)
        if self.finds_faults and all(self._accepts_all(array, name) for array in arrays):
            return
        index = self.schema.positions[name]
        tokens = block.categories[:, index - len(self.schema.dense)]
        status = np.full(block.rows, VALUE, np.uint8)
        fault = NOT_UTF8
        start = 0
        for array in arrays:
            rows = slice(start, start + len(array))
            start += len(array)
            if is_list(array.type) and self.schema.tokens == "any":
                raise self.type_error(name, "name it in the schema's lists, or leave it out")
            status[rows], fault = self._categories(array, name, tokens[rows])
        block.missing[:, index] = status == EMPTY
        self.reject(status == REJECTED, fault, name)

    def _accepts_numbers(self, name: str) -> bool:
        """Return whether all values of a dense column are sure to be numbers in range or missing,
        as texts of few digits are.
        """
        array = self.array(name)
        if self.schema.tokens != "any" or not is_text(array.type):
            return False
        text = Text.from_array(array)
        return bool(call("rayrec_are_short_numbers", text.offsets, text.data, text.null, len(text)))

    def _accepts_all(self, array: pa.Array, name: str) -> bool:
        """Return whether all values of a column are sure to be categories or missing, since any
        text in ASCII is.
        """
        takes_text = self.schema.tokens == "any" and name not in self.schema.integers
        texts = array.dictionary if types.is_dictionary(array.type) else array
        return takes_text and is_text(texts.type) and Text.from_array(texts).is_ascii

    def _categories(self, array: pa.Array, name: str, out: np.ndarray) -> tuple[np.ndarray, int]:
        """Write categories to `out`, 0 if missing or rejected; return (status, fault kind of
        REJECTED), see column_values.
        """
        markers = self._markers_of(name)
        status, kind = self._tokens(markers.to_null(array), name, out)
        marked = markers.mark_tokens(out, status)
        if marked is not status:
            out[marked == EMPTY] = 0
        return marked, kind

    def _tokens(self, array: pa.Array, name: str, out: np.ndarray) -> tuple[np.ndarray, int]:
        """Write categories to `out` as `_categories`, without the schema's markers of missing
        ones.
        """
        schema = self.schema
        if types.is_null(array.type):
            out[:] = 0
            return np.full(len(array), EMPTY, np.uint8), NOT_UTF8
        if schema.tokens == "hexadecimal":
            if not is_text(array.type):
                raise self.type_error(
                    name,
                    "needs 8 hexadecimal digits as text; set the schema's tokens: any for other "
                    "categories",
                )
            values = np.empty(len(array), np.uint32)
            status = Text.from_array(array).call("rayrec_text_hexadecimal", values)
            out[:] = values
            return status, NOT_HEXADECIMAL
        if types.is_date(array.type) and name not in schema.integers:
            array = pc.cast(pc.cast(array, pa.date32()), pa.large_string())
        if is_text(array.type) or types.is_dictionary(array.type):
            if name in schema.integers:
                # 64-bit integers in any form: 7, 07, +7, 7.0, between blanks, true and false as 1
                # and 0, `nan` if missing.
                text = Text.from_array(resolved(array))
                return text.call("rayrec_text_whole", out), NOT_INTEGRAL
            return category_tokens(array, out, booleans=schema.category_rules >= 2), NOT_UTF8
        if types.is_integer(array.type) or types.is_boolean(array.type):
            return integer_tokens(array, out), NOT_INTEGRAL
        if types.is_decimal(array.type):
            return decimal_tokens(array, out, is_int64=name in schema.integers), NOT_INTEGRAL
        if types.is_floating(array.type):
            return float_tokens(array, out), NOT_INTEGRAL
        if types.is_timestamp(array.type):
            raise self.type_error(
                name,
                "text or integers are needed: convert it to text, or to the part that "
                "distinguishes rows, such as the date (pandas: .dt.date) or the hour (.dt.hour)",
            )
        raise self.type_error(
            name,
            "text or integers are needed; convert it, or leave it out of the schema",
        )

    def _lists(self, array: pa.Array, name: str) -> tuple[JaggedIds, np.ndarray, int, np.ndarray]:
        """Return (column, rejected rows bool [rows], their fault kind, row and position of each
        category int64, none if no list is aligned with it).
        """
        feature = self.schema.feature(name)
        rows = len(array)
        if types.is_null(array.type):
            has_weights = feature.weights is not None or feature.ages is not None
            weights = np.zeros(0, np.float32) if has_weights else None
            column = JaggedIds(np.zeros(0, np.uint64), np.zeros(rows, np.int32), weights)
            return column, np.zeros(rows, bool), NOT_UTF8, np.zeros(0, np.int64)
        items, lengths, bad = self.items(array, name, feature)
        self.reject(bad, BRACKET, name)
        tokens = np.empty(len(items), np.uint64)
        status, kind = self._categories(items, name, tokens)
        bad = np.zeros(rows, bool)
        weights = None
        present = status != EMPTY
        if feature.weights is not None:
            weights, bad = self._list_numbers(feature.weights, feature, lengths, present)
            kind = LIST_WEIGHTS if bad.any() else kind
        elif feature.ages is not None:
            weights, bad = self._list_numbers(feature.ages, feature, lengths, present)
            kind = LIST_AGES if bad.any() else kind
        positions = np.zeros(0, np.int64)
        if name in self._aligned:
            row_of = np.repeat(np.arange(rows), lengths)
            position = expand_ranges(np.zeros(rows, np.int64), lengths)
            positions = ((row_of << _POSITION_BITS) + position)[present]
        if status.any():
            row_of = np.repeat(np.arange(rows), lengths)
            lengths = np.bincount(row_of[present], minlength=rows)
            bad |= np.bincount(row_of[status == REJECTED], minlength=rows) > 0
            tokens = np.ascontiguousarray(tokens[present])
            weights = None if weights is None else weights[present]
        if feature.ages is not None and weights is not None:
            weights = age_gaps(weights, lengths)
        elif weights is not None:
            weights = weights.astype(np.float32)
        column = JaggedIds(tokens, lengths.astype(np.int32), weights)
        return (
            column if feature.max_length is None else column.last(feature.max_length),
            bad,
            kind,
            positions,
        )

    def items(
        self,
        array: pa.Array,
        name: str,
        feature: Feature,
    ) -> tuple[pa.Array, np.ndarray, np.ndarray]:
        """Return the concatenated items of a feature's lists or weights, each list's length, int64
        [rows], and which text is not a list, bool [rows].
        """
        bad = np.zeros(len(array), bool)
        if is_text(array.type):
            trim = feature.list_delimiter is not None
            array, bad = split_lists(
                self.markers.to_null(array),
                self.schema.list_mark(feature.name),
                trim=trim,
            )
        elif not is_list(array.type):
            raise self.type_error(
                name,
                "a list is needed, or text with the schema's list_delimiter; remove it from lists",
            )
        lengths = (
            pc.fill_null(pc.list_value_length(array), 0)
            .to_numpy(zero_copy_only=False)
            .astype(np.int64)
        )
        return resolved(pc.list_flatten(array)), lengths, bad

    def present_items(self, name: str) -> tuple[pa.Array, np.ndarray, np.ndarray]:
        """Return the present categories of a column of single categories or lists, [values], their
        tokens, uint64 [values], and their number in each row, int64 [rows].
        """
        items = self.array(name)
        rows = len(items)
        lengths = np.ones(rows, np.int64)
        if types.is_null(items.type):
            return items[:0], np.zeros(0, np.uint64), np.zeros(rows, np.int64)
        if name in self.schema.lists:
            items, lengths, _ = self.items(items, name, self.schema.feature(name))
        tokens = np.zeros(len(items), np.uint64)
        status, _ = self._categories(items, name, tokens)
        present = np.flatnonzero(status == VALUE)
        row_of = np.repeat(np.arange(rows), lengths)[present]
        return items.take(pa.array(present)), tokens[present], np.bincount(row_of, minlength=rows)

    def _list_numbers(
        self,
        name: str,
        feature: Feature,
        lengths: np.ndarray,
        present: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of each list item in a column of weights or ages, float64
        [sum(lengths)], and the rejected rows, bool [rows]. `present` marks the items that are
        categories, bool. A row is rejected if it has more or fewer numbers than items, or if a
        category's one is not a finite number. A row without categories may also have no numbers,
        and any row no ages, which are then 0.
        """
        array = self.array(name)
        numbers = np.zeros(len(present))
        counts = np.zeros(len(lengths), np.int64)
        values = np.zeros(0)
        status = np.zeros(0, np.uint8)
        if not types.is_null(array.type):
            items, counts, bad = self.items(array, name, feature)
            self.reject(bad, BRACKET, name)
            values, status = parse_numbers(items, name, self.type_error)
        good = (status == VALUE) & np.isfinite(values) & (np.abs(values) <= LIMIT)
        fits = counts == lengths
        targets = expand_ranges(np.cumsum(lengths)[fits] - lengths[fits], lengths[fits])
        sources = expand_ranges(np.cumsum(counts)[fits] - counts[fits], counts[fits])
        numbers[targets] = np.where(good[sources], values[sources], 0)
        wrong = np.zeros(len(present), bool)
        wrong[targets] = ~good[sources] & present[targets]
        rows = len(lengths)
        row_of = np.repeat(np.arange(rows), lengths)
        row_of_number = np.repeat(np.arange(rows), counts)[status != EMPTY]
        empty = np.bincount(row_of_number, minlength=rows) == 0
        if feature.weights is not None:
            empty &= np.bincount(row_of[present], minlength=rows) == 0
        is_wrong = np.bincount(row_of[wrong], minlength=rows) > 0
        return numbers, (~fits | is_wrong) & ~empty
