"""The one artifact that turns raw columns into model inputs: schema, dense constants and vocabularies, versioned and hashed."""

from __future__ import annotations

import ctypes
import hashlib
import io
import itertools
import json
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.encoded import EncodedRows
from rayrec.data.encoding.multi_hot import MultiHot
from rayrec.data.encoding.rules import LOWEST_INTEGER, DenseColumn, SparseColumn
from rayrec.data.engine import Shared, StreamEngine
from rayrec.data.logs.index import source_of
from rayrec.data.logs.text_parser import RawRows
from rayrec.data.raw_block import RawColumns, encode_columns
from rayrec.native import library
from rayrec.schema import Schema

VERSION = 2
PREPROCESSOR_FOLDER: Final = "preprocessor"
MAX_TABLE_ROWS: Final = 2**40
"""Maximum rows of an embedding table."""
"""Folder of the Preprocessor within a run, a checkpoint or an export."""
_DENSE_KINDS = ("signed_log", "log", "identity")  # in the order of rayrec_dense_kind in native/kernels.h


class CSparseColumn(ctypes.Structure):
    _fields_ = [
        ("slots", ctypes.c_void_p),
        ("mask", ctypes.c_uint64),
        ("modulo", ctypes.c_uint64),
        ("base", ctypes.c_int64),
        ("missing_id", ctypes.c_int64),
        ("unknown_id", ctypes.c_int64),
        ("hash", ctypes.c_int64),
        ("token_modulo", ctypes.c_uint32),
        ("shift", ctypes.c_int32),
    ]


class CDenseColumn(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int64),
        ("lowest", ctypes.c_int64),
        ("shift", ctypes.c_double),
        ("mean", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("missing_value", ctypes.c_float),
        ("padding", ctypes.c_float),
    ]


def c_dense_column(column: DenseColumn) -> CDenseColumn:
    """Return the kernels' view of a dense column."""
    kind = _DENSE_KINDS.index(column.kind)
    return CDenseColumn(kind, column.lowest, column.shift, column.mean, column.scale, column.missing_value, 0.0)


def _check_dense(name: str, column: DenseColumn) -> None:
    numbers = (column.shift, column.mean, column.scale, column.missing_value)
    if (
        column.kind not in _DENSE_KINDS
        or type(column.lowest) is not int
        or abs(column.lowest) > -LOWEST_INTEGER
        or not all(type(number) in (int, float) and abs(number) < math.inf for number in numbers)
    ):
        raise InputError(f"preprocessor: column {name} has the invalid rule {column}; it is damaged")


def _check_sparse(name: str, column: SparseColumn) -> None:
    """Raises InputError for values from which an id outside [0, num_embeddings) would come."""
    rows, tokens = column.num_embeddings, column.num_tokens
    largest = 2**31 - 1  # id of a vocabulary
    limits = {
        "num_embeddings": (rows, 1, MAX_TABLE_ROWS),
        "num_tokens": (0 if tokens is None else tokens, 0, largest),
        "first_id": (column.first_id, 0, largest - tokens if type(tokens) is int else rows - 1),
        "unknown_id": (column.unknown_id, 0, rows - 1 if tokens is None else min(rows - 1, largest)),
        "missing_id": (column.missing_id, 0, rows - 1),
        "gap": (0 if column.gap is None else column.gap, 0, MAX_TABLE_ROWS),
        "token_modulo": (1 if column.token_modulo is None else column.token_modulo, 1, 2**32 - 1),
    }
    for limited, (value, least, most) in limits.items():
        if type(value) is not int or not least <= value <= most:
            raise InputError(
                f"preprocessor: column {name} has {limited} {value!r}, not an integer from {least} to {most}; it is damaged"
            )
    if not type(column.murmur3) is type(column.mixed) is bool:
        raise InputError(f"preprocessor: column {name} has the invalid rule {column}; it is damaged")


def num_slots(num_tokens: int) -> int:
    """Slots of the open-addressing table for so many tokens: a power of two, at most two thirds full."""
    slots = 16
    while slots * 2 < num_tokens * 3:
        slots *= 2
    return slots


