"""Turns raw rows of a click log into the inputs of the model in this folder. It needs NumPy and nothing else.

    encoder = Encoder("preprocessor")
    dense, ids = encoder.encode([{"age": 3, "user": "u1", "tags": ["a", "b"]}, {"age": None}])

This file is part of an export of rayrec and imports nothing from it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Ids = np.ndarray | tuple[np.ndarray, np.ndarray]
"""int64 (rows), int64 (rows, ids a row), or for lists the ids of row after row and how many each row has."""

_MASK = 2**64 - 1
_PRIME1, _PRIME2, _PRIME3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME4, _PRIME5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_GOLDEN = 0x9E3779B97F4A7C15
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]{8}")
_CANONICAL = re.compile(r"0|-?[1-9][0-9]*")
_WHOLE = re.compile(r"([+-]?[0-9]+)(\.0*)?")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_BOOLEANS = {"true": 1, "True": 1, "TRUE": 1, "false": 0, "False": 0, "FALSE": 0}
_LIMIT = 10**18


class Encoder:
    """The Preprocessor of an export: `folder` is its folder `preprocessor`."""

    def __init__(self, folder: str) -> None:
        with open(os.path.join(folder, "preprocessor.json"), encoding="utf-8") as file:
            stored = json.load(file)
        tokens = np.load(os.path.join(folder, "tokens.npy"), allow_pickle=False)
        self.schema: dict[str, Any] = stored["schema"]
        self._hexadecimal = self.schema["tokens"] == "hexadecimal"
        self._booleans = self.schema.get("category_rules", 1) >= 2
        self._dense: list[dict[str, Any]] = stored["dense"]
        self._buckets: bool = stored["integer_buckets"]
        minimum = stored["file_minimum"]
        self._least = None if minimum is None else minimum[""]
        self._multi_hot: dict[str, Any] | None = stored["multi_hot"]
        self._sparse: list[tuple[dict[str, Any], np.ndarray, np.ndarray]] = []
        self._features = {feature["name"]: feature for feature in self.schema.get("features", ())}
        names = [*(self.schema["dense"] if self._buckets else ()), *self.schema["sparse"]]
        first, vocabularies = 0, {}
        for name, column in zip(names, stored["sparse"], strict=True):
            vocabulary = self._features.get(name, {}).get("vocabulary") or name
            if vocabulary not in vocabularies:  # the first of the columns that share it
                vocabularies[vocabulary] = tokens[first : first + (column["num_tokens"] or 0)]
                first += len(vocabularies[vocabulary])
            known = vocabularies[vocabulary]
            order = np.argsort(known)
            self._sparse.append((column, known[order], _ids_of(column)[order] if len(known) else order))

    def parse(self, lines: Iterable[str]) -> list[dict[str, str]]:
        """Rows of tab-separated lines without a header, with the label or without, for `encode`; of other schemas csv.DictReader
        gives such rows. Raises ValueError for a line with another number of columns."""
        columns = [*self.schema["dense"], *self.schema["sparse"]]
        ignored = [name for name in (self.schema.get("label"), self.schema.get("weight")) if name]
        rows = []
        for number, line in enumerate(lines):
            fields = line.rstrip("\r\n").split("\t")
            if len(fields) not in (len(columns), len(columns) + len(ignored)):
                raise ValueError(f"row {number} has {len(fields)} columns, not {len(columns)}")
            rows.append(dict(zip(columns, fields[-len(columns) :], strict=True)))
        return rows

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, list[Ids]]:
        """float32 (rows, dense columns) and the ids of each sparse column. A value that is absent, None or empty is missing; a
        category is text or an integer, a list a list of these or text with the schema's list_delimiter. Raises ValueError for
        anything else, with the row and the column."""
        names = self.schema["dense"]
        numbers = [self._numbers(rows, name) for name in names]
        categories = [self._categories(rows, name) for name in self.schema["sparse"]]
        if self._buckets:
            buckets = [_bucketed(values, missing) for values, missing in numbers]
            ids = [self._look_up(number, *bucket) for number, bucket in enumerate(buckets)]
            numbers = []
        else:
            ids = []
        for found in categories:
            ids.append(self._look_up(len(ids), *found))
        dense = np.empty((len(rows), len(numbers)), np.float32)
        for place, (column, (values, missing)) in enumerate(zip(self._dense, numbers, strict=True)):
            dense[:, place] = np.where(missing, np.float32(column["missing_value"]), _transformed(column, values))
        return dense, self._expanded(ids)

    def _numbers(self, rows: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
        found = [self._number(row.get(name), name, number) for number, row in enumerate(rows)]
        missing = np.array([value is None for value in found], bool)
        dtype = np.int64 if self._hexadecimal else np.float64
        values = np.array([0 if value is None else value for value in found], dtype)
        if self._least is not None:
            return values - self._least, np.zeros(len(rows), bool)
        return values, missing

    def _number(self, value: Any, name: str, row: int) -> float | int | None:
        if value is None or value == "":
            return None
        if isinstance(value, str):
            text = value.strip(" \t")
            if self._hexadecimal and re.fullmatch("-?[0-9]+", text):
                value = int(text)
            elif not self._hexadecimal and text in ("nan", "NaN", "NAN"):
                value = float("nan")
            elif not self._hexadecimal and (_NUMBER.fullmatch(text) or text in _BOOLEANS):
                value = _BOOLEANS[text] if text in _BOOLEANS else float(text)
        if isinstance(value, float) and np.isnan(value) and self.schema.get("nan") == "missing":
            return None
        if self._hexadecimal and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int if self._hexadecimal else (int, float)) or not -_LIMIT <= value <= _LIMIT:
            raise ValueError(f"row {row}: {name} is not a number of this column: {value!r}")
        return value

    def _categories(
        self, rows: Sequence[Mapping[str, Any]], name: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The tokens, which are missing, and for lists how many each row has."""
        values = [row.get(name) for row in rows]
        lengths = None
        if name in self.schema["lists"]:
            delimiter = self.schema["list_delimiter"]
            lists = [value.split(delimiter) if isinstance(value, str) else value or [] for value in values]
            found = [[self._token(item, name, row) for item in items] for row, items in enumerate(lists)]
            most = self._features.get(name, {}).get("max_length") or 0
            present = [[token for token in of_row if token is not None][-most:] for of_row in found]
            lengths = np.array([max(1, len(of_row)) for of_row in present], np.int64)
            tokens = [token for of_row in present for token in of_row or (None,)]
        else:
            tokens = [self._token(value, name, row) for row, value in enumerate(values)]
        missing = np.array([token is None for token in tokens], bool)
        dtype = np.uint32 if self._hexadecimal else np.uint64
        return np.array([token or 0 for token in tokens], dtype), missing, lengths

    def _token(self, value: Any, name: str, row: int) -> int | None:
        if value is None or value == "":
            return None
        if self._hexadecimal:
            if isinstance(value, str) and _HEXADECIMAL.fullmatch(value):
                return int(value, 16)
            raise ValueError(f"row {row}: {name} is not 8 hexadecimal digits as text: {value!r}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and -(2**63) <= value < 2**64:  # True and False too
            value = str(int(value))
        if isinstance(value, str) and name in self.schema.get("integers", ()):
            return _whole_token(value, f"row {row}: {name} is not a whole number: {value!r}")
        if isinstance(value, str):
            return _text_token(value, self._booleans)
        raise ValueError(f"row {row}: {name} is neither text nor an integer of 64 bits: {value!r}")

    def _look_up(self, number: int, tokens: np.ndarray, missing: np.ndarray, lengths: Any = None) -> Ids:
        column, known, known_ids = self._sparse[number]
        if column["num_tokens"] is None:
            hashed = _murmur3(tokens) if column["murmur3"] else tokens
            spread = column["num_embeddings"] - column["first_id"]
            ids = (hashed % hashed.dtype.type(spread)).astype(np.int64) + column["first_id"]
        else:
            if column["token_modulo"] is not None:
                tokens = tokens % tokens.dtype.type(column["token_modulo"])
            ids = np.full(len(tokens), column["unknown_id"], np.int64)
            if len(known):
                places = np.minimum(np.searchsorted(known, tokens), len(known) - 1)
                ids = np.where(known[places] == tokens, known_ids[places], ids)
        ids = np.where(missing, column["missing_id"], ids)
        return ids if lengths is None else (ids, lengths)

    def _expanded(self, ids: list[Ids]) -> list[Ids]:
        if self._multi_hot is None:
            return ids
        seed, pareto = self._multi_hot["seed"], self._multi_hot["distribution"] == "pareto"
        sizes = self._multi_hot["sizes"]
        return [
            found if size == 1 else _bags(found, size, number, column[0]["num_embeddings"], seed, pareto)
            for number, (found, size, column) in enumerate(zip(ids, sizes, self._sparse, strict=True))
        ]


def _ids_of(column: Mapping[str, Any]) -> np.ndarray:
    ids = np.arange(column["first_id"], column["first_id"] + column["num_tokens"], dtype=np.int64)
    if column["gap"] is not None:
        ids[max(0, column["gap"] - column["first_id"]) :] += 1
    return ids % column["num_embeddings"]


def _transformed(column: Mapping[str, Any], values: np.ndarray) -> np.ndarray:
    x = values.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        if column["kind"] == "signed_log":
            transformed = np.copysign(np.log1p(np.abs(x)), x)
        else:
            raised = np.maximum(x, column["lowest"])
            transformed = np.log(raised + column["shift"]) if column["kind"] == "log" else raised
    return ((transformed - column["mean"]) * column["scale"]).astype(np.float32)


def _bucketed(values: np.ndarray, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers as categories: floor(ln(x)^2) above 2, else x; 0 is missing."""
    logarithms = np.log(np.maximum(values, 1).astype(np.float64))
    buckets = np.where(values > 2, np.floor(logarithms * logarithms).astype(np.int64), np.maximum(values, -(2**31)))
    return (buckets + 2**31).astype(np.uint32), missing | (values == 0)


def _whole_token(text: str, refusal: str) -> int | None:
    text = text.strip(" \t")
    if text == "" or text.lower() == "nan":
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    found = _WHOLE.fullmatch(text)
    if found is None or not -(2**63) <= int(found[1]) < 2**63:
        raise ValueError(refusal)
    return int(found[1]) & _MASK


@lru_cache(maxsize=1 << 20)
def _text_token(text: str, booleans: bool) -> int:
    if _CANONICAL.fullmatch(text) and -(2**63) <= int(text) < 2**63:
        return int(text) & _MASK
    if booleans and text in _BOOLEANS:
        return _BOOLEANS[text]
    return _xxh64(text.encode())


def _rotate(x: int, bits: int) -> int:
    return (x << bits | x >> (64 - bits)) & _MASK


def _lane(accumulator: int, lane: int) -> int:
    return _rotate((accumulator + lane * _PRIME2) & _MASK, 31) * _PRIME1 & _MASK


def _xxh64(data: bytes) -> int:
    """XXH64 with seed 0 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md)."""
    place, length = 0, len(data)
    value = _PRIME5
    if length >= 32:
        lanes = [(_PRIME1 + _PRIME2) & _MASK, _PRIME2, 0, -_PRIME1 & _MASK]
        while length - place >= 32:
            for number in range(4):
                lanes[number] = _lane(lanes[number], _word(data, place + 8 * number, 8))
            place += 32
        value = sum(map(_rotate, lanes, (1, 7, 12, 18))) & _MASK
        for lane in lanes:
            value = ((value ^ _lane(0, lane)) * _PRIME1 + _PRIME4) & _MASK
    value = (value + length) & _MASK
    while length - place >= 8:
        value = (_rotate(value ^ _lane(0, _word(data, place, 8)), 27) * _PRIME1 + _PRIME4) & _MASK
        place += 8
    if length - place >= 4:
        value = (_rotate(value ^ _word(data, place, 4) * _PRIME1 & _MASK, 23) * _PRIME2 + _PRIME3) & _MASK
        place += 4
    for byte in data[place:]:
        value = _rotate(value ^ byte * _PRIME5 & _MASK, 11) * _PRIME1 & _MASK
    value = (value ^ value >> 33) * _PRIME2 & _MASK
    value = (value ^ value >> 29) * _PRIME3 & _MASK
    return value ^ value >> 32


def _word(data: bytes, place: int, size: int) -> int:
    return int.from_bytes(data[place : place + size], "little")


def _murmur3(tokens: np.ndarray) -> np.ndarray:
    """murmur3_x86_32 of four bytes, seed 0, plus 0x9E3779B9; uint32."""
    k = tokens.astype(np.uint32) * np.uint32(0xCC9E2D51)
    k = k << np.uint32(15) | k >> np.uint32(17)
    h = k * np.uint32(0x1B873593)
    h = (h << np.uint32(13) | h >> np.uint32(19)) * np.uint32(5) + np.uint32(0xE6546B64)
    h ^= np.uint32(4)
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    h = (h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return (h ^ h >> np.uint32(16)) + np.uint32(0x9E3779B9)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64; uint64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def _bags(ids: Any, size: int, number: int, num_embeddings: int, seed: int, pareto: bool) -> np.ndarray:
    """int64 (rows, size): each id, then random ids that belong to it."""
    start = _mix(np.array([(seed + _GOLDEN) & _MASK], np.uint64))
    stream = _mix(start + np.uint64(number))
    bag = _mix(stream + np.uint64(_GOLDEN) * (ids.astype(np.uint64) + np.uint64(1)))
    places = np.uint64(_GOLDEN) * np.arange(1, size, dtype=np.uint64)
    bits = _mix(bag[:, None] + places)
    if pareto:
        v = ((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53
        value = 1.0 / (v * v) ** 2 - 1.0
        drawn = np.where(value < 2.0**31, value, -(2.0**31)).astype(np.int64) % num_embeddings
    else:  # the upper half of a product of 128 bits; num_embeddings is below 2^32
        rows, half = np.uint64(num_embeddings), np.uint64(32)
        low = (bits & np.uint64(2**32 - 1)) * rows >> half
        drawn = ((bits >> half) * rows + low >> half).astype(np.int64)
    return np.concatenate([ids[:, None], drawn], axis=1)
