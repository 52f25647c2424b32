"""Embedding tables for scoring, optionally quantized, with one lookup for all columns of a
batch.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, final, get_args

import numpy as np
import torch
from torch import nn

from rayrec.config import InputError
from rayrec.native import c_fields, call

Quantization = Literal["fp32", "fp16", "int8", "int4"]
"""Storage format of a table's values. int8 and int4 are integers with a scale and an offset per
row.
"""

# In the order of rayrec_table_kind in kernels.h
QUANTIZATIONS: Final[tuple[Quantization, ...]] = get_args(Quantization)

_LARGEST_HALF = 65504.0


def table_name(feature: str) -> str:
    """Return the unique name of a feature's embedding table as a module and in files. This is the
    feature's name, unless torch rejects it as a module name (it is empty, has a dot, or is an
    attribute of ModuleDict such as `type`). Then it is `%table:` and the name with % replaced by
    %25 and dots by %2E.
    """
    plain = feature and "." not in feature and not feature.startswith(_ESCAPED)
    if plain and not hasattr(_MODULES, feature):
        return feature
    return _ESCAPED + feature.replace("%", "%25").replace(".", "%2E")


def table_weight(table: str, *, unpooled: bool = False) -> str:
    """Return the weight name of a table, named by `table_name`, in a ClickModel. `unpooled`:
    whether its lookups are unpooled.
    """
    return f"{_SEQUENCES if unpooled else _BAGS}.{table}.weight"


def find_table(weight: str) -> str | None:
    """Return the table of a weight name, also if the ClickModel is a submodule. None for other
    weights.
    """
    for module in (_BAGS, _SEQUENCES):
        _, separator, table = f".{weight}".rpartition(f".{module}.")
        if separator and table.endswith(".weight"):
            return table.removesuffix(".weight")
    return None


_BAGS: Final = "embeddings.embedding_bags"
_SEQUENCES: Final = "sequences.embeddings"
_ESCAPED = "%table:"
_MODULES = nn.ModuleDict()


@dataclass(frozen=True)
class RowFormat:
    """Storage format of table rows with `dim` values."""

    quantization: Quantization
    dim: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype({"fp32": np.float32, "fp16": np.float16}.get(self.quantization, np.uint8))

    @property
    def width(self) -> int:
        """Number of `dtype` items per row. int8 rows have `dim` bytes and a float32 scale and
        offset. int4 rows have half a byte per value, even ones in the low bits, and a float16 scale
        and offset.
        """
        return {"int8": self.dim + 8, "int4": self.dim // 2 + 4}.get(self.quantization, self.dim)

    def check(self) -> None:
        """Check that rows of `dim` values have this format. Raises InputError."""
        if self.quantization == "int4" and self.dim % 2:
            raise InputError(
                f"quantize: int4 needs an even embedding_dim, got {self.dim}. Choose int8 or fp16."
            )

    def pack(self, rows: np.ndarray, *, table: str) -> np.ndarray:
        """Quantize float32 rows [n, dim] to `dtype` [n, width]. Returns fp32 rows unchanged.

        int8 and int4 are the packed formats of PyTorch's quantized::embedding_bag_byte_prepack and
        embedding_bag_4bit_prepack. Raises InputError for values that are not finite or overflow
        float16, where the format contains it.
        """
        if self.quantization == "fp32":
            return rows
        largest = float(np.abs(rows).max(initial=0.0))
        # Also if it is NaN
        if not largest <= (3.4e38 if self.quantization == "int8" else _LARGEST_HALF):
            raise InputError(
                f"table {table}: values must fit into {self.quantization}, got {largest}. Export "
                "fp32."
            )
        if self.quantization == "fp16":
            return rows.astype(np.float16)
        values = torch.from_numpy(np.ascontiguousarray(rows))
        if self.quantization == "int8":
            return torch.ops.quantized.embedding_bag_byte_prepack(values).numpy()
        return torch.ops.quantized.embedding_bag_4bit_prepack(values).numpy()

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """Dequantize `dtype` rows [n, width] to float32 [n, dim] on their device, bit-identical to
        the CPU kernel.
        """
        if self.quantization in ("fp32", "fp16"):
            return rows.float()
        if self.quantization == "int8":
            scale, offset = _bytes(rows[:, self.dim :]).view(torch.float32).split(1, dim=1)
            return rows[:, : self.dim].float().mul_(scale).add_(offset)
        half = self.dim // 2
        scale, offset = _bytes(rows[:, half:]).view(torch.float16).float().split(1, dim=1)
        packed = rows[:, :half]
        values = torch.stack((packed & 15, packed >> 4), dim=2).view(len(rows), self.dim)
        return values.float().mul_(scale).add_(offset)


def _bytes(part: torch.Tensor) -> torch.Tensor:
    """Copy the part for alignment: a view with a wider dtype must start at a multiple of its
    size.
    """
    return part.clone(memory_format=torch.contiguous_format)


class Lookup(NamedTuple):
    """Ids of one column of a batch."""

    ids: np.ndarray
    """Ids of all rows, int32 or int64, C-contiguous."""
    offsets: np.ndarray | None = None
    """Start of each row's ids, int64 [rows + 1]. None if every row has the same number of ids."""
    weights: np.ndarray | None = None
    """Factor of each id's embedding, float32, C-contiguous. None if all are 1."""


