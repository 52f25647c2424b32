"""Training and serving cannot disagree: the same raw rows through every way to a score give the same score."""

from pathlib import Path

import numpy as np
import pytest
import torch
from builders.click_models import make_app, row_object, whole_model
from builders.logs import open_index
from builders.requests import post

from rayrec import checkpoint as checkpoints
from rayrec import recipes
from rayrec.data.encoded_rows import from_arrow, to_arrow
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import RAYREC, make_preprocessor
from rayrec.data.logs.index import LogIndex
from rayrec.data.logs.text_log import read_segments
from rayrec.datasets.criteo import SCHEMA
from rayrec.inference.config import ExportConfig
from rayrec.inference.export.write import export
from rayrec.inference.model import open_served
from rayrec.ingest.batches import sparse_features
from rayrec.ingest.block_order import BlockOrder
from rayrec.ingest.stream import encode_block
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.workloads.base import TrainConfig
from rayrec.workloads.recsys.scorer import load_scorer
from rayrec.workloads.recsys.scoring import ScoredBlock, _ScoringTask

ROWS = 10_000
TOLERANCE = 2e-6
"""Of a logit: the last digits depend on how many rows are scored at once."""


@pytest.fixture(scope="module")
def log(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    path.write_bytes(b"".join((click_log / "train.txt").read_bytes().splitlines(keepends=True)[:ROWS]))
    return path


@pytest.fixture(scope="module")
def index(log: Path) -> LogIndex:
    index = open_index(log, segment_bytes=1 << 18)
    assert index.rows == ROWS
    assert len(index.segments) > 3
    return index


@pytest.fixture(scope="module")
def preprocessor(index: LogIndex) -> Preprocessor:
    """Of the first segment's rows alone, so that many categories of the others are unknown."""
    preset = RAYREC.replace(min_count=2)
    counts = preset.counting(SCHEMA).empty()
    counts.add_rows(read_segments(index.segments[:1], SCHEMA), 0)
    return make_preprocessor(preset, SCHEMA, counts)


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    model = DLRMConfig(interaction="dot", embedding_dim=8, bottom_mlp=(32, 8), top_mlp=(32, 1))
    config = recipes.criteo_demo()
    return config.replace(workload=config.workload.replace(model=model))


@pytest.fixture(scope="module")
def model(config: TrainConfig, preprocessor: Preprocessor) -> torch.nn.Module:
    """As it is trained, in one piece; its tables' values are large enough to matter."""
    model = whole_model(
        config.workload.model,  # type: ignore[attr-defined]
        preprocessor.num_embeddings,
        seed=3,
        features=SCHEMA.sparse,
    )
    with torch.no_grad():
        for table in model.embeddings.parameters():
            table.mul_(5)
    return model.eval()


@pytest.fixture(scope="module")
def checkpoint(
    model: torch.nn.Module, config: TrainConfig, preprocessor: Preprocessor, tmp_path_factory: pytest.TempPathFactory
) -> str:
    folder = checkpoints.folder_of(str(tmp_path_factory.mktemp("run")), 7)

    def extra_files(target: str) -> None:
        Path(target, "config.yaml").write_text(config.to_yaml())
        preprocessor.save(f"{target}/preprocessor")

    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoints.save(folder, weights, state={}, extra_files=extra_files)
    return folder


@pytest.fixture(scope="module")
def trained(model: torch.nn.Module, preprocessor: Preprocessor, index: LogIndex) -> np.ndarray:
    """The logits as training has them: rows shuffled, encoded in data tasks, sent through Arrow, in TorchRec's batches."""
    order = BlockOrder(tuple(index.parts(0, index.rows)), shuffle="window", seed=5, segments_per_block=3)
    logits = np.full(ROWS, np.nan, np.float32)
    for block in order.blocks(1):
        first_rows = np.concatenate(
            [part.segment.first_row + np.arange(part.segment.rows, dtype=np.int64) for part in block.parts]
        )
        for rows in from_arrow(to_arrow(encode_block(block, 0, block.rows, preprocessor))):
            features = sparse_features(SCHEMA.sparse, rows.ids, len(rows))
            with torch.no_grad():
                found = model.score(torch.from_numpy(rows.dense.copy()), features)  # type: ignore[operator]
            logits[first_rows[block.order()]] = found.numpy()
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1
    return logits


def test_predict(trained: np.ndarray, checkpoint: str, config: TrainConfig, preprocessor: Preprocessor, index: LogIndex) -> None:
    order = BlockOrder(tuple(index.parts(0, index.rows)), shuffle="none", seed=0, segments_per_block=2)
    blocks = [
        ScoredBlock(block, tuple(part.segment.first_row for part in block.parts), has_all_lines=True) for block in order.blocks(0)
    ]
    process = _ScoringTask(
        workload=config.workload,  # type: ignore[arg-type]
        config=config,
        checkpoint=checkpoint,
        preprocessor=None,  # type: ignore[arg-type]
        blocks=None,  # type: ignore[arg-type]
        labelled=True,
        measuring=False,
        batch_rows=1024,
        key_columns=(),
        frequency_columns=(),
        stretches=(),
    )
    scorer = load_scorer(
        config.workload.model,  # type: ignore[attr-defined]
        precision=config.precision,
        checkpoint=checkpoint,
        preprocessor=Preprocessor.load(f"{checkpoint}/preprocessor"),
        device="cpu",
    )
    score = process.block_scorer(preprocessor, blocks, scorer)
    tables = [score(number) for number in range(len(blocks))]
    assert np.concatenate([table.column("row").to_numpy() for table in tables]).tolist() == list(range(ROWS))
    logits = np.concatenate([table.column("logit").to_numpy() for table in tables])
    np.testing.assert_allclose(logits, trained, atol=TOLERANCE)


def test_export_and_http(
    trained: np.ndarray, checkpoint: str, config: TrainConfig, index: LogIndex, log: Path, tmp_path: Path
) -> None:
    out = tmp_path / "export"
    export(checkpoint, str(out), config=config, settings=ExportConfig(parity_path=str(log)))
    model = open_served(str(out))
    raw = read_segments(index.segments, SCHEMA)
    np.testing.assert_allclose(model.score(model.preprocessor.encode(raw)), trained, atol=TOLERANCE)

    app = make_app(model)
    lines = log.read_bytes().splitlines(keepends=True)
    logits: list[float] = []
    unknown = 0
    for start in range(0, ROWS, 1000):
        reply = post(app, b"".join(lines[start : start + 1000]))
        assert reply.status == 200, reply.body
        logits += reply.json()["logits"]
        unknown += sum(reply.json()["unknown"])
    np.testing.assert_allclose(logits, trained, atol=TOLERANCE)
    assert unknown > ROWS  # the ways agree on these, too
    without_label = [line.split(b"\t", 1)[1] for line in lines[:500]]
    reply = post(app, {"rows": [row_object(line) for line in without_label]})
    np.testing.assert_allclose(reply.json()["logits"], trained[:500], atol=TOLERANCE)
    single = post(app, without_label[3])
    np.testing.assert_allclose(single.json()["logits"], trained[3:4], atol=TOLERANCE)
