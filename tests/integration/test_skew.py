"""Training and serving cannot disagree: the same raw rows through every way to a score give the
same score.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders.click_models import Saved, make_app, row_object, save_clicks
from builders.logs import made_from, open_index, unlabelled
from builders.requests import score

from rayrec.data.encoded_rows import from_arrow, to_arrow
from rayrec.data.encoding.preprocessor import Preprocessor
from rayrec.data.encoding.presets import RAYREC
from rayrec.data.logs.extra_columns import ExtraColumns
from rayrec.data.logs.index import LogIndex
from rayrec.data.logs.text_log import read_segments
from rayrec.datasets.criteo import SCHEMA
from rayrec.inference.config import ExportConfig
from rayrec.inference.export.write import export
from rayrec.inference.model import open_served
from rayrec.ingest.block_order import BlockOrder
from rayrec.ingest.stream import encode_block
from rayrec.models.ranking.dlrm import DLRMConfig
from rayrec.workloads.recsys.scorer import load_scorer
from rayrec.workloads.recsys.scoring import ScoredBlock, _ScoringTask, _SliceColumns

ROWS = 10_000
TOLERANCE = 2e-6
"""Of a logit: the last digits depend on how many rows are scored at once."""


@pytest.fixture(scope="module")
def log(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.tsv"
    path.write_bytes(
        b"".join((click_log / "train.txt").read_bytes().splitlines(keepends=True)[:ROWS])
    )
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
    return made_from(read_segments(index.segments[:1], SCHEMA), SCHEMA, RAYREC.replace(min_count=2))


@pytest.fixture(scope="module")
def saved(preprocessor: Preprocessor, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A model whose tables' values are large enough to matter, in one piece, and its checkpoint."""
    model = DLRMConfig(
        interaction="dot",
        embedding_dim=8,
        bottom_mlp=(32, 8),
        top_mlp=(32, 1),
    )
    return save_clicks(
        tmp_path_factory.mktemp("run"),
        model=model,
        preprocessor=preprocessor,
        seed=3,
        scale=5.0,
    )


@pytest.fixture(scope="module")
def trained(saved: Saved, index: LogIndex) -> np.ndarray:
    """The logits as training has them: rows shuffled, encoded in data tasks, sent through Arrow, in
    TorchRec's batches.
    """
    order = BlockOrder(
        tuple(index.parts(0, index.rows)),
        shuffle="window",
        seed=5,
        segments_per_block=3,
    )
    logits = np.full(ROWS, np.nan, np.float32)
    for block in order.blocks(1):
        numbers = np.concatenate(
            [part.segment.first_row + np.arange(part.segment.rows) for part in block.parts]
        )
        for rows in from_arrow(to_arrow(encode_block(block, 0, block.rows, saved.preprocessor))):
            logits[numbers[block.order()]] = saved.logits(rows)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1
    return logits


def test_predict(trained: np.ndarray, saved: Saved, index: LogIndex) -> None:
    order = BlockOrder(
        tuple(index.parts(0, index.rows)),
        shuffle="none",
        seed=0,
        segments_per_block=2,
    )
    first_rows = {
        block: tuple(part.segment.first_row for part in block.parts) for block in order.blocks(0)
    }
    blocks = [ScoredBlock(block, rows, has_all_lines=True) for block, rows in first_rows.items()]
    config: Any = saved.config
    options: dict[str, Any] = {
        "labelled": True,
        "measuring": False,
        "batch_rows": 1024,
        "preprocessor": None,
        "blocks": None,
        "ranking": None,
        "items": None,
        "slices": _SliceColumns((), (), ()),
        "day_slices": (),
        "counts_clipped": False,
        "extra": ExtraColumns(pa.schema([])),
    }
    process = _ScoringTask(
        workload=config.workload,
        config=config,
        checkpoint=str(saved.checkpoint),
        **options,
    )
    scorer = load_scorer(
        config.workload.model,
        checkpoint=str(saved.checkpoint),
        device="cpu",
        precision=config.precision,
        preprocessor=Preprocessor.load(f"{saved.checkpoint}/preprocessor"),
    )
    table = pa.concat_tables(
        map(process.block_scorer(saved.preprocessor, blocks, scorer), range(len(blocks)))
    )
    assert table.column("row").to_pylist() == list(range(ROWS))
    np.testing.assert_allclose(table.column("logit").to_numpy(), trained, atol=TOLERANCE)


def test_export_and_http(
    trained: np.ndarray,
    saved: Saved,
    index: LogIndex,
    log: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "export"
    export(
        str(saved.checkpoint),
        str(out),
        config=saved.config,
        settings=ExportConfig(parity_path=str(log)),
    )
    model = open_served(str(out))
    raw = read_segments(index.segments, SCHEMA)
    np.testing.assert_allclose(model.score(model.preprocessor.encode(raw)), trained, atol=TOLERANCE)

    app = make_app(model)
    lines = log.read_bytes().splitlines(keepends=True)
    answers = [score(app, b"".join(lines[start : start + 1000])) for start in range(0, ROWS, 1000)]
    np.testing.assert_allclose(
        np.concatenate([answer["logits"] for answer in answers]),
        trained,
        atol=TOLERANCE,
    )
    assert sum(sum(answer["unknown"]) for answer in answers) > ROWS  # the ways agree on these, too
    without_label = [unlabelled([line]) for line in lines[:500]]
    objects = score(app, {"rows": [row_object(line) for line in without_label]})
    np.testing.assert_allclose(objects["logits"], trained[:500], atol=TOLERANCE)
    np.testing.assert_allclose(score(app, without_label[3])["logits"], trained[3:4], atol=TOLERANCE)
