"""Small click models in memory, random but always the same, as a server holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayrec import checkpoint as checkpoints
from rayrec import recipes, storage
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.inference.model import ServedModel
from rayrec.models.base import ClickModelConfig
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.scoring_tables import RowFormat
from rayrec.schema import Schema
from rayrec.serve.app import ScoringApp
from rayrec.serve.config import ServeConfig
from rayrec.serve.counters import Counters
from rayrec.serve.replica_models import ReplicaModels, Source, Wanted
from rayrec.serve.responses import BatchScorer
from rayrec.workloads.recsys.scorer import empty_model, make_scorer
from rayrec.workloads.scoring import PREFIX

NUM_TOKENS = 5
ANY = Schema(
    label="click",
    weight="importance",
    dense=("age", "price"),
    sparse=("user", "item", "tags"),
    lists=("tags",),
    tokens="any",
    delimiter=",",
)
"""A log of one's own."""
DLRM = DLRMConfig(
    interaction="dot", embedding_dim=4, bottom_mlp=(8, 4), top_mlp=(8, 1), cross_layers=1, cross_low_rank=2
)


def token(column: int, number: int) -> int:
    """Number `number` (below NUM_TOKENS: a known one) of a column."""
    return (column << 16) + number + 1


def make_preprocessor(schema: Schema = CRITEO, **changes: Any) -> Preprocessor:
    """Knows NUM_TOKENS tokens of every sparse column."""
    columns = len(schema.sparse)
    dtype = np.uint32 if schema.tokens == "hexadecimal" else np.uint64
    tokens = np.array([token(column, n) for column in range(columns) for n in range(NUM_TOKENS)], dtype)
    made = {
        "preset": "test",
        "schema": schema,
        "dense": tuple(DenseColumn(mean=0.5, scale=0.3) for _ in schema.dense),
        "sparse": tuple(SparseColumn(NUM_TOKENS + 2, NUM_TOKENS) for _ in range(columns)),
        "tokens": tokens,
    }
    return Preprocessor(**{**made, **changes})


def make_model(
    preprocessor: Preprocessor | None = None, *, seed: int = 0, config: ClickModelConfig = DLRM
) -> ServedModel:
    """Another seed, another version and other scores."""
    preprocessor = preprocessor or make_preprocessor()
    generator = torch.Generator().manual_seed(seed)
    model = empty_model(config, preprocessor=preprocessor, precision="fp32")
    weights = {
        name: torch.rand(tensor.shape, generator=generator) - 0.5 for name, tensor in model.network.state_dict().items()
    }
    model.network.load_state_dict(weights, assign=True)
    tables = [torch.rand((rows, config.embedding_dim), generator=generator) for rows in preprocessor.num_embeddings]
    scorer = make_scorer(model, tables, row_format=RowFormat("fp32", config.embedding_dim), device="cpu")
    return ServedModel(
        preprocessor=preprocessor,
        version=f"step_{seed:08d}-fp32",
        source=f"runs/run/checkpoints/step_{seed:08d}",
        kind="checkpoint",
        scorer=scorer,
    )


def row_text(number: int, schema: Schema = CRITEO, *, known: bool = True) -> bytes:
    """An unlabelled line; a column in five is missing, and without `known` one in seven unknown."""
    fields = []
    for column in range(len(schema.dense) + len(schema.sparse)):
        if (column + number) % 5 == 0:
            fields.append("")
        elif column < len(schema.dense):
            fields.append(str((number * 37 + column) % 1000 - 3))
        else:
            sparse = column - len(schema.dense)
            strange = not known and (column + number) % 7 == 0
            fields.append(f"{token(sparse, NUM_TOKENS if strange else number % NUM_TOKENS):08x}")
    return "\t".join(fields).encode() + b"\n"


def row_object(line: bytes, schema: Schema = CRITEO) -> dict[str, Any]:
    """The same row as JSON has it; what is missing is absent."""
    fields = line.decode().rstrip("\n").split("\t")
    named = dict(zip((*schema.dense, *schema.sparse), fields, strict=True))
    return {name: int(text) if name in schema.dense else text for name, text in named.items() if text}


def make_app(model: ServedModel, *, token_digest: bytes | None = None, **config: Any) -> ScoringApp:
    """An application that serves the model, and none else."""
    counters = Counters()
    models = ReplicaModels({model.source: model}.__getitem__, counters)
    models.apply(Wanted(0, Source(0, model.source)))
    assert models.ready, models.status()
    return ScoringApp(models, counters, config=ServeConfig(**config), token_digest=token_digest)


def logits_of(model: ServedModel, text: bytes) -> np.ndarray:
    """Scored without a server; unlabelled rows of a hexadecimal log."""
    from rayrec.data.logs.text_parser import parse

    raw, faults = parse(model.preprocessor.schema.unlabelled(), text)
    assert not faults.total, faults.describe()
    return BatchScorer(model, Counters()).score(raw)


def save_checkpoint(run: Path, step: int, model: ServedModel, *, network: ClickModelConfig = DLRM) -> str:
    """A checkpoint of the model, as training writes it; returns its folder."""
    plain, tables, _ = model.scorer.parts()
    weights = dict(plain.network.state_dict())
    weights |= dict(zip(plain.table_weights().values(), tables, strict=True))
    config = recipes.criteo_demo("log/train.txt").replace(workload={"model": network})

    def add_files(target: str) -> None:
        (Path(target) / "config.yaml").write_text(config.to_yaml())
        model.preprocessor.save(storage.join(target, "preprocessor"))

    place = checkpoints.folder_of(str(run), step)
    checkpoints.save(
        place, {PREFIX + name: tensor for name, tensor in weights.items()}, state={}, extra_files=add_files
    )
    return place
