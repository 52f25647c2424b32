"""Exported click models: manifest with format, files and model description, and a reader without
TorchRec, Ray or executable files. It reads and verifies every file once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, Required

import numpy as np
import torch
from typing_extensions import TypedDict

from rayrec import storage
from rayrec.checkpoint.discovery import reject_pickles
from rayrec.checkpoint.format import (
    EXPORT_FORMAT,
    MANIFEST,
    DataFile,
    check_manifest,
    compute_sha256,
    load_manifest,
    seal,
)
from rayrec.checkpoint.safetensors import DTYPES
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import PREPROCESSOR_FOLDER, Preprocessor
from rayrec.models.base import ClickModelConfig, ModelInputs, stored_model
from rayrec.models.scoring_tables import QUANTIZATIONS, Quantization, RowFormat
from rayrec.workloads.recsys.scorer import ClickScorer, empty_model, make_scorer
from rayrec.workloads.scoring import Device

VERSION: Final = 1
TABLES: Final = "tables.safetensors"
"""File with a tensor per vocabulary, named like it, [num_embeddings, RowFormat.width]. Vocabularies
are named like the sparse column, unless columns share one.
"""
DENSE: Final = "dense.safetensors"
"""File with the network weights, float32."""
PROGRAM: Final = "dense.pt2"
"""File with the network as a torch.export program, for other programs. Never read here."""
REPORT: Final = "report.json"
README: Final = "README.md"
ENCODER: Final = "encode.py"
"""Program that encodes raw rows without rayrec, for other programs. Not run when an export is
opened.
"""

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
    """Result of `model_version` the checkpoint."""
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
        sizes = zip(
            self.preprocessor.inputs.vocabularies, self.preprocessor.num_embeddings, strict=True
        )
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
        if inputs.dense != self.preprocessor.dense_names:  # Missing numbers have inputs, too
            stored["dense"] = list(inputs.dense)
        if inputs.vocabularies != inputs.sparse:  # Features share tables
            stored["tables"] = list(inputs.vocabularies)
        # Features without pooled embeddings
        if sequences := self.model.sequences(ModelInputs.from_schema(inputs)):
            stored["sequences"] = list(sequences)
        if self.model.table_width != self.model.embedding_dim:
            stored["width"] = self.model.table_width
        return stored

    @classmethod
    def from_dict(
        cls,
        path: str,
        stored: Mapping[str, Any],
        preprocessor: Preprocessor,
        *,
        own: type[ClickModelConfig] | None = None,
    ) -> ExportedModel:
        """Parse `described` of the export in folder `path`. `own` is the class of a custom model.
        Raises InputError for a model that is neither rayrec's nor `own`, and for a different
        Preprocessor.
        """
        manifest_path = storage.join(path, MANIFEST)
        try:
            exported = cls(
                stored_model(stored["model"], where=manifest_path, own=own),
                stored["precision"],
                stored["quantization"],
                stored["checkpoint_version"],
                preprocessor,
            )
            if exported.quantization not in QUANTIZATIONS or exported.precision not in (
                "fp32",
                "bf16",
            ):
                raise ValueError("unknown quantization or precision")
            exported.row_format.check()
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{manifest_path}: is not the manifest of an export ({error}); {FIX}"
            ) from None
        # Older models may have fewer settings
        if {**exported.described, "model": stored["model"]} != stored:
            raise InputError(f"{path}: Preprocessor does not match the manifest; {FIX}")
        return exported


def read_manifest(path: str) -> dict[str, Any]:
    """Read a manifest: `model` (`ExportedModel.described`) and `files`. Raises InputError if
    damaged or of another version.
    """
    manifest = load_manifest(path, fix=FIX)
    if manifest.get("version", VERSION) != VERSION:
        raise InputError(
            f"{path}: export version must be {VERSION}, got {manifest['version']}; {FIX}"
        )
    check_manifest(path, manifest, _Manifest, fix=FIX)
    return manifest


def seal_all(
    out: str, exported: ExportedModel, sealed_files: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Write the manifest of all files in the folder. Returns size and checksum of every file,
    without reading `sealed_files`.
    """
    files = dict(sealed_files)
    for inside, _, names in os.walk(out):
        for name in names:
            path = os.path.join(inside, name)
            relative = os.path.relpath(path, out).replace(os.sep, "/")
            if relative not in sealed_files and relative != MANIFEST:
                files[relative] = {"bytes": os.path.getsize(path), "sha256": compute_sha256(path)}
    manifest = {
        "format": EXPORT_FORMAT,
        "version": VERSION,
        "model": exported.described,
        "files": dict(sorted(files.items())),
    }
    storage.write_json(storage.join(out, MANIFEST), seal(manifest))
    return files


