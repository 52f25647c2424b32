"""Embedding tables for scoring: plain rows, quantised or not, looked up for all columns of a batch at once."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, final, get_args

import numpy as np
import torch
from torch import nn

from rayrec.config import InputError
from rayrec.native import library

Quantization = Literal["fp32", "fp16", "int8", "int4"]
"""How a table's values are stored. int8 and int4: integers with a scale and an offset each row."""

# In the order of rayrec_table_kind in kernels.h
QUANTIZATIONS: Final[tuple[Quantization, ...]] = get_args(Quantization)

_LARGEST_HALF = 65504.0


def table_name(feature: str) -> str:
    """The name of a sparse feature's embedding table, as a module and in files: the feature's own name, unless torch accepts
    no module of that name (a dot, nothing, or an attribute of ModuleDict such as `type` or `keys`); then `%table:` and the
    feature's name with each % as %25 and each dot as %2E. Different features get different names."""
    plain = feature and "." not in feature and not feature.startswith(_ESCAPED)
    if plain and not hasattr(_MODULES, feature):
        return feature
    return _ESCAPED + feature.replace("%", "%25").replace(".", "%2E")


def table_weight(table: str, *, unpooled: bool = False) -> str:
    """The name of a table's weights among those of a ClickModel. `table`: as `table_name` gives it; `unpooled`: it gives
    embeddings one by one."""
    return f"{_SEQUENCES if unpooled else _BAGS}.{table}.weight"


def table_of_weight(weight: str) -> str | None:
    """The inverse, also for names in a module that has the ClickModel as a part; None for other weights."""
    for module in (_BAGS, _SEQUENCES):
        _, found, table = f".{weight}".rpartition(f".{module}.")
        if found and table.endswith(".weight"):
            return table.removesuffix(".weight")
    return None


_BAGS: Final = "embeddings.embedding_bags"
_SEQUENCES: Final = "sequences.embeddings"
_ESCAPED = "%table:"
_MODULES = nn.ModuleDict()


