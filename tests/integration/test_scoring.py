"""Rows of a custom workload, in this process and on Ray: evaluated, predicted, and rejected in one line."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from builders.faults import rejects
from builders.runs import QUIET
from builders.scored_rows import rows_file, scored, trained

import rayrec

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_rows_are_evaluated_and_predicted(local_ray: None, tmp_path: Path) -> None:
    checkpoint, model = trained(tmp_path / "run")
    path = rows_file(tmp_path, 333)
    arrays = np.load(path)
    with torch.no_grad():
        logits = model(torch.from_numpy(arrays["x"]))
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(arrays["label"]), reduction="none")
    here = {"recipe": scored, "cluster_address": "none", "console": QUIET}
    told = rayrec.evaluate(str(tmp_path / "run"), path, **here)
    assert told.pop("loss") == pytest.approx(losses.double().mean().item(), rel=1e-6)
    assert told.pop("perplexity") == pytest.approx(np.exp(losses.double().mean().item()), rel=1e-6)
    assert told == {"bits": 32.0, "rows": 333, "checkpoint": checkpoint}

    out = tmp_path / "out"
    told = rayrec.predict(checkpoint, path, out=str(out), batch_rows=7, **here)
    assert (told["rows"], told["out"], told["checkpoint"]) == (333, str(out), checkpoint)
    table = pq.read_table(out)
    assert table.column_names == ["row", "logits", "best", "named"]
    assert table.column("row").to_pylist() == list(range(333))
    np.testing.assert_allclose(np.array(table.column("logits").to_pylist()), logits.numpy(), atol=1e-6)
    rows = rayrec.predict(checkpoint, path, recipe=scored, console=QUIET).take_all()
    assert [row["best"] for row in rows] == table.column("best").to_pylist()


def test_errors_are_one_line(tmp_path: Path) -> None:
    checkpoint, _ = trained(tmp_path / "run")
    rows = rows_file(tmp_path, 20)
    rejects("no recipe 'scored'", rayrec.evaluate, checkpoint, rows, console=QUIET)
    for options, told in (
        ({"batch_row": 3}, "no such field; did you mean 'batch_rows'"),
        ({"batch_rows": 0}, "batch_rows: must be at least 1, got 0"),
        ({"slice_by": ("day",), "confidence": 0.9}, "does not predict clicks, which slice_by and confidence need"),
    ):
        rejects(told, rayrec.evaluate, checkpoint, rows, recipe=scored, **options, console=QUIET)
