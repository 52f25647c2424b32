"""The manifest of an exported click model: its format, its files, and what it says of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Required

from typing_extensions import TypedDict

from rayrec import storage
from rayrec.checkpoint.format import MANIFEST, DataFile, check_manifest, load_manifest, seal
from rayrec.config import InputError
from rayrec.models.base import ClickModelConfig, stored_model
from rayrec.models.scoring_tables import QUANTIZATIONS, Quantization, RowFormat

FORMAT: Final = "rayrec-export"
VERSION: Final = 1
TABLES: Final = "tables.safetensors"
"""A tensor a vocabulary, named as it, which is the sparse column's name unless columns share one: (num_embeddings,
RowFormat.width)."""
DENSE: Final = "dense.safetensors"
"""The weights of the model's network, float32."""
PROGRAM: Final = "dense.pt2"
"""The network between plain tensors as torch.export gives it, for others; never read here."""
REPORT: Final = "report.json"
README: Final = "README.md"
ENCODER: Final = "encode.py"
"""From raw rows to the model's inputs without rayrec, for others; never run here."""

REMEDY: Final = "export the checkpoint again"
"""What errors of a damaged export advise."""


class _VerifiedFile(DataFile):
    sha256: Required[str]  # type: ignore[misc]


class _Manifest(TypedDict):
    format: str
    version: int
    model: dict[str, Any]
    files: dict[str, _VerifiedFile]


@dataclass(frozen=True)
class ExportedModel:
    """What the manifest says of the model."""

    model: ClickModelConfig
    precision: Literal["fp32", "bf16"]
    quantization: Quantization
    checkpoint_version: str
    """`version_of` the checkpoint."""
    preprocessor_hash: str
    features: tuple[str, ...]
    """Sparse columns, in the order of their tables."""
    num_dense: int
    num_embeddings: tuple[int, ...]
    tables: tuple[str, ...] = ()
    """The table of each feature, if features share one; empty: each has its own, of its name."""
    sequences: tuple[str, ...] = ()
    """Features whose embeddings the network takes one by one."""

    @property
    def version(self) -> str:
        return f"{self.checkpoint_version}-{self.quantization}"

    @property
    def row_format(self) -> RowFormat:
        return RowFormat(self.quantization, self.model.table_width)

    def to_dict(self) -> dict[str, Any]:
        stored = {**vars(self), "model": self.model.to_dict()}
        for name in ("tables", "sequences"):
            if not stored[name]:  # was added later: manifests of other exports stay the same
                del stored[name]
        if self.model.table_width != self.model.embedding_dim:
            stored["width"] = self.model.table_width
        return stored


def manifest_of(exported: ExportedModel, files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The manifest of an export; `files`: the `bytes` and `sha256` of every other file by its path in the folder."""
    return seal({"format": FORMAT, "version": VERSION, "model": exported.to_dict(), "files": files})


def read_manifest(
    path: str, *, own: type[ClickModelConfig] | None = None
) -> tuple[ExportedModel, dict[str, dict[str, Any]]]:
    """What the manifest of an export says: the model, the files. `own`: the class of a model that is not rayrec's. Raises
    InputError where it is damaged, of another version, or of a model that is neither rayrec's nor `own`."""
    place = storage.join(path, MANIFEST)
    manifest = load_manifest(path, remedy=REMEDY)
    if manifest.get("version", VERSION) != VERSION:
        raise InputError(f"{path}: export version {manifest['version']}, this rayrec reads {VERSION}; {REMEDY}")
    check_manifest(path, manifest, _Manifest, remedy=REMEDY)
    try:
        told = dict(manifest["model"])
        told.pop("width", None)  # for other readers; the model's settings say it
        for name in ("features", "num_embeddings"):
            told[name] = tuple(told[name])
        for name in ("tables", "sequences"):
            told[name] = tuple(told.get(name, ()))
        exported = ExportedModel(**{**told, "model": stored_model(told["model"], where=place, own=own)})
        if exported.quantization not in QUANTIZATIONS or exported.precision not in ("fp32", "bf16"):
            raise ValueError("unknown quantization or precision")
        exported.row_format.check()
        return exported, manifest["files"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{place}: is not the manifest of an export ({error}); {REMEDY}") from None
