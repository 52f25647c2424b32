"""Opens a checkpoint for scoring: its configuration, its Preprocessor, and its weights in a plain model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayrec import storage
from rayrec.checkpoint import Checkpoint, open_checkpoint
from rayrec.config import InputError
from rayrec.data.preprocessor import Preprocessor
from rayrec.workloads.recsys import PREPROCESSOR_FOLDER

if TYPE_CHECKING:
    import numpy as np

    from rayrec.data.parsing import RawRows
    from rayrec.workloads.base import Scorer, TrainConfig


@dataclass(frozen=True)
class LoadedModel:
    """A trained model with the very Preprocessor it was trained with."""

    checkpoint: Checkpoint
    config: TrainConfig
    preprocessor: Preprocessor
    preprocessor_hash: str
    scorer: Scorer

    def score(self, raw: RawRows) -> np.ndarray:
        """float32 (rows,): the logits of parsed rows, labelled or not."""
        return self.scorer.score(self.preprocessor.encode(raw))


def open_for_scoring(checkpoint: str) -> Checkpoint:
    """The checkpoint of its own or a run's folder (the newest). Raises InputError where it cannot score click rows."""
    opened = open_checkpoint(checkpoint)
    opened.manifest()
    if not storage.exists(storage.join(opened.path, PREPROCESSOR_FOLDER)):
        raise InputError(f"{opened.path}: holds no {PREPROCESSOR_FOLDER}/; only a click model's checkpoint scores rows")
    return opened


def load_preprocessor(checkpoint: Checkpoint) -> Preprocessor:
    """The Preprocessor stored with the weights. Raises InputError where its hash does not fit its content."""
    return Preprocessor.load(storage.join(checkpoint.path, PREPROCESSOR_FOLDER))


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Size of all weights, without optimizer state."""
    tensors = checkpoint.manifest()["tensors"]
    return sum(
        chunk["bytes"] for name, entry in tensors.items() if name.startswith("model.") for chunk in entry["chunks"]
    )


def load_model(checkpoint: str, *, config: TrainConfig, device: str = "cpu") -> LoadedModel:
    """Loads a checkpoint into this process. `config` is that of its config.yaml, as `recipes.load_config` reads it.

    No file is unpickled and none chooses code: the classes are those of `config`. Every checksum is verified. Raises
    InputError for a folder that is no checkpoint of a click model, and for damaged files.
    """
    opened = open_for_scoring(checkpoint)
    preprocessor = load_preprocessor(opened)
    scorer = config.workload.load_scorer(config, checkpoint=opened.path, preprocessor=preprocessor, device=device)
    return LoadedModel(opened, config, preprocessor, preprocessor.hash(), scorer)
