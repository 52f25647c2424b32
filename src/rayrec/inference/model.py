"""A trained click model that scores rows, from a checkpoint or an export: the one way to scores outside of training."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, final

import numpy as np

from rayrec import storage
from rayrec.checkpoint import Checkpoint, open_checkpoint
from rayrec.checkpoint.discovery import refuse_pickles
from rayrec.checkpoint.reader import check_extra_files
from rayrec.config import InputError
from rayrec.data.encoded import EncodedRows
from rayrec.data.encoding.preprocessor import PREPROCESSOR_FOLDER, Preprocessor
from rayrec.inference.export.read import is_export, open_export
from rayrec.models.scoring_tables import Quantization
from rayrec.workloads.recsys.scorer import ClickScorer, click_settings, load_preprocessor, load_scorer
from rayrec.workloads.scoring import PREFIX

if TYPE_CHECKING:
    from rayrec.models.base import ClickModelConfig
    from rayrec.workloads.base import TrainConfig
    from rayrec.workloads.scoring import Device


@final
@dataclass(frozen=True)
class ServedModel:
    """A trained click model with the very Preprocessor it was trained with; used by any number of threads at once."""

    preprocessor: Preprocessor
    version: str
    """Changes with the weights and how they are stored, such as step_00001000-1a2b3c4d5e6f-int8."""
    source: str
    """Folder of the checkpoint or export."""
    kind: Literal["checkpoint", "export"]
    scorer: ClickScorer

    @cached_property
    def preprocessor_hash(self) -> str:
        return self.preprocessor.hash()

    @property
    def quantization(self) -> Quantization:
        """How the tables' values are stored."""
        return self.scorer.quantization

    @property
    def weight_bytes(self) -> int:
        return self.scorer.weight_bytes

    def score(self, rows: EncodedRows) -> np.ndarray:
        """float32 (rows,): the logits of rows that `preprocessor.encode` gave, labelled or not."""
        return self.scorer.score(rows)


def open_served(
    path: str, *, config: TrainConfig | None = None, own: type[ClickModelConfig] | None = None, device: Device = "cpu"
) -> ServedModel:
    """The click model of a checkpoint's folder, a run's (the checkpoint its summary names, else the newest) or an export's,
    local or a URL.

    A checkpoint's own config.yaml says how it was trained, or `config`. `own`: the class of the network's settings, where it is
    not one of rayrec's. Nothing is unpickled, and a file chooses among rayrec's networks and no other code; every checksum is
    verified. Memory: the weights once. Raises InputError for anything else, another kind of model, damage, and where a pickle
    lies there too.
    """
    if is_export(path):
        exported, scorer = open_export(path, device=device, own=own)
        return ServedModel(exported.preprocessor, exported.version, storage.absolute(path), "export", scorer)
    checkpoint = open_checkpoint(path)
    manifest = checkpoint.manifest()
    refuse_pickles(checkpoint.path, manifest["files"])
    if not storage.exists(storage.join(checkpoint.path, PREPROCESSOR_FOLDER)):
        raise InputError(
            f"{checkpoint.path}: holds no {PREPROCESSOR_FOLDER}/, which every checkpoint of a click model has; only those "
            "are served"
        )
    preprocessor = load_preprocessor(checkpoint.path)
    check_extra_files(checkpoint.path, manifest)
    model, precision = click_settings(checkpoint, config, own=own)
    scorer = load_scorer(model, precision=precision, checkpoint=checkpoint.path, preprocessor=preprocessor, device=device)
    version = f"{version_of(checkpoint)}-{scorer.quantization}"
    return ServedModel(preprocessor, version, checkpoint.path, "checkpoint", scorer)


def version_of(checkpoint: Checkpoint) -> str:
    """Short id of a checkpoint's weights: its step, and 12 hex digits of a SHA-256 over the checksums of all weights."""
    tensors = checkpoint.manifest()["tensors"]
    sums = {
        name: [(chunk["offsets"], chunk["sizes"], chunk["sha256"]) for chunk in entry["chunks"]]
        for name, entry in tensors.items()
        if name.startswith(PREFIX)
    }
    digest = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:12]
    return f"{checkpoint.path.rstrip('/').rsplit('/', 1)[-1]}-{digest}"


def source_of(path: str) -> str:
    """The folder of a checkpoint or an export, absolute or a URL, the same for all replicas; of a run, its checkpoint to use.
    Raises InputError if there is none."""
    if is_export(path):
        return storage.absolute(path)
    return open_checkpoint(path).path
