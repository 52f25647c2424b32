"""Checkpoints of small click models of any make, saved without training, and the network they came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayrec import checkpoint as checkpoints
from rayrec import recipes
from rayrec.data.encoded import Bags, EncodedRows, Ids
from rayrec.data.encoding.encoder import MultiHot
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.ingest.batches import sparse_features
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.sharded_model import ClickModel, build_click_model
from rayrec.schema import Schema
from rayrec.workloads.base import TrainConfig

SMALL = DLRMConfig(
    interaction="dot",
    embedding_dim=8,
    bottom_mlp=(16, 8),
    top_mlp=(16, 1),
    cross_layers=2,
    cross_low_rank=4,
    projection_first=(16, 16),
    projection_second=(24, 16),
)


@dataclass(frozen=True)
class Saved:
    """A run's folder with a checkpoint."""

    run: Path
    checkpoint: Path
    config: TrainConfig
    preprocessor: Preprocessor
    model: ClickModel

    def logits(self, rows: EncodedRows) -> np.ndarray:
        """What the network that was saved gives, by TorchRec's tables."""
        features = sparse_features(self.preprocessor.inputs.sparse, rows.ids, len(rows))
        with torch.no_grad():
            return self.model.score(torch.from_numpy(rows.dense), features).numpy()

    def rows(self, count: int, *, seed: int = 0, labelled: bool = False) -> EncodedRows:
        """Random encoded rows."""
        rng, given = np.random.default_rng(seed), self.preprocessor
        ids: list[Ids] = []
        for num_embeddings, size in zip(given.num_embeddings, given.hotness, strict=True):
            if size is None:
                lengths = rng.integers(0, 4, count).astype(np.int32)
                ids.append(Bags(rng.integers(0, num_embeddings, lengths.sum(), given.id_dtype), lengths))
            else:
                shape = count if size == 1 else (count, size)
                ids.append(rng.integers(0, num_embeddings, shape, given.id_dtype))
        labels = {"label": rng.integers(0, 2, count).astype(np.float32)} if labelled else {}
        return EncodedRows(rng.standard_normal((count, len(given.inputs.dense)), np.float32), ids, labels)


def criteo_preprocessor(schema: Schema, num_embeddings: list[int], **settings: Any) -> Preprocessor:
    """Of hashed categories."""
    num_dense = 0 if settings.get("integer_buckets") else len(schema.dense)
    return Preprocessor(
        preset="rayrec",
        schema=schema,
        dense=(DenseColumn(mean=1.0, scale=0.5),) * num_dense,
        sparse=tuple(SparseColumn(num_embeddings=rows, num_tokens=None) for rows in num_embeddings),
        tokens=np.empty(0, np.uint64 if schema.tokens == "any" else np.uint32),
        **settings,
    )


def save_clicks(
    folder: Path,
    *,
    model: ClickModelConfig = SMALL,
    preprocessor: Preprocessor | None = None,
    seed: int = 1,
    scale: float = 1.0,
    step: int = 7,
    **changes: Any,
) -> Saved:
    """Saves a network with the start values of `seed`, its tables times `scale`; `changes` are of the recipe."""
    config = recipes.criteo_demo().replace(name="small", **changes)
    config = config.replace(workload=config.workload.replace(model=model))
    schema = config.workload.schema  # type: ignore[attr-defined]
    given = preprocessor or criteo_preprocessor(schema, [5 + 7 * column for column in range(26)])
    config = config.replace(workload=config.workload.replace(schema=given.schema))
    built = build_click_model(
        model,
        ModelInputs.of(given.inputs),
        num_embeddings=given.num_embeddings,
        precision=config.precision,
        seed=seed,
        embedding_device="cpu",
    ).eval()
    with torch.no_grad():
        for tables in built.table_modules():
            for parameter in tables.parameters():
                parameter.mul_(scale)

    def extra_files(target: str) -> None:
        Path(target, "config.yaml").write_text("# rayrec 0, config hash 0\n" + config.to_yaml())
        given.save(f"{target}/preprocessor")

    weights: dict[str, Any] = {f"model.{name}": tensor for name, tensor in built.state_dict().items()}
    weights["optimizer.exp_avg"] = torch.zeros(8)
    place = checkpoints.folder_of(str(folder), step)
    checkpoints.save(place, weights, state={}, extra_files=extra_files)
    return Saved(folder, Path(place), config, given, built)


def save_two(folder: Path) -> tuple[Saved, Saved]:
    """Save, as steps 1 and 2 of a run, a tiny network for Criteo's columns with the start values of seeds 1 and 2."""
    model = DLRMConfig(interaction="dot", embedding_dim=4, bottom_mlp=(8, 4), top_mlp=(8, 1))
    preprocessor = criteo_preprocessor(CRITEO, [5 + column for column in range(26)])
    first, second = (save_clicks(folder, model=model, preprocessor=preprocessor, seed=n, step=n) for n in (1, 2))
    return first, second


def multi_hot_preprocessor(num_sparse: int = 26) -> Preprocessor:
    """Columns of bags of 1 to 3 ids."""
    schema = recipes.criteo_demo().workload.schema  # type: ignore[attr-defined]
    schema = schema.replace(sparse=schema.sparse[:num_sparse])
    sizes = tuple(1 + column % 3 for column in range(num_sparse))
    return criteo_preprocessor(schema, [9 + column for column in range(num_sparse)], multi_hot=MultiHot(sizes=sizes))


def bucketed_preprocessor() -> Preprocessor:
    """39 sparse columns and no dense one."""
    schema = recipes.criteo_demo().workload.schema  # type: ignore[attr-defined]
    return criteo_preprocessor(schema, [9 + column for column in range(39)], integer_buckets=True)


def lists_preprocessor() -> Preprocessor:
    """Own columns, one of them with any number of ids a row."""
    schema = Schema(
        label="click", dense=("age",), sparse=("user.id", "keys"), lists=("keys",), tokens="any", delimiter=","
    )
    return criteo_preprocessor(schema, [30, 50])
