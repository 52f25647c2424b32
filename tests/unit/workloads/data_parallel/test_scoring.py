"""Tests of data-parallel scoring: row order, saved weights and exact means."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from builders.faults import flip, raising, rejects
from builders.runs import QUIET
from builders.scored_rows import Net, rows_file, scored, trained
from ranks.checkpoint import same

from rayrec import recipes
from rayrec.checkpoint import Checkpoint
from rayrec.config import InputError
from rayrec.workloads.base import ScoringContext
from rayrec.workloads.data_parallel.scoring import load_model
from rayrec.workloads.scoring import Scoring

Saved = tuple[str, Net]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return trained(tmp_path_factory.mktemp("run"))


def _open(checkpoint: str, path: str, **changes: Any) -> Scoring:
    context: dict[str, Any] = {"config": scored(), "evaluating": False, "batch_rows": None, "console": QUIET, **changes}
    never = raising(AssertionError("opening rows needs no data tasks"))
    return context["config"].workload.open_scoring(ScoringContext(checkpoint=checkpoint, path=path, engine=never, **context))


def _tables(scoring: Scoring) -> list[pa.Table]:
    score = scoring.load("cpu")
    return [score(block) for block in range(scoring.num_blocks)]


def _metrics(scoring: Scoring, rows: int) -> dict[str, float]:
    totals = scoring.make_totals()
    for table in _tables(scoring):
        totals.update(table)
    assert totals.rows == rows
    return totals.compute()


@pytest.mark.parametrize(("rows", "batch", "blocks"), [(1, None, 1), (10, None, 1), (11, None, 2), (1000, 10, 17), (1000, 3, 42)])
def test_rows_are_predicted_once_in_order(saved: Saved, tmp_path: Path, rows: int, batch: int | None, blocks: int) -> None:
    path = rows_file(tmp_path, rows, labelled=False)
    scoring = _open(saved[0], path, batch_rows=batch)
    assert (scoring.rows, scoring.num_blocks) == (rows, blocks)
    table = pa.concat_tables(_tables(scoring))
    assert (table.column("row").to_pylist(), table.column("row").type) == (list(range(rows)), pa.int64())
    with torch.no_grad():
        expected = saved[1](torch.from_numpy(np.load(path)["x"])).numpy()
    logits = np.array(table.column("logits").to_pylist())
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    best = logits.argmax(axis=1)
    assert table.column("best").to_pylist() == best.tolist()
    assert table.column("named").to_pylist() == [f"class {number}" for number in best]


def test_means_cover_all_rows_and_unusable_input_is_rejected(saved: Saved, tmp_path: Path) -> None:
    path = rows_file(tmp_path, 1003)
    arrays = np.load(path)
    with torch.no_grad():
        logits = saved[1](torch.from_numpy(arrays["x"]))
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(arrays["label"]), reduction="none")
    metrics = _metrics(_open(saved[0], path, evaluating=True), 1003)
    assert metrics["loss"] == pytest.approx(losses.double().mean().item(), rel=1e-7)
    assert (metrics["perplexity"], metrics["bits"]) == (pytest.approx(np.exp(metrics["loss"])), 32)
    scoring = _open(saved[0], rows_file(tmp_path, 5), evaluating=True, config=scored().replace(precision="bf16"))
    assert _metrics(scoring, 5)["bits"] == 16
    rejects("has no labels", _open, saved[0], rows_file(tmp_path, 5, labelled=False), evaluating=True)
    rejects("has no rows to score", _open, saved[0], rows_file(tmp_path, 0))


def test_loaded_model_matches_saved(saved: Saved) -> None:
    model = load_model(scored().workload, scored(), checkpoint=saved[0])  # type: ignore[arg-type]
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.outer.weight is model.inner.weight
    assert same(model.state_dict(), saved[1].state_dict())
    assert not any(name.startswith("model.outer.weight") for name in Checkpoint(saved[0]).manifest()["tensors"])


@pytest.mark.parametrize(
    ("part", "module", "message"),
    [
        ("norm", torch.nn.BatchNorm1d(9), r": norm.bias: shape must be \[9\], got \[4\]"),
        ("more", torch.nn.Linear(2, 2), r": more.bias: shape must be \[2\], got absent"),
        ("outer", torch.nn.Linear(4, 4), r": outer.weight: shape must be \[4, 4\], got absent"),
    ],
)
def test_load_model_rejects_other_weights(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, part: str, module: Any, message: str
) -> None:
    config, other = scored(), Net()
    setattr(other, part, module)
    monkeypatch.setattr(type(config.workload), "build_from", lambda *_, **__: other)
    rejects(message, load_model, config.workload, config, checkpoint=saved[0])


def test_damaged_weights_and_click_models_are_rejected(tmp_path: Path) -> None:
    checkpoint, _ = trained(tmp_path)
    chunk = Checkpoint(checkpoint).manifest()["tensors"]["model.inner.weight"]["chunks"][0]
    flip(f"{checkpoint}/{chunk['file']}", chunk["start"])
    rejects("damaged, the checksum", load_model, scored().workload, scored(), checkpoint=checkpoint)
    config = recipes.criteo_demo()
    with pytest.raises(InputError, match=r"recipe criteo_demo cannot be exported. Use `rayrec predict`"):
        config.workload.export(config, checkpoint="run", out=str(tmp_path))
