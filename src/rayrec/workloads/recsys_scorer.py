"""The click model whole in one process, for scoring: plain tables instead of sharded ones, no optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np
import torch

from rayrec.checkpoint import Checkpoint, full_tensors
from rayrec.config import InputError
from rayrec.data.encoded import EncodedRows
from rayrec.data.loader import sparse_features
from rayrec.data.preprocessor import Preprocessor
from rayrec.models.dlrm_module import DLRM
from rayrec.workloads.base import TrainConfig

if TYPE_CHECKING:
    from rayrec.workloads.recsys import ClickWorkload

_PREFIX = "model."


@final
class ClickScorer:
    """Scores encoded rows with a trained click model."""

    def __init__(self, model: DLRM, *, keys: tuple[str, ...], device: torch.device) -> None:
        self._model, self._keys, self._device = model, keys, device
        self._last_rows: tuple[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = (-1, {})

    def score(self, rows: EncodedRows) -> np.ndarray:
        """float32 (rows,): the logits."""
        if len(rows) != self._last_rows[0]:  # batches of one size follow each other: keep what depends on it alone
            self._last_rows = (len(rows), {})
        features = sparse_features(self._keys, rows.ids, len(rows), self._last_rows[1])
        with torch.inference_mode():
            dense = torch.from_numpy(rows.dense).to(self._device)
            logits = self._model.score(dense, features.to(self._device))
            return logits.float().cpu().numpy()  # device sync


def load_scorer(
    workload: ClickWorkload, config: TrainConfig, *, checkpoint: str, preprocessor: Preprocessor, device: str
) -> ClickScorer:
    """See `ClickWorkload.load_scorer`. Memory: the weights once, they are read straight into the tensors that are used."""
    model = workload.model.build(
        num_embeddings=preprocessor.num_embeddings,
        num_dense=len(preprocessor.inputs.dense),
        precision=config.precision,
        seed=config.seed,
        features=preprocessor.inputs.sparse,
    )
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in full_tensors(Checkpoint(checkpoint), _PREFIX)}
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(weights.keys() | wanted.keys()):
        stored = list(weights[name].shape) if name in weights else None
        if stored != wanted.get(name):
            raise InputError(
                f"{checkpoint}: {name} has shape {stored}, its config.yaml asks for {wanted.get(name)}; "
                "the files are not of one checkpoint"
            )
    model.load_state_dict(weights, assign=True)  # the tables, on `meta` till now, become the tensors read
    model.requires_grad_(requires_grad=False)
    return ClickScorer(model.eval().to(device), keys=preprocessor.inputs.sparse, device=torch.device(device))