# -- reader

_CHUNK_BYTES = 64 << 20


def open_export(
    path: str, *, device: Device = "cpu", own: type[ClickModelConfig] | None = None
) -> tuple[ExportedModel, ClickScorer]:
    """Load an export, local or a URL, with a rayrec model or `own`. Verifies all checksums and
    executes nothing. Raises InputError for damaged or missing files, weights that do not match the
    manifest, and pickles outside of it.
    """
    manifest = read_manifest(path)
    files = manifest["files"]
    reject_pickles(path, files)
    for name in files:
        if name not in (TABLES, DENSE):  # Verified when they are read
            file_path = _checked_path(path, name, files)
            if compute_sha256(file_path) != files[name]["sha256"]:
                raise InputError(f"{file_path}: damaged, checksum does not match; {FIX}")
    preprocessor = Preprocessor.load(storage.join(path, PREPROCESSOR_FOLDER))
    exported = ExportedModel.from_dict(path, manifest["model"], preprocessor, own=own)
    stored_bytes = files[DENSE]["bytes"] if DENSE in files else 0
    model = empty_model(
        exported.model,
        preprocessor=preprocessor,
        precision=exported.precision,
        stored_bytes=stored_bytes,
        where=path,
    )
    dense_shapes = {
        name: (tensor.dtype, list(tensor.shape))
        for name, tensor in model.network.state_dict().items()
    }
    weights = read_tensors(path, DENSE, files, dense_shapes)
    # Copies have torch's alignment. Without it, matrix products round differently.
    model.network.load_state_dict(
        {name: weight.clone() for name, weight in weights.items()}, assign=True
    )
    tables = read_tensors(path, TABLES, files, exported.tables())
    feature_tables = [tables[vocabulary] for vocabulary in preprocessor.inputs.vocabularies]
    return exported, make_scorer(
        model, feature_tables, row_format=exported.row_format, device=device
    )


def _checked_path(path: str, name: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    file_path = storage.join(path, name)
    if name not in files:
        raise InputError(f"{path}: {name} not found in the manifest; {FIX}")
    if storage.size_of(file_path) != files[name]["bytes"]:
        raise InputError(f"{file_path}: missing, or its size does not match the manifest; {FIX}")
    return file_path


def read_tensors(
    path: str,
    name: str,
    files: Mapping[str, Mapping[str, Any]],
    expected: Mapping[str, tuple[torch.dtype, Sequence[int]]],
) -> dict[str, torch.Tensor]:
    """Read one safetensors file of an export. The tensors share one buffer of the file's size.
    Raises InputError for damage, and if names, dtypes or shapes differ from `expected`.
    """
    file_path = _checked_path(path, name, files)
    buffer = np.empty(files[name]["bytes"] + 63, np.uint8)
    # Aligned, so that rows of 64 bytes lie in one cache line
    data = buffer[-buffer.ctypes.data % 64 :][: files[name]["bytes"]]
    digest = hashlib.sha256()
    for start in range(0, len(data), _CHUNK_BYTES):
        chunk = data[start : start + _CHUNK_BYTES]
        if storage.read_into(file_path, start, chunk) != len(chunk):
            raise InputError(f"{file_path}: cut short while it was read; {FIX}")
        digest.update(chunk.data)
    if digest.hexdigest() != files[name]["sha256"]:
        raise InputError(f"{file_path}: damaged, checksum does not match; {FIX}")
    head_bytes = int.from_bytes(data[:8].tobytes(), "little")
    try:
        table = json.loads(data[8 : 8 + head_bytes].tobytes())
        table.pop("__metadata__", None)
        shapes = {key: (value["dtype"], value["shape"]) for key, value in table.items()}
        spans = {
            key: (int(value["data_offsets"][0]), int(value["data_offsets"][1]))
            for key, value in table.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise InputError(f"{file_path}: is not a safetensors file; {FIX}") from None
    if shapes != {key: (DTYPES[dtype], list(shape)) for key, (dtype, shape) in expected.items()}:
        raise InputError(f"{file_path}: tensors do not match the model in the manifest; {FIX}")
    body = data[8 + head_bytes :]
    tensors = {}
    for key, (dtype, shape) in expected.items():
        start, stop = spans[key]
        size_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if (
            not 0 <= start <= stop <= len(body)
            or stop - start != size_bytes
            or (8 + head_bytes + start) % dtype.itemsize
        ):
            raise InputError(f"{file_path}: {key} is outside of the file; {FIX}")
        tensors[key] = torch.from_numpy(body[start:stop]).view(dtype).reshape(shape)
    return tensors
