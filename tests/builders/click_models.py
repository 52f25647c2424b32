"""Small deterministic click models of all kinds: in memory, saved, and served."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayrec import checkpoint as checkpoints
from rayrec import recipes
from rayrec.data.encoded_rows import EncodedRows, Ids, JaggedIds
from rayrec.data.encoding.encoder import MultiHot
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.rules import DenseColumn, SparseColumn
from rayrec.datasets.criteo import SCHEMA as CRITEO
from rayrec.inference.model import ServedModel
from rayrec.ingest.batches import sparse_features
from rayrec.models.base import ClickModelConfig, ModelInputs
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.models.scoring_tables import RowFormat
from rayrec.models.sharded_model import ClickModel, build_click_model, feature_names
from rayrec.schema import Schema
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.scorer import empty_model, make_scorer
from rayrec.workloads.scoring import PREFIX

NAMES: dict[str, Any] = {
    "dense": ("age", "price"),
    "sparse": ("user", "item", "tags"),
    "lists": ("tags",),
}
ANY = Schema(
    label="click",
    weight="importance",
    tokens="any",
    delimiter=",",
    **NAMES,
)
ANY = ANY.replace(header=ANY.columns)
"""Columns of a custom log."""
DLRM = DLRMConfig(
    interaction="dot",
    embedding_dim=4,
    bottom_mlp=(8, 4),
    top_mlp=(8, 1),
    cross_layers=1,
    cross_low_rank=2,
)
SMALL = DLRM.replace(
    embedding_dim=8,
    bottom_mlp=(16, 8),
    top_mlp=(16, 1),
    cross_layers=2,
    cross_low_rank=4,
    projection_first=(16, 16),
    projection_second=(24, 16),
)
NUM_TOKENS = 5


# Preprocessors
def token(column: int, number: int) -> int:
    """Return a token of a column. Numbers below NUM_TOKENS are in the vocabulary."""
    return (column << 16) + number + 1


def make_preprocessor(schema: Schema = CRITEO, **changes: Any) -> Preprocessor:
    """Return a Preprocessor with NUM_TOKENS tokens in each sparse column."""
    dtype = np.uint32 if schema.tokens == "hexadecimal" else np.uint64
    dense = DenseColumn(mean=0.5, scale=0.3)
    sparse = SparseColumn(NUM_TOKENS + 2, NUM_TOKENS)
    tokens = np.array(
        [token(column, n) for column in range(len(schema.sparse)) for n in range(NUM_TOKENS)],
        dtype,
    )
    return Preprocessor(
        **{
            "preset": "test",
            "schema": schema,
            "dense": (dense,) * len(schema.dense),
            "sparse": (sparse,) * len(schema.sparse),
            "tokens": tokens,
            **changes,
        }
    )


def hashed_preprocessor(
    num_embeddings: Sequence[int],
    schema: Schema = CRITEO,
    **changes: Any,
) -> Preprocessor:
    sparse = tuple(SparseColumn(num_embeddings=rows, num_tokens=None) for rows in num_embeddings)
    dtype = np.uint64 if schema.tokens == "any" else np.uint32
    return make_preprocessor(
        schema,
        sparse=sparse,
        tokens=np.empty(0, dtype),
        **changes,
    )


def multi_hot_preprocessor(num_sparse: int = 26) -> Preprocessor:
    """Return a Preprocessor with columns of 1 to 3 ids."""
    schema = CRITEO.replace(sparse=CRITEO.sparse[:num_sparse])
    multi_hot = MultiHot(sizes=tuple(1 + column % 3 for column in range(num_sparse)))
    dense = (DenseColumn(mean=1.0, scale=0.5),) * len(schema.dense)  # as in the golden of exports
    return hashed_preprocessor(range(9, 9 + num_sparse), schema, multi_hot=multi_hot, dense=dense)


def bucketed_preprocessor() -> Preprocessor:
    """Return a Preprocessor with 39 sparse columns and no dense one."""
    return hashed_preprocessor(range(9, 48), integer_buckets=True, dense=())


def lists_preprocessor() -> Preprocessor:
    names = ("user.id", "keys")
    schema = Schema(
        label="click",
        dense=("age",),
        sparse=names,
        lists=names[1:],
        tokens="any",
        delimiter=",",
    )
    return hashed_preprocessor([30, 50], schema)


# As a training holds them
def whole_model(
    config: ClickModelConfig,
    num_embeddings: Sequence[int],
    *,
    inputs: ModelInputs | None = None,
    **settings: Any,
) -> ClickModel:
    """Build a model with unsharded tables, by default for 13 numbers and features cat_0, cat_1,
    ...
    """
    inputs = inputs or ModelInputs(13, tuple(feature_names(len(num_embeddings))))
    return build_click_model(
        config,
        inputs,
        **{"num_embeddings": num_embeddings, "embedding_device": "cpu", **settings},
    )


@dataclass(frozen=True)
class Saved:
    """Run folder with a checkpoint."""

    run: Path
    checkpoint: Path
    config: TrainConfig
    preprocessor: Preprocessor
    model: ClickModel

    def logits(self, rows: EncodedRows) -> np.ndarray:
        """Score with the saved network and TorchRec's tables."""
        features = sparse_features(self.preprocessor.inputs.sparse, rows.ids, len(rows))
        with torch.no_grad():
            return self.model.score(torch.from_numpy(rows.dense), features).numpy()

    def rows(self, count: int, *, seed: int = 0, labelled: bool = False) -> EncodedRows:
        rng = np.random.default_rng(seed)
        given = self.preprocessor
        ids: list[Ids] = []
        for num_embeddings, size in zip(given.num_embeddings, given.hotness, strict=True):
            if size is None:
                lengths = rng.integers(0, 4, count).astype(np.int32)
                ids.append(
                    JaggedIds(
                        rng.integers(0, num_embeddings, lengths.sum(), given.id_dtype),
                        lengths,
                    )
                )
            else:
                shape = count if size == 1 else (count, size)
                ids.append(rng.integers(0, num_embeddings, shape, given.id_dtype))
        labels = {"label": rng.integers(0, 2, count).astype(np.float32)} if labelled else {}
        return EncodedRows(
            rng.standard_normal((count, len(given.inputs.dense)), np.float32),
            ids,
            labels,
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
    """Save a network initialized with `seed`, with tables times `scale`. `changes` are for the
    recipe.
    """
    given = preprocessor or hashed_preprocessor(range(5, 5 + 7 * 26, 7))
    config = recipes.criteo_demo().replace(name="small", **changes)
    config = config.replace(workload=config.workload.replace(model=model, schema=given.schema))
    inputs = ModelInputs.from_schema(given.inputs)
    built = whole_model(
        model,
        given.num_embeddings,
        inputs=inputs,
        precision=config.precision,
        seed=seed,
    ).eval()
    with torch.no_grad():
        for tables in built.table_modules():
            for parameter in tables.parameters():
                parameter.mul_(scale)
    return Saved(
        folder,
        Path(_save(folder, step, built.state_dict(), config, given)),
        config,
        given,
        built,
    )


def save_two(folder: Path) -> tuple[Saved, Saved]:
    """Save a tiny network for Criteo's columns as steps 1 and 2 of a run, initialized with seeds 1
    and 2.
    """
    model = DLRMConfig(
        interaction="dot",
        embedding_dim=4,
        bottom_mlp=(8, 4),
        top_mlp=(8, 1),
    )
    preprocessor = hashed_preprocessor(range(5, 31))
    first, second = (
        save_clicks(
            folder,
            model=model,
            preprocessor=preprocessor,
            seed=n,
            step=n,
        )
        for n in (1, 2)
    )
    return first, second


def _save(
    run: Path,
    step: int,
    weights: dict[str, torch.Tensor],
    config: TrainConfig,
    preprocessor: Preprocessor,
) -> str:
    """Save a checkpoint as training does. Returns its folder."""

    def add_files(target: str) -> None:
        Path(target, "config.yaml").write_text("# rayrec 0, config hash 0\n" + config.to_yaml())
        preprocessor.save(f"{target}/preprocessor")

    place = checkpoints.step_folder(str(run), step)
    tensors = {f"{PREFIX}{name}": tensor for name, tensor in weights.items()}
    checkpoints.save(
        place,
        {**tensors, "optimizer.exp_avg": torch.zeros(8)},
        state={},
        extra_files=add_files,
    )
    return place


# As a server holds them
def make_model(
    preprocessor: Preprocessor | None = None,
    *,
    seed: int = 0,
    config: ClickModelConfig = DLRM,
) -> ServedModel:
    """Build a served model. Seeds determine version and scores."""
    preprocessor = preprocessor or make_preprocessor()
    generator = torch.Generator().manual_seed(seed)
    model = empty_model(config, preprocessor=preprocessor, precision="fp32")
    weights = {
        name: torch.rand(tensor.shape, generator=generator) - 0.5
        for name, tensor in model.network.state_dict().items()
    }
    model.network.load_state_dict(weights, assign=True)
    tables = [
        torch.rand((rows, config.embedding_dim), generator=generator)
        for rows in preprocessor.num_embeddings
    ]
    scorer = make_scorer(
        model,
        tables,
        row_format=RowFormat("fp32", config.embedding_dim),
        device="cpu",
    )
    step = f"step_{seed:08d}"
    return ServedModel(
        preprocessor,
        f"{step}-fp32",
        f"runs/run/checkpoints/{step}",
        "checkpoint",
        scorer,
    )


def save_checkpoint(
    run: Path,
    step: int,
    model: ServedModel,
    *,
    network: ClickModelConfig = DLRM,
) -> str:
    """Save a checkpoint of the model as training does. Returns its folder."""
    plain, tables, _ = model.scorer.parts()
    weights = dict(plain.network.state_dict())
    weights |= dict(zip(plain.table_weights().values(), tables, strict=True))
    config = recipes.criteo_demo("log/train.txt").replace(workload={"model": network})
    return _save(run, step, weights, config, model.preprocessor)


def make_app(model: ServedModel, *, token_digest: bytes | None = None, **config: Any) -> Any:
    from rayrec.serve.app import ScoringApp
    from rayrec.serve.config import ServeConfig
    from rayrec.serve.control import DesiredState, ModelSource
    from rayrec.serve.counters import Counters
    from rayrec.serve.replica_models import ReplicaModels

    counters = Counters()
    settings = ServeConfig(**config)
    models = ReplicaModels(
        {model.source: model}.__getitem__,
        counters,
        histories=settings.histories,
    )
    models.set_desired(DesiredState(0, ModelSource(0, model.source)))
    assert not models.switch()
    return ScoringApp(models, counters, config=settings, token_digest=token_digest)


def row_text(number: int, schema: Schema = CRITEO, *, known: bool = True) -> bytes:
    """Return an unlabelled line. One column in five is missing and, without `known`, one in seven
    unknown.
    """
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
    """Return the row as JSON object without missing values."""
    fields = line.decode().rstrip("\n").split("\t")
    named = dict(zip((*schema.dense, *schema.sparse), fields, strict=True))
    return {
        name: int(text) if name in schema.dense else text for name, text in named.items() if text
    }


def logits_of(model: ServedModel, text: bytes) -> np.ndarray:
    """Score unlabelled rows of a hexadecimal log without a server."""
    from rayrec.data.logs.text_parser import parse
    from rayrec.serve.counters import Counters
    from rayrec.serve.replica_models import BatchScorer

    raw, faults = parse(model.preprocessor.schema.unlabelled(), text)
    assert not faults.total, faults.describe()
    return BatchScorer(model, Counters()).score(raw)