class Tables(ABC):
    """Tables of a model, in the order of its sparse columns."""

    def __init__(self, row_format: RowFormat) -> None:
        self.row_format = row_format

    @property
    def size_bytes(self) -> int:
        """Size of all tables. Features that share one count it once."""
        return sum(
            table.nbytes for table in {table.data_ptr(): table for table in self.tensors()}.values()
        )

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """Return the tables without a copy, row_format.dtype [num_embeddings, row_format.width].
        Features may share one.
        """

    @abstractmethod
    def pool(self, lookups: Sequence[Lookup | None], rows: int) -> torch.Tensor:
        """Return the weighted sum of each row's embeddings for each column with a lookup, 0 without
        ids, float32 [rows, lookups * dim]. Thread-safe. Ids must be within their table
        (AssertionError).
        """

    def pool_one_each(self, ids: np.ndarray) -> torch.Tensor:
        """Return the result of `pool` for one id per row in each column, int32 or int64 [columns,
        rows].
        """
        return self.pool([Lookup(column) for column in ids], ids.shape[1])

    @abstractmethod
    def one_by_one(self, column: int, ids: np.ndarray) -> torch.Tensor:
        """Return the embedding of each id of a column, float32 [ids, dim]. `ids`: C-contiguous
        int32 or int64. See `pool`.
        """


# Mirror of rayrec_lookup in native/kernels.h. Owners of its pointers:
#
#   table                   array of HostTables, for its lifetime
#   ids, offsets, weights   arrays of the request, which the caller keeps until the call returns
#
# A template without the request's pointers is copied for each batch, so threads share none.
class _CLookup(ctypes.Structure):
    _fields_ = c_fields(
        "void* table; int64 num_embeddings row_bytes; void* ids offsets; int64 size id_bytes; "
        "void* weights"
    )


@final
class HostTables(Tables):
    """Tables in main memory, with a native kernel for lookups."""

    def __init__(self, row_format: RowFormat, arrays: Sequence[np.ndarray]) -> None:
        """`arrays`: row_format.dtype [num_embeddings, row_format.width] each, C-contiguous, used
        without a copy.
        """
        super().__init__(row_format)
        for array in arrays:
            assert array.dtype == row_format.dtype
            assert array.shape[1:] == (row_format.width,)
            assert array.flags.c_contiguous
        self._arrays = tuple(arrays)
        self._kind = QUANTIZATIONS.index(row_format.quantization)
        # Template that each batch copies: filling the structures field by field takes as long as a
        # small lookup.
        self._columns = (_CLookup * len(arrays))(
            *(
                _CLookup(a.ctypes.data, len(a), a.shape[1] * a.itemsize, None, None, 1, 4, None)
                for a in arrays
            )
        )
        self._columns_array = np.frombuffer(memoryview(self._columns), np.dtype(_CLookup))

    def tensors(self) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in self._arrays]

    def pool(self, lookups: Sequence[Lookup | None], rows: int) -> torch.Tensor:
        assert len(lookups) == len(self._arrays)
        return self._lookup(
            {number: lookup for number, lookup in enumerate(lookups) if lookup is not None}, rows
        )

    def pool_one_each(self, ids: np.ndarray) -> torch.Tensor:
        assert ids.dtype in (np.int32, np.int64)
        assert len(ids) == len(self._arrays)
        ids, columns = np.ascontiguousarray(ids), self._columns_array.copy()
        columns["ids"] = ids.ctypes.data + ids.strides[0] * np.arange(len(ids))
        columns["id_bytes"] = ids.itemsize
        return self._run(columns, ids.shape[1])

    def one_by_one(self, column: int, ids: np.ndarray) -> torch.Tensor:
        return self._lookup({column: Lookup(ids)}, len(ids))

    def _lookup(self, lookups: Mapping[int, Lookup], rows: int) -> torch.Tensor:
        columns = (_CLookup * len(lookups))(*(self._columns[number] for number in lookups))
        for column, (ids, offsets, weights) in zip(columns, lookups.values(), strict=True):
            assert ids.flags.c_contiguous
            assert ids.dtype in (np.int32, np.int64)
            column.ids = ids.ctypes.data
            column.id_bytes = ids.itemsize
            if weights is not None:
                assert weights.flags.c_contiguous
                assert weights.dtype == np.float32
                assert weights.size == ids.size
                column.weights = weights.ctypes.data
            if offsets is not None:
                assert offsets.dtype == np.int64
                assert len(offsets) == rows + 1
                assert offsets[-1] == ids.size
                column.offsets = offsets.ctypes.data
            else:
                column.size = ids.size // max(rows, 1)
                assert column.size * rows == ids.size
        return self._run(columns, rows)

    def _run(self, columns: ctypes.Array[_CLookup] | np.ndarray, rows: int) -> torch.Tensor:
        dim = self.row_format.dim
        kind = ctypes.c_int32(self._kind)
        out = torch.empty(rows, len(columns) * dim)
        # The columns hold addresses only: their arrays belong to the caller, `out` to this frame.
        # The kernel checks ids before it reads a row: a wrong one must not read foreign memory.
        bad = call(
            "rayrec_pool_tables",
            columns,
            len(columns),
            rows,
            dim,
            kind,
            ctypes.c_void_p(out.data_ptr()),
        )
        assert bad < 0, f"an id of lookup {bad} lies beyond its table's rows"
        return out