@dataclass(frozen=True)
class RowFormat:
    """How one row of a table with `dim` values a row lies in an array."""

    quantization: Quantization
    dim: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype({"fp32": np.float32, "fp16": np.float16}.get(self.quantization, np.uint8))

    @property
    def width(self) -> int:
        """Items of `dtype` a row has: `dim` values; int8: `dim` bytes and a float32 scale and offset; int4: half a byte for each
        value, the even ones in the low bits, and a float16 scale and offset."""
        return {"int8": self.dim + 8, "int4": self.dim // 2 + 4}.get(self.quantization, self.dim)

    def check(self) -> None:
        """Raises InputError where rows of `dim` values cannot be stored so."""
        if self.quantization == "int4" and self.dim % 2:
            raise InputError(f"quantize: int4 packs values in pairs, embedding_dim is {self.dim}; choose int8 or fp16")

    def pack(self, rows: np.ndarray, *, table: str) -> np.ndarray:
        """float32 (n, dim) -> `dtype` (n, width). Of fp32 the rows themselves.

        int8 and int4 are the packed formats of PyTorch's quantized::embedding_bag_byte_prepack and embedding_bag_4bit_prepack.
        Raises InputError for values that are not finite or, where halves are stored, too large for one.
        """
        if self.quantization == "fp32":
            return rows
        largest = float(np.abs(rows).max(initial=0.0))
        if not largest <= (3.4e38 if self.quantization == "int8" else _LARGEST_HALF):  # also where it is NaN
            raise InputError(f"table {table}: has a value of {largest}, which {self.quantization} cannot hold; export fp32")
        if self.quantization == "fp16":
            return rows.astype(np.float16)
        values = torch.from_numpy(np.ascontiguousarray(rows))
        if self.quantization == "int8":
            return torch.ops.quantized.embedding_bag_byte_prepack(values).numpy()
        return torch.ops.quantized.embedding_bag_4bit_prepack(values).numpy()

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """`dtype` (n, width) -> float32 (n, dim), on the rows' device, bit for bit as the kernel for CPUs does."""
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
    """A copy, whatever its place: a view as wider numbers must start where such a number may."""
    return part.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Lookup:
    """The ids of one column of a batch."""

    ids: np.ndarray
    """int32 or int64, C-contiguous, row after row."""
    offsets: np.ndarray | None = None
    """int64 (rows + 1): where each row's ids start; None: every row has the same number of ids."""
    weights: np.ndarray | None = None
    """float32, C-contiguous, one for each of `ids`: what its embedding is multiplied by; None: 1 each."""


class Tables(ABC):
    """The tables of a model, in the order of its sparse columns."""

    def __init__(self, row_format: RowFormat) -> None:
        self.row_format = row_format

    @property
    @abstractmethod
    def size_bytes(self) -> int: ...

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """(num_embeddings, row_format.width) of row_format.dtype each; not copied. Features that share a table have it in
        common."""

    @abstractmethod
    def pool(self, lookups: Sequence[Lookup | None], rows: int) -> torch.Tensor:
        """float32 (rows, lookups * dim): of each column the weighted sum of the row's embeddings, 0 for a row without ids; no
        columns without a lookup. By any number of threads at once. Ids beyond a table's end are the caller's error, and end
        in an AssertionError."""

    @abstractmethod
    def one_by_one(self, column: int, ids: np.ndarray) -> torch.Tensor:
        """float32 (ids, dim): the embeddings of a column's ids, C-contiguous int32 or int64, each for itself. As `pool`."""


class _CLookup(ctypes.Structure):
    _fields_ = [
        ("table", ctypes.c_void_p),
        ("num_embeddings", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("id_bytes", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
    ]


@final
class HostTables(Tables):
    """In main memory, looked up by a kernel."""

    def __init__(self, row_format: RowFormat, arrays: Sequence[np.ndarray]) -> None:
        """`arrays`: (num_embeddings, row_format.width) of row_format.dtype, each C-contiguous, used as they are."""
        super().__init__(row_format)
        for array in arrays:
            assert array.dtype == row_format.dtype
            assert array.shape[1:] == (row_format.width,)
            assert array.flags.c_contiguous
        self._arrays = tuple(arrays)
        self._kind = QUANTIZATIONS.index(row_format.quantization)
        kernel = library().rayrec_pool_tables
        kernel.restype = ctypes.c_int64
        self._kernel = kernel
        # What does not depend on a batch, copied for each: filling the structures field by field takes as long as a small lookup.
        self._columns = (_CLookup * len(arrays))(
            *(_CLookup(a.ctypes.data, len(a), a.shape[1] * a.itemsize, None, None, 1, 4, None) for a in arrays)
        )

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in {array.ctypes.data: array for array in self._arrays}.values())

    def tensors(self) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in self._arrays]

    def pool(self, lookups: Sequence[Lookup | None], rows: int) -> torch.Tensor:
        assert len(lookups) == len(self._arrays)
        given = [lookup for lookup in lookups if lookup is not None]
        if len(given) == len(lookups):
            columns = type(self._columns).from_buffer_copy(self._columns)
        else:
            columns = self._some([number for number, lookup in enumerate(lookups) if lookup is not None])
        return self._look_up(columns, given, rows)

    def one_by_one(self, column: int, ids: np.ndarray) -> torch.Tensor:
        return self._look_up(self._some([column]), [Lookup(ids)], len(ids))

    def _some(self, numbers: Sequence[int]) -> ctypes.Array[_CLookup]:
        return (_CLookup * len(numbers))(*(self._columns[number] for number in numbers))

    def _look_up(self, columns: ctypes.Array[_CLookup], lookups: Sequence[Lookup], rows: int) -> torch.Tensor:
        out = torch.empty(rows, len(lookups) * self.row_format.dim)
        if not rows or not lookups:
            return out
        for column, lookup in zip(columns, lookups, strict=True):
            ids, offsets = lookup.ids, lookup.offsets
            assert ids.flags.c_contiguous
            assert ids.dtype in (np.int32, np.int64)
            column.ids, column.id_bytes = ids.ctypes.data, ids.itemsize
            if lookup.weights is not None:
                assert lookup.weights.flags.c_contiguous
                assert lookup.weights.dtype == np.float32
                assert lookup.weights.size == ids.size
                column.weights = lookup.weights.ctypes.data
            if offsets is not None:
                assert offsets.dtype == np.int64
                assert len(offsets) == rows + 1
                assert offsets[-1] == ids.size
                column.offsets = offsets.ctypes.data
            else:
                column.size = ids.size // rows
                assert column.size * rows == ids.size
        bad = self._kernel(
            columns,
            ctypes.c_int64(len(columns)),
            ctypes.c_int64(rows),
            ctypes.c_int64(self.row_format.dim),
            ctypes.c_int32(self._kind),
            ctypes.c_void_p(out.data_ptr()),
        )
        assert bad < 0, f"an id of lookup {bad} lies beyond its table's {columns[bad].num_embeddings} rows"
        return out


@final
class DeviceTables(Tables):
    """On any device of torch's, looked up by its operators."""

    def __init__(self, row_format: RowFormat, tables: Sequence[torch.Tensor]) -> None:
        """`tables`: as for HostTables, all on one device."""
        super().__init__(row_format)
        self._tables = tuple(tables)
        self._device = tables[0].device

    @property
    def size_bytes(self) -> int:
        return sum(table.nbytes for table in {table.data_ptr(): table for table in self._tables}.values())

    def tensors(self) -> list[torch.Tensor]:
        return list(self._tables)

    def pool(self, lookups: Sequence[Lookup | None], rows: int) -> torch.Tensor:
        given = [(table, lookup) for table, lookup in zip(self._tables, lookups, strict=True) if lookup is not None]
        if not given:
            return torch.empty(rows, 0, device=self._device)
        ids = self._moved(given)
        return torch.cat([self._column(*pair, part, rows) for pair, part in zip(given, ids, strict=True)], dim=1)

    def one_by_one(self, column: int, ids: np.ndarray) -> torch.Tensor:
        table, lookup = self._tables[column], Lookup(ids)
        (moved,) = self._moved([(table, lookup)])
        return self._column(table, lookup, moved, len(ids))

    def _moved(self, given: Sequence[tuple[torch.Tensor, Lookup]]) -> tuple[torch.Tensor, ...]:
        """int64: the ids of each lookup on the device, in one copy, since each copy takes as long as a small lookup."""
        columns = [lookup.ids.reshape(-1) for _, lookup in given]
        for (table, _), ids in zip(given, columns, strict=True):
            assert not ids.size or (ids.min() >= 0 and ids.max() < len(table)), "an id lies beyond its table's rows"
        together = torch.from_numpy(np.concatenate(columns, dtype=np.int64)).to(self._device)
        return together.split([ids.size for ids in columns])

    def _column(self, table: torch.Tensor, lookup: Lookup, moved: torch.Tensor, rows: int) -> torch.Tensor:
        ids = lookup.ids
        values = self.row_format.unpack(table[moved])
        if lookup.weights is not None:
            values = values * torch.from_numpy(lookup.weights).to(self._device).unsqueeze(1)
        if lookup.offsets is None:
            return values if ids.size == rows else values.view(rows, ids.size // rows, self.row_format.dim).sum(1)
        lengths = torch.from_numpy(np.diff(lookup.offsets)).to(self._device)
        row_of = torch.repeat_interleave(torch.arange(rows, device=self._device), lengths, output_size=ids.size)
        return torch.zeros(rows, self.row_format.dim, device=self._device).index_add_(0, row_of, values)
