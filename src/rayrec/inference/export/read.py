"""Reader of exported click models, without TorchRec, Ray or executable files. Reads and verifies every file once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rayrec import storage
from rayrec.checkpoint.discovery import reject_pickles
from rayrec.checkpoint.format import MANIFEST, sha256_of
from rayrec.checkpoint.safetensors import DTYPES
from rayrec.config import InputError
from rayrec.data.encoding.preprocessor import PREPROCESSOR_FOLDER, Preprocessor
from rayrec.inference.export.manifest import DENSE, FIX, FORMAT, TABLES, ExportedModel, read_manifest
from rayrec.models.base import ClickModelConfig
from rayrec.workloads.recsys.scorer import ClickScorer, empty_model, make_scorer

if TYPE_CHECKING:
    from rayrec.workloads.scoring import Device

_CHUNK_BYTES = 64 << 20


def is_export(path: str) -> bool:
    """Return whether a folder has the manifest of an export. Checks nothing else."""
    manifest_path = storage.join(path, MANIFEST)
    if not storage.exists(manifest_path):
        return False
    try:
        manifest = storage.read_json(manifest_path)
    except InputError:
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def open_export(
    path: str, *, device: Device = "cpu", own: type[ClickModelConfig] | None = None
) -> tuple[ExportedModel, ClickScorer]:
    """Load an export, local or a URL, with a rayrec model or `own`. Verifies all checksums and executes nothing. Raises
    InputError for damaged or missing files, weights that do not match the manifest, and pickles outside of it."""
    manifest = read_manifest(path)
    files = manifest["files"]
    reject_pickles(path, files)
    for name in files:
        if name not in (TABLES, DENSE):  # Verified when they are read
            file_path = _checked_path(path, name, files)
            if sha256_of(file_path) != files[name]["sha256"]:
                raise InputError(f"{file_path}: damaged, checksum does not match; {FIX}")
    preprocessor = Preprocessor.load(storage.join(path, PREPROCESSOR_FOLDER))
    exported = ExportedModel.of(path, manifest["model"], preprocessor, own=own)
    stored_bytes = files[DENSE]["bytes"] if DENSE in files else 0
    model = empty_model(
        exported.model, preprocessor=preprocessor, precision=exported.precision, stored_bytes=stored_bytes, where=path
    )
    dense_shapes = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in model.network.state_dict().items()}
    weights = read_tensors(path, DENSE, files, dense_shapes)
    # Copies have torch's alignment. Without it, matrix products round differently.
    model.network.load_state_dict({name: weight.clone() for name, weight in weights.items()}, assign=True)
    tables = read_tensors(path, TABLES, files, exported.tables())
    of_features = [tables[vocabulary] for vocabulary in preprocessor.inputs.vocabularies]
    return exported, make_scorer(model, of_features, row_format=exported.row_format, device=device)


def _checked_path(path: str, name: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    file_path = storage.join(path, name)
    if name not in files:
        raise InputError(f"{path}: {name} not found in the manifest; {FIX}")
    if storage.size_of(file_path) != files[name]["bytes"]:
        raise InputError(f"{file_path}: missing, or its size does not match the manifest; {FIX}")
    return file_path


def read_tensors(
    path: str, name: str, files: Mapping[str, Mapping[str, Any]], expected: Mapping[str, tuple[torch.dtype, Sequence[int]]]
) -> dict[str, torch.Tensor]:
    """Read one safetensors file of an export. The tensors share one buffer of the file's size. Raises InputError for damage, and
    if names, dtypes or shapes differ from `expected`."""
    file_path = _checked_path(path, name, files)
    buffer = np.empty(files[name]["bytes"] + 63, np.uint8)
    data = buffer[-buffer.ctypes.data % 64 :][: files[name]["bytes"]]  # Aligned, so that rows of 64 bytes lie in one cache line
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
        spans = {key: (int(value["data_offsets"][0]), int(value["data_offsets"][1])) for key, value in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise InputError(f"{file_path}: is not a safetensors file; {FIX}") from None
    if shapes != {key: (DTYPES[dtype], list(shape)) for key, (dtype, shape) in expected.items()}:
        raise InputError(f"{file_path}: tensors do not match the model in the manifest; {FIX}")
    body = data[8 + head_bytes :]
    tensors = {}
    for key, (dtype, shape) in expected.items():
        start, stop = spans[key]
        size_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if not 0 <= start <= stop <= len(body) or stop - start != size_bytes or (8 + head_bytes + start) % dtype.itemsize:
            raise InputError(f"{file_path}: {key} is outside of the file; {FIX}")
        tensors[key] = torch.from_numpy(body[start:stop]).view(dtype).reshape(shape)
    return tensors
