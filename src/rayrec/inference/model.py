"""Trained click model that scores rows, from a checkpoint or an export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, final

import numpy as np

from rayrec import storage
from rayrec.checkpoint import Checkpoint, open_checkpoint
from rayrec.checkpoint.discovery import is_export, reject_pickles
from rayrec.checkpoint.reader import Chunk, check_extra_files
from rayrec.config import InputError, json_hash
from rayrec.data.encoded_rows import EncodedRows
from rayrec.data.encoding.preprocessor import PREPROCESSOR_FOLDER, Preprocessor
from rayrec.inference.export.items import read_vectors
from rayrec.inference.export.manifest import open_export
from rayrec.inference.export.side_tables import restore_tables
from rayrec.workloads.recsys.items.recommender import Recommender
from rayrec.workloads.recsys.scorer import (
    ClickScorer,
    click_settings,
    load_preprocessor,
    load_scorer,
)
from rayrec.workloads.scoring import PREFIX, Device

if TYPE_CHECKING:
    import torch

    from rayrec.models.base import ClickModelConfig
    from rayrec.schema import NamedTable
    from rayrec.workloads.base import TrainConfig


@final
@dataclass(frozen=True)
class ServedModel:
    """Trained click model with its Preprocessor. Thread-safe."""

    preprocessor: Preprocessor
    version: str
    """Id of the weights, their quantization, and side tables with another content than in training,
    such as step_00001000-1a2b3c4d5e6f-int8-items-9f8e7d6c.
    """
    source: str
    """Folder of the checkpoint or export."""
    kind: Literal["checkpoint", "export"]
    scorer: ClickScorer
    vectors: torch.Tensor | None = None
    """Vectors of a retrieval model's items in an export, float32 [candidates, dim]."""

    @cached_property
    def recommender(self) -> Recommender:
        """Search for the best items of a retrieval model. Raises InputError for other models."""
        return Recommender(self.scorer, self.preprocessor, vectors=self.vectors)

    @cached_property
    def preprocessor_hash(self) -> str:
        """Hash of the Preprocessor as trained, also with other side tables."""
        return self.preprocessor.hash()

    @cached_property
    def tables(self) -> dict[str, str]:
        """Short content hash of each side table, by name."""
        schema = self.preprocessor.schema
        return {table.name: table.short_content for table in schema.tables}

    def with_tables(self, tables: Sequence[NamedTable]) -> ServedModel:
        """Return the model with the same weights and other side tables.

        Args:
            tables: Tables in place of those with their names, with their contents.

        The version names the tables that have another content than in training. So a table that is
        swapped back has the version of training again.
        """
        if not tables:
            return self
        before = self.preprocessor.schema
        preprocessor = self.preprocessor.with_tables(tables)
        version = self.version
        for table in preprocessor.schema.tables:
            if table.content != before.table(table.name).content:
                version += f"-{table.name}-{table.short_content}"
        changed = replace(self, preprocessor=preprocessor, version=version)
        changed.__dict__["preprocessor_hash"] = self.preprocessor_hash
        return changed

    def score(self, rows: EncodedRows) -> np.ndarray:
        """Return the logits of encoded rows, labelled or not, float32 [rows]."""
        return self.scorer.score(rows)


def open_served(
    path: str,
    *,
    config: TrainConfig | None = None,
    own: type[ClickModelConfig] | None = None,
    device: Device = "cpu",
) -> ServedModel:
    """Open the click model of a checkpoint, a run (the checkpoint in its summary, else the newest)
    or an export. Verifies every checksum. Unpickles nothing and runs no code from files. Memory:
    the weights once. `config` None reads the checkpoint's config.yaml. `own` is the config class of
    a network that is not one of rayrec's. Raises InputError for other models or folders, damage,
    and folders with pickle files. The side tables of an export are put into the cache folder.
    """
    if is_export(path):
        exported, scorer = open_export(path, device=device, own=own)
        preprocessor_folder = storage.join(path, PREPROCESSOR_FOLDER)
        restore_tables(preprocessor_folder, exported.preprocessor.schema)
        return ServedModel(
            exported.preprocessor,
            exported.version,
            storage.absolute(path),
            "export",
            scorer,
            read_vectors(path, exported),
        )
    checkpoint = open_checkpoint(path)
    manifest = checkpoint.manifest()
    reject_pickles(checkpoint.path, manifest["files"])
    if not storage.exists(storage.join(checkpoint.path, PREPROCESSOR_FOLDER)):
        raise InputError(
            f"{checkpoint.path}: {PREPROCESSOR_FOLDER}/ not found, so not a click model. "
            "Only click and retrieval models can be served."
        )
    preprocessor = load_preprocessor(checkpoint.path)
    check_extra_files(checkpoint.path, manifest)
    model, precision = click_settings(checkpoint, config, own=own)
    scorer = load_scorer(
        model,
        precision=precision,
        checkpoint=checkpoint.path,
        preprocessor=preprocessor,
        device=device,
    )
    return ServedModel(
        preprocessor,
        f"{model_version(checkpoint)}-{scorer.quantization}",
        checkpoint.path,
        "checkpoint",
        scorer,
    )


def model_version(checkpoint: Checkpoint) -> str:
    """Return an id of the checkpoint's weights: its step, and 12 hex digits of the SHA-256 over all
    weight checksums.
    """
    sums = {
        name: [
            (chunk.offsets, chunk.sizes, chunk.checksums)
            for chunk in (Chunk(**stored) for stored in entry["chunks"])
        ]
        for name, entry in checkpoint.manifest()["tensors"].items()
        if name.startswith(PREFIX)
    }
    return f"{checkpoint.path.rstrip('/').rsplit('/', 1)[-1]}-{json_hash(sums)[:12]}"