@dataclass(frozen=True)
class Preprocessor:
    """Turns raw rows of a click log into model inputs. Build it with `rayrec vocabulary`; never changed afterwards."""

    preset: str
    schema: Schema
    """Of the labelled raw log."""
    dense: tuple[DenseColumn, ...]
    """A column each of `inputs.dense`."""
    sparse: tuple[SparseColumn, ...]
    """A column each of `inputs.sparse`."""
    tokens: np.ndarray
    """uint32 (uint64 for a schema of any tokens): the tokens of every vocabulary, in id order, one vocabulary after the other. A
    vocabulary that several columns share is stored once, at the first of them."""
    integer_buckets: bool = False
    """The log's integers are categories too: floor(ln(x)^2) above 2, else x; they come before the sparse columns."""
    file_minimum: dict[str, int] | None = None
    """Where each file's least integer is subtracted from its integers: by the file's base name, without `.gz`; "" for others."""
    multi_hot: MultiHot | None = None
    """Where each id becomes a bag of several."""
    constants: dict[str, Any] = field(default_factory=dict)
    """What the preset used: its rules, the rows counted, and the like."""

    def __post_init__(self) -> None:
        if (len(self.dense), len(self.sparse)) != (len(self.inputs.dense), len(self.inputs.sparse)):
            raise InputError("preprocessor: its columns are not those of its schema; build it again")
        dtype = np.dtype(np.uint32 if self.schema.tokens == "hexadecimal" else np.uint64)
        if self.tokens.dtype != dtype or self.tokens.ndim != 1:
            raise InputError(
                f"preprocessor: its tokens are {self.tokens.dtype} {self.tokens.shape}, not a row of {dtype}; build it again"
            )
        if dtype == np.uint64 and any(column.murmur3 for column in self.sparse):
            raise InputError("preprocessor: murmur3 needs categories of 8 hexadecimal digits; build it again")
        known = sum(self._stored_tokens)
        if known != len(self.tokens):
            raise InputError(f"preprocessor: {len(self.tokens)} tokens where its columns have {known}; build it again")

    def check(self) -> None:
        """Raises InputError for values that `rayrec vocabulary` never writes and from which a kernel would compute nonsense."""
        for name, column in zip(self.inputs.sparse, self.sparse, strict=True):
            _check_sparse(name, column)
        for name, dense in zip(self.inputs.dense, self.dense, strict=True):
            _check_dense(name, dense)
        if self.multi_hot is not None and len(self.multi_hot.sizes) != len(self.sparse):
            raise InputError("preprocessor: multi_hot.sizes are not as many as its sparse columns; it is damaged")
        for column, owner in zip(self.sparse, self.inputs.vocabulary_owners, strict=True):
            if column != self.sparse[owner]:
                raise InputError(
                    f"preprocessor: columns that share the vocabulary of {self.inputs.sparse[owner]} differ; it is damaged"
                )
        least = self.file_minimum
        if least is not None and ("" not in least or any(type(value) is not int for value in least.values())):
            raise InputError("preprocessor: file_minimum is not a table of integers; it is damaged")

    @cached_property
    def inputs(self) -> Schema:
        """What the model gets: the raw log's columns, its integers among the sparse ones where they are categories."""
        if not self.integer_buckets:
            return self.schema
        return self.schema.replace(dense=(), sparse=self.schema.dense + self.schema.sparse)

    @property
    def _stored_tokens(self) -> list[int]:
        """Of each sparse column, how many tokens `tokens` holds for it: none for hashed columns and for those that share the
        vocabulary of an earlier column."""
        owners = self.inputs.vocabulary_owners
        return [
            (column.num_tokens or 0) if owners[number] == number else 0 for number, column in enumerate(self.sparse)
        ]

    def vocabulary(self, column: int) -> np.ndarray:
        """The tokens of a sparse column's vocabulary, in id order; none if the column is hashed."""
        stored, owner = self._stored_tokens, self.inputs.vocabulary_owners[column]
        first = sum(stored[:owner])
        return self.tokens[first : first + stored[owner]]

    @cached_property
    def num_embeddings(self) -> list[int]:
        """Rows of each sparse column's embedding table."""
        return [column.num_embeddings for column in self.sparse]

    @property
    def hotness(self) -> list[int | None]:
        """Ids a row has in each sparse column; None: any number."""
        if self.multi_hot:
            return list(self.multi_hot.sizes)
        return [None if name in self.inputs.lists else 1 for name in self.inputs.sparse]

    @cached_property
    def id_dtype(self) -> np.dtype:
        """int32, or int64 where a table has more rows than that can count."""
        return np.dtype(np.int32 if max(self.num_embeddings, default=0) <= 2**31 else np.int64)

    @cached_property
    def slots(self) -> np.ndarray:
        """uint64: the open-addressing tables of every vocabulary column, one after the other; costs about 20 ns a token.

        Raises InputError where a column holds a token twice.
        """
        from rayrec.data.logs.column_values import build_slots as build_wide_slots

        wide = self.tokens.dtype == np.uint64
        places = self._slot_places
        slots = np.zeros((places[-1], 2) if wide else places[-1], np.uint64)
        for number, (name, column) in enumerate(zip(self.inputs.sparse, self.sparse, strict=True)):
            out = slots[places[number] : places[number + 1]]
            if not len(out):
                continue
            build = build_wide_slots if wide else _build_slots
            if not build(np.ascontiguousarray(self.vocabulary(number)), column.ids(), out):
                raise InputError(
                    f"preprocessor: column {name} holds a token twice; build it again with `rayrec vocabulary`"
                )
        return slots

    @cached_property
    def _slot_places(self) -> list[int]:
        """Where the slots of each sparse column's own vocabulary start in `slots`, and their end."""
        owners = self.inputs.vocabulary_owners
        sizes = [
            0 if column.num_tokens is None or owners[number] != number else num_slots(column.num_tokens)
            for number, column in enumerate(self.sparse)
        ]
        return [0, *itertools.accumulate(sizes)]

    def slots_of(self, column: int) -> np.ndarray | None:
        """The part of `slots` that a sparse column is looked up in; None if it is hashed."""
        if self.sparse[column].num_tokens is None:
            return None
        places, owner = self._slot_places, self.inputs.vocabulary_owners[column]
        return self.slots[places[owner] : places[owner + 1]]

    def grouped_by(self, column: str | None) -> Preprocessor:
        """The same, its rows encoded with the keys of their groups: `Schema.group`, which is not stored with it."""
        if column == self.schema.group:
            return self
        changed = replace(self, schema=self.schema.replace(group=column))
        if "slots" in self.__dict__:  # which take long to make
            changed.__dict__["slots"] = self.slots
        return changed

    def describe(self) -> dict[str, Any]:
        """Everything but the tokens, as plain JSON values."""
        return {
            "version": VERSION,
            "profile": self.preset,  # the key of earlier versions
            "schema": self.schema.describe(),
            "dense": [vars(column) for column in self.dense],
            # `mixed` was added later: without it, descriptions and hashes of earlier Preprocessors stay the same.
            "sparse": [
                {name: value for name, value in vars(column).items() if name != "mixed" or value}
                for column in self.sparse
            ],
            "integer_buckets": self.integer_buckets,
            "file_minimum": self.file_minimum,
            "multi_hot": self.multi_hot.to_dict() if self.multi_hot else None,
            "constants": self.constants,
        }

    def hash(self) -> str:
        """The first 16 hex digits of a SHA-256 over the description and the tokens."""
        digest = hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode())
        digest.update(np.ascontiguousarray(self.tokens).data)
        return digest.hexdigest()[:16]

    def save(self, folder: str) -> None:
        """Writes preprocessor.json and tokens.npy; the JSON file comes last and holds the hash."""
        with storage.writing(storage.join(folder, "tokens.npy")) as path, open(path, "wb") as file:
            np.save(file, self.tokens, allow_pickle=False)
        storage.write_json(storage.join(folder, "preprocessor.json"), {**self.describe(), "hash": self.hash()})

    @classmethod
    def load(cls, folder: str) -> Preprocessor:
        """Reads what `save` wrote. Raises InputError where it is absent, of another version, or damaged."""
        path = storage.join(folder, "preprocessor.json")
        if not storage.exists(path):
            raise InputError(
                f"{folder}: holds no preprocessor.json; build one with `rayrec vocabulary PATH --out {folder}`"
            )
        stored = storage.read_json(path)
        if not isinstance(stored, dict):
            raise InputError(f"{path}: damaged, not a mapping; build it again")
        if stored.get("version") != VERSION:
            raise InputError(
                f"{path}: version {stored.get('version')}, this rayrec reads version {VERSION}; build it again"
            )
        packed = storage.read_bytes(storage.join(folder, "tokens.npy"))
        try:
            self = cls(
                preset=stored["profile"],
                schema=Schema.described(stored["schema"]),
                dense=tuple(DenseColumn(**column) for column in stored["dense"]),
                sparse=tuple(SparseColumn(**column) for column in stored["sparse"]),
                tokens=np.lib.format.read_array(io.BytesIO(packed), allow_pickle=False),
                integer_buckets=stored["integer_buckets"],
                file_minimum=stored["file_minimum"],
                multi_hot=MultiHot().updated(stored["multi_hot"]) if stored["multi_hot"] else None,
                constants=stored["constants"],
            )
            self.check()
        except InputError as error:
            raise InputError(f"{folder}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError, EOFError, MemoryError) as error:
            raise InputError(f"{folder}: the preprocessor's files are damaged ({error}); build it again") from None
        if self.hash() != stored.get("hash"):
            raise InputError(
                f"{folder}: its hash is {self.hash()}, not {stored.get('hash')} as written; the files are damaged"
            )
        _ = self.slots  # built here, so that every user of this object has them
        return self

    @cached_property
    def _c_columns(self) -> tuple[ctypes.Array[CDenseColumn], ctypes.Array[CSparseColumn]]:
        """Kept: to make them costs as much as to encode 300 rows, and servers encode single ones."""
        dense = (CDenseColumn * len(self.dense))(*map(c_dense_column, self.dense))
        return dense, self.c_sparse_columns()

    def __getstate__(self) -> dict[str, Any]:
        """All but what points into this process's memory."""
        return {name: value for name, value in self.__dict__.items() if name != "_c_columns"}

    def c_sparse_columns(self) -> ctypes.Array[CSparseColumn]:
        """Descriptors for the kernels of 32-bit tokens; they point into `slots`, which must outlive them."""
        columns = (CSparseColumn * len(self.sparse))()
        for number, (column, out) in enumerate(zip(self.sparse, columns, strict=True)):
            out.missing_id, out.unknown_id, out.base = column.missing_id, column.unknown_id, column.first_id
            out.token_modulo, out.hash = column.token_modulo or 0, column.murmur3 + 2 * column.mixed
            slots = self.slots_of(number)
            if slots is None:
                out.slots, out.modulo = None, column.num_embeddings - column.first_id
                continue
            out.slots, out.modulo = slots.ctypes.data, 1
            out.mask, out.shift = len(slots) - 1, 32 - (len(slots).bit_length() - 1)
        return columns

    def encode(self, raw: RawRows | RawColumns, order: np.ndarray | None = None) -> EncodedRows:
        """Encodes rows `order` (int64, default all in order) of `raw`. About 0.5 microseconds a Criteo row."""
        if isinstance(raw, RawColumns):
            return encode_columns(self, raw, order)
        order = np.arange(raw.rows, dtype=np.int64) if order is None else np.ascontiguousarray(order, np.int64)
        raw = adapt(raw, integer_buckets=False, file_minimum=self.file_minimum)
        rows, labelled = len(order), raw.schema.label is not None
        dense = np.empty((rows, len(self.dense)), np.float32)
        ids = np.empty((len(self.sparse), rows), self.id_dtype)
        labels = np.empty(rows, np.float32) if labelled else None
        library().rayrec_encode(
            ctypes.byref(raw.c_rows()),
            ctypes.byref(raw.layout),
            ctypes.c_void_p(order.ctypes.data),
            ctypes.c_int64(rows),
            ctypes.c_int32(self.integer_buckets),
            *self._c_columns,
            ctypes.c_void_p(dense.ctypes.data),
            ctypes.c_void_p(ids.ctypes.data),
            ctypes.c_int64(ids.itemsize),
            ctypes.c_int64(rows),
            ctypes.c_void_p(labels.ctypes.data if labels is not None else None),
        )
        if self.multi_hot is None:
            return EncodedRows(dense, ids, labels)  # type: ignore[arg-type]  # a matrix is a sequence of its rows
        return EncodedRows(dense, self.multi_hot.expand(list(ids), self.num_embeddings), labels)


def _build_slots(tokens: np.ndarray, ids: np.ndarray, out: np.ndarray) -> bool:
    failed = library().rayrec_build_slots(
        ctypes.c_void_p(tokens.ctypes.data),
        ctypes.c_void_p(ids.ctypes.data),
        ctypes.c_int64(len(tokens)),
        ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(len(out)),
    )
    return not failed


def file_key(path: str) -> str:
    """The name by which constants of a file are kept, in any folder, packed or not."""
    return source_of(path)[1].removesuffix(".gz").removesuffix(".parquet")


def adapt(raw: RawRows, *, integer_buckets: bool, file_minimum: dict[str, int] | None) -> RawRows:
    """The raw rows as a Preprocessor's columns are made of them: with integers counted from their file's least one (a
    missing one being 0), or turned into categories; the same rows where neither is wanted."""
    if file_minimum is not None:
        raw = _from_file_minimum(raw, file_minimum)
    return bucket_integers(raw) if integer_buckets else raw


def _from_file_minimum(raw: RawRows, file_minimum: dict[str, int]) -> RawRows:
    out = raw.with_columns(raw.schema, integers=raw.integers[: raw.rows].copy(), missing=raw.missing[: raw.rows].copy())
    num_dense = len(raw.schema.dense)
    for path, start, stop in raw.files():
        least = file_minimum.get(file_key(path), file_minimum[""])
        out.integers[start:stop] -= least  # the parser stores 0 for a missing integer
    out.missing &= ~np.uint64((1 << num_dense) - 1)
    return out


def bucket_integers(raw: RawRows) -> RawRows:
    """Integers as further categories, before the others: floor(ln(x)^2) for x > 2, else x, plus 2^31 so that tokens sort as
    the numbers do. 0 is no category (the rule of FuxiCTR on Criteo_x4)."""
    num_dense, num_sparse = len(raw.schema.dense), len(raw.schema.sparse)
    tokens = np.empty((raw.rows, num_dense + num_sparse), np.uint32)
    library().rayrec_bucket_integers(
        ctypes.c_void_p(raw.integers.ctypes.data),
        ctypes.c_int64(raw.rows),
        ctypes.c_void_p(tokens.ctypes.data),
        ctypes.c_int64(num_dense),
        ctypes.c_int64(num_dense + num_sparse),
    )
    tokens[:, num_dense:] = raw.tokens[: raw.rows]
    missing = raw.missing[: raw.rows].copy()
    for column in range(num_dense):  # 0 is no category; the parser stores it where a number is missing
        missing |= (raw.integers[: raw.rows, column] == 0).astype(np.uint64) << np.uint64(column)
    schema = raw.schema.replace(dense=(), sparse=raw.schema.dense + raw.schema.sparse)
    # The bits of a row's mask keep their places: dense columns come before sparse ones there too.
    return raw.with_columns(schema, integers=np.empty((raw.rows, 0), np.int64), tokens=tokens, missing=missing)


def share_preprocessor(preprocessor: Preprocessor, engine: StreamEngine) -> Shared[Preprocessor]:
    """The Preprocessor for an engine's tasks; its arrays are shared by all processes of a machine, uncopied."""
    _ = preprocessor.slots  # built before, once
    return engine.share(preprocessor)
