"""The one artifact that turns raw columns into model inputs: schema, dense constants and vocabularies, versioned and hashed."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.parsing import RawRows
from rayrec.native import library
from rayrec.schema import Schema

VERSION = 1
UNKNOWN_ID = 0
"""Id of categories that the vocabulary does not hold: unseen, or seen less often than min_count."""
MISSING_ID = 1
"""Id of an empty field."""
FIRST_ID = 2
"""Id of the most frequent category; the others follow by falling count, then by token."""


class CSparseColumn(ctypes.Structure):
    _fields_ = [
        ("slots", ctypes.c_void_p),
        ("mask", ctypes.c_uint64),
        ("shift", ctypes.c_int32),
        ("missing_id", ctypes.c_int32),
        ("unknown_id", ctypes.c_int32),
        ("modulo_base", ctypes.c_int32),
        ("modulo", ctypes.c_uint32),
        ("padding", ctypes.c_int32),
    ]


class CDenseColumn(ctypes.Structure):
    _fields_ = [
        ("mean", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("missing_value", ctypes.c_float),
        ("padding", ctypes.c_float),
    ]


@dataclass(frozen=True)
class DenseColumn:
    """x -> (sign(x) ln(1 + |x|) - mean) * scale; missing -> missing_value."""

    mean: float
    scale: float
    missing_value: float = 0.0


@dataclass(frozen=True)
class SparseColumn:
    """How a category becomes an id: by vocabulary (`num_tokens` known ones), or, with `num_tokens` None, by
    FIRST_ID + token mod (num_embeddings - FIRST_ID)."""

    num_embeddings: int
    num_tokens: int | None


@dataclass(frozen=True)
class EncodedRows:
    """Model inputs of some rows."""

    dense: np.ndarray
    """float32 (rows, num_dense)"""
    ids: np.ndarray
    """int32 (num_sparse, rows)"""
    labels: np.ndarray | None
    """float32 (rows), None for an unlabelled log"""

    def __len__(self) -> int:
        return len(self.dense)


def num_slots(num_tokens: int) -> int:
    """Slots of the open-addressing table for so many tokens: a power of two, at most two thirds full."""
    slots = 16
    while slots * 2 < num_tokens * 3:
        slots *= 2
    return slots


@dataclass(frozen=True)
class Preprocessor:
    """Turns raw rows of a click log into model inputs. Build it with `rayrec vocabulary`; never changed afterwards."""

    profile: str
    schema: Schema
    """Of the labelled log."""
    dense: tuple[DenseColumn, ...]
    sparse: tuple[SparseColumn, ...]
    tokens: np.ndarray
    """uint32: the tokens of every vocabulary column, one column after the other, in id order"""
    slots: np.ndarray
    """uint64: the open-addressing tables of every vocabulary column, one after the other"""
    constants: dict[str, Any] = field(default_factory=dict)
    """What the profile used: min_count, rows counted, and the like."""

    @classmethod
    def build(
        cls,
        *,
        profile: str,
        schema: Schema,
        dense: Sequence[DenseColumn],
        sparse: Sequence[SparseColumn],
        tokens: np.ndarray,
        constants: dict[str, Any],
    ) -> Preprocessor:
        """Builds the lookup tables. Costs about 20 ns a token."""
        total = sum(num_slots(column.num_tokens) for column in sparse if column.num_tokens is not None)
        slots = np.zeros(total, np.uint64)
        first_token = first_slot = 0
        for name, column in zip(schema.sparse, sparse, strict=True):
            if column.num_tokens is None:
                continue
            mine = np.ascontiguousarray(tokens[first_token : first_token + column.num_tokens], np.uint32)
            count = num_slots(column.num_tokens)
            out = slots[first_slot : first_slot + count]
            failed = library().rayrec_build_slots(
                ctypes.c_void_p(mine.ctypes.data),
                ctypes.c_int64(len(mine)),
                ctypes.c_int32(FIRST_ID),
                ctypes.c_void_p(out.ctypes.data),
                ctypes.c_int64(count),
            )
            if failed:
                raise InputError(
                    f"preprocessor: column {name} holds a token twice; build it anew with `rayrec vocabulary`"
                )
            first_token += column.num_tokens
            first_slot += count
        return cls(
            profile=profile,
            schema=schema,
            dense=tuple(dense),
            sparse=tuple(sparse),
            tokens=tokens,
            slots=slots,
            constants=constants,
        )

    @property
    def num_embeddings(self) -> list[int]:
        """Rows of each sparse column's embedding table."""
        return [column.num_embeddings for column in self.sparse]

    def describe(self) -> dict[str, Any]:
        """Everything but the tokens, as plain JSON values."""
        return {
            "version": VERSION,
            "profile": self.profile,
            "schema": self.schema.to_dict(),
            "dense": [vars(column) for column in self.dense],
            "sparse": [vars(column) for column in self.sparse],
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
        import io

        path = storage.join(folder, "preprocessor.json")
        if not storage.exists(path):
            raise InputError(
                f"{folder}: holds no preprocessor.json; build one with `rayrec vocabulary PATH --out {folder}`"
            )
        stored = storage.read_json(path)
        if stored.get("version") != VERSION:
            raise InputError(
                f"{path}: version {stored.get('version')}, this rayrec reads version {VERSION}; build it anew"
            )
        packed = storage.read_bytes(storage.join(folder, "tokens.npy"))
        try:
            schema = stored["schema"]
            self = cls.build(
                profile=stored["profile"],
                schema=Schema(label=schema["label"], dense=tuple(schema["dense"]), sparse=tuple(schema["sparse"])),
                dense=[DenseColumn(**column) for column in stored["dense"]],
                sparse=[SparseColumn(**column) for column in stored["sparse"]],
                tokens=np.load(io.BytesIO(packed), allow_pickle=False),
                constants=stored["constants"],
            )
        except (KeyError, TypeError, ValueError, EOFError) as error:
            raise InputError(f"{folder}: the preprocessor's files are damaged ({error}); build it anew") from None
        if self.hash() != stored.get("hash"):
            raise InputError(
                f"{folder}: its hash is {self.hash()}, not {stored.get('hash')} as written; the files are damaged"
            )
        return self

    def c_sparse_columns(self) -> ctypes.Array[CSparseColumn]:
        """Descriptors for the kernels; they point into `slots`, which must outlive them."""
        columns = (CSparseColumn * len(self.sparse))()
        first_slot = 0
        for column, out in zip(self.sparse, columns, strict=True):
            out.missing_id, out.unknown_id, out.modulo_base = MISSING_ID, UNKNOWN_ID, FIRST_ID
            if column.num_tokens is None:
                out.slots, out.modulo = None, column.num_embeddings - FIRST_ID
                continue
            count = num_slots(column.num_tokens)
            out.slots = self.slots[first_slot:].ctypes.data
            out.mask, out.shift, out.modulo = count - 1, 32 - (count.bit_length() - 1), 1
            first_slot += count
        return columns

    def encode(self, raw: RawRows, order: np.ndarray | None = None) -> EncodedRows:
        """Encodes rows `order` (int64, default all in order) of `raw`. About 0.5 microseconds a Criteo row."""
        order = np.arange(raw.rows, dtype=np.int64) if order is None else np.ascontiguousarray(order, np.int64)
        rows, labelled = len(order), raw.schema.label is not None
        dense = np.empty((rows, len(self.dense)), np.float32)
        ids = np.empty((len(self.sparse), rows), np.int32)
        labels = np.empty(rows, np.float32) if labelled else None
        dense_columns = (CDenseColumn * len(self.dense))(
            *(CDenseColumn(column.mean, column.scale, column.missing_value, 0.0) for column in self.dense)
        )
        sparse_columns = self.c_sparse_columns()
        library().rayrec_encode(
            ctypes.byref(raw.c_rows()),
            ctypes.byref(raw.layout),
            ctypes.c_void_p(order.ctypes.data),
            ctypes.c_int64(rows),
            dense_columns,
            sparse_columns,
            ctypes.c_void_p(dense.ctypes.data),
            ctypes.c_void_p(ids.ctypes.data),
            ctypes.c_int64(rows),
            ctypes.c_void_p(labels.ctypes.data if labels is not None else None),
        )
        return EncodedRows(dense, ids, labels)
