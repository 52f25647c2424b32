"""Texts of one column's categories, stored beside the vocabulary, whose tokens are their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import pyarrow as pa

from rayrec import storage
from rayrec.config import InputError

NAMES_FILE: Final = "names.arrow"
"""File of the texts in a Preprocessor's folder."""


@final
@dataclass(frozen=True)
class CategoryNames:
    """Texts of the categories of a column's vocabulary."""

    column: str
    num_tokens: int
    """Number of tokens with a known text, the first of the vocabulary. Fewer than all in a
    vocabulary that was extended since.
    """
    texts: pa.Array | None = None
    """Text of each such token in the vocabulary's order, large_string, null for an integer, whose
    token is its id. None: all are integers.
    """

    def save(self, folder: str) -> dict[str, Any]:
        """Write the texts, if there are any, and return their description, JSON values."""
        described = {"column": self.column, "tokens": self.num_tokens, "sha256": None}
        if self.texts is None:
            return described
        sink = pa.BufferOutputStream()
        table = pa.table({"text": self.texts})
        with pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
        content = sink.getvalue()
        storage.write_bytes(storage.join(folder, NAMES_FILE), content.to_pybytes())
        return {**described, "sha256": hashlib.sha256(content).hexdigest()}

    @classmethod
    def load(cls, folder: str, stored: Mapping[str, Any]) -> CategoryNames:
        """Load the texts of a description. A local file is mapped. Raises InputError for a damaged
        file.
        """
        if stored["sha256"] is None:
            return cls(stored["column"], stored["tokens"])
        path = storage.join(folder, NAMES_FILE)
        if storage.is_url(path):
            content = pa.py_buffer(storage.read_bytes(path))
        else:
            try:
                content = pa.memory_map(path).read_buffer()
            except OSError:
                raise InputError(f"{path}: not found. Copy the full folder") from None
        if hashlib.sha256(content).hexdigest() != stored["sha256"]:
            raise InputError(f"{path}: damaged, its checksum does not match")
        with pa.ipc.open_file(content) as file:
            texts = file.read_all().column("text").combine_chunks()
        return cls(stored["column"], stored["tokens"], texts)
