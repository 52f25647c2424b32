"""Preprocessor: schema, dense constants and vocabularies that convert raw columns to model inputs,
versioned and hashed.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from rayrec import storage
from rayrec.config import InputError
from rayrec.data.encoded_rows import EncodedRows
from rayrec.data.encoding.category_names import CategoryNames
from rayrec.data.encoding.encoder import (
    DENSE_KINDS,
    Derivation,
    Encoder,
    MultiHot,
    build_slots,
    id_type,
    num_slots,
)
from rayrec.data.encoding.rules import MIN_INTEGER, DenseColumn, SparseColumn
from rayrec.data.engine import Shared, StreamEngine
from rayrec.data.raw_block import RawBlock, category_type
from rayrec.schema import NamedTable, Schema

VERSION = 2
PREPROCESSOR_FOLDER: Final = "preprocessor"
"""Folder of the Preprocessor within a run, a checkpoint or an export."""
MAX_TABLE_ROWS: Final = 2**40
"""Maximum rows of an embedding table."""


_ADDED: Final[dict[str, Any]] = {"mean_low": 0.0, "lower": None, "upper": None, "indicator": False}
"""Fields of DenseColumn that earlier versions lack, with their values in older Preprocessors."""


def _check_dense(name: str, column: DenseColumn) -> None:
    bounds = [bound for bound in (column.lower, column.upper) if bound is not None]
    numbers = (
        column.shift,
        column.mean,
        column.scale,
        column.missing_value,
        column.mean_low,
        *bounds,
    )
    if (
        column.kind not in DENSE_KINDS
        or type(column.lowest) is not int
        or abs(column.lowest) > -MIN_INTEGER
        or not all(type(number) in (int, float) and abs(number) < math.inf for number in numbers)
        or len(bounds) == 1
        or bounds != sorted(bounds)
        or type(column.indicator) is not bool
    ):
        raise InputError(
            f"preprocessor: column {name} has the invalid rule {column}; it is damaged"
        )


def _check_sparse(name: str, column: SparseColumn) -> None:
    """Check that no id can be outside [0, num_embeddings). Raises InputError."""
    rows = column.num_embeddings
    tokens = column.num_tokens
    largest = 2**31 - 1  # Id of a vocabulary
    limits = {
        "num_embeddings": (rows, 1, MAX_TABLE_ROWS),
        "num_tokens": (0 if tokens is None else tokens, 0, largest),
        "first_id": (column.first_id, 0, largest - tokens if type(tokens) is int else rows - 1),
        "unknown_id": (
            column.unknown_id,
            0,
            rows - 1 if tokens is None else min(rows - 1, largest),
        ),
        "missing_id": (column.missing_id, 0, rows - 1),
        "gap": (0 if column.gap is None else column.gap, 0, MAX_TABLE_ROWS),
        "token_modulo": (1 if column.token_modulo is None else column.token_modulo, 1, 2**32 - 1),
    }
    for limited, (value, minimum, maximum) in limits.items():
        if type(value) is not int or not minimum <= value <= maximum:
            raise InputError(
                f"preprocessor: {limited} of column {name} must be an integer from {minimum} to "
                f"{maximum}, got {value!r}; damaged"
            )
    if not type(column.murmur3) is type(column.mixed) is bool:
        raise InputError(
            f"preprocessor: column {name} has the invalid rule {column}; it is damaged"
        )


# Parts of a Preprocessor, and who needs them:
#
#   description    preprocessor.json: rules of columns; small; hashed
#   tokens         tokens.npy: vocabularies in id order; hashed
#   names          names.arrow: texts of one vocabulary, for answers; not hashed, since no input of
#                  a model depends on them; their checksum is in preprocessor.json
#   slots          lookup tables, made from tokens once per process tree; shared, never stored
#   encoder        pointers into `slots`; made in each process, never pickled
#
# The hash of description and tokens identifies it in checkpoints, exports and preprocessed data.
@dataclass(frozen=True)
class Preprocessor:
    """Immutable conversion of raw rows of a click log to model inputs. Built by `rayrec
    vocabulary`.
    """

    preset: str
    schema: Schema
    """Schema of the labelled raw log."""
    dense: tuple[DenseColumn, ...]
    """Rule of each column of `dense_names`."""
    sparse: tuple[SparseColumn, ...]
    """Rule of each column of `inputs.sparse`."""
    tokens: np.ndarray
    """Concatenated vocabularies in id order, uint32, or uint64 for any tokens. Columns with a
    shared one store it once.
    """
    integer_buckets: bool = False
    """Whether to convert the log's integers to categories, before the sparse columns:
    floor(ln(x)^2) above 2, else x.
    """
    file_minimum: dict[str, int] | None = None
    """Integer subtracted from each file's integers, by base name without `.gz`; "" for other files.
    None: no subtraction.
    """
    multi_hot: MultiHot | None = None
    """Expansion of each id to a bag of several. None: no expansion."""
    constants: dict[str, Any] = field(default_factory=dict)
    """Inputs of the preset: its rules, the number of counted rows, and others."""
    names: CategoryNames | None = None
    """Texts of the categories that a retrieval model answers with. None: unknown, as in those of
    earlier versions and of other models.
    """

    def __post_init__(self) -> None:
        if (len(self.dense), len(self.sparse)) != (len(self.dense_names), len(self.inputs.sparse)):
            raise InputError("preprocessor: its columns do not match its schema; build it again")
        dtype = category_type(self.schema)
        if self.tokens.dtype != dtype or self.tokens.ndim != 1:
            raise InputError(
                f"preprocessor: tokens must be {dtype} [tokens], got {self.tokens.dtype} "
                f"{self.tokens.shape}; build it again"
            )
        if dtype == np.uint64 and any(column.murmur3 for column in self.sparse):
            raise InputError(
                "preprocessor: murmur3 needs categories of 8 hexadecimal digits; build it again"
            )
        expected = sum(self._stored_tokens)
        if expected != len(self.tokens):
            raise InputError(
                f"preprocessor: has {len(self.tokens)} tokens, but its columns need {expected}; "
                "build it again"
            )
        names = self.names
        if names is not None:
            vocabulary = self.vocabulary(self.inputs.sparse.index(names.column))
            num_texts = names.num_tokens if names.texts is None else len(names.texts)
            if not num_texts == names.num_tokens <= len(vocabulary):
                raise InputError(
                    f"preprocessor: has {num_texts} texts of column {names.column}, whose "
                    f"vocabulary has {len(vocabulary)}; build it again"
                )

    def check(self) -> None:
        """Check for values that `rayrec vocabulary` never writes and that break the kernels. Raises
        InputError.
        """
        for name, column in zip(self.inputs.sparse, self.sparse, strict=True):
            _check_sparse(name, column)
        for name, dense in zip(self.dense_names, self.dense, strict=True):
            _check_dense(name, dense)
            if dense.indicator and self.schema.tokens == "hexadecimal":
                raise InputError(
                    f"preprocessor: column {name} of a hexadecimal log cannot have an indicator; "
                    "it is damaged"
                )
        if self.multi_hot is not None and len(self.multi_hot.sizes) != len(self.sparse):
            raise InputError(
                "preprocessor: multi_hot.sizes do not match its sparse columns; it is damaged"
            )
        # Lookups and tables are shared by vocabulary, so columns of one must have one rule.
        for column, owner in zip(self.sparse, self.inputs.vocabulary_owners, strict=True):
            if column != self.sparse[owner]:
                raise InputError(
                    f"preprocessor: columns sharing the vocabulary of {self.inputs.sparse[owner]} "
                    "differ; damaged"
                )
        minimum = self.file_minimum
        if minimum is not None and (
            "" not in minimum or any(type(value) is not int for value in minimum.values())
        ):
            raise InputError(
                "preprocessor: file_minimum must be a table of integers; it is damaged"
            )

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Columns of the log that are numbers for the model, too."""
        return () if self.integer_buckets else self.schema.dense

    @cached_property
    def inputs(self) -> Schema:
        """Columns that the model gets: the raw log's columns, with integers moved to sparse if they
        are categories, and with the indicators of missing numbers.
        """
        return self.derivation.inputs(self.schema)

    @property
    def _stored_tokens(self) -> list[int]:
        """Number of entries in `tokens` by sparse column, 0 if hashed, or stored at an earlier
        column.
        """
        owners = self.inputs.vocabulary_owners
        return [
            (column.num_tokens or 0) if owners[number] == number else 0
            for number, column in enumerate(self.sparse)
        ]

    def vocabulary(self, column: int) -> np.ndarray:
        """Return the tokens of a sparse column's vocabulary in id order, none if the column is
        hashed.
        """
        stored = self._stored_tokens
        owner = self.inputs.vocabulary_owners[column]
        first = sum(stored[:owner])
        return self.tokens[first : first + stored[owner]]

    @cached_property
    def num_embeddings(self) -> list[int]:
        """Rows of each sparse column's embedding table."""
        return [column.num_embeddings for column in self.sparse]

    @property
    def hotness(self) -> list[int | None]:
        """Number of ids per row in each sparse column. None: any number."""
        if self.multi_hot:
            return list(self.multi_hot.sizes)
        return [None if name in self.inputs.lists else 1 for name in self.inputs.sparse]

    @cached_property
    def id_dtype(self) -> np.dtype:
        """Type of ids: int32, or int64 if a table has too many rows for it."""
        return id_type(self.sparse)

    @cached_property
    def slots(self) -> np.ndarray:
        """Concatenated lookup tables of all vocabularies, uint64. About 20 ns per token. Raises
        InputError for a repeated one.
        """
        offsets = self._slot_offsets
        slots = np.zeros(
            (offsets[-1], 2) if self.tokens.dtype == np.uint64 else offsets[-1],
            np.uint64,
        )
        for number, (name, column) in enumerate(zip(self.inputs.sparse, self.sparse, strict=True)):
            out = slots[offsets[number] : offsets[number + 1]]
            if not len(out):
                continue
            if not build_slots(np.ascontiguousarray(self.vocabulary(number)), column.ids(), out):
                raise InputError(
                    f"preprocessor: column {name} has a repeated token; build it again with "
                    "`rayrec vocabulary`"
                )
        return slots

    @cached_property
    def _slot_offsets(self) -> list[int]:
        """Start of each sparse column's own vocabulary in `slots`, and the end."""
        owners = self.inputs.vocabulary_owners
        sizes = [
            0
            if column.num_tokens is None or owners[number] != number
            else num_slots(column.num_tokens)
            for number, column in enumerate(self.sparse)
        ]
        return [0, *itertools.accumulate(sizes)]

    def column_slots(self, column: int) -> np.ndarray | None:
        """Return the lookup table of a sparse column within `slots`; None if it is hashed."""
        if self.sparse[column].num_tokens is None:
            return None
        offsets = self._slot_offsets
        owner = self.inputs.vocabulary_owners[column]
        return self.slots[offsets[owner] : offsets[owner + 1]]

    def grouped_by(self, column: str | None) -> Preprocessor:
        """Return the same Preprocessor with another `Schema.group`, which is not stored, for group
        keys in encoded rows.
        """
        if column == self.schema.group:
            return self
        return self._with_schema(self.schema.replace(group=column))

    def with_ages_of(self, schema: Schema) -> Preprocessor:
        """Return the same Preprocessor with the columns of ages in another schema, if the schemas
        differ in nothing else: no category or number depends on them. Its hash is another.
        """
        aged = self.schema.with_ages_of(schema)
        return self if aged != schema or aged == self.schema else self._with_schema(aged)

    def with_unlimited_lists(self) -> Preprocessor:
        """Return the same Preprocessor without maximum lengths of lists."""
        features = tuple(feature.replace(max_length=None) for feature in self.schema.features)
        if self.schema.sequence is None:
            return self._with_schema(self.schema.replace(features=features))
        # `sequence` says how long its lists are, so that they are read as any others.
        columns = {
            name: getattr(self.schema, name) for name in ("sparse", "lists", "optional", "integers")
        }
        plain = self.schema.replace(sequence=None, split=None, features=features, **columns)
        return self._with_schema(plain)

    def with_tables(self, tables: Sequence[NamedTable]) -> Preprocessor:
        """Return the same Preprocessor with other side tables in place of those with their names,
        for a server. Its hash is another.
        """
        named = {table.name: table for table in (*self.schema.tables, *tables)}
        return self._with_schema(self.schema.replace(tables=tuple(named.values())))

    def with_names(self, names: CategoryNames) -> Preprocessor:
        """Return the same Preprocessor with texts of categories. Its hash is the same."""
        return self._with_slots(replace(self, names=names))

    def _with_schema(self, schema: Schema) -> Preprocessor:
        """Return the same Preprocessor with a schema of the same columns."""
        return self._with_slots(replace(self, schema=schema))

    def _with_slots(self, changed: Preprocessor) -> Preprocessor:
        """Return a changed Preprocessor with this one's lookup tables."""
        if "slots" in self.__dict__:  # Slow to build
            changed.__dict__["slots"] = self.slots
        return changed

    def describe(self) -> dict[str, Any]:
        """Return everything except the tokens as plain JSON values."""
        return {
            "version": VERSION,
            "profile": self.preset,  # The key of earlier versions
            "schema": self.schema.describe(),
            # Fields that were added later are left out if they have no effect: descriptions and
            # hashes of earlier Preprocessors stay the same.
            "dense": [
                {
                    name: value
                    for name, value in vars(column).items()
                    if name not in _ADDED or value != _ADDED[name]
                }
                for column in self.dense
            ],
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
        """Return the first 16 hex digits of the SHA-256 of the description and the tokens."""
        digest = hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode())
        digest.update(np.ascontiguousarray(self.tokens).data)
        return digest.hexdigest()[:16]

    def save(self, folder: str) -> None:
        """Write tokens.npy and the texts, then preprocessor.json with the hash."""
        names = {} if self.names is None else {"names": self.names.save(folder)}
        with storage.writing(storage.join(folder, "tokens.npy")) as path, open(path, "wb") as file:
            np.save(file, self.tokens, allow_pickle=False)
        storage.write_json(
            storage.join(folder, "preprocessor.json"),
            {**self.describe(), **self._formulas(), **names, "hash": self.hash()},
        )

    def _formulas(self) -> dict[str, Any]:
        """Return the checked trees of the schema's formulas for an export's `encode.py`, which has
        no parser. They follow from the schema, and so are not part of the hash.
        """
        program = self.schema.program
        return {"formulas": program.describe()} if program.steps else {}

    @classmethod
    def load(cls, folder: str) -> Preprocessor:
        """Load a saved Preprocessor, from its folder or that of a run, checkpoint, export or
        preprocessed log. Raises InputError if it is absent, damaged, or of another version.
        """
        folder = preprocessor_folder(folder)
        path = storage.join(folder, "preprocessor.json")
        stored = storage.read_json(path)
        if not isinstance(stored, dict):
            raise InputError(f"{path}: damaged, not a mapping; build it again")
        if stored.get("version") != VERSION:
            raise InputError(
                f"{path}: version {stored.get('version')}, this rayrec reads version {VERSION}; "
                "build it again"
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
                names=CategoryNames.load(folder, stored["names"]) if "names" in stored else None,
            )
            self.check()
        except InputError as error:
            raise InputError(f"{folder}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError, EOFError, MemoryError) as error:
            raise InputError(
                f"{folder}: the preprocessor's files are damaged ({error}); build it again"
            ) from None
        if self.hash() != stored.get("hash"):
            raise InputError(
                f"{folder}: hash {self.hash()} does not match the stored {stored.get('hash')}; "
                "damaged files"
            )
        _ = self.slots  # Built here, for all users of this object
        return self

    @property
    def derivation(self) -> Derivation:
        """Derivation of the inputs from a log's columns."""
        indicators = tuple(
            name for name, rule in zip(self.dense_names, self.dense, strict=False) if rule.indicator
        )
        return Derivation(
            buckets=self.integer_buckets,
            file_minimum=self.file_minimum,
            indicators=indicators,
        )

    @cached_property
    def encoder(self) -> Encoder:
        """Encoder with these rules, which points into `slots`."""
        slots = [self.column_slots(column) for column in range(len(self.sparse))]
        return Encoder(
            self.dense,
            self.sparse,
            slots,
            derivation=self.derivation,
            multi_hot=self.multi_hot,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except pointers into this process's memory."""
        return {name: value for name, value in self.__dict__.items() if name != "encoder"}

    def encode(self, block: RawBlock, order: np.ndarray | None = None) -> EncodedRows:
        """Encode rows `order` (int64, default all in order) of a block."""
        return self.encoder.encode(block, order)


def preprocessor_folder(path: str) -> str:
    """Return the Preprocessor folder in a run, checkpoint, export, preprocessed log or `path`
    itself. Raises InputError.
    """
    for folder in (path, storage.join(path, PREPROCESSOR_FOLDER)):
        if storage.exists(storage.join(folder, "preprocessor.json")):
            return folder
    raise InputError(
        f"{path}: has no Preprocessor (preprocessor.json not found); use the --out folder of "
        "`rayrec vocabulary`, a run or a checkpoint"
    )


def stored_schema(folder: str) -> Schema:
    """Return the schema of a saved Preprocessor without its vocabularies, from any folder that
    `Preprocessor.load` accepts. Raises InputError if it is absent or damaged.
    """
    path = storage.join(preprocessor_folder(folder), "preprocessor.json")
    try:
        return Schema.described(storage.read_json(path)["schema"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged ({error}); build it again") from None


def put_preprocessor(preprocessor: Preprocessor, engine: StreamEngine) -> Shared[Preprocessor]:
    """Share the Preprocessor with an engine's tasks; all processes on a machine share its arrays
    without copies.
    """
    _ = preprocessor.slots  # Built once, before sharing
    return engine.share(preprocessor)