_CPU: Final = torch.device("cpu")


@final
class DeviceTables(Tables):
    """Tables on any torch device, with torch operators for lookups."""

    def __init__(
        self, row_format: RowFormat, tables: Sequence[torch.Tensor], device: torch.device = _CPU
    ) -> None:
        """`tables`: as in HostTables, all on `device`."""
        super().__init__(row_format)
        self._tables = tuple(tables)
        self._device = device

    def tensors(self) -> list[torch.Tensor]:
        return list(self._tables)

    def pool(self, lookups: Sequence[Lookup | None], rows: int) -> torch.Tensor:
        present = [
            (table, lookup)
            for table, lookup in zip(self._tables, lookups, strict=True)
            if lookup is not None
        ]
        if not present:
            return torch.empty(rows, 0, device=self._device)
        ids = self._moved(present)
        return torch.cat(
            [self._column(*pair, part, rows) for pair, part in zip(present, ids, strict=True)],
            dim=1,
        )

    def one_by_one(self, column: int, ids: np.ndarray) -> torch.Tensor:
        table = self._tables[column]
        lookup = Lookup(ids)
        (moved,) = self._moved([(table, lookup)])
        return self._column(table, lookup, moved, len(ids))

    def _moved(self, lookups: Sequence[tuple[torch.Tensor, Lookup]]) -> tuple[torch.Tensor, ...]:
        """Copy the ids of all lookups to the device at once, int64 each: each copy takes as long as
        a small lookup.
        """
        columns = [lookup.ids.reshape(-1) for _, lookup in lookups]
        for (table, _), ids in zip(lookups, columns, strict=True):
            assert not ids.size or (ids.min() >= 0 and ids.max() < len(table)), (
                "an id lies beyond its table's rows"
            )
        together = torch.from_numpy(np.concatenate(columns, dtype=np.int64)).to(self._device)
        return together.split([ids.size for ids in columns])

    def _column(
        self, table: torch.Tensor, lookup: Lookup, moved: torch.Tensor, rows: int
    ) -> torch.Tensor:
        ids = lookup.ids
        values = self.row_format.unpack(table[moved])
        if lookup.weights is not None:
            values = values * torch.from_numpy(lookup.weights).to(self._device).unsqueeze(1)
        if lookup.offsets is None:
            return (
                values
                if ids.size == rows
                else values.view(rows, ids.size // rows, self.row_format.dim).sum(1)
            )
        lengths = torch.from_numpy(np.diff(lookup.offsets)).to(self._device)
        row_of = torch.repeat_interleave(
            torch.arange(rows, device=self._device), lengths, output_size=ids.size
        )
        return torch.zeros(rows, self.row_format.dim, device=self._device).index_add_(
            0, row_of, values
        )
