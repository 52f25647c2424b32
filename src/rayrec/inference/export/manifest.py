"""Manifest of an exported click model: format, files and model description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, Required

import numpy as np
import torch
from typing_extensions import TypedDict

from rayrec import storage
from rayrec.checkpoint.format import MANIFEST, DataFile, check_manifest, load_manifest
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.models.base import ClickModelConfig, ModelInputs, stored_model
from rayrec.models.scoring_tables import QUANTIZATIONS, Quantization, RowFormat

FORMAT: Final = "rayrec-export"
VERSION: Final = 1
TABLES: Final = "tables.safetensors"
"""File with a tensor per vocabulary, named like it, [num_embeddings, RowFormat.width]. Vocabularies are named like the sparse
column, unless columns share one."""
DENSE: Final = "dense.safetensors"
"""File with the network weights, float32."""
PROGRAM: Final = "dense.pt2"
"""File with the network as a torch.export program, for other programs. Never read here."""
REPORT: Final = "report.json"
README: Final = "README.md"
ENCODER: Final = "encode.py"
"""Program that encodes raw rows without rayrec, for other programs. Not run when an export is opened."""

FIX: Final = "export the checkpoint again"
"""Fix in error messages of damaged exports."""


class _VerifiedFile(DataFile):
    sha256: Required[str]  # type: ignore[misc]


class _Manifest(TypedDict):
    format: str
    version: int
    model: dict[str, Any]
    files: dict[str, _VerifiedFile]


@dataclass(frozen=True)
class ExportedModel:
    """Model and Preprocessor of an export."""

    model: ClickModelConfig
    precision: Literal["fp32", "bf16"]
    quantization: Quantization
    checkpoint_version: str
    """Result of `version_of` the checkpoint."""
    preprocessor: Preprocessor

    @property
    def version(self) -> str:
        return f"{self.checkpoint_version}-{self.quantization}"

    @property
    def row_format(self) -> RowFormat:
        return RowFormat(self.quantization, self.model.table_width)

    def tables(self) -> dict[str, tuple[torch.dtype, list[int]]]:
        """Return stored dtype and shape of each table, by vocabulary."""
        row_format = self.row_format
        dtype = torch.from_numpy(np.empty(0, row_format.dtype)).dtype
        sizes = zip(self.preprocessor.inputs.vocabularies, self.preprocessor.num_embeddings, strict=True)
        return {vocabulary: (dtype, [rows, row_format.width]) for vocabulary, rows in sizes}

    @cached_property
    def described(self) -> dict[str, Any]:
        """Model description in the manifest, readable without a Preprocessor."""
        inputs = self.preprocessor.inputs
        stored: dict[str, Any] = {
            "model": self.model.to_dict(),
            "precision": self.precision,
            "quantization": self.quantization,
            "checkpoint_version": self.checkpoint_version,
            "preprocessor_hash": self.preprocessor.hash(),
            "features": list(inputs.sparse),
            "num_dense": len(inputs.dense),
            "num_embeddings": list(self.preprocessor.num_embeddings),
        }
        if inputs.vocabularies != inputs.sparse:  # Features share tables
            stored["tables"] = list(inputs.vocabularies)
        if sequences := self.model.sequences(ModelInputs.of(inputs)):  # Features without pooled embeddings
            stored["sequences"] = list(sequences)
        if self.model.table_width != self.model.embedding_dim:
            stored["width"] = self.model.table_width
        return stored

    @classmethod
    def of(
        cls, path: str, stored: Mapping[str, Any], preprocessor: Preprocessor, *, own: type[ClickModelConfig] | None = None
    ) -> ExportedModel:
        """Parse `described` of the export in folder `path`. `own` is the class of a custom model. Raises InputError for a model
        that is neither rayrec's nor `own`, and for a different Preprocessor."""
        manifest_path = storage.join(path, MANIFEST)
        try:
            exported = cls(
                stored_model(stored["model"], where=manifest_path, own=own),
                stored["precision"],
                stored["quantization"],
                stored["checkpoint_version"],
                preprocessor,
            )
            if exported.quantization not in QUANTIZATIONS or exported.precision not in ("fp32", "bf16"):
                raise ValueError("unknown quantization or precision")
            exported.row_format.check()
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{manifest_path}: is not the manifest of an export ({error}); {FIX}") from None
        if {**exported.described, "model": stored["model"]} != stored:  # Older models may have fewer settings
            raise InputError(f"{path}: Preprocessor does not match the manifest; {FIX}")
        return exported


def read_manifest(path: str) -> dict[str, Any]:
    """Read a manifest: `model` (`ExportedModel.described`) and `files`. Raises InputError if damaged or of another version."""
    manifest = load_manifest(path, fix=FIX)
    if manifest.get("version", VERSION) != VERSION:
        raise InputError(f"{path}: export version must be {VERSION}, got {manifest['version']}; {FIX}")
    check_manifest(path, manifest, _Manifest, fix=FIX)
    return manifest
